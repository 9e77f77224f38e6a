"""A pool: a process with Dask's scheduler and the controller of runs, and the kernel's way to it.

client.py      the kernel's side: find or start the process, launch a run, listen
process.py     the pool's process; gate.py: its scheduler, its port, and who may say what
controller.py  owns runs, journals, and the hosts' cost
runs.py        a run on its hosts, attempt by attempt; fetchers.py: its fetchers
verdict.py     what follows when hosts have reported; pure
hosts.py       the hosts as the process knows them
files.py       run folder and store for hosts that do not see them
"""
