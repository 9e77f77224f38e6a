"""Tests of queries to batch systems: samples of their output are parsed, and real ones asked."""

import asyncio
import re
import stat
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import dask
import psutil
import pytest

from taas_magic.config import PoolConfig
from taas_magic.engines.base import make_engine
from taas_magic.engines.dask_class import (
    SYSTEMS,
    BatchJob,
    Vehicles,
    find_system,
    output_tail,
    parse_qstat,
    parse_squeue,
)
from taas_magic.engines.keys import Keys
from taas_magic.errors import PoolError
from taas_magic.pool.gate import PoolScheduler
from taas_magic.pool.hosts import PoolHosts
from taas_magic.pool.process import DASK_SETTINGS
from tests.eventually import HUNG_S, eventually
from tests.rig.pbs import Pbs, pbs_up
from tests.rig.slurm import PATH, Slurm, slurm_up

SQUEUE = """\
17|PENDING|Resources
18|RUNNING|None
19|CANCELLED|None
20|NODE_FAIL|None
21|PENDING|ReqNodeNotAvail, UnavailableNodes:n[1-2]
"""

QSTAT = """\
Job Id: 12.server
    Job_Name = taas-hpc
    job_state = Q
    comment = Not Running: Insufficient amount of resource: ng
\tpus (R: 2 A: 0 T: 8)
    Resource_List.walltime = 01:00:00

Job Id: 13.server
    job_state = R
    comment = Job run at Sat Jan 31 at 14:25 on (n1:ncpus=12)

Job Id: 14.server
    job_state = F
    comment = Job run at Sat Jan 31 at 14:25 and failed
    Exit_status = 271
"""


def test_the_output_of_squeue_is_parsed() -> None:
    jobs = parse_squeue(SQUEUE)
    assert {job_id: job.ended for job_id, job in jobs.items()} == {
        "17": False,
        "18": False,
        "19": True,
        "20": True,
        "21": False,
    }
    assert str(jobs["17"]) == "PENDING (Resources)"
    assert str(jobs["18"]) == "RUNNING"
    assert jobs["21"].reason == "ReqNodeNotAvail, UnavailableNodes:n[1-2]"


def test_the_output_of_qstat_is_parsed_also_with_broken_lines() -> None:
    jobs = parse_qstat(QSTAT)
    reason = "Not Running: Insufficient amount of resource: ngpus (R: 2 A: 0 T: 8)"
    assert jobs["12"] == BatchJob("12", "QUEUED", reason, ended=False)
    assert jobs["13"].state == "RUNNING"
    assert jobs["14"] == BatchJob("14", "FINISHED", "exit status 271", ended=True)


@pytest.mark.parametrize("parse", [parse_squeue, parse_qstat])
def test_text_that_is_no_report_has_no_jobs(parse: Callable[[str], dict[str, BatchJob]]) -> None:
    assert parse("slurm_load_jobs error: x\n|\n\nJob") == {}


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with slurm_up() as up:
        yield up


@pytest.fixture
def submitting(slurm: Slurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Yield the folder for the output of jobs. Cancel all jobs after the test."""
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    monkeypatch.setenv("PATH", PATH)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    slurm.cancel_all()


def submit(slurm: Slurm, *words: str) -> str:
    command = ["sbatch", "--parsable", "--output=out-%j.txt", *words]
    return slurm.run(*command)


@pytest.mark.network
def test_slurm_is_asked(slurm: Slurm, submitting: Path) -> None:
    fails = submit(slurm, "--wrap=echo why; exit 3")
    failed = asyncio.run(settled(fails, lambda job: job.ended))
    assert str(failed) == "FAILED (NonZeroExitCode)"
    assert output_tail(submitting, fails).startswith("why\n(")
    runs = submit(slurm, "--exclusive", "--wrap=sleep 600")
    waits = submit(slurm, "--exclusive", "--wrap=true")
    assert not asyncio.run(settled(runs, lambda job: job.state == "RUNNING")).ended
    waiting = asyncio.run(settled(waits, lambda job: bool(job.reason)))
    assert waiting.state == "PENDING" and waiting.reason in ("Resources", "Priority")
    slurm.run("scancel", waits)
    assert asyncio.run(settled(waits, lambda job: job.ended)).state == "CANCELLED"


async def settled(
    job_id: str, is_so: Callable[[BatchJob], bool], system: str = "slurm"
) -> BatchJob:
    """Wait until the batch system's report of a job meets `is_so`. Return the report."""
    asked = find_system(system)
    assert asked is not None
    while True:
        if is_so(job := (await asked.query([job_id]))[job_id]):
            return job
        await asyncio.sleep(0.2)  # a pause, because each query starts a program


@pytest.mark.network
def test_a_job_that_slurm_has_forgotten_is_no_error(slurm: Slurm, submitting: Path) -> None:
    assert asyncio.run(SYSTEMS["slurm"].query(["99999"])) == {}


@pytest.mark.process
def test_a_batch_system_that_cannot_be_asked_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "squeue"
    command.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{PATH}")
    with pytest.raises(OSError, match="Unable to contact"):
        asyncio.run(SYSTEMS["slurm"].query(["1"]))
    vehicles = Vehicles(SYSTEMS["slurm"], None)
    vehicles.record_jobs([("hpc-0", SimpleNamespace(job_id="1"))])
    why = asyncio.run(vehicles.why_lost("hpc-0"))
    assert why == "Slurm job 1 is in an unknown state (Unable to contact slurm controller)"


@pytest.fixture
def pbs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Pbs]:
    """Yield a queue that runs one job at a time."""
    with pbs_up(1) as up:
        for name, value in up.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        yield up


