"""Tests of paths of data cubes in the project: on hosts with a mirror, and in receipts."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

from taas_magic.capture import pickling, reducers
from taas_magic.display.head import receipt_lines
from taas_magic.store.receipt import Receipt


@pytest.fixture
def in_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in reducers.copy_environ("/home/me/project", "/cache/copy").items():
        monkeypatch.setenv(name, value)


def test_a_path_of_the_project_is_translated_to_the_mirror_and_back(
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


def test_the_path_of_a_zarr_store_is_translated_too(in_a_copy: None) -> None:
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
