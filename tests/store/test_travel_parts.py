"""Tests of parts of the store's copies on hosts: safe names, messages, hashes, shared folders."""

import hashlib
import os
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taas_magic.display.head import receipt_lines
from taas_magic.errors import ProtocolError
from taas_magic.messages import KeptOutFile, StoreReceipt, UnsentFile, WrittenFile
from taas_magic.store import manifest
from taas_magic.store.ignore import IgnoreRules
from taas_magic.store.manifest import Hashes, ManifestEntry
from taas_magic.store.receipt import Receipt
from taas_magic.store.requests import (
    CHUNK_BYTES,
    FilePiece,
    MakeToken,
    MessageSizer,
    ReadFiles,
    WriteFiles,
    part_lists,
)
from taas_magic.store.rule import FolderIdentity
from taas_magic.store.tree import CaseChecker, Tree, TreeEntry, UnsafeError, why_invalid, why_unsafe
from tests.store.travel_rig import Travel, wired


@given(st.text(max_size=40))
def test_a_safe_path_stays_below_its_root(path: str) -> None:
    if not why_invalid(path):
        assert os.path.normpath(f"/root/{path}").startswith("/root/")


@pytest.mark.parametrize(
    "path", ["", "/a", "..", "a/..", "a/../b", "./a", "a//b", "a/", "a\0", "\udcff", "x" * 256]
)
def test_unsafe_paths(path: str) -> None:
    assert why_unsafe(path)


def test_paths_that_differ_only_by_case_or_unicode_form() -> None:
    cases = CaseChecker()
    assert cases.find_clash_or_add("Data/x") == "" and cases.find_clash_or_add("Data/y") == ""
    assert (
        cases.find_clash_or_add("data/z") == "Data"
        and cases.find_clash_or_add("Data/X") == "Data/x"
    )
    assert (
        cases.find_clash_or_add("gr\u00f6\u00dfe") == ""
        and cases.find_clash_or_add("gro\u0308\u00dfe") == "gr\u00f6\u00dfe"
    )
    cases.forget("Data/x")
    assert cases.find_clash_or_add("Data/X") == ""


@given(st.lists(st.integers(0, 3 << 20), max_size=20))
def test_part_lists_cover_every_byte_once_and_in_order(sizes: list[int]) -> None:
    entries = [ManifestEntry(str(number), size, "") for number, size in enumerate(sizes)]
    sizer = MessageSizer()
    at = dict.fromkeys((entry.path for entry in entries), 0)
    for parts in part_lists(entries, sizer):
        assert sum(size for _, _, size in parts) <= CHUNK_BYTES
        for path, offset, size in parts:
            assert offset == at[path]
            at[path] += size
        sizer.record_duration(0.01)
    assert at == {entry.path: entry.size for entry in entries}


def test_a_slow_link_gets_small_messages() -> None:
    sizer = MessageSizer()
    for seconds, holds in ((0.01, CHUNK_BYTES), (5.0, 1 << 16)):
        for _ in range(20):
            sizer.record_duration(seconds)
        assert sizer.size == holds


def test_a_hash_is_remembered_until_the_file_changes(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    file = tmp_path / "tree" / "a"
    file.write_bytes(b"one")
    just_now = time.time() + 1000  # also if this test is slow
    os.utime(file, (just_now, just_now))
    with closing(Tree(tmp_path / "tree")) as tree:
        hashes = Hashes(tmp_path / "hashes.json")
        seen = TreeEntry("a", file.stat())
        assert hashes.hash_of(tree, seen) == hashlib.sha256(b"one").hexdigest()
        assert "a" not in hashes, "it was written just now, and may be once more in the same tick"
        hashes.remember("a", "remembered", file.stat())
        hashes.save()
        again = Hashes(tmp_path / "hashes.json")
        assert again.hash_of(tree, seen) == "remembered"
        file.write_bytes(b"two")
        os.utime(file, (just_now, just_now))
        assert (
            again.hash_of(tree, TreeEntry("a", file.stat())) == hashlib.sha256(b"two").hexdigest()
        )
    (tmp_path / "hashes.json").write_text("[[1")
    assert Hashes(tmp_path / "hashes.json").paths() == []


def test_the_hash_of_a_file_that_grows_covers_its_listed_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "_FRESH_NS", -(10**12))  # the time since a change does not count
    (tmp_path / "tree").mkdir()
    file = tmp_path / "tree" / "a"
    file.write_bytes(bytes(3_000_000))
    with closing(Tree(tmp_path / "tree")) as tree:
        hashes, seen = Hashes(tmp_path / "hashes.json"), TreeEntry("a", file.stat())
        with file.open("ab") as appended:
            appended.write(b"more")
        assert hashes.hash_of(tree, seen) == hashlib.sha256(bytes(3_000_000)).hexdigest()
        assert "a" not in hashes
        whole = hashes.hash_of(tree, TreeEntry("a", file.stat()))
        assert whole == hashlib.sha256(file.read_bytes()).hexdigest()
        assert hashes.has_hash("a", whole)


