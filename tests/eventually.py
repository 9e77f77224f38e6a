"""`eventually`, with which tests wait for a condition."""

import time
from collections.abc import Callable
from contextlib import suppress

WITHIN_S = 100.0


def eventually(
    holds: Callable[[], object],
    otherwise: str = "the condition does not hold",
    within_s: float = WITHIN_S,
    every_s: float = 0.02,
) -> None:
    """Wait until `holds()` returns a true value. An OSError counts as false.

    Args:
        holds: The condition.
        otherwise: The message of the AssertionError if the time is over.
        within_s: Seconds after which the test fails.
        every_s: Seconds between two checks.
    """
    deadline = time.monotonic() + within_s
    while True:
        with suppress(OSError):
            if holds():
                return
        assert time.monotonic() < deadline, f"{otherwise} after {within_s:g} s"
        time.sleep(every_s)
