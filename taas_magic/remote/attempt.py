"""One attempt of a run on one host: its ranks are listened to, looked at, judged and ended.

Lives in the agent. `host_run` begins attempts and looks at them, in its own thread; the pump's
thread brings the ranks' messages, and any thread may interrupt.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from taas_magic.journal import Event, event
from taas_magic.remote import link, report
from taas_magic.remote.process import end_all, signal_name
from taas_magic.remote.pump import Pump
from taas_magic.remote.ranks import Ranks
from taas_magic.remote.spec import HostSpec
from taas_magic.remote.watch import Failure, Verdict, decide, guilty

FAILED_GRACE_S = 1.0
"""How long the other ranks may take to end after SIGTERM, once one has failed."""


class Attempt:
    """The ranks of one attempt on this host.

    Args:
        spec: What is to run here, with this host's paths.
        host: This host's name.
        pump: Brings what the ranks say.
        pipes: The folder in which they say it.
        emit: Sends an event to the pool's process.
    """

    def __init__(
        self, spec: HostSpec, host: str, pump: Pump, pipes: Path, emit: Callable[[Event], None]
    ) -> None:
        self._spec, self._host = spec, host
        self._pump, self._pipes, self._emit = pump, pipes, emit
        self._first = spec.share.first_rank
        self._numbers = range(self._first, self._first + spec.share.ranks)
        self._ranks = Ranks(self._numbers)
        self.verdict: Verdict | None = None
        """How the ranks stand; None while they run."""
        self.failures: list[Failure] = []
        """Why they failed, if they did."""

    def open(self) -> None:
        """Makes the pipes in which the ranks speak; called before they start."""
        self._pump.open(self._spec.attempt, [(rank, self._local(rank)) for rank in self._numbers])

    def started(self, pids: dict[int, int]) -> None:
        """Takes down the process of each rank, and says that they have started."""
        self._ranks.started(pids)
        named = {str(rank): pid for rank, pid in pids.items()}
        self._emit(event("started", self._host, attempt=self._spec.attempt, pids=named))

    def note(self, rank: int, kind: str, message: dict[str, Any]) -> None:
        """Takes down a rank's message of one of OWN_KINDS; called by the pump's thread."""
        self._ranks.note(rank, kind, message)

    def interrupt(self) -> None:
        """Sends SIGINT to the ranks; any thread may call it."""
        self._ranks.interrupt()

    def look(
        self,
        exitcode: Callable[[int], int | None],
        deadline: float | None,
        interrupted_at: float | None,
        is_killed: bool,
    ) -> None:
        """Asks the system about the ranks and judges them; acts on the verdict, if there is one.

        Args:
            exitcode: The exit code of a local rank, None while it runs.
            deadline: When the run has to have ended, by the monotonic clock.
            interrupted_at: When it was interrupted, by the same clock.
            is_killed: Whether it is to end at once.
        """
        now = time.monotonic()
        self._ranks.poll(now, lambda rank: exitcode(self._local(rank)), self._stack_file)
        verdict = decide(self._ranks.states(), now, deadline, interrupted_at)
        if verdict is None and is_killed:
            verdict = Verdict("INTERRUPTED", "interrupt")
        if verdict is not None:
            self.verdict = verdict
            self._settle(verdict)

    def end_ranks(self, grace_s: float) -> None:
        """Ends the ranks that are left, and what they started.

        Args:
            grace_s: How long they may take after SIGTERM.
        """
        alive = self._ranks.alive()
        below = [child for process in alive for child in _children(process)]
        end_all(alive, grace_s=grace_s)
        end_all(below, grace_s=0.0)

    def _settle(self, verdict: Verdict) -> None:
        """Says how the ranks stand, before anything that takes time; ends them if they failed.

        Those that succeeded stay until all hosts' have: a rank elsewhere may need them.
        """
        failures = self._report(verdict)
        if verdict.state == "FAILED":
            self.failures = failures
            for failure in failures:
                self._emit(event("failure", self._host, failure=failure))
        said = {"attempt": self._spec.attempt, "state": verdict.state, "cause": verdict.cause}
        self._emit(event("settled", self._host, failures=failures, **said))
        if verdict.state != "SUCCEEDED":
            self.end_ranks(FAILED_GRACE_S if verdict.state == "FAILED" else 0.0)

    def _report(self, verdict: Verdict) -> list[Failure]:
        """The failures of this host; of ranks that succeeded, those that left by themselves."""
        return [
            report.failure(
                state,
                verdict,
                host=self._host,
                log_path=self._spec.told_log(state.rank),
                tail=self._pump.tail(state.rank),
                signal_name=signal_name(state.exitcode or 0),
            )
            for state in guilty(self._ranks.states(), verdict.cause)
        ]

    def _stack_file(self, rank: int) -> Path:
        return link.stack_file(self._pipes, self._spec.attempt, self._local(rank))

    def _local(self, rank: int) -> int:
        return rank - self._first


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
