"""The status header (the lines above a run's log) as text and HTML, and the state that it shows.

The functions do no I/O. Jupyter removes some HTML from an untrusted notebook. So this HTML uses
only inline styles, and elements such as <details>, which Jupyter keeps. The colours are readable on
light and dark themes. The functions escape all texts from hosts and users.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path, PurePosixPath
from typing import TypeVar

from msgspec import structs

from taas_magic.config import size_text
from taas_magic.display.failure import cut, headline, labelled, other_failures_text
from taas_magic.display.log import rank_ranges
from taas_magic.errors import listed
from taas_magic.journal.analysis import LoaderCounts, RunCounts, advice_for_run
from taas_magic.journal.folder import ENDED_STATES
from taas_magic.journal.metrics import (
    Curve,
    Curves,
    add_points,
    begin_attempt,
    sparkline,
    svg_data_url,
)
from taas_magic.messages import (
    DebuggerChanged,
    Event,
    Failure,
    Hang,
    InputAnswered,
    InputRequested,
    Lines,
    Metrics,
    Note,
    ProcessStack,
    Progress,
    RankFailure,
    RanksEnded,
    RanksStarted,
    RankStack,
    RankUsage,
    Restart,
    RunEnded,
    RunStacks,
    StateChanged,
    StoreReceipt,
    Usage,
)
from taas_magic.plan import Plan
from taas_magic.store.receipt import Receipt

COLOURS = {
    "STARTING": "#8c8c8c",
    "RUNNING": "#3b82d0",
    "SUCCEEDED": "#2f9e62",
    "FAILED": "#d9534f",
    "INTERRUPTED": "#c98a1b",
    "LOST": "#d9534f",
}
FRAME = (
    "background-color:rgba(128,128,128,0.08);padding:6px 12px 7px 12px;margin:2px 0px;"
    "font-size:13px;line-height:1.5;overflow-wrap:break-word"
)
CODE = "font-family:monospace"
TABLE = (  # a <pre> of JupyterLab has an opaque background
    "white-space:pre;overflow-x:auto;margin:0px;background-color:transparent;padding:0px"
)
SCROLLED = f"{TABLE};max-height:320px;overflow-y:auto"
LABEL = "opacity:0.6;font-size:12px"
NAME_CHARS = 500
"""Maximum characters of a name, a note or a reason in the status header."""

CELL_CHARS = 200
"""Maximum characters of one text in a table, of a metric's name, or of a process's command line."""

MAX_NOTES = 10
MAX_HOSTS = 4
MAX_LOADERS = 8
MAX_RANKS = 8
MAX_FILES = 8
MAX_GROUPS = 10
MAX_CURVES = 4
MAX_ROWS = 64
"""Maximum number of ranks in the status header's table of ranks."""

REDRAW_GAP_S = 1.0
"""Shortest time in seconds between two changes of an active run's curves, or of its rank table."""

STALE_S = 30
"""Seconds without an update after which an active run's header says that it is out of date.

An active run updates its header each second.
"""

TQDM = re.compile(r"(?P<label>.*?)(?P<percent>\d{1,3})%\|[^|]*\|(?P<rest>.*)", re.DOTALL)
_BAR = re.compile(r"\|[^|]*\|")
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9 .,:%/()_=-]")
"""Pattern of the characters that need an escape in a CSS string."""

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_HANG_HEAD = ("rank", "host", "since", "at", "waits for")

Fact = tuple[str, str]
"""One item of the status header: a label and a value."""

T = TypeVar("T")


