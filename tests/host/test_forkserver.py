"""While the forkserver imports large modules, one of its forks keeps starting processes."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

GATE = """
import importlib.abc, os, sys, time

class Gate(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch._dynamo":
            while not os.path.exists({gate!r}):
                time.sleep({pause_s})

sys.meta_path.insert(0, Gate())
"""

PLAY = """
import multiprocessing, os, signal, sys, tempfile, threading
from pathlib import Path
import psutil
from taas_magic.host import forkserver
from tests.eventually import eventually

def main(gate, folder):
    tempfile.tempdir = folder
    forkserver.begin([])
    assert forkserver.warm_up(start_timeout_s=5.0) == []
    assert forkserver.importing()[0] == ""
    [server] = forkserver._servers()
    forkserver.start_importing_rest()
    eventually(lambda: forkserver.importing()[0] == "torch._dynamo")
    eventually(lambda: forkserver._stand_in is not None)
    kept = forkserver.start("time.sleep", 600)
    assert psutil.Process(kept.pid).ppid() != server.pid
    eventually(lambda: forkserver.importing()[1] > 6.0)  # longer than a stuck start may take
    assert ran("pass") == 0 and ran("raise SystemExit(3)") == 3
    Path(gate).touch()
    eventually(lambda: forkserver._has_rest)
    assert ran("import sys; assert 'torch._dynamo' in sys.modules") == 0
    last = forkserver.start("time.sleep", 600)
    assert psutil.Process(last.pid).ppid() == server.pid
    assert kept.is_alive() and forkserver.is_alive()
    [_, stand_in] = forkserver._servers()
    kept.kill()
    eventually(lambda: forkserver.exitcode(kept) is not None)
    assert forkserver.exitcode(kept) == -signal.SIGKILL
    eventually(lambda: stand_in not in server.children())
    assert forkserver.is_alive() and ran("pass") == 0
    server.suspend()  # one that is stopped is given up, and one that is stuck likewise
    eventually(lambda: not forkserver.is_alive())
    assert "was stopped" in forkserver.why_ended()
    eventually(lambda: forkserver.exitcode(last) is not None)
    assert forkserver.exitcode(last) == 255

def ran(code):
    process = forkserver.start("builtins.exec", code)
    process.join()
    return forkserver.exitcode(process)
"""


def play(tmp_path: Path, program: str, pause_s: float) -> None:
    """Run `main` of a program in a process without a main module, as in an agent.

    Importing torch._dynamo waits until the gate file exists.

    Args:
        program: Source of a module with `main(gate, folder)`.
        pause_s: Seconds between two checks for the gate file.
    """
    gate_file = str(tmp_path / "gate")
    (tmp_path / "play.py").write_text(program)
    gate = GATE.format(gate=gate_file, pause_s=pause_s)
    (tmp_path / "sitecustomize.py").write_text(gate)
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    # The folder must have a short path: it holds sockets, whose paths have at most 107 bytes.
    with tempfile.TemporaryDirectory() as host:
        command = [sys.executable, "-c", f"import play; play.main({gate_file!r}, {host!r})"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_processes_start_while_the_forkserver_imports_the_rest(tmp_path: Path) -> None:
    play(tmp_path, PLAY, pause_s=0.01)


STUCK = """
import tempfile
from taas_magic.errors import PoolError
from taas_magic.host import forkserver

def main(gate, folder):
    tempfile.tempdir = folder
    forkserver.begin(["torch._dynamo"])
    try:
        forkserver.warm_up(start_timeout_s=1.0)
    except PoolError as error:
        limit = "for start_timeout_s = 1 while it imported torch._dynamo, and was ended"
        assert f"used no processor time and read nothing {limit}" in str(error)
    else:
        raise AssertionError("it waits for ever")
"""


def test_an_import_that_does_nothing_is_given_up_by_name(tmp_path: Path) -> None:
    play(tmp_path, STUCK, pause_s=600)
