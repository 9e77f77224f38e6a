"""Engines, which get hosts for a pool.

base.py        the base classes, which define what an engine must do
local.py       this machine as one host or as several hosts
ssh.py         hosts that the user can log in to by SSH
dask_class.py  hosts that a Dask cluster class allocates: Slurm, PBS, clouds
keys.py        certificates of a pool, its kernels and its hosts
"""
