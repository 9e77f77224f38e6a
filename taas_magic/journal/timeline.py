"""The timeline of a run: how long each rank computed and waited in each profiled step.

Each rank of a run with `--profile N` writes a trace of torch.profiler (`host/profile.py`). This
module compares the traces and divides the time of each step into four parts:

- load: The rank waits for a batch.
- communicate: The rank exchanges data in a collective, and no other work runs. The length of this
  part is the duration of the collective on the rank that joins it last: that rank does not wait.
- wait: The rank waits in a collective for the other ranks.
- compute: The rest of the step, including work that runs beside a collective.
"""

import gzip
import json
import re
import statistics
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from taas_magic.errors import UsageError
from taas_magic.shared_files import replace_atomically

FOLDER = "profile"
LOAD = "taas.load "
"""Prefix of the names of those events in a trace in which a rank waits for a registered loader."""

_FILE = re.compile(r"(\d+)-(\d+)\.json\.gz", re.ASCII)
_TRACE_BYTES = 2 << 30
_STEP = re.compile(r"ProfilerStep#(\d+)", re.ASCII)
_LOADS = (LOAD, "enumerate(DataLoader)")
_COLLECTIVES = ("gloo:", "nccl:", "mpi:", "ucc:")
_NCCL_KERNEL = "nccl"
_WORK = "aten::"
_COLOURS = {"load": "#d97706", "compute": "#2f9e62", "communicate": "#3b82d0", "wait": "#d9534f"}
_WIDTH, _ROW, _LABEL = 720, 14, 120


class Span(NamedTuple):
    """A part of a trace, from `start_us` to `end_us`, in microseconds since 1970."""

    start_us: float
    end_us: float


class StepTimes(NamedTuple):
    """Seconds that one rank spent loading, computing, communicating and waiting in one step."""

    rank: int
    step: int
    load_s: float
    compute_s: float
    communicate_s: float
    wait_s: float

    @property
    def busy_s(self) -> float:
        """Seconds of the step in which the rank did not wait for other ranks."""
        return self.load_s + self.compute_s + self.communicate_s


@dataclass
class Trace:
    """One rank's trace, reduced to the spans that the timeline needs.

    Attributes:
        host: Name of the rank's host.
        steps: Span of each profiled step, by number of the step.
        loads: Spans in which the rank waits for a batch.
        collectives: For each name of a collective, the spans of the collectives with this name, in
            order of time.
        work: Spans of GPU kernels that are no collectives; in a trace without such kernels, spans
            of torch's operators.
    """

    host: str
    steps: dict[int, Span]
    loads: list[Span]
    collectives: dict[str, list[Span]]
    work: list[Span]

    def shifted(self, offset_us: float) -> "Trace":
        """Return a copy of the trace with `offset_us` added to all times."""

        def move(spans: Iterable[Span]) -> list[Span]:
            return [Span(span.start_us + offset_us, span.end_us + offset_us) for span in spans]

        return Trace(
            self.host,
            dict(zip(self.steps, move(self.steps.values()), strict=True)),
            move(self.loads),
            {name: move(spans) for name, spans in self.collectives.items()},
            move(self.work),
        )


def trace_file(folder: Path, attempt: int, rank: int) -> Path:
    """Return the path of the trace that a rank wrote in an attempt.

    Args:
        folder: The folder of the run.
        attempt: Number of the attempt.
    """
    return folder / FOLDER / f"{attempt}-{rank}.json.gz"


