"""Functions that distinguish a process that starts slowly from a process that is stuck.

An import may take minutes, so the start of a process has no fixed time limit. A process counts as
stuck if it has been idle for `start_timeout_s` seconds (a setting of the pool). An idle process
uses no CPU time, and reads and writes nothing.
"""

import subprocess
import time
from collections.abc import Iterable
from multiprocessing import connection
from typing import NamedTuple

import psutil

from taas_magic.host.system import status_of
from taas_magic.leases import STOPPED_S

_CHECK_S = 0.5


class ResourceUsage(NamedTuple):
    """One sample of the resources that a set of processes has used.

    Attributes:
        at_s: Time of the sample, on the monotonic clock.
        cpu_s: Total CPU seconds.
        io_total: Number of reads and writes, plus the number of bytes read from disk. Any read or
            write changes this sum.
        pids: Ids of the processes.
    """

    at_s: float
    cpu_s: float
    io_total: int
    pids: frozenset[int]


def last_active(before: ResourceUsage | None, now: ResourceUsage) -> ResourceUsage:
    """Return the sample `now` if the processes have worked since the sample `before`.

    Otherwise, return `before`. The processes have worked if they used CPU time, read or wrote, or
    if a process started or ended.

    Args:
        before: The previous result of this function; None at the first call, which returns `now`.
    """
    return now if before is None or before[1:] != now[1:] else before


def usage_of(processes: Iterable[psutil.Process]) -> ResourceUsage:
    """Return a sample of the resources that `processes` have used since their start.

    Ended processes are ignored. The CPU time of another user's process counts. The system does not
    show its reads and writes, so these do not count, and its pid is not in the sample.
    """
    cpu_s, io_total, pids = 0.0, 0, set()
    for process in processes:
        try:
            times = process.cpu_times()
            cpu_s += times.user + times.system
            counted = process.io_counters()
            io_total += counted.read_count + counted.write_count + counted.read_bytes
            pids.add(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return ResourceUsage(time.monotonic(), cpu_s, io_total, frozenset(pids))


def tree_of(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants. If the process has ended, return an empty list."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class IdleTimer:
    """Timer that measures for how long a process has been idle.

    An idle process uses no CPU time, and reads and writes nothing.

    Args:
        with_children: Whether work of the process's descendants counts as work of the process.
    """

    def __init__(self, pid: int, with_children: bool = True) -> None:
        self._pid, self._with_children = pid, with_children
        self._active: ResourceUsage | None = None

    def idle_s(self) -> float:
        """Sample the resource usage, and return for how many seconds the process has been idle.

        The seconds count from the latest call that found new work of the process. The first call
        returns 0.
        """
        tree = tree_of(self._pid)
        now = usage_of(tree if self._with_children else tree[:1])
        self._active = last_active(self._active, now)
        return now.at_s - self._active.at_s


def wait_for_start(process: "subprocess.Popen[bytes]", ready: int, start_timeout_s: float) -> bool:
    """Wait until a starting process is ready, has ended or counts as stuck.

    This function does not kill a stuck process.

    Args:
        ready: Descriptor that becomes readable when the process is ready or has ended.
        start_timeout_s: Seconds for which the process may be idle before it counts as stuck.

    Returns:
        True if the process is ready or has ended. False if the process was idle for
        `start_timeout_s`, or if SIGSTOP suspended it for `STOPPED_S` seconds.
    """
    timer, running_at = IdleTimer(process.pid), time.monotonic()
    while not connection.wait([ready], _CHECK_S):
        if status_of(psutil.Process(process.pid)) != psutil.STATUS_STOPPED:
            running_at = time.monotonic()
        if timer.idle_s() >= start_timeout_s or time.monotonic() - running_at >= STOPPED_S:
            return False
    return True
