"""Farms of jobs (`taas.farm(...)`). Each farm has a Dask cluster of its own on hosts of its pools.

    kernel       farm.py: submit, map, results; table.py: the farm's state as text and HTML
      farm       process.py: the farm's process, a Dask scheduler; starts nodes as runs of the pool
        node     node.py: runs jobs on one host; worker.py: the node's Dask worker
          job    job.py: a process that was forked for a job
    messages.py  the messages between these processes

The pools themselves use other Dask clusters. Jobs have no key to the clusters of the pools.
"""
