"""Compute a run's state and past output from its journal, for a view that is opened later.

The functions do no I/O. The state is the same as in a view that has been open since the start of
the run. Only the printed lines that the view shows are decoded, so a journal of 100 MB takes less
than a second.
"""

import re
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from taas_magic.config import size_text
from taas_magic.display.head import TQDM, RunState
from taas_magic.host.output import ERROR_WORDS, LogBudget
from taas_magic.messages import (
    ClearOutput,
    Display,
    Event,
    Lines,
    Restart,
    RunEnded,
    StateChanged,
    decode_event,
)
from taas_magic.plan import Plan

TAIL_BYTES = 500_000
"""Maximum bytes of past log that a view shows completely.

If the log is longer, the view of an active run leaves the first lines out. The view of an ended run
leaves the middle lines out.
"""

END_LINES = 100
"""Number of first lines, and of last lines, that a view shows of an ended run's long log.

A log is long if it has more than `TAIL_BYTES` bytes.
"""

ERRORS = (64_000, 1_000)
"""Maximum bytes, and maximum number, of lines with errors that a view shows of a long log.

These lines are from the middle of an ended run's log, which the view leaves out otherwise.
"""

_LINES, _DROPPED = b'{"kind":"lines"', b'{"kind":"dropped"'
_PROGRESS = b'{"kind":"progress"'
_COUNTS = (b'{"kind":"data"', b'{"kind":"fetched"', b'{"kind":"usage"')
_NO_TEXT = b'"text":""}\n'

_REPORTER = re.compile(rb'"(?:rank|number)":(\d+)')
_ERROR_WORDS = tuple(word.encode() for word in ERROR_WORDS)

_BASE_COUNTS = 2_000
"""Minimum of the argument `most` of `_CountsBuffer`, which is a number of events.

`Replay` adds 8 events for each rank to this minimum.
"""

OutputPiece = Event | str
"""A piece of past output: an event, or a line that no rank printed."""


