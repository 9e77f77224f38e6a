"""What ranks and fetchers say of a run's loaders, added up. Pure.

The head, the advice and the plot are made from the same sums. Hosts' clocks may be days apart, so
whoever adds an event says when it came; what ranks and lanes measured themselves are durations.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Counts = Mapping[str, float]

POINT_GAP_S = 0.9
"""Ranks report once a second; between two points each of them has."""

RATE_POINTS = 6
"""A rate is taken over so many points."""


class Point(NamedTuple):
    """The sums over all ranks at a moment: what came to them, and their seconds."""

    time: float
    batches: float = 0.0
    units: float = 0.0
    bytes: float = 0.0
    waited_s: float = 0.0
    span_s: float = 0.0

    def since(self, earlier: "Point") -> "Point":
        """What was added from `earlier` to this."""
        return Point._make(now - then for now, then in zip(self, earlier, strict=True))

    def rate(self, value: float) -> float:
        """A value for each second of this difference."""
        return value / self.time if self.time > 0 else 0.0

    @property
    def share(self) -> float:
        """The share of their time with the loader that ranks waited for it."""
        return min(1.0, self.waited_s / self.span_s) if self.span_s > 0 else 0.0


@dataclass
class Fetcher:
    """A fetcher that has come up: its host, that host's cores, its lanes for each loader."""

    host: str
    cores: int = 0
    lanes: Mapping[str, int] = field(default_factory=dict)


@dataclass
class LoaderFlow:
    """One loader.

    Attributes:
        name: Its name.
        ranks: What each rank counted last (`data` events).
        fetchers: What each fetcher said last (`fetched` events).
        began: The same when the ranks had their first batches.
        until: The same when ranks last said that they had more.
        points: The ranks' sums over time.
    """

    name: str
    points: deque[Point]
    ranks: dict[int, Counts] = field(default_factory=dict)
    fetchers: dict[int, Counts] = field(default_factory=dict)
    began: dict[int, Counts] = field(default_factory=dict)
    until: dict[int, Counts] = field(default_factory=dict)

    def total(self, name: str) -> float:
        """The sum of a count over all ranks."""
        return sum(counts.get(name, 0.0) for counts in self.ranks.values())

    def stock(self, name: str) -> float:
        """The sum of what all fetchers said last."""
        return sum(stats.get(name, 0.0) for stats in self.fetchers.values())

    def sums(self, now: float) -> Point:
        """The ranks' sums as they stand."""
        return Point(now, *(self.total(name) for name in Point._fields[1:]))

    @property
    def units(self) -> int:
        """Units that the ranks have had, with those before a state that was loaded."""
        resumed = max((counts.get("resumed", 0.0) for counts in self.ranks.values()), default=0.0)
        return int(self.total("units") + resumed)

    @property
    def shares(self) -> dict[int, float]:
        """The share of its time with the loader that each rank waited, by rank."""
        return {
            rank: Point(0.0, waited_s=counts.get("waited_s", 0.0), span_s=counts["span_s"]).share
            for rank, counts in sorted(self.ranks.items())
            if counts.get("span_s")
        }

    @property
    def recent(self) -> Point:
        """What came in the last seconds."""
        return self.points[-1].since(self.points[0]) if self.points else Point(0.0)

    @property
    def mean(self) -> Point:
        """All that came, in the time that the slowest rank spent with the loader."""
        spans = [counts.get("span_s", 0.0) for counts in self.ranks.values()]
        return self.sums(max(spans, default=0.0))

    def take_rank(self, rank: int, counts: Counts, now: float) -> None:
        """A rank's report."""
        self.ranks[rank] = counts
        if not self.points:
            self.points.append(Point(now - counts.get("span_s", 0.0)))
        if now - self.points[-1].time >= POINT_GAP_S:
            self._add_point(self.sums(now))

    def restart(self, now: float) -> None:
        """All ranks begin again."""
        self.ranks.clear()
        if self.points.maxlen:
            self.points.clear()
        self.points.append(Point(now))

    def _add_point(self, point: Point) -> None:
        if point.batches > self.points[-1].batches:
            self.began = self.began or dict(self.fetchers)
            self.until = dict(self.fetchers)
        self.points.append(point)


class Flow:
    """All loaders of a run.

    Args:
        keep_points: How many points are kept; None keeps all.
    """

    def __init__(self, keep_points: int | None = RATE_POINTS) -> None:
        self._keep_points = keep_points
        self.loaders: dict[str, LoaderFlow] = {}
        self.fetchers: dict[int, Fetcher] = {}
        self.rank_hosts: set[str] = set()
        self.filling: Mapping[str, Any] | None = None
        """The last `filling` event while ranks wait for `--prefill`; None: they do not."""

    def apply(self, event: Mapping[str, Any], now: float) -> None:
        """Takes the next event; kinds that say nothing about loaders are ignored."""
        match event.get("kind"):
            case "data":
                self.rank_hosts.add(str(event.get("host", "")))
                for name, counts in event["loaders"].items():
                    self._loader(name).take_rank(int(event["rank"]), counts, now)
            case "fetched":
                for name, stats in event["loaders"].items():
                    self._loader(name).fetchers[int(event["number"])] = stats
            case "fetcher":
                self._began(event)
            case "filling":
                self.filling = event
            case "started":
                self.filling = None
            case "restart":
                for loader in self.loaders.values():
                    loader.restart(now)

    def _loader(self, name: str) -> LoaderFlow:
        if name not in self.loaders:
            self.loaders[name] = LoaderFlow(name, deque(maxlen=self._keep_points))
        return self.loaders[name]

    def _began(self, event: Mapping[str, Any]) -> None:
        self.fetchers[int(event["number"])] = Fetcher(
            str(event.get("host", "")), int(event.get("cores", 0)), event.get("lanes", {})
        )