@dataclass
class RunState:
    """The state of a run, computed from its events in the notebook's kernel.

    Attributes:
        gpus: Number of GPUs that the run holds; 0 for CPU ranks.
        held_gpu_s: GPU-seconds that the run held before the time `up_since`.
        began: Start time of the run, on the caller's clock.
        hosts: The hosts of the attempt `hosts_attempt`, in the order of their ranks.
        hosts_attempt: Number of the newest attempt in which a host has started ranks.
        first_ranks: The lowest rank of each host in `hosts`, by the host's name.
        live_ranks: Numbers of the ranks that have started and have not failed.
        up_since: Time of the last change of `gpus`, on the caller's clock. Infinity until the first
            ranks start.
        ended_at: End time of the run, on the caller's clock; infinity before that.
        elapsed_s: Duration of the run in seconds, from the event `RunEnded`; None if unknown.
        hangs: Hang reports by host: the time of the report, and the stacks of the host's ranks.
        ended_hosts: Names of lost hosts, and of hosts whose ranks have all ended without an
            interrupt.
        waiting_for_input: Numbers of the ranks that wait for a line of input from the user.
        debugged: Numbers of the ranks to which a client of debugpy is attached.
        last_attempt: Number of the attempt whose results count; 0 until the run has ended.
        final_title: Title that replaces the state after the notebook has stopped following the run;
            "" while the notebook follows the run.
        tails: The last log lines of each rank, by rank. Empty until the view is closed.
        processes: Host and process id of each rank that has started in the newest attempt, by rank.
        usage: The last report of each rank on its use of CPU, memory and GPU, by rank.
        rank_table: Lines of the table of ranks, with its head; [] if no rank has sent a report.
        rank_table_at: Time at which `rank_table` was made, on the caller's clock.
        curve_rows: Row of the status header with the curves, as text and HTML; [] if there is none.
        curves_drawn_at: Time at which `curve_rows` was drawn, on the caller's clock.
    """

    plan: Plan
    run_dir: Path
    gpus: int = 0
    held_gpu_s: float = 0.0
    began: float = 0.0
    notes: list[str] = field(init=False)
    state: str = "STARTING"
    hosts: list[str] = field(default_factory=list)
    hosts_attempt: int = 0
    first_ranks: dict[str, int] = field(default_factory=dict)
    live_ranks: set[int] = field(default_factory=set)
    up_since: float = math.inf
    ended_at: float = math.inf
    elapsed_s: float | None = None
    restarts: int = 0
    restart_cause: str = ""
    progress: str = ""
    failures: list[Failure] = field(default_factory=list)
    first: Failure | None = None
    why: str = ""
    receipt: Receipt | None = None
    run_counts: RunCounts = field(default_factory=RunCounts)
    advice: str = ""
    curves: Curves = field(default_factory=dict)
    hangs: dict[str, tuple[float, list[RankStack]]] = field(default_factory=dict)
    ended_hosts: set[str] = field(default_factory=set)
    waiting_for_input: set[int] = field(default_factory=set)
    debugged: set[int] = field(default_factory=set)
    last_attempt: int = 0
    final_title: str = ""
    tails: dict[int, list[str]] = field(default_factory=dict)
    processes: dict[int, tuple[str, int]] = field(default_factory=dict)
    usage: dict[int, RankUsage] = field(default_factory=dict)
    rank_table: list[str] = field(default_factory=list)
    rank_table_at: float = -math.inf
    curve_rows: list[tuple[str, str]] = field(default_factory=list)
    curves_drawn_at: float = -math.inf

    def __post_init__(self) -> None:
        self.notes = list(self.plan.notes)

    def apply(self, event: Event, now: float | None = None) -> None:
        """Update this state by the next event; ignore events that do not concern the status header.

        `run_counts` gets each event, too. These rules apply to some events:

        - A report on a hang, on ended ranks or on resource use is ignored if it comes from an
          earlier attempt.
        - The attribute `progress` becomes the newest unfinished line of rank 0, or the newest
          finished line of rank 0 that has a progress bar of tqdm, whichever comes later.
        - An empty unfinished line clears `progress`, unless `progress` has a progress bar of tqdm.

        Args:
            event: The event.
            now: Time at which the event arrived, from the same clock as `began`. None to use the
                time in the event, which the sender's clock measured. The clocks of machines may
                differ by days, so the view of an active run passes its own time.
        """
        now = event.time if now is None else now
        self.run_counts.apply(event, now)
        match event:
            case StateChanged():
                self.state = event.state
            case RanksStarted():
                self._record_start(event, now)
            case Progress(rank=0):
                # an empty text (the line is finished) does not remove a progress bar
                if event.text.strip() or not TQDM.match(self.progress):
                    self.progress = event.text.strip()
            case Lines(rank=0):
                # A finished bar is a whole line. The bar of a short loop is only sent as a line.
                bars = (it for it in reversed(event.lines) if "%|" in it and TQDM.match(it))
                self.progress = next(bars, self.progress)
            case Note():
                if event.text not in self.notes:
                    self.notes.append(event.text)
            case RankFailure():
                self._record_failure(event.failure)
            case Restart():
                self._record_restart(event)
            case Hang() if event.attempt == self.restarts:
                self.hangs[event.host] = now, event.ranks
            case RanksEnded() if event.attempt == self.restarts:
                if event.cause != "interrupt":  # `hang` needs the hosts of an interrupted hang
                    self.ended_hosts.add(event.host)
            case InputRequested():
                self.waiting_for_input.add(event.rank)
            case InputAnswered():
                self.waiting_for_input.discard(event.rank)
            case Usage() if event.attempt == self.restarts:
                self.usage.update((row.rank, row) for row in event.ranks)
            case DebuggerChanged():
                change = self.debugged.add if event.is_attached else self.debugged.discard
                change(event.rank)
            case Metrics():
                add_points(self.curves, event)
            case StoreReceipt():
                self.receipt = (self.receipt or Receipt()).with_event(event)
            case RunEnded():
                self.state, self.ended_at = event.state, now
                self.elapsed_s, self.first, self.why = event.elapsed_s, event.first, event.why
                self.failures, self.last_attempt = event.failures, event.attempt
                self.advice = advice_for_run(self.run_counts)

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended."""
        return self.state in ENDED_STATES

    @property
    def hang(self) -> list[RankStack]:
        """The stacks of all ranks if every host with active ranks reports a hang; else [].

        If the user interrupted the hang, the property keeps these stacks after the end of the run.
        In the result, the field `since` is a time on the same clock as `began`.
        """
        there = set(self.hosts) - self.ended_hosts
        said = {host: found for host, found in self.hangs.items() if found[1] and host in there}
        if (self.has_ended and self.state != "INTERRUPTED") or not said or there - said.keys():
            return []
        return [
            structs.replace(row, host=host, since=at - row.quiet_s)
            for host, (at, rows) in said.items()
            for row in rows
        ]

    def elapsed(self, now: float) -> float:
        """Return the seconds from the start of the run to its end, or to `now` if it is active."""
        if self.elapsed_s is not None:
            return self.elapsed_s
        return max(0.0, min(now, self.ended_at) - self.began)

    def gpu_seconds(self, now: float) -> float:
        """Return the GPU-seconds of the run from the start of its ranks to its end, or to `now`."""
        return self.held_gpu_s + self.gpus * max(0.0, min(now, self.ended_at) - self.up_since)

    def _record_start(self, event: RanksStarted, now: float) -> None:
        """Record that a host has started its ranks.

        If this is the first host of a new attempt, forget the hosts, processes and GPUs of the last
        attempt. Then add the facts in the event:

        - the host's ranks to `live_ranks` and `processes`;
        - the host's GPUs to `gpus`;
        - the host's name to `hosts`, in the order of the ranks.

        In a new attempt, a rank may log metrics of earlier steps again. So mark the curves of the
        host's ranks (`begin_attempt`): when such a rank logs its next value, the older points of
        this curve with the same or a later step are removed.
        """
        gpus = self.gpus + event.gpus
        if event.attempt:
            begin_attempt(self.curves, event.pids)
        if event.attempt > self.hosts_attempt:  # a restart may have replaced hosts
            self.hosts, self.hosts_attempt, self.first_ranks = [], event.attempt, {}
            self.processes.clear()
            gpus = event.gpus
        self._set_gpus(gpus, now)
        if event.host and event.host not in self.hosts:
            self.hosts.append(event.host)
            self.first_ranks[event.host] = min(event.pids, default=0)
            # hosts report in any order; a run lists them in the order of their ranks
            self.hosts.sort(key=lambda host: self.first_ranks[host])
        self.live_ranks.update(event.pids)
        self.processes.update((rank, (event.host, pid)) for rank, pid in event.pids.items())
        self.up_since = min(self.up_since, now)

    def _record_failure(self, failure: Failure) -> None:
        """Record a failure of a rank or a host.

        The first failure that is not a consequence of another failure becomes `first`. Remove a
        failed rank from `live_ranks`, and add a lost host to `ended_hosts`.
        """
        self.failures.append(failure)
        if failure.rank is not None:
            self.live_ranks.discard(failure.rank)
        if failure.how == "host":  # the host is lost; a federation continues without it
            self.ended_hosts.add(failure.host)
        if self.first is None and not failure.consequence:
            self.first = failure

    def _record_restart(self, event: Restart) -> None:
        """Record the number and the cause of a restart, and remove the facts of the last attempt.

        These facts are the failures, live ranks, ended hosts, hangs, resource use, requests for
        input and debuggers. The hosts and GPUs of the last attempt stay until a host has started
        ranks of the new attempt.
        """
        self.restarts = event.attempt
        self.restart_cause = headline(event.failure) if event.failure else ""
        self.first = None
        self.usage.clear()
        self.debugged.clear()
        for known in (
            self.live_ranks,
            self.hangs,
            self.ended_hosts,
            self.failures,
            self.waiting_for_input,
        ):
            known.clear()

    def _set_gpus(self, gpus: int, now: float) -> None:
        """Record that the run holds `gpus` GPUs from the time `now` on."""
        self.held_gpu_s = self.gpu_seconds(now)
        if self.up_since < math.inf:
            self.up_since = max(self.up_since, now)
        self.gpus = gpus


def header_text(state: RunState, now: float) -> str:
    """Return the status header as plain text, without a newline at its end."""
    return "\n".join(words for words, _ in _header_rows(state, now))


def status_line(state: RunState, now: float) -> str:
    """Return one line about an active run, for a terminal.

    If ranks have logged metrics, the line has these parts in this order: the state, the elapsed
    time, the first `MAX_CURVES` metrics, and the text around rank 0's progress bar, without the
    bar. The terminal may cut the end of the line, so the most important parts come first.

    If there are no metrics, the line is rank 0's progress, with its bar. Return "" if the run has
    ended, or if there are neither metrics nor progress.
    """
    curves = [_curve_text(name, of_ranks) for name, of_ranks in state.curves.items()][:MAX_CURVES]
    progress = plain(state.progress).partition("\n")[0]
    if state.has_ended or not (curves or progress):
        return ""
    if curves:
        progress = _BAR.sub("", progress)
    shown = [state.state, duration(state.elapsed(now)), *curves, progress]
    return " · ".join(filter(None, shown)) if curves else progress


def mime_bundle(state: RunState, now: float) -> dict[str, str]:
    """Return the status header as text and as HTML, by MIME type."""
    words, rows = zip(*_header_rows(state, now), strict=True)
    content = "".join(rows) + _live_table_rule(state, now)
    html = f"<div style='{FRAME};border-left:3px solid {_colour(state)}'>{content}</div>"
    return {"text/html": html, "text/plain": "\n".join(words)}


def live_table_html(run_id: str) -> str:
    """Return collapsible HTML that shows the newest table of an active run's ranks.

    Show this HTML once, below the status header, and never update it: an update closes `<details>`,
    and scrolls to the top of the table. The HTML itself contains only a hint in place of the table.
    A CSS rule in the status header replaces the hint by the table (`_live_table_rule`). The status
    header is updated each second, so the shown table changes, too.
    """
    hint = f"%taas ranks {run_id} shows a table of the ranks"
    return (
        f"<details style='{FRAME};border-left:3px solid {COLOURS['RUNNING']};font-size:12px'>"
        f"<summary>ranks</summary><pre class='{_table_class(run_id)}' style='{SCROLLED}'>"
        f"<span>{escape(hint)}</span></pre></details>"
    )


def _table_class(run_id: str) -> str:
    return "taas-ranks-" + re.sub(r"[^\w-]", "-", run_id)


def _live_table_rule(state: RunState, now: float) -> str:
    """Return the CSS rule that shows the table of ranks in the HTML of `live_table_html`.

    Return "" if the run has ended, if its view is closed, or if no rank has sent a report.
    """
    if state.has_ended or state.final_title or not (table := _rank_table(state, now)):
        return ""
    selector = f".{_table_class(state.plan.run_id)}"
    rules = f"{selector}>span{{display:none}}{selector}::before{{content:'{_css_text(table)}'}}"
    return f"<style>{rules}</style>"


def _css_text(lines: Sequence[str]) -> str:
    """Return lines as the content of a CSS string; escape characters that could end the string."""
    return _NOT_PLAIN.sub(lambda found: f"\\{ord(found[0]):x} ", "\n".join(lines))


def _rank_table(state: RunState, now: float) -> list[str]:
    """Return the lines of the status header's table of ranks; [] if no rank has sent a report.

    The table has at most `MAX_ROWS` ranks; a line below has the number of further ranks. For an
    active run, store the table in `state`, and make a new table only after `REDRAW_GAP_S` seconds.
    """
    is_last = state.has_ended or state.final_title
    if is_last or not state.rank_table or now - state.rank_table_at >= REDRAW_GAP_S:
        ranks = sorted(state.processes)
        rows = [
            _rank_cells(rank, state.processes[rank], state.usage.get(rank), state)
            for rank in ranks[:MAX_ROWS]
            if state.usage
        ]
        state.rank_table = _ranks_lines(rows)
        if len(ranks) > MAX_ROWS and rows:
            state.rank_table.append(f"… and {len(ranks) - MAX_ROWS:,} more ranks")
        state.rank_table_at = now
    return state.rank_table


def _last_table_html(state: RunState, now: float) -> str:
    """Return collapsible HTML with a table of the last report of each rank, for an ended run.

    Return "" if the run is active, or if no rank has sent a report.
    """
    if not state.has_ended or not (table := _rank_table(state, now)):
        return ""
    content = f"<pre style='{SCROLLED}'>{escape(chr(10).join(table))}</pre>"
    inside = f"<details><summary>ranks (the last report of each)</summary>{content}</details>"
    return _row(inside, "font-size:12px")


def _colour(state: RunState) -> str:
    return COLOURS.get(state.state, COLOURS["STARTING"])


def _header_rows(state: RunState, now: float) -> Iterator[tuple[str, str]]:
    """Yield the rows of the status header from top to bottom, as pairs of text and HTML.

    The rows are: title and facts, progress, loaders, metrics, hang, requests for input, attached
    debuggers, advice, notes, failures, receipt, and the run folder. Rows without content are left
    out. Below the run folder, the HTML also has each rank's last report and last log lines; the
    text lacks them.

    If the notebook has stopped following the run, a row below the title says how to show the run
    again and how to end it.
    """
    found = facts(state, now)
    title = f"{state.final_title or state.state} {cut(state.plan.name, NAME_CHARS)}".rstrip()
    yield _join_facts([title], found), _title_row(state) + _row(_facts_html(found))
    if state.final_title:
        run_id = state.plan.run_id
        said = f"%taas attach {run_id} shows its state; %taas stop {run_id} ends it"
        yield said, _row(escape(said))
    if state.progress:
        rows = "".join(_progress_row(line) for line in state.progress.split("\n") if line)
        yield f"rank 0: {plain(state.progress)}", rows
    for name, found in loader_lines(state.run_counts, state.plan.units, state.has_ended):
        name = cut(name, NAME_CHARS)
        words = f"{name}: {_join_facts([], found)}".rstrip(": ")
        yield words, _row(f"<b>{escape(name)}</b> {_facts_html(found)}")
    yield from _curve_rows(state, now)
    if state.hang:
        title, *table = hang_lines(state, now)
        rows = _row(escape(title), f"color:{COLOURS['INTERRUPTED']}") + as_html("\n".join(table))
        yield "\n".join([title, *table]), rows
    if state.waiting_for_input and not state.has_ended:
        ranks = rank_ranges(sorted(state.waiting_for_input))
        waits = f"rank{'s' * (len(state.waiting_for_input) > 1)} {ranks}: waiting for your input"
        yield waits, _row(waits, f"color:{COLOURS['INTERRUPTED']}")
    if state.debugged and not state.has_ended:
        ranks = rank_ranges(sorted(state.debugged))
        has = (
            f"rank{'s' * (len(state.debugged) > 1)} {ranks}: a debugger is attached; the clocks of "
            "--timeout and --hang are paused"
        )
        yield has, _row(has, f"color:{COLOURS['INTERRUPTED']}")
    if state.advice:
        yield _labelled("advice", state.advice)
    for note in shown_notes(state):
        yield f"note: {note}", _row(f"note: {escape(note)}", "opacity:0.8")
    if outcome := headline(state.first) if state.first else cut(state.why, NAME_CHARS):
        yield outcome, _row(escape(outcome), f"color:{COLOURS['FAILED']}")
    summary, lines = other_failures_text(state.first, state.failures)
    if summary:
        style = "padding:0px 0px 0px 16px;opacity:0.8"
        body = "".join(_row(escape(line), style) for line in lines)
        details = f"<details><summary>{escape(summary)}</summary>{body}</details>"
        yield "\n".join([f"{summary}:", *(f"    {line}" for line in lines)]), _row(details)
    for label, value in receipt_lines(state.receipt):
        yield _labelled(label, value)
    log = f"log: <span style='{CODE}'>{escape(str(state.run_dir))}</span>"
    row = _row(log, "font-size:12px;opacity:0.65")
    yield f"log: {state.run_dir}", row + _last_table_html(state, now) + _tails_html(state)


def _tails_html(state: RunState) -> str:
    """Return collapsible HTML with the last log lines of each rank; "" if there are no lines.

    If several ranks have equal last lines, show these lines once, with the numbers of the ranks.
    Cut long lines, and remove colours.
    """
    alike: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, lines in state.tails.items():
        alike[tuple(cut(_COLOUR.sub("", line), CELL_CHARS) for line in lines)].append(rank)
    style = f"{CODE};white-space:pre-wrap;margin:0px 0px 4px 16px;font-size:12px"
    shown = [
        f"<details style='margin:0px 0px 0px 16px'><summary>rank{'s' * (len(ranks) > 1)} "
        f"{rank_ranges(sorted(ranks))}</summary>"
        f"<div style='{style}'>{escape(chr(10).join(lines))}</div></details>"
        for lines, ranks in alike.items()
    ]
    if not shown:
        return ""
    summary = f"last lines of each rank (%taas logs {state.plan.run_id} --rank R has all)"
    inside = f"<details><summary>{escape(summary)}</summary>{''.join(shown)}</details>"
    return _row(inside, "font-size:12px")


def _curve_rows(state: RunState, now: float) -> list[tuple[str, str]]:
    """Return the row of the status header with the metrics and their curves; [] without metrics.

    For an active run, make a new row at most every `REDRAW_GAP_S` seconds, and otherwise return the
    stored row. The reason is that ranks may send metrics many times a second, and this row is the
    largest part of the status header. After the run's end, always make a new row, so that the row
    has all values.
    """
    is_last = state.has_ended or state.final_title
    if is_last or not state.curve_rows or now - state.curves_drawn_at >= REDRAW_GAP_S:
        state.curve_rows, state.curves_drawn_at = list(_curve_parts(state.curves)), now
    return state.curve_rows


def _curve_parts(curves: Curves) -> Iterator[tuple[str, str]]:
    """Yield one row of the status header with the first `MAX_CURVES` metrics, if there are metrics.

    The row is a pair of text and HTML:

    - The text has one line for each metric. It has the last value, a sparkline and the number of
      values, all from the lowest rank that logged the metric.
    - The HTML has the same values. Instead of the sparkline, it has a small picture with the curves
      of up to `MAX_RANKS` ranks, those with the lowest numbers.

    If there are more than `MAX_CURVES` metrics, the text and the HTML each end with the number of
    the metrics that they do not show.
    """
    if not curves:
        return
    words, figures = [], []
    for name, of_ranks in list(curves.items())[:MAX_CURVES]:
        first = of_ranks[min(of_ranks)]
        label, points = cut(plain(name), CELL_CHARS), _values_text(first, len(of_ranks))
        words.append(f"{_curve_text(name, of_ranks)} {points}")
        source = svg_data_url([curve.points for _, curve in sorted(of_ranks.items())[:MAX_RANKS]])
        figures.append(
            "<span style='display:inline-block;margin:2px 18px 0px 0px'>"
            f"<span style='{LABEL}'>{escape(label)}</span> <b>{first.last:.4g}</b> "
            f"<span style='{LABEL}'>{points}</span><br><img src='{source}' alt='{escape(label)}'>"
            "</span>"
        )
    more = len(curves) - MAX_CURVES
    if more > 0:
        rest = f"… and {more} more metric{'s' * (more > 1)}: run.metrics"
        words.append(rest)
        figures.append(f"<span style='{LABEL}'>{rest}</span>")
    yield "\n".join(words), _row("".join(figures))


def _curve_text(name: str, of_ranks: Mapping[int, Curve]) -> str:
    """Return a line with a metric's name, and its lowest rank's last value and sparkline."""
    first = of_ranks[min(of_ranks)]
    label = cut(plain(name), CELL_CHARS)
    return f"{label}: {first.last:.4g} {sparkline(first.points)}"


def _values_text(first: Curve, n_ranks: int) -> str:
    """Return text on how often a metric was logged, such as `100 values on each of 4 ranks`.

    Args:
        first: The curve of the lowest rank that logged the metric.
        n_ranks: Number of ranks that logged the metric.
    """
    values = f"{first.count:,} value{'s' * (first.count != 1)}"
    return f"{values} on each of {n_ranks} ranks" if n_ranks > 1 else values


def facts(state: RunState, now: float) -> list[Fact]:
    """Return the facts in the first row of the status header, from left to right.

    The facts are: ranks, pool, hosts, elapsed time, progress of `--prefill`, GPU-seconds, restarts
    and run id. The progress, the GPU-seconds and the restarts are left out if the run has none.

    The fact on ranks is the world size. In an active run, some ranks may not be live; then this
    fact is like "3 of 4 up". At most `MAX_HOSTS` hosts are named. The fact on restarts includes the
    cause of the last restart.
    """
    ranks = f"{state.plan.world_size:,}"
    if not state.has_ended and len(state.live_ranks) < state.plan.world_size:
        ranks = f"{len(state.live_ranks):,} of {ranks} up"
    names = ", ".join(state.hosts[:MAX_HOSTS]) + ", …" * (len(state.hosts) > MAX_HOSTS)
    n_hosts = len(state.plan.hosts)
    several = f"{n_hosts:,}" + (f" ({names})" if names else "")
    shown = [
        ("ranks", ranks),
        ("pool", state.plan.pool),
        ("host", names or "…") if n_hosts == 1 else ("hosts", several),
        ("elapsed", duration(state.elapsed(now), decimals=int(state.has_ended))),
    ]
    if filled := prefill_text(state.run_counts):
        shown.append(("filling", filled))
    if state.gpus:
        shown.append(("GPU-seconds", f"{int(state.gpu_seconds(now)):,}"))
    if state.restarts:
        cause = f" ({cut(state.restart_cause, NAME_CHARS)})" if state.restart_cause else ""
        shown.append(("restarts", f"{state.restarts}{cause}"))
    return [*shown, ("run", state.plan.run_id)]


def duration(seconds: float, decimals: int = 0) -> str:
    """Return a duration as `8 s`, `8.3 s`, `1 min 05 s` or `2 h 03 min`, rounded down.

    Args:
        seconds: The duration.
        decimals: Number of decimals if the duration is less than a minute.
    """
    if seconds < 60:
        scale = 10**decimals
        return f"{int(seconds * scale) / scale:.{decimals}f} s"
    minutes, rest_s = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def plain(progress: str) -> str:
    """Remove colour codes and surrounding blanks from a rank's text, such as its progress.

    Cut a text that is longer than `NAME_CHARS` characters.
    """
    return cut(_COLOUR.sub("", progress).strip(), NAME_CHARS)


def shown_notes(state: RunState) -> list[str]:
    """Return the first `MAX_NOTES` notes of a run, and a line with the number of further notes."""
    notes = [cut(note, NAME_CHARS) for note in state.notes[:MAX_NOTES]]
    left_out = len(state.notes) - MAX_NOTES
    return notes if left_out <= 0 else [*notes, f"… and {left_out} more notes"]


def _join_facts(first: Sequence[str], found: Sequence[Fact]) -> str:
    return " · ".join([*first, *(f"{label} {value}" for label, value in found)])


def _row(content: str, style: str = "") -> str:
    return f"<div style='margin:2px 0px 0px 0px;{style}'>{content}</div>"


def _labelled(label: str, value: str) -> tuple[str, str]:
    row = _row(f"<span style='{LABEL}'>{label}</span> {escape(cut(value, NAME_CHARS))}")
    return f"{label}: {value}", row


def _facts_html(found: Sequence[Fact]) -> str:
    return "".join(
        f"<span style='display:inline-block;margin:0px 18px 0px 0px'>"
        f"<span style='{LABEL}'>{label}</span> {escape(value)}</span>"
        for label, value in found
    )


def _title_row(state: RunState) -> str:
    """Return the row with the run's state and name as HTML.

    After `STALE_S` seconds without an update, a CSS animation replaces an active run's state by a
    hint that the header is out of date. After the end of the kernel or a reload of the page, no
    process can update the HTML, so only CSS can show this hint.
    """
    shown = state.final_title or state.state
    title = f"<span style='color:{_colour(state)}'>● <b>{escape(shown)}</b></span>"
    if not state.has_ended and not state.final_title:
        late = f"0s {STALE_S}s forwards"
        command = f"<span style='{CODE}'>%taas attach {escape(state.plan.run_id)}</span>"
        stale = f"no update for {STALE_S} s; {command} shows the state"
        title = (
            "<style>@keyframes taas-go{to{visibility:hidden;font-size:0}}"
            "@keyframes taas-come{to{visibility:visible;font-size:13px}}</style>"
            f"<span style='animation:taas-go {late}'>{title}</span>"
            f"<b style='visibility:hidden;font-size:0;animation:taas-come {late}'>● {stale}</b>"
        )
    name = f" <b>{escape(cut(state.plan.name, NAME_CHARS))}</b>" if state.plan.name else ""
    return _row(title + name)


def _progress_row(progress: str) -> str:
    """Return rank 0's unfinished line as HTML; a bar of tqdm becomes a `<progress>` element."""
    bar = TQDM.fullmatch(plain(progress))
    if bar is None:
        content = f"<span style='{CODE};white-space:pre-wrap'>{escape(plain(progress))}</span>"
    else:
        label, percent, rest = (escape(bar[group]) for group in ("label", "percent", "rest"))
        meter = f"<progress value='{percent}' max='100' style='width:180px'></progress>"
        content = f"<span style='{CODE}'>{label}{percent}%</span> {meter} "
        content += f"<span style='{CODE}'>{rest}</span>"
    return _row(f"<span style='{LABEL}'>rank 0</span> {content}")


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with aligned columns, one line per row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def as_html(text: str) -> str:
    """Return HTML for lines with aligned columns; the browser does not wrap these lines."""
    return f"<pre style='{TABLE}'>{escape(text)}</pre>"


