"""The two pipes between a rank and its agent, named by files in a private folder of the host.

The log pipe carries what the rank and its children write to descriptors 1 and 2, bytes as they
are. The message pipe carries one JSON object a line: failures, displays, notes, heartbeats. Pipes
with names, so that nothing of a rank's start depends on descriptors that a forkserver can pass on
(it passes 256 at most).
"""

import errno
import fcntl
import os
import select
import sys
import threading
from pathlib import Path

from taas_magic import messages
from taas_magic.messages import Event, RankMessage, StoreMessage

_F_SETPIPE_SZ = 1031
_PIPE_BYTES = 1 << 20


def log_pipe(folder: Path, attempt: int, local_rank: int) -> Path:
    """The file that names a rank's log pipe; a restarted rank has new ones."""
    return folder / f"{attempt}-{local_rank}.log"


def message_pipe(folder: Path, attempt: int, local_rank: int) -> Path:
    """The file that names a rank's message pipe."""
    return folder / f"{attempt}-{local_rank}.messages"


def stack_file(folder: Path, attempt: int, local_rank: int) -> Path:
    """Where a rank that dies of a signal leaves its Python stack (faulthandler)."""
    return folder / f"{attempt}-{local_rank}.stack"


def stacks_file(folder: Path, attempt: int, local_rank: int) -> Path:
    """Where a rank, and what it forks, write their stacks when they are sent a signal."""
    return folder / f"{attempt}-{local_rank}.stacks"


def ask_pipe(folder: Path, attempt: int, local_rank: int) -> Path:
    """The file that names the pipe by which a rank is asked where it stands."""
    return folder / f"{attempt}-{local_rank}.ask"


def ask(folder: Path, attempt: int, local_rank: int) -> None:
    """Asks a rank where it stands; one that does not listen (any more) is not asked."""
    try:
        pipe = os.open(ask_pipe(folder, attempt, local_rank), os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.ENOENT):
            raise
        return
    try:
        os.write(pipe, b"?")
    except BlockingIOError:
        pass  # it has been asked often enough
    finally:
        os.close(pipe)


def error_file(folder: Path, attempt: int, local_rank: int) -> Path:
    """Where torch's `record` writes what a rank raised."""
    return folder / f"{attempt}-{local_rank}.error.json"


def make_pipe(path: Path) -> int:
    """Makes a pipe in the agent and opens its reading end, which never blocks."""
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


class Link:
    """A rank's end of its pipes. Any thread may send."""

    def __init__(self, folder: Path, attempt: int, local_rank: int) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._messages = os.open(message_pipe(folder, attempt, local_rank), os.O_WRONLY)
        self._log = os.open(log_pipe(folder, attempt, local_rank), os.O_WRONLY)
        _widen(self._log)
        # for writing, too: so it never has an end, and may be opened before the agent does
        self._asked = os.open(ask_pipe(folder, attempt, local_rank), os.O_RDWR | os.O_NONBLOCK)

    @property
    def is_own(self) -> bool:
        """Whether this process is the rank, and not a child that it forked."""
        return os.getpid() == self._pid

    def redirect_output(self) -> None:
        """Makes the log pipe this process's descriptors 1 and 2, and Python's stdout and stderr.

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

    def is_asked(self, timeout_s: float) -> bool:
        """Waits until the agent asks where this rank stands; says whether it did."""
        if not select.select([self._asked], [], [], timeout_s)[0]:
            return False
        os.read(self._asked, 4096)
        return True

    def send(self, message: Event | RankMessage | StoreMessage) -> None:
        """Writes one message; blocks while the agent does not read."""
        view = memoryview(messages.encode(message) + b"\n")
        with self._lock:
            while view:
                view = view[os.write(self._messages, view) :]


def _widen(pipe: int) -> None:
    try:
        fcntl.fcntl(pipe, _F_SETPIPE_SZ, _PIPE_BYTES)
    except OSError:
        return  # the user's share of pipe memory is used up; the usual 64 KiB work too
