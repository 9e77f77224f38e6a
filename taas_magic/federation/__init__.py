"""Federated learning by Flower: its own programs, on the hosts of a pool.

federation.py  `taas.federation`: a run with one rank a host (kernel)
terms.py       what all of them agree on
member.py      a rank of that run: Flower's programs of its host
superlink.py   Flower's SuperLink, whose Control API asks for the run's key
apps.py        the notebook's ServerApp and ClientApp, as Flower's processes load them
"""
