"""How long a rank waited for a loader, and what of that was its own work. Costs next to nothing."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TypeVar

_SAMPLE_EVERY = 16
_LEFT_S = 30.0
"""A pass that nobody asked for so long is taken to be left."""

_T = TypeVar("_T")


@dataclass
class Counts:
    """What a rank was handed of one loader, and how long it waited for it.

    Attributes:
        batches: Batches handed out.
        units: Their units.
        bytes: Their size on the wire; 0 where there was none.
        waited_s: Time in which the cell waited for a batch.
        retried: Questions that were asked again because a lane was lost.
        first_s: Of `waited_s`, what the first batch took.
        span_s: Time that the cell spent in its passes, waiting or working.
        receive_s: Time in which some of the batches were received.
        receive_cpu_s: Of that, what this process computed.
        held_bytes: Memory that batches are received into.
        resumed: Units, over all ranks, before the state that was loaded.
        spent: Units, over all ranks, that were handed out, those included.
    """

    batches: int = 0
    units: int = 0
    bytes: int = 0
    waited_s: float = 0.0
    retried: int = 0
    first_s: float = 0.0
    span_s: float = 0.0
    receive_s: float = 0.0
    receive_cpu_s: float = 0.0
    held_bytes: int = 0
    resumed: int = 0
    spent: int = 0

    def now(self, watch: "Watch | None") -> dict[str, float]:
        """All counts, with the time of a pass that goes on. Any thread may ask."""
        found: dict[str, float] = asdict(self)
        if watch is not None:
            waiting_s, span_s = watch.running()
            found["waited_s"] += waiting_s
            found["span_s"] += span_s
            if not self.batches:
                found["first_s"] += waiting_s
        return found


class Watch:
    """The time of one pass; adds what is over to the loader's counts."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._began = self._stopped = 0.0
        self._waits_since = 0.0

    def start(self) -> None:
        """The cell waits."""
        self._waits_since = time.perf_counter()
        self._began = self._began or self._waits_since

    def stop(self) -> None:
        """The cell goes on."""
        self._stopped = time.perf_counter()
        waited_s, self._waits_since = self._stopped - self._waits_since, 0.0
        self._counts.waited_s += waited_s
        if not self._counts.batches:
            self._counts.first_s += waited_s

    def end(self) -> None:
        """The pass is over."""
        self._counts.span_s += self._stopped - self._began
        self._began = self._stopped = 0.0

    def running(self) -> tuple[float, float]:
        """Seconds of the present wait, and of the pass so far."""
        now, began, waits_since = time.perf_counter(), self._began, self._waits_since
        if not began:
            return 0.0, 0.0
        until = now if waits_since else min(now, self._stopped + _LEFT_S)
        return (now - waits_since if waits_since else 0.0), until - began


def sampled(source: Iterator[_T], counts: Counts) -> Iterator[_T]:
    """Yield from `source`; measures now and then what of its time this thread computed."""
    wall_s = cpu_s = 0.0
    # The first one waits for the fetchers to begin, which says nothing about receiving.
    for number, item in enumerate(source, 1):
        if number % _SAMPLE_EVERY == 2:
            counts.receive_s += time.perf_counter() - wall_s
            counts.receive_cpu_s += time.thread_time() - cpu_s
        yield item
        if number % _SAMPLE_EVERY == 1:
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
