"""One suite for every engine: what the keeper may count on."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from distributed import Scheduler, SchedulerPlugin

from taas_magic.config import PoolConfig
from taas_magic.engines.base import find_engine
from taas_magic.engines.head import HeadScheduler
from taas_magic.engines.keys import make_security
from taas_magic.engines.local import count_gpus
from taas_magic.engines.members import Members
from taas_magic.errors import UsageError

pytestmark = pytest.mark.usefixtures("no_leftovers")


class Watching(SchedulerPlugin):
    """Waits for hosts to come and go."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = asyncio.Condition()

    async def reached(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._count == count)

    async def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        await self._change(scheduler)

    async def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        await self._change(scheduler)

    async def _change(self, scheduler: Scheduler) -> None:
        async with self._changed:
            self._count = len(scheduler.workers)
            self._changed.notify_all()


@pytest.fixture(params=["local"])
def pool(request: pytest.FixtureRequest) -> PoolConfig:
    """A pool of each engine."""
    return PoolConfig(request.param, engine=request.param)


def test_capacity_takes_no_host(pool: PoolConfig) -> None:
    capacity = find_engine(pool).capacity()
    assert capacity.cores >= 1
    assert capacity.gpus >= 0


def test_settings_override_what_is_found(pool: PoolConfig) -> None:
    told = PoolConfig(pool.name, engine=pool.engine, gpus=3, cores=5)
    capacity = find_engine(told).capacity()
    assert (capacity.gpus, capacity.cores) == (3, 5)


@pytest.mark.parametrize("prepared", [True, False])
def test_hosts_come_die_come_again_and_go(pool: PoolConfig, tmp_path: Path, prepared: bool) -> None:
    async def live() -> None:
        engine = find_engine(pool)
        if prepared:
            engine.prepare()
        async with engine.open(HeadScheduler, make_security(), str(tmp_path)) as cluster:
            watching = Watching()
            cluster.scheduler.add_plugin(watching)
            members = Members(cluster.scheduler, ensure_hosts, pool.start_timeout_s, pool.lease_s)
            cluster.scale(1)
            await cluster
            await watching.reached(1)
            address = next(iter(cluster.scheduler.workers))
            [member] = await members.take(1)
            assert (member.address, bool(member.name), bool(member.place)) == (address, True, True)
            assert cluster.scheduler.workers[address].name in cluster.workers
            await cluster.workers[0].close()
            await watching.reached(0)

    asyncio.run(live())


async def ensure_hosts(count: int) -> None:
    """The tests ask for hosts themselves."""


def test_an_unknown_engine_is_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="no engine 'x'; possible is local, ssh"):
        find_engine(PoolConfig("p", engine="x"))


@pytest.mark.parametrize(("visible", "count"), [("0,1", 2), ("", 0), ("-1", 0), ("GPU-5a", 1)])
def test_gpus_are_counted_without_cuda(
    monkeypatch: pytest.MonkeyPatch, visible: str, count: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count
