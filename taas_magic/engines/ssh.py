"""The engine of SSH pools: hosts that are there already and let the user in.

Every connection is opened from the pool's process to the host's sshd, or by the host: its agent
reaches the pool's port through the SSH connection, so this machine needs no address that hosts can
dial.
"""

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from taas_magic.config import PoolConfig
from taas_magic.engines.base import CLOSE_S, DaskHost, Engine, make_cluster
from taas_magic.errors import PoolError, TaasError
from taas_magic.host.system import LOOPBACK, entry_code, supervisor_arguments
from taas_magic.leases import SSH_BEATS_PER_LEASE
from taas_magic.messages import AgentSettings, pack
from taas_magic.plan import HostCapacity
from taas_magic.setup.facts import DEFAULT_PYTHON, Shell, ask_host
from taas_magic.setup.install import prepare
from taas_magic.ssh.config import Target, find_target, read_config
from taas_magic.ssh.connect import (
    CONNECT_TIMEOUT_S,
    Connection,
    KeptCommand,
    Stopped,
    close_tunnel,
    connect,
    open_tunnel,
    shell_words,
)

if TYPE_CHECKING:
    from distributed import SpecCluster

    from taas_magic.engines.keys import Keys

_LOOK_S = 0.25
_POLL_S = 0.05
_END_S = 1.0

_SHARE = 0.9
"""Of the time that the controller waits for a host, so that it hears why there is none."""

_SLOW_S = 10.0
"""After how long something that a host is doing is worth a line to the user."""

_asked: dict[str, HostCapacity] = {}
_log = logging.getLogger("taas.ssh")
_T = TypeVar("_T")


class SshEngine(Engine):
    """Starts a supervisor, and through it the agent, on each host over SSH.

    Attributes:
        refusals: What is wrong with hosts that could not be had.
    """

    keys: "Keys"

    def __init__(self, pool: PoolConfig) -> None:
        super().__init__(pool)
        self.refusals: list[str] = []
        self._hosts: weakref.WeakSet[_SshHost] = weakref.WeakSet()
        self._coming: asyncio.Future[Any] | None = None
        self._free: list[str] = []
        self._leaving = 0
        self._given_back = asyncio.Condition()

    def capacity(self) -> HostCapacity:
        """Return what taas.toml says; what it leaves out is asked of the hosts, once in a process.

        Raises:
            PoolError: None of the hosts answers.
        """
        if self.pool.gpus is not None and self.pool.cores:
            return HostCapacity(self.pool.gpus, self.pool.cores)
        key = repr((self.pool.hosts, self.pool.python, self.pool.options))
        if key not in _asked:
            _asked[key] = _ask_capacity(self.pool)
        found = _asked[key]
        gpus = found.gpus if self.pool.gpus is None else self.pool.gpus
        return HostCapacity(gpus, self.pool.cores or found.cores)

    def ways(self, stop: threading.Event) -> Mapping[str, AbstractContextManager[Shell]]:
        """See `Engine.ways`: each is an SSH connection."""
        return {target.label: _way(target, stop) for target in _targets(self.pool)}

    def open(self, scheduler: type, keys: "Keys", folder: str) -> "SpecCluster":
        """See `Engine.open`."""
        self.keys, self._free = keys, list(self.pool.hosts)
        self._executor = ThreadPoolExecutor(2 * len(self._free), "taas-ssh")
        self.cluster = make_cluster(self, scheduler, keys, _SshHost)
        return self.cluster

    async def bring(self, count: int) -> list[str]:
        """Bring hosts up, for a moment at a time.

        Returns:
            What those are doing that take long.

        Raises:
            PoolError: One of them could not be had.
        """
        self.ask_for(count)
        if self._coming is None or self._coming.done():
            self._drop_failed()
            self._coming = asyncio.ensure_future(self.cluster)
        await asyncio.wait({self._coming}, timeout=_LOOK_S)
        if self.refusals:
            refusals, self.refusals = self.refusals, []
            raise PoolError("\n".join(dict.fromkeys(refusals)))
        error = self._coming.exception() if self._coming.done() else None
        if error is not None and not isinstance(error, PoolError):
            raise error
        return sorted(filter(None, (host.news() for host in self._hosts)))

    def _drop_failed(self) -> None:
        """Forget hosts that failed: Dask would take them for hosts that are coming."""
        from distributed.core import Status

        workers = self.cluster.workers
        for name in [name for name, host in workers.items() if host.status == Status.failed]:
            del workers[name]

    async def give_back(self, keep: Collection[str]) -> None:
        """See `Engine.give_back`; attempts to bring other hosts up end first."""
        for host in self._hosts:
            if host.name not in keep:
                host.give_up()
        self.refusals = []
        self._drop_failed()
        await super().give_back(keep)

    @asynccontextmanager
    async def way(self, agent: str, address: str) -> AsyncIterator[str]:
        """See `Engine.way`: as its agent, a host reaches this machine by SSH only.

        Raises:
            PoolError: The host is gone, or forwards no port.
        """
        connection = next((it.connection for it in self._hosts if it.name == agent), None)
        if connection is None:
            raise PoolError(f"host {agent} is gone")
        port = await self.in_thread(open_tunnel, connection, *_address_of(address))
        try:
            yield f"tls://{LOOPBACK}:{port}"
        finally:
            await self.in_thread(close_tunnel, connection, port)

    async def why_lost(self, agent: str) -> str:
        """See `Engine.why_lost`: what the host's SSH connection tells of its end."""
        hosts = [host for host in self._hosts if host.name == agent]
        said = [await self.in_thread(host.why_lost) for host in hosts]
        return next(filter(None, said), "")

    def note(self, host: "_SshHost") -> None:
        """Know a host from the first on: Dask knows it once it is up."""
        self._hosts.add(host)

    async def take(self, besides: Collection[str]) -> str | None:
        """Return a free host, awaiting those that are being given back; None if all are taken."""

        def find() -> str | None:
            return next((host for host in self._free if host not in besides), None)

        async with self._given_back:
            await self._given_back.wait_for(lambda: find() or not self._leaving)
            host = find()
            if host is not None:
                self._free.remove(host)
            return host

    async def put_back(self, host: str, end: Callable[[], None]) -> None:
        """Make a host free again, once `end` has returned; it is taken after the others.

        Args:
            end: Ends what runs there; may block.
        """
        self._leaving += 1
        try:
            await self.in_thread(end)
        finally:
            async with self._given_back:
                self._leaving -= 1
                self._free.append(host)
                self._given_back.notify_all()

    async def in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Run what blocks. Dask's and asyncio's own threads are too few for all hosts at once."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, work, *arguments)


