"""A run as the notebook holds it: follow it, interrupt it, and ask it what it made."""

import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import structs

from taas_magic.display.failure import to_exception, with_labels
from taas_magic.display.stacks import duration
from taas_magic.errors import (
    PoolError,
    ResultError,
    RunError,
    RunLost,
    StoreError,
    TaasError,
    interrupted,
)
from taas_magic.host import results
from taas_magic.host.spec import VALUE, Filling, HostSpec
from taas_magic.host.watch import HALT_S
from taas_magic.journal import folder as journal
from taas_magic.journal.folder import ENDED_STATES, RunFolder
from taas_magic.messages import Event, Note, RunEnded, StateChanged, StoreReceipt
from taas_magic.notebook.fetching import Fetching
from taas_magic.notebook.interrupts import LEAVE_S, Interrupts
from taas_magic.plan import Plan
from taas_magic.pool.client import Pool
from taas_magic.store.receipt import Receipt

if TYPE_CHECKING:
    from matplotlib.figure import Figure


CHECK_S = 1.0
"""How often a run's pool is asked whether it lives, while nothing is heard."""

KILL_WAIT_S = 15.0
"""How long a run that was interrupted once may take to end, before it is left to itself."""

SILENT_NOTE_S = 5.0
"""After how long without a beat of the pool's process the head says so."""

SILENT_LOST_S = 60.0
"""After how long without a beat of the pool's process a run is taken for lost."""


class Viewer(Protocol):
    """What shows a run; `display.view.View` in a notebook."""

    def feed(self, event: Event) -> None: ...
    def tick(self, now: float) -> None: ...
    def next_due(self) -> float | None: ...
    def close(self) -> None: ...


