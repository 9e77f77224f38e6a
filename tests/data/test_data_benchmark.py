"""Test that `benchmarks/data.py` ends its fetchers and ranks when it receives SIGTERM."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.eventually import eventually, left_after

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "data.py"


def running(processes: set[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that have not ended."""
    return [process for process in processes if process.is_running()]


@pytest.mark.nightly
def test_sigterm_ends_every_process_of_the_benchmark(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--seconds", "600", "--only", "ranks"]
    with (tmp_path / "log").open("wb") as log:
        measuring = subprocess.Popen(command, stdout=log, stderr=log)
    started: set[psutil.Process] = set()

    def has_started() -> bool:
        # multiprocessing's resource tracker, the forkserver, the consumer, the fetcher with two
        # child processes, and a rank.
        started.update(psutil.Process(measuring.pid).children(recursive=True))
        return len(started) >= 7

    try:
        eventually(has_started)
        measuring.send_signal(signal.SIGTERM)
        assert measuring.wait() == 128 + signal.SIGTERM
        assert not left_after(lambda: running(started))
    finally:
        measuring.kill()
        for process in running(started):
            process.kill()
