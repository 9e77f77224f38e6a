"""What the agent knows of the ranks of one run on its host, from their messages and the system.

The pump's thread brings messages, the run's thread asks the system; one lock is between them.
`watch` judges what is gathered here.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from taas_magic.remote import memory
from taas_magic.remote.watch import RankState

OWN_KINDS = frozenset({"up", "beat", "raising", "failure", "left", "done"})
"""The messages of a rank that are about its state; all others are for the notebook."""

ExitcodeOf = Callable[[int], int | None]


class Ranks:
    """The ranks of one attempt.

    Args:
        ranks: Their global ranks; known before the processes are, since a fast rank speaks first.
    """

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self._lock = threading.Lock()
        self._states = {rank: RankState(rank, pid=0) for rank in ranks}
        self._processes: dict[int, psutil.Process] = {}
        self._kills: dict[int, dict[str, int]] = {}
        self._up: set[int] = set()
        self._interrupted = False

    def started(self, pids: dict[int, int]) -> None:
        """Takes down the process of each rank; one may have ended already."""
        with self._lock:
            for rank, pid in pids.items():
                self._states[rank].pid = pid
                self._kills[rank] = memory.oom_kills(pid)
                if psutil.pid_exists(pid):
                    self._processes[rank] = psutil.Process(pid)

    def states(self) -> list[RankState]:
        """What is known of each rank."""
        with self._lock:
            return list(self._states.values())

    def note(self, rank: int, kind: str, message: dict[str, Any]) -> None:
        """Takes down a rank's message of one of OWN_KINDS."""
        now = time.monotonic()
        with self._lock:
            state = self._states[rank]
            if kind == "up":
                self._up.add(rank)
                state.pid = message["pid"]
                if self._interrupted:
                    _send(message["pid"], signal.SIGINT)
            elif kind in ("raising", "failure"):
                state.failed_at = state.failed_at or now
                state.etype, state.message = message["etype"], message["message"]
                state.traceback = message.get("traceback", state.traceback)
            elif kind == "left":
                state.left_at, state.stack = now, message["stack"]
            elif kind == "done":
                state.done = True
            else:
                state.stack = message["stack"]

    def poll(self, now: float, exitcode_of: ExitcodeOf, stack_of: Callable[[int], Path]) -> None:
        """Asks the system which ranks are gone, stopped, or moved to another memory limit.

        Args:
            now: The agent's monotonic clock.
            exitcode_of: The exit code of a rank whose process is gone.
            stack_of: The file in which a rank that a signal killed left its Python stack.
        """
        with self._lock:
            for rank, state in self._states.items():
                if not state.ended:
                    self._poll_one(rank, state, now, exitcode_of, stack_of)

    def _poll_one(
        self,
        rank: int,
        state: RankState,
        now: float,
        exitcode_of: ExitcodeOf,
        stack_of: Callable[[int], Path],
    ) -> None:
        status = status_of(self._processes.get(rank))
        if status in ("", psutil.STATUS_ZOMBIE):
            state.exitcode = exitcode_of(rank)
            if state.ended and not state.done:
                self._take_death(state, now, stack_of(rank))
        elif status == psutil.STATUS_STOPPED:
            state.stopped_at = state.stopped_at or now
        else:
            state.stopped_at = None
            self._kills[rank] = {**memory.oom_kills(state.pid), **self._kills[rank]}

    def _take_death(self, state: RankState, now: float, stack: Path) -> None:
        state.failed_at = state.failed_at or now
        if stack.exists():
            state.stack = stack.read_text(errors="replace").splitlines() or state.stack
        if state.exitcode == -signal.SIGKILL:
            state.hint = memory.explain(memory.has_risen(self._kills[state.rank]))

    def interrupt(self) -> None:
        """Sends SIGINT to every rank, as soon as it has said that it would hear it."""
        with self._lock:
            self._interrupted = True
            for rank in self._up:
                _send(self._states[rank].pid, signal.SIGINT)

    def alive(self) -> list[psutil.Process]:
        """The ranks' processes that are still there."""
        with self._lock:
            return [process for process in self._processes.values() if status_of(process)]


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has just ended, which is what is wanted


def status_of(process: psutil.Process | None) -> str:
    """psutil's word for a process's state; empty for one that is gone."""
    if process is None:
        return ""
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return ""
