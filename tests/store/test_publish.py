"""Tests of `taas.save`: after a kill or on a full disk, the old or the complete new file exists."""

import errno
import fcntl
import os
import random
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from taas_magic.errors import StoreError
from taas_magic.store.publish import SAVES_FOLDER_VARIABLE, save
from tests.children import saver
from tests.rig.main_module import CONTEXT
from tests.rig.protected import start

pytestmark = pytest.mark.usefixtures("forkserver")


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def test_the_file_equals_that_of_torch_save(tmp_path: Path) -> None:
    value = {"weight": torch.arange(10.0)}
    save(value, tmp_path / "m.pt")
    (tmp_path / "torch").mkdir()
    torch.save(value, tmp_path / "torch" / "m.pt")
    assert (tmp_path / "m.pt").read_bytes() == (tmp_path / "torch" / "m.pt").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["m.pt", "torch"]


def test_only_rank_0s_call_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        save(int(rank), tmp_path / "m.pt")
        assert (tmp_path / "m.pt").exists() == (rank == "0")
    assert torch.load(tmp_path / "m.pt") == 0


def test_an_open_file_is_written_by_any_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with (tmp_path / "m.pt").open("wb") as file:
        save(1, file)
    assert torch.load(tmp_path / "m.pt") == 1


def test_links_are_followed_and_permissions_kept(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "m.pt"
    target.touch(mode=0o640)
    target.chmod(0o640)
    (tmp_path / "m.pt").symlink_to(target)
    save(1, tmp_path / "m.pt")
    assert (tmp_path / "m.pt").is_symlink() and torch.load(target) == 1
    assert target.stat().st_mode & 0o777 == 0o640


def test_a_job_saves_to_its_folder_also_over_a_link_to_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, job = tmp_path / "store", tmp_path / "job"
    (store / "sub").mkdir(parents=True)
    (tmp_path / "home").symlink_to(store)
    (store / "link").symlink_to(store / "sub")
    monkeypatch.chdir(store)
    monkeypatch.setenv(SAVES_FOLDER_VARIABLE, str(job))
    for number, path in enumerate([tmp_path / "home/m.pt", Path("link/m.pt"), store / "sub/m.pt"]):
        save(number, path)
    found = {str(path.relative_to(job)): torch.load(path) for path in job.rglob("*.pt")}
    assert found == {"m.pt": 0, "link/m.pt": 1, "sub/m.pt": 2}
    save(3, tmp_path / "elsewhere.pt")
    assert torch.load(tmp_path / "elsewhere.pt") == 3
    assert not list(store.rglob("*.pt"))


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_is_saved_on_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def flock(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    unfinished = tmp_path / ".m.pt.1.taas-saving"
    unfinished.mkdir()
    with monkeypatch.context() as file_system:
        file_system.setattr(fcntl, "flock", flock)
        save(1, tmp_path / "m.pt")
        assert torch.load(tmp_path / "m.pt") == 1
        assert sorted(os.listdir(tmp_path)) == [unfinished.name, "m.pt"], "its writer may live"
    save(2, tmp_path / "m.pt")
    assert torch.load(tmp_path / "m.pt") == 2 and os.listdir(tmp_path) == ["m.pt"]


def test_an_object_that_cannot_be_pickled_leaves_the_old_file(tmp_path: Path) -> None:
    save(1, tmp_path / "m.pt")
    with pytest.raises(AttributeError):
        save(lambda: None, tmp_path / "m.pt")
    assert torch.load(tmp_path / "m.pt") == 1 and os.listdir(tmp_path) == ["m.pt"]


def test_a_long_name_is_no_obstacle(tmp_path: Path) -> None:
    for name in ("m" * 255, "é" * 127):
        save(1, tmp_path / name)
        assert torch.load(tmp_path / name) == 1
    assert len(os.listdir(tmp_path)) == 2


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"missing/m\.pt"):
        save(1, tmp_path / "missing" / "m.pt")


@pytest.fixture
def small_disk() -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


@pytest.mark.fault(36)
@pytest.mark.parametrize("as_zip", [True, False])
def test_a_full_disk_leaves_the_old_file(small_disk: Path, as_zip: bool) -> None:
    old = torch.zeros(100_000)
    save(old, small_disk / "m.pt")
    with pytest.raises(StoreError) as caught:
        save(torch.ones(200_000), small_disk / "m.pt", _use_new_zipfile_serialization=as_zip)
    for part in (str(small_disk / "m.pt"), "bytes were written", "the old file is unchanged"):
        assert part in str(caught.value)
    assert torch.equal(torch.load(small_disk / "m.pt"), old)
    assert os.listdir(small_disk) == ["m.pt"]


@pytest.mark.fault(41)
def test_a_kill_at_any_point_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    path, chance = tmp_path / "m.pt", random.Random(1)
    for _ in range(12):
        theirs, ours = CONTEXT.Pipe()
        process = start(saver.saves_for_ever, str(path), theirs)
        theirs.close()
        assert ours.recv() == "saved once"
        ours.poll(chance.uniform(0, 0.03))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        values = torch.load(path, weights_only=True)
        assert values.eq(values[0]).all() and len(values) == saver.COUNT
    save(torch.zeros(1), path)
    assert os.listdir(tmp_path) == ["m.pt"], "what the killed have left is cleared by the next"
