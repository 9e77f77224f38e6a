"""The two pipes between a rank and its agent.

The log pipe carries the raw bytes that the rank and its children write to descriptors 1 and 2. The
message pipe carries JSON objects: failures, displays, notes, heartbeats. Threads and forks of a
rank write to the message pipe at the same time, and may be killed while they write. So each message
is divided into pieces that are written atomically (`pieces`).

Both pipes are named pipes in a private folder on the host. Unnamed pipes would have to be passed
through the forkserver, which passes at most 256 descriptors. This module does not import torch,
because the agent imports this module.
"""

import fcntl
import itertools
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from taas_magic import messages
from taas_magic.messages import AnswerInput, CellOrder, Event, RankMessage, StoreMessage

OTHERS_END_S = 0.4
"""Seconds that an ending rank waits for the other ranks.

Another rank's `init_process_group` may still be connecting to this rank. Under torchrun, the
sockets stay open for as long as Python takes to shut down, which is about this time.
"""

SIGNAL = signal.SIGRTMAX - 3
"""Signal on which a rank, a fetcher, or a process that one of them forked writes its main thread's
stack.

SIGUSR1 and SIGUSR2 are left to the user's program.
"""

_PIPE_BYTES = 1 << 20
_READ_BYTES = 65536


RankFile = Literal["log", "messages", "ask", "cells", "input", "stack", "stacks", "error.json"]
"""Name of a file that a rank shares with its agent.

- `log`, `messages`: the pipes of the rank's output and messages.
- `ask`: the pipe of the agent's requests to the rank.
- `cells`: the pipe that brings cells to a rank of a session.
- `input`: the pipe that brings the lines that the user types.
- `stack`: the file to which faulthandler writes the Python stack when a signal kills the rank.
- `stacks`: the file to which the rank and its forks write their stacks when the agent asks.
- `error.json`: the file to which torch's `record` writes the rank's exception.
"""


RUNNING = "running"
"""Name of the pipe with which the ranks of this host wait for each other (`await_others`).

Every rank keeps the pipe open while it runs. Nothing is written to it.
"""


def rank_file(folder: Path, rank: int, what: RankFile) -> Path:
    """Return the path of a rank's file in the private folder of its attempt."""
    return folder / f"{rank}.{what}"


SEND_STACKS, CUT_CONNECTIONS = b"?", b"!"
"""Requests of the agent to a rank: to send its stack report; to cut its connections to other ranks.

After `CUT_CONNECTIONS`, the request has the number of a cell and a space.
"""


def request_cut(folder: Path, rank: int, cell: int) -> None:
    """Ask a rank to cut its connections to other ranks. Has no effect if `cell` is over.

    Args:
        folder: Private folder of the rank's attempt.
        rank: Number of the rank.
        cell: Number of the cell in its session.
    """
    _send_request(folder, rank, b"%b%d " % (CUT_CONNECTIONS, cell))


def request_stacks(folder: Path, rank: int) -> None:
    """Ask a rank to send its stack report."""
    _send_request(folder, rank, SEND_STACKS)


def _send_request(folder: Path, rank: int, what: bytes) -> None:
    with suppress(OSError):  # the rank does not read the pipe, or the pipe is full
        pipe = os.open(rank_file(folder, rank, "ask"), os.O_WRONLY | os.O_NONBLOCK)
        with open(pipe, "wb", buffering=0) as asked:
            asked.write(what)


def order(folder: Path, rank: int, cell: CellOrder) -> None:
    """Send the next cell to a rank of a session."""
    _write_line(rank_file(folder, rank, "cells"), cell)


def answer_input(folder: Path, answer: AnswerInput) -> None:
    """Send a rank the line of input that it waits for.

    Args:
        folder: Private folder of the rank's attempt.
        answer: The line. The encoded answer may have at most PIPE_BUF bytes.
    """
    _write_line(rank_file(folder, answer.rank, "input"), answer)


def _write_line(path: Path, message: CellOrder | AnswerInput) -> None:
    # Open for reading, too: opening only for writing fails as long as the rank has not opened its
    # end.
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    with open(pipe, "wb", buffering=0) as lines:
        lines.write(messages.encode(message) + b"\n")


