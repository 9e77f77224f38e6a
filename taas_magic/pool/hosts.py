"""The hosts of a pool, in the pool's process: membership, leases, and calls to their agents.

The pool opens no connection to a host. Instead, the host's agent connects to the pool. Requests,
responses and beats travel over this connection.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from distributed import Scheduler, SchedulerPlugin
from distributed.comm import CommClosedError

from taas_magic.engines.base import Engine
from taas_magic.errors import PoolError
from taas_magic.host.spec import AGENT, ANSWER, BEAT, BEAT_ACK, CALL, POOL_BEAT
from taas_magic.leases import LOST_AFTER_S
from taas_magic.messages import (
    DescribeHost,
    GetHostFacts,
    HostFacts,
    Request,
    StartingHost,
    from_json,
    to_bytes,
)
from taas_magic.setup.facts import raise_if_unusable, this_kernel

_numbers = itertools.count(1)
_T = TypeVar("_T")


@dataclass
class PoolHost:
    """A host that has joined the pool, as the pool's process sees it.

    Attributes:
        address: Dask's address of the host's agent.
        agent: Name of the host's agent. The engine and Dask identify the host by this name.
        last_message_at: Time of the host's last beat, on this process's monotonic clock.
        excused_s: Seconds since `last_message_at` in which this process was stalled and could not
            receive a beat. They do not count as silence of the host.
        name: The host's name in the notebook; "" until the host can start ranks.
        starting: The last progress report of a host that cannot start ranks yet.
        protection: How the host protects the project store, such as "Landlock" (a value of
            `store.guard.StoreProtection`).
        peer_address: The address at which other hosts reach this host's ranks and fetchers.
        runs: Ids of the shares (ranks or fetchers of a run) that run on the host.
        is_returned: Whether the pool has given the host back to the engine. Then it gets no runs.
        allocated_s: Seconds for which the pool has had the host.
        idle_since: Monotonic time at which `PoolMeter` first found the host without a run. None
            while the host has a run or has just been chosen for a run.
        known_modules: Modules that an earlier check has found on the host; None before the first
            check.
        pending: Futures of requests that the host has not answered yet, by request number.
        why_lost: The reason why this process dropped the host; "" if it did not drop the host.
    """

    address: str
    agent: str = ""
    last_message_at: float = field(default_factory=time.monotonic)
    excused_s: float = 0.0
    name: str = ""
    starting: StartingHost | None = None
    protection: str = ""
    peer_address: str = ""
    runs: set[str] = field(default_factory=set)
    gpus: int = 0
    is_returned: bool = False
    allocated_s: float = 0.0
    idle_since: float | None = None
    known_modules: set[str] | None = None
    pending: dict[int, asyncio.Future[bytes]] = field(default_factory=dict)
    why_lost: str = ""


ASK_AGAIN_S = 0.5
"""Seconds between two requests to the engine, while too few hosts can start ranks."""

CALL_S = 150.0
"""Maximum seconds for a host to respond to a request, unless the caller sets another limit."""

REPORT_HOST_AFTER_S = 1.5
"""Seconds without a response to a `DescribeHost` request, after which the user gets a message."""

FAILED_STARTS = 3
"""Number of failed starts of hosts after which a wait for hosts fails.

The start of a host has failed if the pool dropped the host before it could start ranks.
"""

SLOW_S = 5.0
"""Seconds that a host's import of a module may take before the user gets a message about it."""

_CHECKS_PER_LEASE = 32

logger = logging.getLogger(__name__)


