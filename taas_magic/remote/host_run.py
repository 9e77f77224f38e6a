"""One run on one host: starts its ranks, has them judged, and does what the keeper says.

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

from torch.distributed.elastic.agent.server.api import WorkerState

from taas_magic.data.entries import Entry
from taas_magic.journal import Event, event
from taas_magic.receipt import STORE_KINDS
from taas_magic.remote import feeding, guard, report
from taas_magic.remote.attempt import Attempt
from taas_magic.remote.elastic import HostRendezvous, RunAgent, serve_store
from taas_magic.remote.host_files import HostFiles
from taas_magic.remote.process import end_all
from taas_magic.remote.pump import Pump
from taas_magic.remote.ranks import OWN_KINDS
from taas_magic.remote.spec import HostSpec, Place
from taas_magic.remote.sweep import leftovers
from taas_magic.remote.watch import Failure
from taas_magic.travel.ask import Ask

POLL_S = 0.25
"""How often the system is asked about the ranks when nothing else wakes the judge."""

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
        self._attempt: Attempt | None = None
        self._interrupted_at: float | None = None
        self._killed = False
        self._order: _Order | None = None
        self._gone_wrong: tuple[str, Failure] | None = None
        self._elastic: RunAgent | None = None
        self._files = HostFiles(spec, place, ask, emit)
        self._places = feeding.Places(spec.fetchers)

    def run(self) -> None:
        """Runs to the end, and emits `host_ended` when nothing of the run is left here."""
        self._pipes = Path(tempfile.mkdtemp(prefix="taas-"))
        self._pump: Pump | None = None
        try:
            if self._prepare():
                self._run_elastic()
        except Exception as error:
            self._gone_wrong = "FAILED", report.host_failure(self._host, error)
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
        state, failures = self._how_it_ended()
        ended = {"host_rank": self._spec.host_rank, "state": state, "failures": failures}
        self._emit(event("host_ended", self._host, **ended))

    def stop(self, how: str) -> None:
        """Ends the run early; called by another thread.

        Args:
            how: `interrupt` sends SIGINT to the ranks and gives them a grace; `kill` ends them now.
        """
        if self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
            if self._attempt is not None:
                self._attempt.interrupt()
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
        self._places.put(number, entry)

    def _command(self, order: _Order) -> None:
        self._order = order
        self._changed.set()

    def _prepare(self) -> bool:
        """Has all on this host that the ranks need; False if the run was ended meanwhile."""
        if not self._files.bring_in(self._is_wanted):
            return False
        self._spec = self._files.local(self._spec)
        self._places.open(self._spec.folder.path)
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
            self._gone_wrong = "LOST", failure

    def _how_it_ended(self) -> tuple[str, list[Failure]]:
        if self._gone_wrong is not None:
            state, failure = self._gone_wrong
            return state, [failure]
        last = self._attempt
        if last is None or last.verdict is None:
            return "INTERRUPTED", []
        return last.verdict.state, last.failures

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

    def _before_start(self, attempt: int) -> None:
        assert self._pump is not None
        self._attempt = Attempt(self._spec, self._host, self._pump, self._pipes, self._emit)
        if self._interrupted_at is not None:
            self._attempt.interrupt()
        self._attempt.open()

    def _after_start(self, attempt: int, pids: dict[int, int]) -> None:
        assert self._attempt is not None
        self._attempt.started(pids)

    def _on_message(self, rank: int, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind in STORE_KINDS:
            self._files.take(rank, message)
        elif kind in OWN_KINDS and self._attempt is not None:
            self._attempt.note(rank, kind, message)
            self._changed.set()
        else:
            self._emit(event(kind, self._host, rank=rank, **message))

    def _judge(self) -> WorkerState:
        """Waits until something changed; returns how the ranks stand, after acting on it."""
        self._changed.wait(POLL_S)
        self._changed.clear()
        assert self._attempt is not None and self._elastic is not None
        order, self._order = self._order, None
        if order is not None:
            return self._obey(order, self._attempt, self._elastic)
        if self._attempt.verdict is None:
            self._attempt.look(
                self._elastic.exitcode, self._deadline, self._interrupted_at, self._killed
            )
        return WorkerState.HEALTHY

    def _obey(self, order: _Order, attempt: Attempt, elastic: RunAgent) -> WorkerState:
        attempt.end_ranks(0.0)
        if order.spec is not None:
            self._make_ready(order, order.spec)
            elastic.start_again(self._spec, self._rank_spec(self._spec), order.store)
            return WorkerState.HEALTHY
        succeeded = attempt.verdict is not None and attempt.verdict.state == "SUCCEEDED"
        return WorkerState.SUCCEEDED if succeeded else WorkerState.FAILED

    def _make_ready(self, order: _Order, spec: HostSpec) -> None:
        """Has the files of the next attempt here, and lets the other hosts begin theirs."""
        try:
            self._files.again(spec)
        finally:
            order.obeyed.set()
        self._spec = self._files.local(spec)

    def _sweep(self) -> None:
        end_all(leftovers(self._spec.plan.run_id, self._pipes, self._alone()), grace_s=0)
