"""The engine of pool `local`: this machine, as one host or, to try things out, as several."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from taas_magic import probe
from taas_magic.config import PoolConfig
from taas_magic.engines.base import CLOSE_S, LOG, DaskHost, Engine, log_tail, make_cluster
from taas_magic.errors import PoolError
from taas_magic.host.system import LOOPBACK, count_gpus, spawn_command, supervisor_arguments
from taas_magic.messages import AgentSettings, pack
from taas_magic.plan import HostCapacity

if TYPE_CHECKING:
    from distributed import SpecCluster

    from taas_magic.engines.keys import Keys

TROUBLE_S = 1.5
"""How long a host that is coming may be in trouble; Dask forgets one that has left in 0.1 s."""


class LocalEngine(Engine):
    """Starts a supervisor, and through it the agent, on this machine."""

    keys: "Keys"
    folder: str

    def __init__(self, pool: PoolConfig) -> None:
        super().__init__(pool)
        self._started: list[subprocess.Popen[bytes]] = []

    def capacity(self) -> HostCapacity:
        """Return what taas.toml says, and where it says nothing, what this machine has."""
        gpus = self.pool.gpus if self.pool.gpus is not None else count_gpus()
        return HostCapacity(gpus, self.pool.cores or probe.cores())

    def prepare(self) -> None:
        """Start the first host: its imports take longest, and need nothing of the scheduler."""
        self._started.append(self.take_supervisor())

    def take_supervisor(self) -> subprocess.Popen[bytes]:
        """Return a supervisor that waits for its agent's settings on its standard input."""
        if self._started:
            return self._started.pop()
        command = spawn_command("taas_magic.host.supervisor")
        command += supervisor_arguments(None, self.pool.preload)
        return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def open(self, scheduler: type, keys: "Keys", folder: str) -> "SpecCluster":
        """See `Engine.open`."""
        self.keys, self.folder = keys, folder
        self.cluster = make_cluster(self, scheduler, keys, _LocalHost)
        return self.cluster

    async def bring(self, count: int) -> list[str]:
        """See `Engine.bring`; a host that ends or stops before it has joined is given back."""
        said = await super().bring(count)
        for name, host in list(self.cluster.workers.items()):
            if name not in self.cluster.observed:
                try:
                    host.check()
                except PoolError:  # given back: who asks next would be told the same again
                    await self.cluster.scale_down([name])
                    raise
        return said

    async def why_lost(self, agent: str) -> str:
        """See `Engine.why_lost`; what is left of the host is ended, lest two ranks 0 write."""
        host = self.cluster.workers.get(agent)
        if host is not None:
            await host.end()
        return ""


class _LocalHost(DaskHost):
    """A supervisor and its agent on this machine."""

    def __init__(self, scheduler: str, engine: LocalEngine, name: str) -> None:
        super().__init__()
        pool = engine.pool
        self._engine = engine
        self._settings = AgentSettings(
            scheduler=scheduler,
            security=engine.keys.host(name),
            name=name,
            host_name=f"{socket.gethostname()}-{name}" if pool.max_hosts > 1 else "",
            interface=LOOPBACK,
            is_foreign=False,
            local_directory=engine.folder,
            lease_s=pool.lease_s,
        )
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._in_trouble_since: float | None = None

    async def start(self) -> None:
        self._supervisor = self._engine.take_supervisor()
        assert self._supervisor.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: `check` says why
            self._supervisor.stdin.write(pack(self._settings) + b"\n")
            self._supervisor.stdin.flush()

    async def close(self) -> None:
        await self.end()
        await super().close()

    async def end(self) -> None:
        """Close the supervisor's lease; returns when no process of the host is left."""
        supervisor = self._supervisor
        if supervisor is None:
            return
        assert supervisor.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended before it read what it was told
            supervisor.stdin.close()
        supervisor.send_signal(signal.SIGCONT)  # a stopped one would not see it
        try:
            await asyncio.to_thread(supervisor.wait, CLOSE_S)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.wait()

    def check(self) -> None:
        """Look at a host that has not joined.

        Raises:
            PoolError: It will not: it has ended, or one of its processes is stopped. With the last
                lines of the log.
        """
        trouble, now = self._trouble(), time.monotonic()
        since = self._in_trouble_since = (self._in_trouble_since or now) if trouble else None
        if since is not None and now - since > TROUBLE_S:
            tail = log_tail(Path(self._engine.folder) / LOG)
            raise PoolError(f"this host {trouble} before it was ready. The log ends with:\n{tail}")

    def _trouble(self) -> str:
        if self._supervisor is None:
            return ""
        code = self._supervisor.poll()
        if code is not None:
            return f"ended (exit code {code})"
        with contextlib.suppress(psutil.NoSuchProcess):
            supervisor = psutil.Process(self._supervisor.pid)
            for process in (supervisor, *supervisor.children(recursive=True)):
                if process.status() == psutil.STATUS_STOPPED:
                    return f"was stopped (SIGSTOP to process {process.pid})"
        return ""