@contextmanager
def _way(target: Target, stop: threading.Event) -> Iterator[Shell]:
    connection = connect(target, stop)
    try:
        yield connection
    finally:
        connection.close()


def _targets(pool: PoolConfig) -> list[Target]:
    """Return the hosts of a pool, as ssh's configuration has them.

    Raises:
        UsageError: A name, or the configuration, cannot be understood.
    """
    config = read_config(pool.options.get("ssh_config"))
    return [find_target(host, config) for host in pool.hosts]


def _ask_capacity(pool: PoolConfig) -> HostCapacity:
    """Return what the first host that answers offers; the hosts of a pool are alike.

    It may be interrupted at any time: nothing blocks in the caller's own thread.

    Raises:
        PoolError: None of the hosts answers.
    """
    stop = threading.Event()

    def ask(target: Target) -> HostCapacity:
        with _way(target, stop) as shell:
            found = ask_host(shell, pool.python)
        return HostCapacity(found.gpus, found.cores)

    executor = ThreadPoolExecutor(len(pool.hosts), "taas-ask")
    failures = []
    try:
        asked = {executor.submit(ask, target) for target in _targets(pool)}
        while asked:
            done, asked = wait(asked, return_when=FIRST_COMPLETED)
            for future in done:
                error = future.exception()
                if error is None:
                    return future.result()
                failures.append(str(error))
        raise PoolError("\n".join(failures))
    finally:
        stop.set()
        executor.shutdown(wait=False, cancel_futures=True)


