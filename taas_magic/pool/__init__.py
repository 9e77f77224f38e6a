"""The pool's process, which gets hosts and controls runs; and the kernel's client of this process.

client.py      the kernel's side: connect to the process, launch runs, receive events
process.py     the pool's process and its folder: how a kernel finds, starts and ends the process
address.py     the file by which a kernel finds the pool's process
gate.py        the scheduler and its port: authentication of peers, checks of their messages
controller.py  starts, follows and ends runs; writes their journals; counts the hosts' GPU hours
runs.py        the ranks of a run in all its attempts, and its fetchers, on all their hosts
restarts.py    decides whether fetchers that have ended start again
files.py       responds to hosts' requests for files of the run folder and the project store
hosts.py       the pool's hosts: membership, leases, requests to their agents
detached.py    does for detached runs what the kernel does for the runs that it owns
"""
