"""What to change when ranks waited for data: one sentence, from what ranks and lanes counted. Pure.

The head says it when a run has ended, and `run.advice` has it. `load_of` turns the sums of a run
into a few shares; `advise` decides by them alone.
"""

import math
from dataclasses import dataclass

from taas_magic.flow import Counts, Flow, LoaderFlow

TOLERABLE = 0.1
"""The share of their time that ranks may wait without anything being said."""

_LEAST_SPAN_S = 1.0
_BUSY = 0.7
_MOST_CPU = 0.6
_FULL = 0.8
_MOST_TIMES = 8
_WORTH = 1.15


@dataclass(frozen=True)
class Load:
    """How a loader's work was spread; shares are from 0 to 1.

    Attributes:
        name: The loader.
        waited: The share of their time with it that ranks waited for it.
        first: The share of their time that went by before their first batch.
        ranks: How many there were.
        fetchers: How many prepared its batches; 0: the ranks themselves did.
        lanes: Processes that could prepare.
        working: How many of them had something to do.
        busy: The share of its time that the busiest lane prepared.
        cpu: The share of preparing that was computing; the rest is waiting for storage.
        cores: The share of the cores of the fetchers' hosts that the lanes used.
        own_hosts: Whether every fetcher has a host to itself.
        receiving: The share of a rank's receiving that was its own computing.
        mb_per_s: What came to all ranks together.
    """

    name: str
    waited: float
    first: float = 0.0
    ranks: int = 1
    fetchers: int = 0
    lanes: float = 1.0
    working: float = 1.0
    busy: float = 1.0
    cpu: float = 0.0
    cores: float = 0.0
    own_hosts: bool = False
    receiving: float = 0.0
    mb_per_s: float = 0.0

    @property
    def later(self) -> float:
        """The share of their time after the first batch that ranks waited."""
        return max(0.0, self.waited - self.first) / max(1e-6, 1.0 - self.first)

    @property
    def possible(self) -> float:
        """How many times as fast the ranks would be if they never waited."""
        return 1.0 / max(1e-6, 1.0 - self.later)


def advice(flow: Flow) -> str:
    """The sentence for the loader that ranks waited for longest; "" where none is needed."""
    waited = [loader for loader in flow.loaders.values() if loader.mean.time >= _LEAST_SPAN_S]
    if not waited:
        return ""
    return advise(load_of(flow, max(waited, key=lambda loader: loader.total("waited_s"))))


def advise(load: Load) -> str:
    """What bounded a loader, and which flag would help by how much; "" when ranks hardly waited."""
    if load.waited <= TOLERABLE or (load.fetchers and not load.lanes):
        return ""
    who = "the rank" if load.ranks == 1 else "ranks"
    return f"{who} waited {load.waited:.0%} for {load.name!r}: {_because(load)}"


def _because(load: Load) -> str:
    if load.later <= TOLERABLE:
        return f"most of it for the first batch; {_earlier(load)}"
    if not load.fetchers:
        return _prepared_by_ranks(load)
    if load.busy < _BUSY:
        return _delivery(load)
    if load.working < _BUSY * load.lanes:
        streams = round(load.working)
        return (
            f"its dataset is cut into {streams} stream{'s' * (streams > 1)} for {load.lanes:.0f} "
            f"lanes; num_workers={load.lanes:.0f} in the DataLoader would use them all"
        )
    if load.cpu < _MOST_CPU and load.cores < _FULL:
        return f"its storage waits; {_more(load, math.inf)}"
    more = _more(load, math.inf) if load.own_hosts else _on_cores_left(load)
    return f"preparing it takes CPU time; {more}"


def _earlier(load: Load) -> str:
    if not load.fetchers:
        return "--cpus 1 would prepare it while the ranks start"
    return f"--prefill {load.ranks} would start the ranks when their first batches are ready"


