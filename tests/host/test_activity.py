"""Tests of `host.activity`, which tells whether a starting process works or is stuck."""

import subprocess
import sys

import psutil
import pytest

from taas_magic.host import activity
from taas_magic.host.activity import IdleTimer, ResourceUsage, last_active, wait_for_start


def idle_s(*samples: ResourceUsage) -> float:
    """Return the seconds from the last activity that the samples show until the last sample."""
    active = None
    for sample in samples:
        active = last_active(active, sample)
    assert active is not None
    return samples[-1].at_s - active.at_s


AT_FIRST = ResourceUsage(0.0, 1.0, 10, frozenset({7}))


@pytest.mark.parametrize(
    ("change", "expected_s"),
    [
        ({}, 60.0),
        ({"cpu_s": 1.01}, 30.0),
        ({"io_total": 11}, 30.0),
        ({"pids": frozenset({7, 8})}, 30.0),
    ],
)
def test_any_work_resets_the_idle_time(change: dict[str, object], expected_s: float) -> None:
    later = AT_FIRST._replace(at_s=30.0, **change)  # type: ignore[arg-type]
    assert idle_s(AT_FIRST, later, later._replace(at_s=60.0)) == expected_s


@pytest.fixture
def sleeper() -> "subprocess.Popen[bytes]":
    """Start a process that prints a line, and then sleeps until its standard input closes."""
    code = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_process_that_sleeps_is_idle_and_one_that_computes_is_not(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    with sleeper:
        assert sleeper.stdout is not None and sleeper.stdout.readline()
        timer = IdleTimer(sleeper.pid)
        while timer.idle_s() < 0.1:
            pass
        own = IdleTimer(psutil.Process().pid, with_children=False)
        own.idle_s()
        assert own.idle_s() == 0, "it reads /proc"


def test_waiting_for_a_start_ends_at_its_mark_or_if_the_process_is_idle_or_stopped(
    sleeper: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    with sleeper:
        assert sleeper.stdin is not None and sleeper.stdout is not None
        mark = sleeper.stdout.fileno()
        assert wait_for_start(sleeper, mark, start_timeout_s=1000)
        sleeper.stdout.readline()
        assert not wait_for_start(sleeper, mark, start_timeout_s=0.1)
        monkeypatch.setattr(activity, "STOPPED_S", 0.1)
        psutil.Process(sleeper.pid).suspend()
        assert not wait_for_start(sleeper, mark, start_timeout_s=1000)
        psutil.Process(sleeper.pid).resume()
