"""The last lines of each rank of a run, from the log files in the run folder."""

import os
from pathlib import Path

from taas_magic.host.output import LineAssembler
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import without_controls

TAIL_LINES = 15
"""Number of last lines of each rank."""

MOST_RANKS = 32
"""Maximum number of ranks whose last lines the status header shows. `%taas logs` shows all."""

_READ_BYTES = 1 << 14


def last_lines(run_dir: Path, world_size: int, failed_rank: int | None) -> dict[int, list[str]]:
    """Return the last lines of the failed rank and of the ranks with the lowest numbers.

    Args:
        run_dir: The run folder.
        world_size: Number of ranks.
        failed_rank: The rank that failed first; None if no rank failed.

    Returns:
        Up to `TAIL_LINES` lines of each rank, for at most `MOST_RANKS` ranks; the failed rank comes
        first. Ranks without output, and ranks whose log file cannot be read, are left out.
    """
    ranks = [failed_rank] if failed_rank is not None else []
    ranks += [rank for rank in range(min(world_size, MOST_RANKS)) if rank != failed_rank]
    folder, found = RunFolder(run_dir), dict[int, list[str]]()
    for rank in ranks[:MOST_RANKS]:
        try:
            lines = _end_of(folder.log(rank))
        except OSError:
            continue
        if lines:
            found[rank] = lines
    return found


def _end_of(path: Path) -> list[str]:
    """Return the last lines of a log file."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _READ_BYTES))
        assembler = LineAssembler()
        lines = [*assembler.feed(file.read()), *assembler.flush()]
    return [without_controls(line) for line in lines[-TAIL_LINES:]]