def reduce_trace(loaded: Mapping[str, Any]) -> Trace:
    """Reduce a trace in Chrome's format, as torch.profiler writes it, to a `Trace`.

    Read only events with a duration (`"ph": "X"`). The names of the events tell which of them are
    steps, loads, collectives and torch's operators. If the trace has kernels of NCCL, each of these
    kernels is a collective. Otherwise, the collectives are the events that torch.distributed
    records on the CPU. The work is all other GPU kernels or, without them, torch's operators.
    """
    base_us = loaded.get("baseTimeNanoseconds", 0) / 1e3
    host = str(loaded.get("host_name", ""))
    found = Trace(host, {}, [], defaultdict(list), [])
    kernels, operators = list[Span](), list[Span]()
    on_gpu = defaultdict[str, list[Span]](list)
    for event in loaded["traceEvents"]:
        if event.get("ph") != "X":
            continue
        name, start_us = str(event["name"]), base_us + event["ts"]
        span = Span(start_us, start_us + event.get("dur", 0))
        kind = event.get("cat")
        if kind == "kernel":
            is_nccl = _NCCL_KERNEL in name.lower()
            (on_gpu[name.partition("(")[0]] if is_nccl else kernels).append(span)
        elif kind == "gpu_user_annotation":
            continue  # the kernels inside have the same name and times
        elif step := _STEP.fullmatch(name):
            found.steps[int(step[1])] = span
        elif name.startswith(_LOADS):
            found.loads.append(span)
        elif name.startswith(_COLLECTIVES):
            found.collectives[name].append(span)
        elif name.startswith(_WORK):
            operators.append(span)
    found.work = kernels or operators
    found.collectives = {
        name: sorted(spans) for name, spans in (on_gpu or found.collectives).items()
    }
    return found


def align_clocks(traces: Mapping[int, Trace]) -> tuple[dict[int, Trace], dict[int, float]]:
    """Convert the times in all traces to the clock of the first rank's host.

    A collective ends on all ranks at the same time. So the ends of the same collectives in two
    traces show how much the clocks of two hosts differ. The median of these differences is added to
    all times of a trace.

    Some traces stay unchanged: the traces of the first rank's host, and traces that have no
    collective in common with the first rank's trace.

    Returns:
        The converted traces by rank; and the microseconds that were added to the times of each
        trace, by rank.
    """
    offsets: dict[int, float] = {}
    first = traces[min(traces)] if traces else None
    for rank, trace in traces.items():
        assert first is not None
        apart = [
            own.end_us - theirs.end_us
            for name, spans in first.collectives.items()
            for own, theirs in zip(spans, trace.collectives.get(name, ()), strict=False)
        ]
        same = trace.host == first.host or not apart
        offsets[rank] = 0.0 if same else statistics.median(apart)
    return {rank: trace.shifted(offsets[rank]) for rank, trace in traces.items()}, offsets


def step_times(traces: Mapping[int, Trace]) -> list[StepTimes]:
    """Divide each rank's time in each step into four parts; return them ordered by step and rank.

    - Loading: the rank waits for its next batch.
    - Communication: the last part of each collective. The length of this part is the shortest
      duration of the collective on any rank.
    - Waiting: the first part of each collective, in which the rank waits for other ranks.
    - Computation: the rest of the step. If the rank does other work during a collective, the time
      of this work counts as computation, too.
    """
    shortest_us = _shortest_durations(traces.values())
    found = []
    for rank, trace in traces.items():
        loads, work = merge_spans(trace.loads), merge_spans(trace.work)
        communicates, waits = list[Span](), list[Span]()
        for name, spans in trace.collectives.items():
            for at, span in enumerate(spans):
                begins_us = span.end_us - shortest_us[name, at]
                waits.append(Span(span.start_us, begins_us))
                communicates.append(Span(begins_us, span.end_us))
        communicates = subtract_spans(merge_spans(communicates), work)
        waits = subtract_spans(merge_spans(waits), merge_spans([*work, *communicates]))
        for number, step in trace.steps.items():
            parts = [length_within(spans, step) / 1e6 for spans in (loads, communicates, waits)]
            load_s, communicate_s, wait_s = parts
            compute_s = max(0.0, (step.end_us - step.start_us) / 1e6 - sum(parts))
            found.append(StepTimes(rank, number, load_s, compute_s, communicate_s, wait_s))
    return sorted(found, key=lambda it: (it.step, it.rank))


def _shortest_durations(traces: Iterable[Trace]) -> dict[tuple[str, int], float]:
    """Return the duration of each collective on the rank where it was shortest, in microseconds.

    The keys are the name of the collective, and its index among the collectives with this name.
    """
    found: dict[tuple[str, int], float] = {}
    for trace in traces:
        for name, spans in trace.collectives.items():
            for at, span in enumerate(spans):
                length_us = span.end_us - span.start_us
                found[name, at] = min(found.get((name, at), length_us), length_us)
    return found


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Merge spans that overlap or touch; return the resulting spans in order."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.start_us <= found[-1].end_us:
            found[-1] = Span(found[-1].start_us, max(found[-1].end_us, span.end_us))
        else:
            found.append(span)
    return found


