"""Metrics, the numbers that ranks log by `taas.log`: their curves, tables and plots.

The pool's process appends each point to `metrics.csv`, and `read_metrics` returns this file as a
table. The other functions read and write no files.
"""

import base64
import csv
import io
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from taas_magic.errors import UsageError
from taas_magic.messages import MetricPoint, Metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE = "metrics.csv"
HEADER = ("time", "step", "rank", "name", "value", "attempt")

OWN_COLUMNS = ("step", "rank", "time")
"""The first columns of a run's table of metrics; each other column contains a metric."""

CURVE_POINTS = 200
"""Largest number of points of a curve in the status header."""

_DRAWN_LIMIT = 1e300
"""Largest absolute value that `draw_metric` passes to matplotlib."""

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
        count: Number of values, including those that a restart has replaced.
        is_new_attempt: Whether a restart has begun a new attempt, and the rank has logged no value
            of the metric since then.
    """

    def __init__(self) -> None:
        self.last, self.last_step, self.count = math.nan, 0, 0
        self.is_new_attempt = False
        self._means: list[tuple[int, float]] = []
        self._width, self._open = 1, list[tuple[int, float]]()

    def add(self, value: float, step: int = 0) -> None:
        """Add the next value, which the rank logged at `step`.

        The first value after a restart removes all points that begin at its step or later, because
        the new attempt repeats these steps.

        When `_width` values have arrived since the last point, add their mean as a new point. If
        the curve then has `CURVE_POINTS` points, replace each two neighbouring points by their
        mean, and double `_width`.
        """
        if self.is_new_attempt:
            self.is_new_attempt = False
            self._means = [point for point in self._means if point[0] < step]
            self._open = [point for point in self._open if point[0] < step]
        self.last, self.last_step = value, step
        self.count += 1
        self._open.append((step, value))
        if len(self._open) == self._width:
            self._means.append(_mean_point(self._open))
            self._open = []
        if len(self._means) == CURVE_POINTS:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means = [_mean_point(pair) for pair in pairs]
            self._width *= 2

    @property
    def points(self) -> list[float]:
        """The points, oldest first. The newest may be the mean of fewer than `_width` values."""
        newest = [_mean_point(self._open)] if self._open else []
        return [mean for _, mean in [*self._means, *newest]]


def _mean_point(points: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """Return the step of the first point, and the mean of the points' values."""
    return points[0][0], _mean([value for _, value in points])


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values; NaN if there are none.

    The sum of values such as 1e308 would be infinite, so the function adds fractions of the values.
    The result is limited to the range of the values. Otherwise, rounding would make the curve of a
    constant uneven.
    """
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return math.nan
    mean = sum(value / len(known) for value in known)
    return max(min(known), min(mean, max(known)))


Curves = dict[str, dict[int, Curve]]
"""The curve of each metric and rank; metrics are in the order of their first values."""


def add_points(curves: Curves, event: Metrics) -> None:
    """Add the values in a rank's event to `curves`.

    Each metric has one curve for each rank. The value of a metric goes to the metric's curve for
    the event's rank. If there is no such curve yet, create it.
    """
    for point in event.points:
        of_metric = curves.setdefault(point.name, {})
        if (curve := of_metric.get(event.rank)) is None:
            curve = of_metric[event.rank] = Curve()
        curve.add(number(point), point.step)


def begin_attempt(curves: Curves, ranks: Collection[int]) -> None:
    """Prepare the curves of ranks for a new attempt, which may log values of earlier steps again.

    No point is removed now. When a rank logs its first value of a metric in the new attempt, the
    curve removes the points from the value's step on (`Curve.add`).
    """
    for of_metric in curves.values():
        for rank in of_metric.keys() & ranks:
            of_metric[rank].is_new_attempt = True


def number(point: MetricPoint) -> float:
    """Return a point's value; NaN for None, which stands for NaN and infinity in JSON."""
    return math.nan if point.value is None else point.value


def sparkline(points: Sequence[float]) -> str:
    """Return a curve as at most 24 block characters; a space stands for NaN or infinity.

    If there are more points, each character stands for the mean of consecutive points. The heights
    of the blocks reach from the smallest to the largest of the shown values.
    """
    shown = [_mean(part) for part in _split_evenly(points, _SPARK_CHARS)]
    low, high = _range(shown)
    top = len(_BLOCKS) - 1
    return "".join(
        _BLOCKS[round(_height(value, low, high) * top)] if math.isfinite(value) else " "
        for value in shown
    )


