"""Tests of what the controller requires of an engine. Every engine passes the same tests."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
from distributed import Scheduler, SchedulerPlugin

from taas_magic import probe
from taas_magic.config import PoolConfig
from taas_magic.engines import ssh
from taas_magic.engines.base import make_engine
from taas_magic.engines.keys import Keys
from taas_magic.errors import PoolError, UsageError
from taas_magic.pool.gate import PoolScheduler
from taas_magic.pool.hosts import PoolHosts
from tests.nightly import nightly

pytestmark = [pytest.mark.usefixtures("no_leftovers")]


class Watching(SchedulerPlugin):
    """A scheduler plugin that counts the hosts, so that a test can wait for a number of them."""

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


POOLS = {
    "local": PoolConfig("local"),
    "workers with nannies": PoolConfig("p", engine="distributed.LocalCluster"),
    "workers without": PoolConfig(
        "p", engine="distributed.LocalCluster", options={"processes": False}
    ),
}


@pytest.fixture(params=[nightly("local"), "workers with nannies", nightly("workers without")])
def pool(request: pytest.FixtureRequest) -> PoolConfig:
    """Return the configuration of a pool; one for each engine."""
    return POOLS[request.param]


def test_the_capacity_is_known_without_a_host(pool: PoolConfig) -> None:
    capacity = make_engine(pool).capacity()
    assert capacity.cores >= 1
    assert capacity.gpus >= 0


def test_settings_override_the_gpus_and_cores_that_were_found(pool: PoolConfig) -> None:
    told = PoolConfig(pool.name, engine=pool.engine, gpus=3, cores=5)
    capacity = make_engine(told).capacity()
    assert (capacity.gpus, capacity.cores) == (3, 5)


def test_hosts_can_be_requested_again_after_their_release(pool: PoolConfig, tmp_path: Path) -> None:
    async def live() -> None:
        engine = make_engine(pool)
        engine.prepare()  # starts the first host early; the second host starts on request
        async with engine.open(PoolScheduler, Keys(), str(tmp_path)) as scheduler:
            watching = Watching()
            scheduler.add_plugin(watching)
            members = PoolHosts(scheduler, engine, pool.start_timeout_s, pool.lease_s)
            [member] = await members.acquire(1)
            assert member.name and member.peer_address
            await engine.release_hosts({member.agent})
            assert members.all() == [member]
            await engine.release_hosts(())
            await watching.reached(0)
            [again] = await members.acquire(1)
            assert again is not member

    asyncio.run(live())


NOWHERE = {
    "ssh": PoolConfig("p", engine="ssh", hosts=("gpu1",), gpus=1, cores=1, start_timeout_s=30),
    "slurm": PoolConfig(
        "p",
        engine="dask_jobqueue.SLURMCluster",
        start_timeout_s=30,
        options={"cores": 1, "memory": "1GB", "scheduler_options": {"host": "127.0.0.1"}},
    ),
}
WHY = {"ssh": "host gpu1: KeyError: 'odd'", "slurm": "could not start a host: .*'sbatch'"}


@pytest.mark.parametrize("name", NOWHERE)
def test_an_unforeseen_error_of_a_host_is_raised_at_each_request(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request for a host raises the error. Otherwise, a restarted run would wait forever."""
    pool = NOWHERE[name]

    def fail(*_: object) -> None:
        raise KeyError("odd")

    async def ask() -> None:
        engine = make_engine(pool)
        async with engine.open(PoolScheduler, Keys(), str(tmp_path)) as scheduler:
            members = PoolHosts(scheduler, engine, pool.start_timeout_s, pool.lease_s)
            for _ in range(2):
                with pytest.raises(PoolError, match=WHY[name]):
                    await members.acquire(1)
            gc.collect()  # frees the failed host, of which Dask would warn

    monkeypatch.setattr(ssh, "connect", fail)
    monkeypatch.setenv("PATH", "/nowhere")
    asyncio.run(ask())


def test_an_unknown_engine_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(UsageError, match=r'no engine "x". There are local, ssh'):
        make_engine(PoolConfig("p", engine="x"))


@pytest.mark.parametrize(("visible", "count"), [("0,1", 2), ("", 0), ("-1", 0), ("GPU-5a", 1)])
def test_gpus_are_counted_without_cuda(
    monkeypatch: pytest.MonkeyPatch, visible: str, count: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert probe.count_gpus() == count


def test_a_batch_job_with_several_workers_is_refused_before_the_pool_starts() -> None:
    options = {"processes": 12}
    pool = PoolConfig("hpc", engine="dask_jobqueue.SLURMCluster", options=options)
    with pytest.raises(UsageError, match=r"each Dask job is one host: .* set gpus = 12"):
        make_engine(pool)
