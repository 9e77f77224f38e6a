"""Tests of runs on hosts that share no files with the notebook, but a home folder."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from taas_magic.display.head import receipt_lines
from taas_magic.errors import RankFailed, RunLost
from taas_magic.journal.folder import RunFolder
from tests.cellfiles import cells_of
from tests.harness import Notebook, without_pytests_filter
from tests.rig.hosts import Hosts, hosts_up
from tests.rig.pools import enter, give_back, settings_in, ssh_pool

pytestmark = [pytest.mark.network]

MEET, FORGES = cells_of("forged_results")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Run two hosts that have the same `~/.cache`, as hosts with one home folder do."""
    cache = tmp_path_factory.mktemp("cache")
    with hosts_up(2, share=[cache]) as hosts:
        for number in (1, 2):
            hosts.exec(number, "sh", "-c", f"ln -s {cache} ~/.cache")
        yield hosts


@pytest.fixture(scope="module")
def settings(
    warm_notebook: Notebook, hosts: Hosts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Yield a configuration folder with an ssh pool of `hosts`.

    Afterwards, end the pool, and check that no process is left on the hosts.
    """
    toml = ssh_pool("far", hosts, more="lease_s = 20")
    folder = settings_in(tmp_path_factory.mktemp("config"), toml)
    yield folder
    give_back(warm_notebook, folder, "far")
    for number in (1, 2):
        assert not hosts.left(number)


@pytest.fixture
def far(
    warm_notebook: Notebook, hosts: Hosts, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Notebook]:
    """Yield a notebook with the pool; afterwards check that the hosts have no run folder left."""
    enter(warm_notebook, settings, monkeypatch)
    yield warm_notebook
    for number in (1, 2):
        left = hosts.exec(number, "sh", "-c", "ls -A ~/.cache/taas/runs /tmp /tmp/taas-*").split()
        assert not [name for name in left if name.startswith(("2", "run-", "torchelastic"))]


def test_the_payload_comes_and_results_displays_and_logs_go_back(
    far: Notebook, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROM_THE_NOTEBOOK", "set in a cell")
    far.define("import torch\nweights = torch.arange(300_000.)\ndef double(x): return x * 2\n")
    source = """
print(os.uname().nodename, os.environ["FROM_THE_NOTEBOOK"], os.environ["HOME"], flush=True)
result = double(weights) + total
float(result.sum())
"""
    source = "world = (rank, os.uname().nodename)\n" + source
    outcome = far.run(MEET + source, "--pool far --out result,world@last")
    assert outcome.error is None
    run = outcome.run
    assert run is not None
    assert run.out["result"].tolist()[:3] == [2.0, 4.0, 6.0]
    assert run.result == pytest.approx(float(run.out["result"].sum()))
    assert run.out["world"][0] == 1
    for rank in range(2):
        [name] = [line.split()[0] for line in run.logs(rank).splitlines() if "in a cell" in line]
        assert name in hosts.names
    assert not list(RunFolder(run.path).path.rglob("*.part*"))


def test_a_failure_shows_the_notebooks_lines_and_an_existing_log(far: Notebook) -> None:
    source = "print('before', flush=True)\nif rank == 1:\n    1 / 0\ndist.barrier()\n"
    outcome = far.run(MEET + source, "--pool far")
    assert isinstance(outcome.error, RankFailed)
    assert (outcome.error.rank, outcome.error.etype) == (1, "ZeroDivisionError")
    assert re.search(r"-> \d+ +1 / 0", outcome.shown)
    first = outcome.of_kind("ended")[0]["first"]
    assert "before" in Path(first["log_path"]).read_text()


def test_a_restart_on_hosts_without_shared_files_succeeds(far: Notebook) -> None:
    source = """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if rank == 1 and attempt == 0:
    os.kill(os.getpid(), 9)
dist.barrier()
attempt
"""
    outcome = far.run(MEET + source, "--pool far --max-restarts 1")
    assert outcome.error is None
    assert outcome.run is not None and outcome.run.result == 1


def test_a_run_removes_the_copies_of_hosts_that_were_lost(far: Notebook) -> None:
    """The fixture checks that the lost run has left no copy of its run folder."""
    source = """
import psutil
above = psutil.Process().parents()
next(it for it in above if "host.agent" in str(it.cmdline())).kill()
dist.barrier()
"""
    assert isinstance(far.run(MEET + source, "--pool far").error, RunLost)
    assert far.run("pass", "--pool far").error is None


LOADER = """
import taas, torch
loader = torch.utils.data.DataLoader(torch.arange(16), batch_size=2)
taas.register(loader)
"""


def test_a_session_on_unshared_hosts_keeps_variables_and_a_loader(far: Notebook) -> None:
    far.define(LOADER)
    source = "batches = iter(loader)\nhere = os.uname().nodename\ngot = [next(batches).tolist()]\n"
    flags = "--pool far --session away --out got@all,here@all"
    first = far.run(MEET + source, flags)
    assert first.error is None and first.run is not None
    source = "dist.all_reduce(total)\ngot += [batch.tolist() for batch in batches]\n"
    second = far.run(source + "torch.save(total, 'total.pt') if rank == 0 else None", flags)
    assert second.error is None and second.run is not None
    assert second.run.out["here"] == first.run.out["here"]
    assert second.run.out["got"] == [
        [[0, 1], [4, 5], [8, 9], [12, 13]],
        [[2, 3], [6, 7], [10, 11], [14, 15]],
    ]
    assert (far.project / "total.pt").exists()
    far.shell.run_line_magic("taas", "end away")


def test_a_session_keeps_its_host_when_its_ranks_are_restarted(far: Notebook) -> None:
    assert far.run("pass", "--pool far").error is None  # so that the pool has both hosts
    where = "import os\nos.uname().nodename"
    for name in ("one", "two"):
        far.run(where, f"--pool far --session {name}", gpus=1)
    before = far.run(where, "--session two", gpus=1).run
    far.shell.run_line_magic("taas", "end one")
    far.shell.run_line_magic("taas", "restart two")
    after = far.run(where, "--session two", gpus=1).run
    far.shell.run_line_magic("taas", "end two")
    assert before is not None and after is not None
    assert after.result == before.result


CUBE = """
import numpy as np, torch, taas, xarray as xr, xbatcher
from xbatcher.loaders.torch import MapDataset

land = np.arange(12 * 4 * 4, dtype="float32").reshape(12, 4, 4)
dims = ("time", "lat", "lon")
cube = xr.Dataset({"land": (dims, land), "air": (dims, 2 * land)}).chunk({"time": 1})
cube.to_zarr("cube.zarr", mode="w")
ds = xr.open_zarr("cube.zarr")

def patches(name):
    return xbatcher.BatchGenerator(ds[name], input_dims={"time": 3, "lat": 4, "lon": 4})

pairs = MapDataset(patches("land"), patches("air"))
loader = taas.register(torch.utils.data.DataLoader(pairs, batch_size=1))
"""

USE = """
import os
seen = float(ds.land.isel(time=4).sum())
twice = [bool((y == 2 * x).all()) for x, y in loader]
if os.environ["RANK"] == "0":
    ds.sel(time=slice(0, 9)).to_zarr("part.zarr", mode="w")
os.uname().nodename, seen, twice
"""


def test_a_lazy_cube_of_the_project_is_read_where_nothing_is_shared(far: Notebook) -> None:
    pytest.importorskip("xbatcher")
    with without_pytests_filter():
        far.define(CUBE)
    outcome = far.run(USE, "--pool far --cpus 1")
    assert outcome.error is None and outcome.run is not None
    _, seen, twice = outcome.run.result
    assert seen == sum(range(64, 80)) and twice == [True, True]
    [line] = [text for label, text in receipt_lines(outcome.run.receipt) if label == "rank 0 wrote"]
    assert line.startswith("part.zarr (") and " files, " in line
    with without_pytests_filter():
        far.define("part = float(xr.open_zarr('part.zarr').air.isel(time=4).sum())")
    assert far.shell.user_ns["part"] == 2 * seen
    failed = far.run(f"open({str(far.project / 'cube.zarr')!r})", "--pool far")
    assert isinstance(failed.error, RankFailed)
    assert "use a path relative to it" in str(failed.error)


@pytest.mark.fault(73)
def test_a_host_that_forges_results_runs_nothing_in_the_kernel(
    far: Notebook, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    far.define(f"MADE = {str(made)!r}")
    outcome = far.run(MEET + FORGES, "--pool far --out x", gpus=2)
    assert isinstance(outcome.error, RunLost) and outcome.run is not None, outcome.shown
    assert "lost: host 1 of the run sent 'results/0-" in outcome.shown
    assert outcome.run.result in (None, 7) and outcome.run.out in ({}, {"x": 0})
    assert not made.exists()
