"""Tests of what a host may write to the project store.

A host may write files of runs, but neither replace the user's files nor add files that tools trust.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from taas_magic.store.ignore import PathFileCheck
from taas_magic.store.mirror import StoreUpdater, update_mirror
from taas_magic.store.ownership import (
    WHY_BESIDE,
    WHY_NOT_KEPT,
    WHY_NOT_NEW,
    WHY_NOT_REMOVED,
    RunFileRecord,
    may_be_run_by_tools,
)
from taas_magic.store.requests import WriteFiles
from taas_magic.store.rule import StoreRule
from taas_magic.store.server import StoreServer
from tests.store.test_travel_outbound import checkpoint, empty, folders, in_two
from tests.store.travel_rig import Travel, tree_of, wired


@pytest.fixture
def travel(tmp_path: Path) -> Iterator[Travel]:
    """Yield a store in which hosts may not replace files of the user."""
    travel = Travel(tmp_path, overwrite=())
    yield travel
    travel.store_server.close()


@pytest.fixture
def store_server(travel: Travel) -> StoreServer:
    """Return the store server. Tests send requests to it directly, as a hostile host can."""
    return travel.store_server


def put(
    store_server: StoreServer, path: str, content: bytes = b"from the host", host_rank: int = 0
) -> str:
    """Send a file to the store in two pieces, as a host; return the reason for a refusal, or ""."""
    ask = wired(store_server, host_rank)
    said = [ask(WriteFiles([piece])).get(path, "") for piece in in_two(path, content)]
    return next(filter(None, said), "")


def next_run(travel: Travel, overwrite: tuple[str, ...] = ()) -> StoreServer:
    travel.store_server.close()
    rule = StoreRule(str(travel.store), shared=travel.rule.shared, overwrite=overwrite)
    travel.store_server = StoreServer(rule, travel.folder / "state")
    return travel.store_server


def test_a_file_of_the_user_is_kept_and_rank_0s_file_gets_another_name(travel: Travel) -> None:
    for name in ("train.py", "results.json", "analysis.ipynb", "run.sh"):
        (travel.store / name).write_text("mine")
    (travel.store / "run.sh").chmod(0o755)
    with travel.running() as mirror:
        for name in ("train.py", "results.json", "analysis.ipynb", "run.sh", "new.json"):
            (mirror / name).write_text("of rank 0")
    found = tree_of(travel.store)
    kept = [name for name, held in found.items() if held == b"mine"]
    assert kept == ["analysis.ipynb", "results.json", "run.sh", "train.py"]
    assert {name for name, held in found.items() if held == b"of rank 0"} == {
        "new.json", *(f"{name}.from-host" for name in kept),
    }  # fmt: skip
    assert not os.access(travel.store / "run.sh.from-host", os.X_OK)
    assert travel.refused == dict.fromkeys(kept, WHY_BESIDE)
    [note] = travel.notes  # the receipt has the other files
    assert "the existing file is not from a run" in note and "[store] overwrite" in note


def test_other_hosts_of_the_run_have_rank_0s_version(
    travel: Travel, store_server: StoreServer
) -> None:
    (travel.store / "m.pt").write_text("mine")
    mirror, _ = travel.mirrored(1)
    news, there = (
        StoreUpdater(mirror, wired(store_server, 1), travel.notes.append),
        Path(mirror.path, "m.pt"),
    )
    assert there.read_text() == "mine"
    assert put(store_server, "m.pt") == WHY_BESIDE
    news.catch_up()
    assert there.read_bytes() == b"from the host"
    update_mirror(mirror, wired(store_server, 1), fresh=True)  # the next attempt
    assert there.read_bytes() == b"from the host"
    assert not Path(mirror.path, "m.pt.from-host").exists()
    mirror.close()
    next_run(travel)
    mirror, _ = travel.mirrored(1)
    assert there.read_text() == "mine"
    mirror.close()


def test_files_of_runs_are_replaced_and_removed_until_the_user_changes_them(
    travel: Travel,
) -> None:
    names = ("m.pt", "edited", "copied", "gone")
    assert [put(travel.store_server, name) for name in names] == [""] * 4
    store_server = next_run(travel)
    (travel.store / "edited").write_text("my own words!")
    content = (travel.store / "copied").read_bytes()
    (travel.store / "copied").unlink()
    (travel.store / "copied").write_bytes(content)  # as git or a copy of the project does
    assert [put(store_server, name, b"again") for name in names[:3]] == ["", WHY_BESIDE, ""]
    (travel.store / "own").write_text("mine")
    removed = wired(store_server)(WriteFiles(removed=["edited", "gone", "m.pt", "own"]))
    assert removed == {"own": WHY_NOT_REMOVED}  # edited.from-host is removed
    assert set(os.listdir(travel.store)) == {"edited", "copied", "own"}
    assert (travel.store / "edited").read_text() == "my own words!"
    assert put(next_run(travel, overwrite=("edit*",)), "edited") == ""


def test_a_file_of_a_run_is_recorded_even_after_a_kill(travel: Travel) -> None:
    """The store server records that a run has written a file before it puts the file in place.

    So the record is right even if the server's process is killed during the run.
    """
    put(travel.store_server, "m.pt")
    record = travel.folder / "state" / "made-by-runs"
    record.write_bytes(record.read_bytes() + b'["torn')
    killed, travel.store_server = (
        travel.store_server,
        StoreServer(travel.rule, travel.folder / "state"),
    )
    assert put(travel.store_server, "m.pt", b"new") == ""
    (travel.store / "m.pt.from-host").write_text("mine")
    (travel.store / "m.pt").write_text("mine")
    assert put(travel.store_server, "m.pt", b"newest") == WHY_NOT_KEPT
    assert (travel.store / "m.pt.from-host").read_text() == "mine"
    killed.close()


def test_repeated_records_of_a_file_are_merged(tmp_path: Path) -> None:
    made = RunFileRecord(tmp_path)
    (tmp_path / "file").touch()
    for _ in range(1500):
        made.record_file("file", (tmp_path / "file").stat())
    made.record_folder("folder")
    RunFileRecord(tmp_path)
    assert len((tmp_path / "made-by-runs").read_bytes().splitlines()) == 2
    assert RunFileRecord(tmp_path).has_folder("folder")


IN_THE_USERS_FOLDERS = (
    "random.py", "torch.pyd", "mod.cpython-311-x86_64-linux-gnu.so", "Makefile", "GNUmakefile",
    "conftest.py", "setup.py", "setup.cfg", "pyproject.toml", "tox.ini", ".pre-commit-config.yaml",
    ".gdbinit", ".lldbinit", ".cargo/env", ".husky/pre-commit", ".python-version",
    "numpy/__init__.py", "numpy/__init__.pyc", "pkg/__main__.py", "src/random.py", "src/.hidden",
    "requirements.txt", "Dockerfile", "run.sh", "activate", "activate.d/x", "test_it.py",
)  # fmt: skip


@pytest.mark.fault(75)
def test_start_up_files_modules_and_hidden_files_do_not_come_into_the_users_folders(
    travel: Travel, store_server: StoreServer
) -> None:
    (travel.store / "src").mkdir()
    before = tree_of(travel.store)
    for path in IN_THE_USERS_FOLDERS:
        assert put(store_server, path) == WHY_NOT_NEW, path
        assert wired(store_server)(WriteFiles([empty(path)])) == {path: WHY_NOT_NEW}
    assert tree_of(travel.store) == before
    store_server = next_run(travel, overwrite=IN_THE_USERS_FOLDERS)
    assert [put(store_server, path) for path in IN_THE_USERS_FOLDERS] == [""] * len(
        IN_THE_USERS_FOLDERS
    )


def test_a_run_may_put_code_and_hidden_files_into_its_own_folders(travel: Travel) -> None:
    """Examples are Hydra, wandb, zarr, torch's checkpoints, and programs that copy their source."""
    (travel.store / "data.zarr").mkdir()
    (travel.store / "checkpoints").mkdir()
    good = (
        "outputs/1/.hydra/config.yaml", "wandb/run-1/files/requirements.txt", "exp/src/train.py",
        "exp/src/__init__.py", "exp/.done", ".metadata", "data.zarr/.zattrs", "data.zarr/x/.zarray",
        "checkpoints/.metadata", ".hydra/config.yaml", "results.json", "figure.png", "notes.ipynb",
    )  # fmt: skip
    assert [put(travel.store_server, path) for path in good] == [""] * len(good)
    store_server = next_run(travel)
    assert (
        put(store_server, "exp/src/more.py") == ""
        and put(store_server, "exp/src/conftest.py") == WHY_NOT_NEW
    )
    assert put(store_server, "exp/__init__.py") == WHY_NOT_NEW  # else `exp` would be a package
    assert wired(store_server)(WriteFiles(folders([".idea2", "venv/bin/activate.d"]))).keys() == {
        ".idea2", "venv/bin/activate.d",
    }  # fmt: skip