def test_no_link_is_followed(tmp_path: Path) -> None:
    for name in ("tree", "outside"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside" / "file").write_text("secret")
    (tmp_path / "tree" / "way").symlink_to(tmp_path / "outside")
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "outside" / "file")
    with closing(Tree(tmp_path / "tree")) as tree:
        for path in ("way/file", "link", "way"):
            with pytest.raises(UnsafeError):
                tree.open_file(path)
        for call in (tree.make_folder, tree.remove, tree.status):
            with pytest.raises(UnsafeError):
                call("way/file")
    assert (tmp_path / "outside" / "file").exists()


def test_the_user_can_disable_default_rules() -> None:
    assert IgnoreRules().leaves_out_file_or_folder("a/__pycache__/b.pyc")
    assert not IgnoreRules(["!__pycache__/"]).leaves_out_file_or_folder("a/__pycache__/b.pyc")


def test_a_folder_identity_matches_only_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    identity = FolderIdentity.of(str(tmp_path))

    def no_token() -> str:
        raise AssertionError("one kernel knows its folders")

    assert identity.is_here(no_token)
    moved = FolderIdentity(
        str(tmp_path / "other"), identity.kernel, identity.device, identity.inode
    )
    assert not moved.is_here(no_token)
    gone = FolderIdentity(str(tmp_path / "gone"), identity.kernel, identity.device, identity.inode)
    assert not gone.is_here(no_token)


def test_another_machine_shares_a_folder_if_it_sees_a_file_with_a_random_name(
    tmp_path: Path,
) -> None:
    travel = Travel(tmp_path)
    ask = wired(travel.store_server)
    here = FolderIdentity.of(str(travel.store))
    there = FolderIdentity(here.path, "another kernel", here.device, here.inode)
    assert there.is_here(lambda: ask(MakeToken()))
    assert not there.is_here(lambda: ".taas-arriving-of-another-store")
    assert len(os.listdir(travel.store)) == 1
    travel.store_server.close()
    assert os.listdir(travel.store) == []
    with pytest.raises(ProtocolError, match="has ended"):
        ask(MakeToken())


def test_requests_that_the_store_server_refuses(tmp_path: Path) -> None:
    store_server = Travel(tmp_path).store_server
    with pytest.raises(ProtocolError, match="too much at once"):
        wired(store_server)(ReadFiles([("a", 0, 1 << 30)]))
    with pytest.raises(ProtocolError, match="too much at once"):
        wired(store_server)(
            WriteFiles([FilePiece(ManifestEntry("a", 9, ""), 0, bytes(CHUNK_BYTES + 1))])
        )


def test_a_receipt_names_files_that_did_not_come_back() -> None:
    receipt = Receipt().with_event(StoreReceipt(not_sent=[UnsentFile("m.pt", "no space")]))
    receipt = receipt.with_event(StoreReceipt())
    assert receipt_lines(receipt)[-1] == ("not copied to the store", "m.pt (no space)")


def test_what_rank_0_wrote_is_not_reported_as_missing() -> None:
    """This includes the folders of rank 0's files, which another rank has made, too."""
    kept = [KeptOutFile(2, path, False) for path in ("m.pt", "out", "out/deep", "other")]
    written = [WrittenFile("m.pt", 3), WrittenFile("out/deep/x", 1)]
    both = StoreReceipt(kept_out=kept), StoreReceipt(written=written)
    for first, second in (both, both[::-1]):
        assert Receipt().with_event(first).with_event(second).missing == {"other"}
