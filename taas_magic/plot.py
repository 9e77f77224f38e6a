"""Pictures of a run from its journal: how long ranks waited for data, and how fast it came."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from taas_magic.errors import UsageError
from taas_magic.flow import Flow, Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Curve:
    """One loader over time.

    Attributes:
        name: The loader.
        seconds: Middles of the intervals, in seconds since the run's first event.
        waited: The share of each interval that ranks waited for the loader, 0 to 1.
        batches_per_s: What all ranks were handed.
        mb_per_s: The same in bytes; 0 where batches travel over no wire.
    """

    name: str
    seconds: tuple[float, ...]
    waited: tuple[float, ...]
    batches_per_s: tuple[float, ...]
    mb_per_s: tuple[float, ...]


def curves(events: Iterable[Mapping[str, Any]]) -> list[Curve]:
    """How the loaders of a run went, from the events of its journal."""
    flow, clock = Flow(keep_points=None), _Clock()
    steps: dict[str, list[tuple[float, Point]]] = {}
    for event in events:
        now = clock.read(event)
        flow.apply(event, now)
        if event["kind"] == "data" and event["rank"] == 0:
            for name in event["loaders"]:
                steps.setdefault(name, []).extend(_last_step(flow, name))
    return [_curve(name, found) for name, found in steps.items()]


def draw(events: Iterable[Mapping[str, Any]], title: str) -> "Figure":
    """Draws the curves of a run, one above the other.

    Raises:
        UsageError: matplotlib is missing, or the run used no registered loader for a second.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise UsageError(f"plot needs matplotlib ({error}): pip install matplotlib") from error
    found = [curve for curve in curves(events) if curve.seconds]
    if not found:
        raise UsageError(f"{title}: nothing to plot; no registered loader was used for a second")
    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(7, 4.2), layout="tight")
    for curve in found:
        above.plot(curve.seconds, [100 * share for share in curve.waited], label=curve.name)
        below.plot(curve.seconds, curve.batches_per_s, label=_label(curve))
    above.set(title=title, ylabel="ranks waited (%)", ylim=(-2, 102))
    below.set(xlabel="seconds since the run began", ylabel="batches/s")
    below.set_ylim(bottom=0)
    below.legend(loc="best", fontsize="small")
    pyplot.close(figure)  # else a notebook would show it twice: as a value, and at the cell's end
    return figure


class _Clock:
    """One time for all hosts, whose clocks may be days apart.

    A host's first event is as late as the event before it in the journal; from there on its own
    clock counts.
    """

    def __init__(self) -> None:
        self._ahead: dict[str, float] = {}
        self._latest = 0.0

    def read(self, event: Mapping[str, Any]) -> float:
        """Seconds since the journal's first event."""
        time = float(event["time"])
        now = time - self._ahead.setdefault(str(event["host"]), time - self._latest)
        self._latest = max(self._latest, now)
        return now


def _last_step(flow: Flow, name: str) -> Iterable[tuple[float, Point]]:
    points = flow.loaders[name].points
    if len(points) > 1:
        step = points[-1].since(points[-2])
        if step.time > 0:
            yield points[-1].time - step.time / 2, step


def _curve(name: str, steps: list[tuple[float, Point]]) -> Curve:
    return Curve(
        name,
        tuple(middle for middle, _ in steps),
        tuple(step.share for _, step in steps),
        tuple(step.rate(step.batches) for _, step in steps),
        tuple(step.rate(step.bytes) / 1e6 for _, step in steps),
    )


def _label(curve: Curve) -> str:
    most = max(curve.mb_per_s)
    return f"{curve.name} (up to {most:,.0f} MB/s)" if most else curve.name
