"""Events for tests, from what their lines in the journal would say (docs/events.md)."""

import json
from typing import Any

import msgspec

from taas_magic import messages
from taas_magic.messages import Event, Failure

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


def line_of(event: Event) -> Line:
    """Return what the journal has of an event."""
    line: Line = json.loads(messages.encode(event))
    return line
