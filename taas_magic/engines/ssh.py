"""The engine `ssh`: existing hosts that the user can log in to.

The pool's process opens an SSH connection to each host. The host's agent reaches the port of the
pool's scheduler through this connection. So this machine needs no address that hosts can reach.
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
from taas_magic.setup.install import install_missing_packages
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
"""Seconds that one step of a host's start may take before the user gets a message about it."""

_capacities: dict[str, HostCapacity] = {}
_log = logging.getLogger("taas.ssh")
_T = TypeVar("_T")


class SshEngine(HostsEngine):
    """Engine that reaches its hosts over SSH, and starts a supervisor on each host.

    Attributes:
        config_file: SSH configuration file that the pool's options name; None for ssh's usual
            files.
    """

    def __init__(self, pool: PoolConfig) -> None:
        super().__init__(pool)
        self.config_file: str | None = pool.options.get("ssh_config")
        self._free = list(pool.hosts)
        self._leaving = 0
        self._threads = ThreadPoolExecutor(2 * len(pool.hosts) or 1, "taas-ssh")

    def capacity(self) -> HostCapacity:
        """Return the numbers of GPUs and cores of one host, as taas.toml specifies them.

        If taas.toml lacks a number, connect to all hosts, and use the response of the first host
        that responds. Later calls in this process use the same response.

        Raises:
            PoolError: No host has responded.
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
        """Return a context manager for each host, by the host's name in taas.toml.

        At the start of its block, a context manager opens an SSH connection, and yields it as a
        shell that runs commands on the host.

        Args:
            stop: Event that the caller sets to cancel connecting.
        """
        return {host: _shell(host, self.config_file, stop) for host in self.pool.hosts}

    def notes(self) -> tuple[str, ...]:
        """Return a note for the status header if this machine ignores an SSH configuration file.

        This is the case if the file exists, but this machine has no `ssh` command. Otherwise,
        return no note.
        """
        note = unread_config(self.config_file)
        return (note,) if note else ()

    def _query_capacity(self) -> HostCapacity:
        """Connect to all hosts; return the GPUs and cores of the host that responds first.

        One response is enough, because the hosts of a pool are alike. Before this method returns,
        it cancels the other connections. The connections run in threads, so an interrupt by the
        user ends this method at once.

        Raises:
            PoolError: No host has responded. The message has the failure of each host.
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
        """Return an object for a new host, without starting the host.

        Args:
            name: Name of the host's agent.
        """
        return _SshHost(self, name)

    @asynccontextmanager
    async def tunnel(self, agent: str, address: str) -> AsyncIterator[str]:
        """Forward a loopback port of a host to a port of this machine, until the `with` block ends.

        The forwarded connections use the host's SSH connection.

        Args:
            agent: Name of the host's agent.
            address: Address of the port on this machine, as "tls://host:port".

        Yields:
            The address on the host to which the host must connect.

        Raises:
            PoolError: The host is gone, or its port cannot be forwarded.
        """
        host = self.hosts.get(agent)
        connection = host.connection if isinstance(host, _SshHost) else None
        if connection is None:
            raise PoolError(f"host {agent} is gone")
        port = await self.run_in_thread(open_tunnel, connection, *_address_of(address))
        try:
            yield f"tls://{LOOPBACK}:{port}"
        finally:
            await self.run_in_thread(close_tunnel, connection, port)

    async def acquire_host(self, excluded: Collection[str], stop: threading.Event) -> str | None:
        """Reserve a free host that is not in `excluded`; return its name.

        If no such host is free, but the pool is returning or ending hosts, wait for these hosts.

        Args:
            excluded: Names of hosts that must not be reserved, because their starts have failed.
            stop: Event that the caller sets to cancel this call.

        Returns:
            Name of the host in taas.toml. None if all hosts are in use or excluded, or if `stop` is
            set.
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
        """Call `end` in a thread, wait until it returns, and mark the host as free.

        If `end` raises an exception, also mark the host as free, and raise the exception.

        Args:
            host: Name of the host in taas.toml.
            end: Function that ends all processes of the pool on the host. It may block.
        """
        self._leaving += 1
        try:
            await self.run_in_thread(end)
        finally:
            self._leaving -= 1
            self._free.append(host)

    async def run_in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Call `work` in a thread of this engine's own `ThreadPoolExecutor`; return its result.

        The engine has its own executor, with two threads for each host, because the default
        executors of Dask and asyncio have too few threads.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, work, *arguments)


@contextmanager
def _shell(host: str, config_file: str | None, stop: threading.Event) -> Iterator[Shell]:
    """Connect to a host, yield the connection as a shell, and close the connection at the end.

    Args:
        host: Name of the host in taas.toml.
        config_file: SSH configuration file; None for ssh's usual files.
        stop: Event that the caller sets to cancel connecting.

    Raises:
        PoolError: The connection failed. If this machine ignores an SSH configuration file, because
            it has no `ssh` command, the message also says so.
        UsageError: The host's name or its jump hosts are not allowed (`find_target`).
        ConnectStopped: `stop` was set.
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
    """A host that runs a supervisor and an agent, started over an SSH connection.

    Attributes:
        connection: The SSH connection to the host; None before it is open and after it is closed.
    """

    def __init__(self, engine: SshEngine, name: str) -> None:
        super().__init__(name)
        self._engine = engine
        self._host: str | None = None
        """Name of the reserved host in taas.toml; None while no host is reserved."""
        self.connection: Connection | None = None
        self._command: HeartbeatCommand | None = None
        self._stop = threading.Event()
        self._doing, self._since = "", time.monotonic()

    async def start(self) -> None:
        """Start an agent on a free host of the pool; return when the host can start ranks.

        Try the free hosts one after the other. If an attempt fails, log the failure, end all that
        this method has started on the failed host, and mark this host as free. Each host is tried
        at most once.

        Raises:
            PoolError: The start failed on every free host, all hosts are in use, or `end` was
                called.
        """
        failures: dict[str, str] = {}
        while (host := await self._engine.acquire_host(failures, self._stop)) is not None:
            self._host, joined = host, False
            try:
                await self._engine.run_in_thread(self._start_host, host)
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
        """End what runs on the host, close the SSH connection, and mark the host as free.

        If `start` still runs, first cancel `start`, and wait for its end.
        """
        self._stop.set()
        if not self.start_task.done():
            if self.connection is not None:
                self.connection.transport.close()
            await asyncio.wait({self.start_task})
        await self._release_host()

    def slow_start_note(self) -> str:
        """Return a line for the user if a step of the start takes over `_SLOW_S`, else "".

        The line names the host and the step.
        """
        slow = self._doing and time.monotonic() - self._since > _SLOW_S
        return f"host {self._host}: {self._doing}" if slow and self._host else ""

    async def why_lost(self) -> str:
        """Return text about why the host was lost; "" if the reason is unknown.

        Wait up to `_END_S` seconds for the end of the command that runs the host's supervisor. If
        the command still runs then, the reason is unknown. If the SSH connection is closed, the
        reason is the broken connection. Otherwise, the reason is the end of the agent, and the text
        has the last line of the command's output.
        """
        command, connection = self._command, self.connection
        if command is None or connection is None:
            return ""
        if not await self._engine.run_in_thread(command.ended.wait, _END_S):
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
        """Connect to a host, prepare it, and start an agent's supervisor on it. Blocks.

        The steps are: connect; install missing packages; open a tunnel through which the agent
        reaches the pool's scheduler; start the supervisor by a command. Record each step, so that
        `slow_start_note` can name a slow step. This method returns after the start of the command,
        before the agent has joined the pool.

        From then on, threads of the `HeartbeatCommand` send the agent's settings and heartbeats to
        the supervisor, and log the supervisor's output. If this method raises an exception, the SSH
        connection may still be open; the caller must close it (`_release_host`).

        Args:
            host: Name of the host in taas.toml.

        Raises:
            UsageError: The host's name or its jump hosts are not allowed (`find_target`).
            PoolError: The connection failed or broke, the host cannot execute runs, packages cannot
                be installed, or the host forwards no port.
            ConnectStopped: `end` was called while this method was connecting.
        """
        pool, name = self._engine.pool, self.name
        self._begin_step("`ssh -G` is still reading its settings")
        target = find_target(host, self._engine.config_file, self._stop)
        self._begin_step(f"still connecting to {target.hostname}:{target.port}")
        limit_s = min(target.connect_timeout_s, pool.start_timeout_s)
        self.connection = connection = connect(target, self._stop, limit_s, pool.lease_s)
        self._begin_step("still putting packages into its cache, as on every first use")
        path_entries = install_missing_packages(connection, pool)
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

        The supervisor must print its first line of output within `start_timeout_s`. From then on,
        this method has no time limit, because the supervisor ends the host if the agent is stuck.

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
        """End what runs on the host, close the SSH connection, and mark the host as free.

        Do nothing if no host is reserved.
        """
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
