"""Federated learning with Flower's own programs on the hosts of a pool.

federation.py  `taas.federation`: a run with one rank on each host (kernel)
rank.py        the function that this run calls on its ranks
programs.py    start and end Flower's programs on a rank's host
flower.py      our code in Flower's programs: a SuperLink that requires a key, and the two apps
executor.py    Flower's SuperExec, which starts apps as forks
"""
