"""The contract of an engine: where a pool's hosts come from.

An engine opens a Dask `SpecCluster` whose members run `AgentWorker`; all else (which run gets which
hosts, events, the journal, giving hosts back) is the controller's and the same for every engine.
"""

import asyncio
import importlib
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from taas_magic.config import PoolConfig
from taas_magic.errors import UsageError
from taas_magic.plan import HostCapacity
from taas_magic.setup.facts import Shell

if TYPE_CHECKING:
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
    """One pool's engine. `capacity` is asked in the kernel, the rest in the pool's process.

    Args:
        pool: The pool's settings.
    """

    name: ClassVar[str]

    def __init__(self, pool: PoolConfig) -> None:
        self.pool = pool
        self._numbers = itertools.count()

    @abstractmethod
    def capacity(self) -> HostCapacity:
        """What one host offers, known without taking one."""

    @abstractmethod
    def prepare(self) -> None:
        """Starts what can be started before Dask is imported; returns at once."""

    @abstractmethod
    def open(self, scheduler: type, keys: "Keys", folder: str) -> Any:
        """Makes the cluster, with a scheduler and no host yet.

        Args:
            scheduler: The class of Dask scheduler to use.
            keys: The pool's.
            folder: The pool's private folder on this machine.

        Returns:
            A `distributed.SpecCluster`, not yet awaited.
        """

    def ways(self, stop: threading.Event) -> Mapping[str, AbstractContextManager[Shell]]:
        """The ways to hosts that can be asked before a run takes them, by the hosts' names.

        Each connects when it is entered, and gives up when `stop` is set.
        """
        return {}

    async def ensure(self, cluster: Any, count: int) -> list[str]:
        """Asks for hosts until `count` were asked for; called again and again while they come.

        Returns:
            What is known of those that have not joined, a line each; for the user.

        Raises:
            PoolError: One of them will not come.
        """
        self.ask_for(cluster, count)
        await cluster
        return []

    def ask_for(self, cluster: Any, count: int) -> None:
        """Asks for hosts until `count` were asked for, by names that no host had before.

        Dask closes, 15 s after a worker has left (`distributed.deploy.lost-worker-timeout`), what
        then has its name and has not joined; and `scale` gives names anew.
        """
        for _ in range(count - len(cluster.worker_spec)):
            cluster.worker_spec[f"{self.pool.name}-{next(self._numbers)}"] = cluster.new_spec

    async def release(self, cluster: Any, keep: Collection[str]) -> None:
        """Gives back all hosts, come or to come, but those whose agents are named."""
        await cluster.scale_down([n for n in list(cluster.worker_spec) if str(n) not in keep])

    @asynccontextmanager
    async def way(self, agent: str, address: str) -> AsyncIterator[str]:
        """Lets a host reach a port of this machine while the block lasts; gives its address there.

        Args:
            agent: The host's, by its name.
            address: The port's on this machine, as "tls://host:port"; it asks for keys itself.

        Raises:
            PoolError: The host cannot reach it.
        """
        yield address

    async def why_lost(self, agent: str) -> str:
        """What is known of a host that was lost, in one line; "" when nothing is."""
        return ""


@dataclass(frozen=True)
class HostSource:
    """An engine and the cluster that it has opened: where the pool's process gets hosts."""

    engine: Engine
    cluster: Any
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Hosts that are being given back and hosts that are asked for may have the same names."""

    async def ensure(self, count: int) -> list[str]:
        """See `Engine.ensure`. Who gives up waiting does not undo half of it.

        A host that was asked for at that moment would otherwise be known to nobody.
        """
        return await asyncio.shield(self._ensure(count))

    async def release(self, keep: Collection[str]) -> None:
        """See `Engine.release`."""
        async with self._turn:
            await self.engine.release(self.cluster, keep)

    def way(self, agent: str, address: str) -> AbstractAsyncContextManager[str]:
        """See `Engine.way`."""
        return self.engine.way(agent, address)

    async def why_lost(self, agent: str) -> str:
        """See `Engine.why_lost`."""
        return await self.engine.why_lost(agent)

    async def _ensure(self, count: int) -> list[str]:
        async with self._turn:
            return await self.engine.ensure(self.cluster, count)


def find_engine(pool: PoolConfig) -> Engine:
    """The engine that a pool's settings name.

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


def log_tail(folder: Path) -> str:
    """The last lines that a pool's processes wrote, and where the others are."""
    path = folder / LOG
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return "\n".join([*text.splitlines()[-LOG_LINES:], f"({path})"])
