"""A pool: a process with Dask's scheduler and the controller of runs, and the kernel's way to it.

client.py      the kernel's side: launch a run, listen
process.py     the pool's process: found, started, ended by a kernel; what it does
gate.py        its scheduler, its port, and who may say what
controller.py  owns runs, journals, and the hosts' cost
runs.py        a run's ranks, attempt by attempt, and its fetchers, on their hosts
hosts.py       the hosts as the process knows them
"""
