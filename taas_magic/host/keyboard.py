"""Input for a rank: lines that the user types in the notebook while a cell runs.

`input()`, `getpass` and debuggers such as `pdb` request a line from the user. The rank sends the
request to its agent, and the agent sends it to the kernel, which shows an input box
(`notebook/keyboard.py`). If nobody can type, the kernel refuses the request, and the call in the
cell raises EOFError.
"""

import builtins
import getpass
import io
import itertools
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from taas_magic.host.link import AgentLink, LineReader
from taas_magic.messages import AnswerInput, InputRequested

NOBODY_CAN_TYPE = (
    "nobody can type here: the run is detached, the notebook runs unattended, or the script has no "
    "terminal as its input. Set a variable before, and use it here"
)
NO_DEBUGGER = (
    "the debugger cannot be used here: nobody can type, because the run is detached, the notebook "
    "runs unattended, or the script has no terminal as its input; print what you want to see"
)
USER_QUIT = "you quit the debugger, which ends the cell; use `continue` to let the cell continue"
_CHILD_CANNOT_ASK = "a child process of a rank cannot read input; only the rank itself can"
_ONE_LINE = "only single lines can be read here: use input() or sys.stdin.readline()"

_answer_of: Callable[[bytes], AnswerInput] = msgspec.json.Decoder(AnswerInput).decode


class Keyboard:
    """Source of the lines that the user types for a rank's program.

    Args:
        path: Path of the named pipe with the lines that the user types.

    Attributes:
        was_refused: Whether the last request was refused because nobody can type at the kernel.
    """

    def __init__(self, link: AgentLink, path: Path) -> None:
        self._link = link
        self._answers = LineReader(path)
        self._numbers = itertools.count(time.monotonic_ns())
        self._one_request = threading.Lock()
        self.was_refused = False

    def install(self) -> None:
        """Make `input`, `getpass.getpass` and `sys.stdin` request lines from the user."""
        builtins.input = self._input
        getpass.getpass = self._getpass
        sys.stdin = _UserInput(self)

    def read_line(self, prompt: str, is_hidden: bool = False) -> str:
        """Request a line from the user, wait until the user has typed the line, and return it.

        First flush stdout and stderr, so that earlier output is shown above the input. Any thread
        may call this method. If several threads call it, each request waits until the previous
        request is answered. Late answers to interrupted requests are ignored. After the call,
        `was_refused` says whether the kernel refused the request.

        Args:
            prompt: Text to show before the input.
            is_hidden: Whether the line must not be shown while it is typed.

        Raises:
            EOFError: Nobody can type, the user ended the input, or this process is a child of the
                rank.
            KeyboardInterrupt: The user interrupted the cell.
        """
        if not self._link.is_own:
            raise EOFError(_CHILD_CANNOT_ASK)
        with self._one_request:
            number = next(self._numbers)
            # Earlier output is shown above the input box.
            for stream in (sys.stdout, sys.stderr):
                # The program may have closed the stream, or replaced it by an object without flush.
                with suppress(AttributeError, ValueError):
                    stream.flush()
            self._link.send(InputRequested(number=number, prompt=prompt, is_hidden=is_hidden))
            answer = _answer_of(self._answers.read_line())
            while answer.number != number:  # a late answer to an earlier request, now interrupted
                answer = _answer_of(self._answers.read_line())
        self.was_refused = answer.is_refused
        if answer.line is None:
            raise EOFError(NOBODY_CAN_TYPE if answer.is_refused else "the user ended the input")
        return answer.line

    def _input(self, prompt: object = "", /) -> str:
        return self.read_line(str(prompt))

    def _getpass(self, prompt: str = "Password: ", stream: Any = None, **options: Any) -> str:
        """Request a line that is not shown while the user types. Replaces `getpass.getpass`.

        `stream` and `options` have no effect.
        """
        return self.read_line(prompt, is_hidden=True)


class _UserInput(io.TextIOBase):
    """A replacement for `sys.stdin`. Each call of `readline` requests a line from the user."""

    def __init__(self, keyboard: Keyboard) -> None:
        self._keyboard = keyboard

    def readable(self) -> bool:
        return True

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        return self._keyboard.read_line("") + "\n"

    def read(self, *args: Any) -> NoReturn:
        raise EOFError(f"sys.stdin.read(): {_ONE_LINE}")

    def fileno(self) -> int:
        """Return descriptor 0. In the rank and its children, descriptor 0 is open on /dev/null."""
        return 0
