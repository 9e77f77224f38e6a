"""Cells on a Slurm of our own, through dask-jobqueue: FAULT 57, and what users see meanwhile.

Two hosts of the rig are its nodes; they share the folders of notebook and runs with this machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from taas_magic import launch, taas_toml
from taas_magic.pool import Pool
from tests.harness import Notebook, Outcome
from tests.rig.slurm import CORES, PATH, Slurm, slurm_up

pytestmark = [pytest.mark.network, pytest.mark.timeout(300)]

TOML = """
[pools.hpc]
engine = "dask_jobqueue.SLURMCluster"
gpus = 2
max_hosts = 3
start_timeout_s = {start_timeout_s}

[pools.hpc.options]
queue = "debug"
cores = {cores}
memory = "1GB"
walltime = "00:10:00"
interface = "eth0"
scheduler_options = {{ host = "{head}" }}
"""

MEET = """
import socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
print(socket.gethostname(), int(ones))
"""


@dataclass
class Hpc:
    """A notebook with the pool `hpc`."""

    notebook: Notebook
    slurm: Slurm

    def configure(self, start_timeout_s: int = 100) -> None:
        assert self.slurm.hosts is not None
        values = {"start_timeout_s": start_timeout_s, "cores": CORES}
        text = TOML.format(head=self.slurm.hosts.caller, **values)
        (self.notebook.project / "taas.toml").write_text(text)

    @property
    def pool(self) -> Pool:
        return launch.pool_named("hpc", taas_toml.load(self.notebook.project))

    def run(self, source: str, gpus: int = 4) -> Outcome:
        return self.notebook.run(source, "--pool hpc", gpus=gpus)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_up(2, share=(tmp_path_factory.getbasetemp(),)) as up:
        yield up


@pytest.fixture
def hpc(notebook: Notebook, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hpc]:
    """After each test no job is left."""
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    monkeypatch.setenv("PATH", PATH)
    made = Hpc(notebook, slurm)
    made.configure()
    yield made
    made.pool.down()
    (notebook.project / "taas.toml").unlink()
    slurm.wait_until_empty()


def test_a_cell_runs_on_two_hosts(hpc: Hpc, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = hpc.run(MEET)
    assert outcome.error is None, outcome.shown
    assert hpc.slurm.hosts is not None
    said = [outcome.lines[rank][-1].split() for rank in range(4)]
    assert sorted(words[0] for words in said) == [n for n in hpc.slurm.hosts.names for _ in "ab"]
    assert {words[1] for words in said} == {"4"}
    assert "Slurm job" in capsys.readouterr().out
