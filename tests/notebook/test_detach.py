"""Detached runs: they outlive their kernel, and other kernels attach or stop them."""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from taas_magic.notebook import runs
from taas_magic.notebook.runs import Run
from tests.eventually import HUNG_S, eventually
from tests.frontend import Frontend, kernel
from tests.nightly import nightly
from tests.notebook.test_attach import WAITS, head, other
from tests.notebook.test_kernel_life import ANSI

__all__ = ["other"]  # a fixture of this module, too

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

COUNTS = """%%taas --gpus 2 --out total --name counts --detach
import os, time
rank, total = int(os.environ["RANK"]), 0
for step in range(150):
    total += step
    print("step", step, "of rank", rank)
    time.sleep(0.02)
"""
TOTAL = sum(range(150))


@pytest.fixture
def frontend(frontend_of_module: Frontend, monkeypatch: pytest.MonkeyPatch) -> Frontend:
    """Return the module's kernel, and let this process use the kernel's state folder."""
    asked = frontend_of_module.run("import os; print(os.environ['TAAS_STATE_DIR'])")
    monkeypatch.setenv("TAAS_STATE_DIR", frontend_of_module.text(asked).strip())
    return frontend_of_module


def kill(frontend: Frontend) -> None:
    """Kill a kernel, and wait until its manager notices."""
    frontend.process.kill()
    eventually(lambda: not frontend.manager.is_alive())


def steps_of(text: str, rank: int) -> list[int]:
    """Return the step numbers that `rank` printed in the text of a view or log, in order."""
    found = re.findall(rf"step (\d+) of rank {rank}\b", text)
    return [int(step) for step in found]


def check_attached(other: Frontend, run_id: str) -> None:
    """Attach a run in another kernel. Check that all steps are shown in order, and the result."""
    seen = other.run(f"%taas attach {run_id}")
    assert head(other, seen).startswith("SUCCEEDED counts")
    for rank in (0, 1):
        assert steps_of(other.text(seen), rank) == list(range(150))
    other.run(f"import taas\nassert taas.last_run.wait() == {{'total': {TOTAL}}}")


def check_killed_kernels(
    project: Path, other: Frontend, pool: str, kills: int, start_s: float = HUNG_S
) -> None:
    """Kill the kernel of a detached run at a random moment, and check the run in another kernel.

    Do this `kills` times, each time with a new kernel and a new run.

    Then check that the pool ends, because it has no kernel left. `benchmarks/detach.py` does this
    many times.

    Args:
        project: Folder of the notebook, whose kernel is killed.
        other: The other kernel. Its notebook is in another folder.
        pool: Pool of the run.
        start_s: Maximum seconds until the ranks have started.
    """
    for _ in range(kills):
        with kernel(project, TAAS_WARM="0") as killed:
            cell = killed.send(COUNTS.replace("--name", f"--pool {pool} --name"))
            reply = killed.finish(cell, start_s)
            assert reply["status"] == "ok", reply
            assert head(killed, cell).startswith("DETACHED counts")
            run = next(runs.newest_first())
            assert run.state == "RUNNING"
            time.sleep(random.uniform(0.0, 1.0))
            kill(killed)
        check_attached(other, run.id)
    eventually(lambda: not (Path(run.context.pool_folder) / "pool.json").exists())


@pytest.mark.parametrize("kills", [1, nightly(3)])
def test_a_detached_run_goes_on_when_its_kernel_is_killed(
    frontend: Frontend, tmp_path: Path, kills: int
) -> None:
    check_killed_kernels(tmp_path / "killed", frontend, "local", kills)


DEFINITIONS = """
import dataclasses

@dataclasses.dataclass
class Config:
    steps: int = 4
    def double(self): return 2 * self.steps

class Net:
    def __init__(self): self.config, self.table = Config(), {helper: 1}

def helper(x): return x + offset
offset = 10
"""
RETURNS = """%%taas --gpus 1 --out net,helper,configs --name returns --detach
net = Net()
net.config.steps = 5
configs = [Config(1), Config(2)]
"""
LOADED = """
import taas
out = taas.runs()[0].out
net, helper, configs = out["net"], out["helper"], out["configs"]
print(net.config.double(), [c.double() for c in configs], net.table[helper], type(configs[0]))
offset = 20
print(type(net.config) is type(configs[0]), helper(1))
"""


def test_values_of_the_notebooks_classes_are_loaded_in_another_kernel(
    frontend: Frontend, other: Frontend
) -> None:
    frontend.run(DEFINITIONS)
    frontend.run(RETURNS)
    frontend.run("import taas; taas.last_run.wait()")
    text = other.text(other.run(LOADED))
    assert text == "10 [2, 4] 1 <class '__main__.Config'>\nTrue 21\n"


def test_attach_shows_the_traceback_of_a_detached_run(frontend: Frontend) -> None:
    frontend.run("%%taas --gpus 2 --name fails --detach\nnumber = 1\nnumber / 0")
    request = frontend.run("%taas attach fails")
    assert head(frontend, request).startswith("FAILED fails")
    shown = ANSI.sub("", frontend.text(request))
    assert "----> 3 number / 0" in shown and "full log: " in shown


