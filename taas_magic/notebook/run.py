"""Start a run from the notebook, follow it to its end, and handle its fetchers and interrupts.

In the kernel's main thread, an interrupt (SIGINT) of the user raises no KeyboardInterrupt at once.
This code counts the interrupts, and reacts to them at safe points. Calls that may wait for other
processes run in separate threads. So the main thread can stop waiting after an interrupt.
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

from IPython.core.getipython import get_ipython

from taas_magic.display.head import RunState
from taas_magic.display.view import SilentView, View
from taas_magic.errors import (
    PoolError,
    StoreError,
    interrupted,
)
from taas_magic.host.spec import RunSpec, fetchers_share_id
from taas_magic.host.watch import HALT_S
from taas_magic.journal import folder as journal
from taas_magic.journal.analysis import RunCounts
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import (
    Detach,
    Detached,
    Event,
    FetcherEnded,
    FetcherReport,
    ForwardEvents,
    Halt,
    InputRequested,
    Note,
    Prefilling,
    Request,
    Restart,
    RunEnded,
)
from taas_magic.notebook import heads, keyboard
from taas_magic.notebook.runs import Run
from taas_magic.plan import Plan
from taas_magic.pool.client import ConnectionEnded, Pool, PoolConnection, PoolWait

LEAVE_S = 1.2
"""Seconds that a cell still waits after the interrupt by which the user ends the cell.

During this time, a call in the background, or the run itself, may end. After this time, the cell
ends although the call or the run continues.
"""

MEANWHILE_S = 0.25
"""Seconds between updates of the view while a cell waits for a call in the background."""

CHECK_S = 1.0
"""Minimum seconds between checks whether the process of a run's pool is alive."""

KILL_WAIT_S = 15.0
"""Seconds that a cell waits for its run to end after the user's first interrupt.

Then the cell ends, although its ranks may still be stopping.
"""

SHUTDOWN_WAIT_S = 1.0
"""Seconds for which a kernel defers the first interrupt of a cell of a detached session.

Before Jupyter restarts or shuts down a kernel, it interrupts the kernel. If the request to shut
down arrives within this time, the cell continues without the kernel.
"""

SILENT_NOTE_S = 5.0
"""Seconds without a heartbeat of the pool's process after which the status header shows a note."""

SILENT_LOST_S = 60.0
"""Seconds without a heartbeat of the pool's process after which the run counts as lost."""

DETACHED = "DETACHED"
"""Title of the status header of a detached run."""

_SHUTDOWN_POLL_S = 0.02
_ENDS = ("signal", "exit", "end", "stopped", "host")
"""Values of `Failure.how` for a lost host, or for a rank whose process has ended or soon ends."""

T = TypeVar("T")
ShowLines = Callable[[list[str]], None]


