"""Helpers that create events from lines of the journal (docs/events.md)."""

import json
from pathlib import Path
from typing import Any

import msgspec

from taas_magic import messages
from taas_magic.display.head import RunState
from taas_magic.messages import Event, Failure
from taas_magic.plan import HostPlan, Plan

Line = dict[str, Any]
"""An event as it stands in the journal: a JSON object."""


def parsed(line: Line) -> Event:
    """Return the event of a journal line, in which floats may stand for integers.

    If the line lacks the time or the host, the event gets time 0 and host gpu1.
    """
    whole: Event = msgspec.convert(
        {"time": 0.0, "host": "gpu1", **line}, messages.AnyEvent, strict=False, str_keys=True
    )
    return whole


def event(kind: str, host: str = "gpu1", **values: Any) -> Event:
    """Return an event of the given kind with these fields."""
    return parsed({"kind": kind, "host": host, **values})


def failure(**values: Any) -> Failure:
    """Return a `Failure` with these fields."""
    return msgspec.convert(values, Failure)


def new_state(world_size: int = 1, n_hosts: int = 1, **values: Any) -> RunState:
    """Return the state of a run that has just started.

    Args:
        values: Fields of the run's plan or of its `RunState`.
    """
    named = {name: values.pop(name) for name in list(values) if name in Plan.__struct_fields__}
    hosts = (HostPlan(0, 0, 1, 1),) * n_hosts
    plan = Plan(**{"run_id": "r1", "world_size": world_size, "hosts": hosts, **named})
    return RunState(plan, **{"run_dir": Path("/runs/r1"), **values})


def line_of(event: Event) -> Line:
    """Return the journal line of an event, parsed."""
    line: Line = json.loads(messages.encode(event))
    return line
