"""Reads a run's ledgers and checks that no batch was handed out twice (docs/data.md)."""

import json
import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

LINE_BYTES = 1024
COUNT = struct.Struct("<QI")


class Handed(NamedTuple):
    """Record of a ledger: the batches that one rank received in one pass over a loader.

    Attributes:
        attempt: Number of the run's attempt.
        pass_number: Number of the pass in this attempt. Two passes may read the same epoch.
        first_step: Step at which the pass began; not 0 after a resume.
        batches: Number of batches that the rank received, in order.
    """

    attempt: int
    loader: str
    pass_number: int
    epoch: int
    rank: int
    world_size: int
    first_step: int
    batches: int

    def positions(self) -> range:
        """Return the positions, in the epoch's order, of the batches that the rank received."""
        start = self.first_step * self.world_size + self.rank
        return range(start, start + self.batches * self.world_size, self.world_size)


def read_ledgers(folder: Path) -> list[Handed]:
    """Return the records of all ranks and attempts of a run."""
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
    """Find batches that were handed out twice in one pass, and ranks in different epochs.

    Returns:
        One sentence for each fault; an empty list if there is none.
    """
    passes: dict[tuple[int, str, int], list[Handed]] = {}
    for line in lines:
        passes.setdefault((line.attempt, line.loader, line.pass_number), []).append(line)
    faults = []
    for (attempt, loader, pass_number), ranks in passes.items():
        where = f"attempt {attempt}, loader {loader}, pass {pass_number}"
        handed = Counter(position for line in ranks for position in line.positions())
        if twice := sorted(position for position, count in handed.items() if count > 1):
            faults.append(f"{where}: positions {twice[:5]} were handed out more than once")
        if len({line.epoch for line in ranks}) > 1:
            faults.append(f"{where}: the ranks were in different epochs")
    return faults


def missing(lines: Iterable[Handed], positions: int) -> list[int]:
    """Return the positions below `positions` whose batch no rank received.

    Args:
        lines: Records of one pass.
        positions: Number of batches of the epoch.
    """
    handed = {position for line in lines for position in line.positions()}
    return [position for position in range(positions) if position not in handed]
