"""Measure how long a rank takes to apply the protection of the project store.

    python benchmarks/protection.py

Each figure is the median over new ranks, which are forks of a process that has imported torch.
`launch.py` prints the same table.
"""

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from taas_magic.store import guard
from taas_magic.store.guard import StoreProtection, apply_rule
from taas_magic.store.rule import StoreRule

RANKS = 15
AIM_MS = 10.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "numpy", "protection"])


def table() -> list[str]:
    """Return a Markdown table with the set-up time of each protection mechanism per rank."""
    head = ["| what holds a rank | set-up per rank |", "|---|---|"]
    possible = guard.possible_protections(os.geteuid())
    rows = [
        _row(f"{protection.value}, and Python", protection, rank=1) for protection in possible[:-1]
    ]
    rows += [_row(StoreProtection.PYTHON.value, StoreProtection.PYTHON, rank=1)]
    rows += [_row("rank 0: nothing, it is watched", StoreProtection.PYTHON, rank=0)]
    return [*head, *rows, f"Aim: under {AIM_MS:.0f} ms."]


def _row(label: str, protection: StoreProtection, rank: int) -> str:
    measured = [_measure(protection, rank) for _ in range(RANKS)]
    if any(used != protection.value for used, _ in measured):
        return f"| {label} | not offered here |"
    return f"| {label} | {statistics.median(ms for _, ms in measured):.1f} ms |"


def _measure(protection: StoreProtection, rank: int) -> tuple[str, float]:
    """Return the mechanism that `apply_rule` has used, and its set-up time in milliseconds.

    If `protection` does not work here, `apply_rule` uses another mechanism.
    """
    with tempfile.TemporaryDirectory() as folder:
        reading, writing = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_measure_in_child, args=(writing, folder, protection.value, rank)
        )
        process.start()
        used, ms = reading.recv()
        process.join()
    return used, ms


def _measure_in_child(writing: Connection, folder: str, protection: str, rank: int) -> None:
    """Protect a new store in this process; send the used mechanism and the time in ms."""
    store = Path(folder, "store")
    store.mkdir()
    os.chdir(store)
    began = time.perf_counter()
    used = apply_rule(
        StoreRule(str(store)),
        f"rank {rank}",
        writes=rank == 0,
        protection=StoreProtection(protection),
        scratch=Path(folder, "scratch"),
        run_folders=[folder],
        on_write=lambda path, is_moved: None,
    )
    writing.send((used.value, 1000 * (time.perf_counter() - began)))


if __name__ == "__main__":
    sys.stdout.write("\n".join([*table(), ""]))
