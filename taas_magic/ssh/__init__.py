"""Hosts that are reached by SSH alone: who they are, the way to them, and what travels on it."""
