"""Metrics, the numbers that ranks log by `taas.log`: their curves, tables and plots.

The pool's process appends each point to `metrics.csv`, and `read` returns this file as a table. The
other functions read and write no files.
"""

import base64
import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taas_magic.errors import UsageError
from taas_magic.messages import MetricPoint, Metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE = "metrics.csv"
HEADER = ("time", "step", "rank", "name", "value")

OWN_COLUMNS = ("step", "rank", "time")
"""The first columns of a run's table of metrics; each other column contains a metric."""

CURVE_POINTS = 200
"""Largest number of points of a curve in the status header."""

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_CHARS = 24
_WIDTH, _HEIGHT, _MARGIN = 220, 44, 3
_COLOURS = ("#3b82d0", "#d97706", "#2f9e62", "#d9534f", "#8b5cf6", "#0891b2", "#be185d", "#65a30d")


class Curve:
    """Curve of one metric of one rank. It has at most `CURVE_POINTS` points.

    Each point is the mean of `_width` consecutive values. When there are `CURVE_POINTS` points, the
    curve replaces each two neighbouring points by their mean, and doubles `_width`.

    Attributes:
        last: The last value.
        last_step: The step of the last value.
        count: Number of values.
    """

    def __init__(self) -> None:
        self.last, self.last_step, self.count = math.nan, 0, 0
        self._means: list[float] = []
        self._width, self._open = 1, list[float]()

    def add(self, value: float, step: int = 0) -> None:
        """Add the next value, which the rank logged at `step`.

        When `_width` values have arrived since the last point, add their mean as a new point. If
        the curve then has `CURVE_POINTS` points, replace each two neighbouring points by their
        mean, and double `_width`.
        """
        self.last, self.last_step = value, step
        self.count += 1
        self._open.append(value)
        if len(self._open) == self._width:
            self._means.append(_mean(self._open))
            self._open = []
        if len(self._means) == CURVE_POINTS:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means = [_mean(pair) for pair in pairs]
            self._width *= 2

    @property
    def points(self) -> list[float]:
        """The points, oldest first. The newest may be the mean of fewer than `_width` values."""
        return [*self._means, _mean(self._open)] if self._open else list(self._means)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


Curves = dict[str, dict[int, Curve]]
"""The curve of each metric and rank; metrics are in the order of their first values."""


def add_points(curves: Curves, event: Metrics) -> None:
    """Add the values that a rank logged to the curves of this rank; create missing curves."""
    for point in event.points:
        of_metric = curves.setdefault(point.name, {})
        of_metric.setdefault(event.rank, Curve()).add(number(point), point.step)


def number(point: MetricPoint) -> float:
    """Return a point's value; NaN for None, which stands for NaN and infinity in JSON."""
    return math.nan if point.value is None else point.value


def sparkline(points: Sequence[float]) -> str:
    """Return a curve as at most 24 block characters; a space stands for NaN or infinity."""
    shown = [_mean(part) for part in _parts(points, _SPARK_CHARS)]
    low, high = _range(shown)
    top = len(_BLOCKS) - 1
    return "".join(
        _BLOCKS[round((value - low) / (high - low) * top)] if math.isfinite(value) else " "
        for value in shown
    )


