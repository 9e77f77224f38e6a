"""One run on one host: starts its attempts, has its ranks judged, does what the controller says.

Lives in the agent, in a thread of its own. Three threads meet here: this one starts, judges and
ends the ranks, the one that reads their pipes brings their messages, and the agent's event loop
asks to stop. `_wakeup` wakes this one, and so does the end of a rank.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil

from taas_magic.errors import PoolError
from taas_magic.host import feeding, forkserver, link, rendezvous, scratch
from taas_magic.host.files import HostFiles
from taas_magic.host.output import Pump
from taas_magic.host.rendezvous import Rendezvous
from taas_magic.host.spec import HostSpec, Place, RankSpec, torchrun_variables
from taas_magic.host.stacks import Stand
from taas_magic.host.system import end_all, leftovers, named, signal_name
from taas_magic.host.watch import (
    Ranks,
    Verdict,
    decide,
    failure_of,
    guilty,
    host_failure,
)
from taas_magic.messages import (
    Event,
    Failure,
    HostEnded,
    LoaderPlaces,
    Note,
    RankEvent,
    RankFailure,
    RankMessage,
    RanksStarted,
    RankStand,
    Settled,
    StoreMessage,
)
from taas_magic.store import guard
from taas_magic.store.manifest import Ask


class Wakeup:
    """Like `threading.Event`, with a descriptor that is readable while it is set; Linux only."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """The descriptor, for `multiprocessing.connection.wait`."""
        return self._descriptor

    def set(self) -> None:
        """Make it readable; any thread may call it."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Make it unreadable again."""
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:
            return  # it was not set

    def close(self) -> None:
        """Free the descriptor; nobody waits any more."""
        with self._lock:
            self._is_closed = True
            os.close(self._descriptor)


