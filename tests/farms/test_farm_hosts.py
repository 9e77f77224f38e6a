"""Farms on hosts that share no files, on batch systems, and on several pools at once."""

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from taas_magic.farms.farm import Farm, Job
from tests.cellfiles import cells_of
from tests.eventually import HUNG_S, eventually
from tests.harness import Notebook, without_pytests_filter
from tests.rig.hosts import SCRIPT, Hosts, hosts_up
from tests.rig.pbs import Pbs, pbs_up
from tests.rig.pools import enter, give_back, settings_in, ssh_pool
from tests.rig.slurm import CORES, PATH, Slurm, slurm_up

pytestmark = [pytest.mark.network]

ARRAY_BYTES = 32 << 20

HERE = """
[pools.here]
engine = "local"
max_hosts = 1
"""

BATCH = """
[pools.hpc]
engine = "dask_jobqueue.{kind}Cluster"
max_hosts = 3
start_timeout_s = 100
options = {{ queue = "debug", cores = {cores}, memory = "1GB", walltime = "00:10:00", \
interface = "eth0", scheduler_options = {{ host = "{caller}" }} }}
"""

[FUNCTIONS] = cells_of("farm_host_jobs")

KEYLESS = Path(__file__).parents[1] / "children" / "keyless.py"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_up(2) as up:
        yield up


