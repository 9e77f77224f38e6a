"""The last lines of each rank of a run, from the log files in the run folder."""

import os
from pathlib import Path

from taas_magic.host.output import LineAssembler
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import without_controls

TAIL_LINES = 15
"""Maximum number of last lines that the status header shows of each rank."""

MOST_RANKS = 32
"""Maximum number of ranks whose last lines the status header shows."""

_READ_BYTES = 1 << 14


def last_lines(run_dir: Path, world_size: int, failed_rank: int | None) -> dict[int, list[str]]:
    """Return the last log lines of the failed rank and of the ranks with the lowest numbers.

    Read only the end of each log (16 KiB), and remove control characters from the lines.

    Args:
        run_dir: The run folder, which has the log files.
        world_size: Number of ranks of the run.
        failed_rank: Number of the rank that failed first; None if no rank failed.

    Returns:
        Up to `TAIL_LINES` lines of each rank, by rank, for at most `MOST_RANKS` ranks. The failed
        rank comes first. Ranks without output or without a readable log file are left out.
    """
    ranks = [failed_rank] if failed_rank is not None else []
    ranks += [rank for rank in range(min(world_size, MOST_RANKS)) if rank != failed_rank]
    folder, found = RunFolder(run_dir), dict[int, list[str]]()
    for rank in ranks[:MOST_RANKS]:
        try:
            lines, _ = lines_at_end(folder.log(rank), _READ_BYTES)
        except OSError:
            continue
        if lines:
            found[rank] = [without_controls(line) for line in lines[-TAIL_LINES:]]
    return found


def lines_at_end(path: Path, n_bytes: int) -> tuple[list[str], int]:
    """Return the lines in the last `n_bytes` bytes of a log, and the size of the log in bytes.

    The lines are as a terminal would show them, for example without earlier states of a progress
    bar. The first line may be incomplete.

    Raises:
        OSError: The log cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - n_bytes))
        assembler = LineAssembler()
        return [*assembler.feed(file.read()), *assembler.flush()], size
