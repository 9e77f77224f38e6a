"""Connect to hosts by SSH.

config.py    reads OpenSSH's files: a host's name -> `SshTarget`; checks host keys, offers user keys
connect.py   `connect(target)` -> `Connection`: runs commands, writes files, forwards ports
"""