class LineReader:
    """The rank's end of a pipe from which the rank reads lines.

    Args:
        path: Path of the named pipe.
    """

    def __init__(self, path: Path) -> None:
        # Open for writing, too, so that reads do not report the end when the agent closes the pipe.
        self._pipe = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._rest = b""

    def read_line(self) -> bytes:
        """Wait for the next line, and return it without its line end."""
        while b"\n" not in self._rest:
            self._rest += os.read(self._pipe, _READ_BYTES)
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def make_pipe(path: Path) -> int:
    """Create a named pipe and open its read end without blocking. Runs in the agent."""
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


MORE, LAST = b"+", b"."
"""First byte of a piece of a message: more pieces follow, or this is the last one."""

_PIECE_BYTES = 4000
"""Size of a piece without its prefix. With its prefix, a piece is smaller than PIPE_BUF (4096).

Linux writes at most PIPE_BUF bytes to a pipe atomically.
"""


def pieces(message: bytes, sender: bytes) -> Iterator[bytes]:
    """Divide a message into lines, each short enough to be written to a pipe atomically.

    Args:
        message: The encoded message.
        sender: Id of the message; unique in the pipe, and without spaces.
    """
    for at in range(0, len(message), _PIECE_BYTES):
        end = at + _PIECE_BYTES
        yield b"%b%b %b\n" % (MORE if end < len(message) else LAST, sender, message[at:end])


class Link:
    """The rank's connection to its agent: the rank's ends of the pipes.

    All threads and forks of the rank may call `send`.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._pid = os.getpid()
        self._numbers = itertools.count()
        self._messages = os.open(rank_file(folder, rank, "messages"), os.O_WRONLY)
        self._log = os.open(rank_file(folder, rank, "log"), os.O_WRONLY)
        with suppress(OSError):  # the user's limit of pipe memory is reached: 64 KiB work, too
            fcntl.fcntl(self._log, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        # Open for writing, too, so that reads never report the end, and opening does not block.
        self._asked = os.open(rank_file(folder, rank, "ask"), os.O_RDWR | os.O_NONBLOCK)
        self._others = os.open(folder / RUNNING, os.O_RDONLY | os.O_NONBLOCK)
        self._running = open(folder / RUNNING, "wb", buffering=0)  # noqa: SIM115
        os.register_at_fork(after_in_child=self._running.close)  # ranks do not wait for children

    @property
    def is_own(self) -> bool:
        """Whether this process is the rank, and not a child that it forked."""
        return os.getpid() == self._pid

    def redirect_output(self) -> None:
        """Redirect descriptors 1 and 2, and Python's stdout and stderr, to the log pipe.

        stdout and stderr share one pipe, so that their lines stay in order. Python writes each line
        at once.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(self._log, 1)
        os.dup2(self._log, 2)
        os.close(self._log)
        options = {"encoding": "utf-8", "errors": "backslashreplace", "buffering": 1}
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False, **options)  # type: ignore[call-overload,misc] # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, **options)  # type: ignore[call-overload,misc] # noqa: SIM115

    def wait_for_request(self, timeout_s: float) -> bytes:
        """Wait for a request of the agent.

        Returns:
            The request; b"" if none arrived within `timeout_s` seconds.
        """
        if not select.select([self._asked], [], [], timeout_s)[0]:
            return b""
        return os.read(self._asked, 4096)

    def await_others(self) -> None:
        """Wait until all ranks of this host end, for at most `OTHERS_END_S` seconds."""
        self._running.close()
        poll = select.poll()
        poll.register(self._others, 0)  # POLLHUP arrives when no rank has the pipe open
        poll.poll(OTHERS_END_S * 1000)

    def send(self, message: Event | RankMessage | StoreMessage) -> None:
        """Write one message. Blocks while the pipe is full."""
        sender = b"%d.%d" % (os.getpid(), next(self._numbers))
        for piece in pieces(messages.encode(message), sender):
            os.write(self._messages, piece)
