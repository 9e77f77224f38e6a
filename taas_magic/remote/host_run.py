"""One run on one host: observes its ranks, lets `watch` judge, and does what follows from it.

Lives in the agent, in a thread of its own. Three threads meet here: this one runs torch's elastic
agent, the pump's brings messages, the agent's event loop asks to stop. What they share is behind
one lock; `_changed` wakes the judge.
"""

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.agent.server.api import WorkerState

from taas_magic.journal import Event, event
from taas_magic.remote import memory, report
from taas_magic.remote.elastic import HostRendezvous, RunAgent
from taas_magic.remote.link import stack_file
from taas_magic.remote.process import end_all, signal_name
from taas_magic.remote.pump import Pump
from taas_magic.remote.spec import HostSpec
from taas_magic.remote.sweep import leftovers
from taas_magic.remote.watch import Failure, RankState, Verdict, decide, guilty

POLL_S = 0.25
"""How often the system is asked about the ranks when nothing else wakes the judge."""

_STATES = {"SUCCEEDED": WorkerState.SUCCEEDED}


class HostRun:
    """One run on this host.

    Args:
        spec: What is to run here.
        host: This host's name, as the notebook shows it.
        emit: Sends an event to the pool's process; any thread may call it.
        alone: Says whether no other run is on this host.
    """

    def __init__(
        self,
        spec: HostSpec,
        host: str,
        emit: Callable[[Event], None],
        alone: Callable[[], bool],
    ) -> None:
        self._spec, self._host, self._emit, self._alone = spec, host, emit, alone
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._ranks: dict[int, RankState] = {}
        self._memory: dict[int, dict[str, int]] = {}
        self._polled_at = 0.0
        self._interrupted_at: float | None = None
        self._kill = False
        timeout_s = spec.plan.timeout_s
        self._deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        self._verdict: Verdict | None = None
        self._failures: list[Failure] = []
        self._processes: dict[int, psutil.Process] = {}
        self._elastic: RunAgent | None = None
        self._attempt = 0

    def run(self) -> None:
        """Runs to the end, and emits `host_ended` when nothing of the run is left here."""
        self._pipes = Path(tempfile.mkdtemp(prefix="taas-"))
        self._pump = Pump(
            self._pipes,
            self._spec.folder,
            self._host,
            self._emit,
            self._on_message,
            self._changed.set,
        )
        try:
            self._run_elastic()
        except Exception as error:
            self._verdict = Verdict("FAILED", "host")
            self._failures = [report.host_failure(self._host, error)]
        finally:
            self._elastic = None  # its semaphores go with it
            self._pump.close()
            self._sweep()
            shutil.rmtree(self._pipes, ignore_errors=True)
        state = self._verdict.state if self._verdict else "FAILED"
        ended = {"host_rank": self._spec.host_rank, "state": state, "failures": self._failures}
        self._emit(event("host_ended", self._host, **ended))

    def stop(self, how: str) -> None:
        """Ends the run early.

        Args:
            how: `interrupt` sends SIGINT to the ranks and gives them a grace; `kill` ends them now.
        """
        with self._lock:
            if self._interrupted_at is None:
                self._interrupted_at = time.monotonic()
                self._signal_ranks(signal.SIGINT)
            self._kill = self._kill or how == "kill"
        self._changed.set()

    def _run_elastic(self) -> None:
        spec = self._spec
        rendezvous = HostRendezvous(
            spec.plan.run_id, spec.host_rank, len(spec.plan.hosts), spec.master_addr
        )
        self._elastic = RunAgent(
            spec,
            spec.for_ranks(self._pipes),
            rendezvous,
            before_start=self._before_start,
            after_start=self._after_start,
            judge=self._judge,
        )
        self._elastic.run()

    def _before_start(self, attempt: int) -> None:
        self._attempt = attempt
        if attempt:
            first = self._failures[0] if self._failures else None
            cause = report.headline(first) if first else ""
            self._emit(event("restart", self._host, attempt=attempt, cause=cause))
        first_rank, count = self._spec.share.first_rank, self._spec.share.ranks
        self._pump.open(attempt, [(first_rank + local, local) for local in range(count)])

    def _after_start(self, attempt: int, pids: dict[int, int]) -> None:
        with self._lock:
            self._failures, self._verdict = [], None
            self._ranks = {rank: RankState(rank, pid) for rank, pid in pids.items()}
            self._processes = {rank: psutil.Process(pid) for rank, pid in pids.items()}
            self._memory = {rank: memory.oom_kills(pid) for rank, pid in pids.items()}
            if self._interrupted_at is not None:
                self._signal_ranks(signal.SIGINT)
        named = {str(rank): pid for rank, pid in pids.items()}
        self._emit(event("started", self._host, attempt=attempt, pids=named))

    def _on_message(self, rank: int, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        with self._lock:
            forward = self._note(self._ranks.get(rank), kind, message)
        if forward:
            self._emit(event(kind, self._host, rank=rank, **message))
        else:
            self._changed.set()

    def _note(self, state: RankState | None, kind: str, message: dict[str, Any]) -> bool:
        """Takes down what concerns the judgement; says whether the message is for the notebook."""
        if kind not in ("beat", "raising", "failure", "left", "done"):
            return True
        if state is None:
            return False
        now = time.monotonic()
        if kind in ("raising", "failure"):
            state.failed_at = state.failed_at or now
            state.etype, state.message = message["etype"], message["message"]
            state.traceback = message.get("traceback", state.traceback)
        elif kind == "left":
            state.left_at, state.stack = now, message["stack"]
        elif kind == "done":
            state.done = True
        else:
            state.stack = message["stack"]
        return False

    def _judge(self) -> WorkerState:
        """Waits until something changed; returns how the ranks stand."""
        self._changed.wait(POLL_S)
        self._changed.clear()
        with self._lock:
            now = time.monotonic()
            self._poll_processes(now)
            verdict = decide(self._ranks.values(), now, self._deadline, self._interrupted_at)
            if self._kill and verdict is None:
                verdict = Verdict("INTERRUPTED", "interrupt")
        if verdict is None:
            return WorkerState.HEALTHY
        self._conclude(verdict)
        return _STATES.get(verdict.state, WorkerState.FAILED)

    def _poll_processes(self, now: float) -> None:
        for rank, state in self._ranks.items():
            if state.ended:
                continue
            process = self._processes[rank]
            status = _status(process)
            if status in ("", psutil.STATUS_ZOMBIE):
                self._take_exit(state, now)
            elif status == psutil.STATUS_STOPPED:
                state.stopped_at = state.stopped_at or now
            else:
                state.stopped_at = None
                self._memory[rank] = {**memory.oom_kills(state.pid), **self._memory[rank]}

    def _take_exit(self, state: RankState, now: float) -> None:
        local_rank = state.rank - self._spec.share.first_rank
        state.exitcode = self._elastic.exitcode(local_rank) if self._elastic else None
        if state.ended and not state.done:
            state.failed_at = state.failed_at or now
            left = report.read_stack(stack_file(self._pipes, self._attempt, local_rank))
            state.stack = left or state.stack
            if state.exitcode == -signal.SIGKILL:
                state.hint = report.memory_hint(memory.has_risen(self._memory[state.rank]))

    def _conclude(self, verdict: Verdict) -> None:
        """Ends the ranks, and says what went wrong before that takes its time."""
        with self._lock:
            self._verdict = verdict
            culprits = guilty(self._ranks.values(), verdict.cause)
        if verdict.cause in ("timeout", "interrupt") and self._elastic is not None:
            self._elastic.forbid_restarts()
        if verdict.state == "FAILED":
            self._failures = self._report(culprits, verdict)
            for failure in self._failures:
                self._emit(event("failure", **failure))
        survivors = [process for process in self._processes.values() if _status(process)]
        below = [child for process in survivors for child in _children(process)]
        soft = verdict.state == "FAILED"
        end_all(survivors, grace_s=1.0 if soft else 0.0)
        end_all(below, grace_s=0.0)

    def _report(self, culprits: Sequence[RankState], verdict: Verdict) -> list[Failure]:
        return [
            report.failure(
                state,
                verdict,
                host=self._host,
                log_path=str(self._spec.folder.log(state.rank)),
                tail=self._pump.tail(state.rank),
                signal_name=signal_name(state.exitcode or 0),
            )
            for state in culprits
        ]

    def _sweep(self) -> None:
        end_all(leftovers(self._spec.plan.run_id, self._pipes, self._alone()), grace_s=0)

    def _signal_ranks(self, number: int) -> None:
        for process in self._processes.values():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return ""


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
