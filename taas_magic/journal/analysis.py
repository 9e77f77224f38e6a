"""Analysis of a run's loaders: how long ranks waited for batches, why, and what would help.

Ranks and fetchers send events with counts, such as batches received and seconds waited.

The clocks of hosts may differ by days. So the caller passes the arrival time of each event, and
ranks and workers measure only durations. This module reads and writes no files.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from taas_magic.errors import UsageError
from taas_magic.messages import (
    Event,
    FetcherCounts,
    FetcherEnded,
    FetcherReport,
    FetcherStarted,
    Prefilling,
    RankCounts,
    RankReport,
    RanksStarted,
    Restart,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINT_GAP_S = 0.9
"""Minimum seconds between the times of two items of `LoaderCounts.points`.

Ranks send their counts once a second. So each rank sends its counts once between two items.
"""

RATE_POINTS = 6
"""Maximum length of `LoaderCounts.points` for current rates, such as batches/s."""


class LoaderTotals(NamedTuple):
    """The sums of all ranks' counts for one loader at one time, or the difference of two such sums.

    Attributes:
        time: Seconds on the caller's clock; in a difference, the seconds between the two sums.
        bytes: Bytes that the ranks received from fetchers.
        waited_s: Seconds that the ranks waited for batches.
        span_s: Seconds that the ranks spent in loops over the loader, waiting or working.
    """

    time: float
    batches: float = 0.0
    units: float = 0.0
    bytes: float = 0.0
    waited_s: float = 0.0
    span_s: float = 0.0

    def since(self, earlier: "LoaderTotals") -> "LoaderTotals":
        """Return these totals minus `earlier`: what was added between the two times."""
        return LoaderTotals._make(now - then for now, then in zip(self, earlier, strict=True))

    def rate(self, value: float) -> float:
        """Return `value` per second; 0 if `time` is 0.

        Call this method on a difference of two totals, whose `time` is the seconds between them.

        Args:
            value: A field of these totals, such as `batches`.
        """
        return value / self.time if self.time > 0 else 0.0

    @property
    def waited_fraction(self) -> float:
        """The fraction of `span_s` that ranks spent waiting for batches, from 0 to 1."""
        return min(1.0, self.waited_s / self.span_s) if self.span_s > 0 else 0.0


@dataclass
class LoaderCounts:
    """The counts that ranks and fetchers have sent about one loader.

    Attributes:
        points: The sums of all ranks' counts at different times, oldest first.
        ranks: The newest counts of each rank.
        fetchers: The newest counts of each fetcher.
        counts_at_first_batch: Copy of `fetchers` from the time when ranks first received batches.
        counts_at_last_batch: Copy of `fetchers` from the time when ranks last received batches.
    """

    name: str
    points: deque[LoaderTotals]
    ranks: dict[int, RankCounts] = field(default_factory=dict)
    fetchers: dict[int, FetcherCounts] = field(default_factory=dict)
    counts_at_first_batch: dict[int, FetcherCounts] = field(default_factory=dict)
    counts_at_last_batch: dict[int, FetcherCounts] = field(default_factory=dict)

    def rank_total(self, name: str) -> float:
        """Return the sum of a field of `RankCounts` over all ranks."""
        return math.fsum(getattr(counts, name) for counts in self.ranks.values())

    def fetcher_total(self, name: str) -> float:
        """Return the sum of a field of `FetcherCounts` over all fetchers."""
        return math.fsum(getattr(counts, name) for counts in self.fetchers.values())

    def sums(self, now: float) -> LoaderTotals:
        """Return the sums of all ranks' newest counts, with the time `now`."""
        return LoaderTotals(now, *(self.rank_total(name) for name in LoaderTotals._fields[1:]))

    @property
    def units(self) -> int:
        """Units that all ranks have received.

        If the cell resumed from a saved state, this includes the units from before the state was
        saved.
        """
        resumed = max((counts.resumed for counts in self.ranks.values()), default=0)
        return int(self.rank_total("units")) + resumed

    @property
    def waited_fractions(self) -> dict[int, float]:
        """For each rank, the fraction of its loop time (`span_s`) in which the rank waited."""
        return {
            rank: LoaderTotals(0.0, waited_s=counts.waited_s, span_s=counts.span_s).waited_fraction
            for rank, counts in sorted(self.ranks.items())
            if counts.span_s
        }

    @property
    def recent(self) -> LoaderTotals:
        """The growth of the ranks' counts from the oldest to the newest item of `points`.

        Current rates are computed from this growth. If `points` is empty, all fields are 0.
        """
        return self.points[-1].since(self.points[0]) if self.points else LoaderTotals(0.0)

    @property
    def mean(self) -> LoaderTotals:
        """The sums of all ranks' counts so far, from which to compute mean rates.

        The field `time` has the longest time, in seconds, that a rank has spent in loops over the
        loader.
        """
        spans = [counts.span_s for counts in self.ranks.values()]
        return self.sums(max(spans, default=0.0))

    def apply_counts(self, rank: int, counts: RankCounts, now: float) -> None:
        """Store the newest counts of a rank; add the sums of all ranks' counts to `points` if due.

        If `points` is empty, first add zeros, for the time when the rank's loop began. New sums are
        due `POINT_GAP_S` seconds after the last item of `points`.

        If the new sums have more batches than the last item, ranks have received batches. In this
        case, copy `fetchers` to `counts_at_last_batch`. If `counts_at_first_batch` is empty, also
        copy `fetchers` there.

        Args:
            now: Time at which the counts arrived, in seconds on the caller's clock.
        """
        self.ranks[rank] = counts
        if not self.points:
            self.points.append(LoaderTotals(now - counts.span_s))
        if now - self.points[-1].time >= POINT_GAP_S:
            point = self.sums(now)
            if point.batches > self.points[-1].batches:
                self.counts_at_first_batch = self.counts_at_first_batch or dict(self.fetchers)
                self.counts_at_last_batch = dict(self.fetchers)
            self.points.append(point)

    def restart(self, now: float) -> None:
        """Remove all ranks' counts, because all ranks start again; add zeros to `points`.

        Older items of `points` are removed only if `points` has a maximum length.
        """
        self.ranks.clear()
        if self.points.maxlen:
            self.points.clear()
        self.points.append(LoaderTotals(now))


