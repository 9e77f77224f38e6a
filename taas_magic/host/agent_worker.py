"""The Dask worker of an agent: joins the pool, and carries out the controller's calls.

The agent uses three parts of Dask: membership in a cluster, TLS, and the stream to the scheduler. A
run is not a Dask task (docs/decisions.md).

The agent sends heartbeats, which the controller acknowledges. If no acknowledgement arrives for
`lease_s` seconds, the agent exits, and its supervisor ends all other processes of the host
(`HostLease`). An agent on the notebook's machine has no lease.
"""

import asyncio
import concurrent.futures
import functools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import dask
import distributed.batched
from distributed import Security, Worker
from distributed.comm import get_address_host
from msgspec import convert, structs
from tornado.ioloop import IOLoop

from taas_magic import probe
from taas_magic.errors import PoolError
from taas_magic.host import forkserver, system
from taas_magic.host.host_run import HostFetchers, HostRun, HostShare, PoolCommand
from taas_magic.host.host_session import HostCell, HostSession
from taas_magic.host.spec import (
    AGENT,
    ANSWER,
    BEAT,
    BEAT_ACK,
    CALL,
    EVENT,
    HostAddress,
    ShareSpec,
    StartShare,
)
from taas_magic.host.supervisor import report_joined
from taas_magic.leases import BEATS_PER_LEASE
from taas_magic.messages import (
    AgentSettings,
    AnswerInput,
    DescribeHost,
    EndRun,
    Event,
    GetHostFacts,
    GetStacks,
    Halt,
    HostFacts,
    HostHello,
    Note,
    PauseClocks,
    Request,
    RequestHandler,
    RunStacks,
    SetFetcherAddress,
    StartingHost,
    UpdateStoreCopy,
    encode,
    escaped,
    from_json,
    handlers,
    send_request,
    to_json,
)
from taas_magic.store import guard
from taas_magic.store.requests import FileRequest

ASK_TIMEOUT_S = 60.0
"""Maximum seconds that the agent waits for the pool's process to respond to a request."""

_T = TypeVar("_T")

logger = logging.getLogger("taas_magic.agent")

DEFERRED_IDLE_S = 2.0
"""Seconds that a host must be without a run before its forkserver imports `DEFERRED_MODULES`."""

_CHECK_S = 0.5

_started = time.time() - time.monotonic()


def steady_time() -> float:
    """Return the seconds since 1970, by a clock that never jumps.

    This module reads the system clock once, at its import. Later changes of the system clock have
    no effect.
    """
    return _started + time.monotonic()


def use_steady_clock() -> None:
    """Make Dask's streams in this process, and the current event loop's timers, use `steady_time`.

    By default, streams and timers use the system clock. If somebody set the system clock back by an
    hour, a stream would send its next messages an hour later. Without heartbeats in this hour, the
    lease of a host would expire, and the host would end.
    """
    distributed.batched.time = steady_time
    IOLoop.current().time = steady_time  # type: ignore[method-assign]


EXPIRED_EXIT_CODE = 75
"""Exit code of an agent whose lease has expired (EX_TEMPFAIL)."""


class HostLease:
    """Timer that ends this host if the pool's process acknowledges no heartbeat for `lease_s`.

    The time counts from the moment at which this host sent the last acknowledged heartbeat. The
    controller counts a host as lost if it has received no heartbeat for `lease_s` plus one second.
    By that time, the host has already ended itself. The lease uses only monotonic clocks, because
    the system clocks of two hosts may differ by days.

    Args:
        lease_s: Seconds from the sending of a heartbeat to the end of the lease.
        expire: Function that ends this process, and does not return. The lease's thread calls the
            function when the lease ends.
    """

    def __init__(self, lease_s: float, expire: Callable[[], None]) -> None:
        self.lease_s, self._expire = lease_s, expire
        self._good_until = 0.0

    @property
    def beat_s(self) -> float:
        """Seconds between two heartbeats of this host; several heartbeats fit into `lease_s`."""
        return self.lease_s / BEATS_PER_LEASE

    def start(self) -> None:
        """Start the lease, and start the thread that calls `expire` when the lease ends.

        The lease has a thread of its own, so that it ends the host even if the event loop hangs.
        """
        self._good_until = time.monotonic() + self.lease_s
        threading.Thread(target=self._watch, name="taas-lease", daemon=True).start()

    def renew(self, beat: float) -> None:
        """Extend the lease to `lease_s` seconds after a heartbeat that the pool has acknowledged.

        Never shortens the lease.

        Args:
            beat: Time at which this host sent the heartbeat (`time.monotonic`). A time in the
                future is invalid and is ignored.
        """
        if beat <= time.monotonic():
            self._good_until = max(self._good_until, beat + self.lease_s)

    def _watch(self) -> None:
        while (left_s := self._good_until - time.monotonic()) > 0:
            time.sleep(left_s)
        self._expire()


