"""Interrupt cells at random moments on a busy machine, and check that the kernel is soon usable.

    python -m benchmarks.interrupts [--rounds 500] [--busy 4] [--seed 1]

A round interrupts a cell at a random moment of the cell's first 4 s: once, or twice in every fourth
round. Then it runs `6 * 7`, and finally a `%%taas` cell. The script prints the seconds from the
interrupt to the reply of `6 * 7`. It also lists what went wrong: interrupted cells that did not end
with KeyboardInterrupt, and final cells that failed. The exit code is 1 if anything went wrong, or
if any reply took longer than `USABLE_S` seconds.
"""

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.tree import LOADER, NEXT, TRAIN
from tests.frontend import Frontend, Scene

USABLE_S = 10.0
END_S = 60.0

WAITS = """%%taas --gpus 2
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
while True:
    dist.all_reduce(torch.ones(1))  # rank 0 waits there
    if os.environ["RANK"] == "1":
        time.sleep(600)
"""
COMPUTES = """%%taas --gpus 2
import torch
while True:
    torch.randn(300, 300) @ torch.randn(300, 300)
"""
PRINTS = """%%taas --gpus 2
import itertools
for number in itertools.count():
    print("line", number)
"""
WORKERS = """%%taas --gpus 2
import torch
from torch.utils.data import DataLoader, TensorDataset
while True:
    for batch in DataLoader(TensorDataset(torch.arange(64)), batch_size=1, num_workers=2):
        pass
"""
KINDS = {
    "a registered loader": TRAIN.replace("in loader", "in iter(lambda: next(iter(loader)), None)"),
    "a collective": WAITS,
    "computing": COMPUTES,
    "printing": PRINTS,
    "loading": WORKERS,
}


@dataclass
class Result:
    """Results of all rounds.

    Attributes:
        kinds: Number of rounds with each kind of cell.
        took_s: Seconds from each interrupt to the reply of the cell after it.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    took_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        median_s, late = statistics.median(self.took_s), sum(s > USABLE_S for s in self.took_s)
        return (
            f"{self.kinds.total()} interrupts; usable again after {median_s:.2f} s in the median, "
            f"{max(self.took_s):.2f} s at most, {late} times later than {USABLE_S:.0f} s; "
            f"not as it should be: {len(self.wrong)}"
        )


def interrupt(frontend: Frontend, kind: str, after_s: float, times: int, result: Result) -> None:
    """Play one round, and add its outcome to `result`.

    Interrupt the cell, and then run `6 * 7` and the cell `NEXT`. Record the time until the reply of
    `6 * 7`, and what went wrong.

    Args:
        kind: Kind of cell, a key of KINDS.
        after_s: Seconds from the cell's start to the interrupt; less if the cell ends before.
        times: Number of interrupts.
    """
    request = frontend.send(KINDS[kind])
    with suppress(AssertionError):  # `finish` raises it if the cell still runs after `after_s`
        frontend.wait(lambda: request in frontend.replies, after_s)
    began = time.perf_counter()
    for _ in range(times):
        frontend.manager.interrupt_kernel()
    reply = frontend.finish(request, END_S)
    frontend.finish(frontend.send("6 * 7"), END_S)
    result.kinds[kind] += 1
    result.took_s.append(time.perf_counter() - began)
    told = f"{kind}, {times} after {after_s:.2f} s"
    if reply.get("ename") != "KeyboardInterrupt":
        result.wrong.append(f"{told}: {reply}")
    following = frontend.send(NEXT)
    if frontend.finish(following, END_S)["status"] != "ok":
        result.wrong.append(f"{told}: next cell: {frontend.replies[following]}")
    frontend.outputs.clear()
    frontend.replies.clear()


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep the machine busy with some processes until the block ends."""
    spin = [sys.executable, "-c", "while True: sum(range(10_000))"]
    spinning = [subprocess.Popen(spin) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--busy", type=int, default=4, help="processes that keep the machine busy")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    chance, result = random.Random(asked.seed), Result()
    with tempfile.TemporaryDirectory() as folder, busy(asked.busy):
        scene = Scene(Path(folder))
        with scene.kernel() as frontend:
            frontend.run(LOADER)
            for number in range(1, asked.rounds + 1):
                kind, after_s = chance.choice(list(KINDS)), chance.uniform(0.0, 4.0)
                interrupt(frontend, kind, after_s, 2 if number % 4 == 0 else 1, result)
                print(
                    f"{number}: {kind} after {after_s:.2f} s: {result.took_s[-1]:.2f} s", flush=True
                )
        scene.close()
    counts = ", ".join(f"{count} x {kind}" for kind, count in sorted(result.kinds.items()))
    print(f"{counts}\n{result}", *result.wrong, sep="\n    ")
    return int(bool(result.wrong) or max(result.took_s) > USABLE_S)


if __name__ == "__main__":
    sys.exit(main())