class RunCounts:
    """The counts that ranks and fetchers have sent about all loaders of a run.

    Args:
        keep_points: Maximum length of `LoaderCounts.points`; None for no limit.

    Attributes:
        loaders: The counts for each loader, by name.
        fetchers: The event `FetcherStarted` of each fetcher, by number of the fetcher.
        fetchers_ended: Numbers of the fetchers that have ended.
    """

    def __init__(self, keep_points: int | None = RATE_POINTS) -> None:
        self._keep_points = keep_points
        self.loaders: dict[str, LoaderCounts] = {}
        self.fetchers: dict[int, FetcherStarted] = {}
        self.fetchers_ended: set[int] = set()
        self.rank_hosts: dict[str, int] = {}
        """The hosts of ranks that use registered loaders, and each host's cores; 0 if unknown."""
        self.prefilling: Prefilling | None = None
        """The newest event of `--prefill` while ranks wait for it; else None."""

    def apply(self, event: Event, now: float) -> None:
        """Update the counts by the run's next event; ignore events that do not concern loaders.

        - The report of a rank or fetcher replaces the earlier counts of this rank or fetcher.
        - The start or end of a fetcher changes `fetchers` and `fetchers_ended`.
        - An event of `--prefill` sets `prefilling`; the start of the ranks sets it to None.
        - A restart of the ranks removes the ranks' counts for all loaders.

        Args:
            now: Time at which the event arrived, in seconds on the caller's clock.
        """
        match event:
            case RankReport():
                self.rank_hosts[event.host] = event.cores
                for name, counts in event.loaders.items():
                    self._loader(name).apply_counts(event.rank, counts, now)
            case FetcherReport():
                for name, stats in event.loaders.items():
                    self._loader(name).fetchers[event.number] = stats
            case FetcherStarted():
                self.fetchers[event.number] = event
                self.fetchers_ended.discard(event.number)
            case FetcherEnded():
                self.fetchers_ended.add(event.number)
            case Prefilling():
                self.prefilling = event
            case RanksStarted():
                self.prefilling = None
            case Restart():
                for loader in self.loaders.values():
                    loader.restart(now)

    def _loader(self, name: str) -> LoaderCounts:
        made = LoaderCounts(name, deque(maxlen=self._keep_points))
        return self.loaders.setdefault(name, made)


