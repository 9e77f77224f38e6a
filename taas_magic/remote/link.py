"""The two pipes between a rank and its agent, named by files in a private folder of the host.

The log pipe carries what the rank and its children write to descriptors 1 and 2, bytes as they
are. The message pipe carries one JSON object a line: failures, displays, notes, heartbeats. Pipes
with names, so that nothing of a rank's start depends on descriptors that a forkserver can pass on
(it passes 256 at most).
"""

import base64
import fcntl
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

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


def make_pipe(path: Path) -> int:
    """Makes a pipe in the agent and opens its reading end, which never blocks."""
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


class Link:
    """A rank's end of its pipes. Any thread may send."""

    def __init__(self, folder: Path, attempt: int, local_rank: int) -> None:
        self._lock = threading.Lock()
        self._messages = os.open(message_pipe(folder, attempt, local_rank), os.O_WRONLY)
        self._log = os.open(log_pipe(folder, attempt, local_rank), os.O_WRONLY)
        _widen(self._log)

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

    def send(self, kind: str, **fields: Any) -> None:
        """Writes one message; blocks while the agent does not read."""
        line = json.dumps({"kind": kind, **fields}, default=_encode).encode() + b"\n"
        view = memoryview(line)
        with self._lock:
            while view:
                view = view[os.write(self._messages, view) :]


def _widen(pipe: int) -> None:
    try:
        fcntl.fcntl(pipe, _F_SETPIPE_SZ, _PIPE_BYTES)
    except OSError:
        return  # the user's share of pipe memory is used up; the usual 64 KiB work too


def _encode(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else repr(value)
