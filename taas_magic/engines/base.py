"""The base classes of engines. An engine gets hosts for a pool.

To add an engine, write a subclass of `Engine`, and add it to `_ENGINES`. If the engine starts each
host itself, write a subclass of `HostsEngine` instead. An engine's module must not import Dask at
module level: a kernel calls `capacity`, and the pool's process calls `prepare`, before Dask is
imported.
"""

import asyncio
import importlib
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from taas_magic.config import PoolConfig
from taas_magic.errors import PoolError, UsageError
from taas_magic.host.system import LOOPBACK
from taas_magic.plan import HostCapacity
from taas_magic.setup.facts import Shell

if TYPE_CHECKING:
    from distributed import Scheduler

    from taas_magic.engines.keys import Keys

_ENGINES = {
    "local": "taas_magic.engines.local:LocalEngine",
    "ssh": "taas_magic.engines.ssh:SshEngine",
}
"""Import path of each engine's class, by the engine's name in taas.toml."""

_DASK_CLASS = "taas_magic.engines.dask_class:DaskClassEngine"

LOG = "pool.log"
"""Name of the log of the pool's process, in the pool's folder."""

LOG_LINES = 15
"""Number of a log's last lines that messages show."""


class Engine(ABC):
    """The engine of one pool, which opens the pool's Dask scheduler and gets the pool's hosts.

    A kernel calls `capacity`, `shells` and `notes`. The pool's process calls the other methods.

    Attributes:
        ready: Names of the agents whose hosts can start ranks. The pool's process adds the names.
    """

    def __init__(self, pool: PoolConfig) -> None:
        self.pool = pool
        self.ready: set[str] = set()
        self._numbers = itertools.count()

    @abstractmethod
    def capacity(self) -> HostCapacity:
        """Return the GPUs and cores of one host, without allocating a host."""

    @abstractmethod
    def open(
        self, scheduler: type, keys: "Keys", folder: str
    ) -> AbstractAsyncContextManager["Scheduler"]:
        """Run the pool's scheduler until the block ends; then end all hosts.

        This method starts no hosts; `request_hosts` starts them.

        Args:
            folder: The pool's private folder on this machine.
        """

    def prepare(self) -> None:
        """Start processes that do not need Dask, before the pool's process imports Dask.

        This method does not block.
        """
        return

    def shells(self, stop: threading.Event) -> Mapping[str, AbstractContextManager[Shell]]:
        """Return shells that run commands on the pool's hosts, even on hosts that no run uses.

        Args:
            stop: Event that the caller sets to end attempts to connect.

        Returns:
            For each host name, a context manager. Entering the manager connects to the host. Empty
            if the hosts do not exist before they are requested.
        """
        return {}

    def notes(self) -> tuple[str, ...]:
        """Return lines about the pool's settings for the status header of each run."""
        return ()

    @abstractmethod
    async def request_hosts(self, count: int) -> list[str]:
        """Request as many hosts as are missing from a total of `count`; do not wait for hosts.

        Hosts that have joined, and hosts that were requested earlier, are part of the total. The
        pool calls this method repeatedly until `count` hosts can start ranks.

        Returns:
            One line for the user for each host that has not joined yet.

        Raises:
            PoolError: A requested host could not be started or will not join.
        """

    @abstractmethod
    async def release_hosts(self, keep: Collection[str]) -> None:
        """End or return all hosts except those in `keep`, even hosts that have not joined yet.

        Args:
            keep: Names of the agents whose hosts the pool keeps.
        """

    def is_starting(self) -> bool:
        """Return whether a host is starting and makes progress, as far as the engine can see.

        The pool waits at most `start_timeout_s` for hosts. Whenever this method returns True, this
        time starts again from zero.
        """
        return False

    @asynccontextmanager
    async def tunnel(self, agent: str, address: str) -> AsyncIterator[str]:
        """Let a host connect to a port of this machine until the block ends.

        Yields the address to which the host must connect; it may differ from `address`.

        Args:
            agent: Name of the host's agent.
            address: Address of the port on this machine, as "tls://host:port". The server on this
                port must authenticate its clients.

        Raises:
            PoolError: The host cannot reach the port.
        """
        yield address

    async def why_lost(self, agent: str) -> str:
        """Return one line that says why a host was lost; "" if the reason is unknown."""
        return ""

    def new_name(self) -> str:
        """Return a host name that this engine has not used yet."""
        return f"{self.pool.name}-{next(self._numbers)}"