@pytest.fixture(scope="module")
def settings(
    warm_notebook: Notebook, hosts: Hosts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    toml = ssh_pool("cluster", hosts, gpus=0) + HERE
    folder = settings_in(tmp_path_factory.mktemp("config"), toml)
    yield folder
    give_back(warm_notebook, folder, "cluster", "here")
    for number in (1, 2):
        _, left = psutil.wait_procs(processes_of(hosts, number), timeout=HUNG_S)
        assert not left


@pytest.fixture
def user(
    warm_notebook: Notebook, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Notebook]:
    """Yield a notebook with these pools, a local module and a data file."""
    enter(warm_notebook, settings, monkeypatch)
    with prepared(warm_notebook):
        yield warm_notebook


@contextmanager
def prepared(notebook: Notebook) -> Iterator[None]:
    """Add functions, a local module and a data file to the notebook within the block."""
    module, data = notebook.project / "scaling.py", notebook.project / "data.txt"
    module.write_text("def scale(x):\n    return 3 * x\n")
    data.write_text("1234567")
    with pytest.MonkeyPatch.context() as patch, without_pytests_filter():
        patch.syspath_prepend(notebook.project)
        notebook.define(FUNCTIONS)
        yield
    del sys.modules["scaling"]
    module.unlink()
    data.unlink()


def processes_of(hosts: Hosts, number: int) -> list[psutil.Process]:
    """Return the processes of a host; none if the host is powered off."""
    try:
        return hosts.processes(number)
    except psutil.NoSuchProcess:
        return []


@contextmanager
def farm_of(notebook: Notebook, call: str) -> Iterator[Farm]:
    """Yield the farm that the code `call` creates in a cell. Close the farm after the block."""
    notebook.define(f"farm = {call}")
    farm = notebook.shell.user_ns["farm"]
    assert isinstance(farm, Farm)
    with farm:
        yield farm


def begun(job: Job) -> bool:
    """Return whether a job runs and has printed "begun" on its present host."""
    return job.state == "running" and job.last_line == "begun"


def received(hosts: Hosts, number: int) -> int:
    """Return the number of bytes that a host has received."""
    return int(hosts.exec(number, "cat", "/sys/class/net/eth0/statistics/rx_bytes"))


def test_a_farm_on_hosts_that_share_nothing(user: Notebook, hosts: Hosts) -> None:
    """The checks share one farm, one after the other."""
    with farm_of(user, "taas.farm('cluster', nodes=2)") as farm:
        eventually(lambda: len(farm.status().ready) == 2, within_s=HUNG_S)
        assert {node.host for node in farm.status().ready} == set(hosts.names)
        jobs_find_the_project_and_bring_their_files_home(user, hosts)
        a_large_argument_goes_to_each_host_once(user, hosts)
        # one tunnel to the pool and one tunnel to the farm
        eventually(lambda: ways_are(hosts, 2), within_s=HUNG_S)
    # the tunnel to the farm ends with the node
    eventually(lambda: ways_are(hosts, 1), within_s=HUNG_S)


def jobs_find_the_project_and_bring_their_files_home(user: Notebook, hosts: Hosts) -> None:
    user.define("jobs = farm.map(train, range(6))")
    user.define("got = [job.result() for job in farm.as_completed(jobs)]")
    user.define("right = all(type(it) is Solution for it in got)")
    got, jobs = user.shell.user_ns["got"], user.shell.user_ns["jobs"]
    assert user.shell.user_ns["right"]
    assert sorted(it.value for it in got) == [3 * x + 7 for x in range(6)]
    assert all(job.result().host == job.host for job in jobs)
    assert {job.host for job in jobs} <= set(hosts.names)
    for job in jobs:
        assert (job.folder / "output.log").read_text() == f"training {job.args[0]}\n"
        assert (job.folder / "models" / "model.pt").stat().st_size
    assert not (user.project / "models").exists()
    assert not (user.project / "stray.txt").exists()


def a_large_argument_goes_to_each_host_once(user: Notebook, hosts: Hosts) -> None:
    before = {number: received(hosts, number) for number in (1, 2)}
    user.define(f"data = numpy.random.default_rng(0).random({ARRAY_BYTES // 8})")
    user.define("data[0] = 1")
    user.define("jobs = farm.map(total, [data] * 10, go='/tmp/go')")
    jobs = user.shell.user_ns["jobs"]
    eventually(
        lambda: {job.host for job in jobs if begun(job)} == set(hosts.names), within_s=HUNG_S
    )
    for number in (1, 2):
        hosts.exec(number, "touch", "/tmp/go")
    user.define("sums = [job.result() for job in jobs]")
    for number in (1, 2):
        hosts.exec(number, "rm", "/tmp/go")
    sums, data = user.shell.user_ns["sums"], user.shell.user_ns["data"]
    assert {it for it, _ in sums} == {float(data.sum())}
    assert {host for _, host in sums} == set(hosts.names)
    for number in (1, 2):
        assert ARRAY_BYTES < received(hosts, number) - before[number] < 1.5 * ARRAY_BYTES


def ways_are(hosts: Hosts, count: int) -> bool:
    """Return whether each host has `count` tunnels that send nothing to a client without a key."""
    return all(keyless(hosts, number) == ["127.0.0.1 sshd 0"] * count for number in (1, 2))


def keyless(hosts: Hosts, number: int) -> list[str]:
    """Connect to the ports of a host's sshd and nodes without a certificate.

    Returns:
        A line for each port: address, program, and number of bytes received.
    """
    return hosts.exec(number, sys.executable, str(KEYLESS)).splitlines()


@pytest.mark.nightly
def test_nodes_of_several_pools_share_the_jobs(user: Notebook, hosts: Hosts) -> None:
    with farm_of(user, "taas.farm(pool=('here', 'cluster'), nodes=2)") as farm:
        eventually(lambda: len(farm.status().ready) == 2, within_s=HUNG_S)
        [far] = {node.host for node in farm.status().ready} & set(hosts.names)
        user.define("met = {job.result() for job in farm.map(meet, range(12))}")
        assert user.shell.user_ns["met"] == {far, socket.gethostname()}


@pytest.mark.nightly
def test_a_host_that_is_powered_off_while_it_works_has_its_job_done_elsewhere(
    user: Notebook, hosts: Hosts
) -> None:
    with farm_of(user, "taas.farm('cluster', nodes=1)") as farm:
        eventually(lambda: farm.status().ready, within_s=HUNG_S)
        first = farm.status().ready[0].host
        user.define("done = farm.submit(train, 1)\ndone.result()")
        user.define(f"job = farm.submit(wait_while, 'TAAS_HOST', {first!r})")
        job, done = user.shell.user_ns["job"], user.shell.user_ns["done"]
        eventually(lambda: begun(job), within_s=HUNG_S)
        hosts.kill(1 + hosts.names.index(first))
        [other] = set(hosts.names) - {first}
        assert job.result() == job.host == other
        assert done.result().value == 10
        assert [node.why for node in farm.status().nodes.values() if node.state == "lost"]


def batch_pool(kind: str, slurm: Slurm) -> str:
    """Return the taas.toml text of a pool whose jobs run on the hosts of `slurm`."""
    assert slurm.hosts is not None
    return BATCH.format(kind=kind, cores=CORES, caller=slurm.hosts.caller)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_up(2, share=(tmp_path_factory.getbasetemp(),)) as up:
        yield up


@pytest.fixture
def batch(
    warm_notebook: Notebook, slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Notebook]:
    """Yield a notebook with a pool of Slurm jobs."""
    settings = settings_in(tmp_path, batch_pool("SLURM", slurm))
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    monkeypatch.setenv("PATH", PATH)
    enter(warm_notebook, settings, monkeypatch)
    with prepared(warm_notebook):
        yield warm_notebook
    give_back(warm_notebook, settings, "hpc")
    slurm.wait_until_empty()


@pytest.mark.nightly
def test_jobs_run_in_slurm_jobs_and_a_farm_that_is_closed_leaves_the_queue_empty(
    batch: Notebook, slurm: Slurm
) -> None:
    """Slurm has room for two of the three nodes. Closing the farm removes the waiting node too."""
    assert slurm.hosts is not None
    with farm_of(batch, f"taas.farm('hpc', cpus={CORES}, nodes=3)") as farm:
        eventually(
            lambda: len(farm.status().ready) == 2 and "PENDING" in slurm.jobs().values(),
            within_s=HUNG_S,
        )
        assert {node.host for node in farm.status().ready} == set(slurm.hosts.names)
        batch.define("jobs = farm.map(train, range(6))")
        batch.define("got = [job.result().value for job in jobs]")
        batch.define("met = {job.result() for job in farm.map(meet, range(12))}")
        assert batch.shell.user_ns["got"] == [3 * x + 7 for x in range(6)]
        assert batch.shell.user_ns["met"] == set(slurm.hosts.names)
        assert all((job.folder / "models" / "model.pt").exists() for job in farm_jobs(batch))
        assert not (batch.project / "stray.txt").exists()
        assert "PENDING" in slurm.jobs().values()
        a_slurm_job_that_is_cancelled_has_its_work_done_in_another(batch, slurm)
    assert farm._process.returncode == 0, "it had to be killed"
    slurm.wait_until_empty()


def farm_jobs(notebook: Notebook) -> list[Job]:
    jobs: list[Job] = notebook.shell.user_ns["jobs"]
    return jobs


def a_slurm_job_that_is_cancelled_has_its_work_done_in_another(
    batch: Notebook, slurm: Slurm
) -> None:
    """Two jobs run on two nodes. The one in the Slurm job `first` waits until `scancel` ends it."""
    batch.define("first = farm.submit(variable, 'SLURM_JOB_ID').result()")
    batch.define("jobs = farm.map(wait_while, ['SLURM_JOB_ID'] * 2, [first] * 2)")
    first, jobs = batch.shell.user_ns["first"], farm_jobs(batch)
    eventually(
        lambda: any(map(begun, jobs)) and any(job.state == "done" for job in jobs), within_s=HUNG_S
    )
    slurm.run("scancel", first)
    assert {job.result() for job in jobs} <= set(slurm.jobs()) - {first}
    eventually(lambda: "PENDING" in slurm.jobs().values(), within_s=HUNG_S)


@pytest.fixture
def queue(
    slurm: Slurm, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pbs]:
    """Yield stand-ins for PBS's commands, whose jobs run on the same hosts."""
    assert slurm.hosts is not None
    ways = [[str(SCRIPT), "exec", str(number)] for number in (1, 2)]
    with pbs_up(2, ways, parent=tmp_path_factory.getbasetemp()) as up:
        for name, value in {**slurm.hosts.environ, **up.environ}.items():
            monkeypatch.setenv(name, value)
        yield up


@pytest.mark.nightly
def test_nodes_are_jobs_of_pbs(
    warm_notebook: Notebook,
    slurm: Slurm,
    queue: Pbs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = settings_in(tmp_path, batch_pool("PBS", slurm))
    enter(warm_notebook, settings, monkeypatch)
    with (
        prepared(warm_notebook),
        farm_of(warm_notebook, f"taas.farm('hpc', cpus={CORES}, nodes=(0, 1))"),
    ):
        warm_notebook.define("got = [job.result().value for job in farm.map(train, range(3))]")
        assert warm_notebook.shell.user_ns["got"] == [7, 10, 13]
    assert queue.jobs()
    give_back(warm_notebook, settings, "hpc")
    queue.wait_until_empty()