def end_agent(lease_s: float) -> None:
    """Print a message for the agent's log, then exit at once with `EXPIRED_EXIT_CODE`.

    `HostLease` calls this function when the host's lease has expired. The supervisor then ends all
    other processes of the host.
    """
    sys.stderr.write(f"taas-magic: no message from the pool for {lease_s:g} s: this host ends\n")
    sys.stderr.flush()
    os._exit(EXPIRED_EXIT_CODE)


class ClosedWorker(Worker):
    """A Dask worker that connects to the scheduler, but accepts no connections itself."""

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing. Dask's own method would serve web pages that every user could open."""

    async def start_unsafe(self) -> "ClosedWorker":
        """Join the scheduler; then close this worker's port to all connections. Called by Dask."""
        await super().start_unsafe()
        for listener in self.listeners:
            listener.stop()
        return self


class AgentWorker(ClosedWorker):
    """The Dask worker that is a host's agent. It runs no Dask tasks, only calls of the controller.

    Args:
        lease: The host's lease. Each acknowledged heartbeat renews the lease.
        warming: Task that waits for the forkserver's imports, after which the host can start ranks.
            The task's result has one message for each module of the pool's settings that the
            forkserver could not import.
    """

    def __init__(
        self,
        *args: Any,
        host_address: HostAddress,
        lease: HostLease,
        warming: "asyncio.Task[list[str]]",
        **kwargs: Any,
    ) -> None:
        startup_information = {AGENT: lambda agent: True}
        super().__init__(
            *args,
            nthreads=1,
            memory_limit=0,
            host=host_address.address,
            startup_information=startup_information,
            **kwargs,
        )
        self._host_address, self._lease, self._warming = host_address, lease, warming
        self._shares: dict[str, HostShare] = {}
        self._may_import_deferred = asyncio.Event()
        self._answering: set[asyncio.Task[None]] = set()
        answers: dict[type[Request[Any]], RequestHandler] = {
            DescribeHost: self.describe_host,
            GetHostFacts: self.facts,
            StartShare: self.start_run,
            Halt: self.forward_command,
            EndRun: self.forward_command,
            SetFetcherAddress: self.forward_command,
            AnswerInput: self.forward_command,
            PauseClocks: self.forward_command,
            GetStacks: self.stacks,
            UpdateStoreCopy: self.update_store_copy,
        }
        self._answers = handlers(answers)
        self.stream_handlers |= {CALL: self._on_call, BEAT_ACK: lease.renew}

    async def describe_host(self, request: DescribeHost) -> HostHello:
        """Wait until this host can start ranks, and return a description of the host.

        The host can start ranks when the forkserver has finished its imports. This wait has no
        time limit. If an import failed that ranks need, this method waits until
        `watch_forkserver` ends the agent.

        If no run is about to start, this method starts the timer of `import_deferred`. After this
        time, the forkserver imports further modules.

        Returns:
            The host's name, address and number of GPUs, and how it protects the project store.

        Raises:
            PoolError: The forkserver has ended. The pool then uses another host.
        """
        await asyncio.wait({self._warming})
        if self._warming.exception() is not None:
            await asyncio.Future()  # `watch_forkserver` ends this agent; the engine reports why
        await asyncio.to_thread(forkserver.wait_while_stopped)
        if not forkserver.is_alive():
            raise PoolError(forkserver.why_ended())
        if not request.has_run:
            self._may_import_deferred.set()
        return HostHello(
            host=self._host_address.host,
            address=self._host_address.address,
            protection=guard.strongest_protection().value,
            gpus=probe.count_gpus(),
        )

    async def facts(self, request: GetHostFacts) -> list[HostFacts]:
        """Return facts about this host and its Python, such as versions and missing modules.

        The result is a list with one entry.
        """
        return [convert(await asyncio.to_thread(probe.main, **structs.asdict(request)), HostFacts)]

    async def start_run(self, request: StartShare) -> int:
        """Start this host's share of a run, or the next attempt of a share that runs already.

        - A new share runs in a new thread. If the new share starts ranks, this method also sends
          the user a note for each module of the pool's settings that the forkserver could not
          import.
        - If the request is for a next attempt, this method passes the request to the running share.
          Then it waits until the share has cleaned up the current attempt
          (`HostRun.start_next_attempt`).

        Returns:
            The port of the ranks' rendezvous if this is the run's first host, else 0. For a cell in
            a session, the value has no meaning.

        Raises:
            PoolError: TMPDIR is not writable. For a next attempt: the run has ended on this host.
                For a cell: the cell's session has ended, runs another cell, or has not started its
                ranks in time.
            OSError: This is the run's first host, but the run's `master_addr` is not an address of
                this host.
        """
        spec, run_id = request.spec, request.spec.share_id
        if request.is_next_attempt:
            run = self._shares.get(run_id)
            if not isinstance(run, HostRun):
                raise PoolError(f"run {run_id} has ended here")
            return await asyncio.to_thread(run.start_next_attempt, spec)
        emit = functools.partial(self._emit, run_id)

        def ask_files(request: FileRequest[_T]) -> _T:
            return self._send_request(structs.replace(request, run_id=run_id))

        create_share = self._share_factory(spec)
        share = await asyncio.to_thread(
            create_share, spec, self._host_address, emit, self._is_only_share, ask_files
        )
        self._shares[run_id] = share
        for problem in () if spec.is_fetchers or spec.run.session else self._warming.result():
            emit(Note(text=problem))
        run_to_end = threading.Thread(
            target=self._run_share, args=(run_id, share), name=f"run-{run_id}"
        )
        run_to_end.start()
        return share.port

    def _share_factory(self, spec: ShareSpec) -> Callable[..., HostShare]:
        """Return the class or function that creates the runner of the share that `spec` describes.

        `HostFetchers` runs fetchers, `HostRun` runs ranks, and `HostSession` runs the ranks of a
        session. For a cell of a session, the result is a function that creates a `HostCell`.

        Raises:
            PoolError: `spec` describes a cell, but its session has ended on this host.
        """
        if spec.is_fetchers:
            return HostFetchers
        if spec.run.is_session:
            return HostSession
        if not spec.run.session:
            return HostRun
        session = self._shares.get(spec.run.session)
        if not isinstance(session, HostSession):
            raise PoolError(
                f"session {spec.plan.session} has ended on host {self._host_address.host}"
            )
        return lambda first, *about: HostCell(first, session, *about)

    async def forward_command(self, command: PoolCommand) -> None:
        """Pass a command to the share with the command's run id.

        If this share does not run any more, do nothing.
        """
        if share := self._shares.get(command.run_id):
            share.handle_command(command)

    async def stacks(self, request: GetStacks) -> RunStacks:
        """Return the stacks of a run's ranks or fetchers on this host. May take some seconds.

        The result is empty if the run has ended on this host.
        """
        share = self._shares.get(request.run_id)
        return RunStacks() if share is None else await asyncio.to_thread(share.stacks)

    async def update_store_copy(self, request: UpdateStoreCopy) -> str:
        """Copy changed files of the project store to this host, for a session's fetchers.

        Do nothing if the fetchers have ended on this host.

        Returns:
            "", or the reason why the files could not be copied.
        """
        share = self._shares.get(request.run_id)
        if not isinstance(share, HostFetchers):
            return ""
        return await asyncio.to_thread(share.update_store_copy)

    def _run_share(self, run_id: str, share: HostShare) -> None:
        """Run a share to its end, then remove the share from `_shares`. Runs in the share's thread.

        At the end, also starts the timer of `import_deferred`, after which the forkserver imports
        further modules.
        """
        try:
            share.run()
        finally:
            if self._shares.get(run_id) is share:  # false if the run has new fetchers by now
                del self._shares[run_id]
            self.loop.add_callback(self._may_import_deferred.set)

    async def beat(self) -> None:
        """Send heartbeats to the pool's process until this task is cancelled.

        Each heartbeat contains the time at which it was sent. The pool's acknowledgement repeats
        this time, so that `HostLease.renew` can extend the lease. Until the host can start ranks,
        the heartbeat also names the module that the forkserver is importing.
        """
        while True:
            beat: dict[str, Any] = {"op": BEAT, "beat": time.monotonic()}
            if not self._warming.done():
                name, for_s = forkserver.importing()
                beat["starting"] = to_json(
                    StartingHost(host=self._host_address.host, imports=name, for_s=for_s)
                )
            self.batched_send(beat)
            await asyncio.sleep(self._lease.beat_s)

    async def watch_forkserver(self) -> None:
        """End this agent if the forkserver ends or cannot import a module that ranks need.

        First waits for the end of the imports, then checks the forkserver every `_CHECK_S` seconds.
        If the forkserver ends while shares run on this host, the agent ends after these shares.

        Raises:
            PoolError: The forkserver could not import a module that ranks need.
        """
        try:
            await asyncio.shield(self._warming)
        except PoolError:
            self.loop.add_callback(self.close, reason="taas: its forkserver did not start")
            raise
        while True:
            await asyncio.sleep(_CHECK_S)
            if not self._shares and not forkserver.is_alive():
                self.loop.add_callback(self.close, reason=f"taas: {forkserver.why_ended()}")
                return

    async def import_deferred(self) -> None:
        """Make the forkserver import `DEFERRED_MODULES` after `DEFERRED_IDLE_S` without a run.

        Two events start the timer: the end of a share, and the end of `describe_host` if no run is
        about to start. If a share runs when the time is over, the forkserver does not import. Runs
        until this task is cancelled.
        """
        while True:
            await self._may_import_deferred.wait()
            self._may_import_deferred.clear()
            await asyncio.sleep(DEFERRED_IDLE_S)
            has_run_since = self._shares or self._may_import_deferred.is_set()
            if not has_run_since:
                forkserver.start_importing_deferred()

    def _is_only_share(self) -> bool:
        return len(self._shares) == 1

    def _send_request(self, request: Request[_T]) -> _T:
        """Send a request to the controller, wait for the response, and return the response.

        Any thread except the thread of the event loop may call this. The event loop must stay free
        to receive the response.

        Raises:
            PoolError: The controller is not reachable or did not respond within `ASK_TIMEOUT_S`.
        """
        asking = send_request(self.scheduler, request)
        answer = asyncio.run_coroutine_threadsafe(asking, self.loop.asyncio_loop)
        try:
            return answer.result(ASK_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            answer.cancel()
            late = f"the pool did not answer {request.op()} in {ASK_TIMEOUT_S:.0f} s"
            raise PoolError(late) from None
        except OSError as error:
            raise PoolError(f"the pool does not answer {request.op()}: {error}") from error

    def _emit(self, run_id: str, event: Event) -> None:
        """Send an event of a run to the controller. Any thread may call this."""
        message = {"op": EVENT, "run_id": run_id, "event": encode(event)}
        self.loop.add_callback(self.batched_send, message)

    def _on_call(self, id: int, name: str, request: bytes) -> None:
        task = asyncio.ensure_future(self._answer(id, name, request))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, number: int, name: str, request: bytes) -> None:
        """Carry out one call of the controller, and send the result, or the error as text.

        Args:
            number: Number of the call, which the response repeats.
            name: Name of the operation that the controller calls (`Request.op`).
            request: The encoded request.
        """
        try:
            answer, error = await self._answers[name](request), ""
        except Exception as failed:  # sent to the controller, and logged with traceback
            logger.exception("the call %s failed", name)
            answer, error = b"", escaped(f"{type(failed).__name__}: {failed}")
        self.batched_send({"op": ANSWER, "id": number, "answer": answer, "error": error})