class BackgroundTasks:
    """The running background tasks of one object.

    asyncio may drop a task to which nothing refers, so this object keeps a reference to each task.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()

    def start(self, work: Awaitable[Any]) -> None:
        """Run `work` as an asyncio task, and keep a reference to the task until it ends."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class PoolHosts(SchedulerPlugin):
    """The hosts of a pool that have joined.

    This object requests hosts from the engine, sends requests to the hosts' agents, and drops hosts
    that are lost.

    Args:
        source: Engine that provides the hosts.
        start_timeout_s: Seconds that a wait for hosts may last while no host is starting.
        lease_s: Seconds without contact to this process after which a host ends itself.
        on_lost: Called with each host that is gone, and with the reason. It is not called for a
            host that ended by itself before it could start ranks.
        are_local: Whether all hosts run on the notebook's machine.
        names: Names of the hosts in taas.toml; empty for engines whose hosts have no names there.
    """

    name = "taas-hosts"

    def __init__(
        self,
        scheduler: Scheduler,
        source: Engine,
        start_timeout_s: float,
        lease_s: float,
        on_lost: Callable[[PoolHost, str], None] = lambda host, why: None,
        *,
        are_local: bool = False,
        names: Sequence[str] = (),
    ) -> None:
        self._scheduler, self._source, self.are_local = scheduler, source, are_local
        self.start_timeout_s, self._lease_s = start_timeout_s, lease_s
        self._on_lost_host, self._names = on_lost, names
        self._hosts: dict[str, PoolHost] = {}
        self._changed = asyncio.Condition()
        self._tasks = BackgroundTasks()
        self._acquiring = self._runs_waiting = 0
        self._lost_early: list[str] = []
        self.awaited: list[str] = []
        """One line for the user about each requested host that cannot start ranks yet."""
        self.refused = 0
        """Number of ignored messages: late responses, invalid reports, beats of unknown hosts."""
        scheduler.stream_handlers[ANSWER] = self._on_answer
        scheduler.stream_handlers[BEAT] = self._on_beat
        scheduler.add_plugin(self)

    def all(self) -> list[PoolHost]:
        """Return the hosts that can start ranks, in the order in which they joined."""
        return [m for m in self._hosts.values() if m.name and not m.is_returned]

    def starting(self) -> list[StartingHost]:
        """Return the progress reports of hosts that have joined but cannot start ranks yet."""
        coming = [m.starting for m in self._hosts.values() if not m.name and not m.is_returned]
        return [host for host in coming if host is not None]

    def named(self, agent: str) -> PoolHost | None:
        """Return the host whose agent is named `agent`; None if the pool has no such host."""
        return next((it for it in self._hosts.values() if it.agent == agent), None)

    async def acquire(
        self,
        count: int,
        preferred: Collection[str] = (),
        on_wait: Callable[[str], None] | None = None,
        has_run: bool = True,
    ) -> list[PoolHost]:
        """Request missing hosts, wait until `count` hosts can start ranks, and return these hosts.

        A host that died a moment ago may still count as joined. So each chosen host must first
        respond to a request. If a chosen host does not respond, drop it and wait again.

        Args:
            preferred: Addresses of hosts that are chosen first.
            on_wait: Function called with each line about requested hosts that cannot start ranks
                yet, and with a message for each host that has not responded within
                `REPORT_HOST_AFTER_S`. The same line may come several times. Kernels that wait for
                hosts always receive the lines. They receive the messages only if `on_wait` is None.
            has_run: Whether a run waits for the hosts. If not, new hosts begin to import modules
                that runs need later.

        Raises:
            PoolError: The hosts did not join in time, or the engine cannot provide a host. In both
                cases, all hosts without a run go back to the engine.
        """
        while True:
            self._runs_waiting += has_run
            try:
                taken = await self._acquire(count, preferred, on_wait)
            finally:
                self._runs_waiting -= has_run
            await asyncio.gather(*(self._await_response(host, on_wait) for host in taken))
            there = [host for host in taken if self._hosts.get(host.address) is host]
            if len(there) == count:
                return taken

    async def _await_response(self, host: PoolHost, on_wait: Callable[[str], None] | None) -> None:
        """Check that a host responds to `DescribeHost`; drop a host that does not.

        After `REPORT_HOST_AFTER_S` without a response, send the user a message that names the host.
        If the host also sends no beats, the message says since when, and when another host replaces
        it. Drop the host if it responds with an error, or does not respond within `CALL_S`.

        Args:
            on_wait: Receives the message. If None, all kernels that wait for hosts receive the
                message. At the end, they receive an empty list, so that they remove the message.
        """

        def report_wait() -> None:
            silent_s = time.monotonic() - host.last_message_at
            last_message_at = time.strftime("%H:%M:%S", time.localtime(time.time() - silent_s))
            why = "not ready yet"
            if silent_s >= REPORT_HOST_AFTER_S:
                why = (
                    f"silent since {last_message_at} ({silent_s:.0f} s); after "
                    f"{self._lease_s + LOST_AFTER_S:g} s another host replaces it"
                )
            line = f"waiting for host {host.name}: {why}"
            if on_wait is None:
                self._publish_lines([line])
            else:
                on_wait(line)

        late = asyncio.get_running_loop().call_later(REPORT_HOST_AFTER_S, report_wait)
        try:
            await self.call(host.address, DescribeHost())
        except PoolError as error:
            await self.drop(host.address, str(error))
        finally:
            late.cancel()
            if on_wait is None:
                self._publish_lines([])

    async def _acquire(
        self, count: int, preferred: Collection[str], on_wait: Callable[[str], None] | None
    ) -> list[PoolHost]:
        """Wait until `count` hosts can start ranks, and return the hosts that `choose` selects.

        If too few hosts join, give all hosts without a run back to the engine. At the end, send the
        kernels an empty list of lines, so that they no longer show lines about hosts. From now on,
        the chosen hosts do not count as idle.

        Raises:
            PoolError: The hosts did not join in time, or the engine cannot provide a host.
        """
        self._acquiring += 1
        try:
            await self._wait_until_ready(count, on_wait)
        except asyncio.TimeoutError:
            about = "\n".join(self.awaited) or "see the pool's log"
            joined = f"{len(self.all())} of {count} hosts joined"
            within = f"within {self.start_timeout_s:.0f} s"
            raise PoolError(f"{joined} {within}: {about}") from None
        finally:
            self._acquiring -= 1
            self._publish_lines([])
            if len(self.all()) < count:
                self._tasks.start(self.release())
        taken = self.choose(count, preferred)
        for host in taken:
            host.idle_since = None
        return taken

    def choose(self, count: int, preferred: Collection[str] = ()) -> list[PoolHost]:
        """Return up to `count` hosts that can start ranks.

        Choose hosts in `preferred` first, then the hosts with the fewest runs.

        Args:
            preferred: Addresses of hosts.
        """

        def order(host: PoolHost) -> int:
            return -1 if host.address in preferred else len(host.runs)

        return sorted(self.all(), key=order)[:count]

    def in_configured_order(self, hosts: Iterable[PoolHost]) -> list[PoolHost]:
        """Return `hosts` in the order of taas.toml; unchanged if taas.toml names no hosts."""
        numbers = {name: number for number, name in enumerate(self._names)}
        return sorted(hosts, key=lambda host: numbers.get(host.name, len(numbers)))

    async def release(
        self, stays: Callable[[PoolHost], bool] = lambda host: bool(host.runs)
    ) -> None:
        """Give back to the engine all hosts for which `stays` is false.

        The engine also cancels its open requests for hosts. Do nothing while `acquire` waits for
        hosts.

        Args:
            stays: Function that returns whether the pool keeps a host; by default, it keeps the
                hosts with a run.
        """
        if not self._acquiring:
            for host in self._hosts.values():
                host.is_returned = host.is_returned or not stays(host)
            await self._source.release_hosts(
                {m.agent for m in self._hosts.values() if not m.is_returned}
            )

    async def call(self, address: str, request: Request[_T], limit_s: float = CALL_S) -> _T:
        """Send a request to a host's agent and return the response.

        Args:
            address: Dask's address of the host's agent.
            limit_s: Maximum seconds for the response of a host that can start ranks. Any other host
                has no time limit, because it may still be importing modules.

        Raises:
            PoolError: The host is gone, did not respond in time, failed to handle the request, or
                sent an invalid response.
        """
        host = self._hosts.get(address)
        if host is None:
            raise PoolError(f"the host at {address} is gone")
        limit = limit_s if host.name else None
        number, name, who = next(_numbers), request.op(), f"host {host.name or address}"
        answer = host.pending[number] = asyncio.get_running_loop().create_future()
        self._send(address, op=CALL, id=number, name=name, request=to_bytes(request))
        try:
            return request.read_answer(await asyncio.wait_for(answer, limit))
        except ValueError as error:
            raise PoolError(f"{who} answered {name}: {error}") from error
        except asyncio.TimeoutError:
            raise PoolError(f"{who} did not answer {name} within {limit_s:.0f} s") from None
        finally:
            del host.pending[number]

    def tunnel(self, host: PoolHost, address: str) -> AbstractAsyncContextManager[str]:
        """Return a context manager in whose block a host can connect to a port of this machine.

        The context manager raises PoolError if the host cannot reach the port.

        Args:
            address: Address of the port on this machine, as "tls://host:port".

        Returns:
            A context manager whose value is the address to which the host must connect.
        """
        return self._source.tunnel(host.agent, address)

    async def watch(self) -> None:
        """Drop each host that has sent no beat for `lease_s` plus `LOST_AFTER_S`.

        Time in which this process was stalled does not count. This coroutine runs until its task is
        cancelled.
        """
        pause_s, limit_s = self._lease_s / _CHECKS_PER_LEASE, self._lease_s + LOST_AFTER_S
        checked_at = time.monotonic()
        while True:
            await asyncio.sleep(pause_s)
            before, checked_at = checked_at, time.monotonic()
            stalled_s = max(0.0, checked_at - before - 2 * pause_s)
            for host in list(self._hosts.values()):
                host.excused_s += stalled_s
                if checked_at - host.last_message_at - host.excused_s > limit_s:
                    why = f"it was silent for {limit_s:g} s: the host or its network failed"
                    await self.drop(host.address, why)

    async def drop(self, address: str, why: str) -> None:
        """Remove a lost or failed host for the reason `why`. The engine then ends the host.

        If the pool has no host at `address`, do nothing.

        Args:
            address: Dask's address of the host's agent.
        """
        if host := self._hosts.get(address):
            host.why_lost = why
            if not host.name:
                self._lost_early.append(f"host {host.agent}: {why}")
            await self._scheduler.remove_worker(address, stimulus_id="taas-lease")

    async def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Record a host that joins, and start a task that asks the host to describe itself.

        Ignore the Dask workers of vehicles. Called by Dask.
        """
        joined = scheduler.workers[worker]
        if AGENT in joined.extra:
            host = self._hosts[worker] = PoolHost(worker, str(joined.name))
            self._tasks.start(self._request_description(host))

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Remove a host that is gone. Called by Dask.

        Each `call` that waits for the host's response raises PoolError. If the host could start
        ranks, or `drop` removed it, a task asks the engine for details, and passes the host and the
        reason to `on_lost`.
        """
        host = self._hosts.pop(worker, None)
        if host is None:
            return
        why = host.why_lost or "its agent ended, or its connection broke"
        for answer in host.pending.values():
            if not answer.done():
                gone = f"host {host.name or worker} is gone: {why}"
                answer.set_exception(PoolError(gone))
        if host.name or host.why_lost:
            self._tasks.start(self._report_lost_host(host, why))

    async def _report_lost_host(self, host: PoolHost, why: str) -> None:
        detail = await self._source.why_lost(host.agent)
        self._on_lost_host(host, f"{why}; {detail}" if detail else why)

    async def _request_description(self, host: PoolHost) -> None:
        """Send `DescribeHost` to a new host, and mark the host as ready when the host responds.

        The request says whether a run waits for hosts; if not, the host begins to import modules
        that runs need later. When the host responds, store its name and its facts, add its agent to
        the engine's set `ready`, and wake the calls of `acquire`. Drop a host that responds with an
        error.

        This method waits without a time limit, because a host's imports may be slow. The wait also
        ends when the host is gone: `watch` drops a host that sends no beats, and a host whose
        imports are stuck ends itself.
        """
        greeting = DescribeHost(has_run=self._runs_waiting > 0)
        try:
            hello = await self.call(host.address, greeting)
        except PoolError as error:
            logger.warning("a new host did not answer: %s", error)
            await self.drop(host.address, str(error))
            return
        host.name, host.protection, host.peer_address = hello.host, hello.protection, hello.address
        host.gpus, host.starting = hello.gpus, None
        self._source.ready.add(host.agent)
        async with self._changed:
            self._changed.notify_all()

    async def _wait_until_ready(self, count: int, on_wait: Callable[[str], None] | None) -> None:
        """Request missing hosts until `count` hosts can start ranks; send lines about the progress.

        Call the engine every `ASK_AGAIN_S`, so that it replaces requested hosts that died. The
        kernels receive the lines. `on_wait`, if given, is called with each line every time.

        Raises:
            asyncio.TimeoutError: No host was starting for `start_timeout_s`, or the engine did not
                respond in that time.
            PoolError: The engine cannot provide a host, or `FAILED_STARTS` hosts were lost before
                they could start ranks.
        """

        async def change(known: int) -> None:
            async with self._changed:
                await self._changed.wait_for(lambda: len(self.all()) != known)

        lost_before, limit_s = len(self._lost_early), self.start_timeout_s
        until = time.monotonic() + limit_s
        while len(self.all()) < count:
            left_s = max(ASK_AGAIN_S, until - time.monotonic())
            lines = await asyncio.wait_for(self._source.request_hosts(count), left_s)
            lines = [*lines, *filter(None, map(slow_import, self.starting()))]
            self._publish_lines(lines)
            if on_wait is not None:
                for line in lines:
                    on_wait(line)
            if len(self._lost_early) - lost_before >= FAILED_STARTS:
                raise PoolError("\n".join(dict.fromkeys(self._lost_early[lost_before:])))
            if self._source.is_starting() or any(not m.name for m in self._hosts.values()):
                until = time.monotonic() + limit_s
            elif time.monotonic() > until:
                raise asyncio.TimeoutError
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(change(len(self.all())), ASK_AGAIN_S)

    def _publish_lines(self, lines: list[str]) -> None:
        """Send `lines` about requested hosts to all kernels; skip lines equal to the last ones."""
        if lines != self.awaited:
            self.awaited = lines
            self._scheduler.log_event(POOL_BEAT, lines)

    def _send(self, address: str, **message: Any) -> None:
        stream = self._scheduler.stream_comms.get(address)
        with contextlib.suppress(CommClosedError):  # Dask soon calls `remove_worker` for the host
            if stream is not None:
                stream.send(message)

    def _on_answer(self, worker: str, id: int, answer: bytes = b"", error: str = "") -> None:
        """Pass a host's response or error to the `call` that waits for it. Called by Dask.

        If no call waits for the response, ignore it and count it as refused.
        """
        host = self._hosts.get(worker)
        waiting = host.pending.get(id) if host is not None else None
        if host is None or waiting is None or waiting.done():
            self.refused += 1
        elif error:
            waiting.set_exception(PoolError(f"host {host.name or worker}: {error}"))
        else:
            waiting.set_result(answer)

    def _on_beat(self, worker: str, beat: float, starting: bytes = b"") -> None:
        """Record the time of a host's beat, and send an acknowledgement. Called by Dask.

        If the host cannot start ranks yet, also store its progress report. If the report is
        invalid, count it as refused, and record only the beat. Ignore a beat of an unknown host,
        and count it as refused.

        Args:
            beat: Mark of the beat, which the acknowledgement repeats.
            starting: A `StartingHost` as JSON; empty if there is no report.
        """
        host = self._hosts.get(worker)
        if host is None:
            self.refused += 1
            return
        if starting and not host.name:
            try:
                host.starting = from_json(starting, StartingHost)
            except ValueError:
                self.refused += 1
        host.last_message_at, host.excused_s = time.monotonic(), 0.0
        self._send(worker, op=BEAT_ACK, beat=beat)


