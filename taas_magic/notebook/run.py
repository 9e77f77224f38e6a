"""A run as the notebook holds it: its fetchers, the user's interrupts, how it is followed and ends.

The kernel waits for other processes in threads of its own, so that the user's interrupt, which is
counted and not raised, always ends a wait.
"""

import contextvars
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Generic, TypeVar

from msgspec import structs

from taas_magic.display.head import RunState
from taas_magic.display.view import NoView, View
from taas_magic.errors import (
    PoolError,
    StoreError,
    interrupted,
)
from taas_magic.host.spec import HostSpec, fetcher_failed, share_id
from taas_magic.host.watch import HALT_S
from taas_magic.journal import folder as journal
from taas_magic.journal.analysis import Flow
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import (
    Detach,
    Detached,
    Event,
    FetcherEnded,
    FetcherReport,
    FetcherStarted,
    LoaderPlace,
    Note,
    Prefilling,
    Relay,
    RunEnded,
)
from taas_magic.notebook import heads
from taas_magic.notebook.runs import Run
from taas_magic.plan import Plan
from taas_magic.pool.client import ConnectionEnded, Pool, PoolConnection, Wait

LEAVE_S = 1.2
"""How long something may still take that the user does not wait for any more."""

MEANWHILE_S = 0.25
"""How often what came meanwhile is shown to a user who waits."""

CHECK_S = 1.0
"""How often a run's pool is asked whether it lives, while nothing is heard."""

KILL_WAIT_S = 15.0
"""How long a run that was interrupted once may take to end, before it is left to itself."""

SILENT_NOTE_S = 5.0
"""After how long without a beat of the pool's process the head says so."""

SILENT_LOST_S = 60.0
"""After how long without a beat of the pool's process a run is taken for lost."""

DETACHED = "DETACHED"
"""Title of the head of a run that was detached, where nothing follows it any more."""

_ENDS = ("signal", "exit", "end", "stopped", "host")
"""What `Failure.how` says of a rank whose process has ended, or is about to."""

T = TypeVar("T")
Tell = Callable[[list[str]], None]


