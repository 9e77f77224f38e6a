"""The controller of a pool: starts, follows and ends its runs, and writes their journals.

The controller is a Dask scheduler plugin in the pool's own process and runs on the process's event
loop.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distributed import Scheduler, SchedulerPlugin
from msgspec import DecodeError

from taas_magic.config import LOCAL, PoolConfig
from taas_magic.engines.base import Engine
from taas_magic.errors import PoolError, ProtocolError, StoreError
from taas_magic.host.spec import (
    EVENT,
    POOL_BEAT,
    LaunchFetchers,
    LaunchRanks,
    RunSpec,
    fetchers_share_id,
    topic,
)
from taas_magic.journal.folder import JournalWriter, RunFolder
from taas_magic.messages import (
    AnswerInput,
    Detach,
    Detached,
    EndPool,
    Event,
    ForwardEvents,
    GetHostFacts,
    GetStacks,
    GetStatus,
    Halt,
    HostFacts,
    HostStatus,
    Note,
    PoolStatus,
    PrepareFetchers,
    RegisterKernel,
    RunEnded,
    RunStacks,
    SessionState,
    StartResponse,
    TakeOverFetchers,
    TakeOverSession,
    WaitForHosts,
    decode_event,
    encode,
    handlers,
    leaf_subclasses,
    make_handler,
)
from taas_magic.plan import Plan
from taas_magic.pool.detached import EndFetchers, notify, take_over_fetchers
from taas_magic.pool.gate import GateComm
from taas_magic.pool.hosts import BackgroundTasks, PoolHost, PoolHosts, request_host_facts
from taas_magic.pool.runs import PoolFetchers, PoolRun, Share
from taas_magic.store.requests import FileRequest
from taas_magic.store.rule import locked_store

_log = logging.getLogger(__name__)

FIRST_KERNEL_S = 20.0
"""Minimum seconds that a new pool waits for its first kernel before the pool ends itself.

The kernel may still be importing modules.
"""

_WHY_ENDED = "the command `down` ended the pool"
"""Message for the user about a run or a wait for hosts that `down` has ended.

The user may have called `down` in any notebook (`%taas down`) or in a terminal.
"""

_ANSWERED_S = 2.0
"""Maximum seconds that an ending pool waits until its cancelled waits for hosts have ended."""


class Kernels:
    """Registry of the kernels that are connected to a pool, and of their waits for hosts.

    The registry also decides when to end the pool: after `linger_s` without a kernel and a run.

    Args:
        linger_s: Seconds for which the pool continues without a kernel and without a run.

    Attributes:
        connected: Dask client ids of the connected kernels.
    """

    def __init__(self, pool_hosts: PoolHosts, linger_s: float) -> None:
        self._pool_hosts, self._linger_s = pool_hosts, linger_s
        self.connected: set[str] = set()
        self._waiting: dict[str, tuple[str, asyncio.Future[list[PoolHost]]]] = {}
        self._stays_until = time.monotonic() + max(FIRST_KERNEL_S, linger_s)
        self.is_ending = False
        self.must_end = asyncio.Event()
        """Event that this object or the controller sets when the pool's process must end."""

    def end_if_idle(self, has_runs: bool) -> None:
        """End the pool if it has had neither a kernel nor a run for `linger_s`.

        A new pool first waits at least `FIRST_KERNEL_S` for a kernel.
        """
        now = time.monotonic()
        if self.connected or has_runs:
            self._stays_until = now + self._linger_s
        elif now >= self._stays_until:
            self.is_ending = True
            self.must_end.set()

    def remove(self, client: str) -> None:
        """Record that a kernel has left or died, and cancel its waits."""
        self.connected.discard(client)
        for wait, (owner, _) in list(self._waiting.items()):
            if owner == client:
                self.cancel_wait(wait)

    async def register(self, request: RegisterKernel) -> bool:
        """Return whether the pool accepts the requesting kernel.

        False if the pool has begun to end, or if the kernel has disconnected meanwhile.
        """
        return not self.is_ending and request.owner in self.connected

    async def wait_for_hosts(self, request: WaitForHosts) -> StartResponse:
        """Wait until the pool has the requested number of hosts that can start ranks.

        A kernel may have several waits at the same time. If the wait fails or is cancelled, the
        response has a message in `error`. If the pool is ending, return such a response at once,
        with `is_ending` set.
        """
        if self.is_ending:
            return StartResponse(error="its process is ending", is_ending=True)
        waiting = asyncio.ensure_future(
            self._pool_hosts.acquire(request.hosts, has_run=request.has_run)
        )
        self._waiting[request.wait] = request.owner, waiting
        try:
            await waiting
            return StartResponse()
        except PoolError as error:
            return StartResponse(error=self.why_not_started(error))
        except asyncio.CancelledError:
            if not waiting.cancelled():
                raise
            interrupted = PoolError("the wait for its hosts was interrupted")
            return StartResponse(error=self.why_not_started(interrupted))
        finally:
            self._waiting.pop(request.wait, None)

    def why_not_started(self, error: Exception) -> str:
        """Return the message for a kernel whose wait for hosts, or whose start of a run, failed.

        The message is the text of `error`. But if the pool is ending, the message says that `down`
        has ended the pool.
        """
        return _WHY_ENDED if self.is_ending else str(error)

    async def cancel_all_waits(self) -> None:
        """Cancel all waits for hosts, and wait up to `_ANSWERED_S` until the waits have ended."""
        if pending_waits := [waiting for _, waiting in self._waiting.values()]:
            for waiting in pending_waits:
                waiting.cancel()
            await asyncio.wait(pending_waits, timeout=_ANSWERED_S)

    def cancel_wait(self, wait: str) -> None:
        """Cancel a kernel's wait for hosts. Do nothing if this wait has ended.

        Args:
            wait: Id of the wait (`WaitForHosts.wait`).
        """
        if wait in self._waiting:
            self._waiting[wait][1].cancel()


