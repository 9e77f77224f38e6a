"""What a rank counts: how long it waited for a loader, and the ledger of what it was handed.

The ledger is the proof that no batch was handed out twice (`audit`). Needs no torch.
"""

import json
import mmap
import os
import struct
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from msgspec import structs

from taas_magic.messages import RankCounts

_SAMPLE_EVERY = 16
_LEFT_S = 30.0
"""A pass that nobody asked for so long is taken to be left."""

_LINE_BYTES = 512
_COUNT = struct.Struct("<QI")
_GROW_LINES = 64

_T = TypeVar("_T")


class EpochTimer:
    """Time of one pass; adds what is over to the loader's counts."""

    def __init__(self, counts: RankCounts) -> None:
        self._counts = counts
        self._began = self._stopped = 0.0
        self._waits_since = 0.0

    def start(self) -> None:
        """Note that the cell waits."""
        self._waits_since = time.perf_counter()
        self._began = self._began or self._waits_since

    def stop(self) -> None:
        """Note that the cell goes on."""
        self._stopped = time.perf_counter()
        waited_s, self._waits_since = self._stopped - self._waits_since, 0.0
        self._counts.waited_s += waited_s
        if not self._counts.batches:
            self._counts.first_s += waited_s

    def end(self) -> None:
        """Note that the pass is over."""
        self._counts.span_s += self._stopped - self._began
        self._began = self._stopped = 0.0

    def counted(self) -> RankCounts:
        """Return the loader's counts, with the time of this pass if it goes on; any thread may."""
        found = structs.replace(self._counts)
        now, began, waits_since = time.perf_counter(), self._began, self._waits_since
        if began:
            waiting_s = now - waits_since if waits_since else 0.0
            found.waited_s += waiting_s
            found.span_s += (now if waits_since else min(now, self._stopped + _LEFT_S)) - began
            if not found.batches:
                found.first_s += waiting_s
        return found


def sampled(source: Iterator[_T], counts: RankCounts) -> Iterator[_T]:
    """Yield from `source`; measure now and then what of its time this thread computed."""
    wall_s = cpu_s = 0.0
    # The first one waits for the fetchers to begin, which says nothing about receiving.
    for number, item in enumerate(source, 1):
        if number % _SAMPLE_EVERY == 2:
            counts.receive_s += time.perf_counter() - wall_s
            counts.receive_cpu_s += time.thread_time() - cpu_s
        yield item
        if number % _SAMPLE_EVERY == 1:
            wall_s, cpu_s = time.perf_counter(), time.thread_time()


class Handed(NamedTuple):
    """A ledger's line: what one rank was handed in one pass over a loader.

    Attributes:
        generation: Which attempt of the run.
        turn: Number of the pass over it in this generation (two passes may share an epoch).
        first_step: The step it began with (not 0 after a resume).
        batches: How many batches the rank was handed, in order.
    """

    generation: int
    loader: str
    turn: int
    epoch: int
    rank: int
    world_size: int
    first_step: int
    batches: int

    def positions(self) -> range:
        """Return the positions handed out."""
        start = self.first_step * self.world_size + self.rank
        return range(start, start + self.batches * self.world_size, self.world_size)


class BatchLedger:
    """One rank's ledger of one generation, on disk; several passes may be under way at once.

    The file is mapped into memory; a line of it is one pass over a loader, and its counter is
    raised in place before the cell sees a batch. That costs no system call, and what was counted
    survives whatever ends the process.

    Args:
        generation: Which attempt of the run.
    """

    def __init__(self, folder: Path, generation: int, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._generation, self._rank = generation, rank
        self._file = (folder / f"ledger-{generation}-{rank}").open("w+b")
        self._lines = 0
        self._map, self._is_on_disk = mmap.mmap(-1, mmap.PAGESIZE), True
        self._grow()

    def begin(self, loader: str, turn: int, epoch: int, world_size: int, first_step: int) -> int:
        """Begin a pass (see `Handed`); return the number of its line."""
        if (self._lines + 1) * _LINE_BYTES > len(self._map):
            self._grow()
        about = self._generation, loader, turn, epoch, self._rank, world_size, first_step
        text = json.dumps(about).encode()
        at = self._lines * _LINE_BYTES
        self._map[at + _COUNT.size : at + _COUNT.size + len(text)] = text
        _COUNT.pack_into(self._map, at, 0, len(text))
        self._lines += 1
        return self._lines - 1

    def hand(self, line: int) -> None:
        """Count one more batch of this pass."""
        at = line * _LINE_BYTES
        count, size = _COUNT.unpack_from(self._map, at)
        _COUNT.pack_into(self._map, at, count + 1, size)

    def close(self) -> None:
        """Close the file."""
        self._map.close()
        self._file.close()

    def _grow(self) -> None:
        size = (self._lines + _GROW_LINES) * _LINE_BYTES
        try:  # a page that the disk has no room for would end the process (SIGBUS)
            os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError:
            self._is_on_disk = False
        if self._is_on_disk:
            self._map = mmap.mmap(self._file.fileno(), size)
        else:  # a full disk ends no run: it is counted in memory, and the file stays as it is
            before, self._map = self._map, mmap.mmap(-1, size)
            self._map[: len(before)] = before[:]


def read_ledgers(folder: Path) -> list[Handed]:
    """Return the lines of all ranks and generations of a run, for `audit`."""
    handed = []
    for file in sorted(folder.glob("ledger-*")):
        data = file.read_bytes()
        for at in range(0, len(data), _LINE_BYTES):
            count, size = _COUNT.unpack_from(data, at)
            if size:
                text = data[at + _COUNT.size : at + _COUNT.size + size]
                handed.append(Handed._make([*json.loads(text), count]))
    return handed


def audit(lines: Iterable[Handed]) -> list[str]:
    """Find what was handed out twice in a generation; an empty list is the proof that nothing was.

    Returns:
        A sentence for each (generation, loader, turn) with a fault.
    """
    passes: dict[tuple[int, str, int], list[Handed]] = {}
    for line in lines:
        passes.setdefault((line.generation, line.loader, line.turn), []).append(line)
    faults = []
    for (generation, loader, turn), ranks in passes.items():
        where = f"generation {generation}, loader {loader}, pass {turn}"
        handed = Counter(position for line in ranks for position in line.positions())
        if twice := sorted(position for position, count in handed.items() if count > 1):
            faults.append(f"{where}: positions {twice[:5]} were handed out more than once")
        if len({line.epoch for line in ranks}) > 1:
            faults.append(f"{where}: the ranks were in different epochs")
    return faults


def missing(lines: Iterable[Handed], positions: int) -> list[int]:
    """Return which of an epoch's first `positions` nobody was handed (in one pass)."""
    handed = {position for line in lines for position in line.positions()}
    return [position for position in range(positions) if position not in handed]
