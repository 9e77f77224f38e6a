"""The hosts of a pool of kind `ssh`, as a Dask SpecCluster: which are free, coming, refused.

Lives in the pool's process, on its event loop. Every connection is opened from here to the host's
sshd, or by the host: its agent reaches the pool's port through the SSH connection, so this machine
needs no address that hosts can dial.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from distributed import SpecCluster
from distributed.core import Status
from distributed.deploy.spec import ProcessInterface

from taas_magic.config import PoolConfig
from taas_magic.engines.keys import Keys
from taas_magic.errors import PoolError
from taas_magic.host.hardware import LOOPBACK
from taas_magic.host.processes import entry_code, supervisor_arguments
from taas_magic.leases import SSH_BEATS_PER_LEASE
from taas_magic.messages import AgentSettings, pack
from taas_magic.setup.facts import DEFAULT_PYTHON
from taas_magic.setup.install import prepare
from taas_magic.ssh.config import Target
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

_LOOK_S = 0.25

_T = TypeVar("_T")


class Roster:
    """The hosts of a pool: which are free, and what is wrong with those that could not be had.

    Args:
        pool: The pool's settings.
        targets: Its hosts.
        keys: The pool's.
    """

    def __init__(self, pool: PoolConfig, targets: Iterable[Target], keys: Keys) -> None:
        self.pool, self.keys = pool, keys
        self._free = list(targets)
        self._leaving = 0
        self._given_back = asyncio.Condition()
        self._executor = ThreadPoolExecutor(2 * len(self._free), "taas-ssh")
        self.refusals: list[str] = []
        self.has_joined: Callable[[object], bool] = lambda name: False

    async def take(self, besides: Collection[Target]) -> Target | None:
        """A free host, awaiting those that are being given back; None when all others are taken."""

        def find() -> Target | None:
            return next((target for target in self._free if target not in besides), None)

        async with self._given_back:
            await self._given_back.wait_for(lambda: find() or not self._leaving)
            target = find()
            if target is not None:
                self._free.remove(target)
            return target

    async def give_back(self, target: Target, end: Callable[[], None]) -> None:
        """Makes a host free again, once `end` has returned; it is taken after the others.

        Args:
            target: The host.
            end: Ends what runs there; may block.
        """
        self._leaving += 1
        try:
            await self.in_thread(end)
        finally:
            async with self._given_back:
                self._leaving -= 1
                self._free.append(target)
                self._given_back.notify_all()

    async def in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Runs what blocks. Dask's and asyncio's own threads are too few for all hosts at once."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, work, *arguments)

    def close(self) -> None:
        """Starts no more threads."""
        self._executor.shutdown(wait=False)


class SshCluster(SpecCluster):
    """A SpecCluster whose hosts come in the background, and may be refused or given up.

    Args:
        roster: The pool's hosts.
    """

    def __init__(self, roster: Roster, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._roster = roster
        self._coming: asyncio.Future[Any] | None = None
        roster.has_joined = lambda name: name in self.scheduler.aliases

    async def bring(self) -> list[str]:
        """Brings hosts up, for a moment at a time.

        Returns:
            What those are doing that take long.

        Raises:
            PoolError: One of them could not be had.
        """
        if self._coming is None or self._coming.done():
            self._coming = asyncio.ensure_future(self)
        await asyncio.wait({self._coming}, timeout=_LOOK_S)
        if self._roster.refusals:
            refusals, self._roster.refusals = self._roster.refusals, []
            raise PoolError("\n".join(dict.fromkeys(refusals)))
        error = self._coming.exception() if self._coming.done() else None
        if error is not None and not isinstance(error, PoolError):
            raise error
        return sorted(filter(None, (host.news() for host in self._created)))

    @asynccontextmanager
    async def tunnel(self, name: str, address: str) -> AsyncIterator[int]:
        """A port of a host's loopback that leads to an address of this machine, for the block.

        Raises:
            PoolError: The host is gone, or forwards no port.
        """
        connection = next((it.connection for it in self._created if str(it.name) == name), None)
        if connection is None:
            raise PoolError(f"host {name} is gone")
        port = await self._roster.in_thread(open_tunnel, connection, *_address_of(address))
        try:
            yield port
        finally:
            with suppress(RuntimeError):  # the pool ends, and all connections with it
                await self._roster.in_thread(close_tunnel, connection, port)

    async def why_lost(self, name: str) -> str:
        """What is known of a lost host, in one line."""
        hosts = [host for host in self._created if str(host.name) == name]
        said = [await self._roster.in_thread(host.why_lost) for host in hosts]
        return next(filter(None, said), "")

    def give_up(self, keep: Collection[str] = ()) -> None:
        """Ends every attempt to bring a host up, but for those that are named."""
        for host in self._created:
            if str(host.name) not in keep:
                host.give_up()
        self._roster.refusals = []

    async def _correct_state_internal(self) -> None:
        for name in [n for n, host in self.workers.items() if host.status == Status.failed]:
            del self.workers[name]  # Dask would take it for a host that is coming
        await super()._correct_state_internal()

    async def _close(self) -> None:
        self.give_up()
        await super()._close()
        self._roster.close()


CLOSE_S = 10.0
"""How long a supervisor may take to end all of its host, in seconds."""

_SHARE = 0.9
"""Of the time that the controller waits for a host, so that it hears why there is none."""

_SLOW_S = 10.0
"""After how long something that a host is doing is worth a line to the user."""

_POLL_S = 0.05
_END_S = 1.0

_log = logging.getLogger("taas.ssh")


class SshHost(ProcessInterface):
    """A supervisor and its agent on a host of the roster.

    Args:
        scheduler: The scheduler's address; Dask gives it.
        roster: The pool's hosts.
        name: The host's name in the pool; Dask gives it.

    Attributes:
        connection: To the host; None before and after.
    """

    def __init__(self, scheduler: str, roster: Roster, name: str | int = "") -> None:
        super().__init__(scheduler=scheduler, name=name)
        self.name = name
        self._scheduler, self._roster = scheduler, roster
        self._target: Target | None = None
        self.connection: Connection | None = None
        self._command: KeptCommand | None = None
        self._stop = threading.Event()
        self._doing, self._since = "", time.monotonic()

    async def start(self) -> None:
        """Brings up a free host of the pool; returns when its agent has joined.

        Raises:
            PoolError: None could be brought up, or it was given up.
        """
        until = time.monotonic() + _SHARE * self._roster.pool.start_timeout_s
        failures: dict[Target, str] = {}
        while (target := await self._roster.take(failures)) is not None:
            self._target, joined = target, False
            try:
                await self._roster.in_thread(self._bring_up, target)
                await self._join(target, until)
                await super().start()
                joined = True
                return
            except Stopped:
                break
            except PoolError as error:
                if self._stop.is_set():
                    break
                failures[target] = str(error)
                _log.warning("%s", error)
            finally:
                self._do("")
                if not joined:
                    await self._leave()
        self.status = Status.failed
        if self._stop.is_set():
            raise PoolError("nobody waits for it any more")
        refusal = "\n".join(failures.values()) or "all of its hosts are taken"
        self._roster.refusals.append(refusal)
        raise PoolError(refusal)

    async def close(self) -> None:
        await self._leave()
        await super().close()

    def give_up(self) -> None:
        """Ends the attempt to bring a host up, wherever it stands; returns at once."""
        if self.status == Status.created:
            self._stop.set()
            if self.connection is not None:
                self.connection.transport.close()

    def news(self) -> str:
        """What it has been doing for long; "" when it is not."""
        slow = self._doing and time.monotonic() - self._since > _SLOW_S
        return f"host {self._target.label}: {self._doing}" if slow and self._target else ""

    def why_lost(self) -> str:
        """What is known of its end, from the end of its connection; blocks for a moment."""
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

    def _bring_up(self, target: Target) -> None:
        pool = self._roster.pool
        self._do(f"still connecting to {target.hostname}:{target.port}")
        limit_s = min(CONNECT_TIMEOUT_S, pool.start_timeout_s)
        self.connection = connection = connect(target, self._stop, limit_s, pool.lease_s)
        self._do("still putting packages into its cache, as on every first use")
        path_entries = prepare(connection, pool)
        address, port = _address_of(self._scheduler)
        settings = AgentSettings(
            scheduler=f"tls://{LOOPBACK}:{open_tunnel(connection, address, port)}",
            security=self._roster.keys.host(str(self.name)),
            name=self.name,  # as Dask knows it: its type counts
            host_name=target.label,
            interface=pool.interface or "",
            lease_s=pool.lease_s,
        )
        self._do("its agent is still starting: torch is being imported")
        self._command = KeptCommand(
            connection,
            supervisor_command(pool, path_entries),
            pack(settings) + b"\n",
            pool.lease_s / SSH_BEATS_PER_LEASE,
            lambda line: _log.warning("[%s] %s", target.label, line),
        )

    async def _join(self, target: Target, until: float) -> None:
        """Returns when the agent is a member of the pool."""
        assert self._command is not None
        while not self._roster.has_joined(self.name):
            if self._stop.is_set():
                raise Stopped
            if self._command.ended.is_set():
                raise PoolError(f"host {target.label}: its agent ended:\n{self._command.tail}")
            if time.monotonic() > until:
                raise PoolError(
                    f"host {target.label}: its agent did not join within "
                    f"start_timeout_s = {self._roster.pool.start_timeout_s:g}:\n"
                    f"{self._command.tail}"
                )
            await asyncio.sleep(_POLL_S)

    async def _leave(self) -> None:
        """Ends what runs on the host, then the connection; makes the host free."""
        target, self._target = self._target, None
        if target is not None:
            await self._roster.give_back(target, self._end)

    def _end(self) -> None:
        if self._command is not None:
            self._command.close(CLOSE_S)
        if self.connection is not None:
            self.connection.close()
        self._command = self.connection = None


def supervisor_command(pool: PoolConfig, path_entries: Sequence[str]) -> str:
    """What starts the supervisor of a host.

    Args:
        pool: The pool's settings.
        path_entries: Where the host's Python finds us; nothing where it does by itself.
    """
    environ = {"PYTHONPATH": ":".join(path_entries)} if path_entries else {}
    arguments = ["-c", entry_code("taas_magic.host.supervisor")]
    arguments += supervisor_arguments(pool.lease_s, pool.preload)
    return shell_words(pool.python or DEFAULT_PYTHON, arguments, environ)


def _address_of(scheduler: str) -> tuple[str, int]:
    host, _, port = scheduler.rpartition("://")[2].rpartition(":")
    return host.strip("[]"), int(port)