def _split_evenly(points: Sequence[float], count: int) -> Iterator[Sequence[float]]:
    count = min(count, len(points))
    for at in range(count):
        yield points[at * len(points) // count : (at + 1) * len(points) // count]


def _range(values: Iterable[float]) -> tuple[float, float]:
    """Return the minimum and maximum of the finite values; (0, 1) if no value is finite."""
    known = [value for value in values if math.isfinite(value)]
    return (min(known), max(known)) if known else (0.0, 1.0)


def _height(value: float, low: float, high: float) -> float:
    """Return the height of a value in the range from `low` (0) to `high` (1).

    If the range is empty, or too narrow for floating-point numbers, return 0.5. The function
    computes with half the values, because the difference of two large values may be infinite.
    """
    range_half = high / 2 - low / 2
    return (value / 2 - low / 2) / range_half if range_half > 0 else 0.5


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
                f"{_MARGIN + (1 - _height(value, low, high)) * (_HEIGHT - 2 * _MARGIN):.1f}"
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


def rows(event: Metrics, is_first: bool, attempt: int = 0) -> bytes:
    """Return the lines of `metrics.csv` for an event.

    Args:
        is_first: Whether the file is empty, so that the lines must begin with the header.
        attempt: Attempt of the run in which the rank logged the values.
    """
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    if is_first:
        table.writerow(HEADER)
    for point in event.points:
        value = repr(number(point))
        table.writerow([f"{point.time:.3f}", point.step, event.rank, point.name, value, attempt])
    return text.getvalue().encode("utf-8", "backslashreplace")


class _Line(NamedTuple):
    time: float
    step: int
    rank: int
    name: str
    value: float
    attempt: int


def _lines(text: str) -> Iterator[_Line]:
    """Yield the lines of a `metrics.csv`. A file of an older version has no column `attempt`."""
    table = csv.reader(io.StringIO(text, newline=""))
    next(table, None)  # the header
    for time, step, rank, name, value, *attempt in table:
        yield _Line(
            float(time), int(step), int(rank), name, float(value), int(attempt[0]) if attempt else 0
        )


def read_metrics(folder: Path) -> Any:
    """Return all metrics of a run: a row for each step and rank, and a column for each metric.

    If a rank logs a metric again at the same step, as programs do that count steps from 0 in each
    epoch, this value and the rank's later values get new rows. If an attempt of the run begins a
    metric of a rank at a step, the values of earlier attempts from this step on are left out. A
    missing value is NaN. Without a `metrics.csv`, the table is empty. An incomplete last line is
    ignored.

    Returns:
        A pandas DataFrame with the columns `step`, `rank`, `time` and the metrics; a dict of lists
        with the same columns if pandas is not installed. If a metric has the name of one of the
        first three columns, its column gets an underscore at the end: the column of the metric
        `time` is `time_`. So that the columns stay unique, the column of a metric `time_` is always
        `time__`, and so on.
    """
    text = ""
    if (path := folder / FILE).exists():
        data = path.read_bytes()
        text = data[: data.rfind(b"\n") + 1].decode()  # the last line may be incomplete
    first_steps: dict[tuple[int, str], dict[int, int]] = {}
    for line in _lines(text):
        first_steps.setdefault((line.rank, line.name), {}).setdefault(line.attempt, line.step)
    found: list[tuple[_Line, dict[str, float]]] = []  # a row's first line, and its metrics
    open_rows: dict[int, dict[int, dict[str, float]]] = {}  # by rank, then by step
    names: dict[str, None] = {}
    for line in _lines(text):
        names[line.name] = None
        begun = first_steps[line.rank, line.name].items()
        if any(attempt > line.attempt and first <= line.step for attempt, first in begun):
            continue  # a later attempt repeated this step
        of_rank = open_rows.setdefault(line.rank, {})
        if line.name in of_rank.get(line.step, {}):
            of_rank.clear()
        if (row := of_rank.get(line.step)) is None:
            row = of_rank[line.step] = {}
            found.append((line, row))
        row[line.name] = line.value
    columns: dict[str, list[float]] = {
        "step": [line.step for line, _ in found],
        "rank": [line.rank for line, _ in found],
        "time": [line.time for line, _ in found],
    }
    for name in names:
        column = f"{name}_" if name.rstrip("_") in OWN_COLUMNS else name
        columns[column] = [row.get(name, math.nan) for _, row in found]
    try:
        import pandas  # type: ignore[import-untyped]
    except ImportError:
        return columns
    return pandas.DataFrame(columns)


def draw_metric(tables: Mapping[str, Any], metric: str | None) -> "Figure":
    """Draw the same metric of several runs over the steps, one line for each run's rank 0.

    If the steps of a run go back, for example at each epoch, the line has a gap there. Values
    beyond `_DRAWN_LIMIT` are drawn at this limit, because matplotlib cannot draw the range of all
    floating-point numbers. NaN and infinity are left out.

    Args:
        tables: The tables from `read_metrics`, by the name of the run.
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
            (step, max(-_DRAWN_LIMIT, min(value, _DRAWN_LIMIT)))
            for step, rank, value in zip(table["step"], table["rank"], table[metric], strict=True)
            if rank == 0 and math.isfinite(value)
        ]
        steps, values = zip(*_with_gaps(points), strict=True) if points else ((), ())
        axes.plot(steps, values, label=name)
    axes.legend()
    pyplot.close(figure)  # otherwise a notebook shows it twice: as a value, and at the cell's end
    return figure


def _with_gaps(points: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield pairs (step, value), and a pair of NaNs before each step that is below the last one."""
    last = -math.inf
    for step, value in points:
        if step < last:
            yield math.nan, math.nan
        yield step, value
        last = step