class Replay:
    """Reader of a run's journal that computes the run's state and its past output.

    Args:
        state: State of the run before the first event; `Replay` updates this object.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._log_ranks = {str(rank).encode() for rank in state.plan.log_ranks or ()}
        self._progress: list[bytes] = []
        plan = state.plan
        n_ranks, n_fetchers = plan.world_size, len(plan.data.fetchers) if plan.data else 0
        # a session's cell gets the counts of fetchers of earlier cells, too
        n_reporters = n_ranks + n_fetchers + len(plan.hosts)
        n_reporters = sys.maxsize if plan.session else n_reporters
        self._counts = _CountsBuffer(_BASE_COUNTS + 8 * n_ranks, n_reporters)
        self._shown = _PastOutput(state.plan)

    @property
    def state(self) -> RunState:
        """The run's state after all events that `read` has processed so far.

        Reading this property first applies the events that `read` has stored without decoding.
        """
        self._apply_pending()
        return self._state

    def read(self, chunk: bytes) -> None:
        """Process the next lines of the journal: update the run's state, and store its past output.

        These events are stored without decoding them, because they are frequent:

        - lines that ranks printed;
        - numbers of lines that a host dropped;
        - counts of loaders;
        - the resource use of ranks;
        - rank 0's newest progress; a progress bar in a line that rank 0 printed counts as progress.

        All other events are applied to the state at once. Lines that are not valid events are
        ignored. If the plan has `log_ranks`, lines printed by other ranks are not stored. Rank 0's
        progress bar counts even if rank 0 is not in `log_ranks`.

        Args:
            chunk: The lines; the last line must be complete.
        """
        may_have_errors, has_bar = any(word in chunk for word in _ERROR_WORDS), b"%|" in chunk
        is_plain = chunk.startswith(_LINES) and not has_bar and not self._log_ranks
        if is_plain and chunk.count(b"\n" + _LINES) == chunk.count(b"\n") - 1:
            self._shown.add(chunk, may_have_errors)
            return
        printed, counts = list[bytes](), list[bytes]()
        for line in chunk.splitlines(keepends=True):
            if line.startswith(_LINES):
                if not self._log_ranks or _reporter(line) in self._log_ranks:
                    printed.append(line)
                if has_bar and b"%|" in line and _reporter(line) == b"0":
                    self._apply_progress(line)
            elif line.startswith(_COUNTS):
                counts.append(line)
            elif line.startswith(_PROGRESS):
                if not line.endswith(_NO_TEXT):
                    self._progress.clear()
                if len(self._progress) < 2:  # further empty texts would change nothing
                    self._progress.append(line)
            elif line.startswith(_DROPPED):
                printed.append(line)
            elif (event := _decoded(line)) is not None:
                self._shown.add(b"".join(printed), may_have_errors)
                self._counts.add(counts)
                printed, counts = [], []
                self._apply_event(event)
        self._shown.add(b"".join(printed), may_have_errors)
        self._counts.add(counts)

    def pieces(self) -> list[OutputPiece]:
        """Return the past output in the order of the journal; shorten a long log.

        Call this method only once, after the last `read`, because it removes stored lines.
        """
        return self._shown.pieces(self.state)

    def _apply_event(self, event: Event) -> None:
        self._shown.add_event(event)
        if isinstance(event, Restart | RunEnded):  # their effect depends on all earlier events
            self._apply_pending()
        if isinstance(event, StateChanged) and self._state.state == "STARTING":
            self._state.began = event.time
        if not isinstance(event, Display | ClearOutput):
            self._state.apply(event, event.time)

    def _apply_progress(self, line: bytes) -> None:
        event = _decoded(line)
        if isinstance(event, Lines) and any("%|" in it and TQDM.match(it) for it in event.lines):
            self._progress = [line]

    def _apply_pending(self) -> None:
        for line in [*self._counts.pop_events(), *self._progress]:
            if (event := _decoded(line)) is not None:
                self._state.apply(event, event.time)
        self._progress.clear()


class _CountsBuffer:
    """Buffer of undecoded events that report counts of loaders or the resource use of ranks.

    The event kinds are `data`, `fetched` and `usage`; their senders are ranks, fetchers and hosts.
    A count is a sum since its sender started, and `usage` is a momentary value. So a newer event of
    a sender replaces an older event of the same sender and kind. The buffer has three parts, in the
    order of the journal:

    - The first part has the first `most` events. They show the counts at the start of the ranks.
    - The middle part has only the newest event of each sender and kind, of all events between the
      first and the last part.
    - The last part has the newest events. It has at least `most` events, if so many events came
      after the first part. The current rates are computed from these events.

    Args:
        most: Number of events in the first part, and minimum number of events in the last part.
        reporters: Number of senders; `sys.maxsize` if it is not known.
    """

    def __init__(self, most: int, reporters: int) -> None:
        self._most, self._reporters = most, reporters
        self._first: list[bytes] = []
        self._sums: dict[tuple[bytes, bytes], bytes] = {}
        self._last: deque[list[bytes]] = deque()
        self._n_last = 0

    def add(self, lines: list[bytes]) -> None:
        """Add the next events, each as a line of the journal.

        Fill the first part until it has `most` events. Add the remaining events to the end of the
        last part. The events of one call stay together: move the oldest calls' events from the last
        part to the middle part, as long as the last part keeps at least `most` events.
        """
        if (room := self._most - len(self._first)) > 0:
            self._first += lines[:room]
            lines = lines[room:]
        if not lines:
            return
        self._last.append(lines)
        self._n_last += len(lines)
        while self._n_last - len(self._last[0]) >= self._most:
            old = self._last.popleft()
            self._n_last -= len(old)
            self._sum_counts(old)

    def pop_events(self) -> list[bytes]:
        """Remove and return all events, in the order of the journal. The buffer is then empty."""
        taken = [*self._first, *self._sums.values(), *(it for lines in self._last for it in lines)]
        self._first, self._sums, self._n_last = [], {}, 0
        self._last.clear()
        return taken

    def _sum_counts(self, lines: list[bytes]) -> None:
        """Add events to the middle part, and drop each event that a newer event replaces."""
        newest: dict[tuple[bytes, bytes], bytes] = {}
        for line in reversed(lines):
            newest.setdefault((line[:12], _reporter(line)), line)
            if len(newest) == self._reporters:
                break
        for about, line in reversed(newest.items()):
            self._sums.pop(about, None)  # keeps the dict in the order of the events
            self._sums[about] = line


def _reporter(line: bytes) -> bytes:
    """Return the number of the first rank or fetcher that an undecoded event names; b"" if none."""
    found = _REPORTER.search(line)
    return found[1] if found else b""


@dataclass
class _PrintedBlock:
    """Consecutive journal lines with printed output of ranks, not decoded yet.

    Attributes:
        number: Position of the block in the sequence of all blocks and events to show.
        raw: The lines of the journal.
        may_have_errors: Whether the lines may contain an error message.
    """

    number: int
    raw: bytes
    may_have_errors: bool

    def lines(self) -> list[bytes]:
        """Return the journal's lines in this block."""
        return self.raw.splitlines()

    def error_lines(self) -> list[bytes]:
        """Return the lines that may contain an error."""
        if not self.may_have_errors:
            return []
        return [line for line in self.lines() if any(word in line for word in _ERROR_WORDS)]


