"""Programs that the ranks of every contestant run, and functions that evaluate their output."""

import re
import statistics
from collections import Counter
from typing import NamedTuple

from kernel_client import Output

RANKS = 2
LINES = 10_000
LINE_CHARS = 80

ALL_PRINT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} summed {total.item():.0f}", flush=True)
dist.destroy_process_group()
"""
SESSION_START = """
import torch
import torch.distributed as dist

if not dist.is_initialized():
    dist.init_process_group("gloo")
"""
SESSION_PRINTS = """
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} summed {total.item():.0f}", flush=True)
"""
"""Later cell of a session. It needs the imports and the process group of `SESSION_START`."""

ONE_PRINTS = ALL_PRINT.replace("print(", "if dist.get_rank() == 0:\n    print(")
STEP_PRINTS = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} summed {total.item():.0f}", flush=True)
dist.destroy_process_group()
"""
FIRST_LINE_MARK = f"summed {RANKS}"

CLOCK = """
import os
import time

if os.environ["RANK"] == "0":
    for _ in range(21):
        print(f"printed at {time.time()!r}", flush=True)
        time.sleep(0.05)
"""

FLOOD = f"""
import os

rank = os.environ["RANK"]
for number in range({LINES}):
    print(f"rank {{rank}} line {{number}} ".ljust({LINE_CHARS}, "."))
"""

_PREFIX = re.compile(r"^\[\S+\] ", re.MULTILINE)


class Flood(NamedTuple):
    """Figures of the arrival of the lines that the program `FLOOD` prints.

    Attributes:
        seconds: Time between the first and the last piece of text.
        glued: Number of lines that arrived as a part of another line, or more than once.
        lost: Number of lines that did not arrive.
    """

    seconds: float
    glued: int
    lost: int


def first_line_s(output: Output) -> float:
    """Return the seconds from the sending of the cell to the first line after the all_reduce."""
    return output.seconds_to(FIRST_LINE_MARK)


def delay_s(output: Output) -> float:
    """Return the median time from a rank's print to the line's arrival, in seconds."""
    return statistics.median(
        piece.arrived - float(printed)
        for piece in output.pieces
        for printed in re.findall(r"printed at ([\d.]+)", piece.text)
    )


def flood(output: Output) -> Flood:
    """Search the output of `FLOOD` for each printed line, and return the figures."""
    arrivals = [piece.arrived for piece in output.pieces if " line " in piece.text]
    text = _PREFIX.sub("", output.text)
    whole = Counter(line.rstrip("\r") for line in text.split("\n"))
    broken = [line for line in _printed() if whole[line] != 1]
    glued = sum(line in text for line in broken)
    return Flood(arrivals[-1] - arrivals[0], glued, len(broken) - glued)


def _printed() -> list[str]:
    return [
        f"rank {rank} line {number} ".ljust(LINE_CHARS, ".")
        for rank in range(RANKS)
        for number in range(LINES)
    ]
