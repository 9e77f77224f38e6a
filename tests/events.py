"""Events for tests, from what their lines in the journal would say (docs/events.md)."""

import json
from pathlib import Path
from typing import Any

import msgspec

from taas_magic import messages
from taas_magic.display.head import RunState
from taas_magic.messages import Event, Failure
from taas_magic.plan import HostPlan, Plan

Line = dict[str, Any]
"""An event as a line of the journal has it."""


def parsed(line: Line) -> Event:
    """Return the event of a line; whole numbers may be floats there."""
    whole: Event = msgspec.convert(
        {"time": 0.0, "host": "gpu1", **line}, messages.AnyEvent, strict=False, str_keys=True
    )
    return whole


def event(kind: str, host: str = "gpu1", **values: Any) -> Event:
    """Return an event of a kind."""
    return parsed({"kind": kind, "host": host, **values})


def failure(**values: Any) -> Failure:
    """Why a rank failed."""
    return msgspec.convert(values, Failure)


def new_state(world_size: int = 1, n_hosts: int = 1, **values: Any) -> RunState:
    """Return the state of a run that has just begun; values are fields of its plan, or of it."""
    named = {name: values.pop(name) for name in list(values) if name in Plan.__struct_fields__}
    hosts = (HostPlan(0, 0, 1, 1),) * n_hosts
    plan = Plan(**{"run_id": "r1", "world_size": world_size, "hosts": hosts, **named})
    return RunState(plan, **{"run_dir": Path("/runs/r1"), **values})


def line_of(event: Event) -> Line:
    """Return what the journal has of an event."""
    line: Line = json.loads(messages.encode(event))
    return line
