"""Tests of `Vehicles`, which reports on a pool's batch jobs: waiting, failed and unneeded jobs."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from taas_magic.engines import dask_class as waiting
from taas_magic.engines.dask_class import BatchJob, BatchSystem, Vehicles, parse_squeue
from taas_magic.errors import PoolError


@dataclass(frozen=True)
class Told(BatchSystem):
    """A batch system whose jobs the test sets."""

    jobs: dict[str, BatchJob] = field(default_factory=dict)

    async def query(self, job_ids: Collection[str]) -> dict[str, BatchJob]:
        return {job_id: self.jobs[job_id] for job_id in job_ids if job_id in self.jobs}


@dataclass(frozen=True)
class Counting(Told):
    """A batch system that counts the queries."""

    queries: list[Collection[str]] = field(default_factory=list)

    async def query(self, job_ids: Collection[str]) -> dict[str, BatchJob]:
        self.queries.append(job_ids)
        return await super().query(job_ids)


@dataclass
class Submitted:
    """Stand-in for the Dask worker object of a batch job."""

    job_id: str


PENDING = BatchJob("1", "PENDING", "Resources", ended=False)
RUNNING = BatchJob("1", "RUNNING", "", ended=False)
FAILED = BatchJob("1", "FAILED", "NonZeroExitCode", ended=True)


@pytest.fixture(autouse=True)
def look_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "QUERY_GAP_S", 0.0)


@pytest.fixture
def system() -> Told:
    return Told("Slurm", lambda ids: [], parse_squeue, jobs={"1": PENDING})


@pytest.fixture
def vehicles(system: Told, tmp_path: Path) -> Vehicles:
    """Return the vehicles of a pool: one vehicle, `hpc-0`, whose job is 1."""
    made = Vehicles(system, tmp_path)
    made.record_jobs([("hpc-0", Submitted("1"))])
    return made


def look(vehicles: Vehicles, up: Collection[str] = (), agents: Collection[str] = ()) -> list[str]:
    return asyncio.run(vehicles.describe_awaited(["hpc-0"], up, agents))


def test_the_report_follows_the_state_of_the_batch_job(vehicles: Vehicles) -> None:
    assert look(vehicles) == ["hpc-0: Slurm job 1 PENDING (Resources)"]
    assert "the agent starts" in look(vehicles, up=["hpc-0"])[0]
    assert look(vehicles, up=["hpc-0"], agents=["hpc-0"]) == []


def test_a_job_that_stays_queued_is_queried_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool looks once a second for an hour. When a worker joins, the gap is short again."""
    system = Counting("Slurm", lambda ids: [], parse_squeue, jobs={"1": PENDING})
    now, gap_s = [0.0], 2.0
    monkeypatch.setattr(waiting, "QUERY_GAP_S", gap_s)
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: now[0]))
    vehicles = Vehicles(system, tmp_path)
    vehicles.record_jobs([("hpc-0", Submitted("1"))])

    def look_for(seconds: float, up: Collection[str] = ()) -> list[str]:
        until = now[0] + seconds
        while now[0] < until:
            now[0] += 1
            lines = look(vehicles, up)
        return lines

    look_for(3600)
    assert 3600 / waiting.LONGEST_QUERY_GAP_S <= len(system.queries) < 150
    system.jobs["1"] = RUNNING
    assert look_for(waiting.LONGEST_QUERY_GAP_S) == ["hpc-0: Slurm job 1 RUNNING"]
    look_for(300)
    assert "the agent starts" in look_for(gap_s, up=["hpc-0"])[0]


def test_a_batch_job_that_ends_early_raises_one_error(vehicles: Vehicles, system: Told) -> None:
    (Path(str(vehicles._output)) / "taas-1.err").write_text("no module named torch\n")
    system.jobs["1"] = FAILED
    with pytest.raises(
        PoolError, match=r"job 1 ended before host hpc-0 was ready: FAILED"
    ) as error:
        look(vehicles)
    assert "no module named torch" in str(error.value)
    assert look(vehicles) == ["hpc-0: requested; its Dask worker has not joined yet"], (
        "another job is to come"
    )


def test_a_job_that_the_system_has_forgotten_has_ended(vehicles: Vehicles, system: Told) -> None:
    system.jobs.clear()
    with pytest.raises(PoolError, match=r"no longer known\. The job printed nothing"):
        look(vehicles)


def test_a_batch_job_that_is_not_needed_any_more_may_fail(vehicles: Vehicles, system: Told) -> None:
    vehicles.forget(kept=[])
    system.jobs["1"] = FAILED
    assert look(vehicles) == ["hpc-0: requested; its Dask worker has not joined yet"]


def test_a_batch_job_whose_host_has_joined_may_end(vehicles: Vehicles, system: Told) -> None:
    system.jobs["1"] = BatchJob("1", "TIMEOUT", "TimeLimit", ended=True)
    assert asyncio.run(vehicles.why_lost("hpc-0")) == "Slurm job 1 is TIMEOUT (TimeLimit)"
    assert look(vehicles) == ["hpc-0: requested; its Dask worker has not joined yet"]


def test_the_state_of_a_lost_hosts_batch_job_is_awaited_for_a_while(
    vehicles: Vehicles, system: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    system.jobs["1"] = RUNNING
    monkeypatch.setattr(waiting, "JOB_END_WAIT_S", 60.0)

    async def lose() -> str:
        why = asyncio.ensure_future(vehicles.why_lost("hpc-0"))
        await asyncio.sleep(0)
        system.jobs["1"] = FAILED
        return await why

    assert asyncio.run(lose()) == "Slurm job 1 is FAILED (NonZeroExitCode)"


@pytest.mark.parametrize("worker", [object(), Submitted("")])
def test_without_a_batch_system_the_report_only_says_requested(worker: Any) -> None:
    vehicles = Vehicles(None, None)
    vehicles.record_jobs([("hpc-0", worker)])
    assert look(vehicles) == ["hpc-0: requested; its Dask worker has not joined yet"]
    assert asyncio.run(vehicles.why_lost("hpc-0")) == ""


def test_a_batch_system_that_cannot_be_asked_ends_no_wait(tmp_path: Path) -> None:
    class Silent(Told):
        async def query(self, job_ids: Collection[str]) -> dict[str, BatchJob]:
            raise OSError("slurm_load_jobs error")

    vehicles = Vehicles(Silent("Slurm", lambda ids: [], parse_squeue), tmp_path)
    vehicles.record_jobs([("hpc-0", Submitted("1"))])
    assert look(vehicles) == ["hpc-0: Slurm job 1 in an unknown state (slurm_load_jobs error)"]