class Interrupts:
    """A context manager that counts SIGINT instead of raising KeyboardInterrupt.

    Python can raise a KeyboardInterrupt between any two instructions. Such an exception could lose
    an event, or leave a process without an owner. If any thread except the main thread enters the
    context, `count` stays 0.

    Attributes:
        count: Number of interrupts since the context was entered.
        wake: Function that the signal handler calls after every interrupt, to wake the thread that
            waits. The function must be safe in a signal handler.
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

    def wait_for(
        self,
        work: Callable[[], T],
        max_interrupts: int = 1,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> T:
        """Run `work` in a thread, wait for it, and return its result.

        Args:
            work: Function that may wait for another process. If the user ends this call by
                interrupts, the function continues in its thread.
            max_interrupts: Number of interrupts that end the wait. After the last of these
                interrupts, the function still has `LEAVE_S` seconds to return.
            meanwhile: Function called in this thread every `MEANWHILE_S` seconds during the wait.

        Raises:
            Exception: The exception that the function raised.
            KeyboardInterrupt: The user ended the wait.
        """
        background = BackgroundCall(lambda show_lines: work())
        return background.wait(
            self, max_interrupts=max_interrupts, meanwhile=meanwhile, leave_s=LEAVE_S
        )

    def raise_if_interrupted(self, max_interrupts: int = 1) -> None:
        """Raise KeyboardInterrupt if the user has interrupted `max_interrupts` times or more.

        Call this only before the ranks start, because the message says that they have not started.
        """
        if self.count >= max_interrupts:
            raise interrupted("Stopped by you before the ranks started; nothing was returned.")


class BackgroundCall(Generic[T]):
    """A function call in a separate thread. The call starts when the object is created.

    If the user stops waiting for the result, the call continues in its thread.

    Args:
        work: Function to call. It gets one argument: a function to which it may pass lists of
            lines about its progress. `wait` shows these lines to the user.

    Attributes:
        outcome: Future of the function's result or exception.
    """

    def __init__(self, work: Callable[[ShowLines], T]) -> None:
        self.outcome: futures.Future[T] = futures.Future()
        self._work = work
        self._progress_lines: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        context = contextvars.copy_context()
        self.thread = threading.Thread(
            target=context.run, args=(self._run,), name="taas-background", daemon=True
        )
        self.thread.start()

    def wait(
        self,
        interrupts: Interrupts,
        show_line: Callable[[str], None] = lambda line: None,
        meanwhile: Callable[[], None] = lambda: None,
        max_interrupts: int = 1,
        leave_s: float = 0.0,
    ) -> T:
        """Wait until the function has returned, show its progress, and return its result.

        While the user has interrupted fewer than `max_interrupts` times, continue the wait. After
        the last of these interrupts, give the function `leave_s` more seconds, then end the wait.

        Args:
            interrupts: The user's interrupts. Interrupts before this call count, too.
            show_line: Function called once with each different line of progress.
            meanwhile: Function called in this thread when no line of progress has arrived for
                `MEANWHILE_S` seconds.
            max_interrupts: Number of interrupts that end the wait.
            leave_s: Seconds to wait for the function after the last of these interrupts. If the
                function returns in this time, return its result.

        Raises:
            Exception: The exception that the function raised.
            KeyboardInterrupt: The user ended the wait.
        """
        interrupts.wake = lambda: self._progress_lines.put([])
        said: set[str] = set()
        while interrupts.count < max_interrupts:
            # Read `is_done` before the queue: if it is True, the queue has all lines of progress.
            is_done = self.outcome.done()
            try:
                lines = self._progress_lines.get(timeout=0 if is_done else MEANWHILE_S)
            except queue.Empty:
                if is_done:
                    break
                meanwhile()
                continue
            for line in lines:
                if line not in said:
                    said.add(line)
                    show_line(line)
        if not (leave_s and futures.wait([self.outcome], leave_s).done):
            interrupts.raise_if_interrupted(max_interrupts)
        return self.outcome.result()

    def _run(self) -> None:
        try:
            self.outcome.set_result(self._work(self._progress_lines.put))
        except BaseException as error:
            self.outcome.set_exception(error)
        self._progress_lines.put([])


class RunFetchers:
    """The fetchers of a run, as seen by the kernel.

    The fetchers start before the ranks of the run, and end after the ranks. They may run in another
    pool than the ranks. This class forwards the fetchers' events to the pool of the ranks, for the
    run's journal and for the ranks' hosts.

    If all fetchers of the run have ended, their pool's process starts them again, up to
    `--max-restarts` times. If the pool's process ends, the fetchers end, too. In a session, the
    fetchers stay after the cell, and start again at most once for each cell.

    Args:
        pool: Pool that runs the fetchers.
        spec: The run.
        listen: Function that receives each event of the fetchers until `forward_events` is called.
            Any thread may call the function.
        waits: Whether to wait for the hosts of the fetchers' pool. False if the ranks use the same
            pool, because then the caller waits for the hosts of this pool.
    """

    def __init__(
        self, pool: Pool, spec: RunSpec, listen: Callable[[Event], None], waits: bool
    ) -> None:
        self._pool, self._spec, self._listen, self._waits = pool, spec, listen, waits
        self._run_id = spec.plan.run_id
        self._share_id = fetchers_share_id(self._run_id)
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._forwarding_thread: threading.Thread | None = None
        self._closing = False
        self._pool_wait = PoolWait(pool)
        self.connection: PoolConnection | None = None
        """Connection to the process of the fetchers' pool; None before it is open."""

        self._start_call = BackgroundCall(self._start)

    def wait_for_start(self, interrupts: Interrupts, show_line: Callable[[str], None]) -> None:
        """Wait until the fetchers have been started; pass lines of progress to `show_line`.

        Raises:
            PoolError: The pool could not get the hosts.
            KeyboardInterrupt: The user interrupted the wait.
        """
        self._start_call.wait(interrupts, show_line)

    def raise_if_ended(self) -> None:
        """Raise ConnectionEnded if the fetchers have ended because their pool's process ended."""
        if self.connection is not None:
            self.connection.raise_if_ended()

    def record_event(self, event: Event) -> None:
        """Pass an event about a fetcher to `listen`, and queue the event for the ranks' pool.

        `forward_events` or the caller of `pop_events` sends the queued events to that pool.
        """
        self._listen(event)
        self._events.put(event)

    def pop_events(self) -> list[Event]:
        """Remove and return the fetchers' events that the ranks' pool has not received yet."""
        return drain_events(self._events)

    def forward_events(self, connection: PoolConnection, run_id: str = "") -> None:
        """Start a thread that sends the fetchers' further events to the process of the ranks' pool.

        The thread also sends queued events. From now on, `listen` gets no more events.

        Args:
            connection: Connection to the process of the ranks' pool.
            run_id: Id of the run whose journal gets the events; "" for the run of these fetchers.
        """
        self._listen = lambda event: None
        self._forwarding_thread = threading.Thread(
            target=self._forward_events,
            args=(connection, run_id or self._run_id),
            name="taas-relay",
            daemon=True,
        )
        self._forwarding_thread.start()

    @property
    def pool(self) -> str:
        """Name of the pool that runs the fetchers."""
        return self._pool.name

    def detach(self) -> None:
        """Stop receiving the fetchers' events, and leave the fetchers running.

        Call this after another kernel has taken over the session that uses the fetchers.
        """
        self._close(is_detached=True)

    def end(self) -> list[Event]:
        """End the fetchers, and wait until their pool's process has confirmed it.

        Call this when no rank of the session needs the fetchers any more. If the pool's process has
        ended, do not wait, because the fetchers have ended with this process.

        Returns:
            A `FetcherEnded` event for each fetcher.
        """
        self._close(is_detached=False)
        data = self._spec.plan.data
        return [FetcherEnded(number=it.number) for it in (data.fetchers if data else ())]

    def close(self, interrupts: Interrupts, is_detached: bool = False) -> None:
        """Request the end of the fetchers, and wait for the response of their pool's process.

        Fetchers that are still starting end as soon as they have started. If the user interrupts
        twice, do not wait for the response.

        Args:
            interrupts: The user's interrupts.
            is_detached: Whether the run was detached. If True, leave the fetchers running, and only
                stop receiving their events.
        """
        with suppress(KeyboardInterrupt):
            interrupts.wait_for(lambda: self._close(is_detached), max_interrupts=2)

    def _close(self, is_detached: bool) -> None:
        """Stop receiving the fetchers' events. Unless `is_detached` is True, kill the fetchers.

        Before a kill, cancel the wait for the fetchers' hosts. Finally, with or without a kill, end
        the thread that forwards events to the ranks' pool, and wait until the thread has ended.
        """
        self._closing = True
        if not is_detached:
            self._kill()
        elif self.connection is not None:
            self.connection.stop_events(self._share_id)
        self._events.put(None)
        if self._forwarding_thread is not None:
            self._forwarding_thread.join()

    def _start(self, show_lines: ShowLines) -> None:
        """Get hosts for the fetchers, and start the fetchers there. Call this in a separate thread.

        If `waits` is False, connect to the pool, but do not wait for hosts. Record each event of
        the fetchers, and also pass notes to `show_lines`. If `close` was called before the start,
        do not start the fetchers. If `close` was called during the start, kill the fetchers.
        """

        def listen(event: Event) -> None:
            # The run has no view before it starts, so show notes to the waiting user here.
            if isinstance(event, Note):
                show_lines([event.text])
            self.record_event(event)

        data = self._spec.plan.data
        if self._waits and data is not None:
            self.connection = self._pool.open(data.pool_hosts, show_lines, self._pool_wait)
        else:
            self.connection = self._pool.connect(wait=self._pool_wait)
        if not self._closing:
            self.connection.launch_fetchers(self._spec, listen)
        if self._closing:
            self._kill()

    def _kill(self) -> None:
        """Stop waiting for the fetchers' hosts, stop receiving events, and kill the fetchers."""
        self._pool_wait.cancel()
        if self.connection is not None:
            with suppress(PoolError):  # the pool's process has ended, and so have the fetchers
                self.connection.stop_events(self._share_id)
                self.connection.halt(self._share_id, "kill")

    def _forward_events(self, connection: PoolConnection, run_id: str) -> None:
        # `pop_events` may remove the None that ends this loop, so `_closing` also ends the loop.
        while not self._closing and (event := self._events.get()) is not None:
            try:
                connection.call(ForwardEvents(run_id, [event, *self.pop_events()]))
            except PoolError:
                return  # the run is lost; `RunDriver` reports it


