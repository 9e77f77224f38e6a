"""Where a pool's hosts come from. base.py is the contract.

local.py       this machine
ssh.py         hosts that let the user in
dask_class.py  whatever a Dask cluster class gets: Slurm, PBS, clouds
keys.py        certificates of a pool, its kernels and its hosts
"""
