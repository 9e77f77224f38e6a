"""A vehicle, the Dask worker that brings an agent to a host, ends in any case."""

import subprocess
import sys

import pytest

from tests.frontend import ROOT


def run(name: str, timeout_s: float = 100.0) -> tuple[int, str]:
    """Run a vehicle in a process whose `sys.argv` is that of a command.

    Args:
        name: The command, for example "dask-worker".
        timeout_s: Seconds after which `subprocess.TimeoutExpired` is raised.

    Returns:
        The exit code and the output of the process.
    """
    command = [sys.executable, "-m", "tests.children.stuck_vehicle", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert not done.stderr
    return done.returncode, done.stdout


def test_a_vehicle_exits_even_if_a_task_ignores_its_cancellation() -> None:
    """Without the exit, the event loop would wait for the task forever."""
    assert run("/usr/bin/dask-worker") == (1, "a task ignores its cancellation\n")


def test_a_vehicle_in_a_program_that_is_no_dask_worker_does_not_end_the_program() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run("jupyter-lab", timeout_s=3.0)
