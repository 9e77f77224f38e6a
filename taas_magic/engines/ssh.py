"""The engine `ssh`: existing hosts that the user can log in to.

The pool's process opens a connection to each host's sshd. The host's agent reaches the pool's port
through that connection, so this machine needs no address that hosts can reach.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, asynccontextmanager, closing, contextmanager
from typing import Any, TypeVar

from taas_magic.config import PoolConfig
from taas_magic.engines.base import Host, HostsEngine
from taas_magic.errors import PoolError, TaasError
from taas_magic.host.system import LOOPBACK, entry_code, supervisor_arguments
from taas_magic.leases import HOST_END_S, SSH_BEATS_PER_LEASE
from taas_magic.messages import AgentSettings, to_json
from taas_magic.plan import HostCapacity
from taas_magic.setup.facts import Shell, ask_host
from taas_magic.setup.install import prepare
from taas_magic.ssh.config import ConnectStopped, find_target, unread_config
from taas_magic.ssh.connect import (
    Connection,
    HeartbeatCommand,
    close_tunnel,
    connect,
    open_tunnel,
    shell_words,
)

_POLL_S = 0.05
_END_S = 1.0

_SLOW_S = 10.0
"""Seconds after which a message tells the user which step of a host's start is slow."""

_capacities: dict[str, HostCapacity] = {}
_log = logging.getLogger("taas.ssh")
_T = TypeVar("_T")


class SshEngine(HostsEngine):
    """Engine that reaches its hosts over SSH, and starts a supervisor on each host.

    Attributes:
        config_file: SSH configuration file that the pool names; None for ssh's usual files.
    """

    def __init__(self, pool: PoolConfig) -> None:
        super().__init__(pool)
        self.config_file: str | None = pool.options.get("ssh_config")
        self._free = list(pool.hosts)
        self._leaving = 0
        self._threads = ThreadPoolExecutor(2 * len(pool.hosts) or 1, "taas-ssh")

    def capacity(self) -> HostCapacity:
        """Return the GPUs and cores of one host, as taas.toml specifies them.

        If taas.toml lacks a value, this method asks all hosts, and remembers the first response.

        Raises:
            PoolError: No host could be asked.
        """
        if self.pool.gpus is not None and self.pool.cores:
            return HostCapacity(self.pool.gpus, self.pool.cores)
        key = repr((self.pool.hosts, self.pool.python, self.pool.options))
        if key not in _capacities:
            _capacities[key] = self._query_capacity()
        found = _capacities[key]
        gpus = found.gpus if self.pool.gpus is None else self.pool.gpus
        return HostCapacity(gpus, self.pool.cores or found.cores)

    def shells(self, stop: threading.Event) -> Mapping[str, AbstractContextManager[Shell]]:
        """See `Engine.shells`. Each shell is an SSH connection."""
        return {host: _shell(host, self.config_file, stop) for host in self.pool.hosts}

    def notes(self) -> tuple[str, ...]:
        """See `Engine.notes`. There is one note if the SSH configuration is ignored."""
        note = unread_config(self.config_file)
        return (note,) if note else ()

    def _query_capacity(self) -> HostCapacity:
        """Ask all hosts; return the first response, because the hosts of a pool are alike.

        An interrupt ends the wait at once, because the connections run in other threads.

        Raises:
            PoolError: No host could be asked. The text has the failure of each host.
        """
        stop = threading.Event()

        def query(opening: AbstractContextManager[Shell]) -> HostCapacity:
            with opening as shell:
                found = ask_host(shell, self.pool.python)
            return HostCapacity(found.gpus, found.cores)

        executor = ThreadPoolExecutor(len(self.pool.hosts), "taas-ask")
        failures = []
        try:
            queries = [executor.submit(query, opening) for opening in self.shells(stop).values()]
            for done in as_completed(queries):
                if (error := done.exception()) is None:
                    return done.result()
                failures.append(str(error))
            raise PoolError("\n".join(failures))
        finally:
            stop.set()
            executor.shutdown(wait=False, cancel_futures=True)

    def make_host(self, name: str) -> Host:
        """See `HostsEngine.make_host`."""
        return _SshHost(self, name)

    @asynccontextmanager
    async def tunnel(self, agent: str, address: str) -> AsyncIterator[str]:
        """See `Engine.tunnel`. The host reaches this machine through the SSH connection.

        Forwards a loopback port of the host, yields its address, and closes the tunnel at the end.

        Raises:
            PoolError: The host is gone, or the port cannot be forwarded.
        """
        host = self.hosts.get(agent)
        connection = host.connection if isinstance(host, _SshHost) else None
        if connection is None:
            raise PoolError(f"host {agent} is gone")
        port = await self.in_thread(open_tunnel, connection, *_address_of(address))
        try:
            yield f"tls://{LOOPBACK}:{port}"
        finally:
            await self.in_thread(close_tunnel, connection, port)

    async def acquire_host(self, excluded: Collection[str], stop: threading.Event) -> str | None:
        """Take a free host. If none is free, wait for hosts that are being returned.

        Returns:
            The host as taas.toml names it; None if all hosts are in use or `stop` is set.
        """
        while not stop.is_set():
            host = next((host for host in self._free if host not in excluded), None)
            if host is not None:
                self._free.remove(host)
            if host is not None or not (self._leaving or self.ending):
                return host
            await asyncio.sleep(_POLL_S)
        return None

    async def return_host(self, host: str, end: Callable[[], None]) -> None:
        """Call `end` in a thread; then append `host` to the list of free hosts.

        Args:
            end: Ends everything that runs on the host; may block.
        """
        self._leaving += 1
        try:
            await self.in_thread(end)
        finally:
            self._leaving -= 1
            self._free.append(host)

    async def in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Run a blocking call in a thread of this engine's `ThreadPoolExecutor`.

        The default thread pools of Dask and asyncio have too few threads for all hosts at once.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, work, *arguments)


