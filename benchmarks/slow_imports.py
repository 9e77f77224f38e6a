"""Check everything that needs an import, with imports that take minutes.

    python -m benchmarks.slow_imports [--torch 60] [--dynamo 90] [--wait 1200]

A real kernel with the default settings runs ten cells, a registered loader with a fetcher, a farm
of five jobs, and a federation of two hosts. Each process sleeps before it imports torch or
torch._dynamo (`sitecustomize`). The script prints how long each step took, and its messages about
imports. The exit code is 1 if a step fails, or if the first cell shows no message about an import.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.frontend import Frontend, Scene
from tests.rig.pools import settings_in
from tests.rig.slow_cells import CELL, FARM, FEDERATION, LOADER, POOLS, TRAIN

SLOW = """
import importlib.abc, sys, time

class Slow(importlib.abc.MetaPathFinder):
    delays = {delays}

    def find_spec(self, name, path, target=None):
        time.sleep(self.delays.pop(name, 0))

sys.meta_path.insert(0, Slow())
"""

STEPS = [
    *((f"cell {n}", CELL.format(number=n), f"cell {n}") for n in range(10)),
    ("the notebook's own import of torch", LOADER, ""),
    ("a registered loader", TRAIN, "batches 4"),
    ("a farm of five jobs", FARM, "jobs [0, 1, 4, 9, 16]"),
    ("a federation of two hosts", FEDERATION, "weights [2.0, 2.0]"),
]

_IMPORTS = re.compile(r"[^\n]*imports torch[^\n]*")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", type=float, default=60.0, help="seconds before `import torch`")
    parser.add_argument("--dynamo", type=float, default=90.0, help="before torch._dynamo")
    parser.add_argument("--wait", type=float, default=1200.0, help="longest time of a step")
    asked = parser.parse_args()
    delays = {"torch": asked.torch, "torch._dynamo": asked.dynamo}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scene, slow = Scene(folder), slow_folder(folder, delays)
        (folder / "config").mkdir()
        settings_in(folder / "config", POOLS)
        paths = os.pathsep.join([str(slow), scene.environ()["PYTHONPATH"]])
        try:
            with scene.kernel(PYTHONPATH=paths) as frontend:
                return play(frontend, asked.wait, must_name=asked.torch >= 10)
        finally:
            scene.close()


def slow_folder(folder: Path, delays: Mapping[str, float]) -> Path:
    """Create a folder for PYTHONPATH that delays imports; `delays` has the seconds by module."""
    made = folder / "slow"
    made.mkdir()
    (made / "sitecustomize.py").write_text(SLOW.format(delays=dict(delays)))
    return made


def play(frontend: Frontend, wait_s: float, must_name: bool) -> int:
    """Run the steps in order, and return the exit code.

    Args:
        wait_s: Maximum seconds of a step.
        must_name: Whether the first cell must show that it waits for an import.
    """
    is_good, named = True, set[str]()
    for what, cell, mark in STEPS:
        began = time.monotonic()
        request = frontend.send(cell)
        reply = frontend.finish(request, wait_s)
        text = frontend.text(request)
        succeeded = reply["status"] == "ok" and mark in text
        said = list(dict.fromkeys(_IMPORTS.findall(text)))
        named |= {what} if said else set()
        print(f"{what:36} {time.monotonic() - began:7.1f} s  {'ok' if succeeded else 'FAILED'}")
        for line in said:
            print(f"{'':8}{line.strip()}")
        if not succeeded:
            print(text, "\n".join(reply.get("traceback", [])))
        is_good = is_good and succeeded
    if must_name and "cell 0" not in named:
        print("the first cell did not say what it waited for")
        is_good = False
    return not is_good


if __name__ == "__main__":
    sys.exit(main())