TOLERABLE_WAIT_FRACTION = 0.1
"""Maximum fraction of loop time that ranks may wait for batches without advice to the user.

Loop time is the time that ranks spend in loops over the loader.
"""

_LEAST_SPAN_S = 1.0
"""Minimum seconds that some rank must have spent in loops over a loader, for advice on it."""

_BUSY_FRACTION = 0.7
"""Limit for two fractions that show how busy the workers of a loader are.

- If the busiest worker prepares batches for a smaller fraction of the time, the delivery of batches
  limits the loader.
- If a smaller fraction of the workers work in parallel, the dataset has too few streams, or streams
  with different lengths.
"""

_CPU_BOUND_FRACTION = 0.6
"""If at least this fraction of an activity's time is CPU time, the CPU limits the activity.

Below this fraction, storage limits the preparation of batches, and the network or the buffer limits
the delivery of batches.
"""

_FULL_CORES_FRACTION = 0.8
"""If the workers keep at least this fraction of the hosts' cores busy, no core counts as free."""

_MAX_FETCHER_RATIO = 8
"""Maximum ratio of the number of fetchers that the advice names to the run's number of fetchers."""

_MIN_SPEEDUP = 1.15
"""Minimum factor by which more fetchers on the same hosts must speed up a run to be advised."""

_CORES_IN_USE = "all cores of this host are in use"
_WORKER_PER_CORE = "this host already has a worker for each core"


@dataclass(frozen=True)
class LoaderUse:
    """Figures on one loader: how busy its workers were, and how long ranks waited for batches.

    All fractions are from 0 to 1. Loop time is the time that ranks spent in loops over the loader.

    Attributes:
        waited: The fraction of the loop time that ranks spent waiting for batches.
        waited_first: The fraction of the loop time that ranks spent waiting for their first
            batches.
        fetchers: Number of fetchers that prepared batches; 0 in a run without fetchers.
        workers: Number of workers of all fetchers together.
        working: Mean number of workers that work in parallel: the work of all workers, divided by
            the work of the busiest worker.
        busy_fraction: The fraction of time in which the busiest worker prepared batches.
        cpu_fraction: The fraction of the preparation time that was CPU time. In the rest of the
            preparation time, workers waited for storage.
        cores_fraction: The fraction of all cores of the fetchers' hosts that the workers kept busy.
        own_hosts: Whether each fetcher has a host to itself.
        max_fetchers: Maximum number of fetchers for which the hosts have enough cores, if each
            fetcher has as many workers as now. Infinite if each fetcher has a host to itself, or if
            the number of cores is unknown.
        crosses: Whether fetchers and ranks are on more than one host.
        receive_cpu_fraction: The fraction of the ranks' time for receiving batches that was CPU
            time.
        mb_per_s: Mean MB/s that all ranks together received.
    """

    name: str
    waited: float
    waited_first: float = 0.0
    ranks: int = 1
    fetchers: int = 0
    workers: float = 1.0
    working: float = 1.0
    busy_fraction: float = 1.0
    cpu_fraction: float = 0.0
    cores_fraction: float = 0.0
    own_hosts: bool = False
    max_fetchers: float = math.inf
    crosses: bool = True
    receive_cpu_fraction: float = 0.0
    mb_per_s: float = 0.0

    @property
    def waited_later(self) -> float:
        """After the first batches: the fraction of the loop time that ranks waited for batches."""
        return max(0.0, self.waited - self.waited_first) / max(1e-6, 1.0 - self.waited_first)

    @property
    def possible_speedup(self) -> float:
        """The factor by which ranks would be faster if they waited only for their first batches."""
        return 1.0 / max(1e-6, 1.0 - self.waited_later)


def advice_for_run(run_counts: RunCounts) -> str:
    """Return advice on the loader for which ranks waited longest; "" if no advice is needed.

    No advice is needed if ranks waited for at most `TOLERABLE_WAIT_FRACTION` of their time in loops
    over this loader. Ignore a loader if no rank has spent `_LEAST_SPAN_S` seconds in its loops.
    """
    waited = [loader for loader in run_counts.loaders.values() if loader.mean.time >= _LEAST_SPAN_S]
    if not waited:
        return ""
    return advice_for_loader(
        loader_use(run_counts, max(waited, key=lambda loader: loader.rank_total("waited_s")))
    )


