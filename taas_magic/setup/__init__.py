"""Hosts that may have nothing of ours: what is there, what is missing, how it gets there.

facts.py     asks hosts, by ../probe.py, and says what is wrong with them for a run
install.py   which packages a host lacks, and bringing them into its user's cache
"""
