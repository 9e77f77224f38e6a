"""What happened in a run: on disk (folder.py), added up and drawn (analysis.py)."""
