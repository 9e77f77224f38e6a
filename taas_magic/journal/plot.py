"""Pictures of a run from its journal: how long ranks waited for data, and how fast it came."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from taas_magic.errors import UsageError
from taas_magic.journal.analysis import Flow, Point
from taas_magic.messages import Event

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


def curves(events: Iterable[Event]) -> list[Curve]:
    """How the loaders of a run went, from the events of its journal."""
    flow, began = Flow(keep_points=None), None
    for event in events:
        began = began or event.time
        flow.apply(event, event.time - began)
    return [_curve(loader.name, loader.points) for loader in flow.loaders.values()]


def draw(events: Iterable[Event], title: str) -> "Figure":
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
        above.plot(curve.seconds, [100 * share for share in curve.waited], marker=".")
        below.plot(curve.seconds, curve.batches_per_s, marker=".", label=_label(curve))
    above.set(title=title, ylabel="ranks waited (%)", ylim=(-2, 102))
    below.set(xlabel="seconds since the run began", ylabel="batches/s")
    below.set_ylim(bottom=0, top=1.1 * max(max(curve.batches_per_s) for curve in found) or 1)
    below.set_xlim(left=0)
    below.legend(loc="best", fontsize="small")
    pyplot.close(figure)  # else a notebook would show it twice: as a value, and at the cell's end
    return figure


def _curve(name: str, points: Iterable[Point]) -> Curve:
    steps = [(first.time, later.since(first)) for first, later in pairwise(points)]
    steps = [(time, step) for time, step in steps if step.time > 0 and step.span_s >= 0]
    return Curve(
        name,
        tuple(time + step.time / 2 for time, step in steps),
        tuple(step.share for _, step in steps),
        tuple(step.rate(step.batches) for _, step in steps),
        tuple(step.rate(step.bytes) / 1e6 for _, step in steps),
    )


def _label(curve: Curve) -> str:
    most = max(curve.mb_per_s)
    return f"{curve.name} (up to {most:,.0f} MB/s)" if most else curve.name
