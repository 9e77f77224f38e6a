"""Federated learning by Flower: its own programs, on the hosts of a pool.

federation.py  `taas.federation`: a run with one rank a host (kernel)
member.py      a rank of that run: Flower's programs of its host
flower.py      what those programs load of ours: a SuperLink that asks for a key, the two apps
"""
