"""The base classes of engines. An engine gets hosts for a pool.

To add an engine, write a subclass of `Engine`, and add it to `_ENGINES`. If the engine starts each
host itself, write a subclass of `HostsEngine` instead. An engine's module must not import Dask at
module level: a kernel calls `capacity`, and the pool's process calls `prepare`, before Dask is
imported.
"""

import asyncio
import itertools
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from taas_magic.config import PoolConfig
from taas_magic.errors import PoolError, UsageError
from taas_magic.host.system import LOOPBACK
from taas_magic.late_imports import import_in_thread
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
"""Number of lines from the end of a log that error messages show."""


class Engine(ABC):
    """The engine of one pool, which opens the pool's Dask scheduler and gets the pool's hosts.

    A kernel calls `capacity`, `shells` and `notes`. The pool's process calls the other methods.

    Attributes:
        pool: The pool's settings.
        ready: Names of the agents of all hosts that can start ranks. The pool's process adds the
            names, and removes none: the name of a host that has ended stays.
    """

    def __init__(self, pool: PoolConfig) -> None:
        self.pool = pool
        self.ready: set[str] = set()
        self._numbers = itertools.count()

    @abstractmethod
    def capacity(self) -> HostCapacity:
        """Return the numbers of GPUs and cores of one host of the pool; allocate no host."""

    @abstractmethod
    def open(
        self, scheduler: type, keys: "Keys", folder: str
    ) -> AbstractAsyncContextManager["Scheduler"]:
        """Run the pool's Dask scheduler until the `with` block ends; then end all hosts.

        This method starts no hosts; later calls of `request_hosts` start them.

        Args:
            scheduler: Class of the scheduler.
            keys: Certificates and keys of the pool.
            folder: The pool's private folder on this machine.

        Returns:
            A context manager whose value is the running scheduler.
        """

    def prepare(self) -> None:
        """Start processes that the engine will need soon, so that they start during Dask's import.

        The pool's process calls this method before it imports Dask. The method must not import Dask
        or block. The default does nothing.
        """
        return

    def shells(self, stop: threading.Event) -> Mapping[str, AbstractContextManager[Shell]]:
        """Return one context manager for each host of the pool, by the host's name.

        A kernel uses it to run commands on the host without a run. At the start of its `with`
        block, the context manager connects to the host, and yields a shell. At the end, it closes
        the connection.

        Args:
            stop: Event that the caller sets to cancel connecting.

        Returns:
            The context managers. The default is an empty dict, for engines whose hosts exist only
            after a request.
        """
        return {}

    def notes(self) -> tuple[str, ...]:
        """Return notes for the user about the pool's settings, for the status header."""
        return ()

    @abstractmethod
    async def request_hosts(self, count: int) -> list[str]:
        """Request as many hosts as are missing from a total of `count`; do not wait for hosts.

        Hosts that have joined, and hosts that were requested earlier, are part of the total. The
        pool calls this method repeatedly until `count` hosts can start ranks.

        Returns:
            Lines for the user about hosts that have not joined yet.

        Raises:
            PoolError: A requested host could not be started or will not join.
        """

    @abstractmethod
    async def release_hosts(self, keep: Collection[str]) -> None:
        """End all hosts that the pool does not keep, or give them back to their provider.

        Also cancel requests for hosts that have not joined yet.

        Args:
            keep: Names of the agents whose hosts the pool keeps.
        """

    def is_starting(self) -> bool:
        """Return whether the engine knows of a host that is starting and makes progress.

        The pool waits at most `start_timeout_s` for hosts. Each time this method returns True, the
        pool begins to count this time again from zero. The default returns False.
        """
        return False

    @asynccontextmanager
    async def tunnel(self, agent: str, address: str) -> AsyncIterator[str]:
        """Let a host connect to a port of this machine until the `with` block ends.

        The default opens no tunnel and yields `address` unchanged: it is for hosts that can connect
        to this machine directly.

        Args:
            agent: Name of the host's agent.
            address: Address of the port on this machine, as "tls://host:port". The server on this
                port must authenticate its clients.

        Yields:
            The address to which the host must connect. It may differ from `address`.

        Raises:
            PoolError: The host cannot reach the port.
        """
        yield address

    async def why_lost(self, agent: str) -> str:
        """Return one line that says why a host was lost; "" if the engine does not know the reason.

        The default returns "".

        Args:
            agent: Name of the host's agent.
        """
        return ""

    def new_name(self) -> str:
        """Return a host name that this engine has not used yet."""
        return f"{self.pool.name}-{next(self._numbers)}"


