"""The engine of pool `local`: this machine, as one host or, to try things out, as several."""

import asyncio
import json
import os
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from taas_magic.config import PoolConfig
from taas_magic.engines.base import Engine
from taas_magic.plan import HostCapacity
from taas_magic.remote.devices import count_gpus
from taas_magic.remote.interface import LOOPBACK
from taas_magic.remote.process import spawn_command

if TYPE_CHECKING:
    from distributed import SpecCluster

CLOSE_S = 10.0
"""How long a supervisor may take to end all of its host, in seconds."""


class LocalEngine(Engine):
    """Starts a supervisor, and through it the agent, on this machine."""

    name = "local"

    def __init__(self, pool: PoolConfig) -> None:
        super().__init__(pool)
        self._started: list[subprocess.Popen[bytes]] = []

    def capacity(self) -> HostCapacity:
        gpus = self.pool.gpus if self.pool.gpus is not None else count_gpus()
        return HostCapacity(gpus, self.pool.cores or len(os.sched_getaffinity(0)))

    def prepare(self) -> None:
        """Starts the agent: its imports take longest, and need nothing of the scheduler."""
        self._started.append(start_supervisor())

    def open(self, scheduler: type, security: Mapping[str, Any], folder: str) -> "SpecCluster":
        from distributed import Security, SpecCluster

        from taas_magic.engines.local_host import LocalHost

        secure = Security(**security)
        settings = {
            "security": dict(security),
            "local_directory": folder,
            "lease_s": self.pool.lease_s,
            "several": self.pool.max_hosts > 1,
        }
        return SpecCluster(
            scheduler={
                "cls": scheduler,
                "options": {"host": LOOPBACK, "protocol": "tls://", "security": secure},
            },
            worker={"cls": LocalHost, "options": {"settings": settings, "started": self._started}},
            security=secure,
            asynchronous=True,
            name=self.pool.name,
        )


def start_supervisor() -> subprocess.Popen[bytes]:
    """A supervisor of this machine, waiting for the agent's settings on its standard input."""
    command = spawn_command("taas_magic.remote.supervisor")
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


async def end_supervisor(supervisor: subprocess.Popen[bytes]) -> None:
    """Closes a supervisor's lease and waits until its host is clean."""
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    try:
        await asyncio.to_thread(supervisor.wait, CLOSE_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()


def tell_agent(supervisor: subprocess.Popen[bytes], settings: Mapping[str, Any]) -> None:
    """Sends the agent its settings."""
    assert supervisor.stdin is not None
    supervisor.stdin.write(json.dumps(settings).encode() + b"\n")
    supervisor.stdin.flush()
