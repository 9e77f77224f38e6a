"""Waits until something holds, and no longer."""

import time
from collections.abc import Callable
from contextlib import suppress

WITHIN_S = 100.0


def eventually(holds: Callable[[], object], within_s: float = WITHIN_S) -> None:
    """Wait until something holds; a file that goes while it is looked at is looked for again."""
    deadline = time.monotonic() + within_s
    while True:
        with suppress(OSError):
            if holds():
                return
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)