class Host(ABC):
    """One host of an engine that starts and ends each of its hosts itself.

    Attributes:
        name: Name of the host's agent, by which Dask and the engine identify the host.
        start_task: The task that runs `start`.
    """

    start_task: "asyncio.Task[None]"

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    async def start(self) -> None:
        """Start the host; return when the host can start ranks.

        A host can start ranks as soon as the pool's process has added the host's name to
        `Engine.ready`.

        Raises:
            PoolError: The host could not be started.
        """

    @abstractmethod
    async def end(self) -> None:
        """End the host's processes, and wait for their end. If `start` still runs, cancel it."""

    @abstractmethod
    async def why_lost(self) -> str:
        """Return one line that says why this host was lost; "" if the reason is unknown.

        After this call, the engine ends the host.
        """

    def slow_start_note(self) -> str:
        """Return one line for the user if the host's start takes unusually long, else ""."""
        return ""


class HostsEngine(Engine):
    """Base class of engines that start and end each of their hosts themselves.

    Attributes:
        keys: Certificates and keys of the pool.
        folder: The pool's private folder on this machine.
        scheduler: The pool's Dask scheduler.
        hosts: Hosts that have joined or are starting, by the names of their agents.
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
        """Return an object for a new host, without starting the host.

        Args:
            name: Name of the host's agent.
        """

    @asynccontextmanager
    async def open(self, scheduler: type, keys: "Keys", folder: str) -> AsyncIterator["Scheduler"]:
        """Run the pool's Dask scheduler until the `with` block ends; then end all hosts.

        The scheduler listens on the loopback interface, and uses TLS. At the end of the block, wait
        until all hosts have ended.

        Args:
            scheduler: Class of the scheduler.
            keys: Certificates and keys of the pool.
            folder: The pool's private folder on this machine.

        Yields:
            The running scheduler.
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
        """Start as many hosts as are missing from a total of `count`, in background tasks.

        Hosts that are still starting are part of the total. The missing hosts are started even if
        this method then raises. After the end of the `with` block of `open`, it starts no hosts.

        Returns:
            One line for the user about each host whose start takes unusually long.

        Raises:
            PoolError: Hosts failed to start, usually hosts of earlier calls. The message has all
                failures. The next call starts new hosts in place of the failed hosts.
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
        """Return whether any host is starting, so that the pool waits longer for hosts.

        Every starting host counts as making progress, because no start can hang: the supervisor or
        the agent ends a host that is stuck.
        """
        return any(not host.start_task.done() for host in self.hosts.values())

    async def release_hosts(self, keep: Collection[str]) -> None:
        """End all hosts whose agents are not in `keep`, and wait until they have ended.

        This includes hosts that are still starting.

        Args:
            keep: Names of the agents whose hosts the pool keeps.
        """
        left = [host for name, host in self.hosts.items() if name not in keep]
        await asyncio.gather(*map(self._end_host, left))
        await asyncio.gather(*(host.start_task for host in left), return_exceptions=True)

    async def why_lost(self, agent: str) -> str:
        """Return one line that says why a host was lost; "" if the reason is unknown.

        Then a background task ends the host's remaining processes. If the engine does not know the
        host, or has already ended it, only return "".

        Args:
            agent: Name of the host's agent.
        """
        if (host := self.hosts.get(agent)) is None:
            return ""
        why = await host.why_lost()
        if agent in self.hosts:
            self._end_host(host)
        return why

    def _end_host(self, host: Host) -> "asyncio.Task[None]":
        del self.hosts[host.name]
        self.ending.add(ending := asyncio.create_task(host.end()))
        ending.add_done_callback(self.ending.discard)
        return ending


def make_engine(pool: PoolConfig) -> Engine:
    """Return a new engine for a pool, of the class that the pool's setting `engine` names.

    If the setting contains a dot, it is the import path of a Dask cluster class. In this case, the
    engine is a `DaskClassEngine` that uses this class.

    Raises:
        UsageError: There is no engine with this name. For a Dask cluster class, there are two
            further causes: the package of the class is not installed, or the pool has the option
            `processes` of dask-jobqueue with a value other than 1.
    """
    import_path = _DASK_CLASS if "." in pool.engine else _ENGINES.get(pool.engine)
    if import_path is None:
        raise UsageError(
            f'pool "{pool.name}": there is no engine "{pool.engine}". There are '
            f"{', '.join(sorted(_ENGINES))}, and Dask cluster classes by their import path"
        )
    module, _, name = import_path.partition(":")
    import_in_thread(module)  # imports paramiko or Dask, if the pool's hosts need it
    engine: type[Engine] = getattr(sys.modules[module], name)
    return engine(pool)


def log_tail(path: Path) -> str:
    """Return the last `LOG_LINES` lines of a log file, and below them the file's path.

    If the file does not exist, return only the path.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return "\n".join([*text.splitlines()[-LOG_LINES:], f"({path})"])