def loader_lines(
    run_counts: RunCounts, units: int | None, has_ended: bool
) -> list[tuple[str, list[Fact]]]:
    """Return the name and the facts of each of the first `MAX_LOADERS` loaders of a run.

    If there are further loaders, the last entry has a text with their number in place of a name,
    and no facts.

    Args:
        run_counts: The counts that ranks and fetchers have sent about the loaders.
        units: The limit of `--units`, if any.
        has_ended: Whether the run has ended. If True, the facts have the mean rates of the whole
            run, and nothing about buffers. If False, the facts have the current rates.
    """
    shown = list(run_counts.loaders.values())[:MAX_LOADERS]
    found = [(loader.name, _loader_facts(loader, units, has_ended)) for loader in shown]
    more = len(run_counts.loaders) - len(shown)
    return [*found, *([(f"… and {more} more loaders", [])] if more else [])]


def prefill_text(run_counts: RunCounts) -> str:
    """Return text with the progress of `--prefill`, such as `20 of 100 batches`.

    Return "" if the ranks do not wait for prepared data.
    """
    if run_counts.prefilling is None:
        return ""
    done, wanted = run_counts.prefilling.done, run_counts.prefilling.wanted
    if run_counts.prefilling.unit == "bytes":
        return f"{size_text(done)} of {size_text(wanted)}"
    return f"{done:,} of {wanted:,} batches"


