"""The two pipes between a rank and its agent.

The log pipe carries what the rank and its children write to descriptors 1 and 2, bytes as they
are. The message pipe carries JSON objects: failures, displays, notes, heartbeats, each in pieces
(`pieces`), since threads and forks of a rank write to it at the same time, and may be ended. Files
in a private folder of the host name them, so that nothing of a rank's start depends on descriptors
that a forkserver can pass on (it passes 256 at most). Imported by the agent, too: it imports no
torch.
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
from taas_magic.messages import CellOrder, Event, RankMessage, StoreMessage

OTHERS_END_S = 0.4
"""How long a rank that ends waits for the others: what Python takes to end one under torchrun.

Nothing that a rank listens on closes sooner there; another rank's `init_process_group` may still be
connecting to it.
"""

SIGNAL, SIGNAL_IN_C = signal.SIGRTMAX - 3, signal.SIGRTMAX - 4
"""What makes a rank, or a child that it forked, write its stacks; programs use SIGUSR1 and 2."""

_PIPE_BYTES = 1 << 20


RankFile = Literal["log", "messages", "ask", "cells", "stack", "stacks", "error.json"]
"""What a rank and its agent both have.

The pipes of its output and of its messages, that by which it is asked where it stands, and that
which brings a session's rank its cells. Where
it leaves its Python stack when it dies of a signal (faulthandler); where it, and what it forks,
write their stacks on a signal; where torch's `record` writes what it raised.
"""


RUNNING = "running"
"""The pipe that every rank of an attempt on this host has open while it runs."""


def rank_file(folder: Path, rank: int, what: RankFile) -> Path:
    """Return a file of a rank in the private folder of its attempt."""
    return folder / f"{rank}.{what}"


STAND, CUT = b"?", b"!"
"""What the agent asks of a rank: where it stands; to cut its connections to other ranks."""


def ask_to_cut(folder: Path, rank: int, cell: int) -> None:
    """Ask a rank to cut its connections to other ranks, if it still runs that cell."""
    ask(folder, rank, b"%b%d " % (CUT, cell))


def ask(folder: Path, rank: int, what: bytes = STAND) -> None:
    """Ask a rank where it stands."""
    with suppress(OSError):  # it does not listen (any more), or has been asked often enough
        pipe = os.open(rank_file(folder, rank, "ask"), os.O_WRONLY | os.O_NONBLOCK)
        with open(pipe, "wb", buffering=0) as asked:
            asked.write(what)


def order(folder: Path, rank: int, cell: CellOrder) -> None:
    """Tell a rank of a session which cell to run next."""
    # for reading, too: it may be opened before the rank has opened its end
    pipe = os.open(rank_file(folder, rank, "cells"), os.O_RDWR | os.O_NONBLOCK)
    with open(pipe, "wb", buffering=0) as cells:
        cells.write(messages.encode(cell) + b"\n")


def make_pipe(path: Path) -> int:
    """Make a pipe in the agent and open its reading end, which never blocks."""
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


MORE, LAST = b"+", b"."
"""What a piece of a message begins with: another one follows, or none."""

_PIECE_BYTES = 4000
"""With its head less than PIPE_BUF (4096): the system never mixes such a write with another."""


def pieces(message: bytes, sender: bytes) -> Iterator[bytes]:
    """Yield what is written of a message: lines, each of which a pipe keeps whole.

    Args:
        sender: What no other message of the pipe has, without a space.
    """
    for at in range(0, len(message), _PIECE_BYTES):
        end = at + _PIECE_BYTES
        yield b"%b%b %b\n" % (MORE if end < len(message) else LAST, sender, message[at:end])


class Link:
    """A rank's end of its pipes. Any thread may send, and any fork of the rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._pid = os.getpid()
        self._numbers = itertools.count()
        self._messages = os.open(rank_file(folder, rank, "messages"), os.O_WRONLY)
        self._log = os.open(rank_file(folder, rank, "log"), os.O_WRONLY)
        with suppress(OSError):  # the user's share of pipe memory is used up: 64 KiB work too
            fcntl.fcntl(self._log, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        # for writing, too: so it never has an end, and may be opened before the agent does
        self._asked = os.open(rank_file(folder, rank, "ask"), os.O_RDWR | os.O_NONBLOCK)
        self._others = os.open(folder / RUNNING, os.O_RDONLY | os.O_NONBLOCK)
        self._running = open(folder / RUNNING, "wb", buffering=0)  # noqa: SIM115
        os.register_at_fork(after_in_child=self._running.close)  # nobody waits for a child

    @property
    def is_own(self) -> bool:
        """Whether this process is the rank, and not a child that it forked."""
        return os.getpid() == self._pid

    def redirect_output(self) -> None:
        """Make the log pipe this process's descriptors 1 and 2, and Python's stdout and stderr.

        Both go into one pipe: only so does their order survive. Lines leave whole, one write each.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(self._log, 1)
        os.dup2(self._log, 2)
        os.close(self._log)
        options = {"encoding": "utf-8", "errors": "backslashreplace", "buffering": 1}
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False, **options)  # type: ignore[call-overload,misc] # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, **options)  # type: ignore[call-overload,misc] # noqa: SIM115

    def asked(self, timeout_s: float) -> bytes:
        """Wait until the agent asks something of this rank; return what it wrote.

        Returns:
            Nothing if it did not ask within `timeout_s`.
        """
        if not select.select([self._asked], [], [], timeout_s)[0]:
            return b""
        return os.read(self._asked, 4096)

    def await_others(self) -> None:
        """Wait until all ranks of this host end, or `OTHERS_END_S` have passed."""
        self._running.close()
        poll = select.poll()
        poll.register(self._others, 0)  # hung up when nobody has it open for writing any more
        poll.poll(OTHERS_END_S * 1000)

    def send(self, message: Event | RankMessage | StoreMessage) -> None:
        """Write one message; blocks while the agent does not read."""
        sender = b"%d.%d" % (os.getpid(), next(self._numbers))
        for piece in pieces(messages.encode(message), sender):
            os.write(self._messages, piece)
