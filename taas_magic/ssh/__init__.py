"""Hosts that are reached by SSH alone.

config.py    the name of a host and OpenSSH's files -> `Target`, how it is reached
keys.py      which host key is believed, which keys are offered, and the words of each refusal
connect.py   `connect(target)` -> `Connection`: commands, files, a port that leads back here
"""
