"""A watchdog that kills processes which SIGSTOP has suspended for too long. Imports no torch."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

from taas_magic.leases import STOPPED_S

STOPPED = f"was stopped (SIGSTOP) for {STOPPED_S:.0f} s and killed"
"""Text for the user: how a process ended that the watchdog has killed."""


class StoppedProcessWatchdog:
    """Watchdog that kills processes which SIGSTOP has suspended for `STOPPED_S` seconds.

    Attributes:
        killed: Ids of the processes that the watchdog has killed.
    """

    def __init__(self) -> None:
        self.killed: set[int] = set()
        self._since: dict[int, float] = {}

    def kill_stopped(self, processes: Iterable[int]) -> None:
        """Kill the processes that SIGSTOP has suspended for `STOPPED_S` seconds.

        Call this method about once a second with the same processes: the time is measured from the
        first call that finds a process suspended.

        Args:
            processes: Ids of the processes to check. Leave out a child that the caller has reaped
                (`waitpid`), because the system may reuse its id.
        """
        now, stopped = time.monotonic(), [pid for pid in processes if _is_stopped(pid)]
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        for pid, since in self._since.items():
            if now - since >= STOPPED_S:
                with suppress(ProcessLookupError):  # its parent has reaped it meanwhile
                    os.kill(pid, signal.SIGKILL)
                    self.killed.add(pid)


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:  # its parent has reaped it
        return False