class PrefillProgress:
    """The progress of `--prefill`: data that fetchers prepare before the ranks start.

    Args:
        plan: Plan of the run, with the amount of `--prefill`.
        run_counts: Counts of prepared batches that the fetchers report. The caller updates this
            object during the run.

    Attributes:
        wanted: Amount of data to prepare, in batches, or in bytes if `--prefill` is a size.
    """

    def __init__(self, plan: Plan, run_counts: RunCounts) -> None:
        assert plan.prefill is not None and plan.data is not None
        self._run_counts = run_counts
        self._unit, self._fetchers = plan.prefill.unit, len(plan.data.fetchers)
        bound = len(plan.data.loaders) * (plan.units or 0)
        self.wanted = bound if self._unit == "all" else plan.prefill.amount

    @property
    def done(self) -> int:
        """Amount of data that fetchers have prepared, in the same unit as `wanted`."""
        return self._sum("ready_bytes" if self._unit == "bytes" else "ready")

    @property
    def is_enough(self) -> bool:
        """Whether the ranks may start.

        The ranks may start if the wanted amount is ready, or if no worker can prepare more, because
        the memory is full or the data has ended. If all fetchers have ended, the ranks start and
        report the error.
        """
        ended = self._run_counts.fetchers_ended
        if self.done >= self.wanted or len(ended) >= self._fetchers:
            return True
        said = ended.union(*(loader.fetchers for loader in self._run_counts.loaders.values()))
        return len(said) >= self._fetchers and self._sum("idle") >= self._sum("workers")

    def event(self, host: str) -> Prefilling:
        """Return an event with the amount of prepared data and the wanted amount.

        Args:
            host: Name of the host whose fetcher reported the progress; "" if unknown.
        """
        unit = "bytes" if self._unit == "bytes" else "batches"
        return Prefilling(host=host, done=self.done, wanted=self.wanted, unit=unit)

    def _sum(self, name: str) -> int:
        return int(sum(loader.fetcher_total(name) for loader in self._run_counts.loaders.values()))


