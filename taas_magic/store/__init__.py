"""The project store: rank 0 alone may write to it, and hosts that do not share it have a copy.

rule.py      which folder it is, whether it can be used, which run owns it
guard.py     holds a rank to the rule, by mounts, Landlock, or Python alone
redirect.py  what Python's writes of other ranks do instead
libraries.py the same for what libraries write from C, C++ and Rust
receipt.py   what a run did to it
publish.py   files that appear whole or not at all

Hosts that share no file system with the notebook have a mirror. Before a run's ranks start, what
changed travels there; while they run, what rank 0 has closed travels back at once. Neither side
trusts the other's names or bytes.

tree.py      a folder that is reached by descriptors alone, and how a file arrives in it
manifest.py  what travels, what never does, and how it is packed
ownership.py which files are the user's, and which may come from a host
desk.py      the notebook's side: answers a run's hosts
mirror.py    a host's copy, brought up to date
outbound.py  what is written in it, sent back
"""
