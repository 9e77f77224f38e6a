"""Merge the lines that all ranks print into the run's log in the notebook, without any I/O.

If several ranks print the same line at about the same time, the log shows the line once, with the
numbers of these ranks. To find equal lines, `LineMerger` holds each new line back until the first
of these events:

- All ranks have printed the line.
- All ranks that printed the line have it as their first waiting line, and all other ranks have
  other lines waiting.
- The line has waited for `wait_s` seconds. Users do not notice this delay.

When a cell gets more output, the browser draws the whole output again. Therefore a cell shows at
most `CELL_BYTES` of text, and below it a summary (`LogSummary`) that is updated in place.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

from taas_magic.config import size_text
from taas_magic.host.output import LogBudget
from taas_magic.messages import Lines, LinesDropped, without_controls
from taas_magic.plan import Plan

MERGE_WAIT_S = 0.005
"""Seconds that a rank's line waits, so that other ranks may print an equal line.

After a collective returns, the ranks print within a few milliseconds of one another.
"""

_MAX_RANGES = 6


class ShownLine(NamedTuple):
    """A line to show now, and the numbers of the ranks that printed it, in ascending order."""

    ranks: tuple[int, ...]
    text: str


def rank_ranges(ranks: Iterable[int]) -> str:
    """Format ascending rank numbers as ranges, such as `0-2,5,7-9`.

    If there are more than `_MAX_RANGES` ranges, "…" replaces the last ones.
    """
    runs = groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    spans = [[rank for _, rank in run] for _, run in runs]
    words = [f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans]
    return ",".join(words if len(words) <= _MAX_RANGES else [*words[:_MAX_RANGES], "…"])


class LineMerger:
    """Merger of equal lines of several ranks into one line.

    New lines of a rank wait in a queue, so that other ranks may print equal lines. The order of the
    lines of one rank does not change. Ranks form a group if the first lines in their queues are
    equal.

    Args:
        world_size: Number of ranks whose lines are shown.
        wait_s: Maximum seconds that a line waits.
    """

    def __init__(self, world_size: int, wait_s: float = MERGE_WAIT_S) -> None:
        self._world_size = world_size
        self._wait_s = wait_s
        self._all: tuple[int, ...] = ()
        self._waiting: defaultdict[int, deque[str]] = defaultdict(deque)
        self._groups: dict[str, set[int]] = {}
        self._n_alike: Counter[str] = Counter()
        self._deadlines: deque[tuple[float, int, int]] = deque()
        self._n_released: defaultdict[int, int] = defaultdict(int)

    def push(self, rank: int, lines: Sequence[str], now: float) -> list[ShownLine]:
        """Add the next lines of a rank; remove and return the lines to show now, in their order.

        Lines to show are: lines that have waited for `wait_s` seconds, lines that all ranks have
        printed, and lines that no further rank is likely to print. If only one rank's lines are
        shown, return all lines at once.

        Args:
            rank: Number of the rank.
            lines: The lines that the rank printed.
            now: Current time in seconds, on the same clock in all calls.
        """
        if self._world_size == 1:
            return [ShownLine((rank,), line) for line in lines]
        shown = self.pop_due(now)
        if not lines:
            return shown
        queue = self._waiting[rank]
        comes_first = not queue
        queue.extend(lines)
        self._n_alike.update(lines)
        last = self._n_released[rank] + len(queue)
        self._deadlines.append((now + self._wait_s, rank, last))
        if comes_first and self._join(rank, lines[0]):
            shown += self._release(lines[0])
        return shown + self._release_unmatched()

    def pop_due(self, now: float) -> list[ShownLine]:
        """Remove and return the lines that have waited for `wait_s` seconds."""
        shown: list[ShownLine] = []
        while self.next_due() <= now:
            _, rank, number = self._deadlines[0]
            shown += self._release_first(rank, number - self._n_released[rank])
        return shown

    def next_due(self) -> float:
        """Return the time from which `pop_due` will return lines; infinity when no line waits."""
        while self._deadlines:
            deadline, rank, number = self._deadlines[0]
            if number > self._n_released[rank]:
                return deadline
            self._deadlines.popleft()
        return math.inf

    def pop_all(self) -> list[ShownLine]:
        """Remove and return all waiting lines, without waiting for equal lines of other ranks."""
        shown: list[ShownLine] = []
        while self._groups:
            shown += self._release(next(iter(self._groups)))
        self._deadlines.clear()
        return shown

    def _release_unmatched(self) -> list[ShownLine]:
        """Remove and return lines that no further rank is likely to print soon.

        Each rank has a queue of waiting lines. While a rank's queue is empty, remove nothing: this
        rank may soon print a line that equals a waiting line of another rank. When no queue is
        empty, do the following:

        - Find the lines of which all copies are the first lines of their queues. No further rank is
          likely to print such a line.
        - Of these lines, choose the line of the lowest rank, because rank 0 usually prints most.
        - Remove the chosen line with all its copies. If the line has no copy, also remove the next
          lines of its rank, up to the first line with a copy (`_release_first`).

        Repeat these steps until a queue is empty, or until there is no such line.
        """
        shown: list[ShownLine] = []
        while len(self._waiting) == self._world_size:
            unmatched = [
                min(group)
                for text, group in self._groups.items()
                if self._n_alike[text] == len(group)
            ]
            if not unmatched:
                break
            rank = min(unmatched)
            shown += self._release_first(rank, len(self._waiting[rank]))
        return shown

    def _release_first(self, rank: int, most: int) -> list[ShownLine]:
        """Remove a rank's first waiting line, and return the lines to show.

        - If further copies of the line are waiting, remove the line for all ranks for which it is
          the first waiting line.
        - If not, also remove the rank's next lines, up to the first line of which further copies
          are waiting. One call for many lines is faster than many calls.

        After the removal, all ranks may have the same first line. In this case, also remove and
        return that line.

        Args:
            rank: A rank that has a waiting line.
            most: Maximum number of lines to remove in the second case.
        """
        queue, n_alike, alone = self._waiting[rank], self._n_alike, list[str]()
        for line in islice(queue, most):
            if n_alike[line] != 1:
                break
            alone.append(line)
        if not alone:
            return self._release(queue[0])
        del self._groups[alone[0]]
        for line in alone:
            n_alike.pop(line)
            queue.popleft()
        self._n_released[rank] += len(alone)
        shown = [ShownLine((rank,), line) for line in alone]
        complete = self._advance(rank)
        return shown if complete is None else shown + self._release(complete)

    def _join(self, rank: int, line: str) -> bool:
        """Add a rank to the group of ranks that have `line` as their first waiting line.

        Returns:
            Whether the group now has all ranks.
        """
        group = self._groups.setdefault(line, set())
        group.add(rank)
        return len(group) == self._world_size

    def _advance(self, rank: int) -> str | None:
        """After a rank's first line was removed, add the rank to the group of its next line.

        Returns:
            The next line if its group now has all ranks; else None.
        """
        queue = self._waiting[rank]
        if not queue:
            del self._waiting[rank]
            return None
        return queue[0] if self._join(rank, queue[0]) else None

    def _release(self, text: str) -> list[ShownLine]:
        """Remove the line `text` from the front of the queues, and return the lines to show.

        The line is removed only for the ranks that have `text` as their first waiting line. Later
        copies of `text` stay in the queues. After the removal, all ranks may have the same first
        line. In this case, also remove and return that line, and repeat this until the first lines
        of the ranks differ.

        Args:
            text: A line that is the first waiting line of at least one rank.
        """
        shown = []
        ready = [text]
        while ready:
            text = ready.pop()
            group = self._groups.pop(text)
            is_all = len(group) == self._world_size
            self._all = self._all or (tuple(sorted(group)) if is_all else ())
            shown.append(ShownLine(self._all if is_all else tuple(sorted(group)), text))
            for rank in group:
                self._waiting[rank].popleft()
                self._n_released[rank] += 1
                if (complete := self._advance(rank)) is not None:
                    ready.append(complete)
            self._n_alike[text] -= len(group)
            if not self._n_alike[text]:
                del self._n_alike[text]
        return shown


CELL_BYTES = 500_000
"""Maximum bytes of a run's log that a notebook's cell shows as text; a summary has the rest."""

NO_LIMIT_BYTES = 1 << 62
"""A number of bytes that no log reaches; stands for "no limit"."""

ERRORS = (16_000, 200)
"""Maximum bytes, and maximum number, of lines with errors in the summary below a full cell."""

LAST_LINES = 100
"""Number of last lines of the log that the summary below a full cell shows."""

LINE_CHARS = 500
"""Maximum characters of a line in the summary below a full cell."""

DROPPED_NOTE_S = 1.0
"""Minimum seconds from the first to the second note on lines that hosts left out of the log."""

MAX_DROPPED_NOTE_S = 60.0
"""Seconds up to which the pause between two notes on dropped lines grows.

