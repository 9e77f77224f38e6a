"""Cells on a private Slurm, through dask-jobqueue, and what users see of it.

Its nodes are two hosts of the rig. They share the folders of the notebook and of the runs with this
machine.
"""

import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

import psutil
import pytest

from taas_magic.config import load_config
from taas_magic.errors import PoolError, RunLost
from taas_magic.host.system import RUN_TOKEN
from taas_magic.notebook import pools
from taas_magic.pool.client import Pool
from tests.eventually import HUNG_S
from tests.frontend import environment
from tests.harness import Notebook, Outcome, on_event
from tests.notebook.test_attach import beside
from tests.notebook.test_detach import check_killed_kernels
from tests.rig.slurm import CORES, PATH, Slurm, slurm_up

pytestmark = [pytest.mark.network]

TOML = """
[pools.hpc]
engine = "dask_jobqueue.SLURMCluster"
gpus = 2
max_hosts = 3
start_timeout_s = {start_timeout_s}
options = {{ {options} }}
"""

MEET = """
import socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
print(socket.gethostname(), int(ones))
"""

OF_THE_JOB = """
import os
job = [os.environ.get(name) for name in ("SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES")]
print(socket.gethostname(), int(ones), *job)
"""

ENDLESS = """
import time
print("begun", flush=True)
while True:
    time.sleep(0.1)
"""


@dataclass
class Hpc:
    """A notebook with the pool `hpc`."""

    notebook: Notebook
    slurm: Slurm

    def configure(self, start_timeout_s: int = 100, **changed: str) -> None:
        """Write taas.toml. Each job gets a whole node."""
        assert self.slurm.hosts is not None
        options = {
            "queue": '"debug"',
            "cores": str(CORES),
            "memory": '"1GB"',
            "walltime": '"00:10:00"',
            "interface": '"eth0"',
            "scheduler_options": f'{{ host = "{self.slurm.hosts.caller}" }}',
            **changed,
        }
        written = ", ".join(f"{key} = {value}" for key, value in options.items())
        text = TOML.format(start_timeout_s=start_timeout_s, options=written)
        (self.notebook.project / "taas.toml").write_text(text)

    @property
    def pool(self) -> Pool:
        return pools.named("hpc", load_config(self.notebook.project))

    def run(self, source: str, gpus: int = 4) -> Outcome:
        return self.notebook.run(source, "--pool hpc", gpus=gpus)

    @contextmanager
    def once(self, condition: Callable[[], object], harm: Callable[[], object]) -> Iterator[None]:
        """Call `harm` in a thread as soon as `condition` is true."""
        over = threading.Event()

        def wait() -> None:
            while not over.wait(0.25):
                if condition():
                    harm()
                    return

        waiting = threading.Thread(target=wait)
        waiting.start()
        yield
        over.set()
        waiting.join()

    def nodes_of_jobs(self) -> set[tuple[str, ...]]:
        """Return the ids of the running jobs, each with its node."""
        lines = self.slurm.run("squeue", "--noheader", "--states=R", "--format=%i %N").splitlines()
        return {tuple(line.split()) for line in lines}

    def has_begun(self) -> bool:
        """Return whether all four ranks of the run have printed "begun"."""
        logs = (self.notebook.state_dir / "runs").glob("*/logs/*")
        return sum("begun" in log.read_text() for log in logs) == 4

    def forget_runs(self) -> None:
        shutil.rmtree(self.notebook.state_dir / "runs", ignore_errors=True)

    def ranks_left(self) -> list[psutil.Process]:
        """Wait at most `HUNG_S` seconds for the ranks on all hosts to end; return the others."""
        hosts = self.slurm.hosts
        assert hosts is not None
        found = [p for number in (1, 2) for p in hosts.processes(number)]
        ranks = [p for p in found if RUN_TOKEN in _environ(p)]
        _, alive = psutil.wait_procs(ranks, timeout=HUNG_S)
        return alive


def _environ(process: psutil.Process) -> dict[str, str]:
    with suppress(psutil.Error):
        return process.environ()
    return {}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_up(2, share=(tmp_path_factory.getbasetemp(),)) as up:
        yield up


@pytest.fixture
def hpc(notebook: Notebook, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hpc]:
    """Yield a notebook with the pool. After the test, wait until no job is left."""
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    monkeypatch.setenv("PATH", PATH)
    made = Hpc(notebook, slurm)
    made.configure()
    made.forget_runs()
    yield made
    made.pool.down()
    (notebook.project / "taas.toml").unlink()
    slurm.wait_until_empty()


