"""How a host asks the desk: whatever carries the question, it waits for the answer."""

import time
from typing import Any, Protocol

from taas_magic.travel.chunks import Pace


class Ask(Protocol):
    """Blocks until the desk has answered; any thread may call it."""

    def __call__(self, what: str, **arguments: Any) -> Any: ...


def ask_at_pace(ask: Ask, pace: Pace, what: str, **arguments: Any) -> Any:
    """Asks, and lets the time that it took decide how much is asked next."""
    began = time.monotonic()
    answer = ask(what, **arguments)
    pace.took(time.monotonic() - began)
    return answer
