"""One run on one host: starts its ranks, lets `watch` judge them, and does what the keeper says.

Lives in the agent, in a thread of its own. Three threads meet here: this one runs torch's elastic
agent, the pump's brings the ranks' messages, the agent's event loop asks to stop. `_changed` wakes
the judge.
"""

import gc
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.agent.server.api import WorkerState

from taas_magic.data.route import Entry
from taas_magic.journal import Event, event
from taas_magic.receipt import STORE_KINDS
from taas_magic.remote import feeding, guard, link, report
from taas_magic.remote.elastic import HostRendezvous, RunAgent, serve_store
from taas_magic.remote.host_files import HostFiles
from taas_magic.remote.process import end_all, signal_name
from taas_magic.remote.pump import Pump
from taas_magic.remote.ranks import OWN_KINDS, Ranks
from taas_magic.remote.spec import HostSpec, Place
from taas_magic.remote.sweep import leftovers
from taas_magic.remote.watch import Failure, Verdict, decide, guilty
from taas_magic.travel.ask import Ask

POLL_S = 0.25
"""How often the system is asked about the ranks when nothing else wakes the judge."""

FAILED_GRACE_S = 1.0
"""How long the other ranks may take to end after SIGTERM, once one has failed."""

OBEY_S = 120.0
"""How long the other hosts wait at most until this one has made ready for the next attempt."""


@dataclass(frozen=True)
class _Order:
    """What the keeper said follows: another attempt, or, without a spec, the end."""

    spec: HostSpec | None = None
    store: Any = None
    obeyed: threading.Event = field(default_factory=threading.Event)
    """The last attempt's ranks are gone, and what they wrote is where other hosts find it."""