@pytest.mark.nightly
@pytest.mark.fault(57)
def test_a_full_partition_is_named_while_it_is_waited_for_and_nothing_is_kept(
    hpc: Hpc, capsys: pytest.CaptureFixture[str]
) -> None:
    """The partition has two hosts, and the cell needs three. Afterwards, a smaller cell runs."""
    prologue = '["export CUDA_VISIBLE_DEVICES=4,5"]'
    hpc.configure(start_timeout_s=30, job_script_prologue=prologue)
    outcome = hpc.run(MEET, gpus=6)
    assert isinstance(outcome.error, PoolError) and outcome.run is None
    third = re.compile(r"hpc-\d: Slurm job \d+ PENDING \((Resources|Priority)\)")
    assert "of 3 hosts joined within 30 s" in outcome.shown
    assert third.search(outcome.shown) and third.search(capsys.readouterr().out)
    hpc.slurm.wait_until_empty()
    again = hpc.run(MEET + OF_THE_JOB)
    assert again.error is None, f"not on hosts that are given back: {again.shown}"
    assert hpc.slurm.hosts is not None
    said = [again.lines[rank][-1].split() for rank in range(4)]
    assert sorted(words[0] for words in said) == [n for n in hpc.slurm.hosts.names for _ in "ab"]
    assert {words[1] for words in said} == {"4"}
    assert {(words[2], words[0]) for words in said} == hpc.nodes_of_jobs()
    assert {words[3] for words in said} == {"4,5"}
    assert "Slurm job" in capsys.readouterr().out


@pytest.mark.fault(57)
def test_a_cancelled_job_is_named_the_next_cell_runs_and_a_requeued_one_joins_no_old_run(
    hpc: Hpc,
) -> None:
    """Slurm cancels or requeues the job of a host. The run is lost; the next cell runs."""
    hpc.configure(job_extra_directives='["--requeue"]')
    with hpc.once(hpc.has_begun, lambda: hpc.slurm.run("scancel", max(hpc.slurm.jobs()))):
        outcome = hpc.run(ENDLESS)
    assert isinstance(outcome.error, RunLost), outcome.shown
    assert re.search(r"Slurm job \d+ is (CANCELLED|COMPLETING)", outcome.shown)
    assert not hpc.ranks_left()
    assert hpc.run(MEET).error is None
    a_job_that_is_started_again_does_not_join_the_old_run(hpc)
    an_interrupt_while_hosts_are_awaited_gives_them_back(hpc)


def a_job_that_is_started_again_does_not_join_the_old_run(hpc: Hpc) -> None:
    """Slurm requeues the job of a host. The run is lost, and no ranks start a second time."""
    hpc.forget_runs()
    with hpc.once(
        hpc.has_begun, lambda: hpc.slurm.run("scontrol", "requeue", max(hpc.slurm.jobs()))
    ):
        outcome = hpc.run(ENDLESS)
    assert isinstance(outcome.error, RunLost), outcome.shown
    assert "Slurm job" in outcome.shown
    assert not hpc.ranks_left()
    assert outcome.run is not None
    started = [event for event in outcome.of_kind("started")]
    assert len(started) == 2, "each host started its ranks once"


def an_interrupt_while_hosts_are_awaited_gives_them_back(hpc: Hpc) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with hpc.once(lambda: "PENDING" in hpc.slurm.jobs().values(), interrupt):
        outcome = hpc.run(MEET, gpus=6)
    assert isinstance(outcome.error, KeyboardInterrupt)
    hpc.slurm.wait_until_empty()


@pytest.mark.nightly
def test_a_restart_that_waits_in_the_queue_shows_the_state_of_the_job(
    hpc: Hpc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm cancels a host's job. Another job takes its node until the run shows that it waits."""
    other = ["sbatch", "--parsable", f"-c{CORES}", "--output=/dev/null", "--wrap=sleep 600"]
    others = []

    def replace_host() -> None:
        lost = max(hpc.slurm.jobs())
        others.append(hpc.slurm.run(*other))
        hpc.slurm.run("scancel", lost)

    cell = f"import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':{indent(ENDLESS, '  ')}"
    waits = re.compile(r"hpc-\d: Slurm job \d+ PENDING \((Resources|Priority)\)")
    with (
        on_event(
            monkeypatch,
            lambda line: line["kind"] == "note" and waits.match(line["text"]),
            lambda run: hpc.slurm.run("scancel", *others),
        ) as shown,
        hpc.once(hpc.has_begun, replace_host),
    ):
        outcome = hpc.notebook.run(cell, "--pool hpc --max-restarts 1", gpus=4)
    assert outcome.error is None, outcome.shown
    assert shown
    assert len({note["text"] for note in shown}) == len(shown)


def test_a_job_that_ends_early_shows_what_it_wrote(hpc: Hpc) -> None:
    hpc.configure(python='"/nowhere/python"')
    outcome = hpc.run(MEET, gpus=2)
    assert isinstance(outcome.error, PoolError)
    assert re.search(r"Slurm job \d+ ended before host hpc-\d was ready: FAILED", outcome.shown)
    assert "/nowhere/python: No such file or directory" in outcome.shown


def test_what_slurm_says_of_a_job_that_it_refuses_is_shown(hpc: Hpc) -> None:
    hpc.configure(queue='"nosuch"')
    outcome = hpc.run(MEET, gpus=2)
    assert isinstance(outcome.error, PoolError)
    assert "invalid partition specified: nosuch" in outcome.shown


@pytest.mark.nightly
def test_a_detached_run_on_nodes_goes_on_when_its_kernel_is_killed(
    hpc: Hpc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(hpc.notebook.project / "taas.toml", project)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    with beside(tmp_path) as other:
        check_killed_kernels(project, other, "hpc", kills=3)
