"""Hosts that are reached by SSH alone.

config.py    OpenSSH's files: the name of a host -> `Target`; its key, which keys it is offered
connect.py   `connect(target)` -> `Connection`: commands, files, a port that leads back here
"""
