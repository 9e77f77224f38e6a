"""The pipes between a rank and its agent.

A rank writes to two pipes. The log pipe carries the raw output of the rank and its children. The
message pipe carries JSON objects. Threads and forks of a rank write to the message pipe at the same
time, and may be killed while they write. So each message is divided into pieces that are written
atomically (`pieces`). The agent writes requests, a session's cells and the user's input to three
further pipes, which the rank reads (`RankFile`).

All pipes are named pipes, because the forkserver passes at most 256 descriptors to its forks. This
module must not import torch, because the agent imports this module.
"""

import fcntl
import itertools
import os
import select
import signal
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from taas_magic import messages
from taas_magic.messages import AnswerInput, CellOrder, Event, RankMessage, StoreMessage

OTHERS_END_S = 0.4
"""Maximum seconds that an ending rank waits until all ranks of its host are ending.

Until then, the rank keeps its sockets open, because ranks that are still in `init_process_group`
may be connecting to these sockets.
"""

STACK_SIGNAL = signal.SIGRTMAX - 3
"""Signal by which the agent makes a process write the stack of its main thread to a file.

The user's program may use SIGUSR1 and SIGUSR2, so this signal is neither of them.
"""

READ_S = 20.0
"""Maximum seconds that `AgentLink.send_in_order` waits each time for the agent to read a pipe.

The agent reads within milliseconds, unless its machine is overloaded or its process is suspended.
"""

_PIPE_BYTES = 1 << 20
_READ_BYTES = 65536
_UNREAD_POLL_S = 0.0003


RankFile = Literal["log", "messages", "ask", "cells", "input", "stack", "stacks", "error.json"]
"""Kind of a file or named pipe that a rank shares with its agent.

- `log`, `messages`: the pipes of the rank's output and messages.
- `ask`: the pipe of the agent's requests to the rank.
- `cells`: the pipe that brings cells to a rank of a session.
- `input`: the pipe that brings the lines that the user types.
- `stack`: the file to which faulthandler writes the Python stack when a signal kills the rank.
- `stacks`: the file to which the rank and its forks write their stacks when the agent sends
  `STACK_SIGNAL`.
- `error.json`: the file to which torch's `record` writes the rank's exception.
"""


RUNNING = "running"
"""Name of a pipe that every rank of this host keeps open for writing until the rank ends.

No process writes to the pipe. An ending rank closes its write end, and waits until all other ranks
of the host have closed their write ends, too (`wait_for_other_ranks`).
"""


def rank_file(folder: Path, rank: int, what: RankFile) -> Path:
    """Return the path of a file or named pipe that a rank shares with its agent.

    Args:
        folder: Private folder of the rank's attempt.
        what: Kind of the file or pipe.
    """
    return folder / f"{rank}.{what}"


SEND_STACKS, CUT_CONNECTIONS = b"?", b"!"
"""Requests of the agent to a rank.

- `SEND_STACKS`: send the rank's stack report.
- `CUT_CONNECTIONS`, followed by a cell's number and a space: if the rank runs this cell, cut the
  rank's connections to other ranks.
"""


def request_connection_cut(folder: Path, rank: int, cell: int) -> None:
    """Ask a rank to cut its connections to other ranks, if the rank still runs the cell.

    Do nothing if the rank does not read its pipe, or the pipe is full.

    Args:
        folder: Private folder of the rank's attempt.
        cell: Number of the cell in its session.
    """
    _send_request(folder, rank, b"%b%d " % (CUT_CONNECTIONS, cell))


def request_stacks(folder: Path, rank: int) -> None:
    """Ask a rank to send a stack report to the agent.

    Do nothing if the rank does not read its pipe, or the pipe is full.

    Args:
        folder: Private folder of the rank's attempt.
    """
    _send_request(folder, rank, SEND_STACKS)


def _send_request(folder: Path, rank: int, what: bytes) -> None:
    with suppress(OSError):  # the rank does not read the pipe, or the pipe is full
        pipe = os.open(rank_file(folder, rank, "ask"), os.O_WRONLY | os.O_NONBLOCK)
        with open(pipe, "wb", buffering=0) as asked:
            asked.write(what)


def send_cell_order(folder: Path, rank: int, cell: CellOrder) -> None:
    """Send a rank of a session the order to run a cell, or the order to end.

    Args:
        folder: Private folder of the session's ranks on this host.
    """
    _write_line(rank_file(folder, rank, "cells"), cell)


def answer_input(folder: Path, answer: AnswerInput) -> None:
    """Send a line that the user typed, or the end of the input, to the rank that requested a line.

    Args:
        folder: Private folder of the rank's attempt.
        answer: The line. The encoded answer may have at most PIPE_BUF (4096) bytes.
    """
    _write_line(rank_file(folder, answer.rank, "input"), answer)


def _write_line(path: Path, message: CellOrder | AnswerInput) -> None:
    # Also open for reading: opening only for writing fails until the rank has opened its end.
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    with open(pipe, "wb", buffering=0) as lines:
        lines.write(messages.encode(message) + b"\n")


class LineReader:
    """Reader of lines from a named pipe to which the agent writes. Used in a rank."""

    def __init__(self, path: Path) -> None:
        # Also open for writing, so that reads do not report the end when the agent closes the pipe.
        self._pipe = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._rest = b""

    def read_line(self) -> bytes:
        """Wait for the next line, and return it without its line end."""
        while b"\n" not in self._rest:
            self._rest += os.read(self._pipe, _READ_BYTES)
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def make_pipe(path: Path) -> int:
    """Create a named pipe, and return a non-blocking descriptor of its read end."""
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


