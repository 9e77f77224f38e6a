"""Lines of all ranks -> the text of a run's log in the notebook. Pure: the caller gives the time.

Three things happen to a line here: it folds with its equals, it gets a prefix that says who
printed it, and it counts against what a cell may hold. A browser draws each piece of output again
and again as more is added, so a cell takes `CELL_BYTES` of text; of what comes after that, only
the last lines are shown, in one display that is updated (`Rest`).

A line waits at most `hold_s` for the other ranks to print it too, less than anybody sees, and no
longer when each of them has printed something else.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

from taas_magic.config import size_text
from taas_magic.host.output import LogBudget
from taas_magic.messages import Lines, LinesDropped, harmless
from taas_magic.plan import Plan

HOLD_S = 0.005
"""Ranks that a collective has just let go print within a few milliseconds of one another."""


class Shown(NamedTuple):
    """A line to show now, and the ranks that printed it (ascending)."""

    ranks: tuple[int, ...]
    text: str


def rank_ranges(ranks: Iterable[int], max_ranges: int = 6) -> str:
    """Return ascending ranks as `0-2,5,7-9`; many ranges are cut with `…`."""
    runs = groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    spans = [[rank for _, rank in run] for _, run in runs]
    words = [f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans]
    return ",".join(words if len(words) <= max_ranges else [*words[:max_ranges], "…"])


class Folder:
    """Folds the lines of `world_size` ranks; the order within each rank is kept.

    Each rank has a queue of lines that wait. Ranks whose first waiting lines are equal form a
    group, found by the line's hash: a line costs the same for 2 ranks and for 8,192.

    A line that all printed need not wait; another waits for `hold_s` seconds at most.
    """

    def __init__(self, world_size: int, hold_s: float = HOLD_S) -> None:
        self._world_size = world_size
        self._hold_s = hold_s
        self._all: tuple[int, ...] = ()
        self._waiting: defaultdict[int, deque[str]] = defaultdict(deque)
        self._groups: dict[str, set[int]] = {}
        self._n_alike: Counter[str] = Counter()
        self._deadlines: deque[tuple[float, int, int]] = deque()
        self._n_released: defaultdict[int, int] = defaultdict(int)

    def push(self, rank: int, lines: Sequence[str], now: float) -> list[Shown]:
        """Take the next lines of a rank; returns what is to be shown now, in this order."""
        if self._world_size == 1:
            return [Shown((rank,), line) for line in lines]
        shown = self.due(now)
        if not lines:
            return shown
        queue = self._waiting[rank]
        comes_first = not queue
        queue.extend(lines)
        self._n_alike.update(lines)
        last = self._n_released[rank] + len(queue)
        self._deadlines.append((now + self._hold_s, rank, last))
        if comes_first and self._join(rank, lines[0]):
            shown += self._release(lines[0])
        return shown + self._release_unmatched()

    def due(self, now: float) -> list[Shown]:
        """Return the lines that have waited long enough."""
        shown: list[Shown] = []
        while self.next_due() <= now:
            _, rank, number = self._deadlines[0]
            shown += self._release_first(rank, number - self._n_released[rank])
        return shown

    def next_due(self) -> float:
        """Return when `due` will have something to return; infinity when nothing waits."""
        while self._deadlines:
            deadline, rank, number = self._deadlines[0]
            if number > self._n_released[rank]:
                return deadline
            self._deadlines.popleft()
        return math.inf

    def flush(self) -> list[Shown]:
        """Return all that waits."""
        shown: list[Shown] = []
        while self._groups:
            shown += self._release(next(iter(self._groups)))
        self._deadlines.clear()
        return shown

    def _release_unmatched(self) -> list[Shown]:
        """Show lines that wait for nobody: every rank has lines waiting, and not this one.

        The lowest rank's goes first: rank 0 is the one that says more than the others.
        """
        shown: list[Shown] = []
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

    def _release_first(self, rank: int, most: int) -> list[Shown]:
        """Show a rank's first line; at once, those behind it that are like no other, up to `most`.

        A flood is such lines: one by one they would cost several times as much.
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
        shown = [Shown((rank,), line) for line in alone]
        complete = self._advance(rank)
        return shown if complete is None else shown + self._release(complete)

    def _join(self, rank: int, line: str) -> bool:
        """Put a rank whose first line is `line` into its group; says whether nobody is missing."""
        group = self._groups.setdefault(line, set())
        group.add(rank)
        return len(group) == self._world_size

    def _advance(self, rank: int) -> str | None:
        """Put a rank whose first lines are shown into its next group; returns one that is whole."""
        queue = self._waiting[rank]
        if not queue:
            del self._waiting[rank]
            return None
        return queue[0] if self._join(rank, queue[0]) else None

    def _release(self, text: str) -> list[Shown]:
        """Show a group, and what can be shown because its members' next lines come first now."""
        shown = []
        ready = [text]
        while ready:
            text = ready.pop()
            group = self._groups.pop(text)
            is_all = len(group) == self._world_size
            self._all = self._all or (tuple(sorted(group)) if is_all else ())
            shown.append(Shown(self._all if is_all else tuple(sorted(group)), text))
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
UNBOUNDED = 1 << 62
ERRORS = (16_000, 200)
"""Bytes and lines that look like errors which are kept of what does not fit into the cell."""

