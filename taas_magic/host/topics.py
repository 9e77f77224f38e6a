"""What the controller and the agents say to each other, by name.

Calls of the controller and their answers, events and beats are messages in the one stream that an
agent opened when it joined; so nobody ever connects to a host, and messages keep their order.
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

POOL_BEAT = "taas-pool-beat"
"""The Dask topic by which the pool's process tells its kernels that it lives."""

CALL_HELLO = "taas_hello"
CALL_FACTS = "taas_facts"
CALL_START = "taas_start"
CALL_AGAIN = "taas_again"
CALL_STOP = "taas_stop"
CALL_END = "taas_end"
CALL_FETCH = "taas_fetch"
CALL_END_FETCH = "taas_end_fetch"
CALL_PLACE = "taas_place"
CALL_STACKS = "taas_stacks"

ASK_STORE = "taas_store"

ASK_HOST = "taas_host"
"""What a vehicle asks for: the name and the key of the agent that it is to bring."""


def topic(owner: str) -> str:
    """The Dask topic that carries the events of a kernel's runs, each with its run's id.

    One for each kernel, not for each run: neither Dask's client nor its scheduler forgets a topic.

    Args:
        owner: The id of the kernel's Dask client.
    """
    return f"taas-{owner}"


def share_id(run_id: str) -> str:
    """What a run's fetchers are known by, apart from its ranks: they begin before them."""
    return f"{run_id}.data"