def test_a_cell_is_detached_from_a_subshell_and_stopped_from_another_kernel(
    frontend: Frontend, other: Frontend, tmp_path: Path
) -> None:
    go, own = tmp_path / "go", tmp_path / "own"
    own.mkdir()
    cell = frontend.send(WAITS.format(go=str(go)))
    frontend.wait(lambda: len(re.findall("before", frontend.text(cell))) == 2)
    frontend.finish(frontend.send("%taas detach", subshell_id=frontend.new_subshell()))
    assert frontend.finish(cell)["status"] == "ok"
    assert head(frontend, cell).startswith("DETACHED slow")
    frontend.run(
        "import taas; run = taas.last_run\nassert run.state == 'RUNNING' and run.out == {}"
    )
    request = frontend.send("total = 0; del total; print(total)")
    assert frontend.finish(request)["ename"] == "NameError"
    assert "`total` comes from a detached run" in frontend.text(request)
    # meanwhile another cell can run only with another project store
    assert "StoreError" in frontend.fail("%%taas --gpus 1\nprint('on')")["ename"]
    meanwhile = frontend.run(f"%%taas --gpus 1 --store {own}\nprint('on')")
    assert "[0] on" in frontend.text(meanwhile)
    go.touch()
    frontend.run("assert run.wait() == {'total': 42}, run.out")
    corrected = frontend.run("assert run.state == 'SUCCEEDED'")
    heads = frontend.contents(corrected, "update_display_data")
    assert [it["data"]["text/plain"][:14] for it in heads] in ([], ["SUCCEEDED slow"])

    go.unlink()
    cell = frontend.send(WAITS.format(go=str(go)).replace("--name", "--detach --name"))
    assert frontend.finish(cell)["status"] == "ok"
    seen = other.send("%taas attach")
    other.wait(lambda: "before 1" in other.text(seen))
    stopped = frontend.run("%taas stop")
    assert frontend.text(stopped).startswith("stopping run ")
    assert other.finish(seen)["status"] == "ok"
    assert head(other, seen).startswith("INTERRUPTED slow")
    assert "Stopped by you" in frontend.fail("taas.last_run.wait()")["evalue"]


LOADER = """import taas, time
from torch.utils.data import DataLoader, Dataset
class Numbers(Dataset):
    def __len__(self): return 60
    def __getitem__(self, i):
        time.sleep(0.05)
        return i
numbers = taas.register(DataLoader(Numbers(), batch_size=1, num_workers=1), name="numbers")
"""
FED = """%%taas --gpus 1 --cpus 1 {pool} --out seen --max-restarts 1 --detach
import os
os.remove(os.environ["TAAS_PAYLOAD"])
os.mkdir(os.environ["TAAS_PAYLOAD"])
seen = [int(batch) for batch in numbers]
"""
TWO_POOLS = """
[pools.fetch]
engine = "local"
cores = 1

[runs]
notify = "env | grep ^TAAS_RUN_ > told"
"""


@pytest.mark.nightly
@pytest.mark.parametrize("pool", ["", "--data-pool fetch"])
def test_fetchers_of_a_detached_run_continue_in_any_pool(
    frontend: Frontend, tmp_path: Path, pool: str
) -> None:
    """The run is cleaned up at its end, although the pool cannot remove its payload."""
    project = tmp_path / "fed"
    project.mkdir()
    (project / "taas.toml").write_text(TWO_POOLS)
    with kernel(project, TAAS_WARM="0") as killed:
        killed.run(LOADER)
        killed.run(FED.format(pool=pool))
        run = next(runs.newest_first())
        assert run.state == "RUNNING"
        eventually(lambda: run.head.run_counts.fetchers)
        [fetcher] = run.head.run_counts.fetchers.values()
        os.kill(fetcher.pid, signal.SIGKILL)  # its pool starts another one
        kill(killed)
    assert run.wait(HUNG_S) == {"seen": list(range(60))}
    told = project / "told"
    eventually(told.exists)
    eventually(lambda: "DURATION" in told.read_text())
    assert f"TAAS_RUN_ID={run.id}\n" in told.read_text()
    assert "TAAS_RUN_STATE=SUCCEEDED\n" in told.read_text()
    places = [Path(it) / "pool.json" for it in (run.context.pool_folder, run.context.data_folder)]
    eventually(lambda: not any(place.exists() for place in places))


@pytest.mark.nightly
def test_without_detach_a_run_ends_with_its_kernel(frontend: Frontend, tmp_path: Path) -> None:
    with kernel(tmp_path / "killed", TAAS_WARM="0") as killed:
        cell = killed.send(WAITS.format(go=str(tmp_path / "never")))
        killed.wait(lambda: len(re.findall("before", killed.text(cell))) == 2)
        run = Run(next(runs.newest_first()).path)
        kill(killed)
        eventually(lambda: not run.is_active)
    assert run.state == "INTERRUPTED"
