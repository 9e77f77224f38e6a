"""What happened in a run: on disk (folder.py), added up (analysis.py), as pictures (plot.py)."""