RANK = "taas_magic.host.rank.rank_main"
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
        self._stand = Stand(
            spec.plan.hang_s, host, spec.attempt, self._ranks, pump, pipes, self._emit
        )
        self._processes: dict[int, Any] = {}
        self._exitcodes: dict[int, int] = {}
        self.verdict: Verdict | None = None
        """How the ranks stand; None while they run."""
        self.failures: list[Failure] = []
        """Why they failed, if they did."""

    def start(self, rank_spec: RankSpec, port: int) -> None:
        """Start the ranks, and say that they have started.

        Args:
            rank_spec: What all ranks of this host share (`HostSpec.for_ranks`).
            port: Where the attempt's ranks meet, on the run's first host.
        """
        self._pump.open(self._spec.attempt, [(rank, self._local(rank)) for rank in self._numbers])
        for rank in self._numbers:
            error_file = link.error_file(self._pipes, self._spec.attempt, self._local(rank))
            environ = torchrun_variables(self._spec, self._local(rank), port, error_file)
            self._processes[rank] = forkserver.start(RANK, rank_spec, environ)
        pids = {rank: process.pid for rank, process in self._processes.items()}
        self._ranks.started(pids)
        self._emit(RanksStarted(host=self._host, attempt=self._spec.attempt, pids=pids))

    @property
    def sentinels(self) -> list[int]:
        """What becomes readable when a rank ends, of those whose end has not been seen."""
        running = self._processes.keys() - self._exitcodes.keys()
        return [self._processes[rank].sentinel for rank in running]

    def note(self, rank: int, message: RankMessage) -> None:
        """Takes down what a rank says of itself; called by the pump's thread."""
        self._ranks.note(rank, message)

    def hear(self, rank: int, message: Event | StoreMessage) -> None:
        """Takes down that a rank said something else; called by the pump's thread."""
        self._ranks.hear(rank, message)

    def stacks(self) -> list[RankStand]:
        """Where each rank stands; takes some seconds, any thread may call it."""
        return self._stand.rows(self._stand.collect())

    def interrupt(self) -> None:
        """Sends SIGINT to the ranks; any thread may call it."""
        self._ranks.interrupt()

    def look(self, deadline: float | None, interrupted_at: float | None, is_killed: bool) -> None:
        """Asks the system about the ranks and judges them; acts on the verdict, if there is one.

        Args:
            deadline: When the run has to have ended, by the monotonic clock.
            interrupted_at: When it was interrupted, by the same clock.
            is_killed: Whether it is to end at once.
        """
        self._collect_exitcodes()
        now = time.monotonic()
        self._ranks.poll(now, self._exitcodes.get, self._stack_file)
        verdict = decide(self._ranks.states(), now, deadline, interrupted_at)
        if verdict is None and is_killed:
            verdict = Verdict("INTERRUPTED", "interrupt")
        failed = verdict is not None and verdict.state == "FAILED"
        if failed and forkserver.took_along(self._exitcodes.values()):
            verdict = Verdict("FAILED", "host")
        if verdict is not None:
            self.verdict = verdict
            self._settle(verdict)
        else:
            self._stand.look(now)

    def _collect_exitcodes(self) -> None:
        """Take down which ranks have ended, once all that they said has been read."""
        for rank in self._processes.keys() - self._exitcodes.keys():
            code = forkserver.exitcode(self._processes[rank])
            if code is not None:
                self._pump.drain(rank)
                self._exitcodes[rank] = code

    def end_ranks(self, grace_s: float) -> None:
        """Ends the ranks that are left, and what they started.

        Args:
            grace_s: How long they may take after SIGTERM.
        """
        alive = self._ranks.alive()
        below = [child for process in alive for child in _children(process)]
        end_all(alive, grace_s=grace_s)
        end_all(below, grace_s=0.0)

    def close(self) -> None:
        """Ends the ranks that are left, and forgets all of them."""
        self.end_ranks(0.0)
        while self._processes:
            forkserver.forget(self._processes.popitem()[1])

    def _settle(self, verdict: Verdict) -> None:
        """Says how the ranks stand, before anything that takes time; ends them if they failed."""
        failures = self._report(verdict)
        if verdict.state == "FAILED":
            self.failures = failures
            for failure in failures:
                self._emit(RankFailure(host=self._host, failure=failure))
        self._emit(
            Settled(
                host=self._host,
                attempt=self._spec.attempt,
                state=verdict.state,
                cause=verdict.cause,
                failures=failures,
            )
        )
        if verdict.state != "SUCCEEDED":
            self.end_ranks(FAILED_GRACE_S if verdict.state == "FAILED" else 0.0)

    def _report(self, verdict: Verdict) -> list[Failure]:
        """The failures of this host; of ranks that succeeded, those that left by themselves."""
        if verdict.cause == "host":
            return [host_failure(self._host, PoolError(forkserver.why_ended()))]
        return [
            failure_of(
                state,
                verdict,
                host=self._host,
                log_path=self._spec.told_log(state.rank),
                tail=self._pump.tail(state.rank),
                signal_name=signal_name(state.exitcode or 0),
                timeout_s=self._spec.plan.timeout_s,
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


POLL_S = 0.25
"""How often the system is asked about the ranks when nothing else wakes the judge."""

OBEY_S = 120.0
"""How long the other hosts wait at most until this one has made ready for the next attempt."""


@dataclass(frozen=True)
class _Order:
    """What the controller said follows: another attempt, or, without a spec, the end."""

    spec: HostSpec | None = None
    rendezvous: Rendezvous | None = None
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

    Raises:
        PoolError: Nothing can be written in TMPDIR.
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
        self._pipes = scratch.run_folder()
        self._rendezvous = _rendezvous_of(spec)
        self.port: int = self._rendezvous.port if self._rendezvous else 0
        timeout_s = spec.plan.timeout_s
        self._deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        self._wakeup = Wakeup()
        self._attempt: Attempt | None = None
        self._interrupted_at: float | None = None
        self._killed = False
        self._order: _Order | None = None
        self._gone_wrong: tuple[str, Failure] | None = None
        self._files = HostFiles(spec, place, ask, emit)
        self._places = feeding.Places(spec.fetchers)

    def run(self) -> None:
        """Runs to the end, and emits `host_ended` when nothing of the run is left here."""
        self._pump: Pump | None = None
        try:
            self._run()
        except Exception as error:
            self._gone_wrong = "FAILED", host_failure(self._host, error)
        finally:
            state, failures = self._how_it_ended()
            number = self._spec.host_rank
            self._emit(HostEnded(host=self._host, host_rank=number, state=state, failures=failures))
            self._wakeup.close()

    def _run(self) -> None:
        try:
            if self._prepare():
                self._run_attempts()
        except Exception as error:
            self._gone_wrong = "FAILED", host_failure(self._host, error)
        finally:
            if self._order is not None:
                self._order.obeyed.set()
            for step in (self._end_ranks, self._close, self._sweep, self._remove_pipes):
                self._clean_up(step)
            self._bring_home()

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
        self._wakeup.set()

    def again(self, spec: HostSpec) -> int:
        """Starts all ranks again; called by another thread.

        Returns:
            The port of the attempt's store, on the first host.
        """
        meeting = _rendezvous_of(spec)
        order = _Order(spec, meeting)
        self._command(order)
        order.obeyed.wait(OBEY_S)
        return meeting.port if meeting else 0

    def end(self) -> None:
        """All hosts have settled, and this was the last attempt; called by another thread."""
        self._command(_Order())

    def stacks(self) -> list[RankStand]:
        """Where the ranks stand; blocks for some seconds; called by another thread."""
        return self._attempt.stacks() if self._attempt is not None else []

    def place(self, number: int, entry: LoaderPlaces) -> None:
        """Tells the ranks where a fetcher of another host listens; called by another thread."""
        self._places.put(number, entry)

    def _command(self, order: _Order) -> None:
        self._order = order
        self._wakeup.set()

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
            self._wakeup.set,
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
            failure = host_failure(self._host, error)
            self._emit(RankFailure(host=self._host, failure=failure))
            self._gone_wrong = "LOST", failure

    def _how_it_ended(self) -> tuple[str, list[Failure]]:
        if self._gone_wrong is not None:
            state, failure = self._gone_wrong
            return state, [failure]
        last = self._attempt
        if last is None or last.verdict is None:
            return "INTERRUPTED", []
        return last.verdict.state, last.failures

    def _run_attempts(self) -> None:
        """Start the ranks, and again as often as the controller says; returns at the run's end."""
        order = self._take_order()
        while True:
            if order is not None:
                if order.spec is None:
                    return
                self._make_ready(order, order.spec)
            self._start_ranks()
            order = self._judge()
            assert self._attempt is not None
            self._attempt.close()

    def _start_ranks(self) -> None:
        spec = self._spec
        assert self._pump is not None
        attempt = Attempt(spec, self._host, self._pump, self._pipes, self._emit)
        self._attempt = attempt
        if self._interrupted_at is not None:
            attempt.interrupt()
        meeting = self._rendezvous
        if meeting is None:
            rendezvous.reach(spec.master_addr, spec.master_port)
        means = guard.strongest()
        rank_spec = spec.for_ranks(self._pipes, means, self._host, self._interface)
        if meeting is not None:
            meeting.start()
        attempt.start(rank_spec, meeting.port if meeting else spec.master_port)

    def _on_message(self, rank: int, message: Event | RankMessage | StoreMessage) -> None:
        attempt = self._attempt
        if isinstance(message, RankMessage):
            if attempt is not None:
                attempt.note(rank, message)
                self._wakeup.set()
            return
        if attempt is not None:
            attempt.hear(rank, message)
        if isinstance(message, StoreMessage):
            self._files.take(rank, message)
            return
        message.host, message.time = self._host, time.time()
        if isinstance(message, RankEvent):
            message.rank = rank
        self._emit(message)

    def _judge(self) -> _Order:
        """Look at the ranks whenever something changed, until the controller says what follows."""
        attempt = self._attempt
        assert attempt is not None
        while (order := self._take_order()) is None:
            connection.wait([*attempt.sentinels, self._wakeup.fileno()], POLL_S)
            self._wakeup.clear()
            if attempt.verdict is None:
                attempt.look(self._deadline, self._interrupted_at, self._killed)
        return order

    def _take_order(self) -> _Order | None:
        order, self._order = self._order, None
        return order

    def _make_ready(self, order: _Order, spec: HostSpec) -> None:
        """Has the files of the next attempt here, and lets the other hosts begin theirs."""
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._rendezvous = order.rendezvous
        try:
            self._files.again(spec)
        finally:
            order.obeyed.set()
        self._spec = self._files.local(spec)

    def _clean_up(self, step: Callable[[], None]) -> None:
        """Takes a step of the clean-up; one that fails is told, and the next ones follow."""
        try:
            step()
        except Exception as error:
            text = f"not all of the run could be cleaned up: {type(error).__name__}: {error}"
            self._emit(Note(host=self._host, text=text))

    def _end_ranks(self) -> None:
        if self._attempt is not None:
            self._attempt.close()

    def _close(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
        if self._pump is not None:
            self._pump.close()

    def _sweep(self) -> None:
        left = end_all(leftovers(self._spec.plan.run_id, self._pipes, self._alone()), grace_s=0)
        if left:
            text = f"host {self._host}: the cell started what could not be ended: {named(left)}"
            self._emit(Note(host=self._host, text=text))

    def _remove_pipes(self) -> None:
        shutil.rmtree(self._pipes, ignore_errors=True)


def _rendezvous_of(spec: HostSpec) -> Rendezvous | None:
    """Where an attempt's ranks meet, if this is the run's first host."""
    return None if spec.host_rank else Rendezvous(spec.master_addr)
