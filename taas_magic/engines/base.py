"""The contract of an engine: where a pool's hosts come from.

An engine opens a Dask `SpecCluster` whose members run `AgentWorker`; all else (which run gets which
hosts, events, the journal, giving hosts back) is the controller's and the same for every engine.
A new one is a class after `Engine`, and its line in `_ENGINES`. No module of an engine imports Dask
at its top: a kernel asks for `capacity`, and the pool's process for `prepare`, before that.
"""

import asyncio
import importlib
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Generator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taas_magic.config import PoolConfig
from taas_magic.errors import UsageError
from taas_magic.host.system import LOOPBACK
from taas_magic.plan import HostCapacity
from taas_magic.setup.facts import Shell

if TYPE_CHECKING:
    from distributed import SpecCluster

    from taas_magic.engines.keys import Keys

_ENGINES = {
    "local": "taas_magic.engines.local:LocalEngine",
    "ssh": "taas_magic.engines.ssh:SshEngine",
}
"""Where each engine is; only the one that a pool names is imported."""

_DASK_CLASS = "taas_magic.engines.dask_class:DaskClassEngine"

CLOSE_S = 10.0
"""How long a supervisor may take to end all of its host, in seconds."""

LOG = "pool.log"
LOG_LINES = 15


class Engine(ABC):
    """One pool's engine. `capacity` and `ways` are asked in the kernel, the rest in the pool."""

    def __init__(self, pool: PoolConfig) -> None:
        self.pool = pool
        self.cluster: Any = None
        self._numbers = itertools.count()
        self._turn = asyncio.Lock()
        """Hosts that are being given back and hosts that are asked for may have the same names."""

    @abstractmethod
    def capacity(self) -> HostCapacity:
        """Return what one host offers, known without taking one."""

    @abstractmethod
    def open(self, scheduler: type, keys: "Keys", folder: str) -> "SpecCluster":
        """Make the cluster, not yet awaited, with a scheduler and no host; keep it as `cluster`.

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

    async def bring(self, count: int) -> list[str]:
        """Ask for hosts until `count` were asked for; called again and again while they come.

        Returns:
            What is known of those that have not joined, a line each; for the user.

        Raises:
            PoolError: One of them will not come.
        """
        self.ask_for(count)
        await self.cluster
        return []

    async def give_back(self, keep: Collection[str]) -> None:
        """Give back all hosts, come or to come, but those whose agents are named."""
        left = [name for name in self.cluster.worker_spec if str(name) not in keep]
        await self.cluster.scale_down(left)

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

    def ask_for(self, count: int) -> None:
        """Ask for hosts until `count` were asked for, by names that no host had before.

        Dask closes, 15 s after a worker has left (`distributed.deploy.lost-worker-timeout`), what
        then has its name and has not joined; and `scale` gives names anew.
        """
        for _ in range(count - len(self.cluster.worker_spec)):
            name = f"{self.pool.name}-{next(self._numbers)}"
            self.cluster.worker_spec[name] = self.cluster.new_spec

    async def ensure(self, count: int) -> list[str]:
        """Call `bring` when nothing is being given back. Who stops waiting does not undo half.

        A host that was asked for at that moment would otherwise be known to nobody.
        """

        async def bring() -> list[str]:
            async with self._turn:
                return await self.bring(count)

        return await asyncio.shield(bring())

    async def release(self, keep: Collection[str]) -> None:
        """Call `give_back` when nothing is being asked for."""
        async with self._turn:
            await self.give_back(keep)

    async def end(self) -> None:
        """Give all hosts back, for good: who still waits for some has no turn any more.

        Otherwise Dask would wait, as the cluster closes, for hosts that are coming.
        """
        await self._turn.acquire()
        await self.give_back(())


class DaskHost:
    """A host as Dask's `SpecCluster` knows it: distributed's `ProcessInterface`.

    Not by inheritance, as that would import Dask.
    """

    def __init__(self) -> None:
        from distributed.core import Status

        self.status = Status.created
        self._starting = asyncio.Lock()

    def __await__(self) -> Generator[Any, None, "DaskHost"]:
        return self._started().__await__()

    async def start(self) -> None:
        """Bring the host up; may return before its agent has joined."""

    async def close(self) -> None:
        """End what is left of the host; called once it has been asked to leave the pool."""
        from distributed.core import Status

        self.status = Status.closed

    async def _started(self) -> "DaskHost":
        from distributed.core import Status

        async with self._starting:
            if self.status == Status.created:
                await self.start()
                self.status = Status.running
        return self


def make_cluster(engine: Engine, scheduler: type, keys: "Keys", host: type) -> "SpecCluster":
    """Return a cluster whose scheduler listens on this machine's loopback.

    Args:
        host: A class of `DaskHost`, called with the scheduler's address, `engine` and `name`.
    """
    from distributed import Security, SpecCluster

    secure = {"protocol": "tls://", "security": Security(**keys.scheduler())}
    return SpecCluster(
        scheduler={"cls": scheduler, "options": {"host": LOOPBACK, **secure}},
        worker={"cls": host, "options": {"engine": engine}},
        security=Security(**keys.kernel()),
        asynchronous=True,
        name=engine.pool.name,
    )


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