class Interrupts:
    """While it is entered, SIGINT is counted and wakes the waiting thread; nothing is raised.

    A KeyboardInterrupt that may arrive between any two instructions would lose an event here and a
    process there. Signals reach the main thread only: in another thread (a subshell of the kernel)
    nothing is installed, and `count` stays 0.

    Attributes:
        count: How often the user interrupted.
        wake: Called on every interrupt; must be safe in a signal handler.
    """

    def __init__(self) -> None:
        self.count = 0
        self.wake: Callable[[], None] = lambda: None
        self._previous: Any = None

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.wake()

    def attend(
        self,
        work: Callable[[], T],
        patience: int = 1,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> T:
        """Do what may wait for another process, in a thread, and return what it returns.

        Args:
            work: What to do; it goes on by itself when the user does not wait for it.
            patience: At how many interrupts that is, once it had LEAVE_S more.
            meanwhile: Called in this thread every MEANWHILE_S until then.

        Raises:
            Exception: What the work raised.
            KeyboardInterrupt: The user has interrupted.
        """
        background = Background(lambda tell: work())
        return background.wait(self, patience=patience, meanwhile=meanwhile, leave_s=LEAVE_S)

    def check(self, patience: int = 1) -> None:
        """Raise KeyboardInterrupt if the user has interrupted so often."""
        if self.count >= patience:
            raise interrupted("Stopped by you before the ranks started; nothing was returned.")


class Background(Generic[T]):
    """Work in a thread of its own that the user may stop waiting for; it goes on then.

    Args:
        work: What to do; it is given what tells the waiting user how it stands, in lines.

    Attributes:
        outcome: What it returns or raises.
    """

    def __init__(self, work: Callable[[Tell], T]) -> None:
        self.outcome: futures.Future[T] = futures.Future()
        self._work = work
        self._news: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        context = contextvars.copy_context()
        self.thread = threading.Thread(
            target=context.run, args=(self._run,), name="taas-background", daemon=True
        )
        self.thread.start()

    def wait(
        self,
        interrupts: Interrupts,
        say: Callable[[str], None] = lambda line: None,
        meanwhile: Callable[[], None] = lambda: None,
        patience: int = 1,
        leave_s: float = 0.0,
    ) -> T:
        """Return what the work returns; `say` is called with each line that is told, once.

        Raises as `Interrupts.attend`, after `leave_s` more.
        """
        interrupts.wake = lambda: self._news.put([])
        said: set[str] = set()
        while interrupts.count < patience:
            is_done = self.outcome.done()  # asked first: all that it told is there then
            try:
                lines = self._news.get(timeout=0 if is_done else MEANWHILE_S)
            except queue.Empty:
                if is_done:
                    break
                meanwhile()
                continue
            for line in lines:
                if line not in said:
                    said.add(line)
                    say(line)
        if not (leave_s and futures.wait([self.outcome], leave_s).done):
            interrupts.check(patience)
        return self.outcome.result()

    def _run(self) -> None:
        try:
            self.outcome.set_result(self._work(self._news.put))
        except BaseException as error:
            self.outcome.set_exception(error)
        self._news.put([])


class Fetching:
    """The fetchers of a run: begun before its ranks, ended after them.

    They may be in another pool than the ranks. What they say is passed on to the ranks' pool, which
    has the run's journal and tells the ranks' hosts where the fetchers listen. They belong to the
    process of their pool on which they were launched, and end with it. When all have ended by
    themselves before, they are started again, as often as `--max-restarts` says.

    Args:
        pool: The pool whose hosts they are on.
        spec: A `HostSpec` of the run, for that pool.
        listen: Called with all that they say before `pass_on`, in any thread.
        waits: Whether to wait for the pool's hosts here; else it is done for the ranks.
    """

    def __init__(
        self, pool: Pool, spec: HostSpec, listen: Callable[[Event], None], waits: bool
    ) -> None:
        self._pool, self._spec, self._listen, self._waits = pool, spec, listen, waits
        self._run_id = spec.plan.run_id
        self._share_id = share_id(self._run_id)
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._relay: threading.Thread | None = None
        self._closing = False
        self._ended: set[int] = set()
        self._restarts = 0
        self._wait = Wait(pool)
        self._connection: PoolConnection | None = None
        self._beginning = Background(self._begin)

    def wait(self, interrupts: Interrupts, say: Callable[[str], None]) -> None:
        """Return when the fetchers have their hosts; `say` is told what they wait for.

        Raises:
            PoolError: They could not be had.
            KeyboardInterrupt: The user did not want to wait.
        """
        self._beginning.wait(interrupts, say)

    def check(self) -> None:
        """Raise ConnectionEnded if the fetchers have ended with their pool's process."""
        if self._connection is not None:
            self._connection.check()

    def say(self, event: Event) -> None:
        """Take what a fetcher said, or what is said of them."""
        if isinstance(event, FetcherStarted):
            self._ended.discard(event.number)
        elif isinstance(event, FetcherEnded) and event.entry:
            self._ended.add(event.number)
            event = self._or_again(event)
        self._listen(event)
        self._events.put(event)

    def _or_again(self, last: FetcherEnded) -> FetcherEnded:
        """Start the fetchers again if none is left; return the end of one as ranks are told it."""
        plan = self._spec.plan
        are_all = plan.data is not None and len(self._ended) == len(plan.data.fetchers)
        if not last.entry or not are_all or self._closing or self._restarts == plan.max_restarts:
            return last
        self._restarts += 1
        count = f"{self._restarts} of {plan.max_restarts}"
        self.say(Note(text=f"all fetchers have ended; they are started again (restart {count})"))
        threading.Thread(target=self._start_again, name="taas-fetchers", daemon=True).start()
        soon = {name: LoaderPlace(fetchers=plan.cpus) for name in last.entry}
        return structs.replace(last, entry=soon)

    def _start_again(self) -> None:
        try:
            self._launch(self.say)
        except PoolError as error:
            plan, self._restarts = self._spec.plan, self._spec.plan.max_restarts
            for fetcher in plan.data.fetchers if plan.data is not None else ():
                self.say(fetcher_failed(plan, fetcher, f"not started again: {error}"))

    def said(self) -> list[Event]:
        """Return what was said since this was asked last."""
        return taken(self._events)

    def pass_on(self, connection: PoolConnection) -> None:
        """Pass on all that is said from now on to the pool's process that runs the ranks."""
        self._listen = lambda event: None
        self._relay = threading.Thread(
            target=self._pass_on, args=(connection,), name="taas-relay", daemon=True
        )
        self._relay.start()

    def close(self, interrupts: Interrupts, is_detached: bool = False) -> None:
        """End the fetchers; where they are still waited for, as soon as they are there.

        At the user's second interrupt they are left to end by themselves.

        Args:
            is_detached: Whether the fetchers go on with their run, which has another owner now.
        """
        self._closing = True
        with suppress(KeyboardInterrupt):
            interrupts.attend(lambda: self._close(is_detached), patience=2)

    def _close(self, is_detached: bool) -> None:
        if not is_detached:
            self._end()
        elif self._connection is not None:
            self._connection.forget(self._share_id)
        self._events.put(None)
        if self._relay is not None:
            self._relay.join()

    def _begin(self, tell: Tell) -> None:
        def listen(event: Event) -> None:
            # The run is not shown before it starts: the waiting user is told what is noted.
            if isinstance(event, Note):
                tell([event.text])
            self.say(event)

        data = self._spec.plan.data
        if self._waits and data is not None:
            self._connection = self._pool.open(data.pool_hosts, tell, self._wait)
        else:
            self._connection = self._pool.connect(wait=self._wait)
        self._launch(listen)

    def _launch(self, listen: Callable[[Event], None]) -> None:
        assert self._connection is not None
        if not self._closing:
            self._connection.launch(structs.replace(self._spec, fetches=True), listen)
        if self._closing:
            self._end()

    def _end(self) -> None:
        self._wait.give_up()
        if self._connection is not None:
            with suppress(PoolError):  # they have ended with their pool's process
                self._connection.forget(self._share_id)
                self._connection.halt(self._share_id, "kill")

    def _pass_on(self, connection: PoolConnection) -> None:
        # the None that ends it may be among events that it takes together
        while not self._closing and (event := self._events.get()) is not None:
            try:
                connection.call(Relay(self._run_id, [event, *self.said()]))
            except PoolError:
                return  # the run is lost, and says so itself


class Filling:
    """How far a run's fetchers have come, before its ranks start, of what `--prefill` asks for.

    Args:
        flow: What they say, added up.
    """

    def __init__(self, plan: Plan, flow: Flow) -> None:
        assert plan.prefill is not None and plan.data is not None
        self._flow = flow
        self._unit, self._fetchers = plan.prefill.unit, len(plan.data.fetchers)
        bound = len(plan.data.loaders) * (plan.units or 0)
        self.wanted = bound if self._unit == "all" else plan.prefill.amount

    @property
    def done(self) -> int:
        """How much is ready, in memory and on disk."""
        if self._unit == "bytes":
            return self._sum("ready_bytes") + self._sum("spilled_bytes")
        return self._sum("ready")

    @property
    def is_enough(self) -> bool:
        """Whether ranks may start.

        They may, too, when no worker can prepare more: there is no more room, or no more data. And
        when every fetcher has ended, since ranks can say what that means for them.
        """
        ended = self._flow.fetchers_ended
        if self.done >= self.wanted or len(ended) >= self._fetchers:
            return True
        said = ended.union(*(loader.fetchers for loader in self._flow.loaders.values()))
        return len(said) >= self._fetchers and self._sum("idle") >= self._sum("workers")

    def event(self, host: str) -> Prefilling:
        """Return what is said of it, when a fetcher of that host has come further."""
        unit = "bytes" if self._unit == "bytes" else "batches"
        return Prefilling(host=host, done=self.done, wanted=self.wanted, unit=unit)

    def _sum(self, name: str) -> int:
        return int(sum(loader.stock(name) for loader in self._flow.loaders.values()))


def taken(events: "queue.SimpleQueue[Event | None]") -> list[Event]:
    """Return all events that have come, without the None by which a queue is woken."""
    found = []
    while not events.empty():
        if (event := events.get()) is not None:
            found.append(event)
    return found


class RunDriver:
    """Starts a run, shows it until it has ended, and brings its results; lives in its kernel.

    Attributes:
        run: The run, as users see it.
        plan: What was decided before it started.
        head: What its events came to; the head above its log shows it.
        hosts: Names of the hosts of its first attempt, by their ranks.
        is_detached: Whether the run goes on without this kernel.
    """

    def __init__(self, head: RunState) -> None:
        self.head, self.plan = head, head.plan
        self.run_id, self.path = head.plan.run_id, head.run_dir
        self.run = Run(head.run_dir, live=head)
        self.hosts: list[str] = []
        self.is_detached = False
        self.listener: Callable[[Event], None] = lambda event: None
        """Called with each event, in the thread that runs the cell."""
        self._folder = RunFolder(self.path)
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._ended: RunEnded | None = None
        self._is_left = self._is_silent = False

    def discard(self) -> None:
        """Remove its folder: it was never started."""
        self._folder.discard()

    def put(self, event: Event) -> None:
        """Take an event; called by any thread."""
        self._events.put(event)

    def fill(self, fetching: Fetching, view: View | NoView, interrupts: Interrupts) -> None:
        """Show how fetchers prepare what `--prefill` asks for; return when it is there.

        Raises:
            ConnectionEnded: The pool's process that has the fetchers has ended.
            PoolError: It was not there in `--timeout`.
            KeyboardInterrupt: The user did not want to wait.
        """
        filling, limit_s = Filling(self.plan, self.head.flow), self.plan.timeout_s
        deadline = time.monotonic() + limit_s if limit_s is not None else None
        interrupts.wake = lambda: self._events.put(None)
        while not filling.is_enough:
            self._show(view, events := list(self._wait(view)))
            for seen in events:
                if isinstance(seen, FetcherReport):
                    fetching.say(filling.event(seen.host))
            interrupts.check()
            fetching.check()
            if deadline is not None and time.monotonic() > deadline:
                stands = filling.event("")
                came = f"{stands.done:,} of {stands.wanted:,} {stands.unit}"
                raise PoolError(f"exceeded --timeout {limit_s:g}s: --prefill had {came}")

    @contextmanager
    def giving_up(self, view: View | NoView) -> Iterator[None]:
        """End the run if the block fails, before any rank was started."""
        try:
            yield
        except (PoolError, StoreError, KeyboardInterrupt) as error:
            state = "INTERRUPTED" if isinstance(error, KeyboardInterrupt) else "FAILED"
            state = "LOST" if isinstance(error, ConnectionEnded) else state
            view.feed(self._finish(state, str(error)))
            view.close()
            raise

    def start(
        self,
        connection: PoolConnection,
        spec: HostSpec,
        said: list[Event],
        view: View | NoView,
        interrupts: Interrupts,
    ) -> None:
        """Have the pool start the ranks; show what is said meanwhile.

        `said` is what its fetchers have said before.

        Raises:
            ConnectionEnded: The pool's process has ended.
            PoolError: It has no hosts for them.
            StoreError: Another run writes to the project store.
            KeyboardInterrupt: The user interrupted twice; what starts all the same is ended.
        """

        def launch() -> list[str]:
            hosts = connection.launch(spec, self.put, said)
            if self._is_left:
                self._halt(connection, "kill")
            return hosts

        try:
            self.hosts = interrupts.attend(
                launch, patience=2, meanwhile=lambda: self._show(view, taken(self._events))
            )
        except KeyboardInterrupt:
            self._is_left = True
            self._halt(connection, "kill")
            raise

    def follow(
        self,
        connection: PoolConnection,
        view: View | NoView,
        interrupts: Interrupts,
        detaches: bool = False,
    ) -> None:
        """Show the run until it has ended or is detached; blocks, in the thread that runs the cell.

        `connection` is the one on which the run was started: the run ends with it.

        The first interrupt gives the ranks a grace to end, the second ends them. What has not ended
        soon after that ends by itself; the cell says what it is, and ends.
        """
        interrupts.wake = lambda: self._events.put(None)
        obeyed, leave_at = 0, float("inf")
        checked_at = time.monotonic()
        while self._ended is None and not self.is_detached:
            self._show(view, self._wait(view, leave_at))
            if detaches and len(self.head.up) == self.head.world_size:
                detaches = False
                self._detach(connection)
            now = time.monotonic()
            if interrupts.count > obeyed:
                obeyed = interrupts.count
                self._halt(connection, "interrupt" if obeyed == 1 else "kill")
                leave_at = min(leave_at, now + (KILL_WAIT_S if obeyed == 1 else LEAVE_S))
            if now - checked_at > CHECK_S or now >= leave_at:
                checked_at = now
                self._check(connection, view)
            if now >= leave_at and self._ended is None:
                self._leave(connection)
        connection.forget(self.run_id)
        if self._ended is None:
            if isinstance(view, View):
                heads.leave(self.run, view, self.head, DETACHED)
            self.run.live = None  # from now on its journal tells of it
            return
        view.feed(self._ended)
        view.close()

    def conclude(self, namespace: dict[str, Any]) -> None:
        """Bring the results into the notebook; then raise what went wrong, as `Run.wait` does.

        What a run that failed left comes, too. A run that was detached is left alone.
        """
        if self.is_detached:
            return
        out = self.run.out
        namespace.update(out)
        sys.stdout.writelines(f"{note}\n" for note in self.run.result_notes)
        if out and self.run.state not in ("SUCCEEDED", "INTERRUPTED"):
            sys.stdout.write(f"returned although the run failed (--out): {', '.join(out)}\n")
        self.run.raise_failure()

    @property
    def has_lost_rank(self) -> bool:
        """Whether one of its ranks has ended as a process, or its host is gone."""
        if self._ended is None:
            return False
        return self._ended.state == "LOST" or any(it.how in _ENDS for it in self._ended.failures)

    def cell_text(self) -> str:
        """Return the cell as the user sees it."""
        return (self.path / "cell.py").read_text(encoding="utf-8")

    def _wait(self, view: View | NoView, until: float = float("inf")) -> Iterable[Event]:
        """Wait for events, and no longer than until then; return all that are there."""
        due = min(until, view.next_due())
        timeout_s = min(CHECK_S, max(0.0, due - time.monotonic()))
        try:
            first = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return []
        return [*([] if first is None else [first]), *taken(self._events)]

    def _show(self, view: View | NoView, events: Iterable[Event]) -> None:
        for seen in events:
            self.listener(seen)
            if isinstance(seen, RunEnded):
                self._ended = seen
            else:
                self.is_detached = self.is_detached or isinstance(seen, Detached)
                view.feed(seen)
        view.tick(time.monotonic())

    def _detach(self, connection: PoolConnection) -> None:
        """Have the pool's process take the run over; it says so by an event, or a note why not."""

        def detach() -> None:
            try:
                why = connection.call(Detach(self.run_id))
            except PoolError as error:
                why = str(error)
            if why:
                self.put(Note(text=f"--detach: {why}; the run ends with this kernel"))

        threading.Thread(target=detach, name="taas-detach", daemon=True).start()

    def _halt(self, connection: PoolConnection, how: str) -> None:
        """Have the pool interrupt (`interrupt`) or end (`kill`) the run; do not wait for it."""

        def halt() -> None:
            try:
                connection.halt(self.run_id, how)
            except ConnectionEnded:
                return  # the run has ended with it, and says so itself
            except PoolError as error:
                self.put(Note(text=str(error)))

        threading.Thread(target=halt, name="taas-halt", daemon=True).start()

    def _check(self, connection: PoolConnection, view: View | NoView) -> None:
        """End the run if the pool's process that has it has ended, or is not heard any more."""
        if connection.is_over:
            # a process that lives ends the run itself, and says so in the journal
            in_journal = not connection.process.is_alive()
            self._ended = self._finish("LOST", connection.why, in_journal)
        elif connection.silent_s > SILENT_LOST_S:
            self._ended = self._finish("LOST", connection.silence())
        elif connection.silent_s > SILENT_NOTE_S and not self._is_silent:
            self._is_silent = True
            view.feed(Note(text=f"{connection.silence()}; interrupt twice to leave the run"))

    def _leave(self, connection: PoolConnection) -> None:
        """End the wait for an interrupted run; say what of it ends by itself, and when."""
        # after a restart they may be others than at first
        hosts = ", ".join(self.head.hosts or self.hosts)
        why = f"ranks on {hosts} are still stopping; "
        if connection.silent_s > SILENT_NOTE_S:
            lease = f"{connection.config.lease_s:g} s after the pool's last sign of life"
            why += f"they are killed at the latest {lease}: {connection.silence()}"
        else:
            why += f"they are killed within {HALT_S:.0f} s"
        self._ended = self._finish("INTERRUPTED", why, in_journal=False)

    def _finish(self, state: str, why: str, in_journal: bool = True) -> RunEnded:
        """Conclude what cannot report its own end; in the journal, unless its pool goes on."""
        elapsed_s = self.head.elapsed(time.monotonic())
        attempt = self.head.restarts
        ended = RunEnded(state=state, elapsed_s=elapsed_s, why=why, attempt=attempt)
        if in_journal:
            writer = journal.Writer(self._folder)
            writer.append(ended)
            writer.close()
        return ended
