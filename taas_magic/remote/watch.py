"""Decides how a run stands on one host, from what is known of its ranks. Pure: the time is given.

The agent observes and acts; here is only the judgement, so that a test can put any situation.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

SETTLE_S = 0.5
"""After the first failure, how long the other ranks may show theirs: the cause may come second."""

LEFT_GRACE_S = 3.0
"""How long the others may go on after a rank left by `sys.exit(0)`."""

STOPPED_S = 5.0
"""How long a rank may be stopped (SIGSTOP) before the run fails."""

INTERRUPT_GRACE_S = 5.0
"""How long ranks may take to end after an interrupt, before they are killed."""

_CONSEQUENCES = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|peer|socket (closed|timeout)"
    r"|remote process exited|store.*(timeout|timed out)|nccl.*(abort|remote|unhandled system)"
    r"|timed out waiting|terminated|connectfullmesh",
    re.IGNORECASE,
)
_DISTRIBUTED_TYPES = frozenset(
    {"DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "RuntimeError"}
    | {"ConnectionResetError", "ConnectionError", "BrokenPipeError", "EOFError"}
)

Failure = dict[str, Any]


@dataclass
class RankState:
    """What is known of one rank of this host.

    Times are of the agent's monotonic clock, in seconds; None is "has not happened".
    """

    rank: int
    pid: int
    done: bool = False
    exitcode: int | None = None
    failed_at: float | None = None
    left_at: float | None = None
    stopped_at: float | None = None
    etype: str = ""
    message: str = ""
    traceback: list[str] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)
    hint: str = ""

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self.exitcode is not None


@dataclass(frozen=True)
class Verdict:
    """The run is over on this host.

    Attributes:
        state: SUCCEEDED, FAILED or INTERRUPTED.
        cause: raised, signal, exit, left, stopped, timeout or interrupt; empty on success.
    """

    state: str
    cause: str = ""


def decide(
    ranks: Collection[RankState],
    now: float,
    deadline: float | None = None,
    interrupted_at: float | None = None,
) -> Verdict | None:
    """How the run stands; None while it goes on.

    Args:
        ranks: All ranks of this host.
        now: The agent's monotonic clock.
        deadline: When `--timeout` ends the run.
        interrupted_at: When the user interrupted it.
    """
    gone = all(rank.ended or rank.done for rank in ranks)
    if all(rank.done for rank in ranks):
        return Verdict("SUCCEEDED")
    if interrupted_at is not None:
        over = gone or now - interrupted_at >= INTERRUPT_GRACE_S
        return Verdict("INTERRUPTED", "interrupt") if over else None
    failed = [rank.failed_at for rank in ranks if rank.failed_at is not None]
    if failed:
        over = gone or now - min(failed) >= SETTLE_S
        return Verdict("FAILED", "rank") if over else None
    if deadline is not None and now >= deadline:
        return Verdict("FAILED", "timeout")
    if _since(ranks, "left_at", now) >= LEFT_GRACE_S:
        return Verdict("FAILED", "left")
    if _since(ranks, "stopped_at", now) >= STOPPED_S:
        return Verdict("FAILED", "stopped")
    return None


def _since(ranks: Collection[RankState], what: str, now: float) -> float:
    times = [getattr(rank, what) for rank in ranks if getattr(rank, what) is not None]
    return now - min(times) if times else 0.0


def is_consequence(etype: str, message: str) -> bool:
    """Whether an error reads like what a rank sees when another one is gone."""
    return etype in _DISTRIBUTED_TYPES and _CONSEQUENCES.search(message) is not None


def guilty(ranks: Collection[RankState], cause: str) -> list[RankState]:
    """The ranks that failed, the first one first.

    A rank that died or raised an error of its own comes before one whose error only says that a
    peer is gone, and a rank that left early comes before both kinds of its consequences.
    """
    if cause == "timeout":
        return sorted((rank for rank in ranks if not rank.done), key=lambda rank: rank.rank)
    failed = [rank for rank in ranks if rank.failed_at is not None]
    if cause == "stopped":
        failed += [rank for rank in ranks if rank.stopped_at is not None]
    own = [rank for rank in failed if not is_consequence(rank.etype, rank.message)]
    if not own:
        failed += [rank for rank in ranks if rank.left_at is not None and rank not in failed]
    return sorted(failed, key=_order)


def _order(rank: RankState) -> tuple[bool, float, int]:
    times = [at for at in (rank.failed_at, rank.left_at, rank.stopped_at) if at is not None]
    return is_consequence(rank.etype, rank.message), min(times), rank.rank


def first_failure(failures: Sequence[Failure]) -> Failure | None:
    """The failure to show, of those of all hosts in the order they were reported."""
    own = [failure for failure in failures if not failure["consequence"]]
    return next(iter(own or failures), None)
