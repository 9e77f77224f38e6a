"""A run's share on this host, its ranks or its fetchers: from the first file to the last.

Lives in the agent, in a thread of its own. `HostShare` is what both have in common: files are
brought in, processes start and are listened to until all have ended or are to end, what they left
is ended and removed, files are brought home, and the pool is told. `HostRun` is a run's ranks: it
starts its attempts, has the ranks judged, and does what the controller says. Three threads meet
there: the share's own starts, judges and ends the ranks, the one that reads their pipes brings
their messages, and the agent's event loop asks to stop. `wakeup` wakes the first, and so does the
end of a rank. `HostFetchers` is a run's fetchers: they may be on a host that runs no rank, and
begin before the ranks do.
"""

import contextlib
import os
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

import psutil

from taas_magic import messages, probe
from taas_magic.data import service
from taas_magic.errors import PoolError, TaasError, signal_name
from taas_magic.host import forkserver, link, rendezvous, stacks
from taas_magic.host.files import HostFiles
from taas_magic.host.output import OnMessage, Pump, Wakeup
from taas_magic.host.rendezvous import Rendezvous
from taas_magic.host.spec import (
    Emit,
    FetcherSpec,
    HostSpec,
    Place,
    ProcessSpec,
    fetcher_failed,
    torchrun_variables,
)
from taas_magic.host.stacks import Stand
from taas_magic.host.supervisor import run_folder
from taas_magic.host.system import (
    RUN_TOKEN,
    end_all,
    end_at_once,
    is_tracker,
    leftovers,
    named,
)
from taas_magic.host.watch import Ranks, Verdict, decide, failure_of, guilty, host_failure
from taas_magic.messages import (
    EndRun,
    Event,
    Failure,
    FetcherEnded,
    FetcherFailed,
    FetcherStand,
    Halt,
    HostEnded,
    Note,
    PlaceFetcher,
    RankBeat,
    RankEvent,
    RankFailure,
    RankMessage,
    RankSight,
    RanksStarted,
    RunStacks,
    Settled,
    StoreMessage,
)
from taas_magic.plan import Prefill
from taas_magic.store import guard
from taas_magic.store.manifest import Ask

POLL_S = 0.25
"""How often processes are looked at when nothing else wakes who listens to them."""

OBEY_S = 120.0
"""How long the other hosts wait at most until this one has made ready for the next attempt."""

FAILED_GRACE_S = 1.0
"""How long the other ranks may take to end after SIGTERM, once one has failed."""

RANK = "taas_magic.host.rank.rank_main"

Told = Halt | EndRun | PlaceFetcher
"""What a share is told: to end early, that the run is over, where a fetcher listens."""


class HostShare(ABC):
    """A run's ranks, or its fetchers, on this host.

    Args:
        alone: Says whether nothing else is on this host.

    Raises:
        PoolError: Nothing can be written in TMPDIR.
    """

    port = 0
    """Of the store of the first attempt's ranks, on the run's first host."""

    def __init__(
        self,
        spec: HostSpec,
        place: Place,
        emit: Emit,
        alone: Callable[[], bool],
        ask: Ask,
    ) -> None:
        self.spec, self.place, self.host = spec, place, place.host
        self.emit, self._alone = emit, alone
        self.folder = run_folder()
        self._files = HostFiles(spec, place, ask, emit)
        self.wakeup = Wakeup()
        self.stopped_at: float | None = None

    def run(self) -> None:
        """Run to the end, and emit `HostEnded` when nothing of the share is left here."""
        try:
            self._run()
        finally:
            state, failures = self._how_it_ended()
            self.emit(HostEnded(state=state, failures=failures))
            self.wakeup.close()

    def _run(self) -> None:
        try:
            spec = self._files.bring_in(self._is_wanted)
            if spec is not None:
                self.spec = spec
                self._work()
        except Exception as error:
            self._fail(error)
        remove_folder: Callable[[], None] = partial(shutil.rmtree, self.folder, ignore_errors=True)
        for step in (*self._ending(), self._sweep, remove_folder):
            try:
                step()
            except Exception as error:
                text = f"not all of the run could be cleaned up: {type(error).__name__}: {error}"
                self.note(text)
        try:
            self._files.bring_home()
        except Exception as error:
            self._keep(error)

    def tell(self, told: Told) -> None:
        """Take what the pool tells this share; called by another thread."""
        if isinstance(told, Halt):
            if told.how == "kill":
                self.stopped_at = float("-inf")  # every grace is over
            elif self.stopped_at is None:
                self.stopped_at = time.monotonic()
            self.wakeup.set()

    @abstractmethod
    def stacks(self) -> RunStacks:
        """Return where the processes stand; blocks for some seconds; called by another thread."""

    @abstractmethod
    def _work(self) -> None:
        """Start processes and listen to them; returns when they have ended, or are to end."""

    @abstractmethod
    def _fail(self, error: Exception) -> None:
        """Take down why the share could not go on."""

    @abstractmethod
    def _ending(self) -> tuple[Callable[[], None], ...]:
        """Return the steps that end all processes; when one fails, the next ones follow."""

    @abstractmethod
    def _keep(self, error: Exception) -> None:
        """Take down why what was left here was not brought home."""

    def _is_wanted(self) -> bool:
        return self.stopped_at is None

    def _how_it_ended(self) -> tuple[str, list[Failure]]:
        return "SUCCEEDED", []

    def _held(self) -> Path:
        """Return how the paths begin of files that show whose a process is that has them open."""
        return self.folder

    def _sweep(self) -> None:
        found = leftovers(self.spec.share_id, self._held(), self._alone())
        if left := end_at_once(found):
            self.note(f"host {self.host}: the run left what could not be ended: {named(left)}")

    def note(self, text: str) -> None:
        """Tell the user something, once."""
        self.emit(Note(text=text))


