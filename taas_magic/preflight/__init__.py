"""Whether hosts are fit for a run, found out before it starts, and what to do if not."""