class _PastOutput:
    """Collector of a run's past output: displays, restarts, and the printed lines to show.

    Of a long log, the collector keeps the first lines, the last lines, and lines with errors.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._last_number = plan, 0
        self._kept: list[tuple[int, Event]] = []
        self._displays: dict[tuple[int, str | None], list[Display]] = {}
        self._clear()

    def _clear(self) -> None:
        self._kept.clear()
        self._displays.clear()
        self._first: list[bytes] = []
        self._errors: list[bytes] = []
        self._tail: deque[_PrintedBlock] = deque()
        self._tail_bytes = self._left_out_bytes = 0

    def add(self, raw: bytes, may_have_errors: bool) -> None:
        """Add the next lines of the journal that contain printed output of ranks, as one block.

        - Add the block to the end of the tail. The tail has the newest blocks.
        - Copy the block's lines to the log's first lines, until `END_LINES` lines are stored there.
        - Remove the oldest blocks of the tail, as long as the tail keeps at least `TAIL_BYTES`
          bytes.
        - Count the bytes of removed blocks, and keep the lines with errors of removed blocks, until
          `ERRORS[1]` such lines are kept (`_leave_out`).

        Args:
            raw: The lines, not decoded.
            may_have_errors: Whether the lines may contain an error message.
        """
        if not raw:
            return
        self._last_number += 1
        block = _PrintedBlock(self._last_number, raw, may_have_errors)
        if (room := END_LINES - len(self._first)) > 0:
            self._first += block.lines()[:room]
        self._tail.append(block)
        self._tail_bytes += len(raw)
        while self._tail_bytes - len(self._tail[0].raw) >= TAIL_BYTES:
            self._leave_out(self._tail.popleft())

    def add_event(self, event: Event) -> None:
        """Process an event that is not a printed line.

        - Keep a restart.
        - Keep a new display if the plan shows displays of its rank.
        - For an update, change the kept displays that have the update's rank and display id.
        - Remove all output so far if the lowest shown rank has cleared its output.

        Ignore all other events.
        """
        self._last_number += 1
        match event:
            case ClearOutput() if event.rank == self._plan.clearing_rank:
                self._clear()
            case Display() if not self._plan.shows_displays(event.rank):
                pass
            case Display(update=True):
                for shown in self._displays.get((event.rank, event.display_id), ()):
                    shown.data, shown.metadata = event.data, event.metadata
            case Display():
                self._kept.append((self._last_number, event))
                if event.display_id:
                    self._displays.setdefault((event.rank, event.display_id), []).append(event)
            case Restart():
                self._kept.append((self._last_number, event))

    def pieces(self, state: RunState) -> list[OutputPiece]:
        """Return the past output; shorten a log of more than `TAIL_BYTES`, and add a note on this.

        A short log is returned completely, in the order of the journal. A long log of an active run
        is returned without its first lines, after a note. For a long log of an ended run, the
        result has:

        - the first lines, and a note;
        - the lines from the middle of the log that look like errors;
        - all displays and restarts;
        - the last lines.

        Args:
            state: The run's state after the whole journal.
        """
        if self._tail_bytes > TAIL_BYTES:
            self._shorten(self._tail[0])
        if not self._left_out_bytes:
            return self._merged()
        where = f"full log: {state.run_dir / 'logs'}"
        if not state.has_ended:
            size = size_text(self._left_out_bytes)
            return [f"… {size} of earlier log lines are not shown; {where}", *self._merged()]
        first = _printed_lines(self._first)
        last = _printed_lines(
            [line for block in reversed(self._tail) for line in block.lines()[::-1]], True
        )
        error_lines = [
            *self._errors,
            *(line for block in self._tail for line in block.error_lines()),
        ]
        pieces: list[OutputPiece] = [
            *(event for _, event in first),
            f"… the lines between are not shown; {where}",
        ]
        if errors := _select_errors(error_lines, first, last):
            title = f"errors in the lines between (at most {ERRORS[1]:,} are shown):"
            pieces += [title, *errors]
        pieces += [event for _, event in self._kept]
        return [*pieces, f"the last {END_LINES} lines:", *(event for _, event in last)]

    def _leave_out(self, block: _PrintedBlock) -> None:
        """Count the bytes of a block that the view does not show, and keep its lines with errors.

        If at least `ERRORS[1]` lines with errors of earlier blocks are kept, keep no line of this
        block. Otherwise, keep all lines of this block that may contain an error, even if the number
        of kept lines then exceeds `ERRORS[1]`.
        """
        self._tail_bytes -= len(block.raw)
        self._left_out_bytes += len(block.raw)
        if len(self._errors) < ERRORS[1]:
            self._errors += block.error_lines()

    def _shorten(self, block: _PrintedBlock) -> None:
        """Leave out the first lines of the tail, so that the tail has at most `TAIL_BYTES`.

        Args:
            block: The first block of the tail.
        """
        end = block.raw.find(b"\n", self._tail_bytes - TAIL_BYTES - 1) + 1
        self._tail.popleft()
        self._tail.appendleft(_PrintedBlock(block.number, block.raw[end:], block.may_have_errors))
        self._leave_out(_PrintedBlock(block.number, block.raw[:end], block.may_have_errors))

    def _merged(self) -> list[OutputPiece]:
        found = list(self._kept)
        for block in self._tail:
            decoded = (_decoded(line) for line in block.lines())
            found += [(block.number, event) for event in decoded if event is not None]
        return [event for _, event in sorted(found, key=lambda pair: pair[0])]


def _printed_lines(lines: Iterable[bytes], from_end: bool = False) -> list[tuple[bytes, Lines]]:
    """Return the first or last `END_LINES` printed lines, as events of the journal.

    An event has one or more lines that one rank printed. Lines of the journal that are not valid
    events are skipped.

    Args:
        lines: Lines of the journal. For the last printed lines, pass the lines in reverse order.
        from_end: Whether `lines` are in reverse order.

    Returns:
        Pairs of a journal line and its decoded event, in the order of the journal. The events have
        at most `END_LINES` printed lines in total. One event is shortened if all its lines would
        exceed this number: it keeps its last lines if `from_end` is True, else its first lines.
    """
    left, found = END_LINES, list[tuple[bytes, Lines]]()
    for line in lines:
        event = _decoded(line)
        if isinstance(event, Lines):
            event.lines = event.lines[-left:] if from_end else event.lines[:left]
            found.append((line, event))
            left -= len(event.lines)
            if not left:
                break
    return found[::-1] if from_end else found


def _select_errors(
    lines: Sequence[bytes],
    first: Sequence[tuple[bytes, Lines]],
    last: Sequence[tuple[bytes, Lines]],
) -> list[Lines]:
    """Return the printed lines that look like errors, as far as the limits of `ERRORS` allow.

    If there are more such lines, the earliest lines stay. The result leaves out the log's first and
    last lines, because the view shows these lines anyway.

    Args:
        lines: Lines of the journal that may contain errors, in the order of the journal.
        first: The log's first lines, from `_printed_lines`.
        last: The log's last lines, from `_printed_lines`.

    Returns:
        The events of the journal that contain these lines. All other printed lines are removed
        from the events.
    """
    budget = LogBudget(
        lambda: 0.0, burst=(0, 0), per_s=(0, 0), reserve=ERRORS, reserve_per_s=(0, 0)
    )
    begins = {line: len(event.lines) for line, event in first}
    ends = {line: len(event.lines) for line, event in last}
    found = []
    for line in lines:
        event = _decoded(line)
        if isinstance(event, Lines):
            stop = len(event.lines) - ends.get(line, 0)
            event.lines = budget.select_errors(event.lines[begins.get(line, 0) : stop])
            found += [event] if event.lines else []
    return found


def _decoded(line: bytes) -> Event | None:
    with suppress(msgspec.DecodeError):
        return decode_event(line)
    return None