def advice_for_loader(load: LoaderUse) -> str:
    """Return what limited a loader and which flag would help; "" if no advice is needed.

    No advice is needed if ranks waited for at most `TOLERABLE_WAIT_FRACTION` of their loop time.
    Also return "" if the run has fetchers, but no counts of their workers have arrived.
    """
    if load.waited <= TOLERABLE_WAIT_FRACTION or (load.fetchers and not load.workers):
        return ""
    who = "the rank" if load.ranks == 1 else "ranks"
    return f"{who} waited {load.waited:.0%} for {load.name!r}: {_cause_and_remedy(load)}"


def _cause_and_remedy(load: LoaderUse) -> str:
    """Return what limited a loader that ranks waited for, and which flag would help.

    The result names the first of these causes that applies:

    1. Most of the wait was for the first batch.
    2. The run has no fetchers.
    3. The workers are idle, because batches reach the ranks slowly.
    4. The dataset has too few streams, or streams with different lengths.
    5. The storage is slow.
    6. The preparation takes CPU time.
    """
    if load.waited_later <= TOLERABLE_WAIT_FRACTION or load.waited_first > load.waited / 2:
        earlier = f"--prefill {load.ranks} would start the ranks when their first batches are ready"
        if not load.fetchers:
            earlier = "--cpus 1 would prepare it while the ranks start"
        return f"most of it for the first batch; {earlier}"
    if not load.fetchers:
        return _advise_for_ranks(load)
    if load.busy_fraction < _BUSY_FRACTION:
        return _advise_on_delivery(load)
    if load.working < _BUSY_FRACTION * load.workers:
        return (
            f"its dataset's streams kept only {load.working:.1f} of {load.workers:.0f} workers "
            f"busy; num_workers={load.workers:.0f} in the DataLoader would divide it into "
            f"{load.workers:.0f} streams"
        )
    if load.cpu_fraction < _CPU_BOUND_FRACTION and load.cores_fraction < _FULL_CORES_FRACTION:
        # processes that wait for storage need no cores of their own
        unlimited = replace(load, max_fetchers=math.inf)
        return f"its storage is slow; {_advise_more_fetchers(unlimited, math.inf)}"
    # on shared hosts, the free cores limit the speed-up of the fetchers
    free = math.inf if load.own_hosts else 1.0 / max(load.cores_fraction, 1e-6)
    more = _on_other_hosts(load, _CORES_IN_USE)
    if free >= _MIN_SPEEDUP:
        more = _advise_more_fetchers(load, free)
    return f"preparing it takes CPU time; {more}"


def _advise_for_ranks(load: LoaderUse) -> str:
    """Return the advice to add fetchers (`--cpus`) to a run whose ranks prepare their own batches.

    The advice has the number of fetchers, and the factor by which the run would probably be faster.
    """
    idle = max(1e-6, 1.0 - load.waited_later)
    wanted = math.ceil(load.ranks * load.waited_later / idle - 1e-9)
    most = min(max(_MAX_FETCHER_RATIO, 2 * load.ranks), load.max_fetchers)
    fetchers = max(1, math.floor(min(wanted, most)))
    faster = 1.0 / max(idle, load.waited_later * load.ranks / fetchers)
    cores = ", with cores of their own," if load.receive_cpu_fraction >= _CPU_BOUND_FRACTION else ""
    return (
        f"the run has no fetchers; --cpus {fetchers}{cores} would make it about "
        f"{_times(faster)} as fast"
    )


def _advise_on_delivery(load: LoaderUse) -> str:
    """Return the advice for a loader whose workers are idle, because batches reach ranks slowly.

    If the CPUs of the ranks are the limit, advise smaller batches. If ranks and fetchers are on one
    host, advise a larger buffer. Otherwise, advise more fetchers, or fetchers on other hosts if the
    hosts have too few cores.
    """
    if load.receive_cpu_fraction >= _CPU_BOUND_FRACTION:
        return (
            f"the ranks cannot receive more than {load.mb_per_s:,.0f} MB/s; no flag helps, but "
            "smaller batches do (uint8 instead of float32)"
        )
    if not load.crosses:
        return (
            "its workers are not busy, and no network limits it; a larger buffer lets them work "
            'further ahead ([data] buffer = "4GiB" in taas.toml)'
        )
    brings = f"the network limits it to {load.mb_per_s:,.0f} MB/s, and its workers are not busy; "
    if load.max_fetchers < load.fetchers + 1:
        return brings + _on_other_hosts(load, _WORKER_PER_CORE)
    fetchers, faster = _advised_count(load, math.inf, 1.0)
    return brings + (
        f"--cpus {fetchers} instead of {load.fetchers} would make it up to {_times(faster)} as "
        "fast if each fetcher's own link is the limit"
    )


