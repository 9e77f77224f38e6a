"""The processes of a host: supervisor, agent, forkserver, ranks, fetchers.

supervisor.py  starts the agent; ends all processes of the host when the agent ends
agent.py       starts the forkserver, then joins the pool
agent_worker.py  the agent as a worker of the pool's Dask cluster; the host's lease
spec.py        descriptions of a run and its shares; messages between pool and agents
host_run.py    a share of a run on this host: its ranks in all attempts, or its fetchers
host_session.py  the ranks of a session on this host, and the cells that they run
fetcher.py     the process of a fetcher
feeding.py     connects a rank's registered loaders to fetchers or to the rank's own data servers
watch.py       the state of each rank; decides when the run is over on this host
stacks.py      stack reports of ranks and fetchers; detection of ranks without progress
usage.py       reports of the processors and memory that ranks use
output.py      reads the ranks' output and messages
rank.py        the process that runs the work
shell.py       the IPython shell of a rank
heartbeat.py   heartbeats of a rank: its stack, collectives, counts and metrics
outcome.py     sends the results or the failure of a rank's work to the agent
session_cells.py  runs the cells of a session on a rank
assignments.py  finds the names that a session's cell has assigned or deleted
tracebacks.py  turns exceptions and stacks of a rank into text for the user
results.py     sends the values of `--out` from ranks to the notebook
cell_main.py   the main module of child processes that a cell spawns
prompt.py      the loop in which a session's rank waits for cells and runs them
keyboard.py    lines that the user types for a rank: `input()` and debuggers
debugger.py    debuggers of a rank: `breakpoint()`, `%taas debug` and debugpy
process_groups.py  gives each process group of a session its own keys in the key-value store
ddp_groups.py  keeps process groups of DDP models, so that freeing a model cannot hang
lone_training.py  reports that each rank trained a model of its own, without a process group
variables.py   short descriptions of the variables of a session's rank
link.py        the pipes between a rank and its agent
rendezvous.py  the rendezvous of ranks: torch's store, and horovod's server
forkserver.py  starts ranks and fetchers as forks of a process that has torch imported
activity.py    decides whether a process that starts slowly is stuck
system.py      network addresses and processes of this host
files.py       copies files of the run folder and the project store to and from the host
vehicle.py     starts a supervisor on a host of a Dask cluster class
metrics.py     metrics that ranks log by `taas.log`
lightning.py   passes the scalars of Lightning's `self.log` to `taas.log`
profile.py     records the first steps of a rank by torch.profiler, for `--profile`
"""
