"""Equal lines of many ranks become one. Pure: the caller gives the time.

A line waits at most `hold_s` for the other ranks to print it too, and no longer when each of them
has printed something else. A rank that prints alone does not wait at all: once a line of it has
waited in vain, its lines pass at once, but for the kinds of line that ranks have printed alike
before (`epoch 3` is of the kind of `epoch 2`). So a loss that only rank 0 prints appears
immediately, and the epochs that all print are still shown once.
"""

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import groupby, takewhile
from typing import NamedTuple

HOLD_S = 0.03
"""Ranks that a collective has just let go print within a few milliseconds of one another."""

DIGITS = re.compile(r"\d+")
KIND_CHARS = 200
MAX_KINDS = 1000


class Shown(NamedTuple):
    """A line to show now, and the ranks that printed it (ascending)."""

    ranks: tuple[int, ...]
    text: str


def rank_ranges(ranks: Iterable[int], max_ranges: int = 6) -> str:
    """Ascending ranks as `0-2,5,7-9`; many ranges are cut with `…`."""
    runs = groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    spans = [[rank for _, rank in run] for _, run in runs]
    words = [f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans]
    return ",".join(words if len(words) <= max_ranges else [*words[:max_ranges], "…"])


def line_kind(text: str) -> str:
    """What lines that differ only in their numbers have in common."""
    return DIGITS.sub("0", text[:KIND_CHARS])