def _advise_more_fetchers(load: LoaderUse, most: float) -> str:
    """Return the advice to use more fetchers; if the hosts lack cores, the advice to add hosts.

    Args:
        most: Maximum factor by which more fetchers could make the ranks faster.
    """
    if load.max_fetchers < load.fetchers + 1:
        return _on_other_hosts(load, _WORKER_PER_CORE)
    fetchers, faster = _advised_count(load, most, load.busy_fraction)
    return (
        f"--cpus {fetchers} instead of {load.fetchers} would make it about {_times(faster)} as fast"
    )


def _on_other_hosts(load: LoaderUse, why: str) -> str:
    return (
        f"{why}; fetchers on hosts of their own (--data-pool) would make it up to "
        f"{_times(load.possible_speedup)} as fast"
    )


def _advised_count(load: LoaderUse, most: float, busy: float) -> tuple[int, float]:
    """Return the number of fetchers to advise, and the factor by which they would speed up ranks.

    The number is the lowest number of fetchers with which ranks would not wait for batches, or
    would be `most` times as fast as now. There are two upper limits: `_MAX_FETCHER_RATIO` times
    `load.fetchers`, and `load.max_fetchers`. If the limited number is not higher than
    `load.fetchers`, the function returns `load.fetchers + 1` instead.

    Args:
        most: Maximum factor by which more fetchers could make the ranks faster.
        busy: Fraction of time in which the busiest worker prepares batches.
    """
    wanted = math.ceil(load.fetchers * min(load.possible_speedup, most) * busy - 1e-9)
    at_most = min(_MAX_FETCHER_RATIO * load.fetchers, load.max_fetchers)
    fetchers = max(load.fetchers + 1, math.floor(min(wanted, at_most)))
    return fetchers, min(load.possible_speedup, most, fetchers / load.fetchers / busy)


def _times(faster: float) -> str:
    return f"{faster:.1f}x" if faster < 10 else f"{faster:.0f}x"


def loader_use(run_counts: RunCounts, loader: LoaderCounts) -> LoaderUse:
    """Compute how busy a loader's workers were, and how long ranks waited, from the sent counts.

    Of the fetchers' work, this function counts only the time between the first and the last batch
    that ranks received. The cores are those of the fetchers' hosts or, in a run without fetchers,
    of the ranks' hosts.
    """
    sums, last = loader.mean, loader.counts_at_last_batch or loader.fetchers
    spent = [
        _spent(stats, loader.counts_at_first_batch.get(number)) for number, stats in last.items()
    ]
    fetchers = [one for one in run_counts.fetchers.values() if loader.name in one.workers]
    hosts, rank_hosts = {one.host for one in fetchers}, run_counts.rank_hosts.keys()
    fetch_s, cpu_s = sum(one.fetch_s for one in spent), sum(one.fetch_cpu_s for one in spent)
    most_s = max((one.fetch_most_s for one in spent), default=0.0)
    up_s = max((one.up_s for one in spent), default=0.0)
    own_hosts = bool(hosts) and len(hosts) == len(fetchers) and not hosts & rank_hosts
    cores = sum(_cores_of(run_counts, host) for host in hosts or rank_hosts)
    # Number of workers of each fetcher. Without fetchers, the number of workers of each rank:
    # a fetcher would have the same number.
    workers = [one.workers[loader.name] for one in fetchers]
    workers = workers or [rank.workers for rank in loader.ranks.values()]
    return LoaderUse(
        name=loader.name,
        waited=sums.waited_fraction,
        waited_first=min(
            sums.waited_fraction, _fraction(loader.rank_total("first_s"), sums.span_s)
        ),
        ranks=len(loader.ranks),
        fetchers=len(fetchers),
        workers=sum(stats.workers for stats in last.values()),
        working=fetch_s / most_s if most_s else 0.0,
        busy_fraction=_fraction(most_s, up_s),
        cpu_fraction=_fraction(cpu_s, fetch_s),
        cores_fraction=_fraction(cpu_s, up_s * cores),
        own_hosts=own_hosts,
        max_fetchers=math.inf if own_hosts or not cores else cores // max([1, *workers]),
        crosses=len(hosts | rank_hosts) > 1,
        receive_cpu_fraction=_fraction(
            loader.rank_total("receive_cpu_s"), loader.rank_total("receive_s")
        ),
        mb_per_s=sums.rate(sums.bytes) / 1e6,
    )