def _loader_facts(loader: LoaderCounts, units: int | None, has_ended: bool) -> list[Fact]:
    """Return the facts about one loader, with the same arguments as in `loader_lines`.

    The facts are, in this order:

    - The number of batches. If the number of units is different, also the number of units. The
      limit of `--units` follows the last of these numbers. If ranks received batches a second time
      because of `uneven="pad"`, the number of these batches comes last.
    - The batches and the MB per second.
    - For an active run: the facts of `_buffer_facts`.
    - The percentage of time that ranks waited for the loader.
    """
    batches, bound = int(loader.rank_total("batches")), f" of {units:,}" if units else ""
    facts = [("batches", f"{batches:,}{bound}")]
    if loader.units != batches:
        facts = [("batches", f"{batches:,} · {loader.units:,}{bound} units")]
    if repeated := int(loader.rank_total("repeated")):
        facts = [("batches", f'{facts[0][1]} ({repeated:,} repeated: uneven="pad")')]
    rate = loader.mean if has_ended else loader.recent
    if rate.time > 0:
        speed = f"{_number(rate.rate(rate.bytes) / 1e6)} MB/s"
        facts.append(("per second", f"{_number(rate.rate(rate.batches))} · {speed}"))
    if not has_ended:
        facts += _buffer_facts(loader)
    if loader.waited_fractions:
        facts.append(("waited", _waited_text(loader)))
    return facts


