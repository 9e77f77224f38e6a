"""What runs on hosts: supervisor, agent, forkserver, ranks, fetchers.

supervisor.py  starts the agent and outlives it; scratch.py: the host's folder under TMPDIR
agent.py       starts the forkserver, then joins the pool (member.py) under a lease (lease.py)
host_run.py    a run on this host: attempts, ranks, what the controller says (spec.py, topics.py)
watch.py       judges the ranks; stacks.py: where they stand; output.py: what they print
rank.py        the process that runs the cell (tracebacks.py, results.py, feeding.py, cell_main.py)
rendezvous.py  where ranks meet: torch's store, and horovod's server
forkserver.py  starts ranks and fetchers from a process that has torch imported
system.py      GPUs, network addresses and processes of this host
fetchers.py    a run's fetchers on this host; fetcher.py: such a process (fetcher_spec.py)
files.py       the run's folder and the project store here
vehicle.py     brings an agent to a plain Dask worker's host
"""
