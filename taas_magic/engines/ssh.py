"""The engine of SSH pools: hosts that are there already and let the user in."""

import threading
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from taas_magic.config import PoolConfig
from taas_magic.engines.base import Engine
from taas_magic.errors import PoolError
from taas_magic.host.system import LOOPBACK
from taas_magic.plan import HostCapacity
from taas_magic.setup import facts
from taas_magic.setup.facts import Shell

if TYPE_CHECKING:
    from distributed import SpecCluster

    from taas_magic.engines.keys import Keys
    from taas_magic.engines.ssh_cluster import SshCluster
    from taas_magic.ssh.config import Target

_asked: dict[str, HostCapacity] = {}


class SshEngine(Engine):
    """Starts a supervisor, and through it the agent, on each host over SSH."""

    name = "ssh"

    def __init__(self, pool: PoolConfig) -> None:
        super().__init__(pool)
        self._cluster: SshCluster | None = None

    def capacity(self) -> HostCapacity:
        """What taas.toml says; what it leaves out is asked of the hosts, once in a process.

        Raises:
            PoolError: None of the hosts answers.
        """
        if self.pool.gpus is not None and self.pool.cores:
            return HostCapacity(self.pool.gpus, self.pool.cores)
        key = repr((self.pool.hosts, self.pool.python, self.pool.options))
        if key not in _asked:
            _asked[key] = ask_capacity(self.pool)
        found = _asked[key]
        gpus = found.gpus if self.pool.gpus is None else self.pool.gpus
        return HostCapacity(gpus, self.pool.cores or found.cores)

    def prepare(self) -> None:
        """Nothing: whether, and where, hosts are wanted is not known yet."""

    def ways(self, stop: threading.Event) -> Mapping[str, AbstractContextManager[Shell]]:
        return {target.label: _way(target, stop) for target in targets(self.pool)}

    def open(self, scheduler: type, keys: "Keys", folder: str) -> "SpecCluster":
        from distributed import Security

        from taas_magic.engines.ssh_cluster import Roster, SshCluster, SshHost

        secure = Security(**keys.scheduler())
        roster = Roster(self.pool, targets(self.pool), keys)
        self._cluster = SshCluster(
            roster,
            scheduler={
                "cls": scheduler,
                "options": {"host": LOOPBACK, "protocol": "tls://", "security": secure},
            },
            worker={"cls": SshHost, "options": {"roster": roster}},
            security=Security(**keys.kernel()),
            asynchronous=True,
            name=self.pool.name,
        )
        return self._cluster

    async def ensure(self, cluster: Any, count: int) -> list[str]:
        self.ask_for(cluster, count)
        said: list[str] = await cluster.bring()
        return said

    async def release(self, cluster: Any, keep: Collection[str]) -> None:
        cluster.give_up(keep)
        await super().release(cluster, keep)

    @asynccontextmanager
    async def way(self, agent: str, address: str) -> AsyncIterator[str]:
        """See `Engine.way`: as its agent, a host reaches this machine by SSH only."""
        assert self._cluster is not None
        async with self._cluster.tunnel(agent, address) as port:
            yield f"tls://{LOOPBACK}:{port}"

    async def why_lost(self, agent: str) -> str:
        return "" if self._cluster is None else await self._cluster.why_lost(agent)


@contextmanager
def _way(target: "Target", stop: threading.Event) -> Iterator[Shell]:
    from taas_magic.ssh.connect import connect

    connection = connect(target, stop)
    try:
        yield connection
    finally:
        connection.close()


def targets(pool: PoolConfig) -> list["Target"]:
    """The hosts of a pool, as ssh's configuration has them.

    Raises:
        UsageError: A name, or the configuration, cannot be understood.
    """
    from taas_magic.ssh.config import find_target, read_config

    config = read_config(pool.options.get("ssh_config"))
    return [find_target(host, config) for host in pool.hosts]


def ask_capacity(pool: PoolConfig) -> HostCapacity:
    """What the first host that answers offers; the hosts of a pool are alike.

    It may be interrupted at any time: nothing blocks in the caller's own thread.

    Raises:
        PoolError: None of the hosts answers.
    """
    stop = threading.Event()
    executor = ThreadPoolExecutor(len(pool.hosts), "taas-ask")
    try:
        asked = {executor.submit(_ask_host, target, pool, stop) for target in targets(pool)}
        return _first(asked)
    finally:
        stop.set()
        executor.shutdown(wait=False, cancel_futures=True)


def _first(asked: set[Future[HostCapacity]]) -> HostCapacity:
    failures = []
    while asked:
        done, asked = wait(asked, return_when=FIRST_COMPLETED)
        for future in done:
            error = future.exception()
            if error is None:
                return future.result()
            failures.append(str(error))
    raise PoolError("\n".join(failures))


def _ask_host(target: "Target", pool: PoolConfig, stop: threading.Event) -> HostCapacity:
    with _way(target, stop) as shell:
        found = facts.ask_host(shell, pool.python)
    return HostCapacity(found.gpus, found.cores)
