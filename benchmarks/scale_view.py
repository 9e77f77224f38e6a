"""Measure the work of the notebook's view for a run of many ranks.

A real View receives simulated events of the pool's process, and writes to a publisher that discards
everything. Each scene has two figures: the time per event, and the longest time in which the view
works without a pause. During this time, the notebook cannot react.
"""

import contextlib
import gc
import io
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

from taas_magic.display.head import RunState
from taas_magic.display.view import View
from taas_magic.messages import Event, Failure, Lines, RankFailure, RanksStarted, RunEnded
from taas_magic.plan import HostPlan, Plan

RANKS_PER_HOST = 8
LINES = 20
FRAME_EVENTS = 1000
"""Maximum number of events that Dask delivers to the kernel at a time."""


class Scene(NamedTuple):
    """Cost of a scene.

    Attributes:
        per_event_us: Microseconds that the view takes per event.
        longest_ms: Longest time in which the view works without a pause, in milliseconds.
    """

    name: str
    per_event_us: float
    longest_ms: float


def host_of(rank: int) -> str:
    return f"host{rank // RANKS_PER_HOST:04}"


def plan_of(world_size: int) -> Plan:
    ranks = min(world_size, RANKS_PER_HOST)
    hosts = tuple(HostPlan(i, i * ranks, ranks, 1) for i in range(-(-world_size // ranks)))
    run_id = "20260101-000000-000000"
    return Plan(run_id=run_id, name="scale", pool="big", world_size=world_size, hosts=hosts)


def scenes(world_size: int) -> dict[str, list[Event]]:
    """Return the events of each scene: a start, three kinds of lines, failures, and the end."""
    ranks = range(world_size)
    firsts = range(0, world_size, RANKS_PER_HOST)
    pids = {first: {r: r for r in ranks[first : first + RANKS_PER_HOST]} for first in firsts}
    return {
        "start": [RanksStarted(host=host_of(r), pids=pids[r]) for r in firsts],
        "a line that all print": _lines(ranks, lambda rank, i: f"epoch {i}"),
        "a line of each rank's own": _lines(ranks, lambda rank, i: f"loss {rank}.{i}"),
        "lines of one rank": _lines([0], lambda rank, i: f"step {i}"),
        "all fail": [RankFailure(host=host_of(r), failure=_failure(r)) for r in ranks],
        "end": [_ended(world_size)],
    }


def _lines(ranks: Iterable[int], text: Callable[[int, int], str]) -> list[Event]:
    return [
        Lines(host=host_of(rank), rank=rank, lines=[text(rank, i)])
        for i in range(LINES)
        for rank in ranks
    ]


def _failure(rank: int) -> Failure:
    return Failure(
        rank=rank,
        host=host_of(rank),
        pid=rank,
        how="raised",
        etype="RuntimeError",
        message="Connection closed by peer" if rank else "bad loss",
        traceback=["Traceback", "RuntimeError"],
        consequence=bool(rank),
    )


def _ended(world_size: int) -> Event:
    failures = [_failure(rank) for rank in range(world_size)]
    return RunEnded(state="FAILED", failures=failures, first=failures[0], elapsed_s=1.0)


def measure(world_size: int) -> tuple[list[Scene], float]:
    """Return the costs of the scenes, and the view's memory at the end in MiB.

    The costs come from a second view without memory tracing, because tracing takes time.
    """
    with _captured():
        made = scenes(world_size)
        tracemalloc.start()
        view = View(RunState(plan_of(world_size), Path("/tmp")))
        found = [_play(view, name, events) for name, events in made.items()]
        gc.collect()
        held_mib = tracemalloc.get_traced_memory()[0] / 2**20
        tracemalloc.stop()
        again = View(RunState(plan_of(world_size), Path("/tmp")))
        found = [_play(again, name, events) for name, events in made.items()]
    return found, held_mib


def _play(view: View, name: str, events: list[Event]) -> Scene:
    starts = range(0, len(events), FRAME_EVENTS)
    spent = [_frame(view, events[start : start + FRAME_EVENTS]) for start in starts]
    return Scene(name, sum(spent) / len(events) * 1e6, max(spent) * 1e3)


def _frame(view: View, events: list[Event]) -> float:
    began = time.perf_counter()
    for seen in events:
        view.feed(seen)
    view.tick(time.monotonic() + 1)
    return time.perf_counter() - began


@contextlib.contextmanager
def _captured() -> Iterator[None]:
    """Create an IPython shell whose display publisher discards everything."""
    shell = InteractiveShell.instance()
    shell.display_pub = _Forgetful()
    shell.kernel = None
    with contextlib.redirect_stdout(io.StringIO()):
        yield
    InteractiveShell.clear_instance()


class _Forgetful(CapturingDisplayPublisher):
    def publish(self, *args: Any, **kwargs: Any) -> None:
        """Discard the output."""