class Host(ABC):
    """One host of a `HostsEngine`, with the methods that start and end it.

    Attributes:
        name: Dask's name for the host's agent.
    """

    start_task: "asyncio.Task[None]"

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    async def start(self) -> None:
        """Start the host; return when the host can start ranks (see `Engine.ready`).

        Raises:
            PoolError: The host could not be started.
        """

    @abstractmethod
    async def end(self) -> None:
        """End the host. If `start` is still running, cancel it."""

    @abstractmethod
    async def why_lost(self) -> str:
        """See `Engine.why_lost`. The engine ends the host after this call."""

    def slow_start_note(self) -> str:
        """Return one line for the user if the host's start takes unusually long, else ""."""
        return ""


class HostsEngine(Engine):
    """Base class of engines that start each of their hosts themselves.

    Attributes:
        hosts: Hosts that have joined or are starting, by name.
        ending: Unfinished tasks, each of which ends a host that was returned or lost.
    """

    keys: "Keys"
    folder: str
    scheduler: "Scheduler"

    def __init__(self, pool: PoolConfig) -> None:
        super().__init__(pool)
        self.hosts: dict[str, Host] = {}
        self.ending: set[asyncio.Task[None]] = set()
        self._is_over = False

    @abstractmethod
    def make_host(self, name: str) -> Host:
        """Return a new host that has not been started."""

    @asynccontextmanager
    async def open(self, scheduler: type, keys: "Keys", folder: str) -> AsyncIterator["Scheduler"]:
        """Run the pool's scheduler until the block ends; then end all hosts. See `Engine.open`.

        The scheduler listens on the loopback interface, and uses TLS. At the end, waits until all
        hosts have ended.
        """
        from distributed import Security

        self.keys, self.folder = keys, folder
        secure = Security(**keys.scheduler())
        async with scheduler(host=LOOPBACK, protocol="tls://", security=secure) as self.scheduler:
            try:
                yield self.scheduler
            finally:
                self._is_over = True  # from now on, `request_hosts` must start no more hosts
                await self.release_hosts(())
                await asyncio.gather(*self.ending)

    async def request_hosts(self, count: int) -> list[str]:
        """See `Engine.request_hosts`.

        Starts the missing hosts in background tasks. If hosts of earlier calls failed to start,
        raises one PoolError with all failures; the next call replaces the failed hosts. Returns a
        note for each host whose start takes unusually long.
        """
        while len(self.hosts) < count and not self._is_over:
            host = self.make_host(self.new_name())
            self.hosts[host.name] = host
            host.start_task = asyncio.create_task(host.start())
        failures = []
        for name, host in list(self.hosts.items()):
            is_over = host.start_task.done() and not host.start_task.cancelled()
            if is_over and (error := host.start_task.exception()) is not None:
                failures.append(str(error))
                del self.hosts[name]
        if failures:
            raise PoolError("\n".join(dict.fromkeys(failures)))
        return sorted(filter(None, (host.slow_start_note() for host in self.hosts.values())))

    def is_starting(self) -> bool:
        """Return whether any host is starting; see `Engine.is_starting`.

        Every starting host counts as making progress, because no start can hang: the supervisor or
        the agent ends a host that is stuck.
        """
        return any(not host.start_task.done() for host in self.hosts.values())

    async def release_hosts(self, keep: Collection[str]) -> None:
        """See `Engine.release_hosts`."""
        left = [host for name, host in self.hosts.items() if name not in keep]
        await asyncio.gather(*map(self._end, left))
        await asyncio.gather(*(host.start_task for host in left), return_exceptions=True)

    async def why_lost(self, agent: str) -> str:
        """See `Engine.why_lost`. Also ends the host's remaining processes, in the background."""
        if (host := self.hosts.get(agent)) is None:
            return ""
        why = await host.why_lost()
        if agent in self.hosts:
            self._end(host)
        return why

    def _end(self, host: Host) -> "asyncio.Task[None]":
        del self.hosts[host.name]
        self.ending.add(ending := asyncio.create_task(host.end()))
        ending.add_done_callback(self.ending.discard)
        return ending


def find_engine(pool: PoolConfig) -> Engine:
    """Return a new engine for a pool, of the class that the pool's setting `engine` names.

    A name with a dot is the import path of a Dask cluster class.

    Raises:
        UsageError: No engine has that name.
    """
    place = _DASK_CLASS if "." in pool.engine else _ENGINES.get(pool.engine)
    if place is None:
        raise UsageError(
            f'pool "{pool.name}": there is no engine "{pool.engine}". There are '
            f"{', '.join(sorted(_ENGINES))}, and Dask cluster classes by their import path"
        )
    module, _, name = place.partition(":")
    engine: type[Engine] = getattr(importlib.import_module(module), name)
    return engine(pool)


def log_tail(path: Path) -> str:
    """Return the last `LOG_LINES` lines of a log file, and below them the file's path."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return "\n".join([*text.splitlines()[-LOG_LINES:], f"({path})"])
