"""Cells on PBS, as far as stand-ins for its commands can show it: the real job script runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from taas_magic import pools, taas_toml
from taas_magic.errors import PoolError
from tests.harness import Notebook
from tests.rig.hosts import SCRIPT, Hosts, hosts_up
from tests.rig.pbs import Pbs, pbs_up

pytestmark = [pytest.mark.network, pytest.mark.timeout(300)]

TOML = """
[pools.hpc]
engine = "dask_jobqueue.PBSCluster"
gpus = 2
max_hosts = 3
start_timeout_s = {start_timeout_s}

[pools.hpc.options]
queue = "gpu"
resource_spec = "nodes=1:c18a:ppn=12"
walltime = "01:00:00"
cores = 12
memory = "32GB"
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


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts_up(2, share=[tmp_path_factory.getbasetemp()]) as up:
        yield up


@pytest.fixture
def pbs(
    notebook: Notebook,
    hosts: Hosts,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pbs]:
    """A queue with a job on each of two hosts; after the test its pool is down."""
    enter = [[str(SCRIPT), "exec", str(number)] for number in (1, 2)]
    with pbs_up(2, enter, parent=tmp_path_factory.getbasetemp()) as up:
        for name, value in {**hosts.environ, **up.environ}.items():
            monkeypatch.setenv(name, value)
        settings = notebook.project / "taas.toml"
        settings.write_text(TOML.format(head=hosts.caller, start_timeout_s=100))
        yield up
        pools.down("hpc", taas_toml.load(notebook.project))
        settings.unlink()


def test_a_cell_runs_on_two_hosts(notebook: Notebook, pbs: Pbs, hosts: Hosts) -> None:
    outcome = notebook.run(MEET, "--pool hpc", gpus=4)
    assert outcome.error is None, outcome.shown
    said = [outcome.lines[rank][-1].split() for rank in range(4)]
    assert sorted(words[0] for words in said) == [name for name in hosts.names for _ in "ab"]
    assert {words[1] for words in said} == {"4"}
    scripts = [file.read_text() for file in pbs.folder.glob("*.SC")]
    assert all("#PBS -l nodes=1:c18a:ppn=12" in text for text in scripts)
    assert all("PRIVATE KEY" not in text for text in scripts)


def test_a_full_queue_is_named_and_nothing_is_kept(
    notebook: Notebook, pbs: Pbs, hosts: Hosts
) -> None:
    """FAULT 57."""
    settings = TOML.format(head=hosts.caller, start_timeout_s=15)
    Path(notebook.project / "taas.toml").write_text(settings)
    outcome = notebook.run(MEET, "--pool hpc", gpus=6)
    assert isinstance(outcome.error, PoolError)
    assert "PBS job 3 QUEUED (Not Running: Insufficient amount of resource: ncpus)" in outcome.shown
    pbs.wait_until_empty()
