"""Time the launch of ranks from a cell, and the arrival of their lines, with several launchers.

    python benchmarks/launch.py --rounds 7

The client of a real Jupyter kernel measures all times, from the sending of a cell to the arrival of
its text. A round measures every contestant once, and takes about a minute. Nearly half of this is
one cell of accelerate, which prints 2 x 10,000 lines (the flood).
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version

import protection
import psutil
from contestants import COLD, CONTESTANTS, PAUSE_S, TOKEN, Figures
from kernel_client import CellError

NAMES = {
    "taas-magic": "`%%taas`",
    "torchrun": "torchrun from a cell",
    "accelerate": "accelerate's notebook_launcher (forks the kernel)",
    "nbdistributed": "nbdistributed (ranks stay)",
    "ipyparallel": "ipyparallel (engines stay)",
    "floor": "floor: a fork server with torch preloaded",
}
COLUMNS = {
    "cold": "cold, imports counted",
    "cold, optimizer step": "cold, after a first optimizer step",
    "after warming": "first cell after the warming",
    "warm": "warm",
    "warm, one prints": "warm, only rank 0 prints",
    "warm, optimizer step": "warm, after a first optimizer step",
    "rested, optimizer step": f"the same after a pause of {PAUSE_S:.0f} s",
    "session": "a session's next cell",
    "delay": "a flushed line arrives after",
    "flood": "2 x 10,000 lines of 80 characters",
}
AIMS = {
    "warm": 0.1,
    "warm, one prints": 0.1,
    "rested, optimizer step": 0.1,
    "after warming": 0.1,
    "session": 0.03,
    "delay": 0.01,
    "flood": 0.3,
}
"""Targets for `%%taas`, in seconds. For a cold start, the target is torchrun's time."""

Rounds = dict[str, list[Figures]]
"""Figures of each contestant, one entry per round."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="how often to measure each")
    parser.add_argument("--only", choices=CONTESTANTS, nargs="+", default=list(CONTESTANTS))
    asked = parser.parse_args()
    print(machine(), flush=True)
    rounds = measure(asked.only, asked.rounds)
    for block in (table(rounds), ratios(rounds), aims(rounds)):
        print("", *block, sep="\n", flush=True)
    print("", *protection.table(), "", machine(), sep="\n")
    return end_leftovers()


def measure(names: Sequence[str], n_rounds: int) -> Rounds:
    """Measure the contestants in turn; each round starts with another one.

    If a contestant fails in a round, its error is printed, and the round has no figures of it.
    """
    rounds: Rounds = defaultdict(list)
    for number in range(n_rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            try:
                figures = CONTESTANTS[name]()
            except CellError as error:
                print(f"round {number + 1}/{n_rounds}  {name} failed: {error}", flush=True)
                continue
            rounds[name].append(figures)
            shown = "  ".join(f"{key} {value:.3f}" for key, value in figures.items())
            print(f"round {number + 1}/{n_rounds}  {name}: {shown}", file=sys.stderr, flush=True)
    return rounds


def median(rounds: Rounds, name: str, column: str) -> float | None:
    values = [figures[column] for figures in rounds.get(name, ()) if column in figures]
    return statistics.median(values) if values else None


def table(rounds: Rounds) -> list[str]:
    """Return a Markdown table with medians, and with the fastest and the slowest round."""
    lines = [f"| | {' | '.join(COLUMNS.values())} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name in NAMES:
        if name in rounds:
            cells = [cell(rounds[name], column) for column in COLUMNS]
            lines.append(f"| {NAMES[name]} | {' | '.join(cells)} |")
    return lines


def cell(figures: Sequence[Figures], column: str) -> str:
    values = sorted(seen[column] for seen in figures if column in seen)
    if not values:
        return ""
    spread = f"{seconds(statistics.median(values))} ({seconds(values[0])}-{seconds(values[-1])})"
    return f"{spread}; {completeness(figures)}" if column == "flood" else spread


def completeness(figures: Sequence[Figures]) -> str:
    """Return how many lines of the flood were glued to other lines, and how many were lost.

    Each number is that of its worst round. If both are 0, return "all whole".
    """
    counts = {what: int(max(seen[what] for seen in figures)) for what in ("glued", "lost")}
    bad = [f"{count:,} {what}" for what, count in counts.items() if count]
    return ", ".join(bad) or "all whole"


def seconds(value: float) -> str:
    """Format a duration, such as `3.1 s`, `85 ms` or `1.4 ms`."""
    if value >= 1:
        return f"{value:.1f} s"
    return f"{1000 * value:.0f} ms" if value >= 0.01 else f"{1000 * value:.1f} ms"


def ratios(rounds: Rounds) -> list[str]:
    """Return lines that compare the medians of each other contestant with those of `%%taas`."""
    lines = []
    for column in COLUMNS:
        ours = median(rounds, "taas-magic", column)
        for name in NAMES:
            theirs = median(rounds, name, column)
            if ours and theirs and name != "taas-magic":
                lines.append(f"{column}: {name} takes {theirs / ours:.2f} times as long")
    return lines


def aims(rounds: Rounds) -> list[str]:
    """Return a line for each target, with the median of `%%taas`, and whether it meets the target.

    Some targets are constants, the others are medians of torchrun.
    """
    lines = []
    cold = {column: median(rounds, "torchrun", column) for column in COLD}
    for column, aim in {**AIMS, **cold}.items():
        ours = median(rounds, "taas-magic", column)
        if ours is not None and aim is not None:
            verdict = "reached" if ours <= aim else "MISSED"
            lines.append(f"{column}: {seconds(ours)}, aim {seconds(aim)}: {verdict}")
    return lines


def machine() -> str:
    packages = ("torch", "distributed", "ipykernel", "accelerate")
    return ", ".join(
        [
            f"{os.cpu_count()} cores",
            f"load {os.getloadavg()[0]:.1f}",
            f"Python {platform.python_version()}",
            *(f"{package} {version(package)}" for package in packages),
        ]
    )


def end_leftovers() -> int:
    """Kill and report processes that contestants left running; return 1 if there are any.

    First give the processes 5 s to end by themselves.
    """
    left = []
    deadline = time.monotonic() + 5
    while (left := [p for p in psutil.process_iter() if _is_ours(p)]) and (
        time.monotonic() < deadline
    ):
        psutil.wait_procs(left, timeout=0.5)
    for process in left:
        print(f"left running, ended now: {process}", file=sys.stderr)
        process.kill()
    return int(bool(left))


def _is_ours(process: psutil.Process) -> bool:
    try:
        return process.environ().get(TOKEN) == str(os.getpid())
    except psutil.Error:
        return False


if __name__ == "__main__":
    sys.exit(main())