_A = TypeVar("_A", bound="Attempt")


class Attempt:
    """The ranks of one attempt on this host.

    Attributes:
        folder: What the ranks share with the agent; theirs alone.
        pump: Reads their pipes.
        processes: The ranks' processes, by rank.
    """

    def __init__(
        self,
        spec: HostSpec,
        place: Place,
        emit: Emit,
        *,
        folder: Path,
        pump: Pump,
        processes: dict[int, Any],
    ) -> None:
        self._spec, self._place, self._emit = spec, place, emit
        self.folder, self.pump, self.processes = folder, pump, processes
        self.ranks = Ranks(spec.ranks)
        self.stand = Stand(spec, self.ranks, pump, folder, emit)
        self.ended: tuple[str, list[Failure]] | None = None
        """How the ranks ended, and why, if they failed; None while they run."""

    @classmethod
    def begin(
        cls: type[_A], spec: HostSpec, place: Place, folder: Path, emit: Emit, on_message: OnMessage
    ) -> _A:
        """Make an attempt with a folder and pipes of its own, below `folder`."""
        own = folder / str(spec.attempt)
        own.mkdir(mode=0o700)
        pump = Pump(own, spec.folder, spec.ranks, emit, on_message)
        return cls(spec, place, emit, folder=own, pump=pump, processes={})

    def start(self, port: int) -> None:
        """Start the ranks, and say that they have started; they meet at `port`."""
        spec = self._spec
        about = ProcessSpec(spec, self.folder, spec.environ(self._place), guard.strongest())
        for local_rank, rank in enumerate(spec.ranks):
            error_file = link.rank_file(self.folder, rank, "error.json")
            environ = torchrun_variables(spec, local_rank, port, error_file)
            self.processes[rank] = forkserver.start(RANK, about, environ)
        self._say_started()

    def _say_started(self) -> None:
        """Record the ranks' processes, and report them."""
        pids = {rank: process.pid for rank, process in self.processes.items()}
        self.ranks.started(pids)
        gpus = min(len(pids), probe.count_gpus())
        self._emit(RanksStarted(attempt=self._spec.attempt, pids=pids, gpus=gpus))

    @property
    def sentinels(self) -> list[int]:
        """What becomes readable when a rank ends, of those whose end has not been seen."""
        return [process.sentinel for process in self._running().values()]

    def look(self, deadline: float | None, interrupted_at: float | None) -> None:
        """Ask the system about the ranks and `decide`; acts on the verdict, if there is one.

        From `interrupted_at` on, each rank hears SIGINT as soon as it would.
        """
        if interrupted_at is not None:
            self._interrupt(interrupted_at)
        self._look_for_ends()
        now, states = time.monotonic(), self.ranks.states()
        self.ranks.poll(now)
        verdict = decide(states, now, deadline, interrupted_at)
        failed = verdict is not None and verdict.state == "FAILED"
        if failed and forkserver.took_along({state.exitcode for state in states}):
            verdict = Verdict("FAILED", "host")
        if verdict is not None:
            self._settle(verdict)
        else:
            self.stand.look(now)

    def _look_for_ends(self) -> None:
        """Ask the system which ranks have ended."""
        for rank, process in self._running().items():
            if (code := forkserver.exitcode(process)) is not None:
                self.pump.drain(rank)  # all that it said counts
                self.ranks.ended(rank, code, link.rank_file(self.folder, rank, "stack"))

    def close(self) -> None:
        """End the ranks that are left, and forget all of them."""
        self._end_ranks(0.0)
        while self.processes:
            forkserver.forget(self.processes.popitem()[1])

    def _interrupt(self, since: float) -> None:
        """Have the ranks end; called again and again since `since`."""
        self.ranks.interrupt()

    def _end_ranks(self, grace_s: float) -> None:
        """End the ranks that are left, and what they started; they have a grace after SIGTERM."""
        alive = self.ranks.alive()
        below = []
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                below += [it for it in process.children(recursive=True) if not is_tracker(it)]
        end_all(alive, grace_s=grace_s)
        end_all(below, grace_s=0.0)

    def _settle(self, verdict: Verdict) -> None:
        """Say how the ranks stand, before anything that takes time; end them if they failed."""
        failures, has_failed = self._report(verdict), verdict.state == "FAILED"
        self.ended = verdict.state, failures if has_failed else []
        for failure in failures if has_failed else ():
            self._emit(RankFailure(failure=failure))
        self._emit(
            Settled(
                attempt=self._spec.attempt,
                state=verdict.state,
                cause=verdict.cause,
                failures=failures,
            )
        )
        if verdict.state != "SUCCEEDED":
            self._end_ranks(FAILED_GRACE_S if has_failed else 0.0)

    def _report(self, verdict: Verdict) -> list[Failure]:
        """Return the host's failures; of ranks that succeeded, those that left by themselves."""
        if verdict.cause == "host":
            return [host_failure(self._place.host, PoolError(forkserver.why_ended()))]
        return [
            failure_of(
                state,
                verdict,
                host=self._place.host,
                log_path=self._spec.told_log(state.rank),
                tail=self.pump.tail(state.rank),
                timeout_s=self._spec.plan.timeout_s,
            )
            for state in guilty(self.ranks.states(), verdict.cause)
        ]

    def _running(self) -> dict[int, Any]:
        """Return the processes of ranks whose end has not been seen."""
        states = self.ranks.states()
        return {state.rank: self.processes[state.rank] for state in states if not state.ended}


