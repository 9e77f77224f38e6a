"""Lines of input that the user types for the ranks of a run (`input()`, `breakpoint()`).

The kernel asks the user in the notebook's input box, or in the terminal. If several ranks wait for
a line, the user answers one rank after the other.
"""

import builtins
import getpass
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from taas_magic.messages import AnswerInput, InputRequested, encode
from taas_magic.plan import Plan

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

SAME_RANK_S = 1.0
"""Seconds for which other ranks' requests for input must wait after a rank has got its line.

During this time, the same rank may request its next line. A debugger, for example, does so.
"""

ANSWER_LIMIT_BYTES = 4000
"""Maximum size of the encoded message with the line that the user typed.

The agent writes the answer to the rank's pipe in one call. Linux guarantees that a write stays in
one piece only up to PIPE_BUF (4096) bytes.
"""

_TOO_LONG = "(the line is too long; at most about 3,900 characters) "
_CHECK_S = 0.25
"""Seconds between two checks whether the rank still needs the line that the user is typing."""


class InputQueue:
    """Queue of the ranks' unanswered requests for input, at most one for each rank."""

    def __init__(self) -> None:
        self._waiting: dict[int, InputRequested] = {}
        self._last_rank = -1
        self._answered_at = float("-inf")

    def add(self, request: InputRequested) -> None:
        """Add a rank's request, and remove an older request of the same rank.

        The older request needs no answer, because an interrupt has ended the rank's wait for it.
        """
        self._waiting[request.rank] = request

    def clear(self) -> None:
        """Remove all requests. Call this after a restart, which ends the ranks that wait."""
        self._waiting.clear()

    def pop_next(self, now: float) -> InputRequested | None:
        """Remove and return the request to answer now; None if no request is due.

        A request of the rank that got the last answer is due immediately. The requests of all other
        ranks are due `SAME_RANK_S` seconds after that answer. So these requests do not interrupt a
        dialog with one rank, such as a debugger's. The rank with the lowest number comes first.

        Args:
            now: Current time, from the same clock as in `record_answer`.
        """
        if self._last_rank in self._waiting:
            return self._waiting.pop(self._last_rank)
        if not self._waiting or now < self._answered_at + SAME_RANK_S:
            return None
        return self._waiting.pop(min(self._waiting))

    def record_answer(self, rank: int, now: float) -> None:
        """Record that a rank's request was answered at the time `now`."""
        self._last_rank, self._answered_at = rank, now

    def next_due(self) -> float:
        """Return the time at which the requests of all ranks are due; infinity for an empty queue.

        The time is from the same clock as the argument `now` of `record_answer`.
        """
        return self._answered_at + SAME_RANK_S if self._waiting else float("inf")


def prompt_of(request: InputRequested, plan: Plan) -> str:
    """Return the prompt that the user sees: the rank's prompt, and the number of the rank.

    If the run has only one rank, the prompt does not show the number.

    The hosts of an untrusted pool could send a misleading prompt, such as a request for a password.
    So for such a pool, the text is a single line that begins with the pool's name.
    """
    prompt, size = request.prompt, plan.world_size
    if size > 1:
        prompt = f"{prompt.rstrip()} rank {request.rank} of {size} > ".lstrip()
    if plan.trusted:
        return prompt
    return f"[untrusted pool {plan.pool}] {prompt}".replace("\n", " ")


def can_type(shell: "InteractiveShell | None") -> bool:
    """Return whether a person can type here: in a frontend with an input box, or in a terminal.

    The result is False in all threads except the main thread, which alone can show an input box.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if shell is not None and hasattr(shell, "kernel"):
        content = shell.get_parent().get("content", {})
        return bool(content.get("allow_stdin", False))
    return sys.stdin is not None and sys.stdin.isatty()


def ask_user(request: InputRequested, plan: Plan, is_void: Callable[[], bool]) -> AnswerInput:
    """Ask the user for the line that a rank requests. Block the kernel's main thread meanwhile.

    Hide the typed text if the rank requests a password. Ask again if the answer is longer than
    `ANSWER_LIMIT_BYTES`. Another thread calls `is_void` from time to time, and interrupts the main
    thread by SIGINT when the rank no longer needs the line.

    During the call, SIGINT raises KeyboardInterrupt. At the end, stop the thread, and restore the
    previous handler of SIGINT.

    Args:
        request: The rank's request.
        plan: Plan of the run.
        is_void: Function that returns whether the rank no longer needs the line.

    Returns:
        The answer for the rank. Its line is None if the user ended the input (Ctrl-D in a
        terminal).

    Raises:
        KeyboardInterrupt: The user interrupted the cell, or `is_void` returned True.
    """
    read = getpass.getpass if request.is_hidden else builtins.input
    prompt = prompt_of(request, plan)
    answer = AnswerInput(plan.run_id, request.rank, request.number)
    main, finished, guard = threading.get_ident(), threading.Event(), threading.Lock()

    def watch() -> None:
        while not finished.wait(_CHECK_S):
            with guard:
                if not finished.is_set() and is_void():
                    signal.pthread_kill(main, signal.SIGINT)  # also wakes a read of the terminal
                    return

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=watch, name="taas-input", daemon=True).start()
        answer.line = read(prompt)
        while len(encode(answer)) > ANSWER_LIMIT_BYTES:
            answer.line = read(_TOO_LONG + prompt)
    except EOFError:
        answer.line = None
    finally:
        try:
            with guard:  # after this block, `watch` sends no interrupt
                finished.set()
        finally:  # runs even if the user interrupts the wait for `guard`
            finished.set()
            signal.signal(signal.SIGINT, previous)
    return answer


def refused_answer(request: InputRequested, plan: Plan) -> AnswerInput:
    """Return an answer that tells a rank that no user can type the requested line."""
    return AnswerInput(plan.run_id, request.rank, request.number, is_refused=True)
