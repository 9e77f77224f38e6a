"""The engine `local`: this machine as one host, or as several hosts to try a run on many hosts."""

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
"""Maximum seconds for which a starting host may have a problem, such as a stopped process."""

_LOOK_S = 0.5


def host_name(pool: PoolConfig, number: int) -> str:
    """Return the name of a local pool's host for the user.

    Args:
        number: Number of the host in its pool.
    """
    own = socket.gethostname()
    return f"{own}-{pool.name}-{number}" if pool.max_hosts > 1 else own


class LocalEngine(HostsEngine):
    """Engine whose hosts are on this machine. It starts a supervisor for each host."""

    def __init__(self, pool: PoolConfig) -> None:
        super().__init__(pool)
        self._started: list[subprocess.Popen[bytes]] = []

    def capacity(self) -> HostCapacity:
        """Return the GPUs and cores that taas.toml specifies, else those of this machine."""
        gpus = self.pool.gpus if self.pool.gpus is not None else probe.count_gpus()
        return HostCapacity(gpus, self.pool.cores or probe.cores())

    def prepare(self) -> None:
        """Start the first host's supervisor early, while this process imports Dask."""
        self._started.append(self.take_supervisor())

    def take_supervisor(self) -> subprocess.Popen[bytes]:
        """Return a supervisor that waits for its agent's settings on standard input."""
        if self._started:
            return self._started.pop()
        command = spawn_command("taas_magic.host.supervisor")
        command += supervisor_arguments(None, self.pool.start_timeout_s, self.pool.preload)
        return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def make_host(self, name: str) -> Host:
        """See `HostsEngine.make_host`.

        The host gets the lowest free number, which is part of its name for the user. So a new host
        has the same name as the host that it replaces, and the settings in `per_host` for this name
        still apply.
        """
        used = {host.number for host in self.hosts.values() if isinstance(host, _LocalHost)}
        return _LocalHost(self, name, next(n for n in itertools.count() if n not in used))


class _LocalHost(Host):
    """A host on this machine: a supervisor process and its agent.

    Args:
        number: Number of the host in its pool, unique among the hosts that run.
    """

    def __init__(self, engine: LocalEngine, name: str, number: int) -> None:
        super().__init__(name)
        self.number = number
        self._engine = engine
        self._supervisor: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Send the agent's settings to a supervisor, and wait until the host can start ranks.

        The start fails if one of these problems lasts for `START_FAILED_S`: the supervisor has
        ended, a process of the host is stopped (SIGSTOP), the agent has left the pool, or the
        supervisor has done nothing for `start_timeout_s` before the agent joined.

        Raises:
            PoolError: The start has failed, and the host was ended. The text has the last lines of
                the log.
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
        self._supervisor = supervisor = engine.take_supervisor()
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
            await asyncio.sleep(_LOOK_S)

    async def end(self) -> None:
        """Close the supervisor's standard input, and wait until the supervisor has ended the host.

        Cancels a running `start`, and sends SIGCONT to the supervisor, which may be suspended.
        After `HOST_END_S` seconds, kill the supervisor. Linux then also kills the agent
        (`die_with_parent`).
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
        """End the host and return "", because the reason is unknown; see `Host.why_lost`.

        When this method returns, the host's rank 0 can no longer write to the project store.
        """
        await self.end()
        return ""


def _start_failure(supervisor: subprocess.Popen[bytes]) -> str:
    """Return, in words, which process of a starting host has ended or is stopped; "" for none."""
    code = supervisor.poll()
    if code is not None:
        return f"ended (exit code {code})"
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(supervisor.pid)
        for process in (first, *first.children(recursive=True)):
            if process.status() == psutil.STATUS_STOPPED:
                return f"was stopped (SIGSTOP to process {process.pid})"
    return ""