class Folder:
    """Folds the lines of `world_size` ranks; the order within each rank is kept.

    Each rank has a queue of lines that wait. Ranks whose first waiting lines are equal form a
    group, found by the line's hash: a line costs the same for 2 ranks and for 8,192.

    Args:
        world_size: How many ranks print; a line that all of them printed need not wait.
        hold_s: How long a line may wait for the other ranks, in seconds.
    """

    def __init__(self, world_size: int, hold_s: float = HOLD_S) -> None:
        self._world_size = world_size
        self._hold_s = hold_s
        self._all: tuple[int, ...] = ()
        self._waiting: defaultdict[int, deque[str]] = defaultdict(deque)
        self._groups: dict[str, set[int]] = {}
        self._n_waiting = 0
        self._n_alike: Counter[str] = Counter()
        self._deadlines: deque[tuple[float, int, int]] = deque()
        self._n_held: defaultdict[int, int] = defaultdict(int)
        self._n_released: defaultdict[int, int] = defaultdict(int)
        self._loners: set[int] = set()
        self._kinds_alike: set[str] = set()
        self._passed = _Recent(hold_s)

    def push(self, rank: int, lines: Sequence[str], now: float) -> list[Shown]:
        """Takes the next lines of a rank; returns what is to be shown now, in this order."""
        if self._world_size == 1:
            return [Shown((rank,), line) for line in lines]
        shown = self.due(now)
        queue = self._waiting[rank]
        if not queue and rank in self._loners:
            passing = list(takewhile(lambda line: self._passes(rank, line, now), lines))
            shown += [Shown((rank,), line) for line in passing]
            lines = lines[len(passing) :]
        if not lines:
            return shown
        comes_first = not queue
        queue.extend(lines)
        self._n_waiting += comes_first
        self._n_alike.update(lines)
        self._n_held[rank] += len(lines)
        self._deadlines.append((now + self._hold_s, rank, self._n_held[rank]))
        if comes_first and self._join(rank, lines[0], now):
            shown += self._release(lines[0], now)
        return shown + self._release_unmatched(now)

    def due(self, now: float) -> list[Shown]:
        """Returns the lines that have waited long enough."""
        shown: list[Shown] = []
        while (deadline := self.next_due()) is not None and deadline <= now:
            _, rank, _ = self._deadlines[0]
            shown += self._give_up(self._waiting[rank][0], now)
        return shown

    def next_due(self) -> float | None:
        """When `due` will have something to return; None when nothing waits."""
        while self._deadlines:
            deadline, rank, number = self._deadlines[0]
            if number > self._n_released[rank]:
                return deadline
            self._deadlines.popleft()
        return None

    def flush(self, now: float) -> list[Shown]:
        """Returns all that waits."""
        shown: list[Shown] = []
        while self._groups:
            shown += self._release(next(iter(self._groups)), now)
        self._deadlines.clear()
        return shown

    def _release_unmatched(self, now: float) -> list[Shown]:
        """Shows lines that wait for nobody: every rank has lines waiting, and not this one.

        The lowest rank's goes first: rank 0 is the one that says more than the others.
        """
        shown: list[Shown] = []
        while self._n_waiting == self._world_size:
            unmatched = [
                text for text, group in self._groups.items() if self._n_alike[text] == len(group)
            ]
            if not unmatched:
                break
            shown += self._give_up(min(unmatched, key=lambda text: min(self._groups[text])), now)
        return shown

    def _give_up(self, text: str, now: float) -> list[Shown]:
        """Shows a group although ranks are missing; a rank that is all of it prints alone."""
        group = self._groups[text]
        if len(group) == 1:
            self._loners |= group
            self._kinds_alike.discard(line_kind(text))
        return self._release(text, now)

    def _join(self, rank: int, line: str, now: float) -> bool:
        """Puts a rank whose first line is `line` into its group; says whether nobody is missing."""
        group = self._groups.setdefault(line, set())
        group.add(rank)
        other = self._passed.lookup(line, now)
        if other is not None and other != rank:
            self._loners -= {rank, other}
            self._learn(line)
        n_seen = len(group) + (other is not None and other not in group)
        return n_seen == self._world_size

    def _release(self, text: str, now: float) -> list[Shown]:
        """Shows a group, and what can be shown because its members' next lines come first now."""
        shown = []
        ready = [text]
        while ready:
            text = ready.pop()
            group = self._groups.pop(text, None)
            if group is None:
                continue
            shown.append(Shown(self._ascending(group), text))
            if len(group) > 1:
                self._learn(text)
            for rank in group:
                queue = self._waiting[rank]
                queue.popleft()
                self._n_released[rank] += 1
                self._n_waiting -= not queue
                self._forget(text)
                if queue and (
                    self._join(rank, queue[0], now)
                    or (rank in self._loners and self._passes(rank, queue[0], now))
                ):
                    ready.append(queue[0])
        return shown

    def _forget(self, text: str) -> None:
        self._n_alike[text] -= 1
        if not self._n_alike[text]:
            del self._n_alike[text]

    def _ascending(self, group: set[int]) -> tuple[int, ...]:
        if len(group) < self._world_size:
            return tuple(sorted(group))
        self._all = self._all or tuple(sorted(group))
        return self._all

    def _passes(self, rank: int, line: str, now: float) -> bool:
        """Whether a line of a rank that prints alone need not wait; remembers it if so."""
        if self._passed.lookup(line, now) not in (None, rank):
            return False
        queue = self._waiting[rank]
        if self._n_alike[line] > (bool(queue) and queue[0] == line):
            return False  # another rank waits with it
        if self._kinds_alike and line_kind(line) in self._kinds_alike:
            return False
        self._passed.add(line, rank, now)
        return True

    def _learn(self, text: str) -> None:
        if len(self._kinds_alike) >= MAX_KINDS:
            self._kinds_alike.clear()
        self._kinds_alike.add(line_kind(text))


class _Recent:
    """Which rank printed a line within the last `window_s`; two generations bound the memory."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._began = float("-inf")
        self._young: dict[str, int] = {}
        self._old: dict[str, int] = {}

    def add(self, line: str, rank: int, now: float) -> None:
        self._age(now)
        self._young[line] = rank

    def lookup(self, line: str, now: float) -> int | None:
        self._age(now)
        return self._young.get(line, self._old.get(line))

    def _age(self, now: float) -> None:
        if now - self._began > self._window_s:
            self._old = self._young if now - self._began <= 2 * self._window_s else {}
            self._young = {}
            self._began = now
