"""A vehicle, the Dask worker that brings an agent to a host, ends in any case."""

import subprocess
import sys

from tests.frontend import ROOT


def test_a_vehicle_exits_even_if_a_task_ignores_its_cancellation() -> None:
    """Without the exit, the event loop would wait for the task forever."""
    command = [sys.executable, "-m", "tests.children.stuck_vehicle"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (1, "a task ignores its cancellation\n"), done.stderr
