"""Counts the user's interrupts instead of being torn by them."""

import contextlib
import contextvars
import functools
import queue
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn, TypeVar

from taas_magic.errors import interrupted

LEAVE_S = 1.2
"""How long something may still take that the user does not wait for any more."""

MEANWHILE_S = 0.25
"""How often what came meanwhile is shown to a user who waits."""

T = TypeVar("T")


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

    def attend(
        self,
        work: Callable[[], T],
        patience: int = 1,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> T:
        """Does what may wait for another process, in a thread, and returns what it returns.

        Args:
            work: What to do; it goes on by itself when the user does not wait for it.
            patience: At how many interrupts that is.
            meanwhile: Called in this thread every MEANWHILE_S until then.

        Raises:
            Exception: What the work raised.
            KeyboardInterrupt: The user has interrupted.
        """
        news: queue.SimpleQueue[Callable[[], T] | None] = queue.SimpleQueue()
        self.wake = lambda: news.put(None)
        context = contextvars.copy_context()
        doing = threading.Thread(
            target=context.run, args=(_do, work, news.put), name="taas-attend", daemon=True
        )
        doing.start()
        done: Callable[[], T] | None = None
        while done is None and self.count < patience:
            try:
                done = news.get(timeout=MEANWHILE_S)
            except queue.Empty:
                meanwhile()
        if done is None:
            done = _soon(news)
        if done is None:
            raise KeyboardInterrupt
        return done()

    def check(self) -> None:
        """Raises KeyboardInterrupt if the user has interrupted.

        Raises:
            KeyboardInterrupt: The user has.
        """
        if self.count:
            raise interrupted("Stopped by you before the ranks started; nothing was returned.")


def _do(work: Callable[[], T], put: Callable[[Callable[[], T]], None]) -> None:
    """Does something, and puts what gives its result, or raises its error."""
    try:
        result = work()
    except Exception as error:
        put(functools.partial(_raise, error))
    else:
        put(lambda: result)


def _raise(error: Exception) -> NoReturn:
    raise error


def _soon(news: "queue.SimpleQueue[Callable[[], T] | None]") -> Callable[[], T] | None:
    """What comes of work that the user does not wait for, if that is within LEAVE_S."""
    until = time.monotonic() + LEAVE_S
    while (left_s := until - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            if (done := news.get(timeout=left_s)) is not None:
                return done
    return None


Tell = Callable[[list[str]], None]


class Background:
    """Work in a thread of its own that the user may stop waiting for; it goes on then.

    Args:
        work: What to do; it is given what tells the waiting user how it stands, in lines.
    """

    def __init__(self, work: Callable[[Tell], None]) -> None:
        self._work = work
        self._error: Exception | None = None
        self._news: queue.SimpleQueue[list[str] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="taas-background", daemon=True)
        self.thread.start()

    def wait(self, interrupts: Interrupts, say: Callable[[str], None]) -> None:
        """Returns when the work is done.

        Args:
            interrupts: The user's.
            say: Called with each line that is told, once.

        Raises:
            Exception: What the work raised.
            KeyboardInterrupt: The user has interrupted.
        """
        interrupts.wake = lambda: self._news.put(None)
        said: set[str] = set()
        while not interrupts.count and (news := self._news.get()) is not None:
            for line in news:
                if line not in said:
                    said.add(line)
                    say(line)
        interrupts.check()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work(self._news.put)
        except Exception as error:
            self._error = error
        finally:
            self._news.put(None)
