"""`--prefill`: how much fetchers must have prepared before ranks are started.

It looks only at what fetchers say (`fetcher_ended` and `fetched` events), so it works wherever
those arrive.
"""

from collections.abc import Mapping
from typing import Any

from taas_magic.plan import Prefill

_ENDLESS = 1 << 62

Stats = Mapping[str, float]


class Filling:
    """How far a run's fetchers have come.

    Args:
        prefill: What is asked for.
        fetchers: How many there are.
        loaders: How many loaders they run.
        units: The bound of `--units`, for each loader.
    """

    def __init__(self, prefill: Prefill, fetchers: int, loaders: int, units: int | None) -> None:
        self._prefill, self._fetchers = prefill, fetchers
        self.wanted = prefill.amount if prefill.unit != "all" else loaders * (units or 0)
        self._stats: dict[int, list[Stats]] = {}
        self._ended: set[int] = set()

    def take(self, event: Mapping[str, Any]) -> bool:
        """Takes an event of a fetcher; returns whether it says how far it has come."""
        if event["kind"] == "fetched":
            self._stats[event["number"]] = list(event["loaders"].values())
        elif event["kind"] == "fetcher_ended":
            self._ended.add(event["number"])
        return bool(event["kind"] == "fetched")

    @property
    def done(self) -> float:
        """How much is ready, in memory and on disk."""
        if self._prefill.unit == "bytes":
            return self._sum("ready_bytes") + self._sum("spilled_bytes")
        return self._sum("ready")

    @property
    def is_enough(self) -> bool:
        """Whether ranks may start.

        They may, too, when no lane can prepare more: there is no more room, or no more data. And
        when every fetcher has ended, since ranks can say what that means for them.
        """
        if self.done >= self.wanted or len(self._ended) >= self._fetchers:
            return True
        has_all = len(self._stats.keys() | self._ended) >= self._fetchers
        return has_all and self._sum("idle") >= self._sum("lanes")

    @property
    def fields(self) -> dict[str, Any]:
        """What a `filling` event says."""
        unit = "bytes" if self._prefill.unit == "bytes" else "batches"
        return {"done": self.done, "wanted": self.wanted, "unit": unit}

    def _sum(self, name: str) -> float:
        return sum(stats[name] for loaders in list(self._stats.values()) for stats in loaders)


def lanes_fill(prefill: Prefill | None) -> tuple[int, int]:
    """How many batches and bytes all lanes together prepare before any rank asks, at the least."""
    if prefill is None:
        return 0, 0
    if prefill.unit == "bytes":
        return 0, prefill.amount
    return (prefill.amount if prefill.unit == "batches" else _ENDLESS), 0
