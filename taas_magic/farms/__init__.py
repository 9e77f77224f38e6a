"""Farms of jobs (`taas.farm(...)`), each on a Dask cluster of its own on the hosts of a pool.

    kernel       farm.py: submit, map, results; table.py: the farm's state as text and HTML
      farm       process.py: the farm's process, a Dask scheduler; starts nodes as runs of the pool
        node     node.py: a run of one rank on one host, and its jobs' processes; worker.py
          job    job.py: a process that was forked for a job
    messages.py  the messages between these processes

The pool's control plane is a different Dask cluster. Jobs have no key to it.
"""
