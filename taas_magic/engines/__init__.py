"""How pools get hosts, and the process that keeps a pool."""
