"""Tells a process that is slow to start from one that is stuck.

An import may take minutes: from a cold network disk, on a busy machine. So nothing that starts has
a fixed time for it. A process counts as stuck when it has used no processor time, and read and
written nothing, for as long as the pool's `start_timeout_s` says.
"""

import subprocess
import time
from collections.abc import Iterable
from multiprocessing import connection
from typing import NamedTuple

import psutil

from taas_magic.host.system import status_of
from taas_magic.leases import STOPPED_S

_LOOK_S = 0.5


class Usage(NamedTuple):
    """What processes had used at one time.

    Attributes:
        at_s: When, by the monotonic clock.
        cpu_s: Processor seconds, in all.
        calls: Number of reads and writes, and of blocks that the system read for them.
        pids: The processes.
    """

    at_s: float
    cpu_s: float
    calls: int
    pids: frozenset[int]


def last_active(before: Usage | None, now: Usage) -> Usage:
    """Return the newest of two samples that differs from the one before it.

    `now.at_s - last_active(...).at_s` is for how long the processes have done nothing. A process
    that has come or gone counts as work.
    """
    return now if before is None or before[1:] != now[1:] else before


def usage_of(processes: Iterable[psutil.Process]) -> Usage:
    """Return what processes have used up to now; those that have ended count for nothing."""
    cpu_s, calls, pids = 0.0, 0, set()
    for process in processes:
        try:
            times = process.cpu_times()
            cpu_s += times.user + times.system
            counted = process.io_counters()
            calls += counted.read_count + counted.write_count + counted.read_bytes
            pids.add(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return Usage(time.monotonic(), cpu_s, calls, frozenset(pids))


def tree_of(pid: int) -> list[psutil.Process]:
    """Return a process and all below it; none if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class IdleTimer:
    """Measures for how long a process, and all below it, have done nothing.

    Args:
        with_children: Whether what the processes below it do counts as well.
    """

    def __init__(self, pid: int, with_children: bool = True) -> None:
        self._pid, self._with_children = pid, with_children
        self._active: Usage | None = None

    def idle_s(self) -> float:
        """Take a sample; return the seconds since the last one that showed any work."""
        tree = tree_of(self._pid)
        now = usage_of(tree if self._with_children else tree[:1])
        self._active = last_active(self._active, now)
        return now.at_s - self._active.at_s


def wait_for_start(process: "subprocess.Popen[bytes]", ready: int, start_timeout_s: float) -> bool:
    """Wait until a process says that it has started, or has ended.

    Args:
        ready: A descriptor that is readable, or at its end, from then on.
        start_timeout_s: Seconds without any work after which the process counts as stuck.

    Returns:
        Whether it has; False if it is stuck, or stopped (SIGSTOP) for `STOPPED_S`.
    """
    timer, running_at = IdleTimer(process.pid), time.monotonic()
    while not connection.wait([ready], _LOOK_S):
        if status_of(psutil.Process(process.pid)) != psutil.STATUS_STOPPED:
            running_at = time.monotonic()
        if timer.idle_s() >= start_timeout_s or time.monotonic() - running_at >= STOPPED_S:
            return False
    return True
