"""Everything that taas-magic raises.

    TaasError
    ├── UsageError            the cell's head, a flag, a name, taas.toml: nothing was started
    ├── CaptureError          the notebook holds something that cannot travel: nothing was started
    ├── StoreError            the project store cannot be used as asked
    ├── RunError              the user's cell
    │   ├── RankFailed        a rank raised, died, left early or stopped
    │   └── RunTimeout        --timeout ended the run
    └── PoolError             the infrastructure
        ├── RunLost           the run's hosts, or what watched over them, are gone
        └── ProtocolError     a peer said what it may not say

Each says who, what, where and what to do next. IPython shows them through `_render_traceback_`
(the idea is ipyparallel's): what the user can act on, without the frames of this package.
"""

from collections.abc import Sequence


class TaasError(Exception):
    """The root of the tree; catching it catches all that this package raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class UsageError(TaasError):
    """Words that cannot be carried out; the message is one line and lists what is possible."""


class CaptureError(TaasError):
    """A value that the cell uses cannot travel to the ranks; the message names the path to it."""


class StoreError(TaasError):
    """The project store cannot be used as asked; the message names the path."""


class RunError(TaasError):
    """The user's cell did not succeed."""


class RankFailed(RunError):
    """The first failure of a run.

    Args:
        headline: One line: rank, host, and what happened.
        details: The failing rank's traceback and what else helps, line by line, ready to show.
        rank: The rank that failed first; None where no single rank is to blame.
        etype: Name of the exception's type in the rank ("" when the rank died without one).
    """

    def __init__(
        self, headline: str, details: Sequence[str] = (), rank: int | None = None, etype: str = ""
    ) -> None:
        super().__init__(headline)
        self.details = tuple(details)
        self.rank = rank
        self.etype = etype

    def _render_traceback_(self) -> list[str]:
        return [*self.details, f"{type(self).__name__}: {self}"]


class RunTimeout(RankFailed):
    """The run did not end within its `--timeout`; the details say where each rank stood."""


class PoolError(TaasError):
    """A pool could not be started or reached."""


class RunLost(PoolError):
    """What ran the cell is gone; the journal holds what was seen until then."""


class ProtocolError(PoolError):
    """A peer sent what the protocol does not allow; its connection was closed."""
