"""A farm of jobs: `taas.farm(...)`, carried by a Dask cluster of its own on a pool's hosts.

    kernel       farm.py: submit, map, results; table.py: how it stands, as text and HTML
      farm       process.py: the farm's process, a Dask scheduler; gets nodes as runs of the pool
        node     node.py: a run of one rank on one host, and its jobs' processes; worker.py
          job    job.py: a process that was forked for a job
    terms.py     what they tell each other

The pool's control plane is another cluster, which a job has no key to.
"""