class PoolMeter:
    """Meter of a pool's host hours and GPU hours, and of the time that each host has been idle.

    Args:
        idle_timeout_s: Seconds without a run after which the pool returns a host to the engine. If
            None, the pool keeps idle hosts.
    """

    def __init__(
        self,
        pool_hosts: PoolHosts,
        idle_timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool_hosts, self._idle_timeout_s = pool_hosts, idle_timeout_s
        self._clock = clock
        self._updated_at = clock()
        self._gpu_s = self._used_gpu_s = 0.0

    def update(self) -> bool:
        """Add the time since the last call of `update` to the host hours and GPU hours.

        If a host has a run, also add the time of its GPUs to the used GPU hours. If a host has no
        run, record since when the host has been idle.

        Returns:
            Whether any host has been idle for `idle_timeout_s`, so that the pool must return it.
        """
        now = self._clock()
        passed_s, self._updated_at = now - self._updated_at, now
        for host in self._pool_hosts.all():
            host.allocated_s += passed_s
            self._gpu_s += host.gpus * passed_s
            if host.runs:
                self._used_gpu_s += host.gpus * passed_s
                host.idle_since = None
            elif host.idle_since is None:
                host.idle_since = now
        return not all(map(self.is_in_use, self._pool_hosts.all()))

    def host_status(self, host: PoolHost) -> HostStatus:
        """Return a host's status for `%taas pools`, such as its runs and its GPU hours."""
        return HostStatus(
            host=host.name,
            protection=host.protection,
            runs=sorted(host.runs),
            allocated_s=host.allocated_s,
            idle_s=None if host.idle_since is None else self._clock() - host.idle_since,
            gpu_hours=host.gpus * host.allocated_s / 3600,
        )

    def pool_status(self) -> PoolStatus:
        """Return the pool's status for `%taas pools`: the hosts' status and the GPU hours."""
        return PoolStatus(
            hosts=[self.host_status(host) for host in self._pool_hosts.all()],
            gpu_hours=self._gpu_s / 3600,
            used_gpu_hours=self._used_gpu_s / 3600,
        )

    def is_in_use(self, host: PoolHost) -> bool:
        """Return whether the pool must keep a host.

        True if the host has a run or has been idle for less than `idle_timeout_s`, and always true
        if `idle_timeout_s` is None.
        """
        if host.runs or host.idle_since is None or self._idle_timeout_s is None:
            return True
        return self._clock() - host.idle_since < self._idle_timeout_s


EncodedEventSink = Callable[[bytes], None]
"""Function that sends an encoded event to a kernel."""

BEAT_S = 1.0
"""Seconds between two beats that the pool's process sends to its kernels.

The process also counts host hours and GPU hours once in this time.
"""

END_EVENT_WAIT_S = 10.0
"""Maximum seconds that a run's end event waits for the journal and the project store.

Before the kernel gets the event, the pool's process closes the journal and releases the store. If
this takes longer, the kernel gets the event anyway.
"""


class Controller(SchedulerPlugin):
    """Dask scheduler plugin that handles the kernels' requests and the hosts' events.

    It starts, follows and ends the pool's runs. When no kernel and no run is left, it ends the
    pool.

    Args:
        source: Engine that provides the pool's hosts.
        linger_s: Seconds for which the pool continues without a kernel and without a run.
    """

    name = "taas-controller"

    def __init__(
        self, scheduler: Scheduler, source: Engine, pool: PoolConfig, linger_s: float
    ) -> None:
        self._scheduler = scheduler
        self._runs: dict[str, Share] = {}
        self._fetchers_of: dict[str, EndFetchers] = {}
        """For each detached run with fetchers, by run id: the function that ends its fetchers."""

        self._notifying = 0
        """Number of `notify` commands that are running."""

        self._tasks = BackgroundTasks()
        self.pool_hosts = PoolHosts(
            scheduler,
            source,
            pool.start_timeout_s,
            pool.lease_s,
            self._on_lost_host,
            are_local=pool.engine == LOCAL,
            names=pool.hosts,
        )
        self._kernels = Kernels(self.pool_hosts, linger_s)
        self._meter = PoolMeter(self.pool_hosts, pool.idle_timeout_s)
        scheduler.add_plugin(self)
        scheduler.stream_handlers[EVENT] = self._on_event
        scheduler.handlers |= handlers(
            {
                RegisterKernel: self._kernels.register,
                WaitForHosts: self._kernels.wait_for_hosts,
                LaunchRanks: self.launch,
                LaunchFetchers: self.launch_fetchers,
                ForwardEvents: self.forward_events,
                Detach: self.detach,
                TakeOverSession: self.take_over_session,
                TakeOverFetchers: self.take_over_fetchers,
                PrepareFetchers: self.prepare_fetchers,
                Halt: self.halt,
                AnswerInput: self.answer_input,
                GetStatus: self.status,
                GetStacks: self.stacks,
                GetHostFacts: self.facts,
                EndPool: self.end_pool,
            }
        )
        for kind in leaf_subclasses(FileRequest):
            scheduler.handlers[kind.op()] = self._file_request_handler(kind)
        for work in (self._beat(), self.pool_hosts.watch()):
            self._tasks.start(work)

    @property
    def must_end(self) -> asyncio.Event:
        """Event that this process sets when the pool must end."""
        return self._kernels.must_end

    async def launch(self, request: LaunchRanks) -> StartResponse:
        """Start a run's ranks on hosts of this pool.

        The steps are:

        - Wait until interrupted runs have ended, because they may still own the project store.
        - If the run is a cell of a session, find the session, whose ranks run the cell.
        - Lock the project store, unless the run only reads or is a session. Each writing cell of a
          session locks the store itself.
        - Open the journal and start the ranks. From now on, each event of the run goes to the
          journal and to the kernel that owns the run.
        - Start a background task that follows the run to its end.

        Returns:
            A response with the names of the hosts. If the start fails, all steps are undone, and
            the response has an error message instead.
        """
        spec, owner, run_id = request.run, request.owner, request.run.plan.run_id
        send_event = self._event_sender(owner, run_id)
        await self._wait_for_interrupted_runs(owner, send_event)
        cleaned_up = asyncio.Event()
        async with contextlib.AsyncExitStack() as until_end:
            until_end.callback(cleaned_up.set)
            until_end.callback(self._runs.pop, run_id, None)
            try:
                session = self._session_of(spec)
                if not (spec.reads_only or spec.is_session):
                    await _lock_store(until_end, spec.plan)
                journal = _open_journal(spec.folder, send_event)
                until_end.push_async_callback(asyncio.to_thread, journal.close)

                def publish(event: Event) -> None:
                    encoded = journal.append(event)
                    if run.owner:
                        run.send_event(encoded)

                run = PoolRun(spec, owner, self.pool_hosts, publish, cleaned_up, session)
                run.send_event = send_event
                # If this run is a session, the fetchers of its first cell have started before it.
                for fetchers in self._fetchers_of_session(run_id):
                    run.count_fetchers(fetchers)
                if session is not None:
                    until_end.enter_context(session.mark_in_use(run))
                hosts = await self._start(run, request.fetcher_events)
            except StoreError as error:
                return StartResponse(store_error=str(error))
            except (PoolError, OSError) as error:
                return StartResponse(error=self._kernels.why_not_started(error))
            self._tasks.start(self._run_to_end(run, journal, until_end.pop_all()))
        return StartResponse(hosts=hosts)

    def _session_of(self, spec: RunSpec) -> PoolRun | None:
        """Return the session in which a cell runs; None for a run that starts its own ranks.

        Raises:
            PoolError: The session has ended.
        """
        if not spec.session:
            return None
        session = self._runs.get(spec.session)
        if not isinstance(session, PoolRun):
            raise PoolError(f"session {spec.plan.session} has ended")
        return session

    def _end_idle_sessions(self) -> None:
        for run in list(self._runs.values()):
            if isinstance(run, PoolRun) and run.is_idle and not run.is_halted:
                run.why_halted = (
                    f"it had no cell for {run.idle_for_s:.0f} s (session_idle_s in taas.toml)"
                )
                self._tasks.start(run.halt("interrupt"))

    async def detach(self, request: Detach) -> str:
        """Detach a run and its fetchers from the kernel: they continue when the kernel ends.

        - If the run is a session, only record that it may continue without its kernel. The session
          still belongs to the kernel until the kernel ends.
        - If the run is already detached, or is a cell of a detached session, do nothing.
        - If the run is a cell of another session, refuse: the cell ends with its session.
        - For any other run, take over the run's fetchers from the kernel. Publish `Detached`, the
          last event that the kernel receives, and remove the owner. Then refuse the ranks' requests
          for the user's input.

        Returns:
            The reason why the run cannot be detached; "" if it is detached.
        """
        run = self._runs.get(request.run_id)
        if not isinstance(run, PoolRun):
            return f"run {request.run_id} has ended, or is not in this pool"
        if run.session_id == run.run_id:
            run.is_detached_session = True
            return ""
        if not run.owner or self._detached_session_of(run):
            return ""
        if run.session_id:
            name = run.plan.session
            return f"it is a cell of session {name}; `%taas detach {name}` detaches the session"
        try:
            end_fetchers = await self._take_over_fetchers(run)
        except (PoolError, OSError) as error:
            return f"its fetchers cannot be taken over: {error}"
        if end_fetchers is not None:
            self._fetchers_of[run.run_id] = end_fetchers
        run.publish(Detached())  # the last event of the run that its kernel receives
        run.owner = ""
        await run.refuse_input()
        return ""

    async def take_over_session(self, request: TakeOverSession) -> SessionState:
        """Make the requesting kernel the owner of a detached session.

        Refuse this if the session has ended or is ending, if it is not detached, or if the
        requesting kernel has disconnected. In these cases, the response has an error message. For a
        session that is not detached, the message says how to detach it.

        If a different kernel has owned the session until now, this previous owner receives
        `Detached`. From now on, the events of the session's fetchers go to the session's run, and
        no longer to the previous owner. A running cell keeps its owner.

        Returns:
            The session's state. Its field `cell` has the run id of the running cell. If no cell is
            running, `cell` has the run id of the newest cell that lost its kernel since the last
            takeover. If there is no such cell either, `cell` is "". If the takeover is refused,
            only the field `error` is set.
        """
        run = self._runs.get(request.run_id)
        if not isinstance(run, PoolRun):
            return SessionState(error="it has ended")
        if run.is_halted:
            return SessionState(error=f"it ends, because {run.why_halted or 'it was halted'}")
        if not run.is_detached_session:
            name = run.plan.session
            todo = f"`%taas detach {name}` in that kernel lets other kernels take it over"
            return SessionState(error=f"it belongs to another kernel, without --detach; {todo}")
        if request.owner not in self._kernels.connected:
            return SessionState(error="the notebook's kernel is gone")
        if run.owner and run.owner != request.owner:
            for fetchers in self._fetchers_of_session(run.run_id):
                self._continue_without_kernel(fetchers, run)
            run.send_event(encode(Detached()))
        run.owner, run.send_event = request.owner, self._event_sender(request.owner, run.run_id)
        state, run.orphaned_cell = run.session_state(), ""
        return state

    def _detached_session_of(self, share: Share) -> PoolRun | None:
        session = self._runs.get(share.session_id)
        return session if isinstance(session, PoolRun) and session.is_detached_session else None

    def _continue_without_kernel(self, share: Share, session: PoolRun) -> None:
        """Let a detached session's ranks, cell or fetchers continue without their kernel.

        First remove the owner of `share`. Then:

        - If `share` is the fetchers of a cell, send their events to the session instead of the
          kernel.
        - If `share` is a cell, let it continue as a detached run: publish `Detached`, and refuse
          its requests for input. Record the cell, so that the next owner of the session can show
          it. When the cell ends, the `notify` command runs.
        - If `share` is the session itself, change nothing else.
        """
        share.owner = ""
        if isinstance(share, PoolFetchers):
            self._send_events_to(session, share)
        elif isinstance(share, PoolRun) and share is not session:
            share.publish(Detached())
            session.orphaned_cell = share.run_id
            self._tasks.start(share.refuse_input())

    def _send_events_to(self, run: PoolRun, fetchers: PoolFetchers) -> None:
        """Send all further events of this pool's `fetchers` to `run` instead of a kernel.

        Also send the fetchers' earlier start and end events, because the kernel may not have
        forwarded them to the run.
        """
        fetchers.publish = lambda event: self._tasks.start(run.publish_fetcher_events([event]))
        self._tasks.start(run.publish_fetcher_events(list(fetchers.lifecycle_events)))

    async def _end_fetchers(self, run: PoolRun) -> None:
        """End the fetchers of `run` if no kernel owns them, because no kernel will end them.

        For a detached run, call the function that `_take_over_fetchers` returned, if any, and
        ignore its errors. For a session, kill each of its fetchers that has lost its kernel.
        """
        if end_fetchers := self._fetchers_of.pop(run.run_id, None):
            with contextlib.suppress(PoolError, OSError):  # the fetchers ended with their pool
                await end_fetchers()
        for fetchers in self._fetchers_of_session(run.run_id):
            if not fetchers.owner:
                await fetchers.halt("kill")

    async def _take_over_fetchers(self, run: PoolRun) -> EndFetchers | None:
        """Take over a run's fetchers from its kernel, if the run has fetchers.

        From now on, the fetchers' events no longer travel through the kernel. If the fetchers run
        on this pool, remove their owner, and pass their events directly to the run. If they run on
        another pool, ask the process of that pool to send the events to this process.

        Returns:
            A function that ends the fetchers; None if the run has no fetchers.

        Raises:
            PoolError: The other pool's process does not respond, or the fetchers have ended.
            OSError: The other pool's process cannot be reached.
        """
        data_id = fetchers_share_id(run.run_id)
        here = self._runs.get(data_id)
        if isinstance(here, PoolFetchers):
            here.owner = ""
            self._send_events_to(run, here)
            return partial(here.halt, "kill")
        if run.plan.data is None:
            return None
        folder = Path(run.folder.context().data_folder)
        return await take_over_fetchers(folder, data_id, run.publish_fetcher_events, self._tasks)

    async def take_over_fetchers(self, request: TakeOverFetchers) -> list[Event] | None:
        """Make another pool's process the owner of a run's fetchers on this pool.

        Returns:
            The earlier start and end events of the fetchers. None if these fetchers do not run on
            this pool, or have ended, or if the other process is not connected.
        """
        fetchers = self._runs.get(request.run_id)
        if not isinstance(fetchers, PoolFetchers) or request.owner not in self._kernels.connected:
            return None
        fetchers.owner = request.owner
        fetchers.publish = self._publisher(request.owner, request.run_id)
        return fetchers.lifecycle_events

    async def _run_to_end(
        self, run: PoolRun, journal: JournalWriter, until_end: contextlib.AsyncExitStack
    ) -> None:
        """Wait until a started run has ended; then write its end event to the journal and clean up.

        Release the project store and close the journal before the kernel gets the end event. If
        this takes longer than `END_EVENT_WAIT_S`, send the event anyway.

        Then remove the payload from the run folder if possible, and end the run's fetchers if no
        kernel owns them. For a detached run, also run the `notify` command.

        Args:
            until_end: Exit stack that closes the journal, releases the project store, and removes
                the run from this pool's runs.
        """
        try:
            ended = await _last_event_of(run)
            encoded = journal.append(ended)
        finally:
            closing = asyncio.ensure_future(until_end.aclose())
            await asyncio.wait({closing}, timeout=END_EVENT_WAIT_S)  # the disk may hang
        if run.owner:
            run.send_event(encoded)
        with contextlib.suppress(OSError):  # the fetchers must end, even if the disk has failed
            await asyncio.to_thread(journal.folder.payload.unlink)
        is_session = run.session_id == run.run_id  # `notify` does not run for sessions
        is_detached = not run.owner and not is_session
        await self._end_fetchers(run)
        if is_detached:
            self._notifying += 1
            try:
                await asyncio.to_thread(notify, journal.folder, ended)
            finally:
                self._notifying -= 1

    async def _wait_for_interrupted_runs(self, owner: str, send_event: EncodedEventSink) -> None:
        """Wait until all interrupted runs have ended; ignore the runs of other connected kernels.

        An interrupted run may still own the project store, which the next run needs. The wait ends
        in any case: the pool drops a host that does not end its ranks within `HALT_S`, and a cell's
        start ends within `runs.FILES_S`.

        Args:
            owner: Dask client id of the kernel that starts the next run.
            send_event: Receives a note for the user about each run that this call waits for.
        """
        others = self._kernels.connected - {owner}
        for run in list(self._runs.values()):
            if isinstance(run, PoolRun) and run.is_halted and run.owner not in others:
                text = f"waiting for the interrupted run {run.run_id} to end"
                send_event(encode(Note(text=text)))
                await run.cleaned_up.wait()

    async def launch_fetchers(self, request: LaunchFetchers) -> StartResponse:
        """Start a run's fetchers on hosts of this pool.

        If a session's cell uses the fetchers, add them to the session's fetchers. If the start
        fails, kill the fetchers that have started. Whether or not the start succeeds, a background
        task follows the fetchers to their end. The response has the names of the hosts; if the
        start fails, it has a message instead.
        """
        owner, run_id = request.owner, fetchers_share_id(request.run.plan.run_id)
        fetch = PoolFetchers(request.run, owner, self.pool_hosts, self._publisher(owner, run_id))
        session = self._runs.get(request.run.session)
        if isinstance(session, PoolRun):
            session.count_fetchers(fetch)

        async def run_to_end() -> None:
            await fetch.run_to_end()
            del self._runs[run_id]

        try:
            hosts = await self._start(fetch)
        except (PoolError, OSError) as error:
            await fetch.halt("kill")
            return StartResponse(error=self._kernels.why_not_started(error))
        finally:
            self._tasks.start(run_to_end())
        return StartResponse(hosts=hosts)

    async def prepare_fetchers(self, request: PrepareFetchers) -> str:
        """Prepare a session's fetchers in this pool for the session's next cell.

        Allow the fetchers to restart once. If all fetchers of an earlier cell have already ended
        unexpectedly, they start again now. Then wait until the fetchers' hosts have copied the
        changed files of the project store.

        Returns:
            "", or the reason why a host could not copy the files.
        """
        shares = self._fetchers_of_session(request.session)
        for fetchers in shares:
            fetchers.allow_restart()
        problems = await asyncio.gather(*(each.update_store_copies() for each in shares))
        return next(filter(None, problems), "")

    def _fetchers_of_session(self, session_id: str) -> list[PoolFetchers]:
        shares = [share for share in self._runs.values() if share.session_id == session_id]
        return [share for share in shares if isinstance(share, PoolFetchers)]

    async def _start(self, share: Share, fetcher_events: Sequence[Event] = ()) -> list[str]:
        """Register and start a run's ranks or fetchers; return the names of the hosts.

        Args:
            fetcher_events: Events that the run's fetchers have already sent to the kernel. They are
                first passed to the run, so that its ranks learn the fetchers' addresses.

        Raises:
            PoolError: The kernel is gone, the pool is ending, or the start failed.
            OSError: The run folder cannot be read.
        """
        self._runs[share.run_id] = share
        if self._kernels.is_ending:
            raise PoolError("its process is ending")
        if share.owner not in self._kernels.connected:
            raise PoolError("the notebook's kernel is gone")
        if isinstance(share, PoolRun):
            await share.publish_fetcher_events(fetcher_events)
        return await share.start()

    async def forward_events(self, request: ForwardEvents) -> None:
        """Pass events of fetchers to the run that uses these fetchers.

        The kernel has received the events from the fetchers' pool, which may be another pool. If
        the run has ended, ignore the events.
        """
        run = self._runs.get(request.run_id)
        if isinstance(run, PoolRun):
            await run.publish_fetcher_events(request.events)

    async def halt(self, request: Halt) -> None:
        """Interrupt or kill a run or a run's fetchers on all hosts, or cancel a wait for hosts.

        The id in the request belongs to a run, to a run's fetchers, or to a wait for hosts. Ignore
        an unknown id. Wait for the end of fetchers (`PoolFetchers.halt`), but not for the end of
        ranks.
        """
        self._kernels.cancel_wait(request.run_id)
        if run := self._runs.get(request.run_id):
            await run.halt(request.how)

    async def answer_input(self, request: AnswerInput) -> None:
        """Pass the line that the user has typed to the rank that requested input.

        If the run has ended, or the rank no longer waits for this line, do nothing.
        """
        if isinstance(run := self._runs.get(request.run_id), PoolRun):
            await run.answer_input(request)

    async def stacks(self, request: GetStacks) -> RunStacks:
        """Return the Python stacks of a run's ranks or fetchers; empty if the run has ended."""
        run = self._runs.get(request.run_id)
        return await run.stacks() if run is not None else RunStacks()

    async def status(self, request: GetStatus) -> PoolStatus:
        """Return the pool's hosts, their runs, GPU hours, and the number of refused messages."""
        status = self._meter.pool_status()
        status.starting = self.pool_hosts.starting()
        status.refused = self.pool_hosts.refused + self._scheduler.refused
        return status

    def _file_request_handler(
        self, kind: type[FileRequest[Any]]
    ) -> Callable[..., Awaitable[bytes]]:
        """Return the function that Dask calls with the hosts' file requests of the class `kind`.

        The function passes each request to the run that the request names, and returns the encoded
        response. For security, the function takes the name of the sending host from the
        authenticated connection, not from the request. If a request is refused, the function counts
        it, and raises ProtocolError.
        """

        async def handle(comm: GateComm, request: bytes) -> bytes:
            try:
                return await make_handler(kind, partial(self._answer_file_request, comm.peer.name))(
                    request
                )
            except ProtocolError:
                self.pool_hosts.refused += 1
                raise

        return handle

    async def _answer_file_request(self, agent: str, request: FileRequest[Any]) -> object:
        run, host = self._runs.get(request.run_id), self.pool_hosts.named(agent)
        if run is None or host is None:
            raise ProtocolError(f"run {request.run_id} has ended, or is not in this pool")
        return await run.answer_file_request(host.address, request)

    async def facts(self, request: GetHostFacts) -> list[HostFacts]:
        """Return facts about all hosts that can start ranks, such as versions and modules."""
        return await request_host_facts(self.pool_hosts, self.pool_hosts.all(), request)

    async def end_pool(self, request: EndPool) -> None:
        """Cancel all waits for hosts, kill all runs, then end the pool's process.

        From the start of this call, the pool accepts no further kernel and no further wait for
        hosts. The last event of a run says that `down` ended the pool, unless the run was halted
        for another reason. The process ends 0.1 s later.
        """
        self._kernels.is_ending = True
        await self._kernels.cancel_all_waits()
        runs = list(self._runs.values())
        for run in runs:
            if isinstance(run, PoolRun):
                run.why_halted = run.why_halted or _WHY_ENDED
        await asyncio.gather(*(run.halt("kill") for run in runs))
        asyncio.get_running_loop().call_later(0.1, self.must_end.set)

    def add_client(self, scheduler: Scheduler, client: str) -> None:
        """Record that a kernel has connected. Called by Dask."""
        self._kernels.connected.add(client)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Handle the end of a kernel's connection: the kernel has left or died. Called by Dask.

        Cancel the kernel's waits for hosts. For the runs of this kernel:

        - Detached runs continue.
        - Detached sessions continue, with their cells and fetchers.
        - Every other run gets a note that the kernel is gone. Then its ranks are interrupted, and
          its fetchers are killed.
        """
        for run in self._runs.values():
            if run.owner == client and (session := self._detached_session_of(run)) is not None:
                self._continue_without_kernel(run, session)
            elif run.owner == client:
                run.publish(Note(text="the notebook's kernel is gone, so the run ends"))
                if isinstance(run, PoolRun) and not run.is_halted:
                    run.why_halted = run.why_halted or "the notebook's kernel has ended"
                self._tasks.start(run.halt("interrupt"))
        self._kernels.remove(client)

    async def _beat(self) -> None:
        """Send a beat to all kernels every `BEAT_S`, until this task is cancelled.

        A beat contains the lines about requested hosts that cannot start ranks yet. After each
        beat, end the pool if no kernel and no run uses it, end idle sessions, and return idle hosts
        to the engine. A running `notify` command counts as a run, because this process can only end
        after the command. Until then, no other process of the pool can start.
        """
        while True:
            self._scheduler.log_event(POOL_BEAT, self.pool_hosts.awaited)
            self._kernels.end_if_idle(has_runs=bool(self._runs or self._notifying))
            self._end_idle_sessions()
            if self._meter.update():
                self._tasks.start(self.pool_hosts.release(self._meter.is_in_use))
            await asyncio.sleep(BEAT_S)

    def _publisher(self, owner: str, run_id: str) -> Callable[[Event], None]:
        send_event = self._event_sender(owner, run_id)
        return lambda event: send_event(encode(event))

    def _event_sender(self, owner: str, run_id: str) -> EncodedEventSink:
        # The kernel also subscribes itself. But its subscription uses another stream than its
        # request, so the subscription may arrive after the first events, which would be lost.
        self._scheduler.subscribe_topic(topic(owner), owner)
        return lambda encoded: self._scheduler.log_event(topic(owner), (run_id, encoded))

    def _on_event(self, worker: str, run_id: str, event: bytes) -> None:
        """Pass an event that a host has sent to the event's run.

        Ignore events that are invalid or that the host may not send, and count them as refused.
        """
        run = self._runs.get(run_id)
        try:
            is_taken = run is not None and run.on_event(worker, decode_event(event))
        except (TypeError, DecodeError):
            is_taken = False
        if not is_taken:
            self.pool_hosts.refused += 1

    def _on_lost_host(self, host: PoolHost, why: str) -> None:
        for run in list(self._runs.values()):
            run.record_lost_host(host, why)


def _open_journal(folder: RunFolder, send_event: EncodedEventSink) -> JournalWriter:
    """Open a run's journal for writing.

    If a later write to the journal fails, the kernel gets a note that the journal is incomplete.
    """
    loop = asyncio.get_running_loop()

    def report_incomplete(why: str) -> None:
        note = Note(text=f"the journal of this run is incomplete: {why}")
        with contextlib.suppress(RuntimeError):  # the loop is closed: the pool has ended meanwhile
            loop.call_soon_threadsafe(send_event, encode(note))

    return JournalWriter(folder, report_incomplete)


async def _last_event_of(run: PoolRun) -> RunEnded:
    """Wait for the end of a started run; return its last event.

    The kernel waits for the last event. So after an unexpected error, log the error, kill the
    ranks, and return a last event with the state LOST.
    """
    try:
        return await run.run_to_end()
    except Exception as error:
        _log.exception("run %s", run.run_id)
        await run.halt("kill")
        why = f"its pool failed: {error!r}; the pool's log has more"
        return RunEnded(state="LOST", why=why, attempt=run.attempt)


async def _lock_store(until_end: contextlib.AsyncExitStack, plan: Plan) -> None:
    """Lock the project store for the run of `plan`, until the caller closes `until_end`.

    Do nothing if the run has no project store.

    Raises:
        StoreError: Another run has locked the store.
    """
    if plan.store is not None:
        locking = locked_store(plan.store.path, plan.run_id, plan.name)
        await asyncio.to_thread(locking.__enter__)
        until_end.push_async_callback(asyncio.to_thread, locking.__exit__, None, None, None)