def _cores_of(run_counts: RunCounts, host: str) -> int:
    cores = (fetcher.cores for fetcher in run_counts.fetchers.values() if fetcher.host == host)
    return max(cores, default=run_counts.rank_hosts.get(host, 0))


def _spent(last: FetcherCounts, first: FetcherCounts | None) -> FetcherCounts:
    """Return the seconds that a fetcher and its workers spent while ranks received batches.

    If `first` is None, or a new fetcher with this number has started since, return `last`.

    Args:
        last: The fetcher's counts when ranks received their last batches.
        first: The fetcher's counts when ranks received their first batches; None if there are none.

    Returns:
        Counts of which only the four fields in seconds are valid.
    """
    if first is None or first.up_s >= last.up_s:
        return last
    names = ("fetch_s", "fetch_cpu_s", "fetch_most_s", "up_s")
    spent = {name: max(0.0, getattr(last, name) - getattr(first, name)) for name in names}
    return FetcherCounts(**spent)


def _fraction(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


def curves(events: Iterable[Event]) -> dict[str, list[tuple[float, LoaderTotals]]]:
    """Return how much the counts of each loader of a run grew in each interval of about 1 s.

    Args:
        events: The events in the run's journal.

    Returns:
        For each loader, a list of pairs, one for each interval. A pair has the middle of the
        interval, in seconds since the run's first event, and the growth of the ranks' counts. An
        interval in which the ranks restarted is left out.
    """
    run_counts, began = RunCounts(keep_points=None), None
    for event in events:
        began = began or event.time
        run_counts.apply(event, event.time - began)
    found: dict[str, list[tuple[float, LoaderTotals]]] = {}
    for name, loader in run_counts.loaders.items():
        steps = [(first.time, later.since(first)) for first, later in pairwise(loader.points)]
        steps = [(time + step.time / 2, step) for time, step in steps]
        found[name] = [it for it in steps if it[1].time > 0 and it[1].span_s >= 0]
    return found


def draw_loaders(events: Iterable[Event], title: str) -> "Figure":
    """Draw two curves for each loader: the % of time that ranks waited, and the batches/s.

    Args:
        events: The events in the run's journal.
        title: Title of the figure.

    Raises:
        UsageError: matplotlib is missing, or no registered loader was in use for at least 1 s.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise UsageError(f"plot needs matplotlib ({error}): pip install matplotlib") from error
    found = {name: curve for name, curve in curves(events).items() if curve}
    if not found:
        raise UsageError(f"{title}: nothing to plot: no registered loader was used for 1 s or more")
    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(7, 4.2), layout="tight")
    for name, curve in found.items():
        seconds = [time for time, _ in curve]
        most = max(step.rate(step.bytes) / 1e6 for _, step in curve)
        # 0 bytes: the ranks prepared the batches themselves
        label = f"{name} (up to {most:,.0f} MB/s)" if most else name
        above.plot(seconds, [100 * step.waited_fraction for _, step in curve], marker=".")
        below.plot(seconds, [step.rate(step.batches) for _, step in curve], marker=".", label=label)
    above.set(title=title, ylabel="ranks waited (%)", ylim=(-2, 102))
    below.set(xlabel="seconds since the run began", ylabel="batches/s")
    fastest = max(step.rate(step.batches) for curve in found.values() for _, step in curve)
    below.set_ylim(bottom=0, top=1.1 * fastest or 1)
    below.set_xlim(left=0)
    below.legend(loc="best", fontsize="small")
    pyplot.close(figure)  # otherwise a notebook shows it twice: as a value, and at the cell's end
    return figure