@dataclass(frozen=True)
class _Again:
    """What the controller said follows: another attempt."""

    spec: HostSpec
    rendezvous: Rendezvous | None
    obeyed: threading.Event = field(default_factory=threading.Event)
    """The last attempt's ranks are gone, and what they wrote is where other hosts find it."""


class HostRun(HostShare):
    """A run's ranks on this host.

    Raises:
        OSError: The run's first host has not (any more) the address at which ranks were to meet.
        PoolError: Nothing can be written in TMPDIR.
    """

    def __init__(self, spec: HostSpec, *about: Any) -> None:
        # first: it may fail, and nothing is left then
        self._rendezvous = None if spec.session else _rendezvous_of(spec)
        super().__init__(spec, *about)
        self.port = self._rendezvous.port if self._rendezvous else 0
        timeout_s = spec.plan.timeout_s
        began = time.monotonic() - spec.ran_s
        self._deadline = began + timeout_s if timeout_s is not None else None
        self._attempt: Attempt | None = None
        self._pumps: list[Pump] = []
        self._next: _Again | None = None
        self._is_over = False
        self._gone_wrong: tuple[str, list[Failure]] | None = None
        self._entries = dict(spec.fetchers)
        self._run_dir: Path | None = None
        self._placing = threading.Lock()

    def again(self, spec: HostSpec) -> int:
        """Start all ranks again; called by another thread.

        Returns:
            The port of the attempt's store, on the first host.
        """
        meeting = _rendezvous_of(spec)
        self._next = again = _Again(spec, meeting)
        self.wakeup.set()
        again.obeyed.wait(OBEY_S)
        return meeting.port if meeting else 0

    def stacks(self) -> RunStacks:
        """See `HostShare.stacks`; none before the ranks have started."""
        stand = self._attempt.stand if self._attempt is not None else None
        return RunStacks(stand.rows(stand.collect()) if stand is not None else [])

    def _place_fetchers(self) -> None:
        """Write where fetchers listen where ranks look, once that is here; in any thread."""
        with self._placing:
            if self._run_dir is not None:
                folder = service.folder_of(self._run_dir) / "fetchers"
                for number, entry in list(self._entries.items()):
                    service.write_entry(folder, number, entry)

    def _is_wanted(self) -> bool:
        return self.stopped_at is None and not self._is_over

    def tell(self, told: Told) -> None:
        """See `HostShare.tell`; ranks hear the first halt as SIGINT."""
        super().tell(told)
        match told:
            case EndRun():  # all hosts have settled
                self._is_over = True
                self.wakeup.set()
            case PlaceFetcher():
                self._entries[told.number] = told.entry
                self._place_fetchers()

    def _work(self) -> None:
        """Start the ranks, and again as often as the controller says; returns at the run's end."""
        self._run_dir = self.spec.folder.path
        self._place_fetchers()
        while not self._is_over:
            if (again := self._next) is not None:
                self._next = None
                self._make_ready(again)
            attempt = self._start_ranks()
            self._judge(attempt)
            attempt.close()

    def _new_attempt(self) -> Attempt:
        return Attempt.begin(self.spec, self.place, self.folder, self.emit, self._on_message)

    def _start_ranks(self) -> Attempt:
        spec, meeting = self.spec, self._rendezvous
        attempt = self._new_attempt()
        self._attempt = attempt
        self._pumps.append(attempt.pump)  # what an attempt has left may go on to write
        port = spec.master_port
        if meeting is None:
            rendezvous.reach(spec.master_addr, port)
        else:
            port = meeting.port
        attempt.start(port)
        if meeting is not None:  # after them: who connects earlier waits in the kernel
            meeting.start()
        return attempt

    def _judge(self, attempt: Attempt) -> None:
        """Look at the ranks whenever something changed, until the controller says what follows."""
        while self._next is None and not self._is_over:
            connection.wait([*attempt.sentinels, self.wakeup.fileno()], POLL_S)
            self.wakeup.clear()
            if attempt.ended is None and self._looks():
                attempt.look(self._deadline, self.stopped_at)

    def _looks(self) -> bool:
        """Return whether the ranks are to be judged now."""
        return True

    def _make_ready(self, again: _Again) -> None:
        """Have the files of the next attempt here, and let the other hosts begin theirs."""
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._rendezvous = again.rendezvous
        try:
            self.spec = self._files.again(again.spec)
        finally:
            again.obeyed.set()

    def _on_message(self, rank: int, message: Event | RankMessage | StoreMessage) -> None:
        """Take what a rank says; called by the pump's thread."""
        if self._attempt is not None:
            self._attempt.ranks.hear(rank, message)
        if isinstance(message, RankMessage):
            if not isinstance(message, RankBeat | RankSight):  # these change no verdict
                self.wakeup.set()
        elif isinstance(message, StoreMessage):
            self._files.take(rank, message)
        else:
            if isinstance(message, RankEvent):
                message.rank = rank
            self.emit(message)

    def _fail(self, error: Exception) -> None:
        self._gone_wrong = "FAILED", [host_failure(self.host, error)]

    def _keep(self, error: Exception) -> None:
        failure = host_failure(self.host, error)
        self.emit(RankFailure(failure=failure))
        self._gone_wrong = "LOST", [failure]

    def _how_it_ended(self) -> tuple[str, list[Failure]]:
        ended = self._attempt.ended if self._attempt is not None else None
        return self._gone_wrong or ended or ("INTERRUPTED", [])

    def _ending(self) -> tuple[Callable[[], None], ...]:
        if self._next is not None:  # nobody else does what it says
            self._next.obeyed.set()
        parts = self._attempt, self._rendezvous, *self._pumps
        return tuple(part.close for part in parts if part is not None)