class _SshHost(DaskHost):
    """A supervisor and its agent on a free host of the pool."""

    def __init__(self, scheduler: str, engine: SshEngine, name: str) -> None:
        super().__init__()
        self._scheduler, self._engine, self.name = scheduler, engine, name
        engine.note(self)
        self._host: str | None = None
        """As taas.toml has it; ssh's configuration of it is read anew by each that connects."""
        self.connection: Connection | None = None
        self._command: KeptCommand | None = None
        self._stop = threading.Event()
        self._doing, self._since = "", time.monotonic()

    async def start(self) -> None:
        """Bring up a free host of the pool; returns when its agent has joined.

        Raises:
            PoolError: None could be brought up, or it was given up.
        """
        from distributed.core import Status

        until = time.monotonic() + _SHARE * self._engine.pool.start_timeout_s
        failures: dict[str, str] = {}
        while (host := await self._engine.take(failures)) is not None:
            self._host, joined = host, False
            try:
                await self._engine.in_thread(self._bring_up, host)
                await self._join(host, until)
                joined = True
                return
            except Stopped:
                break
            except Exception as error:  # else Dask takes the host for one that is coming
                if self._stop.is_set():
                    break
                is_ours = isinstance(error, TaasError)
                failures[host] = (
                    str(error) if is_ours else f"host {host}: {type(error).__name__}: {error}"
                )
                _log.warning("%s", failures[host], exc_info=not is_ours)
            finally:
                self._do("")
                if not joined:
                    await self._leave()
        self.status = Status.failed
        if self._stop.is_set():
            raise PoolError("nobody waits for it any more")
        refusal = "\n".join(failures.values()) or "all of its hosts are taken"
        self._engine.refusals.append(refusal)
        raise PoolError(refusal)

    async def close(self) -> None:
        await self._leave()
        await super().close()

    def give_up(self) -> None:
        """End the attempt to bring a host up, wherever it stands; returns at once."""
        from distributed.core import Status

        if self.status == Status.created:
            self._stop.set()
            if self.connection is not None:
                self.connection.transport.close()

    def news(self) -> str:
        """Return what it has been doing for long; "" when it is not."""
        slow = self._doing and time.monotonic() - self._since > _SLOW_S
        return f"host {self._host}: {self._doing}" if slow and self._host else ""

    def why_lost(self) -> str:
        """Return what is known of its end, from its connection's; blocks for a moment."""
        command, connection = self._command, self.connection
        if command is None or connection is None or not command.ended.wait(_END_S):
            return ""
        if not connection.is_open:
            error = connection.transport.get_exception()
            return f"its SSH connection broke ({error or 'closed by the host'})"
        last = command.tail.rpartition("\n")[2]
        return f"its agent ended: {last}" if last else "its agent ended"

    def _do(self, doing: str) -> None:
        self._doing, self._since = doing, time.monotonic()

    def _bring_up(self, host: str) -> None:
        pool, name = self._engine.pool, self.name
        target = find_target(host, read_config(pool.options.get("ssh_config")))
        self._do(f"still connecting to {target.hostname}:{target.port}")
        limit_s = min(CONNECT_TIMEOUT_S, pool.start_timeout_s)
        self.connection = connection = connect(target, self._stop, limit_s, pool.lease_s)
        self._do("still putting packages into its cache, as on every first use")
        path_entries = prepare(connection, pool)
        address, port = _address_of(self._scheduler)
        settings = AgentSettings(
            scheduler=f"tls://{LOOPBACK}:{open_tunnel(connection, address, port)}",
            security=self._engine.keys.host(name),
            name=name,
            host_name=host,
            interface=pool.interface or "",
            lease_s=pool.lease_s,
        )
        path = ":".join(path_entries)
        environ = {"PYTHONPATH": path} if path else {}  # nothing where Python finds us by itself
        arguments = ["-c", entry_code("taas_magic.host.supervisor")]
        arguments += supervisor_arguments(pool.lease_s, pool.preload)
        self._do("its agent is still starting: torch is being imported")
        self._command = KeptCommand(
            connection,
            shell_words(pool.python or DEFAULT_PYTHON, arguments, environ),
            pack(settings) + b"\n",
            pool.lease_s / SSH_BEATS_PER_LEASE,
            lambda line: _log.warning("[%s] %s", host, line),
        )

    async def _join(self, host: str, until: float) -> None:
        """Return when the agent is a member of the pool."""
        assert self._command is not None
        while self.name not in self._engine.cluster.scheduler.aliases:
            if self._stop.is_set():
                raise Stopped
            if self._command.ended.is_set():
                raise PoolError(f"host {host}: its agent ended:\n{self._command.tail}")
            if time.monotonic() > until:
                raise PoolError(
                    f"host {host}: its agent did not join within "
                    f"start_timeout_s = {self._engine.pool.start_timeout_s:g}:\n"
                    f"{self._command.tail}"
                )
            await asyncio.sleep(_POLL_S)

    async def _leave(self) -> None:
        """End what runs on the host, then the connection; make the host free."""
        host, self._host = self._host, None
        if host is not None:
            await self._engine.put_back(host, self._end)

    def _end(self) -> None:
        if self._command is not None:
            self._command.close(CLOSE_S)
        if self.connection is not None:
            self.connection.close()
        self._command = self.connection = None


def _address_of(scheduler: str) -> tuple[str, int]:
    host, _, port = scheduler.rpartition("://")[2].rpartition(":")
    return host.strip("[]"), int(port)
