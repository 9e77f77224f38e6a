"""What ranks were handed, and the proof that nothing came twice or not at all; pure."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


class Handed(NamedTuple):
    """A ledger's line: what one rank was handed in one pass over a loader.

    Attributes:
        generation: Which attempt of the run.
        loader: The loader's name.
        turn: Number of the pass over it in this generation (two passes may share an epoch).
        epoch: The epoch.
        rank: The rank.
        world_size: Number of ranks.
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
        """The positions handed out."""
        start = self.first_step * self.world_size + self.rank
        return range(start, start + self.batches * self.world_size, self.world_size)


def audit(lines: Iterable[Handed]) -> list[str]:
    """Find what was handed out twice in a generation; an empty list is the proof that nothing was.

    Returns:
        A sentence for each (generation, loader, turn) with a fault.
    """
    counts: dict[tuple[int, str, int], Counter[int]] = {}
    epochs: dict[tuple[int, str, int], set[int]] = {}
    for line in lines:
        key = line.generation, line.loader, line.turn
        counts.setdefault(key, Counter()).update(line.positions())
        epochs.setdefault(key, set()).add(line.epoch)
    faults = []
    for (generation, loader, turn), handed in counts.items():
        where = f"generation {generation}, loader {loader}, pass {turn}"
        if twice := sorted(position for position, count in handed.items() if count > 1):
            faults.append(f"{where}: positions {twice[:5]} were handed out more than once")
        if len(epochs[generation, loader, turn]) > 1:
            faults.append(f"{where}: the ranks were in different epochs")
    return faults


def missing(lines: Iterable[Handed], positions: int) -> list[int]:
    """Which of an epoch's first `positions` nobody was handed (of one pass)."""
    handed = {position for line in lines for position in line.positions()}
    return [position for position in range(positions) if position not in handed]
