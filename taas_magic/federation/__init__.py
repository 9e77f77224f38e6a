"""Federated learning with Flower's own programs on the hosts of a pool.

federation.py  `taas.federation`: a run with one rank on each host (kernel)
member.py      a rank of that run, which starts and ends Flower's programs on its host
flower.py      our code in those programs: a SuperLink that requires a key, and the two apps
executor.py    Flower's SuperExec, which starts apps as forks
"""
