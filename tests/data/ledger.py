"""What a run's ledgers say, and the proof that nothing was handed out twice (docs/data.md)."""

import json
import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

LINE_BYTES = 1024
COUNT = struct.Struct("<QI")


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


def read_ledgers(folder: Path) -> list[Handed]:
    """Return the lines of all ranks and generations of a run, for `audit`."""
    handed = []
    for file in sorted(folder.glob("ledger-*")):
        data = file.read_bytes()
        for at in range(0, len(data), LINE_BYTES):
            count, size = COUNT.unpack_from(data, at)
            if size:
                text = data[at + COUNT.size : at + COUNT.size + size]
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
