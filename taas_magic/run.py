"""A run as the notebook holds it: follow it, interrupt it, and ask it what it made."""

import queue
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from taas_magic import journal
from taas_magic.capture import pickling
from taas_magic.display.failure import to_exception
from taas_magic.errors import PoolError, RunError, RunLost, StoreError, TaasError
from taas_magic.fetching import Fetching
from taas_magic.interrupts import Interrupts
from taas_magic.journal import ENDED_STATES, Event, RunFolder, event
from taas_magic.plan import Plan
from taas_magic.pool import Pool
from taas_magic.receipt import Receipt
from taas_magic.remote.filling import Filling
from taas_magic.remote.spec import VALUE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHECK_S = 1.0
"""How often a run's pool is asked whether it lives, while nothing is heard."""

KILL_WAIT_S = 15.0
"""How long a run that was ended may take to say so."""


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
        path: Its folder; see `taas_magic.journal`.
        state: STARTING, RUNNING, SUCCEEDED, FAILED, INTERRUPTED or LOST.
        failures: What went wrong on which rank, the first failure first.
        hosts: Names of the hosts that ran it.
        result: The value of the cell's last expression on rank 0, if it could travel.
        out: The variables that `--out` brought back.
        elapsed_s: Seconds that it took.
        receipt: What rank 0 wrote to the project store, and what was kept out of it.
    """

    def __init__(self, plan: Plan, folder: RunFolder) -> None:
        self.run_id, self.plan, self.path = plan.run_id, plan, folder.path
        self.state = "STARTING"
        self.hosts: list[str] = []
        self.failures: list[dict[str, Any]] = []
        self.result: Any = None
        self.out: dict[str, Any] = {}
        self.elapsed_s = 0.0
        self.receipt = Receipt()
        self._folder = folder
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._ended: Event | None = None

    def __repr__(self) -> str:
        return f"<Run {self.run_id} {self.plan.name or ''}: {self.state}, {self.path}>"

    def logs(self, rank: int = 0) -> str:
        """All that a rank wrote to its standard output and error."""
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
                        fetching.say(event("filling", seen["host"], **filling.fields))
                self._show(view, events)
                interrupts.check()
                if deadline is not None and time.monotonic() > deadline:
                    raise PoolError(f"--timeout came while data was prepared: {filling.fields}")

    @contextmanager
    def giving_up(self, view: Viewer) -> Iterator[None]:
        """Has the run end with the block if that fails, before any rank was started."""
        try:
            yield
        except (PoolError, KeyboardInterrupt) as error:
            self.state = "INTERRUPTED" if isinstance(error, KeyboardInterrupt) else "FAILED"
            view.feed(self._journal_end(self.state, str(error)))
            view.close()
            raise

    def start(self, pool: Pool, spec: dict[str, Any], said: list[Event]) -> None:
        """Has the pool start the ranks.

        Args:
            pool: The pool.
            spec: A `HostSpec` of the run as plain values.
            said: What its fetchers have said before.

        Raises:
            PoolError: It has no hosts for them.
            StoreError: Another run writes to the project store.
        """
        try:
            self.hosts = pool.launch(spec, self.put, said)
        except (PoolError, StoreError):
            self.state = "FAILED"
            self._journal_end("FAILED")
            raise

    def follow(self, pool: Pool, view: Viewer, interrupts: Interrupts) -> None:
        """Shows the run until it has ended; blocks, in the thread that runs the cell.

        The first interrupt gives the ranks a grace to end, the next ones end them. However often
        it is interrupted, it stays until the run says that nothing is left, or cannot be reached.
        """
        interrupts.wake = lambda: self._events.put(None)
        obeyed, give_up_at = 0, float("inf")
        quiet_since = time.monotonic()
        while self._ended is None:
            self._show(view, self._wait(view))
            now = time.monotonic()
            if interrupts.count > obeyed:
                obeyed = interrupts.count
                self._halt(pool, "interrupt" if obeyed == 1 else "kill")
                give_up_at = min(give_up_at, now + KILL_WAIT_S)
            if now - quiet_since > CHECK_S:
                quiet_since = now
                if not pool.is_alive():
                    self._lose("the pool's process is gone")
            if now > give_up_at:
                self._lose(f"the pool did not end it within {KILL_WAIT_S:.0f} s")
        view.feed(self._ended)
        view.close()
        pool.forget(self.run_id)

    def conclude(self, namespace: dict[str, Any]) -> None:
        """Brings the results into the notebook, or raises what went wrong.

        Raises:
            KeyboardInterrupt: The user interrupted the run.
            RunError: The cell failed on a rank.
            RunLost: The hosts, or the pool, are gone.
            StoreError: The project store could not get to a host.
        """
        assert self._ended is not None
        self.failures = self._ended["failures"]
        if self.state == "INTERRUPTED":
            raise KeyboardInterrupt(f"run {self.run_id} was interrupted")
        if self.state != "SUCCEEDED":
            raise self._error(self._ended)
        if self._folder.result.exists():
            archive = pickling.read(self._folder.result)
            values = pickling.loads(archive.stream(), archive.buffers)
            self.result = values.pop(VALUE, None)
            self.out = values
            namespace.update(values)

    def _error(self, ended: Event) -> TaasError:
        error = to_exception(ended)
        assert isinstance(error, RunError | RunLost | StoreError)
        return error

    def _wait(self, view: Viewer) -> Iterable[Event]:
        """Waits for events; returns all that are there."""
        due = view.next_due()
        timeout_s = CHECK_S if due is None else min(CHECK_S, max(0.0, due - time.monotonic()))
        try:
            events = [self._events.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        while not self._events.empty():
            events.append(self._events.get())
        return [event for event in events if event is not None]

    def _show(self, view: Viewer, events: Iterable[Event]) -> None:
        for seen in events:
            if seen["kind"] in ("state", "ended"):
                self.state = seen["state"]
            if seen["kind"] == "ended":
                self._ended, self.elapsed_s = seen, seen["elapsed_s"]
            elif seen["kind"] == "receipt":
                self.receipt = self.receipt.with_event(seen)
                view.feed(seen)
            else:
                view.feed(seen)
        view.tick(time.monotonic())

    def _halt(self, pool: Pool, how: str) -> None:
        try:
            pool.halt(self.run_id, how)
        except PoolError as error:
            self._lose(str(error))

    def _lose(self, why: str) -> None:
        """Ends a run that cannot report its own end any more."""
        self.state = "LOST"
        self._ended = self._journal_end("LOST", why)

    def _journal_end(self, state: str, why: str = "") -> Event:
        assert state in ENDED_STATES
        elapsed_s = time.time() - (self.path / "plan.json").stat().st_mtime
        ended = event("ended", state=state, failures=[], first=None, elapsed_s=elapsed_s, why=why)
        writer = journal.Writer(self._folder)
        writer.append(ended)
        writer.close()
        return ended
