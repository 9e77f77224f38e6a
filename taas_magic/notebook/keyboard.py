"""Lines of input that the user types for the ranks of a run.

A rank that calls `input()`, `breakpoint()` or a debugger sends an `InputRequested` event. The
kernel then asks the user as for any other cell: in the notebook's input box, or in the terminal.
One rank at a time has the keyboard.
"""

import _thread
import builtins
import getpass
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from taas_magic.messages import InputRequested

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

KEEP_S = 1.0
"""Seconds after an answer in which only the same rank can ask again, as a debugger does."""

LINE_LIMIT_CHARS = 10_000
"""Length limit of a line, which a pipe must take at once."""

_LOOK_S = 0.25


class InputQueue:
    """The ranks' requests for input that are not answered yet."""

    def __init__(self) -> None:
        self._waiting: dict[int, InputRequested] = {}
        self._last_rank = -1
        self._answered_at = float("-inf")

    def add(self, request: InputRequested) -> None:
        """Add a request. It replaces an earlier one of the same rank, which was interrupted."""
        self._waiting[request.rank] = request

    def pop_next(self, now: float) -> InputRequested | None:
        """Return the request to answer now, and remove it; None if there is none yet.

        The rank that was answered last comes first. For `KEEP_S`, the others wait for it.

        Args:
            now: Time in seconds of the clock of `record_answer`.
        """
        if self._last_rank in self._waiting:
            return self._waiting.pop(self._last_rank)
        if not self._waiting or now < self._answered_at + KEEP_S:
            return None
        return self._waiting.pop(min(self._waiting))

    def record_answer(self, rank: int, now: float) -> None:
        """Record that a rank's request was answered at the time `now`."""
        self._last_rank, self._answered_at = rank, now

    def next_due(self) -> float:
        """Return the time at which `pop_next` has a request; infinity if none waits."""
        return self._answered_at + KEEP_S if self._waiting else float("inf")


def prompt_of(request: InputRequested, world_size: int) -> str:
    """Return the text of the input box: the rank's prompt, and which rank asks."""
    if world_size == 1:
        return request.prompt
    return f"{request.prompt.rstrip()} rank {request.rank} of {world_size} > ".lstrip()


def can_type(shell: "InteractiveShell | None") -> bool:
    """Return whether a person can type here: in a frontend with an input box, or in a terminal.

    nbclient, for example, runs notebooks without a person. Only the main thread can ask.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if hasattr(shell, "kernel"):
        request: Mapping[str, Any] = getattr(shell, "get_parent", dict)()
        return bool(request.get("content", {}).get("allow_stdin", False))
    return sys.stdin is not None and sys.stdin.isatty()


def read_line(prompt: str, is_hidden: bool, is_over: Callable[[], bool]) -> str | None:
    """Let the user type a line. Blocks the kernel's main thread.

    Args:
        prompt: Text of the input box.
        is_hidden: Whether the line must not be shown while it is typed.
        is_over: Function that returns whether nobody needs the line any more. A thread calls it.

    Returns:
        The line; None if the user ended the input (Ctrl-D in a terminal).

    Raises:
        KeyboardInterrupt: The user interrupted the cell, or `is_over` returned True.
    """
    ask = getpass.getpass if is_hidden else builtins.input
    done, ending = threading.Event(), threading.Lock()

    def watch() -> None:
        while not done.wait(_LOOK_S):
            with ending:
                if not done.is_set() and is_over():
                    _thread.interrupt_main()
                    return

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=watch, name="taas-input", daemon=True).start()
        while len(line := ask(prompt)) > LINE_LIMIT_CHARS:
            prompt = f"(at most {LINE_LIMIT_CHARS:,} characters) {prompt}"
        return line
    except EOFError:
        return None
    finally:
        with ending:
            done.set()
        signal.signal(signal.SIGINT, previous)
