"""Functions with which tests wait for a condition."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

WITHIN_S = 100.0

T = TypeVar("T")


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


def left_after(left: Callable[[], T], within_s: float = WITHIN_S, every_s: float = 0.1) -> T:
    """Wait until `left()` returns nothing, or until the time is over; return its last value.

    Args:
        left: Returns what is still there, such as a list of processes.
        within_s: Maximum seconds to wait.
        every_s: Seconds between two calls.
    """
    deadline = time.monotonic() + within_s
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(every_s)
    return found
