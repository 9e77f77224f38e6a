"""Check that every kind of failure shows its traceback in the notebook, on a busy machine.

    python benchmarks/failures.py --rounds 10 --busy 8

A round runs one failing cell of each kind with `%%taas --gpus 2` in a real kernel. The exit code is
1 if the notebook does not show the text and the line number of the user's failing line.
"""

import argparse
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from contestants import notebook
from kernel_client import CellError, Notebook

HEAD = "%%taas --gpus 2 --timeout 100s\n"
MARK = "# here"
"""Comment that marks the failing line of a program."""

CRASH = "a crash in native code"
"""Kind whose traceback has only line numbers: faulthandler writes no source text."""

DEFINITIONS = """
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __init__(self, uneven=False, bad=False):
        self.uneven, self.bad = uneven, bad
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if self.bad:
            raise KeyError(f"sample {index}")  # dataset
        return torch.zeros(index if self.uneven else 1)

def divide(number):
    return 1 / number  # divide
"""

KINDS = {
    "JSON": "import json\njson.loads('{')  # here",
    "division in an earlier cell": "divide(0)  # here",
    "a call of CUDA": "import torch\ntorch.ones(1).to('cuda')  # here",
    "collate": "for batch in DataLoader(Numbers(uneven=True), batch_size=2):  # here\n    pass",
    "a worker process": (
        "for batch in DataLoader(Numbers(bad=True), num_workers=1):  # here\n    pass"
    ),
    "an exception group": (
        "parts = [ValueError('a'), TypeError('b')]\nraise ExceptionGroup('many', parts)  # here"
    ),
    "a syntax error in line 1": "x = = 1  # here",
    "a syntax error that compiling finds": "\nreturn 1  # here",
    "a thread": (
        "import threading\ndef work():\n    raise OSError('in a thread')  # here\n"
        "thread = threading.Thread(target=work)\nthread.start()\nthread.join()\n"
        "raise SystemExit(3)"
    ),
    "an executor": (
        "from concurrent.futures import ThreadPoolExecutor\ndef work():\n"
        "    raise OSError('in an executor')  # here\n"
        "with ThreadPoolExecutor(1) as pool:\n    pool.submit(work).result()"
    ),
    "atexit": (
        "import atexit\ndef bye():\n    raise OSError('at exit')  # here\n"
        "atexit.register(bye)\nraise SystemExit(3)"
    ),
    "C++": "import torch\ntorch.ones(2, 3) @ torch.ones(2, 3)  # here",
    CRASH: "import ctypes\nctypes.string_at(0)  # here",
    "recursion": "def down():\n    down()  # here\ndown()",
    "a chain": (
        "try:\n    {}['x']\nexcept KeyError as error:\n    raise ValueError('y') from error  # here"
    ),
    "an exception that cannot be printed": (
        "class Bad(Exception):\n    def __str__(self):\n        raise RuntimeError\n"
        "raise Bad  # here"
    ),
    "one rank of two": (
        "import os, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "if os.environ['RANK'] == '1':\n    raise LookupError('only here')  # here\ndist.barrier()"
    ),
    "an exit code": "import sys\nsys.exit(7)  # here",
    "a pool of processes": (
        "from multiprocessing import Pool\nwith Pool(1) as pool:\n    pool.map(divide, [0])  # here"
    ),
    "await": "import asyncio\nawait asyncio.wait_for(asyncio.Event().wait(), 0.01)  # here",
}
"""Failing programs, by kind of failure."""

_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(
    r"Cell In\[(\d+)\](?:\x22)?,? (?:line|\(line\)) ?(\d+)|^-+> (\d+) ", re.MULTILINE
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="cells of each kind")
    parser.add_argument("--busy", type=int, default=8, help="processes that keep the machine busy")
    parser.add_argument("--only", choices=KINDS, nargs="+", default=list(KINDS))
    asked = parser.parse_args()
    whole: Counter[str] = Counter()
    began = time.monotonic()
    with notebook() as kernel, busy(asked.busy):
        kernel.run("%load_ext taas_magic", DEFINITIONS)
        for _ in range(asked.rounds):
            for kind in asked.only:
                whole[kind] += is_whole(kernel, kind)
        kernel.run("%taas down")
    print("| failure | shown whole |", "|---|---|", sep="\n")
    for kind in asked.only:
        print(f"| {kind} | {whole[kind]} of {asked.rounds} |")
    n_cells = asked.rounds * len(asked.only)
    took_s = time.monotonic() - began
    print(f"\n{whole.total()} of {n_cells} whole, {asked.busy} busy processes, {took_s:.0f} s")
    return int(whole.total() < n_cells)


def is_whole(kernel: Notebook, kind: str) -> bool:
    """Run one failing cell; return whether its failing line is shown. If not, print the output."""
    source = HEAD + KINDS[kind]
    shown = _COLORS.sub("", failure_of(kernel, source))
    line_number = source[: source.index(MARK)].count("\n") + 1
    line = source.splitlines()[line_number - 1]
    found = str(line_number) in numbers_of(shown) and (line.strip() in shown or kind == CRASH)
    if not found:
        print(f"--- {kind}: line {line_number} is missing in:\n{shown}\n---", flush=True)
    return found


def failure_of(kernel: Notebook, source: str) -> str:
    try:
        output = kernel.run(source)
    except CellError as error:
        return str(error)
    return f"the cell succeeded: {output.text}"


def numbers_of(shown: str) -> set[str]:
    """Return the cell and line numbers of the cells' frames in a traceback."""
    return {number for found in _FRAME.findall(shown) for number in found if number}


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep the machine busy with some processes until the block ends."""
    context = multiprocessing.get_context("spawn")
    spinning = [context.Process(target=_spin, args=(os.getpid(),)) for _ in range(processes)]
    for process in spinning:
        process.start()
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.join()


def _spin(parent: int) -> None:
    while os.getppid() == parent:
        sum(range(10_000))


if __name__ == "__main__":
    sys.exit(main())
