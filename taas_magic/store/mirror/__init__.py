"""The project store on hosts that share no file system with the notebook.

Before a run's ranks start, what changed travels to a mirror on each host; while they run, what rank
0 has closed travels back at once. Neither side trusts the other's names or bytes.

    names.py      which paths may travel; pure
    ignore.py     which should not (`.taasignore`)
    tree.py       a folder that is reached by descriptors alone, so that no link leads out of it
    arrival.py    a file that appears in a tree whole and verified, or not at all
    manifest.py   what lies in a tree, by hash          hashes.py   those hashes, remembered
    difference.py what must travel so that one tree becomes like another; pure
    chunks.py     files cut and packed for the way; pure
    same.py       whether a host shares the store after all
    desk.py       the notebook's side: answers a run's hosts
    mirror.py     a host's copy                         inbound.py  brings it up to date
    inotify.py    what changes in it                    outbound.py  sends that back
    news.py       what other hosts sent back, brought into this host's mirror

All of it is free of any transport: a host asks by a function, `Ask`.
"""