The pause begins with `DROPPED_NOTE_S`, and doubles after each note.
"""

TIMES = "\N{MULTIPLICATION SIGN}"


class LogSummary:
    """Summary of the lines of a log beyond the cell's limit. Shown below the cell's other output.

    The summary has the number of these lines, the lines with errors, and the last lines.

    Attributes:
        has_unshown_lines: Whether lines were added after the last call of `text`.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ranks = set[int]()
        self._lines = self._bytes = 0
        self._errors: list[str] = []
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self.has_unshown_lines = False

    def count(self, ranks: Iterable[int], n_lines: int, n_bytes: int) -> None:
        """Count `n_lines` further lines, with `n_bytes` bytes in total, beyond the cell's limit.

        Call this method for lines that a host dropped. For lines with a known text, call
        `add_lines`.

        Args:
            ranks: The ranks that printed each of the lines.
        """
        self._ranks.update(ranks)
        self._lines += n_lines
        self._bytes += n_bytes
        self.has_unshown_lines = True

    def add_lines(
        self, ranks: Iterable[int], prefix: str, lines: Sequence[str], errors: Sequence[str]
    ) -> None:
        """Count lines beyond the cell's limit; keep the last lines and the errors for the summary.

        Args:
            ranks: The ranks that printed each of the lines.
            prefix: Names of the ranks that printed the lines, as text to put before each line.
            lines: All lines to add.
            errors: The lines of `lines` that look like errors. The caller limits their number.
        """
        self.count(ranks, len(lines), sum(map(len, lines)) + len(lines))
        self._last.extend(f"{prefix}{_short(line)}" for line in lines[-LAST_LINES:])
        self._errors += [f"{prefix}{_short(line)}" for line in errors]

    def text(self) -> str:
        """Return the text of the summary, and set `has_unshown_lines` to False.

        The text has the number and size of the lines beyond the limit, the command that shows
        a rank's log, the lines with errors, if any, and the last lines.
        """
        self.has_unshown_lines = False
        size = size_text(self._bytes)
        s = "s" * (self._lines != 1)
        # Without --rank, the command shows the rank that failed first, or rank 0.
        is_named = self._plan.world_size > 1 and len(self._ranks) == 1
        rank = f" --rank {min(self._ranks)}" if is_named else ""
        first = f"… {self._lines:,} line{s} more ({size}): %taas logs {self._plan.run_id}{rank}"
        title = f"errors in these lines (at most {ERRORS[1]} are shown):"
        errors = [title, *self._errors, "the last lines:"] if self._errors else []
        return "\n".join([first, *errors, *self._last])