def subtract_spans(spans: Sequence[Span], removed: Sequence[Span]) -> list[Span]:
    """Return the parts of `spans` that no span of `removed` covers.

    Both arguments must be sorted and without overlaps, as `merge_spans` returns them.
    """
    found, at = [], 0
    for start_us, end_us in spans:
        while at < len(removed) and removed[at].end_us <= start_us:
            at += 1
        later = at
        while later < len(removed) and removed[later].start_us < end_us:
            if removed[later].start_us > start_us:
                found.append(Span(start_us, removed[later].start_us))
            start_us = max(start_us, removed[later].end_us)
            later += 1
        if start_us < end_us:
            found.append(Span(start_us, end_us))
    return found


def length_within(spans: Sequence[Span], bounds: Span) -> float:
    """Return the total length, in microseconds, of the parts of `spans` inside `bounds`."""
    lengths = (
        min(span.end_us, bounds.end_us) - max(span.start_us, bounds.start_us) for span in spans
    )
    return sum(length for length in lengths if length > 0)


def merge_traces(traces: Mapping[int, Mapping[str, Any]], offsets_us: Mapping[int, float]) -> bytes:
    """Return one trace of all ranks in Chrome's format, with a group of tracks for each rank.

    In each trace, times count from the trace's own base time (`baseTimeNanoseconds`). In the
    result, all times count from the earliest of these base times. Each process of a trace gets a
    new number, and a name with the rank and the host.

    Args:
        traces: Traces in Chrome's format, by rank.
        offsets_us: Microseconds to add to the times of each trace, by rank.
    """
    first_ns = min((trace.get("baseTimeNanoseconds", 0) for trace in traces.values()), default=0)
    events: list[dict[str, Any]] = []
    for rank, trace in traces.items():
        moved_us = (trace.get("baseTimeNanoseconds", 0) - first_ns) / 1e3 + offsets_us[rank]
        host = trace.get("host_name", "")
        numbers: dict[Any, int] = {}
        for event in trace["traceEvents"]:
            track = numbers.setdefault(event.get("pid"), rank * 1000 + len(numbers))
            event = {**event, "pid": track}
            if "ts" in event:
                event["ts"] += moved_us
            if event.get("name") == "process_name":
                event["args"] = {"name": f"rank {rank} on {host}: {event['args'].get('name', '')}"}
            if event.get("name") == "process_sort_index":
                event["args"] = {"sort_index": track}
            events.append(event)
    whole = {"schemaVersion": 1, "baseTimeNanoseconds": first_ns, "traceEvents": events}
    return json.dumps(whole).encode()