def _buffer_facts(loader: LoaderCounts) -> Iterator[Fact]:
    """Yield two facts: the data ready in the fetchers' buffers, and the data that the ranks hold.

    If no fetcher has a buffer, leave out the fact on buffers. If the ranks hold no data, leave out
    the fact on ranks.
    """
    if budget := int(loader.fetcher_total("budget_bytes")):
        batches, size = int(loader.fetcher_total("ready")), int(loader.fetcher_total("ready_bytes"))
        yield "ready", f"{batches:,} ({size_text(size)} of {size_text(budget)})"
    if held := int(loader.rank_total("held_bytes")):
        yield "in ranks", size_text(held)


def _waited_text(loader: LoaderCounts) -> str:
    """Return text with the percentage of time that ranks waited for a loader.

    The mean over all ranks comes first. The percentages of the single ranks follow in parentheses.
    If there are more than `MAX_RANKS` ranks, only the smallest and the largest percentage follow.
    """
    shares = loader.waited_fractions
    mean = f"{loader.sums(0.0).waited_fraction:.0%}"
    if len(shares) == 1:
        return mean
    if len(shares) <= MAX_RANKS:
        return f"{mean} ({', '.join(f'rank {rank} {part:.0%}' for rank, part in shares.items())})"
    most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
    return f"{mean} (rank {least} {shares[least]:.0%} to rank {most} {shares[most]:.0%})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def receipt_lines(receipt: Receipt | None) -> list[Fact]:
    """Return facts about a run's writes to the project store; [] if `receipt` is None.

    Leave out facts without content. Each fact lists at most `MAX_FILES` items, and the number of
    further items. The facts are, in this order:

    - The files that rank 0 wrote, with their sizes; "nothing" if only other ranks wrote files.
    - The kept-out files of other ranks at whose paths the store has a file.
    - The kept-out files of other ranks at whose paths the store has no file.
    - The files of rank 0 that were not copied to the store, with the reasons.
    - The folders to which all ranks may write.
    - The mechanism that kept files out of the store, if any were kept out.
    - A warning, if the search for written files was incomplete.
    """
    if receipt is None:
        return []
    written = []
    for name, sizes in _group_by_cube(receipt.written).items():
        many = f"{len(sizes):,} files, " if len(sizes) > 1 else ""
        written.append(f"{name} ({many}{size_text(sum(sizes))})")
    kept = _kept_out_texts(receipt.kept_out)
    lost = _kept_out_texts({path: receipt.kept_out[path] for path in sorted(receipt.missing)})
    named = [
        ("rank 0 wrote", written if written or not kept else ["nothing"]),
        ("not saved (only rank 0 writes)", [item for item in kept if item not in lost]),
        ("not saved by any rank", lost),
        ("not copied to the store", [f"{p} ({why})" for p, why in receipt.not_sent.items()]),
        ("open to all ranks", list(receipt.shared)),
    ]
    shown = [(label, listed(items, MAX_FILES)) for label, items in named if items]
    if kept and receipt.means:
        shown.append(("protected by", receipt.means))
    if not receipt.complete:
        unseen = "not searched completely: files that subprocesses wrote may be missing"
        shown.append(("store", unseen))
    return shown


