"""Check that the memory and the descriptors of a session do not grow over many cells.

    python benchmarks/session.py --cells 200

A real kernel runs cells in one session; every tenth cell raises an exception. The exit code is 1 if
the kernel, a process of the pool or a rank has grown beyond the limits, or was started or ended in
between.
"""

import argparse
import statistics
import sys
import time

import psutil
from contestants import notebook
from kernel_client import CellError, Notebook

SETTLED_AFTER = 10
"""Number of cells before the first measurement. They allocate memory that later cells reuse."""

MOST_BYTES_A_CELL = 200_000
MOST_DESCRIPTORS = 3

START = """%%taas --gpus 2 --session bench
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, count = dist.get_rank(), 0
"""
CELL = """%%taas --session bench --out count
count += 1
x = torch.ones(1000)
dist.all_reduce(x)
print(step, count)
"""
FAILS = "%%taas --session bench\nraise ValueError(step)"

Sizes = dict[int, tuple[str, int, int]]
"""By process id: the kind of process, its memory in bytes, and its number of open descriptors."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=200)
    asked = parser.parse_args()
    with notebook() as kernel:
        kernel.run("%load_ext taas_magic", START)
        seconds = run_cells(kernel, 0, SETTLED_AFTER)
        before = sizes()
        seconds += run_cells(kernel, SETTLED_AFTER, asked.cells)
        grown = report(before, sizes(), asked.cells - SETTLED_AFTER)
        kernel.run("%taas down")
    print(f"{asked.cells} cells, median {1000 * statistics.median(seconds):.0f} ms each")
    return int(grown)


def run_cells(kernel: Notebook, first: int, end: int) -> list[float]:
    """Run the cells of the steps from `first` to `end` - 1; return the seconds of each cell.

    Before each cell, the notebook sets the variable `step`. Every tenth cell raises an exception.
    If such a cell succeeds, end the script.
    """
    taken = []
    for step in range(first, end):
        kernel.run(f"step = {step}")
        began = time.monotonic()
        if step % 10 == 5:
            try:
                kernel.run(FAILS)
            except CellError:
                pass
            else:
                raise SystemExit("a cell that raises has not failed")
        else:
            kernel.run(CELL)
        taken.append(time.monotonic() - began)
    return taken


def sizes() -> Sizes:
    found = {}
    for process in psutil.Process().children(recursive=True):
        words = " ".join(process.cmdline())
        kind = next((k for k in ("ipykernel", "forkserver", "taas") if k in words), "other")
        found[process.pid] = kind, process.memory_info().rss, process.num_fds()
    return found


def report(before: Sizes, after: Sizes, cells: int) -> bool:
    """Print how each process has grown.

    Returns:
        Whether any process grew too much, or was started or ended between the measurements.
    """
    too_much = False
    for pid in sorted(before.keys() | after.keys()):
        if pid not in before or pid not in after:
            print(f"process {pid} {(before.get(pid) or after[pid])[0]}: started or ended")
            too_much = True
            continue
        kind, memory, descriptors = after[pid]
        more_bytes, more = memory - before[pid][1], descriptors - before[pid][2]
        print(
            f"{kind} {pid}: {memory / 1e6:.0f} MB ({more_bytes / 1e6:+.1f}), {more:+} descriptors"
        )
        too_much |= more_bytes > cells * MOST_BYTES_A_CELL or more > MOST_DESCRIPTORS
    return too_much


if __name__ == "__main__":
    sys.exit(main())