class Run:
    """One execution of a cell on N ranks; `taas.last_run` is the newest one.

    Attributes:
        run_id: Its id.
        plan: What was decided before it started.
        path: Its folder; see `taas_magic.journal.folder`.
        state: STARTING, RUNNING, SUCCEEDED, FAILED, INTERRUPTED or LOST.
        failures: What went wrong on which rank, the first failure first.
        hosts: Names of the hosts that ran it.
        result: The value of the cell's last expression on rank 0, if it could travel.
        out: The variables that `--out` brought back, also from a run that failed.
        missing: Names of `--out` that did not come, each with the reason.
        elapsed_s: Seconds that it took.
        receipt: What rank 0 wrote to the project store, and what was kept out of it.
    """

    def __init__(
        self, plan: Plan, folder: RunFolder, labels: Mapping[str, str] | None = None
    ) -> None:
        self._labels = labels or {}
        self.run_id, self.plan, self.path = plan.run_id, plan, folder.path
        self.state = "STARTING"
        self.hosts: list[str] = []
        self.failures: list[dict[str, Any]] = []
        self.result: Any = None
        self.out: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self.elapsed_s = 0.0
        self.receipt = Receipt()
        self._folder = folder
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._ended: RunEnded | None = None
        self._began = time.monotonic()
        self._is_left = self._is_silent = False

    def __repr__(self) -> str:
        return f"<Run {self.run_id} {self.plan.name or ''}: {self.state}, {self.path}>"

    def logs(self, rank: int | None = None) -> str:
        """All that a rank wrote, with its traceback; without a rank, the first failed one or 0."""
        return journal.record(self._folder).logs(rank)

    @property
    def advice(self) -> str:
        """What to change when ranks waited for data; "" where there is nothing to say."""
        return journal.record(self._folder).advice

    @property
    def waited(self) -> dict[str, float]:
        """The share of their time with each loader that ranks waited for it, from 0 to 1."""
        return journal.record(self._folder).waited

    def plot(self) -> "Figure":
        """Draws how long ranks waited for data, and how fast it came, over time.

        Raises:
            UsageError: matplotlib is missing, or the run used no registered loader.
        """
        return journal.record(self._folder).plot()

    def discard(self) -> None:
        """Removes its folder: it was never started."""
        self._folder.discard()

    def put(self, event: Event) -> None:
        """Takes an event; called by any thread."""
        self._events.put(event)

    def fill(self, fetching: Fetching, view: Viewer, interrupts: Interrupts) -> None:
        """Shows how fetchers prepare what `--prefill` asks for; returns when it is there.

        Raises:
            PoolError: It was not there in `--timeout`.
            KeyboardInterrupt: The user did not want to wait.
        """
        assert self.plan.prefill is not None and self.plan.data is not None
        data, limit_s = self.plan.data, self.plan.timeout_s
        fetchers, loaders = len(data.fetchers), len(data.loaders)
        filling = Filling(self.plan.prefill, fetchers, loaders, self.plan.units)
        deadline = time.monotonic() + limit_s if limit_s is not None else None
        interrupts.wake = lambda: self._events.put(None)
        with self.giving_up(view):
            while not filling.is_enough:
                for seen in (events := list(self._wait(view))):
                    if filling.take(seen):
                        fetching.say(filling.event(seen.host))
                self._show(view, events)
                interrupts.check()
                if deadline is not None and time.monotonic() > deadline:
                    stands = filling.event("")
                    came = f"{stands.done:,} of {stands.wanted:,} {stands.unit}"
                    raise PoolError(f"exceeded --timeout {limit_s:g}s: --prefill had {came}")

    @contextmanager
    def giving_up(self, view: Viewer) -> Iterator[None]:
        """Has the run end with the block if that fails, before any rank was started."""
        try:
            yield
        except (PoolError, StoreError, KeyboardInterrupt) as error:
            self.state = "INTERRUPTED" if isinstance(error, KeyboardInterrupt) else "FAILED"
            view.feed(self._journal_end(self.state, str(error)))
            view.close()
            raise

    def start(
        self,
        pool: Pool,
        spec: HostSpec,
        said: list[Event],
        view: Viewer,
        interrupts: Interrupts,
    ) -> None:
        """Has the pool start the ranks; shows what is said meanwhile.

        Args:
            pool: The pool.
            spec: A `HostSpec` of the run.
            said: What its fetchers have said before.
            view: Shows the run.
            interrupts: The user's.

        Raises:
            PoolError: It has no hosts for them.
            StoreError: Another run writes to the project store.
            KeyboardInterrupt: The user interrupted twice; what starts all the same is ended.
        """
        try:
            self.hosts = interrupts.attend(
                lambda: self._launch(pool, spec, said),
                patience=2,
                meanwhile=lambda: self._show(view, self._there()),
            )
        except KeyboardInterrupt:
            self._is_left = True
            self._halt(pool, "kill")
            raise

    def _launch(self, pool: Pool, spec: HostSpec, said: list[Event]) -> list[str]:
        hosts = pool.launch(spec, self.put, said)
        if self._is_left:
            self._halt(pool, "kill")
        return hosts

    def follow(self, pool: Pool, view: Viewer, interrupts: Interrupts) -> None:
        """Shows the run until it has ended; blocks, in the thread that runs the cell.

        The first interrupt gives the ranks a grace to end, the second ends them. What has not ended
        soon after that ends by itself; the cell says what it is, and ends.
        """
        interrupts.wake = lambda: self._events.put(None)
        obeyed, leave_at = 0, float("inf")
        checked_at = time.monotonic()
        while self._ended is None:
            self._show(view, self._wait(view, leave_at))
            now = time.monotonic()
            if interrupts.count > obeyed:
                obeyed = interrupts.count
                self._halt(pool, "interrupt" if obeyed == 1 else "kill")
                leave_at = min(leave_at, now + (KILL_WAIT_S if obeyed == 1 else LEAVE_S))
            if now - checked_at > CHECK_S:
                checked_at = now
                self._check(pool, view)
            if now >= leave_at and self._ended is None:
                self._leave(pool)
        view.feed(self._ended)
        view.close()
        pool.forget(self.run_id)

    def conclude(self, namespace: dict[str, Any]) -> None:
        """Brings the results into the notebook; then raises what went wrong.

        What a run that failed left comes, too.

        Raises:
            KeyboardInterrupt: The user interrupted the run.
            ResultError: The run succeeded, but not all that `--out` names could come.
            RunError: The cell failed on a rank.
            RunLost: The hosts, or the pool, are gone.
            StoreError: The project store could not get to a host.
        """
        assert self._ended is not None
        self.failures = [structs.asdict(failure) for failure in self._ended.failures]
        self._bring_results(namespace)
        if self.state == "INTERRUPTED":
            raise interrupted(self._stopped(self._ended.why))
        if self.state != "SUCCEEDED":
            raise self._error(self._ended)
        if self.missing:
            raise self._incomplete()

    def _stopped(self, why: str) -> str:
        came = (
            f"came back all the same: {', '.join(self.out)}" if self.out else "nothing was returned"
        )
        said = f"Stopped by you after {duration(self.elapsed_s)}; {came}."
        return f"{said} {why}" if why else said

    def _bring_results(self, namespace: dict[str, Any]) -> None:
        received = results.receive(self._folder.results, self.plan.out)
        self.result = received.values.pop(VALUE, None)
        self.out, self.missing = received.values, received.missing
        namespace.update(self.out)
        if self.out and self.state not in ("SUCCEEDED", "INTERRUPTED"):
            sys.stdout.write(f"came back all the same (--out): {', '.join(self.out)}\n")

    def _incomplete(self) -> ResultError:
        came = f"; the others are here: {', '.join(self.out)}" if self.out else ""
        return ResultError(
            f"run {self.run_id} succeeded, but not all of --out could come back{came}\n"
            + "\n".join(f"    {name}: {why}" for name, why in self.missing.items())
        )

    def _error(self, ended: RunEnded) -> TaasError:
        labelled = structs.replace(ended, first=with_labels(ended.first, self._labels))
        error = to_exception(labelled)
        assert isinstance(error, RunError | RunLost | StoreError)
        return error

    def _wait(self, view: Viewer, until: float = float("inf")) -> Iterable[Event]:
        """Waits for events, and no longer than until then; returns all that are there."""
        due = min(until, view.next_due() or until)
        timeout_s = min(CHECK_S, max(0.0, due - time.monotonic()))
        try:
            first = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return []
        return [event for event in (first, *self._there()) if event is not None]

    def _there(self) -> list[Event]:
        """All events that have come."""
        events = []
        while not self._events.empty():
            events.append(self._events.get())
        return [event for event in events if event is not None]

    def _show(self, view: Viewer, events: Iterable[Event]) -> None:
        for seen in events:
            if isinstance(seen, StateChanged | RunEnded):
                self.state = seen.state
            if isinstance(seen, RunEnded):
                self._ended, self.elapsed_s = seen, seen.elapsed_s or 0.0
                continue
            if isinstance(seen, StoreReceipt):
                self.receipt = self.receipt.with_event(seen)
            view.feed(seen)
        view.tick(time.monotonic())

    def _halt(self, pool: Pool, how: str) -> None:
        """Has the pool interrupt (`interrupt`) or end (`kill`) the run; does not wait for it."""

        def halt() -> None:
            try:
                pool.halt(self.run_id, how)
            except PoolError as error:
                self.put(Note(text=str(error)))

        threading.Thread(target=halt, name="taas-halt", daemon=True).start()

    def _check(self, pool: Pool, view: Viewer) -> None:
        """Looks whether the pool's process lives and is heard."""
        if not pool.is_alive():
            self._lose("the pool's process is gone")
        elif pool.silent_s > SILENT_LOST_S:
            self._lose(pool.silence())
        elif pool.silent_s > SILENT_NOTE_S and not self._is_silent:
            self._is_silent = True
            said = f"{pool.silence()}; interrupt twice to leave the run"
            view.feed(Note(text=said))

    def _leave(self, pool: Pool) -> None:
        """Ends the wait for an interrupted run; says what of it ends by itself, and when."""
        if not pool.is_alive():
            self._lose("the pool's process is gone")
            return
        why = f"left to end by itself: the ranks on {', '.join(self.hosts)}"
        if pool.silent_s > SILENT_NOTE_S:
            why += f", {pool.config.lease_s:g} s after the pool's last word at the latest: "
            why += pool.silence()
        else:
            why += f"; the pool ends them within {HALT_S:.0f} s, else their host"
        self.state = "INTERRUPTED"
        self._ended = self._end("INTERRUPTED", why)

    def _lose(self, why: str) -> None:
        """Ends a run that cannot report its own end any more."""
        self.state = "LOST"
        self._ended = self._journal_end("LOST", why)

    def _journal_end(self, state: str, why: str = "") -> RunEnded:
        ended = self._end(state, why)
        writer = journal.Writer(self._folder)
        writer.append(ended)
        writer.close()
        return ended

    def _end(self, state: str, why: str) -> RunEnded:
        assert state in ENDED_STATES
        elapsed_s = time.monotonic() - self._began
        return RunEnded(state=state, elapsed_s=elapsed_s, why=why)
