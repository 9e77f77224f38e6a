"""The journal of a run: its folder (folder.py), reading (reader.py), sums and plots (analysis.py).

metrics.py has the scalars that ranks log.
"""
