"""The engine `local`, which uses this machine as one host.

For tests of runs on many hosts, it can use this machine as several hosts.
"""

import asyncio
import contextlib
import itertools
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil

from taas_magic import probe
from taas_magic.config import PoolConfig
from taas_magic.engines.base import LOG, Host, HostsEngine, log_tail
from taas_magic.errors import PoolError
from taas_magic.host.activity import IdleTimer
from taas_magic.host.system import LOOPBACK, spawn_command, supervisor_arguments, wait_or_kill
from taas_magic.leases import HOST_END_S
from taas_magic.messages import AgentSettings, to_json
from taas_magic.plan import HostCapacity

START_FAILED_S = 1.5
"""Seconds for which a starting host may have a problem, such as a stopped process.

If the problem lasts longer, the start of the host has failed.
"""

_CHECK_S = 0.5


def host_name(pool: PoolConfig, number: int) -> str:
    """Return the name that the notebook shows for a host of a local pool.

    If the pool can have only one host, this is the name of the machine. Otherwise, the pool's name
    and `number` follow, as in `gpu1-local-0`.

    Args:
        number: Number of the host in its pool, from 0.
    """
    own = socket.gethostname()
    return f"{own}-{pool.name}-{number}" if pool.max_hosts > 1 else own


class LocalEngine(HostsEngine):
    """Engine whose hosts are on this machine. It starts one supervisor process for each host."""

    def __init__(self, pool: PoolConfig) -> None:
        super().__init__(pool)
        self._started: list[subprocess.Popen[bytes]] = []

    def capacity(self) -> HostCapacity:
        """Return the numbers of GPUs and cores of one host.

        If taas.toml lacks a number, use the number of this machine.
        """
        gpus = self.pool.gpus if self.pool.gpus is not None else probe.count_gpus()
        return HostCapacity(gpus, self.pool.cores or probe.cores())

    def prepare(self) -> None:
        """Start the first host's supervisor before this process imports Dask.

        The supervisor then starts during the import, which saves time.
        """
        self._started.append(self.get_supervisor())

    def get_supervisor(self) -> subprocess.Popen[bytes]:
        """Return a supervisor process that waits for its agent's settings on standard input.

        Return the supervisor that `prepare` has started, or start a new one.
        """
        if self._started:
            return self._started.pop()
        command = spawn_command("taas_magic.host.supervisor")
        command += supervisor_arguments(None, self.pool.start_timeout_s, self.pool.preload)
        return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def make_host(self, name: str) -> Host:
        """Return an object for a new host, without starting the host.

        The host gets the lowest free number, which is part of its name in the notebook. So a new
        host has the same name as the host that it replaces. If `per_host` of a federation has
        settings for this name, they also apply to the new host.

        Args:
            name: Name of the host's agent.
        """
        used = {host.number for host in self.hosts.values() if isinstance(host, _LocalHost)}
        return _LocalHost(self, name, next(n for n in itertools.count() if n not in used))


class _LocalHost(Host):
    """A host on this machine: a supervisor process, which starts an agent.

    Args:
        name: Name of the host's agent.
        number: Number of the host in its pool, unique among the hosts that run.
    """

    def __init__(self, engine: LocalEngine, name: str, number: int) -> None:
        super().__init__(name)
        self.number = number
        self._engine = engine
        self._supervisor: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Send the agent's settings to a supervisor, and wait until the host can start ranks.

        The start fails if one of these problems lasts for `START_FAILED_S`:

        - The supervisor has ended.
        - A process of the host is stopped (SIGSTOP).
        - The agent has joined the pool and left it again.
        - The agent has not joined yet, and the host's processes have been idle for
          `start_timeout_s`.

        Raises:
            PoolError: The start has failed, and this method has ended the host. The message has the
                last lines of the pool's log.
        """
        engine, pool = self._engine, self._engine.pool
        settings = AgentSettings(
            scheduler=engine.scheduler.address,
            security=engine.keys.host(self.name),
            name=self.name,
            host_name=host_name(pool, self.number),
            interface=LOOPBACK,
            is_foreign=False,
            local_directory=engine.folder,
            lease_s=pool.lease_s,
            start_timeout_s=pool.start_timeout_s,
        )
        self._supervisor = supervisor = engine.get_supervisor()
        assert supervisor.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the supervisor has ended; the log says why
            supervisor.stdin.write(to_json(settings) + b"\n")
            supervisor.stdin.flush()
        well_at, has_joined = time.monotonic(), False
        timer = IdleTimer(supervisor.pid)
        while self.name not in engine.ready:
            is_here = self.name in engine.scheduler.aliases
            has_joined = has_joined or is_here
            trouble = _start_failure(supervisor)
            if not trouble and has_joined and not is_here:
                trouble = "left its pool"
            # This check finds a stuck supervisor; the supervisor itself ends a stuck agent. After
            # the host has joined, its agent reports imports, and ends itself if one is stuck.
            if not trouble and not has_joined and timer.idle_s() >= pool.start_timeout_s:
                trouble = f"did nothing for start_timeout_s = {pool.start_timeout_s:g} s"
            if not trouble:
                well_at = time.monotonic()
            elif time.monotonic() - well_at > START_FAILED_S:
                await self.end()
                tail = log_tail(Path(engine.folder) / LOG)
                raise PoolError(
                    f"this host {trouble} before it was ready. The log ends with:\n{tail}"
                )
            await asyncio.sleep(_CHECK_S)

    async def end(self) -> None:
        """Make the supervisor end the host, and wait until the supervisor has ended.

        The steps are:

        - Cancel `start` if it still runs in another task.
        - Close the supervisor's standard input. The supervisor then ends the host.
        - Send SIGCONT to the supervisor, because a stopped supervisor would not notice the close.
        - Kill the supervisor if it has not ended after `HOST_END_S` seconds. Linux then also kills
          the agent (`die_with_parent`).
        """
        if asyncio.current_task() is not self.start_task:
            self.start_task.cancel()
        supervisor = self._supervisor
        if supervisor is None:
            return
        assert supervisor.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the supervisor ended before it read settings
            supervisor.stdin.close()
        supervisor.send_signal(signal.SIGCONT)  # a stopped supervisor would not notice the close
        await asyncio.to_thread(wait_or_kill, supervisor, HOST_END_S)

    async def why_lost(self) -> str:
        """End the host, and return "", because this engine does not know why the host was lost.

        When this method returns, the host's rank 0 can no longer write to the project store.
        """
        await self.end()
        return ""


def _start_failure(supervisor: subprocess.Popen[bytes]) -> str:
    """Return text about what is wrong with a starting host; "" if nothing is wrong.

    A host cannot start if its supervisor has ended, or if SIGSTOP has stopped the supervisor or one
    of its descendant processes.
    """
    code = supervisor.poll()
    if code is not None:
        return f"ended (exit code {code})"
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(supervisor.pid)
        for process in (first, *first.children(recursive=True)):
            if process.status() == psutil.STATUS_STOPPED:
                return f"was stopped (SIGSTOP to process {process.pid})"
    return ""