class HostRun:
    """One run on this host.

    Args:
        spec: What is to run here.
        place: This host.
        emit: Sends an event to the pool's process; any thread may call it.
        alone: Says whether no other run is on this host.
        ask: Asks the pool's process for files that this host does not share.
    """

    def __init__(
        self,
        spec: HostSpec,
        place: Place,
        emit: Callable[[Event], None],
        alone: Callable[[], bool],
        ask: Ask,
    ) -> None:
        self._spec, self._emit, self._alone = spec, emit, alone
        self._host, self._interface = place.host, place.interface
        self._store = serve_store(spec)
        self.port: int = self._store.port if self._store else 0
        timeout_s = spec.plan.timeout_s
        self._deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        self._changed = threading.Event()
        self._ranks = Ranks()
        self._interrupted_at: float | None = None
        self._killed = False
        self._order: _Order | None = None
        self._verdict: Verdict | None = None
        self._failures: list[Failure] = []
        self._elastic: RunAgent | None = None
        self._files = HostFiles(spec, place, ask, emit)
        self._placing = threading.Lock()
        self._is_prepared = False
        self._fetchers = {int(number): entry for number, entry in spec.fetchers.items()}

    def run(self) -> None:
        """Runs to the end, and emits `host_ended` when nothing of the run is left here."""
        self._pipes = Path(tempfile.mkdtemp(prefix="taas-"))
        self._pump: Pump | None = None
        try:
            if self._prepare():
                self._run_elastic()
        except Exception as error:
            self._verdict = Verdict("FAILED", "host")
            self._failures = [report.host_failure(self._host, error)]
        finally:
            if self._order is not None:
                self._order.obeyed.set()
            self._elastic = self._store = self._order = None
            gc.collect()  # it lies in cycles, and the semaphores of its queues with it
            if self._pump is not None:
                self._pump.close()
            self._sweep()
            shutil.rmtree(self._pipes, ignore_errors=True)
            self._bring_home()
        state = self._verdict.state if self._verdict else "INTERRUPTED"
        ended = {"host_rank": self._spec.host_rank, "state": state, "failures": self._failures}
        self._emit(event("host_ended", self._host, **ended))

    def stop(self, how: str) -> None:
        """Ends the run early; called by another thread.

        Args:
            how: `interrupt` sends SIGINT to the ranks and gives them a grace; `kill` ends them now.
        """
        if self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
            self._ranks.interrupt()
        self._killed = self._killed or how == "kill"
        self._changed.set()

    def again(self, spec: HostSpec) -> int:
        """Starts all ranks again; called by another thread.

        Returns:
            The port of the attempt's store, on the first host.
        """
        store = serve_store(spec)
        order = _Order(spec, store)
        self._command(order)
        order.obeyed.wait(OBEY_S)
        return store.port if store else 0

    def end(self) -> None:
        """All hosts have settled, and this was the last attempt; called by another thread."""
        self._command(_Order())

    def place(self, number: int, entry: Entry) -> None:
        """Tells the ranks where a fetcher of another host listens; called by another thread."""
        with self._placing:
            self._fetchers[number] = entry
            if self._is_prepared:
                feeding.place(self._spec.folder.path, number, entry)

    def _command(self, order: _Order) -> None:
        self._order = order
        self._changed.set()

    def _prepare(self) -> bool:
        """Has all on this host that the ranks need; False if the run was ended meanwhile."""
        if not self._files.bring_in(self._is_wanted):
            return False
        self._spec = self._files.local(self._spec)
        with self._placing:
            self._is_prepared = True
            for number, entry in self._fetchers.items():
                feeding.place(self._spec.folder.path, number, entry)
        self._pump = Pump(
            self._pipes,
            self._spec.folder,
            self._host,
            self._emit,
            self._on_message,
            self._changed.set,
        )
        return True

    def _is_wanted(self) -> bool:
        order = self._order
        return self._interrupted_at is None and (order is None or order.spec is not None)

    def _bring_home(self) -> None:
        """Sends back what the run left here. Whatever becomes of it, the run's end is said."""
        try:
            self._files.bring_home()
        except Exception as error:
            failure = report.host_failure(self._host, error)
            self._emit(event("failure", self._host, failure=failure))
            self._verdict, self._failures = Verdict("LOST", "host"), [failure]

    def _run_elastic(self) -> None:
        order, self._order = self._order, None
        if order is not None and order.spec is not None:
            self._make_ready(order, order.spec)
            self._store = order.store
        self._elastic = RunAgent(
            self._spec,
            self._rank_spec(self._spec),
            HostRendezvous(self._spec, self._store),
            before_start=self._before_start,
            after_start=self._after_start,
            judge=self._judge,
        )
        self._elastic.run()

    def _rank_spec(self, spec: HostSpec) -> dict[str, Any]:
        return spec.for_ranks(self._pipes, guard.strongest().value, self._interface)

    def _local(self, rank: int) -> int:
        return rank - self._spec.share.first_rank

    def _before_start(self, attempt: int) -> None:
        share = self._spec.share
        ranks = range(share.first_rank, share.first_rank + share.ranks)
        self._ranks = Ranks(ranks)
        if self._interrupted_at is not None:
            self._ranks.interrupt()
        self._failures, self._verdict = [], None
        assert self._pump is not None
        self._pump.open(attempt, [(rank, self._local(rank)) for rank in ranks])

    def _after_start(self, attempt: int, pids: dict[int, int]) -> None:
        self._ranks.started(pids)
        named = {str(rank): pid for rank, pid in pids.items()}
        self._emit(event("started", self._host, attempt=attempt, pids=named))

    def _on_message(self, rank: int, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind in STORE_KINDS:
            self._files.take(rank, message)
        elif kind in OWN_KINDS:
            self._ranks.note(rank, kind, message)
            self._changed.set()
        else:
            self._emit(event(kind, self._host, rank=rank, **message))

    def _judge(self) -> WorkerState:
        """Waits until something changed; returns how the ranks stand, after acting on it."""
        self._changed.wait(POLL_S)
        self._changed.clear()
        order, self._order = self._order, None
        if order is not None:
            return self._obey(order)
        if self._verdict is None:
            self._look()
        return WorkerState.HEALTHY

    def _look(self) -> None:
        now = time.monotonic()
        self._ranks.poll(now, self._exitcode, self._stack_file)
        verdict = decide(self._ranks.states(), now, self._deadline, self._interrupted_at)
        if verdict is None and self._killed:
            verdict = Verdict("INTERRUPTED", "interrupt")
        if verdict is not None:
            self._verdict = verdict
            self._settle(verdict)

    def _exitcode(self, rank: int) -> int | None:
        return self._elastic.exitcode(self._local(rank)) if self._elastic else None

    def _stack_file(self, rank: int) -> Path:
        return link.stack_file(self._pipes, self._spec.attempt, self._local(rank))

    def _settle(self, verdict: Verdict) -> None:
        """Says how the ranks stand, before anything that takes time; ends them if they failed.

        Those that succeeded stay until all hosts' have: a rank elsewhere may need them.
        """
        failures = self._report(verdict)
        if verdict.state == "FAILED":
            self._failures = failures
            for failure in failures:
                self._emit(event("failure", self._host, failure=failure))
        said = {"attempt": self._spec.attempt, "state": verdict.state, "cause": verdict.cause}
        self._emit(event("settled", self._host, failures=failures, **said))
        if verdict.state != "SUCCEEDED":
            self._end_ranks(FAILED_GRACE_S if verdict.state == "FAILED" else 0.0)

    def _obey(self, order: _Order) -> WorkerState:
        self._end_ranks(0.0)
        if order.spec is not None and self._elastic is not None:
            self._make_ready(order, order.spec)
            self._elastic.start_again(self._spec, self._rank_spec(self._spec), order.store)
            return WorkerState.HEALTHY
        succeeded = self._verdict is not None and self._verdict.state == "SUCCEEDED"
        return WorkerState.SUCCEEDED if succeeded else WorkerState.FAILED

    def _make_ready(self, order: _Order, spec: HostSpec) -> None:
        """Has the files of the next attempt here, and lets the other hosts begin theirs."""
        try:
            self._files.again(spec)
        finally:
            order.obeyed.set()
        self._spec = self._files.local(spec)

    def _end_ranks(self, grace_s: float) -> None:
        alive = self._ranks.alive()
        below = [child for process in alive for child in _children(process)]
        end_all(alive, grace_s=grace_s)
        end_all(below, grace_s=0.0)

    def _report(self, verdict: Verdict) -> list[Failure]:
        """The failures of this host; of ranks that succeeded, those that left by themselves."""
        return [
            report.failure(
                state,
                verdict,
                host=self._host,
                log_path=self._spec.told_log(state.rank),
                tail=self._pump.tail(state.rank) if self._pump else [],
                signal_name=signal_name(state.exitcode or 0),
            )
            for state in guilty(self._ranks.states(), verdict.cause)
        ]

    def _sweep(self) -> None:
        end_all(leftovers(self._spec.plan.run_id, self._pipes, self._alone()), grace_s=0)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