@contextmanager
def _shell(host: str, config_file: str | None, stop: threading.Event) -> Iterator[Shell]:
    """Connect to a host, yield the connection as a shell, and close the connection at the end.

    If the connection fails, and the SSH configuration is ignored, the error mentions both.
    """
    try:
        connection = connect(find_target(host, config_file, stop), stop)
    except PoolError as error:
        if note := unread_config(config_file):
            raise PoolError(f"{error}\n{note}") from error
        raise
    with closing(connection):
        yield connection


class _SshHost(Host):
    """A host that is reached over SSH."""

    def __init__(self, engine: SshEngine, name: str) -> None:
        super().__init__(name)
        self._engine = engine
        self._host: str | None = None
        """Name of the host in taas.toml; None while no host is taken."""
        self.connection: Connection | None = None
        self._command: HeartbeatCommand | None = None
        self._stop = threading.Event()
        self._doing, self._since = "", time.monotonic()

    async def start(self) -> None:
        """Start an agent on a free host of the pool; return when the host can start ranks.

        If a host fails, log the failure, end what runs there, return the host to the pool, and try
        the next free host.

        Raises:
            PoolError: No free host could be started, or `end` was called.
        """
        failures: dict[str, str] = {}
        while (host := await self._engine.acquire_host(failures, self._stop)) is not None:
            self._host, joined = host, False
            try:
                await self._engine.in_thread(self._start_host, host)
                await self._wait_until_ready(host)
                joined = True
                return
            except ConnectStopped:
                break
            except Exception as error:  # whatever the error: another host may work
                if self._stop.is_set():
                    break
                is_ours = isinstance(error, TaasError)
                failures[host] = (
                    str(error) if is_ours else f"host {host}: {type(error).__name__}: {error}"
                )
                _log.warning("%s", failures[host], exc_info=not is_ours)
            finally:
                self._begin_step("")
                if not joined:
                    await self._release_host()
        if self._stop.is_set():
            raise PoolError("the start of this host was cancelled")
        if not failures:
            raise PoolError("all of its hosts are in use")
        raise PoolError("\n".join([*failures.values(), *self._engine.notes()]))

    async def end(self) -> None:
        """See `Host.end`."""
        self._stop.set()
        if not self.start_task.done():
            if self.connection is not None:
                self.connection.transport.close()
            await asyncio.wait({self.start_task})
        await self._release_host()

    def slow_start_note(self) -> str:
        """See `Host.slow_start_note`."""
        slow = self._doing and time.monotonic() - self._since > _SLOW_S
        return f"host {self._host}: {self._doing}" if slow and self._host else ""

    async def why_lost(self) -> str:
        """Return, in words, whether the SSH connection broke or the agent ended; "" if unknown.

        Waits up to `_END_S` seconds for the end of the supervisor's command. If the agent ended,
        the text has the command's last line of output.
        """
        command, connection = self._command, self.connection
        if command is None or connection is None:
            return ""
        if not await self._engine.in_thread(command.ended.wait, _END_S):
            return ""
        if not connection.is_open:
            error = connection.transport.get_exception()
            why = str(error) if error is not None else "the host closed it"
            return "its SSH connection broke" + (f" ({why})" if why else "")
        last = command.tail.rpartition("\n")[2]
        return f"its agent ended: {last}" if last else "its agent ended"

    def _begin_step(self, doing: str) -> None:
        self._doing, self._since = doing, time.monotonic()

    def _start_host(self, host: str) -> None:
        """Connect to the host, install packages there if needed, and start an agent's supervisor.

        Also opens a tunnel through which the agent reaches the pool's scheduler. Each step is
        recorded for `slow_start_note`. The supervisor gets the agent's settings, and then an empty
        line at regular intervals. The supervisor's output is logged.

        Runs in a thread.
        """
        pool, name = self._engine.pool, self.name
        self._begin_step("`ssh -G` is still reading its settings")
        target = find_target(host, self._engine.config_file, self._stop)
        self._begin_step(f"still connecting to {target.hostname}:{target.port}")
        limit_s = min(target.connect_timeout_s, pool.start_timeout_s)
        self.connection = connection = connect(target, self._stop, limit_s, pool.lease_s)
        self._begin_step("still putting packages into its cache, as on every first use")
        path_entries = prepare(connection, pool)
        address, port = _address_of(self._engine.scheduler.address)
        settings = AgentSettings(
            scheduler=f"tls://{LOOPBACK}:{open_tunnel(connection, address, port)}",
            security=self._engine.keys.host(name),
            name=name,
            host_name=host,
            interface=pool.interface or "",
            lease_s=pool.lease_s,
            start_timeout_s=pool.start_timeout_s,
        )
        path = ":".join(path_entries)
        environ = {"PYTHONPATH": path} if path else {}  # empty if taas-magic is installed there
        arguments = ["-c", entry_code("taas_magic.host.supervisor")]
        arguments += supervisor_arguments(pool.lease_s, pool.start_timeout_s, pool.preload)
        self._begin_step("its agent is still starting, and imports Dask")
        self._command = HeartbeatCommand(
            connection,
            shell_words(pool.python, arguments, environ),
            to_json(settings) + b"\n",
            pool.lease_s / SSH_BEATS_PER_LEASE,
            lambda line: _log.warning("[%s] %s", host, line),
        )

    async def _wait_until_ready(self, host: str) -> None:
        """Wait until the host's agent has joined the pool and the host can start ranks.

        `start_timeout_s` limits only the wait for the supervisor's first line of output. After this
        line, the supervisor ends the host if the agent is stuck.

        Raises:
            PoolError: The supervisor did not start in time, or the agent ended or left the pool.
            ConnectStopped: `end` was called.
        """
        assert self._command is not None
        limit_s = self._engine.pool.start_timeout_s
        until, has_joined = time.monotonic() + limit_s, False
        while self.name not in self._engine.ready:
            if self._stop.is_set():
                raise ConnectStopped
            if self._command.ended.is_set():
                raise PoolError(f"host {host}: its agent ended:\n{self._command.tail}")
            if self.name in self._engine.scheduler.aliases:
                has_joined = True
                self._begin_step("")  # from now on, the agent reports its imports itself
            elif has_joined:
                raise PoolError(
                    f"host {host} left the pool before it was ready:\n{self._command.tail}"
                )
            elif not self._command.has_output and time.monotonic() > until:
                raise PoolError(
                    f"host {host}: its supervisor did not start within "
                    f"start_timeout_s = {limit_s:g} s. Check whether {host} is overloaded and "
                    "whether its Python starts there, or raise start_timeout_s"
                )
            await asyncio.sleep(_POLL_S)

    async def _release_host(self) -> None:
        """End everything that runs on the host, close the connection, and mark the host as free."""
        host, self._host = self._host, None
        if host is not None:
            await self._engine.return_host(host, self._close)

    def _close(self) -> None:
        if self._command is not None:
            self._command.close(HOST_END_S)
        if self.connection is not None:
            self.connection.close()
        self._command = self.connection = None


def _address_of(scheduler: str) -> tuple[str, int]:
    host, _, port = scheduler.rpartition("://")[2].rpartition(":")
    return host.strip("[]"), int(port)
