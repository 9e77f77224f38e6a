"""Tests of the choice of the project store, and that only one run at a time can write to it."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from taas_magic.errors import StoreError
from taas_magic.journal.folder import state_dir
from taas_magic.messages import from_json, to_json
from taas_magic.store.rule import StoreRule, choose, locked_store, prepare, warnings

OWN = """
import sys
from taas_magic.store.rule import locked_store
with locked_store(sys.argv[1], "run-1", "first"):
    print("owned", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "project"
    path.mkdir()
    return path


def test_the_store_is_the_notebooks_folder(folder: Path) -> None:
    assert choose(str(folder)) == StoreRule(str(folder), "discard", ())


def test_another_folder_and_its_shared_folders(folder: Path) -> None:
    (folder / "results").mkdir()
    (folder / "link").symlink_to("results")
    rule = choose(str(folder), "link", "refuse", ["shards/now"])
    assert rule == StoreRule(f"{folder}/results", "refuse", (f"{folder}/results/shards/now",))
    assert not (folder / "results/shards").exists()
    prepare(rule)
    assert (folder / "results/shards/now").is_dir()
    assert from_json(to_json(rule), StoreRule) == rule


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("missing", "is not there"),
        ("file.txt", "is a file"),
        ("/", "whole file system"),
        ("{state}/runs/1", "inside the folder of runs"),
    ],
)
def test_a_folder_that_cannot_be_the_store_is_refused_in_one_line(
    folder: Path, path: str, says: str
) -> None:
    (folder / "file.txt").touch()
    (state_dir() / "runs/1").mkdir(parents=True)
    with pytest.raises(StoreError, match=says) as caught:
        choose(str(folder), path.format(state=state_dir()))
    assert "--store PATH" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("shared", [".", "..", "/tmp", "file.txt"])
def test_a_shared_folder_lies_in_the_store(folder: Path, shared: str) -> None:
    (folder / "file.txt").touch()
    with pytest.raises(StoreError, match="--shared-writes"):
        choose(str(folder), shared=[shared])


def test_the_check_of_a_writable_store_leaves_no_file(folder: Path) -> None:
    before = os.stat(folder).st_mtime_ns
    prepare(StoreRule(str(folder)))
    assert os.listdir(folder) == []
    assert os.stat(folder).st_mtime_ns == before or not hasattr(os, "O_TMPFILE")


@contextmanager
def small_disk(options: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


@pytest.mark.fault(38)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
@pytest.mark.parametrize(
    ("options", "says"), [("ro", "read-only"), ("size=16k,nr_inodes=8", "full")]
)
def test_a_store_that_takes_nothing_is_found_before_the_run(options: str, says: str) -> None:
    with small_disk(options) as store, pytest.raises(StoreError, match=says) as caught:
        prepare(StoreRule(str(store)))
    assert str(store) in str(caught.value)


@contextmanager
def another_owner(store: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OWN, str(store)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "owned\n"
        try:
            yield owner
        finally:
            owner.kill()


@pytest.mark.parametrize("wanted", [".", "..", "inside"])
def test_the_refusal_of_a_second_run_names_the_first_run(folder: Path, wanted: str) -> None:
    (folder / "inside").mkdir()
    with another_owner(folder) as owner:
        with (
            pytest.raises(StoreError) as caught,
            locked_store(os.path.realpath(folder / wanted), "run-2"),
        ):
            pass
        for part in ("run-1 (first)", str(owner.pid), str(folder), "--store PATH"):
            assert part in str(caught.value)


def test_another_store_is_not_locked(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "project-2").mkdir()
    with another_owner(folder), locked_store(str(tmp_path / "project-2"), "run-2"):
        pass


def test_the_lock_of_a_dead_owner_is_taken_over(folder: Path) -> None:
    with another_owner(folder) as owner:
        owner.kill()
        owner.wait()
        with locked_store(str(folder), "run-2"):
            pass
    assert os.listdir(folder) == []


def test_the_store_is_free_after_the_run(folder: Path) -> None:
    for run_id in ("run-1", "run-2"):
        with locked_store(str(folder), run_id), pytest.raises(StoreError, match=run_id):
            locked_store(str(folder), "run-3").__enter__()
    assert [path.name for path in (state_dir() / "stores").iterdir()] == ["all"]


@pytest.mark.fault(42)
def test_links_that_lead_out_are_said(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (folder / "sub").mkdir()
    (folder / "inside").symlink_to("sub")
    (folder / "null").symlink_to("/dev/null")
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    assert warnings(StoreRule(str(folder)), 2) == []
    (folder / "sub" / "data").symlink_to(tmp_path / "scratch")
    (folder / "out").symlink_to(tmp_path / "scratch")
    [said] = warnings(StoreRule(str(folder)), 2)
    assert said.startswith(f"out -> {tmp_path}/scratch and 1 more lead out of")
    assert warnings(StoreRule(str(folder)), 1) == []


def test_a_warning_says_that_the_store_is_the_home_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    [said] = warnings(StoreRule(str(folder)), 1)
    assert "is or contains your home folder" in said and "[store] path" in said
    assert warnings(StoreRule(str(folder / "project")), 1) == []