def qsub(script: str) -> str:
    Path("job.sh").write_text(script)
    done = subprocess.run(["qsub", "job.sh"], capture_output=True, text=True, check=True)
    return done.stdout.strip().partition(".")[0]


@pytest.mark.usefixtures("no_leftovers")
def test_pbs_is_asked_for_jobs_that_wait_run_and_have_ended(pbs: Pbs) -> None:
    runs, waits = qsub("sleep 600\n"), qsub("exit 3\n")

    async def live() -> None:
        system = find_system("pbs")
        assert system is not None
        jobs = await system.query([runs, waits])
        assert jobs[runs].state == "RUNNING"
        assert str(jobs[waits]).startswith("QUEUED (Not Running: Insufficient amount of resource")
        await asyncio.to_thread(pbs.delete, runs)
        await settled(waits, lambda job: job.ended, "pbs")
        jobs = await system.query([runs, waits])
        assert jobs[runs].reason == "exit status 271"
        assert jobs[waits].reason == "exit status 3"
        assert await system.query(["77"]) == {}

    asyncio.run(live())


@asynccontextmanager
async def pool_on(pbs: Pbs) -> AsyncIterator[PoolHosts]:
    """Yield the hosts of a pool whose jobs run in the queue."""
    options = {
        "cores": 1,
        "memory": "1GB",
        "interface": "lo",
        "scheduler_options": {"host": "127.0.0.1"},
        # The job of a lost host ends only some time after its processes.
        "job_script_prologue": ["trap \"trap '' TERM; sleep 4\" EXIT"],
    }
    engine = "dask_jobqueue.PBSCluster"
    pool = PoolConfig("hpc", engine=engine, gpus=1, start_timeout_s=HUNG_S, options=options)
    made = make_engine(pool)
    with dask.config.set(DASK_SETTINGS):
        async with made.open(PoolScheduler, Keys(), str(pbs.folder)) as scheduler:
            yield PoolHosts(scheduler, made, pool.start_timeout_s, pool.lease_s)


@pytest.mark.fault(57)
@pytest.mark.usefixtures("no_leftovers")
def test_each_job_that_replaces_another_one_is_watched(pbs: Pbs) -> None:
    """Other jobs fill the queue, so that new jobs of the pool wait.

    At the end, all processes of a job are stopped. The pool ends the job, too.
    """

    async def live() -> None:
        others = await asyncio.to_thread(qsub, "sleep 600\n")
        async with pool_on(pbs) as hosts:
            waits = [asyncio.create_task(hosts.acquire(1)) for _ in "ab"]
            await asyncio.to_thread(
                eventually, lambda: any("PBS job 2 QUEUED" in line for line in hosts.awaited)
            )
            await asyncio.to_thread(pbs.delete, "2")
            [told], [waits_on] = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            assert "PBS job 2 ended before host hpc-0 was ready" in str(told.exception())
            await asyncio.to_thread(eventually, lambda: "3.rig" in pbs.jobs())
            await asyncio.to_thread(pbs.delete, others)
            assert await waits_on == hosts.all()

            others = await asyncio.to_thread(qsub, "sleep 600\n")
            for_two = asyncio.create_task(hosts.acquire(2))
            await asyncio.to_thread(eventually, lambda: "5.rig" in pbs.jobs())
            await asyncio.to_thread(pbs.delete, "3")
            line = re.compile(r"hpc-\d: PBS job 6 QUEUED \(Not Running")
            await asyncio.to_thread(eventually, lambda: any(map(line.match, hosts.awaited)))
            await asyncio.to_thread(pbs.delete, "6")
            with pytest.raises(PoolError, match=r"PBS job 6 ended before host hpc-\d was ready"):
                await for_two

            await asyncio.to_thread(pbs.delete, others)
            [host] = await hosts.acquire(1)
            stopped = pbs.processes("7")
            for process in stopped:
                process.suspend()
            await hosts.drop(host.address, "it is silent")
            await asyncio.to_thread(eventually, lambda: pbs.jobs()["7.rig"] == "F")
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    asyncio.run(live())


def test_the_tail_of_a_jobs_output_is_from_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "taas-1.err").write_text("one\n")
    (tmp_path / "taas-12.err").write_text("\n".join(map(str, range(40))))
    (tmp_path / "taas-12.out").write_text("")
    assert output_tail(tmp_path, "1").startswith("one\n(")
    assert output_tail(tmp_path, "12.server").splitlines()[:-1] == [str(n) for n in range(25, 40)]
    assert output_tail(tmp_path, "2") == ""