def drain_events(events: "queue.SimpleQueue[Event | None]") -> list[Event]:
    """Remove all items from a queue, and return the events among them.

    A None among the items only wakes the thread that reads the queue.
    """
    found = []
    while not events.empty():
        if (event := events.get()) is not None:
            found.append(event)
    return found


def _is_shut_down(interrupts: Interrupts) -> bool:
    """Wait until the kernel is asked to shut down, and return True; return False if it is not.

    The wait ends after `SHUTDOWN_WAIT_S` seconds, or when the user interrupts a second time. The
    kernel's control thread receives the request, and sets the shell's `exit_now`.
    """
    until = time.monotonic() + SHUTDOWN_WAIT_S
    while interrupts.count == 1 and time.monotonic() < until:
        if getattr(get_ipython(), "exit_now", False):
            return True
        time.sleep(_SHUTDOWN_POLL_S)
    return False


class RunDriver:
    """The kernel's side of a run: starts the run, shows the run, and stores its results.

    Attributes:
        run: The `Run` object that users get as `taas.last_run`.
        head: State of the run, computed from its events. The status header shows this state.
        hosts: Names of the hosts of the first attempt, in the order of their ranks.
        is_detached: Whether the run continues without this kernel.
        has_left: Whether the user has left the run by interrupts, and the end of the run is not
            known yet.
    """

    def __init__(self, head: RunState) -> None:
        self.head, self.plan = head, head.plan
        self.run_id, self.path = head.plan.run_id, head.run_dir
        self.run = Run(head.run_dir, live=head)
        self.hosts: list[str] = []
        self.is_detached = self.has_left = False
        self.listener: Callable[[Event], None] = lambda event: None
        """Function called with each event of the run, in the thread that runs the cell."""
        self._folder = RunFolder(self.path)
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._inputs = keyboard.InputQueue()
        self._ended: RunEnded | None = None
        self._is_abandoned = self._is_silent = False
        self._voids_input = False
        """Whether an event is queued after which no rank waits for the user's input any more."""

    def discard(self) -> None:
        """Remove the folder of a run that was never started."""
        self._folder.discard()

    def queue_event(self, event: Event) -> None:
        """Queue an event of the run for the thread that runs the cell. Any thread may call this."""
        self._voids_input |= isinstance(event, RunEnded | Detached | Restart)
        self._events.put(event)

    def wait_for_prefill(
        self, fetching: RunFetchers, view: View | SilentView, interrupts: Interrupts
    ) -> None:
        """Wait until fetchers have prepared what `--prefill` asks for, or can prepare no more.

        Show the progress in the view. Also queue events with the progress for the ranks' pool,
        which writes them to the run's journal.

        Raises:
            ConnectionEnded: The process of the fetchers' pool has ended.
            PoolError: The fetchers did not prepare enough within `--timeout`.
            KeyboardInterrupt: The user interrupted the wait.
        """
        prefill, limit_s = PrefillProgress(self.plan, self.head.run_counts), self.plan.timeout_s
        deadline = time.monotonic() + limit_s if limit_s is not None else None
        interrupts.wake = lambda: self._events.put(None)
        while not prefill.is_enough:
            self._show_events(view, events := list(self._next_events(view)))
            for seen in events:
                if isinstance(seen, FetcherReport):
                    fetching.record_event(prefill.event(seen.host))
            interrupts.raise_if_interrupted()
            fetching.raise_if_ended()
            if deadline is not None and time.monotonic() > deadline:
                progress = prefill.event("")
                came = f"{progress.done:,} of {progress.wanted:,} {progress.unit}"
                raise PoolError(f"{self.plan.timeout_text}; --prefill had {came}")

    @contextmanager
    def ending_on_error(self, view: View | SilentView) -> Iterator[None]:
        """If the `with` block fails, record and show the run's end, and raise the block's error.

        Use this context manager for the part of the run before the ranks start. It records the end
        in the run's journal, and closes the view. The state is INTERRUPTED after a
        KeyboardInterrupt, LOST after a ConnectionEnded, and FAILED after a StoreError or any other
        PoolError. After an error of any other type, record nothing.
        """
        try:
            yield
        except (PoolError, StoreError, KeyboardInterrupt) as error:
            state = "INTERRUPTED" if isinstance(error, KeyboardInterrupt) else "FAILED"
            state = "LOST" if isinstance(error, ConnectionEnded) else state
            view.feed(self._end_event(state, str(error)))
            view.close()
            raise

    def start(
        self,
        connection: PoolConnection,
        spec: RunSpec,
        fetcher_events: list[Event],
        view: View | SilentView,
        interrupts: Interrupts,
    ) -> None:
        """Start the ranks in the pool, and store the names of their hosts in `hosts`.

        Until the ranks have started, show the run's events.

        Args:
            connection: Connection to the pool's process.
            spec: Description of the run for the pool's process.
            fetcher_events: Events of the run's fetchers so far; the pool's process writes them to
                the run's journal.
            view: View of the run.
            interrupts: The user's interrupts.

        Raises:
            ConnectionEnded: The pool's process has ended.
            PoolError: The pool has no hosts for the ranks.
            StoreError: Another run writes to the project store.
            KeyboardInterrupt: The user interrupted twice. Ranks that start later are killed. If the
                run is a cell of a session, the ranks that get the cell later are interrupted.
        """

        def launch() -> list[str]:
            hosts = connection.launch(spec, self.queue_event, fetcher_events)
            if self._is_abandoned:
                # A session's ranks have just got the cell. They stay after an interrupt.
                self._halt(connection, "interrupt" if spec.session else "kill")
            return hosts

        try:
            self.hosts = interrupts.wait_for(
                launch,
                max_interrupts=2,
                meanwhile=lambda: self._show_events(view, drain_events(self._events)),
            )
        except KeyboardInterrupt:
            self._is_abandoned = True
            self._halt(connection, "kill")
            raise

    def follow(
        self,
        connection: PoolConnection,
        view: View | SilentView,
        interrupts: Interrupts,
        detaches: bool = False,
        outlives_kernel: Callable[[], bool] = lambda: False,
    ) -> None:
        """Show the run until it has ended or is detached, then close the view. This call blocks.

        Meanwhile, ask the user for the lines that ranks request, and check whether the pool's
        process is alive. With `detaches`, refuse the requests for lines, and detach the run when
        all ranks have started. After the user's first interrupt, ask the ranks to end within a
        grace period. After the second interrupt, kill the ranks.

        If the run does not end within `KILL_WAIT_S` seconds after the first interrupt, or within
        `LEAVE_S` seconds after the second interrupt, the cell ends nevertheless. Then the cell's
        error names the hosts on which ranks are still stopping.

        If `outlives_kernel()` is True, and the kernel is asked to shut down within
        `SHUTDOWN_WAIT_S` seconds after the first interrupt, the run counts as detached instead.

        At the end, stop receiving the run's events. But if the run is a cell of a session and has
        not ended, queue its further events for `follow_left`. If the run was detached, the status
        header says so, and the first cell after the run's end may update this header. From the
        detachment on, `run` reads its state from the journal.

        Args:
            connection: Connection on which the run was started.
            view: View of the run.
            interrupts: The user's interrupts.
            detaches: Whether to detach the run as soon as all ranks have started.
            outlives_kernel: Function that returns whether the run continues if the kernel ends.
        """
        interrupts.wake = lambda: self._events.put(None)
        interrupts_sent, give_up_at, can_ask = 0, float("inf"), not detaches
        checked_at = time.monotonic()
        while self._ended is None and not self.is_detached:
            self._show_events(
                view, self._next_events(view, min(give_up_at, self._inputs.next_due()))
            )
            self._answer_next_input(connection, view if can_ask else None, interrupts)
            if detaches and len(self.head.live_ranks) == self.head.plan.world_size:
                detaches = False
                self._detach(connection)
            now = time.monotonic()
            if interrupts.count == 1 > interrupts_sent and outlives_kernel():
                self.is_detached |= _is_shut_down(interrupts)
            if interrupts.count > interrupts_sent and not self.is_detached:
                interrupts_sent = interrupts.count
                self._halt(connection, "interrupt" if interrupts_sent == 1 else "kill")
                give_up_at = min(
                    give_up_at, now + (KILL_WAIT_S if interrupts_sent == 1 else LEAVE_S)
                )
            if now - checked_at > CHECK_S or now >= give_up_at:
                checked_at = now
                self._check_pool(connection, view)
            if now >= give_up_at and self._ended is None:
                self._give_up_waiting(connection)
        if not (self.has_left and self.plan.session):
            connection.stop_events(self.run_id)
        if self._ended is None:
            if isinstance(view, View):
                heads.close_view(self.run, view, self.head, DETACHED)
            self.run.read_journal()
            return
        view.feed(self._ended)
        view.close()

    def follow_left(
        self,
        connection: PoolConnection,
        interrupts: Interrupts,
        show_line: Callable[[str], None],
        is_lost: Callable[[], bool],
    ) -> None:
        """Pass further events to `listener` until this run, which the user has left, has ended.

        The run is a cell of a session. After its end, stop receiving its events.

        Args:
            connection: Connection on which the run was started.
            interrupts: The user's interrupts.
            show_line: Function called with a line for the user, if the cell has not ended yet.
            is_lost: Function that returns whether the session has ended. If it has, the end of the
                cell will not be reported, and the wait ends.

        Raises:
            PoolError: The pool's process is silent.
            KeyboardInterrupt: The user interrupted the wait. The next call continues.
        """
        interrupts.wake = lambda: self._events.put(None)
        self._pass_left(drain_events(self._events))
        if self.has_left:
            show_line(f"waiting for the interrupted run {self.run_id} to end")
        while self.has_left and not is_lost():
            interrupts.raise_if_interrupted()
            if connection.silent_s > SILENT_LOST_S:
                raise PoolError(connection.silence_message())
            with suppress(queue.Empty):
                first = self._events.get(timeout=CHECK_S)
                self._pass_left([] if first is None else [first])
        connection.stop_events(self.run_id)

    def _pass_left(self, events: Iterable[Event]) -> None:
        for event in events:
            self.listener(event)
            self.has_left = self.has_left and not isinstance(event, RunEnded)

    def store_results(self, namespace: dict[str, Any], session_stays: bool = False) -> None:
        """Store the results in the notebook and print notes; then raise the run's error, if any.

        The results are the variables of `--out`. If a failed run has returned some of them,
        print the names of these variables. If the run was detached, do nothing.

        Args:
            namespace: The notebook's variables, by name. The results are added here.
            session_stays: Whether the run was a cell of a session that has not ended.

        Raises:
            KeyboardInterrupt: The run was interrupted or stopped, or this call was interrupted.
            ResultError: The run succeeded, but not all variables of `--out` could be returned.
            RunError: The work failed on a rank.
            PoolError: The run was lost, or failed before a rank started.
            StoreError: The project store could not be copied to a host.
        """
        if self.is_detached:
            return
        try:
            out = self.run.out
        except KeyboardInterrupt:
            raise interrupted(
                f"Stopped by you while the values of run {self.run_id} were loaded. The run has "
                "ended; `taas.last_run.out` loads its values"
            ) from None
        namespace.update(out)
        sys.stdout.writelines(f"{note}\n" for note in self.run.result_notes)
        if out and self.run.state not in ("SUCCEEDED", "INTERRUPTED"):
            sys.stdout.write(f"returned although the run failed (--out): {', '.join(out)}\n")
        self.run.raise_failure(session_stays and not self.has_left)

    @property
    def has_lost_rank(self) -> bool:
        """Whether the process of a rank, or a host of the run, is gone."""
        if self._ended is None:
            return False
        return self._ended.state == "LOST" or any(it.how in _ENDS for it in self._ended.failures)

    def cell_text(self) -> str:
        """Return the text of the notebook's cell, including its `%%taas` line or taas comments."""
        return (self.path / "cell.py").read_text(encoding="utf-8")

    def _answer_next_input(
        self, connection: PoolConnection, view: View | SilentView | None, interrupts: Interrupts
    ) -> None:
        """Ask the user for the line that a rank waits for, if any, and send the line to the rank.

        If nobody can type, or if the rank no longer needs the line, refuse the rank's request. The
        rank no longer needs the line if the run was interrupted or detached, has ended, restarts or
        is lost.

        Write the view's buffered output before the question. If the user interrupts while typing,
        count this as an interrupt of the run, and send no answer.

        Args:
            view: View of the run; None if the run is about to be detached.
        """
        request = self._inputs.pop_next(time.monotonic())
        if request is None:
            return

        def is_void() -> bool:
            is_lost = connection.has_ended or connection.silent_s > SILENT_LOST_S
            return self._voids_input or is_lost or interrupts.count > 0

        answer = keyboard.refused_answer(request, self.plan)
        if isinstance(view, View) and keyboard.can_type(get_ipython()) and not is_void():
            view.flush()
            try:
                answer = keyboard.ask_user(request, self.plan, is_void)
            except KeyboardInterrupt:
                if not is_void():
                    interrupts.count += 1
                return  # the interrupt also ends the rank's wait for input
        self._inputs.record_answer(request.rank, time.monotonic())
        self._send_in_thread(connection, answer, "taas-answer")

    def _next_events(self, view: View | SilentView, until: float = float("inf")) -> Iterable[Event]:
        """Wait for an event of the run, and return all queued events; [] if none has arrived.

        The wait ends after `CHECK_S` seconds, at the monotonic time `until`, or when the view must
        write output, whichever is first.
        """
        due = min(until, view.next_due())
        timeout_s = min(CHECK_S, max(0.0, due - time.monotonic()))
        try:
            first = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return []
        return [*([] if first is None else [first]), *drain_events(self._events)]

    def _show_events(self, view: View | SilentView, events: Iterable[Event]) -> None:
        """Handle events of the run: pass each event to the function `listener`, and show it.

        The end of the run is only recorded: the caller shows the end after all other events. Some
        other events have further effects:

        - A rank's request for input is queued for the user.
        - A restart of the ranks discards all queued requests for input.
        - `Detached` sets `is_detached`.

        Finally, let the view write output that is due.
        """
        for seen in events:
            self.listener(seen)
            if isinstance(seen, InputRequested):
                self._inputs.add(seen)
            elif isinstance(seen, Restart):
                self._inputs.clear()
                self._voids_input = False
            if isinstance(seen, RunEnded):
                self._ended = seen
            else:
                self.is_detached = self.is_detached or isinstance(seen, Detached)
                view.feed(seen)
        view.tick(time.monotonic())

    def _detach(self, connection: PoolConnection) -> None:
        """Ask the pool's process in a new thread to take the run over; do not wait for the answer.

        If the process agrees, it sends a `Detached` event. If the process refuses or does not
        answer, a note in the view gives the reason, and the run still ends with this kernel.
        """

        def detach() -> None:
            try:
                why = connection.call(Detach(self.run_id))
            except PoolError as error:
                why = str(error)
            if why:
                self.queue_event(Note(text=f"--detach: {why}; the run ends with this kernel"))

        threading.Thread(target=detach, name="taas-detach", daemon=True).start()

    def _halt(self, connection: PoolConnection, how: str) -> None:
        """Ask the pool's process to end the run; do not wait for the end.

        `how` is "interrupt" or "kill".
        """
        self._send_in_thread(connection, Halt(self.run_id, how), "taas-halt")

    def _send_in_thread(
        self, connection: PoolConnection, request: Request[None], thread: str
    ) -> None:
        """Send a request to the pool's process in a new thread; do not wait for the response.

        If the process does not respond, queue a note for the view. If the process has ended, do
        nothing, because then the run has ended, too.

        Args:
            connection: Connection to the pool's process.
            request: The request.
            thread: Name of the new thread.
        """

        def send() -> None:
            try:
                connection.call(request)
            except ConnectionEnded:
                return  # the run ended with the pool's process; `_check_pool` reports it
            except PoolError as error:
                self.queue_event(Note(text=str(error)))

        threading.Thread(target=send, name=thread, daemon=True).start()

    def _check_pool(self, connection: PoolConnection, view: View | SilentView) -> None:
        """Record that the run has ended as LOST if the pool's process has ended or is silent.

        The process counts as silent after `SILENT_LOST_S` seconds without a heartbeat. After
        `SILENT_NOTE_S` seconds without a heartbeat, show a note, but only once in the run.

        If the run is LOST, also write its end to the journal. There is one exception: if the
        connection has ended, but the process is alive, the process writes the end.
        """
        if connection.has_ended:
            # A pool's process that is alive writes the run's end to the journal itself.
            in_journal = not connection.process.is_alive()
            self._ended = self._end_event("LOST", connection.why, in_journal)
        elif connection.silent_s > SILENT_LOST_S:
            self._ended = self._end_event("LOST", connection.silence_message())
        elif connection.silent_s > SILENT_NOTE_S and not self._is_silent:
            self._is_silent = True
            view.feed(
                Note(text=f"{connection.silence_message()}; interrupt twice to leave the run")
            )

    def _give_up_waiting(self, connection: PoolConnection) -> None:
        """End the cell as INTERRUPTED, although the interrupted run has not ended in time.

        The cell's error names the run's hosts. It also says that their ranks are killed within
        `HALT_S` seconds, that files may still arrive, and how to end the run at once. If the pool's
        process sends no heartbeats, the error says instead that the ranks are killed when the
        pool's lease has ended. The journal gets no end of the run from this call, because the
        pool's process later writes the real end.
        """
        # After a restart, the run may have other hosts than in its first attempt.
        hosts = ", ".join(self.head.hosts or self.hosts)
        why = f"ranks on {hosts} are still stopping; "
        if connection.silent_s > SILENT_NOTE_S:
            lease = f"{connection.config.lease_s:g} s after the pool's last message"
            why += f"they are killed at the latest {lease}: {connection.silence_message()}"
        else:
            why += (
                f"they are killed within {HALT_S:.0f} s. Until the run has ended, files may still "
            )
            why += (
                f"arrive; `%taas down {connection.config.name}` ends the pool and its runs at once"
            )
        self._ended = self._end_event("INTERRUPTED", why, in_journal=False)
        self.has_left = True

    def _end_event(self, state: str, why: str, in_journal: bool = True) -> RunEnded:
        """Return a `RunEnded` event for a run whose end the pool's process does not report.

        The event has no failures. Also append the event to the run's journal, unless `in_journal`
        is False.

        Args:
            state: State in which the run ended.
            why: Reason for the end.
            in_journal: False if the pool's process is alive and will itself write the run's end to
                the journal.
        """
        elapsed_s = self.head.elapsed(time.monotonic())
        attempt = self.head.restarts
        ended = RunEnded(state=state, elapsed_s=elapsed_s, why=why, attempt=attempt)
        if in_journal:
            writer = journal.JournalWriter(self._folder)
            writer.append(ended)
            writer.close()
        return ended
