"""Exceptions that taas-magic raises.

    TaasError
    ├── UsageError
    │   └── RegistrationError
    ├── CellSyntaxError
    ├── CaptureError
    ├── ResultError
    ├── StoreError
    │   └── SaveError
    ├── RunError
    │   ├── RankFailed
    │   │   └── RunTimeout
    │   └── JobFailed
    └── PoolError
        ├── RunLost
        └── ProtocolError

Each message says who failed, what happened, where, and what to do next. IPython shows the errors
without the frames of this package, because the exceptions define `_render_traceback_` (an idea of
ipyparallel).
"""

import errno
import signal
from collections.abc import Sequence


class TaasError(Exception):
    """Base class of all exceptions that this package raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class UsageError(TaasError):
    """Raised for a mistake in a flag, name or setting, before anything is started.

    The message is one line. If only certain values are valid, the message lists these values.
    """


class RegistrationError(UsageError, TypeError, ValueError):
    """Raised if a loader cannot be registered or unregistered; the one-line message says why."""


class CellSyntaxError(TaasError):
    """Raised if the cell is not valid Python; the message is Python's, with cell and line."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class CaptureError(TaasError):
    """Raised if objects cannot be sent to or from the ranks, or are too large.

    If one object is the reason, the message has the path to it, such as `config['a'][3].db`.
    """


class ResultError(TaasError):
    """Raised if a run succeeded, but names of `--out` could not be returned.

    The message says which names, why, and what to return instead.
    """


class StoreError(TaasError):
    """Raised if the project store cannot be used as requested; the message names the path."""


class SaveError(StoreError, OSError, RuntimeError):
    """Raised if `taas.save` or `torch.save` cannot write a file.

    In plain Python, `torch.save` raises RuntimeError or OSError. So code that catches one of them
    also catches this exception.
    """


class RunError(TaasError):
    """Raised if the user's cell, or a job of a farm, failed.

    Args:
        headline: One line: who failed, where, and what happened.
        details: Lines to show above the headline: the traceback and other helpful information.
        etype: Name of the exception's type; "" if a process died without an exception.
        rank: Rank that failed; None if no single rank is to blame.
        name: Name of the farm's job; "" for a cell.
    """

    def __init__(
        self,
        headline: str,
        details: Sequence[str] = (),
        *,
        etype: str = "",
        rank: int | None = None,
        name: str = "",
    ) -> None:
        super().__init__(headline)
        self.details, self.etype, self.rank, self.name = tuple(details), etype, rank, name

    def _render_traceback_(self) -> list[str]:
        return [*self.details, f"{type(self).__name__}: {self}"]


class RankFailed(RunError):
    """Raised if a rank failed: it raised an exception, died, ended too early or was suspended.

    The error describes the first failure of the run.
    """


class JobFailed(RunError):
    """Raised if a job of a farm raised an exception, died or was cancelled."""


class RunTimeout(RankFailed):
    """Raised if a run exceeded its `--timeout`; the details say where each rank was."""


def interrupted(text: str) -> KeyboardInterrupt:
    """Return a KeyboardInterrupt that IPython shows as one line, without a traceback."""
    error = KeyboardInterrupt(text)
    error._render_traceback_ = lambda: [text]  # type: ignore[attr-defined]
    return error


class PoolError(TaasError):
    """Raised if the infrastructure failed, for example if a pool could not be started."""


class RunLost(PoolError):
    """Raised if the run's hosts, or the process that controls them, are gone.

    The journal has the events up to the loss.
    """


class ProtocolError(PoolError):
    """Raised if a peer's message breaks the protocol; the connection to the peer is closed."""


def reason_of(error: OSError) -> str:
    """Return why the operating system refused to write a file, as text for an error message.

    For an error without a text of our own, return the text of the operating system.
    """
    reasons = {
        errno.EROFS: "its file system is read-only",
        errno.ENOSPC: "its file system is full",
        errno.EDQUOT: "your quota on its file system is used up",
        errno.EACCES: "you have no right to write there",
    }
    return reasons.get(error.errno or 0, str(error.strerror))


def listed(names: Sequence[str], most: int) -> str:
    """Join the first `most` names as text for a message, such as "a, b and 5 more".

    If there are no further names, the text has only the names, such as "a, b".
    """
    more = len(names) - most
    return ", ".join(names[:most]) + f" and {more:,} more" * (more > 0)


def signal_name(exitcode: int) -> str:
    """Return the name of the signal that ended a process, such as `SIGSEGV` for exit code -11.

    If the signal has no name, return its number, such as `signal 40`. If no signal ended the
    process, return "".
    """
    if exitcode >= 0:
        return ""
    try:
        return signal.Signals(-exitcode).name
    except ValueError:  # most real-time signals have no name
        return f"signal {-exitcode}"