LAST_LINES = 100
LINE_CHARS = 500
DROPPED_NOTE_S = 1.0
MAX_DROPPED_NOTE_S = 60.0
TIMES = "\N{MULTIPLICATION SIGN}"


class Rest:
    """What does not fit into the cell: counted, with its errors and its last lines."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._lines = self._bytes = 0
        self._errors: list[str] = []
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self.has_news = False

    def count(self, n_lines: int, n_bytes: int) -> None:
        """Count lines that are nowhere but in the log."""
        self._lines += n_lines
        self._bytes += n_bytes
        self.has_news = True

    def take(self, prefix: str, lines: Sequence[str], errors: Sequence[str]) -> None:
        """Count lines, and keep the last of them, and those that look like errors."""
        self.count(len(lines), sum(map(len, lines)) + len(lines))
        self._last.extend(f"{prefix}{_short(line)}" for line in lines[-LAST_LINES:])
        self._errors += [f"{prefix}{_short(line)}" for line in errors]

    def text(self) -> str:
        """Return all that is shown of it."""
        self.has_news = False
        size = size_text(self._bytes)
        s = "s" * (self._lines != 1)
        said = f"… {self._lines:,} line{s} more ({size}): %taas logs {self._run_id}"
        errors = ["errors among them:", *self._errors, "the last lines:"] if self._errors else []
        return "\n".join([said, *errors, *self._last])


class LogText:
    """The log of one run, as the text that is still to be written.

    Args:
        plan: Of the run; with several hosts, a prefix names the host, too. Its `log_ranks` says
            whose lines are shown.
        run_dir: Where the complete logs lie.
        limit_bytes: Text that the cell takes; what comes after it is `rest`.
    """

    def __init__(self, plan: Plan, run_dir: Path, limit_bytes: int) -> None:
        self._plan, self._limit_bytes = plan, limit_bytes
        self._logs_dir = run_dir / "logs"
        self._host_of: dict[int, str] = {}
        self._folder = self._folder_of(plan.world_size)
        self._names_hosts = len(plan.hosts) > 1
        self._pieces: list[str] = []
        self._dropped: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
        self._note_pause_s = DROPPED_NOTE_S
        self._note_at = float("-inf")
        self.clear()

    def clear(self) -> None:
        """Begin anew: the cell is empty again."""
        self._budget = LogBudget(
            lambda: 0.0,
            burst=(self._limit_bytes, UNBOUNDED),
            per_s=(0, 0),
            reserve=ERRORS,
            reserve_per_s=(0, 0),
        )
        self._taken_bytes = 0
        self.rest: Rest | None = None

    def lines(self, event: Lines, now: float) -> None:
        """Take what a rank wrote."""
        if self._plan.shows_lines(event.rank):
            self._host_of[event.rank] = event.host
            self._add(self._folder.push(event.rank, event.lines, now))

    def dropped(self, event: LinesDropped) -> None:
        """Take how much the rank's host did not send."""
        if not self._plan.shows_lines(event.rank):
            return
        if self.rest is not None:
            self.rest.count(event.lines, event.bytes)
            return
        lines, size_bytes = self._dropped[event.rank]
        self._dropped[event.rank] = lines + event.lines, size_bytes + event.bytes

    def say(self, text: str) -> None:
        """Add a line that no rank printed, after all that was printed before it."""
        self.flush()
        if self.rest is None:
            self._pieces.append(f"{text}\n")
        else:
            self.rest.take("", [text], [text])

    def restart(self, text: str, world_size: int | None) -> None:
        """Say that all ranks start again; a run that has grown has so many, on more hosts."""
        self.say(text)
        if world_size is not None:
            self._folder, self._names_hosts = self._folder_of(world_size), True

    def due(self, now: float) -> None:
        """Add what has waited long enough."""
        self._add(self._folder.due(now))
        if self._dropped and now >= self._note_at:
            self._note_dropped(now)

    def flush(self) -> None:
        """Add all that waits for other ranks."""
        self._add(self._folder.flush())

    def close(self, now: float) -> None:
        """Add all that waits, and how much was left out."""
        self.flush()
        self._note_dropped(now)

    def next_due(self) -> float:
        """Return when `due` will have something to add; infinity while nothing waits."""
        return min(self._folder.next_due(), self._note_at if self._dropped else math.inf)

    @property
    def has_text(self) -> bool:
        """Whether there is something to write."""
        return bool(self._pieces) or (self.rest is not None and self.rest.has_news)

    @property
    def fullness(self) -> float:
        """How much of what the cell takes has been taken, from 0 to 1."""
        return 1.0 if self.rest is not None else min(1.0, self._taken_bytes / self._limit_bytes)

    def take(self) -> str:
        """Return the text to write now: whole lines."""
        taken = "".join(self._pieces)
        self._taken_bytes += len(taken)
        self._pieces.clear()
        return taken

    def _folder_of(self, world_size: int) -> Folder:
        return Folder(sum(map(self._plan.shows_lines, range(world_size))))

    def _add(self, shown: Sequence[Shown]) -> None:
        for ranks, group in groupby(shown, lambda line: line.ranks):
            texts = [line.text for line in group]
            prefix = self._prefix(ranks)
            if self.rest is not None:
                self.rest.take(prefix, texts, self._budget.errors(texts))
                continue
            fit, errors = self._budget.split(texts)
            self._pieces += [f"{prefix}{text}\n" for text in fit]
            if len(fit) < len(texts):
                self.rest = Rest(self._plan.run_id)
                self.rest.take(prefix, texts[len(fit) :], errors)

    def _prefix(self, ranks: tuple[int, ...]) -> str:
        if len(ranks) > 1:
            return f"[{rank_ranges(ranks)} {TIMES}{len(ranks)}] "
        host = f"{self._host_of[ranks[0]]}:" if self._names_hosts else ""
        return f"[{host}{ranks[0]}] "

    def _note_dropped(self, now: float) -> None:
        """Say what was left out since the last time; less and less often, as a flood goes on."""
        if not self._dropped:
            return
        ranks = sorted(self._dropped)
        n_lines, n_bytes = map(sum, zip(*self._dropped.values(), strict=True))
        file = f"/rank-{ranks[0]}.log" if len(ranks) == 1 else ""
        self.say(
            f"[{rank_ranges(ranks)}] … {n_lines:,} line{'s' * (n_lines != 1)} "
            f"({size_text(n_bytes)}) not shown; full log: {self._logs_dir}{file}"
        )
        self._dropped.clear()
        self._note_at = now + self._note_pause_s
        self._note_pause_s = min(2 * self._note_pause_s, MAX_DROPPED_NOTE_S)


def _short(line: str) -> str:
    return line if len(line) <= LINE_CHARS else harmless(f"{line[:LINE_CHARS]}…")
