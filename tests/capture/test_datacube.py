"""Cubes of the project: where they are on a host that has a copy, and how a receipt names them."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from taas_magic.capture import pickling, reducers
from taas_magic.display.head import receipt_lines
from taas_magic.errors import RankFailed
from taas_magic.store.receipt import Receipt
from tests.harness import Notebook, without_pytests_filter
from tests.rig.hosts import hosts_up
from tests.rig.pools import enter, give_back, settings_in, ssh_pool

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


@pytest.fixture
def in_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in reducers.copy_environ("/home/me/project", "/cache/copy").items():
        monkeypatch.setenv(name, value)


def test_a_path_of_the_project_is_found_in_the_copy_and_comes_home_as_it_was(
    in_a_copy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"/home/me/project/a/b": "/cache/copy/a/b", "/home/me/project": "/cache/copy"}
    there |= {path: path for path in ("/home/me/projects", "relative/a", "/srv/data")}
    for path, found in there.items():
        with monkeypatch.context() as notebook:
            for name in reducers.copy_environ("", ""):
                notebook.delenv(name)
            sent = pickling.dump(Path(path), namespace={})
        assert pickling.loads(sent.data) == Path(found)
        back = pickling.dump(Path(found))
        for name in reducers.copy_environ("", ""):
            monkeypatch.delenv(name)
        assert pickling.loads(back.data) == Path(path)
        for name, value in reducers.copy_environ("/home/me/project", "/cache/copy").items():
            monkeypatch.setenv(name, value)


def test_so_is_a_zarr_store_whose_path_is_a_text(in_a_copy: None) -> None:
    store = SimpleNamespace(path="/home/me/project/cube.zarr", normalize_keys=False)
    make, arguments = reducers.reduce_directory_store(store)
    assert make(*pickle.loads(pickle.dumps(arguments))) == SimpleNamespace(
        path="/cache/copy/cube.zarr", normalize_keys=False
    )


def test_a_cube_of_100_files_is_one_line_of_the_receipt() -> None:
    cube = {f"out/cube.zarr/land/{number}": 1000 for number in range(100)}
    kept = {path: (1, 2) for path in cube}
    receipt = Receipt(written={"m.pt": 10, **cube}, kept_out=kept)
    assert receipt_lines(receipt) == [
        ("rank 0 wrote", "m.pt (10 bytes), out/cube.zarr (100 files, 100.0 kB)"),
        ("not saved (only rank 0 writes)", "out/cube.zarr (100 files) from ranks 1-2"),
    ]


@pytest.fixture(scope="module")
def settings(warm_notebook: Notebook, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    pytest.importorskip("xbatcher")
    with hosts_up(2) as hosts:
        toml = ssh_pool("far", hosts, more="lease_s = 20")
        folder = settings_in(tmp_path_factory.mktemp("config"), toml)
        yield folder
        give_back(warm_notebook, folder, "far")


@pytest.mark.network
@pytest.mark.timeout(400)
def test_a_lazy_cube_of_the_project_is_read_where_nothing_is_shared(
    warm_notebook: Notebook, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(warm_notebook, settings, monkeypatch)
    with without_pytests_filter():
        warm_notebook.define(CUBE)
    outcome = warm_notebook.run(USE, "--pool far --cpus 1")
    assert outcome.error is None and outcome.run is not None
    _, seen, twice = outcome.run.result
    assert seen == sum(range(64, 80)) and twice == [True, True]
    [line] = [text for label, text in receipt_lines(outcome.run.receipt) if label == "rank 0 wrote"]
    assert line.startswith("part.zarr (") and " files, " in line
    with without_pytests_filter():
        warm_notebook.define("part = float(xr.open_zarr('part.zarr').air.isel(time=4).sum())")
    assert warm_notebook.shell.user_ns["part"] == 2 * seen
    failed = warm_notebook.run(f"open({str(warm_notebook.project / 'cube.zarr')!r})", "--pool far")
    assert isinstance(failed.error, RankFailed)
    assert "in a copy: use a path relative to it" in str(failed.error)