MORE, LAST = b"+", b"."
"""First byte of a piece of a message. `MORE`: more pieces follow. `LAST`: no piece follows."""

_PIECE_BYTES = 4000
"""Maximum bytes of a message in one piece. Linux writes at most PIPE_BUF (4096) bytes atomically.
"""


def pieces(message: bytes, sender: bytes) -> Iterator[bytes]:
    """Divide a message into lines, each short enough to be written to a pipe atomically.

    Each line has `MORE` or `LAST`, the sender, and a piece of the message.

    Args:
        sender: Id by which the agent finds all pieces of the message. It must be unique in the
            pipe, and must not contain spaces.
    """
    for at in range(0, len(message), _PIECE_BYTES):
        end = at + _PIECE_BYTES
        yield b"%b%b %b\n" % (MORE if end < len(message) else LAST, sender, message[at:end])


def flush_output() -> None:
    """Flush stdout and stderr, unless the user's code has closed them.

    If the user's code captures stdout, also flush the original stdout.
    """
    for stream in (sys.__stdout__, sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()


class AgentLink:
    """The rank's connection to its agent: the rank's ends of the pipes between them.

    All threads and forks of the rank may call `send`. The constructor opens the pipes, which the
    agent must already have created.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._pid = os.getpid()
        self._numbers = itertools.count()
        self._messages = os.open(rank_file(folder, rank, "messages"), os.O_WRONLY)
        self._log = os.open(rank_file(folder, rank, "log"), os.O_WRONLY)
        with suppress(OSError):  # at the user's limit of pipe memory, the pipe keeps 64 KiB
            fcntl.fcntl(self._log, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        # Also open for writing, so that reads never report the end, and opening does not block.
        self._asked = os.open(rank_file(folder, rank, "ask"), os.O_RDWR | os.O_NONBLOCK)
        self._others = os.open(folder / RUNNING, os.O_RDONLY | os.O_NONBLOCK)
        self._running = open(folder / RUNNING, "wb", buffering=0)  # noqa: SIM115
        # Ranks wait until no process has this pipe open, but not for children of ranks.
        os.register_at_fork(after_in_child=self._running.close)

    @property
    def is_own(self) -> bool:
        """Whether this process is the rank itself, and not a child that the rank forked."""
        return os.getpid() == self._pid

    def redirect_output(self) -> None:
        """Redirect descriptors 1 and 2, and Python's stdout and stderr, to the log pipe.

        Python's stdout and stderr become line-buffered. Both use the same pipe, so that their lines
        stay in order.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(self._log, 1)
        os.dup2(self._log, 2)
        options = {"encoding": "utf-8", "errors": "backslashreplace", "buffering": 1}
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False, **options)  # type: ignore[call-overload,misc] # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, **options)  # type: ignore[call-overload,misc] # noqa: SIM115

    def wait_for_request(self, timeout_s: float) -> bytes:
        """Wait up to `timeout_s` seconds for requests of the agent to this rank.

        Returns:
            One or more requests, such as `SEND_STACKS`; b"" if no request arrived.
        """
        if not select.select([self._asked], [], [], timeout_s)[0]:
            return b""
        return os.read(self._asked, 4096)

    def wait_for_other_ranks(self) -> None:
        """Wait up to `OTHERS_END_S` seconds until all ranks of this host are ending.

        First closes this rank's write end of the pipe `RUNNING`, by which the host's other ranks
        notice that this rank is ending.
        """
        self._running.close()
        poll = select.poll()
        poll.register(self._others, 0)  # POLLHUP arrives when no rank has the pipe open
        poll.poll(OTHERS_END_S * 1000)

    def send(self, message: Event | RankMessage | StoreMessage) -> None:
        """Send one message to the agent. Blocks while the message pipe is full."""
        sender = b"%d.%d" % (os.getpid(), next(self._numbers))
        for piece in pieces(messages.encode(message), sender):
            os.write(self._messages, piece)

    def send_in_order(self, message: Event) -> None:
        """Send a message that the notebook shows after all earlier and before all later output.

        Output and messages travel in two pipes. So this method flushes stdout and stderr, and waits
        until the agent has read all output. It then sends the message, and waits until the agent
        has read the message. Each wait takes at most `READ_S` seconds.
        """
        flush_output()
        _wait_until_read(self._log)
        self.send(message)
        _wait_until_read(self._messages)


def _wait_until_read(pipe: int) -> None:
    """Wait until the agent has read what a pipe contains now; at most `READ_S` seconds.

    The agent reads the whole content of a pipe at once. So the wait ends when the pipe has fewer
    bytes than at the last look: the agent has then read everything that was in the pipe. The pipe
    need not become empty, because other threads or children of the rank may keep writing.
    """
    until, before = time.monotonic() + READ_S, _unread_bytes(pipe)
    while (unread := _unread_bytes(pipe)) and unread >= before and time.monotonic() < until:
        before = unread
        time.sleep(_UNREAD_POLL_S)


def _unread_bytes(pipe: int) -> int:
    found = fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))
    return int.from_bytes(found, sys.byteorder)