def _group_by_cube(files: Mapping[str, T]) -> dict[str, list[T]]:
    """Collect values, one for each file, into lists: one list for each data cube or single file.

    A data cube is a `.zarr` folder with all its files. If `.zarr` folders are nested, the outermost
    folder is the data cube. A file outside of data cubes has a list of its own.

    Args:
        files: A value for each file, by the file's path.

    Returns:
        The lists, by the path of the data cube or file.
    """
    found: dict[str, list[T]] = {}
    for path, known in files.items():
        above = [str(folder) for folder in PurePosixPath(path).parents if folder.suffix == ".zarr"]
        found.setdefault(above[-1] if above else path, []).append(known)
    return found


def _kept_out_texts(files: Mapping[str, Sequence[int]]) -> list[str]:
    """Return text for each file that was kept out of the store, with the ranks that wrote it.

    Files of one data cube share one text.
    """
    shown = []
    for name, each in _group_by_cube(files).items():
        ranks = sorted({rank for ranks in each for rank in ranks})
        many = f" ({len(each):,} files)" if len(each) > 1 else ""
        several = "s" * (len(ranks) != 1)
        shown.append(f"{name}{many} from rank{several} {rank_ranges(ranks)}")
    return shown


def hang_lines(state: RunState, now: float) -> list[str]:
    """Return the lines about a run that hangs or hung: a title, and a table of the ranks.

    Ranks that are at the same line of code and wait for the same event share one line (`_groups`).
    The table has at most `MAX_GROUPS` such lines.

    Args:
        state: The run, whose property `hang` is not empty.
        now: The current time, from the same clock as `state.began`.
    """
    now = min(now, state.ended_at)
    table = columns([_HANG_HEAD, *_hang_cells(state.hang, now)])
    still = duration(now - max(row.since for row in state.hang))
    title = f"no rank has made progress for {still} (%taas stacks shows all threads):"
    if state.has_ended:
        title = f"no rank had made progress for {still} when the interrupted run ended:"
    return [title, *(f"    {line}" for line in table)]


