"""The agent as a member of a Dask cluster: what it answers to, how it joins and leaves.

Dask gives membership, TLS and the stream. Runs do not come as Dask tasks but as calls of the
controller, which alone knows whether all hosts of a run are there (docs/decisions.md).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import distributed.batched
from tornado.ioloop import IOLoop

from taas_magic.errors import PoolError
from taas_magic.host.lease import Lease
from taas_magic.host.topics import ANSWER, BEAT, CALL, EVENT, HEARD
from taas_magic.messages import (
    AgentSettings,
    Event,
    FactsWanted,
    FetcherPlace,
    HostHello,
    Note,
    RunStacks,
    StorePort,
    encode,
    escaped,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from distributed import Worker
import functools
import os
import socket
import sys
import threading
from collections.abc import Sequence

from distributed import Security, Worker
from distributed.comm import get_address_host
from msgspec import structs

from taas_magic import probe
from taas_magic.host import forkserver, rendezvous, system
from taas_magic.host.fetchers import FetchShare
from taas_magic.host.host_run import HostRun
from taas_magic.host.lease import end_agent
from taas_magic.host.spec import HostSpec, Place
from taas_magic.host.system import count_gpus
from taas_magic.host.topics import (
    AGENT,
    ASK_STORE,
    CALL_AGAIN,
    CALL_END,
    CALL_END_FETCH,
    CALL_FACTS,
    CALL_FETCH,
    CALL_HELLO,
    CALL_PLACE,
    CALL_STACKS,
    CALL_START,
    CALL_STOP,
    share_id,
)
from taas_magic.store import guard
from taas_magic.store.manifest import Ask

_started = time.time() - time.monotonic()


def steady() -> float:
    """Seconds since 1970 as this process counted them since its start."""
    return _started + time.monotonic()


def use_steady_clock() -> None:
    """Makes Dask's streams in this process, and the current loop's timers, keep the steady clock.

    A stream waits for the end of its batch by the system's clock: set back by an hour, it would be
    silent for an hour, and the lease would end the host.
    """
    distributed.batched.time = steady
    IOLoop.current().time = steady  # type: ignore[method-assign]


ASK_TIMEOUT_S = 60.0

Handler = Callable[..., Awaitable[object]]

logger = logging.getLogger("taas_magic.agent")


class Head:
    """Calls the controller, answers its calls, sends it events, and beats.

    Args:
        worker: The agent's Dask worker, not started yet.
        lease: The agent's lease.
        calls: What the controller may call, by name; may be extended later.
    """

    def __init__(self, worker: "Worker", lease: Lease, calls: Mapping[str, Handler]) -> None:
        self._worker, self._lease = worker, lease
        self.calls = dict(calls)
        self._tasks: set[asyncio.Task[None]] = set()
        worker.stream_handlers[CALL] = self._on_call
        worker.stream_handlers[HEARD] = lease.heard

    async def call(self, name: str, **arguments: Any) -> Any:
        """Call what the controller put into the scheduler's handlers; on the agent's event loop.

        Raises:
            PoolError: It could not be reached.
        """
        try:
            return await getattr(self._worker.scheduler, name)(**arguments)
        except OSError as error:
            raise PoolError(f"the pool does not answer {name}: {error}") from error

    def ask(self, name: str, **arguments: Any) -> Any:
        """The same from any other thread; blocks.

        Raises:
            PoolError: It could not be reached, or did not answer in time.
        """
        loop = self._worker.loop.asyncio_loop
        answer = asyncio.run_coroutine_threadsafe(self.call(name, **arguments), loop)
        try:
            return answer.result(ASK_TIMEOUT_S)
        except TimeoutError:
            answer.cancel()
            raise PoolError(f"the pool did not answer {name} in {ASK_TIMEOUT_S:.0f} s") from None

    def emit(self, run_id: str, event: Event) -> None:
        """Sends an event of a run; any thread may call it."""
        message = {"op": EVENT, "run_id": run_id, "event": encode(event)}
        self._worker.loop.add_callback(self._worker.batched_send, message)

    async def beat(self) -> None:
        """Beats until it is cancelled."""
        while True:
            self._worker.batched_send({"op": BEAT, "beat": self._lease.beat()})
            await asyncio.sleep(self._lease.beat_s)

    def _on_call(self, id: int, name: str, arguments: Mapping[str, Any]) -> None:
        task = asyncio.ensure_future(self._answer(id, name, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, name: str, arguments: Mapping[str, Any]) -> None:
        try:
            answer, error = pack(await self.calls[name](**arguments)), ""
        except Exception as failed:  # the controller hears of it, and the pool's log has it all
            logger.exception("the call %s failed", name)
            answer, error = b"", escaped(f"{type(failed).__name__}: {failed}")
        said = {"op": ANSWER, "id": number, "answer": answer, "error": error}
        self._worker.batched_send(said)


_LOOK_S = 0.5


class AgentWorker(Worker):
    """The agent; one a host. It takes no Dask tasks.

    Args:
        place: This host.
        lease: Its lease.
        problems: What every run is told of this host.
    """

    def __init__(
        self, *args: Any, place: Place, lease: Lease, problems: Sequence[str] = (), **kwargs: Any
    ) -> None:
        said = {AGENT: lambda agent: True}
        super().__init__(
            *args,
            nthreads=1,
            memory_limit=0,
            host=place.address,
            startup_information=said,
            **kwargs,
        )
        self._place, self._problems = place, problems
        self._runs: dict[str, HostRun] = {}
        self._shares: dict[str, tuple[FetchShare, threading.Thread]] = {}
        calls: dict[str, Handler] = {
            CALL_HELLO: self.hello,
            CALL_FACTS: self.facts,
            CALL_START: self.start_run,
            CALL_AGAIN: self.start_again,
            CALL_STOP: self.stop_run,
            CALL_END: self.end_run,
            CALL_FETCH: self.start_fetch,
            CALL_END_FETCH: self.end_fetch,
            CALL_PLACE: self.place_fetcher,
            CALL_STACKS: self.stacks,
        }
        self.head = Head(self, lease, calls)

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Opens no port for Dask's web pages: they would ask nobody for a key."""

    async def start_unsafe(self) -> "AgentWorker":
        """Called by Dask to join the pool; then nobody can connect to this host any more."""
        await super().start_unsafe()
        for listener in self.listeners:
            listener.stop()
        return self

    async def hello(self) -> HostHello:
        """Who this host is, what holds its ranks off the store, and its GPUs."""
        return HostHello(
            host=self._place.host,
            address=self._place.address,
            means=guard.strongest().value,
            gpus=count_gpus(),
        )

    async def facts(self, asked: bytes) -> object:
        """What this host is like for this agent's own Python, as `probe` answers it.

        Args:
            asked: `FactsWanted`, packed.
        """
        wanted = unpack(asked, FactsWanted)
        return await asyncio.to_thread(probe.main, **structs.asdict(wanted))

    async def start_run(self, spec: bytes) -> StorePort:
        """Starts this host's share of a run, in a thread of its own.

        Args:
            spec: A `HostSpec`, packed.
        """
        parsed = unpack(spec, HostSpec)
        run_id = parsed.plan.run_id
        emit = functools.partial(self.head.emit, run_id)
        ask = self._asking(run_id)
        run = await asyncio.to_thread(HostRun, parsed, self._place, emit, self._is_alone, ask)
        self._runs[run_id] = run
        for problem in self._problems:
            emit(Note(host=self._place.host, text=problem))
        thread = threading.Thread(target=self._carry_out, args=(run_id, run), name=f"run-{run_id}")
        thread.start()
        return StorePort(run.port)

    async def start_again(self, run_id: str, spec: bytes) -> StorePort:
        """Ends this host's ranks of a run and starts those of its next attempt.

        Raises:
            KeyError: The run has ended here.
        """
        again = self._runs[run_id].again
        return StorePort(await asyncio.to_thread(again, unpack(spec, HostSpec)))

    async def stop_run(self, run_id: str, how: str) -> None:
        """Interrupts or kills a run; one that is not here has ended already."""
        if run_id in self._runs:
            self._runs[run_id].stop(how)

    async def end_run(self, run_id: str) -> None:
        """Ends a run that has settled on all hosts."""
        if run_id in self._runs:
            self._runs[run_id].end()

    async def start_fetch(self, spec: bytes) -> None:
        """Starts this host's fetchers of a run, in a thread of their own.

        Args:
            spec: A `HostSpec`, packed; its `host_rank` counts the fetchers' hosts.
        """
        parsed = unpack(spec, HostSpec)
        run_id = share_id(parsed.plan.run_id)
        emit = functools.partial(self.head.emit, run_id)
        ask = self._asking(run_id)
        share = FetchShare(parsed, self._place, emit, self._is_alone, ask)
        thread = threading.Thread(target=self._fetch, args=(run_id, share), name=f"run-{run_id}")
        self._shares[run_id] = share, thread
        thread.start()

    async def end_fetch(self, run_id: str) -> None:
        """Ends fetchers; returns when nothing of them is left here."""
        if run_id in self._shares:
            share, thread = self._shares[run_id]
            share.stop()
            await asyncio.to_thread(thread.join)

    async def place_fetcher(self, run_id: str, place: bytes) -> None:
        """Tells a run's ranks on this host where a fetcher listens, a packed `FetcherPlace`."""
        if run_id in self._runs:
            told = unpack(place, FetcherPlace)
            self._runs[run_id].place(told.number, told.entry)

    async def stacks(self, run_id: str) -> RunStacks:
        """Where a run's ranks, or fetchers, on this host stand.

        Takes some seconds where one does not answer.
        """
        if run_id in self._shares:
            share, _ = self._shares[run_id]
            return RunStacks(fetchers=await asyncio.to_thread(share.stacks))
        run = self._runs.get(run_id)
        return RunStacks(await asyncio.to_thread(run.stacks) if run is not None else [])

    def _fetch(self, run_id: str, share: FetchShare) -> None:
        try:
            share.run()
        finally:
            del self._shares[run_id]

    def _carry_out(self, run_id: str, run: HostRun) -> None:
        try:
            run.run()
        finally:
            del self._runs[run_id]
            if forkserver.is_alive():
                rendezvous.prepare()
            else:
                self._leave()

    async def watch_forkserver(self) -> None:
        """Leaves the pool when no run can start here any more and none is here."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if not (forkserver.is_alive() or self._runs or self._shares):
                self._leave()
                return

    def _leave(self) -> None:
        self.loop.add_callback(self.close, reason=f"taas: {forkserver.why_ended()}")

    def _asking(self, run_id: str) -> Ask:
        """How a run, or its fetchers, ask for files that this host does not share."""

        def ask(what: str, **arguments: Any) -> Any:
            words = {"run_id": run_id, "what": what}
            return self.head.ask(ASK_STORE, **words, arguments=arguments)

        return ask

    def _is_alone(self) -> bool:
        return len(self._runs) + len(self._shares) == 1


async def serve(words: bytes) -> None:
    """Joins the pool when this host is warm; returns when the pool has closed or lost it.

    Args:
        words: `AgentSettings`, packed.
    """
    settings = unpack(words, AgentSettings)
    logging.getLogger("distributed").setLevel(logging.WARNING)
    use_steady_clock()
    place = _find_place(settings)
    guard.strongest()  # found while the forkserver imports
    problems = forkserver.warm_up()
    rendezvous.prepare()
    lease = Lease(settings.lease_s, functools.partial(end_agent, settings.lease_s))
    agent = AgentWorker(
        settings.scheduler,
        place=place,
        lease=lease,
        problems=problems,
        name=settings.name,
        security=Security(**settings.security),
        local_directory=settings.local_directory,
        death_timeout=30,
    )
    async with agent:
        if place.is_foreign:  # here, the supervisor's lease is a pipe, which no stall can cut
            lease.start()
        tasks = [asyncio.ensure_future(agent.head.beat())]
        tasks.append(asyncio.ensure_future(agent.watch_forkserver()))
        await agent.finished()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _find_place(settings: AgentSettings) -> Place:
    scheduler = get_address_host(settings.scheduler)
    address = system.choose_address(settings.interface, os.environ, scheduler)
    host = settings.host_name or socket.gethostname()
    interface = system.name_of(address)
    return Place(host, address, interface, settings.is_foreign, tuple(sys.path))
