"""What the agents are called that Dask's plain workers bring to their hosts."""

import secrets

_MARK = "@"


def agent_name(vehicle: object) -> str:
    """A name for the agent that a vehicle brings.

    Another one each time: a job that the batch system has started again has the name of the old
    one, whose agent may still be known.
    """
    return f"{vehicle}{_MARK}{secrets.token_hex(4)}"


def vehicle_of(agent: object) -> str:
    """The name of the vehicle that brought an agent; "" for what is no such agent."""
    return str(agent).rpartition(_MARK)[0]
