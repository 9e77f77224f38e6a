"""A condition that costs next to nothing to notify as long as nobody waits for it."""

import threading
from collections.abc import Callable


class Bell:
    """Whoever waits or rings holds the lock.

    Args:
        lock: What is between those who wait and those who ring.
    """

    def __init__(self, lock: "threading.RLock") -> None:
        self._condition, self._waiting = threading.Condition(lock), 0

    def ring(self) -> None:
        """Wake all who wait."""
        if self._waiting:
            self._condition.notify_all()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the next ring."""
        self._waiting += 1
        try:
            self._condition.wait(timeout_s)
        finally:
            self._waiting -= 1

    def wait_for(self, is_there: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until a ring after which something is there; returns whether it is."""
        self._waiting += 1
        try:
            return self._condition.wait_for(is_there, timeout_s)
        finally:
            self._waiting -= 1