async def serve(packed_settings: bytes) -> None:
    """Join the pool, and carry out the controller's calls until the connection to the pool ends.

    The steps are:

    1. Make Dask use a steady clock.
    2. Determine the host's address, and how the host protects the project store.
    3. Start a task that waits for the forkserver's imports.
    4. Join the pool without waiting for this task.
    5. Report to the supervisor that the agent has joined.
    6. Start the host's lease, unless the host is the notebook's machine.

    Until the connection ends, background tasks send heartbeats, watch the forkserver, and start
    the deferred imports.

    Args:
        packed_settings: `AgentSettings` as JSON.

    Raises:
        PoolError: The forkserver could not import a module that ranks need.
    """
    settings = from_json(packed_settings, AgentSettings)
    logging.getLogger("distributed").setLevel(logging.WARNING)
    dask.config.set(system.CALM_DASK)
    use_steady_clock()
    address = system.choose_address(
        settings.interface, os.environ, get_address_host(settings.scheduler)
    )
    host_address = HostAddress(
        settings.host_name or socket.gethostname(), address, settings.is_foreign
    )
    guard.strongest_protection()  # determined and cached here, before a run needs it
    warming = asyncio.create_task(
        asyncio.to_thread(forkserver.warm_up, settings.start_timeout_s), name="taas-warm-up"
    )
    lease = HostLease(settings.lease_s, functools.partial(end_agent, settings.lease_s))
    agent = AgentWorker(
        settings.scheduler,
        host_address=host_address,
        lease=lease,
        warming=warming,
        name=settings.name,
        security=Security(**settings.security),
        local_directory=settings.local_directory,
        death_timeout=30,
    )
    async with agent:
        report_joined()
        # On the notebook's machine, no lease is needed. The supervisor reads a pipe from the pool's
        # process. This pipe closes when the pool's process ends, and no network failure can cut it.
        if host_address.is_foreign:
            lease.start()
        watching = asyncio.ensure_future(agent.watch_forkserver())
        tasks = [watching, *map(asyncio.ensure_future, (agent.beat(), agent.import_deferred()))]
        await agent.finished()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not watching.cancelled() and (error := watching.exception()) is not None:
        raise error