class Timeline:
    """Times of the ranks in the profiled steps of a run.

    A notebook shows a timeline as a picture. `print` shows it as a table.

    Attributes:
        steps: Times of each rank in each step, ordered by step and rank.
        path: The merged trace of all ranks, for https://ui.perfetto.dev or chrome://tracing.
    """

    def __init__(self, steps: Sequence[StepTimes], path: Path) -> None:
        self.steps, self.path = list(steps), path

    @property
    def slowest_rank(self) -> int:
        """The rank with the longest busy time in all steps together; other ranks waited for it."""
        busy_s = defaultdict[int, float](float)
        for one in self.steps:
            busy_s[one.rank] += one.busy_s
        return max(busy_s, key=lambda rank: busy_s[rank])

    @property
    def summary(self) -> str:
        """One line with the mean busy time per step, of the slowest rank and of the others."""
        slow = [one for one in self.steps if one.rank == self.slowest_rank]
        rest = [one for one in self.steps if one.rank != self.slowest_rank]
        slow_ms = _mean_busy(slow) * 1e3
        text = f"rank {self.slowest_rank} is slowest: busy {slow_ms:,.1f} ms in each step"
        if rest:
            text += f"; the other ranks are busy {_mean_busy(rest) * 1e3:,.1f} ms on average"
        return text

    def __repr__(self) -> str:
        """Return a table of the times in ms, the summary, and the path of the merged trace.

        The table has a line for each rank and step.
        """
        lines = ["step  rank      load   compute  communicate      wait  (ms)"]
        for one in self.steps:
            load, compute, communicate, wait = (seconds * 1e3 for seconds in one[2:])
            lines.append(
                f"{one.step:>4}  {one.rank:>4}  {load:>8,.1f}  {compute:>8,.1f}  "
                f"{communicate:>11,.1f}  {wait:>8,.1f}"
            )
        return "\n".join([*lines, self.summary, f"trace of all ranks: {self.path}"])

    def _repr_html_(self) -> str:
        """Return HTML for the notebook: the picture of `svg`, the summary and the trace's path."""
        image = b64encode(self.svg().encode()).decode()
        return (
            f'<img alt="{escape(repr(self))}" src="data:image/svg+xml;base64,{image}"/>'
            f"<div>{escape(self.summary)}; trace of all ranks: {escape(str(self.path))}</div>"
        )

    def svg(self) -> str:
        """Return the picture as SVG: a legend, and a bar for each rank and step, labelled in ms.

        Each bar has four coloured parts: loading, computation, communication and waiting. The text
        is grey, so that light and dark pages show it.
        """
        longest_s = max((sum(one[2:]) for one in self.steps), default=1.0) or 1.0
        scale = (_WIDTH - _LABEL - 80) / longest_s
        parts, y = [], 0
        for number, (name, colour) in enumerate(_COLOURS.items()):
            x = _LABEL + number * 110
            parts.append(f"<rect x='{x}' y='2' width='10' height='10' fill='{colour}'/>")
            parts.append(_text(x + 14, 11, name))
        for at, one in enumerate(self.steps):
            is_first = not at or self.steps[at - 1].step != one.step
            y = y + _ROW + (8 if is_first else 0)
            label = f"step {one.step}" if is_first else ""
            parts.append(_text(0, y + 10, label))
            parts.append(_text(_LABEL - 58, y + 10, f"rank {one.rank}"))
            x_at = float(_LABEL)
            for colour, seconds in zip(_COLOURS.values(), one[2:], strict=True):
                width = seconds * scale
                parts.append(
                    f"<rect x='{x_at:.1f}' y='{y}' width='{width:.1f}' height='{_ROW - 3}' "
                    f"fill='{colour}'/>"
                )
                x_at += width
            parts.append(_text(round(x_at) + 4, y + 10, f"{sum(one[2:]) * 1e3:,.1f} ms"))
        size = f"width='{_WIDTH}' height='{y + _ROW + 4}'"
        return f"<svg xmlns='http://www.w3.org/2000/svg' {size}>{''.join(parts)}</svg>"


def _text(x: int, y: int, text: str) -> str:
    style = "font-family='sans-serif' font-size='11' fill='#808080'"
    return f"<text x='{x}' y='{y}' {style}>{escape(text)}</text>"


def _mean_busy(steps: Sequence[StepTimes]) -> float:
    return sum(one.busy_s for one in steps) / max(1, len(steps))


def read_timeline(folder: Path) -> Timeline:
    """Read the traces of a run's last attempt, and return their timeline.

    Convert the times of all traces to one clock (`align_clocks`). Also write the merged trace to
    the file `timeline.json` in the run's folder for profiles.

    Raises:
        UsageError: The run has no trace, or a trace is too large.
    """
    named = [(_FILE.fullmatch(path.name), path) for path in (folder / FOLDER).glob("*.json.gz")]
    found = [(int(it[1]), int(it[2]), path) for it, path in named if it is not None]
    last = max((attempt for attempt, _, _ in found), default=0)
    loaded = {
        rank: _load_trace(path)
        for attempt, rank, path in sorted(found, key=lambda it: it[1])
        if attempt == last
    }
    if not loaded:
        raise UsageError(
            f"run {folder.name} has no profile. Start the cell with --profile 5, and take batches "
            "from a registered loader or call taas.step() in each iteration"
        )
    traces, offsets_us = align_clocks({rank: reduce_trace(trace) for rank, trace in loaded.items()})
    path = folder / FOLDER / "timeline.json"
    with replace_atomically(path) as file:
        file.write(merge_traces(loaded, offsets_us))
    return Timeline(step_times(traces), path)


def _load_trace(path: Path) -> dict[str, Any]:
    with gzip.open(path) as file:
        text = file.read(_TRACE_BYTES + 1)
    if len(text) > _TRACE_BYTES:
        raise UsageError(f"{path} has more than {_TRACE_BYTES >> 30} GiB; profile fewer steps")
    trace: dict[str, Any] = json.loads(text)
    return trace