def _parts(points: Sequence[float], count: int) -> Iterator[Sequence[float]]:
    count = min(count, len(points))
    for at in range(count):
        yield points[at * len(points) // count : (at + 1) * len(points) // count]


def _range(values: Iterable[float]) -> tuple[float, float]:
    """Return the minimum and maximum of the finite values; (0, 1) if no value is finite.

    If both are equal, lower the minimum and raise the maximum by 0.5.
    """
    known = [value for value in values if math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def svg_data_url(curves: Sequence[Sequence[float]]) -> str:
    """Return an SVG image of curves as a data URL for `<img src=…>`.

    All curves have the same scale, and each has its own colour; curves for which there is no colour
    are left out. A curve has a gap where a value is not finite. In an untrusted notebook, Jupyter
    shows such an image, but removes an `<svg>` element.
    """
    low, high = _range(value for points in curves for value in points)
    lines = []
    for points, colour in zip(curves, _COLOURS, strict=False):
        for part in _runs(points):
            marks = " ".join(
                f"{_MARGIN + at / max(1, len(points) - 1) * (_WIDTH - 2 * _MARGIN):.1f},"
                f"{_MARGIN + (high - value) / (high - low) * (_HEIGHT - 2 * _MARGIN):.1f}"
                for at, value in part
            )
            style = f"fill='none' stroke='{colour}' stroke-width='1.5' stroke-linecap='round'"
            lines.append(f"<polyline points='{marks}' {style}/>")
    svg = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{_HEIGHT}'>"
        f"{''.join(lines)}</svg>"
    )
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _runs(points: Sequence[float]) -> Iterator[list[tuple[int, float]]]:
    """Split a curve into parts, at the values that are not finite (NaN and infinity).

    Yields:
        A list with a pair (index in `points`, value) for each finite value of one part.
    """
    part: list[tuple[int, float]] = []
    for at, value in enumerate([*points, math.nan]):
        if math.isfinite(value):
            part.append((at, value))
        elif part:
            yield part
            part = []


def rows(event: Metrics, is_first: bool) -> bytes:
    """Return the lines of `metrics.csv` for an event.

    Args:
        is_first: Whether the file is empty, so that the lines must begin with the header.
    """
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    if is_first:
        table.writerow(HEADER)
    for point in event.points:
        value = repr(number(point))
        table.writerow([f"{point.time:.3f}", point.step, event.rank, point.name, value])
    return text.getvalue().encode("utf-8", "backslashreplace")


def read(folder: Path) -> Any:
    """Return all metrics of a run: one row for each step and rank, one column for each metric.

    If a value was logged again, for example after a restart, the later value counts. A missing
    value is NaN. Without a `metrics.csv`, the table is empty. An incomplete last line is ignored.

    Returns:
        A pandas DataFrame with the columns `step`, `rank`, `time` and the metrics; a dict of lists
        with the same columns if pandas is not installed. A metric with the name of one of the first
        three columns has an underscore appended, as in `time_`.
    """
    found: dict[tuple[int, int], dict[str, Any]] = {}
    names: dict[str, None] = {}
    if (path := folder / FILE).exists():
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # the last line may be incomplete
        for line in csv.DictReader(io.StringIO(whole, newline="")):
            key = int(line["step"]), int(line["rank"])
            row = found.setdefault(key, {"time": float(line["time"]), "metrics": {}})
            row["metrics"][line["name"]] = float(line["value"])
            names[line["name"]] = None
    columns: dict[str, list[float]] = {
        "step": [step for step, _ in found],
        "rank": [rank for _, rank in found],
        "time": [row["time"] for row in found.values()],
    }
    for name in names:
        column = f"{name}_" if name in OWN_COLUMNS else name
        columns[column] = [row["metrics"].get(name, math.nan) for row in found.values()]
    try:
        import pandas  # type: ignore[import-untyped]
    except ImportError:
        return columns
    return pandas.DataFrame(columns)


def draw(tables: Mapping[str, Any], metric: str | None) -> "Figure":
    """Draw the same metric of several runs over the steps, one line for each run's rank 0.

    Args:
        tables: The tables from `read`, by the name of the run.
        metric: The metric to draw; None for the first metric that all runs have.

    Raises:
        UsageError: matplotlib is missing, or not all runs have the metric.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise UsageError("taas.compare needs matplotlib: pip install matplotlib") from error
    shared = [
        name
        for name in next(iter(tables.values()))
        if name not in OWN_COLUMNS and all(name in table for table in tables.values())
    ]
    if not shared or metric not in (None, *shared):
        has = ", ".join(shared) or "none"
        asked = f' no metric "{metric}" in common' if metric else " no metric in common"
        raise UsageError(f"taas.compare: the runs have{asked}. Metrics of all runs: {has}")
    metric = metric or shared[0]
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    axes.set(xlabel="step", ylabel=metric)
    for name, table in tables.items():
        points = [
            (step, value)
            for step, rank, value in zip(table["step"], table["rank"], table[metric], strict=True)
            if rank == 0 and not math.isnan(value)
        ]
        axes.plot(*zip(*points, strict=True), label=name) if points else None
    axes.legend()
    pyplot.close(figure)  # otherwise a notebook shows it twice: as a value, and at the cell's end
    return figure