def _rendezvous_of(spec: HostSpec) -> Rendezvous | None:
    """Return where an attempt's ranks meet, if this is the run's first host."""
    return None if spec.host_rank else Rendezvous(spec.master_addr)


FETCHER = "taas_magic.host.fetcher.fetcher_main"
_EXIT_S = 0.5
_END_S = 5.0
"""How long fetchers may take to end; a stopped one never does by itself."""

_ENDLESS = 1 << 62


def workers_fill(prefill: Prefill | None) -> tuple[int, int]:
    """Return how many batches and bytes all workers prepare before any rank asks, at the least."""
    if prefill is None:
        return 0, 0
    if prefill.unit == "bytes":
        return 0, prefill.amount
    return (prefill.amount if prefill.unit == "batches" else _ENDLESS), 0


@dataclass
class _Running:
    """A fetcher that was started."""

    spec: FetcherSpec
    process: Any
    why: str = ""
    said_writes: bool = False


class HostFetchers(HostShare):
    """The fetchers of one run on this host."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._running: dict[connection.Connection, _Running] = {}

    def stacks(self) -> RunStacks:
        """See `HostShare.stacks`: those of each fetcher and of its workers."""
        found = []
        for one in list(self._running.values()):
            assert one.spec.stacks is not None
            sight = stacks.of_fetcher(one.process.pid, one.spec.stacks)
            found.append(sight.stand(FetcherStand, fetcher=one.spec.plan.number))
        return RunStacks(fetchers=found)

    def _work(self) -> None:
        """Start the fetchers, and turn what they say into events until all have ended."""
        for spec in self._specs():
            control, theirs = connection.Pipe()
            process = forkserver.start(FETCHER, spec, theirs)
            theirs.close()
            self._running[control] = _Running(spec, process)
        until: float | None = None
        while self._running and (until is None or time.monotonic() < until):
            if self.stopped_at is not None and until is None:
                until = time.monotonic() + _END_S
                for control in self._running:
                    with contextlib.suppress(OSError):  # it has ended
                        control.send("end")
            for control in self._pass_on():
                self._end(control)
            for one in self._running.values():
                self._look_for_writes(one)

    def _specs(self) -> Iterator[FetcherSpec]:
        """Yield what each fetcher of this host is told."""
        share, folder, served = self.spec, self.folder, service.read(self.spec.folder.path)
        data = share.plan.data
        assert data is not None and served is not None
        groups = len(data.fetchers) // served.fetchers
        fill_batches, fill_bytes = (-(-it // groups) for it in workers_fill(share.plan.prefill))
        environ = {**share.origin.environ, RUN_TOKEN: share.share_id}
        for plan in data.on(share.host_rank):
            yield FetcherSpec(
                plan,
                served,
                share.folder.path,
                data.cores,
                host=self.host,
                # no port that nobody needs: ranks beside their fetchers come by Unix sockets
                listen=self.place.address if data.crosses else "",
                spill=folder / f"spill-{plan.number}" if served.settings.over == "spill" else None,
                fill_batches=fill_batches,
                fill_bytes=fill_bytes,
                setting=ProcessSpec(share, folder, environ, guard.strongest()),
                stacks=folder / f"{plan.number}.stacks",
            )

    def _fail(self, error: Exception) -> None:
        """Say that no fetcher will start here, so that no rank waits for one."""
        said = error if isinstance(error, TaasError) else f"{type(error).__name__}: {error}"
        why = f"host {self.host} has no fetchers: {said}"
        self.note(why)
        data = self.spec.plan.data
        assert data is not None
        for plan in data.on(self.spec.host_rank):
            self.emit(fetcher_failed(self.spec.plan, plan, why))

    def _keep(self, error: Exception) -> None:
        self.note(f"the fetchers' logs stay on host {self.host}: {error}")

    def _held(self) -> Path:
        return self.spec.folder.path / "logs" / "fetcher-"

    def _ending(self) -> tuple[Callable[[], None], ...]:
        return tuple(partial(self._end, control) for control in self._running)

    def _pass_on(self) -> list[connection.Connection]:
        """Pass on what fetchers say now, or soon; returns those that have ended."""
        ended = []
        ready = connection.wait([*self._running, self.wakeup.fileno()], POLL_S)
        self.wakeup.clear()
        for control in ready:
            if not isinstance(control, connection.Connection):
                continue
            try:
                said = messages.of_fetcher(control.recv_bytes())
            except (EOFError, OSError):
                ended.append(control)
                continue
            if isinstance(said, FetcherFailed):
                self._running[control].why = said.why
            else:
                self.emit(said)
        return ended

    def _look_for_writes(self, one: _Running) -> None:
        """Say once what a fetcher wrote to the project store, which kept it out."""
        kept_out = self.folder / str(one.spec.plan.number) / "store"
        if one.said_writes or not kept_out.exists():
            return
        if names := sorted(os.listdir(kept_out)):
            one.said_writes = True
            self.note(f"not saved (fetchers do not write the project store): {names[0]}")

    def _end(self, control: connection.Connection) -> None:
        one = self._running.pop(control)
        control.close()
        one.process.join(_EXIT_S)
        one.process.kill()
        one.process.join()
        ended = FetcherEnded(number=one.spec.plan.number)
        if self.stopped_at is None:
            text = self._how_one_ended(one)
            self.note(text)
            ended = fetcher_failed(self.spec.plan, one.spec.plan, text)
        forkserver.forget(one.process)
        self.emit(ended)

    def _how_one_ended(self, one: _Running) -> str:
        code = one.process.exitcode
        how = one.why or (f"killed by {signal_name(code)}" if code < 0 else f"exit code {code}")
        log = f"logs/fetcher-{one.spec.plan.number}.log"
        return f"{one.spec.who} ended: {how} (see {log} of the run)"
