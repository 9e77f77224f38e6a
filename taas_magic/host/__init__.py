"""What runs on hosts: supervisor, agent, forkserver, ranks, fetchers.

supervisor.py  starts the agent and outlives it; has the host's folder under TMPDIR
agent.py       starts the forkserver, then joins the pool (member.py) under a lease
spec.py        what a host is told of a run; the words between pool and agents
host_run.py    a share of a run on this host: its ranks, attempt by attempt, or its fetchers
fetcher.py     a fetcher's process
watch.py       judges the ranks; stacks.py: where they stand; output.py: what they print
rank.py        the process that runs the cell (tracebacks.py, results.py, cell_main.py)
link.py        a rank's pipes to its agent
rendezvous.py  where ranks meet: torch's store, and horovod's server
forkserver.py  starts ranks and fetchers from a process that has torch imported
system.py      GPUs, network addresses and processes of this host
files.py       the run's folder and the project store here, and how the pool answers for them
vehicle.py     brings an agent to a plain Dask worker's host
"""