def test_hidden_files_may_be_written_to_shared_folders(tmp_path: Path) -> None:
    travel = Travel(tmp_path, shared=("ckpt",), overwrite=())
    (travel.store / "ckpt").mkdir()
    assert put(travel.store_server, "ckpt/.anything", host_rank=1) == ""
    travel.store_server.close()


def test_no_host_can_create_a_program(travel: Travel, store_server: StoreServer) -> None:
    for number, begins in enumerate((b"#!/bin/sh\n", b"\x7fELF\2\1\1\0", b"data")):
        name = f"bin/ls{number}"
        for piece in in_two(name, begins * 3):
            entry = structs.replace(piece.entry, executable=True)
            said = wired(store_server)(WriteFiles([structs.replace(piece, entry=entry)]))
        assert said == ({} if begins == b"data" else {name: WHY_NOT_NEW})
    assert not os.access(travel.store / "bin" / "ls2", os.X_OK)


PATH_FILES = {
    checkpoint(): True,
    b"PK\x03\x04\nimport os\n": False,
    b"\x80\x02\rimport\tos": False,
    b"\x80\x02" + bytes(100_000) + b"\nimport os": False,
    b"PK\x03\x04 important import of data": True,
    b"/somewhere\n": False,
}


@pytest.mark.parametrize("content", PATH_FILES)
@pytest.mark.parametrize("size", [1, 5, 1 << 20])
def test_a_path_file_is_checked_to_its_end(content: bytes, size: int) -> None:
    check = PathFileCheck()
    for at in range(0, len(content), size):
        check.add(content[at : at + size])
    is_long = len(content) > 20_000 and size == 1
    assert is_long or check.is_checkpoint == (PATH_FILES[content] and size > 1)


def test_files_that_tools_run_are_recognized_by_name() -> None:
    for name in (
        "loss.csv",
        "m.pt",
        "model.pth",
        "a.txt",
        "x.safetensors",
        "build",
        "test_results",
    ):
        assert not may_be_run_by_tools(name, in_users_folder=True)
    assert not may_be_run_by_tools("train.py", in_users_folder=False)
    for name in ("conftest.py", "sitecustomize.py", "activate", "activate.fish", "test_x.py"):
        assert may_be_run_by_tools(name, in_users_folder=False)
