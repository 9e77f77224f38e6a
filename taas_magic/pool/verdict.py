"""Decides what follows when hosts of a run have settled, from what they reported. Pure.

Each host judges its own ranks (`host.watch`) and reports; here is only how the reports of all
hosts add up. Times are this process's monotonic clock: those of hosts may be days apart.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from taas_magic.host.watch import LEFT_GRACE_S
from taas_magic.messages import Failure

SETTLE_S = 0.3
"""After a failure that is no consequence, how long other hosts may report theirs."""

LATE_S = 2.0
"""How long a host may take from a rank's failure to its report; it beats in the meantime.

It lets its other ranks settle first, and it may have more to do than it has cores.
"""

FINAL_CAUSES = frozenset({"timeout", "interrupt", "host"})
"""Causes that another attempt would not cure, or that the user wants to end the run."""

_WORST_LAST = ("SUCCEEDED", "INTERRUPTED", "FAILED", "LOST")


@dataclass(frozen=True)
class Report:
    """How one host's ranks ended.

    Attributes:
        state: SUCCEEDED, FAILED, INTERRUPTED, or LOST for a host that is gone.
        cause: As `host.watch.Verdict` has it; "lost" for a host that is gone.
        at: When it came.
        failures: Those of its ranks; with SUCCEEDED, ranks that left by `sys.exit(0)`.
    """

    state: str
    cause: str
    at: float
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class Standing:
    """One host in an attempt: its report, if there is one, and when it was last heard."""

    report: Report | None
    heard_at: float


@dataclass(frozen=True)
class Outcome:
    """An attempt is over.

    Attributes:
        state: The worst of its hosts'.
        failures: In the order in which they were reported; causes before consequences.
        curable: Whether another attempt may do better.
    """

    state: str
    failures: tuple[Failure, ...] = ()
    curable: bool = False


def decide(hosts: Collection[Standing], now: float) -> Outcome | None:
    """How an attempt ended; None while it goes on.

    The first failure that is reported need not be the first that happened: when a rank dies, those
    of other hosts fail in consequence, and may say so earlier. So a consequence alone decides
    nothing before every other host was heard a while after it. Messages of a host keep their order,
    so what it saw has come by then; and a host that is not heard will be taken for lost.

    Args:
        hosts: All hosts of the attempt.
        now: The time.
    """
    reports = [host.report for host in hosts if host.report is not None]
    bad = [report for report in reports if report.state != "SUCCEEDED"]
    if not bad:
        return _of_good(hosts, reports, now)
    since = min(report.at for report in bad)
    if len(reports) < len(hosts) and any(report.state != "INTERRUPTED" for report in bad):
        own = [report.at for report in bad if _is_own(report)]
        if own and now < min(own) + SETTLE_S:
            return None
        if not own and any(host.heard_at < since + LATE_S for host in hosts if not host.report):
            return None
    elif len(reports) < len(hosts):
        return None  # hosts that were interrupted say so within their grace
    return _of_bad(reports, bad)


def _of_good(hosts: Collection[Standing], reports: list[Report], now: float) -> Outcome | None:
    if len(reports) == len(hosts):
        return Outcome("SUCCEEDED")
    left = [report for report in reports if report.failures]
    if left and now >= min(report.at for report in left) + LEFT_GRACE_S:
        return Outcome("FAILED", _failures(left), curable=True)
    return None


def _of_bad(reports: list[Report], bad: list[Report]) -> Outcome:
    state = worst(report.state for report in bad)
    curable = not any(report.cause in FINAL_CAUSES for report in bad)
    if state == "INTERRUPTED":
        return Outcome(state)
    blamed = bad if any(_is_own(report) for report in bad) else reports
    return Outcome(state, _failures(blamed), curable)


def _failures(reports: Collection[Report]) -> tuple[Failure, ...]:
    ordered = sorted(reports, key=lambda report: report.at)
    found = [failure for report in ordered for failure in report.failures]
    return tuple(sorted(found, key=lambda failure: failure.consequence))


def _is_own(report: Report) -> bool:
    return any(not failure.consequence for failure in report.failures)


def worst(states: Iterable[str]) -> str:
    """The state of a run whose hosts ended in these."""
    return max(states, key=_WORST_LAST.index)
