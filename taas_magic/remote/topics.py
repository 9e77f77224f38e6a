"""What the keeper and the agents say to each other, by name.

Calls of the keeper and their answers, events and beats are messages in the one stream that an agent
opened when it joined; so nobody ever connects to a host, and messages keep their order.
"""

CALL = "taas_call"
ANSWER = "taas_answer"
EVENT = "taas_event"
BEAT = "taas_beat"
HEARD = "taas_heard"

AGENT = "taas_agent"
"""What an agent says of itself when it joins; others that join are no hosts of the pool."""

POOL_TOPIC = "taas-pool"
"""The Dask topic that says what becomes of the hosts that kernels wait for."""

CALL_HELLO = "taas_hello"
CALL_FACTS = "taas_facts"
CALL_START = "taas_start"
CALL_AGAIN = "taas_again"
CALL_STOP = "taas_stop"
CALL_END = "taas_end"

ASK_STORE = "taas_store"


def topic(run_id: str) -> str:
    """The Dask topic that carries a run's events."""
    return f"taas-{run_id}"
