"""Counts the user's interrupts instead of being torn by them."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """While it is entered, SIGINT is counted and wakes the waiting thread; nothing is raised.

    A KeyboardInterrupt that may arrive between any two instructions would lose an event here and a
    process there. Signals reach the main thread only: in another thread (a subshell of the kernel)
    nothing is installed, and `count` stays 0.

    Attributes:
        count: How often the user interrupted.
        wake: Called on every interrupt; must be safe in a signal handler.
    """

    def __init__(self) -> None:
        self.count = 0
        self.wake: Callable[[], None] = lambda: None
        self._previous: Any = None
        self._installed = False

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
            self._installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.wake()

    def check(self) -> None:
        """Raises KeyboardInterrupt if the user has interrupted.

        Raises:
            KeyboardInterrupt: The user has.
        """
        if self.count:
            raise KeyboardInterrupt
