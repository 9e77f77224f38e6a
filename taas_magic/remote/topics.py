"""How the events of a run are addressed, and what an agent answers to."""

CALL_HELLO = "taas_hello"
CALL_START = "taas_start"
CALL_STOP = "taas_stop"


def topic(run_id: str) -> str:
    """The Dask topic that carries a run's events."""
    return f"taas-{run_id}"