class LogText:
    """The log of one run as text; buffers the text until the view writes it to the cell.

    Args:
        plan: The plan of the run.
        run_dir: The run folder, with the complete logs.
        limit_bytes: Maximum bytes of text for the cell. Further lines go to `summary`.

    Attributes:
        summary: The summary of the lines beyond the limit; None while there are none.
    """

    def __init__(self, plan: Plan, run_dir: Path, limit_bytes: int) -> None:
        self._plan, self._limit_bytes = plan, limit_bytes
        self._logs_dir = run_dir / "logs"
        self._host_of: dict[int, str] = {}
        self._merger = LineMerger(sum(map(plan.shows_lines, range(plan.world_size))))
        self._pieces: list[str] = []
        self._dropped: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
        self._note_pause_s = DROPPED_NOTE_S
        self._note_at = float("-inf")
        self.clear()

    def clear(self) -> None:
        """Start an empty text for the cell, because the cell's output was cleared.

        The new text may again have up to `limit_bytes` bytes. The summary of the lines beyond the
        limit is removed. Three things stay: lines that wait for equal lines, text that `pop_text`
        has not returned yet, and the numbers of dropped lines since the last note.
        """
        self._budget = LogBudget(
            lambda: 0.0,
            burst=(self._limit_bytes, NO_LIMIT_BYTES),
            per_s=(0, 0),
            reserve=ERRORS,
            reserve_per_s=(0, 0),
        )
        self._taken_bytes = 0
        self.summary: LogSummary | None = None

    def add_lines(self, event: Lines, now: float) -> None:
        """Add lines that a rank printed; they wait up to `MERGE_WAIT_S` seconds for equal lines.

        Ignore ranks whose lines the plan does not show.
        """
        if self._plan.shows_lines(event.rank):
            self._host_of[event.rank] = event.host
            self._add(self._merger.push(event.rank, event.lines, now))

    def add_dropped(self, event: LinesDropped) -> None:
        """Count lines of a rank that its host dropped; the next note says how many.

        If the cell is full, count the lines in the summary instead. Ignore ranks whose lines the
        plan does not show.
        """
        if not self._plan.shows_lines(event.rank):
            return
        if self.summary is not None:
            self.summary.count([event.rank], event.lines, event.bytes)
            return
        lines, size_bytes = self._dropped[event.rank]
        self._dropped[event.rank] = lines + event.lines, size_bytes + event.bytes

    def add_line(self, text: str) -> None:
        """Add a line that no rank printed, such as a note.

        First, add all waiting lines of ranks, so that they stand above this line. The new line does
        not count towards the cell's limit.

        If the cell is full, the line goes to the summary. The summary lists the line twice: among
        the last lines, and among the lines with errors. So the summary still shows the line when
        many further lines have replaced the last lines.
        """
        self.flush()
        if self.summary is None:
            self._pieces.append(f"{text}\n")
        else:
            self.summary.add_lines([], "", [text], [text])

    def add_due_lines(self, now: float) -> None:
        """Add lines of ranks, and a note on dropped lines, if they are due at the time `now`.

        A line of a rank is due when it has waited for `MERGE_WAIT_S` seconds. The note is due if
        hosts have dropped lines since the last note, and the pause after the last note is over.
        """
        self._add(self._merger.pop_due(now))
        if self._dropped and now >= self._note_at:
            self._note_dropped(now)

    def flush(self) -> None:
        """Add all waiting lines of ranks to the text for the cell now."""
        self._add(self._merger.pop_all())

    def close(self, now: float) -> None:
        """Add all waiting lines, and a note with the number of dropped lines, if any."""
        self.flush()
        self._note_dropped(now)

    def next_due(self) -> float:
        """Return the time at which the next line or note is due; infinity if none waits."""
        return min(self._merger.next_due(), self._note_at if self._dropped else math.inf)

    @property
    def has_text(self) -> bool:
        """Whether the view must write text to the cell or update the summary."""
        return bool(self._pieces) or (self.summary is not None and self.summary.has_unshown_lines)

    @property
    def fullness(self) -> float:
        """The fraction of the cell's limit that is used, from 0 to 1."""
        return 1.0 if self.summary is not None else min(1.0, self._taken_bytes / self._limit_bytes)

    def pop_text(self) -> str:
        """Remove and return the buffered text for the cell, in whole lines, without the summary."""
        taken = "".join(self._pieces)
        self._taken_bytes += len(taken)
        self._pieces.clear()
        return taken

    def _add(self, shown: Sequence[ShownLine]) -> None:
        """Add lines, with prefixes that name their ranks, to the text for the cell.

        If the cell's limit is reached, add the remaining lines to the summary instead; create the
        summary if there is none. The summary counts all these lines. It also lists the lines that
        look like errors, until their number or bytes reach `ERRORS`.
        """
        for ranks, group in groupby(shown, lambda line: line.ranks):
            texts = [line.text for line in group]
            prefix = self._prefix(ranks)
            if self.summary is not None:
                self.summary.add_lines(ranks, prefix, texts, self._budget.select_errors(texts))
                continue
            fit, errors = self._budget.select(texts)
            self._pieces += [f"{prefix}{text}\n" for text in fit]
            if len(fit) < len(texts):
                self.summary = LogSummary(self._plan)
                self.summary.add_lines(ranks, prefix, texts[len(fit) :], errors)

    def _prefix(self, ranks: tuple[int, ...]) -> str:
        if len(ranks) > 1:
            return f"[{rank_ranges(ranks)} {TIMES}{len(ranks)}] "
        host = f"{self._host_of[ranks[0]]}:" if len(self._plan.hosts) > 1 else ""
        return f"[{host}{ranks[0]}] "

    def _note_dropped(self, now: float) -> None:
        """Add a note with the number of lines that hosts dropped since the last note.

        The note names the ranks, and the path of their logs. After the note, counting starts again
        at zero. The pause before the next note is twice as long, up to a maximum, so that a long
        flood of output causes only a few notes. If no lines were dropped, do nothing.
        """
        if not self._dropped:
            return
        ranks = sorted(self._dropped)
        n_lines, n_bytes = map(sum, zip(*self._dropped.values(), strict=True))
        file = f"/rank-{ranks[0]}.log" if len(ranks) == 1 else ""
        self.add_line(
            f"[{rank_ranges(ranks)}] … {n_lines:,} line{'s' * (n_lines != 1)} "
            f"({size_text(n_bytes)}) not shown; full log: {self._logs_dir}{file}"
        )
        self._dropped.clear()
        self._note_at = now + self._note_pause_s
        self._note_pause_s = min(2 * self._note_pause_s, MAX_DROPPED_NOTE_S)


def _short(line: str) -> str:
    return line if len(line) <= LINE_CHARS else without_controls(f"{line[:LINE_CHARS]}…")
