"""Lines of all ranks -> the text of a run's log in the notebook. Pure: the caller gives the time.

Three things happen to a line here: it folds with its equals (`fold`), it gets a prefix that says
who printed it, and it counts against bounds. The first bound is Jupyter's own: its server stops all
output of a kernel that sends more than 3 MB of text within 3 s (`iopub_data_rate_limit`). The other
is what a browser can bear in one cell.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from taas_magic.display.fold import Folder, Shown, rank_ranges
from taas_magic.remote.lines import LogBudget

BURST_BYTES = 2_000_000
BYTES_PER_S = 200_000
TOTAL_BYTES = 8 * 1024 * 1024
TRICKLE_BYTES_PER_S = 100
UNBOUNDED = 1 << 62
DROPPED_NOTE_S = 1.0
MAX_DROPPED_NOTE_S = 60.0
TIMES = "\N{MULTIPLICATION SIGN}"

CURSOR_MOVES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-ln-~]")
COLOURS_END = ("\x1b[0m", "\x1b[m")


class LogText:
    """The log of one run, as the text that is still to be written.

    Args:
        world_size: Ranks in all.
        n_hosts: With more than one, a prefix names the host, too.
        logs_dir: Where the complete logs lie.
        log_ranks: Ranks whose lines are shown; None shows all.
        now: The time, in seconds, on the clock of all later calls.
    """

    def __init__(
        self,
        world_size: int,
        n_hosts: int,
        logs_dir: str,
        log_ranks: frozenset[int] | None,
        now: float,
    ) -> None:
        ranks = range(world_size)
        self._ranks = None if log_ranks is None else log_ranks.intersection(ranks)
        self._names_hosts = n_hosts > 1
        self._logs_dir = logs_dir
        self._host_of: dict[int, str] = {}
        self._folder = Folder(world_size if self._ranks is None else len(self._ranks))
        self._now = now
        self._rate = LogBudget(
            lambda: self._now, burst=(BURST_BYTES, UNBOUNDED), per_s=(BYTES_PER_S, UNBOUNDED)
        )
        self._total = LogBudget(
            lambda: self._now, burst=(TOTAL_BYTES, UNBOUNDED), per_s=(TRICKLE_BYTES_PER_S, 0)
        )
        self._pieces: list[str] = []
        self._dropped: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
        self._note_pause_s = DROPPED_NOTE_S
        self._note_at = float("-inf")

    def lines(self, event: Mapping[str, Any], now: float) -> None:
        """Takes a `lines` event."""
        rank = event["rank"]
        if self._shows(rank):
            self._host_of[rank] = str(event.get("host", ""))
            self._add(self._folder.push(rank, event["lines"], now), now)

    def dropped(self, event: Mapping[str, Any]) -> None:
        """Takes a `dropped` event: what the rank's host did not send."""
        if self._shows(event["rank"]):
            self._count_dropped((event["rank"],), event["lines"], event["bytes"])

    def say(self, text: str, now: float) -> None:
        """Adds a line that no rank printed, after all that was printed before it."""
        self.flush(now)
        self._pieces.append(f"{text}\n")

    def due(self, now: float) -> None:
        """Adds what has waited long enough."""
        self._add(self._folder.due(now), now)
        if self._dropped and now >= self._note_at:
            self._note_dropped(now)

    def flush(self, now: float) -> None:
        """Adds all that waits for other ranks."""
        self._add(self._folder.flush(now), now)

    def close(self, now: float) -> None:
        """Adds all that waits, and how much was left out."""
        self.flush(now)
        self._note_dropped(now)

    def next_due(self) -> float | None:
        """When `due` will have something to add; None while nothing waits."""
        due = self._folder.next_due()
        if not self._dropped:
            return due
        return self._note_at if due is None else min(due, self._note_at)

    @property
    def has_text(self) -> bool:
        return bool(self._pieces)

    def take(self) -> str:
        """The text to write now: whole lines."""
        taken = "".join(self._pieces)
        self._pieces.clear()
        return taken

    def _shows(self, rank: int) -> bool:
        return self._ranks is None or rank in self._ranks

    def _add(self, shown: Sequence[Shown], now: float) -> None:
        self._now = now
        for ranks, group in groupby(shown, lambda line: line.ranks):
            texts = [line.text for line in group]
            kept = self._total.admit(self._rate.admit(texts))
            for budget in (self._rate, self._total):
                self._count_dropped(ranks, *budget.take_dropped())
            prefix = self._prefix(ranks)
            self._pieces += [f"{prefix}{harmless(text)}\n" for text in kept]

    def _prefix(self, ranks: tuple[int, ...]) -> str:
        if len(ranks) > 1:
            return f"[{rank_ranges(ranks)} {TIMES}{len(ranks)}] "
        host = f"{self._host_of[ranks[0]]}:" if self._names_hosts else ""
        return f"[{host}{ranks[0]}] "

    def _count_dropped(self, ranks: tuple[int, ...], n_lines: int, n_bytes: int) -> None:
        if not n_lines:
            return
        for rank in ranks:
            lines, size_bytes = self._dropped[rank]
            self._dropped[rank] = lines + n_lines, size_bytes + n_bytes

    def _note_dropped(self, now: float) -> None:
        """Says what was left out since the last time; less and less often, as a flood goes on."""
        if not self._dropped:
            return
        ranks = sorted(self._dropped)
        n_lines, n_bytes = map(sum, zip(*self._dropped.values(), strict=True))
        file = f"/rank-{ranks[0]}.log" if len(ranks) == 1 else ""
        self._pieces.append(
            f"[{rank_ranges(ranks)}] … {n_lines:,} line{'s' * (n_lines != 1)} "
            f"({size_text(n_bytes)}) not shown; full log: {self._logs_dir}{file}\n"
        )
        self._dropped.clear()
        self._note_at = now + self._note_pause_s
        self._note_pause_s = min(2 * self._note_pause_s, MAX_DROPPED_NOTE_S)


def harmless(text: str) -> str:
    """A line whose ANSI sequences touch no other line: colours end with it, the cursor stays."""
    if "\x1b" not in text:
        return text
    text = CURSOR_MOVES.sub("", text)
    return text if text.endswith(COLOURS_END) or "\x1b[" not in text else f"{text}\x1b[0m"


def size_text(n_bytes: float) -> str:
    """Bytes with a unit: `812 bytes`, `6.4 MB`."""
    if n_bytes < 1000:
        return f"{n_bytes:.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        n_bytes /= 1000
        if n_bytes < 999.95:
            return f"{n_bytes:.1f} {unit}"
    return f"{n_bytes / 1000:.1f} TB"
