"""The processes of a host: supervisor, agent, forkserver, ranks, fetchers.

supervisor.py  starts the agent, ends all that it leaves; owns the host's folder under TMPDIR
agent.py       starts the forkserver, then joins the pool (member.py) under a lease
spec.py        settings of a share of a run; messages between pool and agents
host_run.py    a share of a run on this host: its ranks in all attempts, or its fetchers
fetcher.py     the process of a fetcher
watch.py       decides whether ranks have ended, failed or hang
stacks.py      stack reports of ranks and fetchers; detection of ranks without progress
output.py      output of the ranks
rank.py        the process that runs the cell (tracebacks.py, results.py, cell_main.py)
link.py        the pipes between a rank and its agent
rendezvous.py  the rendezvous of ranks: torch's store, and horovod's server
forkserver.py  starts ranks and fetchers as forks of a process that has torch imported
activity.py    distinguishes a slow start of a process from one that is stuck
system.py      network addresses and processes of this host
files.py       transfer of the run folder and the project store to and from the host
vehicle.py     starts a supervisor on the host of a plain Dask worker
metrics.py     metrics that ranks log by `taas.log`
"""
