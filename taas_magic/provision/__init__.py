"""Hosts that have nothing of ours: what is there, what is missing, and how it gets there."""