def slow_import(host: StartingHost) -> str:
    """Return a line for the user if a host has been importing a module for `SLOW_S`, else "".

    The line names the module and the seconds so far. The seconds are rounded down to `SLOW_S` times
    a power of two, so that the line changes rarely.
    """
    if host.for_s < SLOW_S or not host.imports:
        return ""
    for_s = SLOW_S
    while 2 * for_s <= host.for_s:
        for_s *= 2
    return f"host {host.host} imports {host.imports}, {for_s:.0f} s"


async def require_fit(
    pool_hosts: PoolHosts, hosts: Iterable[PoolHost], modules: Sequence[str]
) -> None:
    """Check that all hosts have the notebook's versions of Python and torch, and all `modules`.

    Send requests only to hosts that have not passed an earlier check of these modules. Record the
    modules for each host that passes.

    Raises:
        PoolError: A host lacks something. The message names the host, what it lacks, and what to
            do.
    """
    new = [
        host
        for host in hosts
        if host.known_modules is None or not host.known_modules.issuperset(modules)
    ]
    if not new:
        return
    facts = await request_host_facts(
        pool_hosts, new, GetHostFacts(modules=list(modules), names=False)
    )
    raise_if_unusable(facts, this_kernel())
    for host in new:
        host.known_modules = (host.known_modules or set()).union(modules)


async def request_host_facts(
    pool_hosts: PoolHosts, hosts: Iterable[PoolHost], request: GetHostFacts
) -> list[HostFacts]:
    """Request facts, such as versions and modules, from all `hosts` at the same time.

    Returns:
        A `HostFacts` for each host, in the order of `hosts`. It has the host's name, and the
        difference between the host's clock and this machine's clock. If a host responds without
        facts, all fields of its `HostFacts` except the name have their default values.

    Raises:
        PoolError: A host is gone, did not respond in time, or failed to handle the request.
    """

    async def ask(host: PoolHost) -> HostFacts:
        begin = time.time()
        facts = await pool_hosts.call(host.address, request)
        return (facts or [HostFacts()])[0].with_host(host.name, begin)

    return list(await asyncio.gather(*map(ask, hosts)))
