"""Tests of redirected writes: which files ranks other than 0 read, write and report."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from taas_magic.store import redirect
from taas_magic.store.guard import StoreProtection, strongest_protection
from tests.children import sights
from tests.rig import protected
from tests.rig.protected import ProtectedProcess, Raised, Setting
from tests.store.travel_rig import tree_of

pytestmark = pytest.mark.usefixtures("forkserver")


@pytest.fixture
def base() -> Iterator[Path]:
    with protected.new_store(None) as folder:
        yield folder


@pytest.fixture
def rank(base: Path) -> Iterator[ProtectedProcess]:
    with protected.protected_process(
        Setting(str(base / "store"), str(base / "scratch"), StoreProtection.PYTHON)
    ) as process:
        yield process


def test_other_ranks_read_the_file_of_rank_0(base: Path, rank: ProtectedProcess) -> None:
    rank.call(sights.saves, "m.pt", 1.0)
    assert rank.call(sights.loads, "m.pt") == 1.0
    sights.saves(base / "store" / "m.pt", 0.0)
    assert rank.call(sights.loads, "m.pt") == 0.0
    rank.call(sights.saves, "m.pt", 1.0)
    assert rank.call(sights.loads, "m.pt") == 0.0


def test_a_call_that_every_rank_makes_fails_on_no_rank(base: Path, rank: ProtectedProcess) -> None:
    """All ranks create, remove or rename the same paths. Rank 0 was the first.

    So the folder already exists and the files are gone, but other ranks get no error.
    """
    rank.call(os.mkdir, "folder")
    rank.call(os.remove, "gone.pt")
    rank.call(os.rename, "gone.pt", "renamed.pt")
    with pytest.raises(Raised, match="FileExistsError"):
        rank.call(os.mkdir, "folder")
    assert sorted(os.listdir(base / "store")) == ["data.bin", "folder", "numbers.bin"]


def test_a_touched_file_exists_for_its_rank(base: Path, rank: ProtectedProcess) -> None:
    for _ in range(2):
        rank.call(Path.touch, Path("done"))
        assert rank.call(os.path.exists, "done")
    with pytest.raises(Raised, match="FileNotFoundError"):
        rank.call(os.utime, "never")
    rank.call(os.utime, "data.bin", (1, 1))
    assert os.stat(base / "store" / "data.bin").st_mtime > 1
    assert "done" not in os.listdir(base / "store")


def test_a_folder_that_rank_0_has_moved_is_read_at_its_new_place(
    base: Path, rank: ProtectedProcess
) -> None:
    (base / "store" / "new").mkdir()
    (base / "store" / "new" / "file").touch()
    rank.call(os.rename, "old", "new")
    assert rank.call(os.listdir, "new") == ["file"]
    rank.call(partial(os.makedirs, exist_ok=True), "new")


def test_a_file_that_all_ranks_share_is_not_moved_out_of_the_store(base: Path) -> None:
    (base / "store" / "parts").mkdir()
    sights.saves(base / "store" / "parts" / "a.pt", 3.0)
    setting = Setting(
        str(base / "store"), str(base / "scratch"), StoreProtection.PYTHON, shared=("parts",)
    )
    with protected.protected_process(setting) as rank:
        rank.call(os.rename, "parts/a.pt", "parts/b.pt")
        rank.call(os.rename, "parts/b.pt", "final.pt")
        assert rank.call(sights.loads, "final.pt") == 3.0
    assert os.listdir(base / "store" / "parts") == ["b.pt"]
    assert not (base / "store" / "final.pt").exists()


def test_writing_elsewhere_is_not_redirected(base: Path, rank: ProtectedProcess) -> None:
    rank.call(sights.saves, base / "outside" / "m.pt", 1.0)
    assert (base / "outside" / "m.pt").exists()
    assert rank.call(protected.kept_out) == []


@pytest.mark.filterwarnings("ignore")
def test_libraries_that_open_files_themselves_are_redirected(
    base: Path, rank: ProtectedProcess
) -> None:
    """The system does not protect the store here: a write that is not redirected would succeed."""
    pytest.importorskip("transformers")
    before = tree_of(base / "store")
    rank.call(sights.saves_with_libraries)
    assert tree_of(base / "store") == before


def test_a_checkpoint_with_a_name_beyond_ascii_is_redirected(
    base: Path, rank: ProtectedProcess
) -> None:
    rank.call(sights.saves_under_a_name_beyond_ascii)
    assert rank.call(protected.kept_out) == [str(base / "store" / "größe.pt")]
    assert "größe.pt" not in os.listdir(base / "store")


def test_an_error_of_the_system_names_the_rule(base: Path) -> None:
    protection = strongest_protection()
    if protection is StoreProtection.PYTHON:
        pytest.skip("the system holds nothing here")
    with protected.protected_process(
        Setting(str(base / "store"), str(base / "scratch"), protection)
    ) as process:
        *refused, elsewhere = process.call(sights.is_refused_by_the_system)
    assert len(refused) == 2 and "project store" not in elsewhere
    for told in refused:
        assert "only rank 0 writes to the project store" in told
        assert "`if rank == 0:`" in told and "--shared-writes" in told


def test_an_error_of_a_program_names_the_rule(base: Path) -> None:
    protection = strongest_protection()
    if protection not in (StoreProtection.MOUNT, StoreProtection.USER_MOUNT):
        pytest.skip("no mount protects the store here")
    with protected.protected_process(
        Setting(str(base / "store"), str(base / "scratch"), protection)
    ) as process:
        told = process.call(sights.is_refused_in_a_subprocess)
    assert "returned non-zero exit status 1" in told
    assert "only rank 0 writes to the project store" in told


def test_a_written_path_is_recorded_once(base: Path, rank: ProtectedProcess) -> None:
    for value in range(3):
        rank.call(sights.saves, "m.pt", value)
    assert rank.call(protected.kept_out) == [str(base / "store" / "m.pt")]


def test_changing_a_huge_file_is_refused(base: Path, rank: ProtectedProcess) -> None:
    with (base / "store" / "huge.bin").open("wb") as file:
        file.truncate(redirect.COPY_LIMIT_BYTES + 1)
    with pytest.raises(Raised, match="open it for reading") as caught:
        rank.call(sights.changes, "huge.bin")
    assert caught.value.etype == "PermissionError" and "huge.bin" in caught.value.text


def test_a_huge_file_is_renamed_without_a_copy(base: Path, rank: ProtectedProcess) -> None:
    """The system does not protect the store here: a write through a link would change the store."""
    size = redirect.COPY_LIMIT_BYTES + 1
    with (base / "store" / "huge.bin").open("wb") as file:
        file.write(b"huge")
        file.truncate(size)
    rank.call(os.rename, "huge.bin", "renamed.bin")
    rank.call(os.rename, "renamed.bin", "again.bin")
    assert rank.call(sights.begins_with, "again.bin") == b"huge"
    for change, *arguments in ((sights.changes, "again.bin"), (os.truncate, "again.bin", 2)):
        with pytest.raises(Raised, match="open it for reading") as caught:
            rank.call(change, *arguments)
        assert caught.value.etype == "PermissionError"
    rank.call(Path.write_text, Path("again.bin"), "mine")
    assert rank.call(sights.begins_with, "again.bin") == b"mine"
    with pytest.raises(Raised, match="open it for reading"):
        rank.call(os.rename, "huge.bin", str(base / "outside" / "huge.bin"))
    assert not os.path.lexists(base / "outside" / "huge.bin")
    assert sights.begins_with(str(base / "store" / "huge.bin")) == b"huge"
    assert os.path.getsize(base / "store" / "huge.bin") == size
    assert not (base / "store" / "again.bin").exists()


def test_writes_of_rank_0_are_recorded(base: Path) -> None:
    setting = Setting(str(base / "store"), str(base / "scratch"), StoreProtection.PYTHON, rank=0)
    with protected.protected_process(setting) as rank:
        rank.call(sights.saves, "m.pt", 2.0)
        rank.call(os.rename, "data.bin", "renamed.bin")
        noted = rank.call(protected.kept_out)
    assert sights.loads(base / "store" / "m.pt") == 2.0
    written = [path for path in noted if os.path.exists(path)]
    assert written == [str(base / "store" / name) for name in ("m.pt", "renamed.bin")]


def test_the_path_is_added_to_torchs_error(base: Path) -> None:
    setting = Setting(str(base / "store"), str(base / "scratch"), StoreProtection.PYTHON, rank=0)
    with protected.protected_process(setting) as rank, pytest.raises(Raised) as caught:
        rank.call(sights.writes_by_torch, str(base / "outside" / "missing" / "m.pt"))
    assert str(base / "outside" / "missing" / "m.pt") in caught.value.text
