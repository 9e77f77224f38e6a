"""Functions with which tests wait for a condition."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

HUNG_S = 600.0
"""Seconds of waiting after which a test counts as hung; a slow machine needs much less."""

LONGEST_PAUSE_S = 0.5
"""Maximum seconds between two checks, however long a check takes."""

T = TypeVar("T")


def eventually(
    holds: Callable[[], object],
    otherwise: str = "the condition does not hold",
    within_s: float = HUNG_S,
    every_s: float = 0.02,
) -> None:
    """Wait until `holds()` returns a true value. An OSError counts as false.

    The pause between two checks grows with the duration of a check (`pause_s`).

    Args:
        holds: The condition.
        otherwise: The message of the error if the time is over.
        within_s: Maximum seconds to wait.
        every_s: Minimum seconds between two checks.

    Raises:
        AssertionError: The condition did not hold in time.
    """
    deadline = time.monotonic() + within_s
    while True:
        began = time.monotonic()
        with suppress(OSError):
            if holds():
                return
        now = time.monotonic()
        assert now < deadline, f"{otherwise} after {within_s:g} s"
        time.sleep(pause_s(now - began, every_s))


def pause_s(took_s: float, every_s: float) -> float:
    """Return the seconds to wait before the next check.

    The pause is four times as long as the last check, at most `LONGEST_PAUSE_S`, and at least
    `every_s`. The pause leaves the processor to the processes for which the test waits.

    Args:
        took_s: Seconds that the last check took.
        every_s: Minimum seconds between two checks.
    """
    return max(every_s, min(4 * took_s, LONGEST_PAUSE_S))


def left_after(left: Callable[[], T], within_s: float = HUNG_S, every_s: float = 0.1) -> T:
    """Wait until `left()` returns nothing, or until the time is over; return its last value.

    Args:
        left: Function that returns what is still there, such as a list of processes.
        within_s: Maximum seconds to wait.
        every_s: Seconds between two calls.
    """
    deadline = time.monotonic() + within_s
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(every_s)
    return found
