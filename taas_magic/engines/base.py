"""The contract of an engine: where a pool's hosts come from.

An engine opens the pool's scheduler, which the agents of its hosts join (`AgentWorker`); all else
(which run gets which hosts, events, the journal, giving hosts back) is the controller's and the
same for every engine. A new one is a class after `Engine`, or after `HostsEngine` if it starts each
host itself, and its line in `_ENGINES`. No module of an engine imports Dask at its top: a kernel
asks for `capacity`, and the pool's process for `prepare`, before that.
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
"""Where each engine is; only the one that a pool names is imported."""

_DASK_CLASS = "taas_magic.engines.dask_class:DaskClassEngine"

LOG = "pool.log"
LOG_LINES = 15


class Engine(ABC):
    """One pool's engine. `capacity` and `ways` are asked in the kernel, the rest in the pool."""

    def __init__(self, pool: PoolConfig) -> None:
        self.pool = pool
        self._numbers = itertools.count()

    @abstractmethod
    def capacity(self) -> HostCapacity:
        """Return what one host offers, known without taking one."""

    @abstractmethod
    def open(
        self, scheduler: type, keys: "Keys", folder: str
    ) -> AbstractAsyncContextManager["Scheduler"]:
        """Run the pool's scheduler while the block lasts, first with no host; then end all hosts.

        Args:
            folder: The pool's private folder on this machine.
        """

    def prepare(self) -> None:
        """Start what can be started before Dask is imported; returns at once."""
        return

    def ways(self, stop: threading.Event) -> Mapping[str, AbstractContextManager[Shell]]:
        """Return the ways to hosts that can be asked before a run takes them, by hosts' names.

        Each connects when it is entered, and gives up when `stop` is set.
        """
        return {}

    @abstractmethod
    async def bring(self, count: int) -> list[str]:
        """Ask for hosts until `count` were asked for; called again and again while they come.

        Returns:
            What is known of those that have not joined, a line each; for the user.

        Raises:
            PoolError: One of them will not come.
        """

    @abstractmethod
    async def give_back(self, keep: Collection[str]) -> None:
        """Give back all hosts, come or to come, but those whose agents are named."""

    @asynccontextmanager
    async def way(self, agent: str, address: str) -> AsyncIterator[str]:
        """Let a host reach a port of this machine while the block lasts; gives its address there.

        Args:
            agent: The host's, by its name.
            address: The port's on this machine, as "tls://host:port"; it asks for keys itself.

        Raises:
            PoolError: The host cannot reach it.
        """
        yield address

    async def why_lost(self, agent: str) -> str:
        """Return what is known of a host that was lost, in one line; "" when nothing is."""
        return ""

    def new_name(self) -> str:
        """Return a name that no host had before."""
        return f"{self.pool.name}-{next(self._numbers)}"


class Host(ABC):
    """A host that a `HostsEngine` starts.

    Attributes:
        name: By which Dask will know its agent.
        coming: `start`, which the engine has begun.
    """

    coming: "asyncio.Task[None]"

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    async def start(self) -> None:
        """Bring the host up; returns when its agent has joined.

        Raises:
            PoolError: It will not come.
        """

    @abstractmethod
    async def end(self) -> None:
        """End what there is of the host, wherever `start` stands."""

    @abstractmethod
    async def why_lost(self) -> str:
        """See `Engine.why_lost`; the host is ended after that."""

    def news(self) -> str:
        """Return what it has been doing for long, as a line for the user; "" when it is not."""
        return ""


class HostsEngine(Engine):
    """An engine that starts each of its hosts.

    Attributes:
        hosts: Those that are there or coming, by name.
        ending: What ends others, which were given back or lost.
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
        """Return a host, not started."""

    @asynccontextmanager
    async def open(self, scheduler: type, keys: "Keys", folder: str) -> AsyncIterator["Scheduler"]:
        """See `Engine.open`: it listens on this machine's loopback."""
        from distributed import Security

        self.keys, self.folder = keys, folder
        secure = Security(**keys.scheduler())
        async with scheduler(host=LOOPBACK, protocol="tls://", security=secure) as self.scheduler:
            try:
                yield self.scheduler
            finally:
                self._is_over = True  # who still waits for hosts gets none
                await self.give_back(())
                await asyncio.gather(*self.ending)

    async def bring(self, count: int) -> list[str]:
        """See `Engine.bring`; a host that has failed is told once, and forgotten."""
        while len(self.hosts) < count and not self._is_over:
            host = self.make_host(self.new_name())
            self.hosts[host.name] = host
            host.coming = asyncio.create_task(host.start())
        failures = []
        for name, host in list(self.hosts.items()):
            is_over = host.coming.done() and not host.coming.cancelled()
            if is_over and (error := host.coming.exception()) is not None:
                failures.append(str(error))
                del self.hosts[name]
        if failures:
            raise PoolError("\n".join(dict.fromkeys(failures)))
        return sorted(filter(None, (host.news() for host in self.hosts.values())))

    async def give_back(self, keep: Collection[str]) -> None:
        """See `Engine.give_back`."""
        left = [host for name, host in self.hosts.items() if name not in keep]
        await asyncio.gather(*map(self._end, left))
        await asyncio.gather(*(host.coming for host in left), return_exceptions=True)

    async def why_lost(self, agent: str) -> str:
        """See `Engine.why_lost`; what is left of the host is ended."""
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
    """Return the engine that a pool's settings name.

    Raises:
        UsageError: There is none of that name.
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
    """Return the last lines of a log, and where the others are."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return "\n".join([*text.splitlines()[-LOG_LINES:], f"({path})"])
