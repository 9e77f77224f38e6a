"""Tests of the receipt: which files a run changed, which ranks wrote them, and its text."""

import os
from pathlib import Path

import pytest

from taas_magic.display.head import MAX_FILES, receipt_lines
from taas_magic.messages import (
    KeptOutFile,
    StoreProtectionReported,
    StoreReceipt,
    StoreWriteReported,
    UnsentFile,
    WrittenFile,
)
from taas_magic.store.manifest import FOLDER, ManifestEntry
from taas_magic.store.receipt import Receipt, ReceiptBuilder, find_changed_files


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "old").mkdir(parents=True)
    (folder / "old" / "before.txt").write_text("before")
    past = os.stat(folder / "old" / "before.txt").st_ctime_ns
    while ReceiptBuilder(str(folder), ())._began_ns <= past:
        os.sched_yield()
    return folder


def test_files_of_rank_0_are_its_reported_files_and_the_changed_files(store: Path) -> None:
    receipt_builder = ReceiptBuilder(str(store), ())
    for name in ("noted.pt", "old/by-child.bin", "notebook.ipynb", ".hidden-file"):
        (store / name).write_text("new")
    (store / "old" / "__pycache__").mkdir()
    (store / "old" / "__pycache__" / "module.pyc").touch()
    os.utime(store / "old" / "by-child.bin", (1, 1))
    receipt_builder.record(0, StoreWriteReported(str(store / "noted.pt")))
    receipt_builder.record(0, StoreWriteReported(str(store / "gone.pt")))
    assert receipt_builder.build(searches=True).written == [
        WrittenFile(".hidden-file", 3),
        WrittenFile("noted.pt", 3),
        WrittenFile("old/by-child.bin", 3),
    ]


def test_a_file_created_immediately_after_the_start_is_found(store: Path) -> None:
    for number in range(20):
        receipt_builder, name = ReceiptBuilder(str(store), ()), f"{number}.pt"
        (store / name).touch()
        assert name in {file.path for file in receipt_builder.build(searches=True).written}


def test_a_host_without_rank_0_does_not_search_the_store(store: Path) -> None:
    receipt_builder = ReceiptBuilder(str(store), ())
    (store / "new.txt").touch()
    receipt_builder.record(2, StoreWriteReported(str(store / "new.txt")))
    receipt_builder.record(2, StoreWriteReported(str(store / "other.txt")))
    receipt_builder.record(2, StoreProtectionReported("Landlock"))
    closed = receipt_builder.build(searches=False)
    assert closed.kept_out == [KeptOutFile(2, "new.txt", True), KeptOutFile(2, "other.txt", False)]
    assert (closed.written, closed.means, closed.complete) == ([], "Landlock", True)


def test_a_mirrors_files_are_those_that_the_store_accepted(store: Path) -> None:
    receipt_builder = ReceiptBuilder(str(store), [str(store / "shards")])
    for name in ("opened.pt", "old/by-child.bin"):
        (store / name).write_text("new")
        receipt_builder.record(0, StoreWriteReported(str(store / name)))
    for path in ("m.pt", "gone.pt", "shards/1"):
        receipt_builder.record_sent(ManifestEntry(path, 3, "0"))
    receipt_builder.record_removed("gone.pt")
    for path in ("late.pt", "late", ".env", "removed"):
        receipt_builder.record_refused(path, "no space")
    receipt_builder.record_sent(ManifestEntry("late.pt", 2, "0"))
    receipt_builder.record_sent(ManifestEntry("late", 0, FOLDER))
    receipt_builder.record_removed("removed")
    closed = receipt_builder.build(searches=False)
    assert closed.written == [WrittenFile("late.pt", 2), WrittenFile("m.pt", 3)]
    assert closed.not_sent == [UnsentFile(".env", "no space")] and closed.complete


def test_files_in_a_shared_folder_belong_to_no_rank(store: Path) -> None:
    receipt_builder = ReceiptBuilder(str(store), [str(store / "shards")])
    (store / "shards").mkdir()
    (store / "shards" / "1.distcp").touch()
    closed = receipt_builder.build(searches=True)
    assert closed.written == [] and closed.shared == ["shards"]


def test_an_unfinished_save_of_a_dead_rank_is_cleared_away(store: Path) -> None:
    receipt_builder = ReceiptBuilder(str(store), ())
    (store / ".m.pt.abc.taas-saving").mkdir()
    (store / ".m.pt.abc.taas-saving" / "m.pt").write_text("half")
    assert receipt_builder.build(searches=True).written == []
    assert os.listdir(store) == ["old"]


def test_a_receipt_says_that_the_store_is_too_large_to_search(store: Path) -> None:
    _, is_complete = find_changed_files(str(store), (), 0, limit_s=0)
    assert not is_complete


def test_a_receipt_says_that_the_store_cannot_be_read(store: Path) -> None:
    _, is_complete = find_changed_files(str(store / "removed"), (), 0)
    assert not is_complete


def test_receipts_of_several_hosts_are_merged() -> None:
    kept = [KeptOutFile(3, "m.pt", True)]
    more = [KeptOutFile(1, "m.pt", True), KeptOutFile(4, "m-4.pt", False)]
    receipt = Receipt()
    for said in (
        StoreReceipt(written=[WrittenFile("m.pt", 7)]),
        StoreReceipt(kept_out=kept, means="Landlock"),
        StoreReceipt(kept_out=more, complete=False),
    ):
        receipt = receipt.with_event(said)
    assert receipt == Receipt(
        written={"m.pt": 7},
        kept_out={"m-4.pt": (4,), "m.pt": (1, 3)},
        missing=frozenset({"m-4.pt"}),
        means="Landlock",
        complete=False,
    )
    assert receipt_lines(receipt) == [
        ("rank 0 wrote", "m.pt (7 bytes)"),
        ("not saved (only rank 0 writes)", "m.pt from ranks 1,3"),
        ("not saved by any rank", "m-4.pt from rank 4"),
        ("protected by", "Landlock"),
        ("store", "not searched completely: files that subprocesses wrote may be missing"),
    ]


def test_a_run_without_writes_has_an_empty_receipt() -> None:
    assert receipt_lines(None) == receipt_lines(Receipt(means="Landlock")) == []


def test_many_files_are_counted() -> None:
    receipt = Receipt(written={f"{number}.pt": 1 for number in range(MAX_FILES + 3)})
    assert receipt_lines(receipt)[0][1].endswith(" and 3 more")
