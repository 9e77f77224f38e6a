"""Cells on PBS. Its commands are replaced by stand-ins, which run the real job script."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from taas_magic.config import load_config
from taas_magic.errors import PoolError
from taas_magic.notebook import pools
from tests.frontend import ROOT, Frontend
from tests.harness import ANSI, Notebook
from tests.rig.hosts import SCRIPT, Hosts, hosts_up
from tests.rig.pbs import Pbs, pbs_up
from tests.rig.pools import PRELOAD_FOR_TRAINING

pytestmark = [pytest.mark.network]

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
def queue(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pbs]:
    """Yield a queue that runs one job on each of two hosts."""
    enter = [[str(SCRIPT), "exec", str(number)] for number in (1, 2)]
    with pbs_up(2, enter, parent=tmp_path_factory.getbasetemp()) as up:
        for name, value in {**hosts.environ, **up.environ}.items():
            monkeypatch.setenv(name, value)
        yield up


@pytest.fixture
def pbs(notebook: Notebook, hosts: Hosts, queue: Pbs) -> Iterator[Pbs]:
    """Yield the queue, named in the notebook's taas.toml. End the pool after the test."""
    settings = notebook.project / "taas.toml"
    settings.write_text(TOML.format(head=hosts.caller, start_timeout_s=100))
    yield queue
    pools.down("hpc", load_config(notebook.project))
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


@pytest.mark.nightly
def test_a_full_queue_is_named_and_nothing_is_kept(
    notebook: Notebook, pbs: Pbs, hosts: Hosts
) -> None:
    """Fault 57 of docs/faults.md."""
    settings = TOML.format(head=hosts.caller, start_timeout_s=20)
    Path(notebook.project / "taas.toml").write_text(settings)
    outcome = notebook.run(MEET, "--pool hpc", gpus=6)
    assert isinstance(outcome.error, PoolError)
    assert "PBS job 3 QUEUED (Not Running: Insufficient amount of resource: ncpus)" in outcome.shown
    pbs.wait_until_empty()


WAITS_TO_BE_ENDED = """
    if epoch == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        dist.barrier()
        print("a job may go", flush=True)
        import time
        time.sleep(1000)
"""


@pytest.mark.nightly
@pytest.mark.usefixtures("without_warm_up")
def test_the_program_of_docs_pbs_continues_after_its_job_was_deleted(
    queue: Pbs, hosts: Hosts, kernel_of_its_own: Frontend, tmp_path: Path
) -> None:
    """Run docs/pbs.md as it is, except for a pause in which its second job is deleted."""
    frontend = kernel_of_its_own
    settings = TOML.format(head=hosts.caller, start_timeout_s=100)
    settings = settings.replace("gpus = 2", f"gpus = 2\n{PRELOAD_FOR_TRAINING}")
    (tmp_path / "project" / "taas.toml").write_text(settings)
    page = (ROOT / "docs" / "pbs.md").read_text()
    define, train, compare = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    frontend.run(define)
    before, printed, after = train.partition('"epoch {epoch} loss {loss.item():.3f}")\n')
    request = frontend.send(
        before.replace("--gpus 4", "--gpus 4 --env OMP_NUM_THREADS=1")
        + printed
        + WAITS_TO_BE_ENDED.lstrip("\n")
        + after
    )
    frontend.wait(lambda: "a job may go" in frontend.text(request), 200)
    queue.delete("2.rig")
    reply = frontend.finish(request, 250)
    text = ANSI.sub("", frontend.text(request))
    assert reply["status"] == "ok", text + ANSI.sub("", "\n".join(reply["traceback"]))
    assert "goes on with epoch 3" in text and "epoch 5 loss" in text
    assert set(queue.jobs()) == {"1.rig", "2.rig", "3.rig"}
    request = frontend.run(compare)
    [table] = frontend.contents(request, "execute_result")
    rows = [line.split() for line in table["data"]["text/plain"].splitlines()[2:]]
    counts = {row[0]: [int(number) for number in row[1:]] for row in rows}
    assert list(counts) == ["agricultural", "beach", "forest", "harbor"]
    assert sum(map(sum, counts.values())) == 200
    assert sum(row[i] for i, row in enumerate(counts.values())) > 150
    frontend.run("%taas down hpc")
