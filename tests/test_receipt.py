"""The receipt: what changed in a store, whose it was, and how it reads."""

import os
from pathlib import Path

import pytest

from taas_magic.display.receipt import MAX_FILES, lines
from taas_magic.receipt import Ledger, Look, Receipt

NOTHING = {"written": [], "kept_out": [], "shared": [], "means": "", "complete": True}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "old").mkdir(parents=True)
    (folder / "old" / "before.txt").write_text("before")
    past = os.stat(folder / "old" / "before.txt").st_ctime_ns
    while Ledger(str(folder), ())._began_ns <= past:
        os.sched_yield()
    return folder


def test_rank_0s_files_are_those_it_noted_and_those_that_changed(store: Path) -> None:
    ledger = Ledger(str(store), ())
    for name in ("noted.pt", "old/by-child.bin", "notebook.ipynb", ".hidden-file"):
        (store / name).write_text("new")
    (store / "old" / "__pycache__").mkdir()
    (store / "old" / "__pycache__" / "module.pyc").touch()
    os.utime(store / "old" / "by-child.bin", (1, 1))
    ledger.take(0, {"path": str(store / "noted.pt")})
    ledger.take(0, {"path": str(store / "gone.pt")})
    written = ledger.close(has_rank_0=True)["written"]
    assert [(entry["path"], entry["bytes"]) for entry in written] == [
        (".hidden-file", 3),
        ("noted.pt", 3),
        ("old/by-child.bin", 3),
    ]


def test_another_host_looks_through_nothing(store: Path) -> None:
    ledger = Ledger(str(store), ())
    (store / "new.txt").touch()
    ledger.take(2, {"path": str(store / "new.txt")})
    ledger.take(2, {"path": str(store / "other.txt")})
    ledger.take(2, {"means": "Landlock"})
    assert ledger.close(has_rank_0=False) == {
        **NOTHING,
        "kept_out": [
            {"rank": 2, "path": "new.txt", "in_store": True},
            {"rank": 2, "path": "other.txt", "in_store": False},
        ],
        "means": "Landlock",
    }


def test_a_shared_folder_is_nobodys(store: Path) -> None:
    ledger = Ledger(str(store), [str(store / "shards")])
    (store / "shards").mkdir()
    (store / "shards" / "1.distcp").touch()
    closed = ledger.close(has_rank_0=True)
    assert closed["written"] == [] and closed["shared"] == ["shards"]


def test_an_unfinished_save_of_a_dead_rank_is_cleared_away(store: Path) -> None:
    ledger = Ledger(str(store), ())
    (store / ".m.pt.abc.taas-saving").mkdir()
    (store / ".m.pt.abc.taas-saving" / "m.pt").write_text("half")
    assert ledger.close(has_rank_0=True)["written"] == []
    assert os.listdir(store) == ["old"]


def test_a_store_that_is_too_large_is_said_to_be(store: Path) -> None:
    look = Look(str(store), (), 0, limit_s=0)
    list(look.changed())
    assert not look.complete


def test_hosts_make_one_receipt() -> None:
    kept = [{"rank": 3, "path": "m.pt", "in_store": True}]
    lost = [{"rank": 4, "path": "m-4.pt", "in_store": False}]
    receipt = Receipt()
    for more in (
        {"written": [{"path": "m.pt", "bytes": 7}]},
        {"kept_out": kept, "means": "Landlock"},
        {"kept_out": [{**kept[0], "rank": 1}, *lost], "complete": False},
    ):
        receipt = receipt.with_event({**NOTHING, **more})
    assert receipt == Receipt(
        written={"m.pt": 7},
        kept_out={"m-4.pt": (4,), "m.pt": (1, 3)},
        missing=frozenset({"m-4.pt"}),
        means="Landlock",
        complete=False,
    )
    assert lines(receipt) == [
        ("rank 0 wrote", "m.pt (7 bytes)"),
        ("kept out", "m.pt of ranks 1,3"),
        ("kept out, and not in the store", "m-4.pt of rank 4"),
        ("held by", "Landlock"),
        ("store", "too large to look through: files of subprocesses may be missing"),
    ]


def test_a_run_that_touched_nothing_has_nothing_to_say() -> None:
    assert lines(None) == lines(Receipt(means="Landlock")) == []


def test_many_files_are_counted() -> None:
    receipt = Receipt(written={f"{number}.pt": 1 for number in range(MAX_FILES + 3)})
    assert lines(receipt)[0][1].endswith(" and 3 more")