def _hang_cells(rows: Sequence[RankStack], now: float) -> Iterator[tuple[str, ...]]:
    for group in _groups(rows)[:MAX_GROUPS]:
        hosts = list(dict.fromkeys(row.host for row in group))
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
        since = duration(now - min(row.since for row in group))
        words = (group[0].place or "?", group[0].waits_for)
        ranks = rank_ranges(row.rank for row in group)
        yield (ranks, where, since, *(cut(" ".join(it.split()), CELL_CHARS) for it in words))


def _groups(rows: Sequence[RankStack]) -> list[list[RankStack]]:
    """Group the ranks that are at the same line of code and wait for the same event.

    Small groups come first, because a small group more probably causes the hang. Groups that wait
    in a collective of torch.distributed come last, because their ranks only wait for other ranks.
    """
    alike: defaultdict[tuple[str, str], list[RankStack]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.rank):
        alike[row.place, row.waits_for].append(row)

    def order(group: list[RankStack]) -> tuple[bool, int, int]:
        waits = group[0].waits_for.endswith("of torch.distributed")
        return waits, len(group), group[0].rank

    return sorted(alike.values(), key=order)


def stacks_text(found: RunStacks, labels: Mapping[str, str]) -> str:
    """Return the output of `%taas stacks`: the stacks of the threads of each rank and fetcher.

    If several ranks have equal stacks, show these stacks once. The last lines are about processes
    that did not answer. If there is nothing to show, return "no rank runs".

    Args:
        found: The stacks of the run's processes.
        labels: Labels of this kernel's cells, by file name, for the stacks of fetchers.
    """
    alike: defaultdict[str, list[RankStack]] = defaultdict(list)
    for group in _groups(found.ranks):
        for row in group:
            alike["\n".join(_process_lines(row, "  "))].append(row)
    shown = []
    for inside, rows in alike.items():
        hosts = ", ".join(dict.fromkeys(row.host for row in rows))
        pids = ", ".join(str(row.pid) for row in rows[:MAX_GROUPS])
        who, process = ("ranks", "processes") if len(rows) > 1 else ("rank", "process")
        ranks = rank_ranges(row.rank for row in rows)
        shown.append(f"{who} {ranks} on {hosts} ({process} {pids})\n{inside}")
    for fetcher in sorted(found.fetchers, key=lambda one: one.fetcher):
        lines = [f"fetcher {fetcher.fetcher} on {fetcher.host} (process {fetcher.pid})"]
        lines += [labelled(line, labels) for line in _process_lines(fetcher, "  ")]
        shown.append("\n".join(lines))
    return "\n\n".join([*shown, *found.silent]) or "no rank runs"


