"""The engine of pool `local`: this machine, as one host or, to try things out, as several."""

import subprocess
from typing import TYPE_CHECKING, Any

from taas_magic import probe
from taas_magic.config import PoolConfig
from taas_magic.engines.base import Engine
from taas_magic.engines.supervisors import start_supervisor
from taas_magic.errors import PoolError
from taas_magic.host.system import LOOPBACK, count_gpus
from taas_magic.plan import HostCapacity

if TYPE_CHECKING:
    from distributed import SpecCluster

    from taas_magic.engines.keys import Keys
    from taas_magic.engines.local_host import LocalHost


class LocalEngine(Engine):
    """Starts a supervisor, and through it the agent, on this machine."""

    name = "local"

    def __init__(self, pool: PoolConfig) -> None:
        super().__init__(pool)
        self._started: list[subprocess.Popen[bytes]] = []
        self._cluster: SpecCluster | None = None

    def capacity(self) -> HostCapacity:
        gpus = self.pool.gpus if self.pool.gpus is not None else count_gpus()
        return HostCapacity(gpus, self.pool.cores or probe.cores())

    def prepare(self) -> None:
        """Starts the agent: its imports take longest, and need nothing of the scheduler."""
        self._started.append(start_supervisor(self.pool.preload))

    def open(self, scheduler: type, keys: "Keys", folder: str) -> "SpecCluster":
        from distributed import Security, SpecCluster

        from taas_magic.engines.local_host import LocalHost

        secure = Security(**keys.scheduler())
        self._cluster = SpecCluster(
            scheduler={
                "cls": scheduler,
                "options": {"host": LOOPBACK, "protocol": "tls://", "security": secure},
            },
            worker={
                "cls": LocalHost,
                "options": {
                    "pool": self.pool,
                    "folder": folder,
                    "keys": keys,
                    "started": self._started,
                },
            },
            security=Security(**keys.kernel()),
            asynchronous=True,
            name=self.pool.name,
        )
        return self._cluster

    async def ensure(self, cluster: Any, count: int) -> list[str]:
        """See `Engine.ensure`."""
        said = await super().ensure(cluster, count)
        for name, host in list(cluster.workers.items()):
            if name not in cluster.observed:
                await _check(cluster, name, host)
        return said

    async def why_lost(self, agent: str) -> str:
        """Ends what is left of the host, so that no rank of it writes beside a new one."""
        host = self._cluster.workers.get(agent) if self._cluster is not None else None
        if host is not None:
            await host.end()
        return ""


async def _check(cluster: Any, name: str, host: "LocalHost") -> None:
    """Looks at a host that has not joined; one that fails is given back at once.

    Who asks next would otherwise be told the same again.
    """
    try:
        host.check()
    except PoolError:
        await cluster.scale_down([name])
        raise
