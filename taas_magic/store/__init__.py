"""The project store of a run. Only rank 0 may write to the store.

rule.py      chooses the store, checks that it is usable, and locks it for the run that owns it
guard.py     makes the store read-only for a rank, by mounts, Landlock, or Python alone
redirect.py  redirects the Python file writes of ranks other than 0
libraries.py redirects file writes of libraries in C, C++ and Rust
receipt.py   records what a host's ranks wrote, and makes the receipt of a run
publish.py   atomic file writes, and `taas.save`

A host that shares no file system with the notebook has a mirror: a copy of the store. The following
modules copy files between the store and the mirrors. The notebook's side and the hosts do not trust
each other: both check the names and bytes that they receive.

tree.py      access to files below a folder without following links, and atomic writing of files
ignore.py    rules for which files are copied to hosts, or accepted from hosts
manifest.py  lists the files to copy, with their hashes
requests.py  the messages by which a host requests files, or sends files back
ownership.py decides which files belong to the user, and which files a host may send
server.py    the notebook's side: responds to the requests of a run's hosts
mirror.py    the host's side: updates a host's copy
outbound.py  the host's side: sends files written in the mirror back to the store
"""