_RANKS_HEAD = (
    *("rank", "host", "pid", "CPU", "memory", "GPU", "GPU memory", "batches", "per second"),
    *("waited", "in collectives", "step", "at"),
)


def ranks_text(found: RunStacks, state: RunState) -> str:
    """Return the output of `%taas ranks`: a table with the process and progress of each rank.

    The last lines are about processes that did not answer. If there is nothing to show, return "no
    rank runs".
    """
    rows = [
        _rank_cells(row.rank, (row.host, row.pid), _usage_of(row), state)
        for row in sorted(found.ranks, key=lambda row: row.rank)
    ]
    return "\n".join([*_ranks_lines(rows), *found.silent]) or "no rank runs"


def _usage_of(row: RankStack) -> RankUsage:
    """Convert a rank's stack report to a usage report; its memory includes child processes."""
    return RankUsage(
        rank=row.rank,
        cpus=row.cpus,
        memory_bytes=_memory(row),
        in_collectives=row.in_collectives,
        place=row.place or row.waits_for,
        gpu=row.gpu,
    )


def _ranks_lines(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the table of ranks as lines with column titles; [] without rows.

    If no rank uses a GPU, leave out the columns about GPUs.

    Args:
        rows: Texts of each rank, in the order of `_RANKS_HEAD`.
    """
    if not rows:
        return []
    shown = [
        number
        for number, name in enumerate(_RANKS_HEAD)
        if not name.startswith("GPU") or any(row[number] != "-" for row in rows)
    ]
    return columns([tuple(row[number] for number in shown) for row in (_RANKS_HEAD, *rows)])


def _rank_cells(
    rank: int, process: tuple[str, int], usage: RankUsage | None, state: RunState
) -> tuple[str, ...]:
    """Return the texts of one rank's row in the table of ranks, in the order of `_RANKS_HEAD`.

    "-" stands for an unknown value.

    Args:
        rank: Number of the rank.
        process: Host and process id of the rank.
        usage: The rank's last report; None if the rank has sent none.
        state: State of the run, which has the rank's counts of batches and its metrics.
    """
    loaders = [it for it in state.run_counts.loaders.values() if rank in it.ranks]
    batches = sum(loader.ranks[rank].batches for loader in loaders)
    span_s = sum(loader.ranks[rank].span_s for loader in loaders)
    shares = [
        loader.waited_fractions[rank] for loader in loaders if rank in loader.waited_fractions
    ]
    steps = [of[rank].last_step for of in state.curves.values() if rank in of]
    host, pid = process
    gpu = usage.gpu if usage else None
    return (
        str(rank),
        host,
        str(pid),
        f"{100 * usage.cpus:.0f} %" if usage else "-",
        size_text(usage.memory_bytes) if usage else "-",
        f"{100 * gpu.busy:.0f} %" if gpu and gpu.busy is not None else "-",
        size_text(gpu.memory_bytes) if gpu else "-",
        f"{batches:,}" if loaders else "-",
        _number(batches / span_s) if span_s else "-",
        f"{100 * sum(shares):.0f} %" if shares else "-",
        f"{100 * usage.in_collectives:.0f} %" if usage else "-",
        f"{max(steps):,}" if steps else "-",
        cut(" ".join(usage.place.split()), CELL_CHARS) if usage else "-",
    )


def _memory(process: ProcessStack) -> int:
    return process.memory_bytes + sum(map(_memory, process.children))


def _process_lines(process: ProcessStack, indent: str) -> list[str]:
    """Return lines of text about a process and its child processes, for `%taas stacks`.

    The first line says what the process waits for. The stack of each thread follows. Then the lines
    about each child process follow: the process id, the command line, and, with further
    indentation, the same lines as for any process.
    """
    lines = [f"{indent}waits for {process.waits_for} ({process.system or 'gone'})"]
    for name, frames in process.threads.items():
        lines += [f"{indent}{name}:", *(f"{indent}  {frame}" for frame in frames)]
    for child in process.children:
        lines += [f"{indent}child {child.pid}: {cut(child.command, CELL_CHARS)}"]
        lines += _process_lines(child, indent + "  ")
    return lines
