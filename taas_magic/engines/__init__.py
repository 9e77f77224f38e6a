"""Where a pool's hosts come from. base.py is the contract.

local.py       this machine (local_host.py, supervisors.py)
ssh.py         hosts that let the user in (ssh_cluster.py)
dask_class.py  whatever a Dask cluster class gets: Slurm, PBS, clouds (batch.py asks squeue, qstat)
keys.py        certificates of a pool, its kernels and its hosts
"""
