"""Everything that taas-magic raises.

    TaasError
    ├── UsageError            the cell's head, a flag, a name, taas.toml: nothing was started
    │   └── RegistrationError a loader that taas.register refuses; a TypeError and a ValueError, too
    ├── CellSyntaxError       the cell is not Python: nothing was started
    ├── CaptureError          the notebook holds something that cannot travel: nothing was started
    ├── ResultError           the run succeeded, but a name of --out could not come back
    ├── StoreError            the project store cannot be used as asked
    ├── RunError              the user's cell
    │   ├── RankFailed        a rank raised, died, left early or stopped
    │   ├── RunTimeout        --timeout ended the run
    │   └── JobFailed         a job of a farm raised, died or was cancelled
    └── PoolError             the infrastructure
        ├── RunLost           the run's hosts, or what watched over them, are gone
        └── ProtocolError     a peer said what it may not say

Each says who, what, where and what to do next. IPython shows them through `_render_traceback_`
(the idea is ipyparallel's): what the user can act on, without the frames of this package.
"""

import errno
import signal
from collections.abc import Sequence


class TaasError(Exception):
    """The root of the tree; catching it catches all that this package raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class UsageError(TaasError):
    """Words that cannot be carried out; the message is one line and lists what is possible."""


class RegistrationError(UsageError, TypeError, ValueError):
    """A loader cannot be registered or unregistered; the message is one line and says why."""


class CellSyntaxError(TaasError):
    """The cell is not Python; the message is Python's own, with the place in the notebook."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class CaptureError(TaasError):
    """A value that the cell uses cannot travel to the ranks; the message names the path to it."""


class ResultError(TaasError):
    """The run succeeded, but names of `--out` could not come back: which, why, what instead."""


class StoreError(TaasError):
    """The project store cannot be used as asked; the message names the path."""


class RunError(TaasError):
    """The user's cell did not succeed.

    Args:
        headline: One line: who, where, and what happened.
        details: Its traceback and what else helps, line by line, ready to show.
        etype: Name of the exception's type ("" where a process died without one).
        rank: Whose failure it is; None where no single rank is to blame.
        name: The farm's job that it is of; "" for a cell.
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
    """The first failure of a run."""


class JobFailed(RunError):
    """A job of a farm did not return."""


class RunTimeout(RankFailed):
    """The run did not end within its `--timeout`; the details say where each rank stood."""


def interrupted(text: str) -> KeyboardInterrupt:
    """Return the user's interrupt, which IPython shows as one line instead of the frames it met."""
    error = KeyboardInterrupt(text)
    error._render_traceback_ = lambda: [text]  # type: ignore[attr-defined]
    return error


class PoolError(TaasError):
    """A pool could not be started or reached."""


class RunLost(PoolError):
    """What ran the cell is gone; the journal holds what was seen until then."""


class ProtocolError(PoolError):
    """A peer sent what the protocol does not allow; its connection was closed."""


def reason_of(error: OSError) -> str:
    """Return why the system refused to write, in words."""
    reasons = {
        errno.EROFS: "its file system is read-only",
        errno.ENOSPC: "its file system is full",
        errno.EDQUOT: "your quota on its file system is used up",
        errno.EACCES: "you have no right to write there",
    }
    return reasons.get(error.errno or 0, str(error.strerror))


def signal_name(exitcode: int) -> str:
    """Return `SIGSEGV` for the exit code -11; "" for an exit code that is no signal."""
    if exitcode >= 0:
        return ""
    try:
        return signal.Signals(-exitcode).name
    except ValueError:  # most real-time signals have no name
        return f"signal {-exitcode}"