def _prepared_by_ranks(load: Load) -> str:
    """What ranks prepare in turn with their own work would be prepared beside it."""
    idle = max(1e-6, 1.0 - load.later)
    wanted = math.ceil(load.ranks * load.later / idle - 1e-9)
    fetchers = max(1, min(wanted, max(_MOST_TIMES, 2 * load.ranks)))
    faster = 1.0 / max(idle, load.later * load.ranks / fetchers)
    cores = ", with cores of their own," if load.receiving >= _MOST_CPU else ""
    return (
        f"it is prepared in the ranks themselves; --cpus {fetchers}{cores} would make it about "
        f"{_times(faster)} as fast"
    )


def _delivery(load: Load) -> str:
    if load.receiving >= _MOST_CPU:
        return (
            f"the ranks' own receiving ({load.mb_per_s:,.0f} MB/s) bounds it; smaller batches "
            "(uint8 instead of float32) help, no flag does"
        )
    fetchers, faster = _scaled(load, math.inf, 1.0)
    return (
        f"the network brings {load.mb_per_s:,.0f} MB/s while its lanes have time left; --cpus "
        f"{fetchers} instead of {load.fetchers} would make it up to {_times(faster)} as fast "
        "where each fetcher's own link is full"
    )


def _on_cores_left(load: Load) -> str:
    """Fetchers on hosts that others use, too, can be no faster than the cores that are left."""
    free = 1.0 / max(load.cores, 1e-6)
    if free >= _WORTH:
        return _more(load, free)
    return (
        "all cores of this host are busy: fetchers on hosts of their own (--data-pool) would make "
        f"it up to {_times(load.possible)} as fast"
    )


def _more(load: Load, most: float) -> str:
    fetchers, faster = _scaled(load, most, load.busy)
    return (
        f"--cpus {fetchers} instead of {load.fetchers} would make it about {_times(faster)} as fast"
    )


def _scaled(load: Load, most: float, busy: float) -> tuple[int, float]:
    """So many fetchers that ranks would not wait, but not too many; and how much faster that is."""
    wanted = math.ceil(load.fetchers * min(load.possible, most) * busy - 1e-9)
    fetchers = max(load.fetchers + 1, min(wanted, _MOST_TIMES * load.fetchers))
    return fetchers, min(load.possible, most, fetchers / load.fetchers / busy)


def _times(faster: float) -> str:
    return f"{faster:.1f}x" if faster < 10 else f"{faster:.0f}x"


def load_of(flow: Flow, loader: LoaderFlow) -> Load:
    """What the sums of a run say of one loader."""
    sums, last = loader.mean, loader.until or loader.fetchers
    spent = [_spent(stats, loader.began.get(number)) for number, stats in last.items()]
    hosts = {flow.fetchers[number].host for number in last if number in flow.fetchers}
    fetch_s, cpu_s = (sum(one[name] for one in spent) for name in ("fetch_s", "fetch_cpu_s"))
    most_s, up_s = (
        max((one[name] for one in spent), default=0.0) for name in ("fetch_most_s", "up_s")
    )
    return Load(
        name=loader.name,
        waited=sums.share,
        first=min(sums.share, _share(loader.total("first_s"), sums.span_s)),
        ranks=len(loader.ranks),
        fetchers=len(flow.fetchers),
        lanes=sum(stats["lanes"] for stats in last.values()),
        working=fetch_s / most_s if most_s else 0.0,
        busy=_share(most_s, up_s),
        cpu=_share(cpu_s, fetch_s),
        cores=_share(cpu_s, up_s * sum(_cores_of(flow, host) for host in hosts)),
        own_hosts=len(hosts) == len(last) and not hosts & flow.rank_hosts,
        receiving=_share(loader.total("receive_cpu_s"), loader.total("receive_s")),
        mb_per_s=sums.rate(sums.bytes) / 1e6,
    )


def _cores_of(flow: Flow, host: str) -> int:
    return max(fetcher.cores for fetcher in flow.fetchers.values() if fetcher.host == host)


def _spent(last: Counts, first: Counts | None) -> Counts:
    """What a fetcher's lanes did while ranks were fed; one that is new did all of it."""
    if first is None or first["up_s"] >= last["up_s"]:
        return last
    return {name: max(0.0, last[name] - first.get(name, 0.0)) for name in last}


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
