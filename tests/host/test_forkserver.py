"""While the forkserver imports large modules, one of its forks keeps starting processes."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

GATE = """
import importlib.abc, os, sys, time

class Gate(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch._dynamo":
            while not os.path.exists({gate!r}):
                time.sleep({pause_s})

sys.meta_path.insert(0, Gate())
"""


def play(tmp_path: Path, function: str, pause_s: float) -> tuple[str, str]:
    """Run a function of `forkserver_plays` in a process without a main module, as in an agent.

    The import of torch._dynamo in the forkserver waits until the gate file exists.

    Args:
        function: Name of the function.
        pause_s: Seconds between two checks for the gate file.

    Returns:
        What the process printed to standard output and to standard error.
    """
    gate_file = str(tmp_path / "gate")
    gate = GATE.format(gate=gate_file, pause_s=pause_s)
    (tmp_path / "sitecustomize.py").write_text(gate)
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    # The folder must have a short path: it holds sockets, whose paths have at most 107 bytes.
    with tempfile.TemporaryDirectory() as host:
        call = f"forkserver_plays.{function}({gate_file!r}, {host!r})"
        code = f"from tests.children import forkserver_plays; {call}"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_processes_start_while_the_forkserver_imports_the_rest(tmp_path: Path) -> None:
    play(tmp_path, "start_while_importing", pause_s=0.01)


def test_a_disk_that_is_full_during_the_import_does_not_end_the_forkserver(tmp_path: Path) -> None:
    play(tmp_path, "import_with_a_full_disk", pause_s=0.01)


def test_a_forkserver_whose_import_hangs_is_given_up_and_the_module_named(tmp_path: Path) -> None:
    play(tmp_path, "give_up_an_import", pause_s=600)


@pytest.mark.parametrize("kind", ["ImportError", "RuntimeError"])
def test_a_torch_that_cannot_be_imported_is_reported(tmp_path: Path, kind: str) -> None:
    """`warm_up` raises the error, although multiprocessing ignores an ImportError of a preload."""
    (tmp_path / "torch.py").write_text(f"raise {kind}('this torch is broken')\n")
    printed, traceback = play(tmp_path, "report_a_broken_torch", pause_s=0)
    assert printed == f"the forkserver could not import torch: {kind}: this torch is broken\n"
    assert f'{tmp_path / "torch.py"}", line 1' in traceback
