"""This machine as a member of a Dask SpecCluster."""

import contextlib
import socket
import subprocess
import time
from pathlib import Path

import psutil
from distributed.deploy.spec import ProcessInterface

from taas_magic.config import PoolConfig
from taas_magic.engines.base import log_tail
from taas_magic.engines.keys import Keys
from taas_magic.engines.supervisors import end_supervisor, start_supervisor, tell_agent
from taas_magic.errors import PoolError
from taas_magic.host.system import LOOPBACK
from taas_magic.messages import AgentSettings

TROUBLE_S = 1.5
"""How long a host that is coming may be in trouble; Dask forgets one that has left in 0.1 s."""


class LocalHost(ProcessInterface):
    """A supervisor and its agent on this machine.

    Args:
        scheduler: The scheduler's address; Dask gives it.
        pool: The pool's settings.
        folder: The pool's private folder.
        keys: The pool's.
        started: Supervisors that were started ahead; taken before a new one is started.
        name: The host's name in the pool; Dask gives it.
    """

    def __init__(
        self,
        scheduler: str,
        pool: PoolConfig,
        folder: str,
        keys: Keys,
        started: list[subprocess.Popen[bytes]],
        name: str = "",
    ) -> None:
        super().__init__(scheduler=scheduler, name=name)
        self._settings = AgentSettings(
            scheduler=scheduler,
            security=keys.host(str(name)),
            name=name,  # as Dask knows it: its type counts
            host_name=f"{socket.gethostname()}-{name}" if pool.max_hosts > 1 else "",
            interface=LOOPBACK,
            is_foreign=False,
            local_directory=folder,
            lease_s=pool.lease_s,
        )
        self._preload, self._folder, self._started = pool.preload, Path(folder), started
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._in_trouble_since: float | None = None

    async def start(self) -> None:
        started = self._started
        self._supervisor = started.pop() if started else start_supervisor(self._preload)
        with contextlib.suppress(BrokenPipeError):  # it has ended: `check` says why
            tell_agent(self._supervisor, self._settings)
        await super().start()

    async def close(self) -> None:
        await self.end()
        await super().close()

    async def end(self) -> None:
        """Returns when no process of the host is left."""
        if self._supervisor is not None:
            await end_supervisor(self._supervisor)

    def check(self) -> None:
        """Looks at a host that has not joined.

        Raises:
            PoolError: It will not: it has ended, or one of its processes is stopped. With the last
                lines of the log.
        """
        trouble, now = self._trouble(), time.monotonic()
        since = self._in_trouble_since = (self._in_trouble_since or now) if trouble else None
        if since is not None and now - since > TROUBLE_S:
            tail = log_tail(self._folder)
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
