"""Tests of `MirrorSender`, which sends the files that rank 0 closes in a mirror to the store."""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from taas_magic.store import outbound as inotify
from taas_magic.store.manifest import ManifestEntry
from taas_magic.store.mirror import StoreUpdater
from taas_magic.store.requests import FilePiece, FileRequest, WriteFiles
from taas_magic.store.server import StoreServer
from tests.eventually import HUNG_S, eventually
from tests.store.travel_rig import Travel, descriptors, folder, tree_of, wired


@pytest.fixture
def travel(tmp_path: Path) -> Travel:
    return Travel(tmp_path)


def published(request: FileRequest[Any]) -> list[str]:
    if not isinstance(request, WriteFiles):
        return []
    return [piece.entry.path for piece in request.pieces if piece.entry.sha256]


def is_going_on(request: FileRequest[Any]) -> bool:
    """Return whether a request writes a piece of a file that is not the file's first piece."""
    return isinstance(request, WriteFiles) and any(piece.offset for piece in request.pieces)


def reads(path: Path, content: bytes) -> Callable[[], bool]:
    return lambda: path.is_file() and path.read_bytes() == content


def test_a_closed_file_reaches_the_store_during_the_run(travel: Travel) -> None:
    before = descriptors()
    with travel.running() as mirror:
        (mirror / "m.pt").write_bytes(b"one")
        eventually(reads(travel.store / "m.pt", b"one"))
        (mirror / "out" / "deep").mkdir(parents=True)
        (mirror / "out" / "deep" / "x").write_bytes(b"x")
        eventually(reads(travel.store / "out/deep/x", b"x"))
        (mirror / "empty").touch()
        eventually(reads(travel.store / "empty", b""))
    assert travel.written == {"m.pt": 3, "out/deep/x": 1, "empty": 0}
    assert travel.notes == [] and descriptors() <= before


def test_an_open_file_does_not_reach_the_store(travel: Travel) -> None:
    (travel.store / "log.txt").write_bytes(b"old")
    with travel.running() as mirror, (mirror / "log.txt").open("wb", buffering=0) as log:
        log.write(b"half")
        (mirror / "other").write_bytes(b"other")
        eventually(reads(travel.store / "other", b"other"))
        assert (travel.store / "log.txt").read_bytes() == b"old"
        log.write(b" and the rest")
        log.close()
        eventually(reads(travel.store / "log.txt", b"half and the rest"))


def test_a_temporary_file_that_is_renamed_never_reaches_the_store(travel: Travel) -> None:
    asked: list[str] = []
    ask = wired(travel.store_server)

    def spy(request: FileRequest[Any]) -> Any:
        asked.extend(published(request))
        return ask(request)

    with travel.running() as mirror:
        travel.outbound._sender._send_request = spy
        folder = mirror / ".m.pt.abc.taas-saving"
        folder.mkdir()
        (folder / "m.pt").write_bytes(b"new")
        (folder / "m.pt").rename(mirror / "m.pt")
        folder.rmdir()
        eventually(reads(travel.store / "m.pt", b"new"))
    assert tree_of(travel.store) == {"m.pt": b"new"} and asked == ["m.pt"]


def test_many_small_files_do_not_block_a_slow_link(travel: Travel, tmp_path: Path) -> None:
    """Messages stay small, so that they do not delay the host's heartbeats on the same link."""
    sent: list[int] = []
    ask, aside = wired(travel.store_server), tmp_path / "aside"
    aside.mkdir()
    for number in range(60):
        (aside / f"{number}.bin").write_bytes(os.urandom(50_000))

    def spy(request: FileRequest[Any]) -> Any:
        if isinstance(request, WriteFiles) and request.pieces:
            sent.append(sum(len(piece.data) for piece in request.pieces))
        return ask(request)

    with travel.running() as mirror:
        travel.outbound._sender._send_request = spy
        aside.rename(mirror / "out")
        eventually(lambda: sum(sent) == 60 * 50_000)
    assert sent[0] <= 2 * inotify.SMALL_BYTES and tree_of(travel.store) == tree_of(mirror)


def test_paths_are_removed_moved_and_replaced_by_other_types(travel: Travel) -> None:
    for name in ("gone", "moved", "turns", "old/a", "old/b/c"):
        (travel.store / name).parent.mkdir(parents=True, exist_ok=True)
        (travel.store / name).write_text(name)
    (travel.store / "was-folder").mkdir()
    (travel.store / "was-folder" / "x").touch()
    with travel.running() as mirror:
        (mirror / "gone").unlink()
        (mirror / "moved").rename(mirror / "there")
        (mirror / "old").rename(mirror / "new")
        (mirror / "turns").unlink()
        (mirror / "turns").mkdir()
        (mirror / "turns" / "below").write_text("below")
        shutil.rmtree(mirror / "was-folder")
        (mirror / "was-folder").write_text("a file now")
        os.link(mirror / "there", mirror / "linked")
        wanted = tree_of(mirror)
        eventually(lambda: tree_of(travel.store) == wanted)
    assert travel.notes == []


def test_files_written_to_a_moved_folder_arrive_at_its_new_path(
    travel: Travel, tmp_path: Path
) -> None:
    (travel.store / "old" / "deep").mkdir(parents=True)
    (travel.store / "leaves").mkdir()
    with travel.running() as mirror:
        (mirror / "old").rename(mirror / "new")
        (mirror / "leaves").rename(tmp_path / "outside")
        eventually(lambda: set(tree_of(travel.store)) == {"new", "new/deep"})
        (mirror / "new" / "deep" / "x").write_bytes(b"x")
        (tmp_path / "outside" / "not-ours").write_bytes(b"x")
        (mirror / "old").mkdir()
        (mirror / "old" / "y").write_bytes(b"y")
        eventually(reads(travel.store / "new/deep/x", b"x"))
        eventually(reads(travel.store / "old/y", b"y"))
    assert set(tree_of(travel.store)) == {"new", "new/deep", "new/deep/x", "old", "old/y"}
    assert travel.notes == []


def test_files_of_the_user_in_a_removed_folder_stay(travel: Travel) -> None:
    (travel.store / "out").mkdir()
    (travel.store / "out" / "old").touch()
    with travel.running() as mirror:
        (travel.store / "out" / "my-notes.txt").write_text("mine")
        shutil.rmtree(mirror / "out")
        eventually(lambda: not (travel.store / "out" / "old").exists())
    assert (travel.store / "out" / "my-notes.txt").read_text() == "mine"


def test_small_files_arrive_before_a_large_file_that_is_being_sent(travel: Travel) -> None:
    content = os.urandom(20_000_000)
    on_the_way, go_on = threading.Event(), threading.Event()
    ask = wired(travel.store_server)

    def slow(request: FileRequest[Any]) -> Any:
        if is_going_on(request):
            on_the_way.set()
            assert go_on.wait(HUNG_S)
        return ask(request)

    with travel.running() as mirror:
        travel.outbound._sender._send_request = slow
        (mirror / "big.pt").write_bytes(content)
        assert on_the_way.wait(HUNG_S)
        assert not (travel.store / "big.pt").exists()
        (mirror / "small").write_bytes(b"small")
        go_on.set()
        eventually(reads(travel.store / "small", b"small"))
        eventually(reads(travel.store / "big.pt", content))
    assert not list(travel.store.glob(".*"))


def test_a_large_file_that_is_rewritten_while_it_is_sent_arrives_in_its_last_version(
    travel: Travel,
) -> None:
    ask, rewritten = wired(travel.store_server), threading.Event()
    last = os.urandom(3_000_000)

    def rewriting(request: FileRequest[Any]) -> Any:
        if is_going_on(request) and not rewritten.is_set():
            rewritten.set()
            (mirror / "big.pt").write_bytes(last)
        return ask(request)

    with travel.running() as mirror:
        travel.outbound._sender._send_request = rewriting
        (mirror / "big.pt").write_bytes(os.urandom(3_000_000))
        eventually(reads(travel.store / "big.pt", last))


def test_a_file_that_is_always_rewritten_is_sent_at_intervals(travel: Travel) -> None:
    sent: list[str] = []
    ask = wired(travel.store_server)

    def spy(request: FileRequest[Any]) -> Any:
        sent.extend(published(request))
        return ask(request)

    began = time.monotonic()
    with travel.running() as mirror:
        travel.outbound._sender._send_request = spy
        for step in range(300):
            (mirror / "loss.txt").write_text(str(step))
    assert (travel.store / "loss.txt").read_text() == "299"
    assert len(sent) <= 3 + 5 * (time.monotonic() - began)


def test_writes_of_a_subprocess_and_through_a_memory_map_are_sent(travel: Travel) -> None:
    code = (
        "import mmap; f = open('map', 'wb+'); f.truncate(5); mmap.mmap(f.fileno(), 5)[:] = b'shown'"
    )
    with travel.running() as mirror:
        subprocess.run(["sh", "-c", "echo shell > by-shell"], cwd=mirror, check=True)
        subprocess.run([sys.executable, "-c", code], cwd=mirror, check=True)
        eventually(reads(travel.store / "by-shell", b"shell\n"))
        eventually(reads(travel.store / "map", b"shown"))


def test_links_and_devices_do_not_reach_the_store(travel: Travel, tmp_path: Path) -> None:
    """docs/faults.md 53: hostile names that a rank creates in its mirror do not reach the store."""
    (tmp_path / "outside").mkdir()
    with travel.running() as mirror:
        (mirror / "link").symlink_to("/etc/passwd")
        os.mkfifo(mirror / "fifo")
        (mirror / "folder").symlink_to(tmp_path / "outside")
        (mirror / "folder" / "through").write_text("x")
        (mirror / os.fsdecode(b"\xff")).write_text("x")
        (mirror / "good").write_bytes(b"good")
        eventually(reads(travel.store / "good", b"good"))
    assert set(tree_of(travel.store)) == {"good"}
    assert travel.refused == {
        "link": "a symbolic link",
        "fifo": "a FIFO",
        "folder": "a symbolic link",
        r"\udcff": "its name is not UTF-8",
    }
    assert any(r"\udcff was not copied" in note for note in travel.notes)


@pytest.mark.fault(53)
def test_a_lying_host_writes_nothing_outside(travel: Travel, tmp_path: Path) -> None:
    """docs/faults.md 53: the store server refuses hostile names in a host's requests."""
    (tmp_path / "outside").mkdir()
    (travel.store / "way-out").symlink_to(tmp_path / "outside")
    (travel.store / "link.txt").symlink_to(tmp_path / "victim")
    (travel.store / "Known").touch()
    ask = wired(travel.store_server)
    travel.look_again()
    bad = [
        "../out",
        "/tmp/taas-out",
        "a/../../out",
        "way-out/x",
        "link.txt",
        "known",
        ".git/hooks/a",
    ]
    bad += ["", "nul\0", "x" * 300]
    assert ask(WriteFiles([empty(path) for path in bad])).keys() == set(bad)
    assert ask(WriteFiles(folders(bad))).keys() == set(bad)
    assert {"../out", "way-out/x", "link.txt"} <= ask(WriteFiles(removed=bad)).keys()
    for path in bad:
        assert ask(WriteFiles(in_two(path, b"ab"))).keys() == {path}
    assert set(os.listdir(travel.store)) == {"way-out", "link.txt", "Known"}
    assert os.listdir(tmp_path / "outside") == [] and not (tmp_path / "out").exists()


def empty(path: str) -> FilePiece:
    """Return an empty file as one piece."""
    hash_of_nothing = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    return FilePiece(ManifestEntry(path, 0, hash_of_nothing, True), 0, b"")


def folders(paths: Iterable[str]) -> list[FilePiece]:
    """Return the pieces that announce new folders."""
    return [FilePiece(folder(path), 0, b"") for path in paths]


def in_two(path: str, content: bytes) -> list[FilePiece]:
    """Return two pieces that together are a file with this content."""
    whole = ManifestEntry(path, len(content), hashlib.sha256(content).hexdigest())
    at = len(content) // 2
    begun = structs.replace(whole, sha256="")
    return [FilePiece(begun, 0, content[:at]), FilePiece(whole, at, content[at:])]


@pytest.mark.fault(40)
def test_what_does_not_match_its_hash_is_refused(travel: Travel) -> None:
    """docs/faults.md 40: a file is damaged on its way from the host to the store."""
    (travel.store / "m.pt").write_text("old")
    ask = wired(travel.store_server)
    refused = ask(WriteFiles([FilePiece(ManifestEntry("m.pt", 3, "0" * 64), 0, b"new")]))
    assert "m.pt was damaged in transit" in refused["m.pt"]
    assert tree_of(travel.store) == {"m.pt": b"old"}


def test_hosts_without_rank_0_send_only_shared_folders(tmp_path: Path) -> None:
    travel = Travel(tmp_path, shared=("shards",))
    (travel.store / "shards").mkdir()
    ask = wired(travel.store_server, host_rank=1)
    assert ask(WriteFiles(folders(["other"]))) == {
        "other": "only rank 0 writes to the project store"
    }
    with travel.running(1, shared=("shards",)) as mirror:
        (mirror / "shards" / "1.distcp").write_bytes(b"mine")
        (mirror / "private").write_bytes(b"x")
        eventually(reads(travel.store / "shards/1.distcp", b"mine"))
    assert set(tree_of(travel.store)) == {"shards", "shards/1.distcp"} and travel.notes == []


def test_other_hosts_get_what_rank_0_wrote(travel: Travel) -> None:
    for name in ("old", "to-folder", "to-file/sub/x"):
        (travel.store / name).parent.mkdir(parents=True, exist_ok=True)
        (travel.store / name).touch()
    other, _ = travel.mirrored(1)
    news = StoreUpdater(other, wired(travel.store_server, 1), travel.notes.append)
    news.start()
    with travel.running() as mirror:
        (mirror / "out").mkdir()
        (mirror / "out" / "m.pt").write_bytes(os.urandom(600_000))
        (mirror / "old").unlink()
        (mirror / "to-folder").unlink()
        (mirror / "to-folder" / "sub").mkdir(parents=True)
        (mirror / "to-folder" / "sub" / "m.pt").write_bytes(b"best")
        shutil.rmtree(mirror / "to-file")
        (mirror / "to-file").write_bytes(b"a file now")
        wanted = tree_of(mirror)
        eventually(lambda: tree_of(Path(other.path)) == wanted)
    news.finish()
    assert travel.notes == []


def test_a_folder_that_rank_0_removed_is_removed_on_other_hosts(travel: Travel) -> None:
    """A file with the name of a removed folder must reach other hosts, too."""
    for name in ("gone/sub/x", "to-file/sub/x"):
        (travel.store / name).parent.mkdir(parents=True)
        (travel.store / name).touch()
    other, _ = travel.mirrored(1)
    news = StoreUpdater(other, wired(travel.store_server, 1), travel.notes.append)
    with travel.running() as mirror:
        shutil.rmtree(mirror / "gone")
        shutil.rmtree(mirror / "to-file")
        eventually(lambda: tree_of(travel.store) == {})
        (mirror / "to-file").write_bytes(b"a file now")
        eventually(reads(travel.store / "to-file", b"a file now"))
        news.catch_up()
    assert tree_of(Path(other.path)) == {"to-file": b"a file now"} and travel.notes == []
    other.close()


def followed(travel: Travel, news: StoreUpdater, mirror: Path, other: Path) -> Callable[[], bool]:
    """Return a function that updates `other`, and returns whether all copies are equal.

    The copies are the store, rank 0's mirror, and `other`.

    Args:
        travel: Store of the run.
        news: Updater of `other`.
        mirror: Mirror of rank 0's host.
        other: Mirror of another host.
    """

    def holds() -> bool:
        news.catch_up()
        wanted = tree_of(mirror)
        return tree_of(travel.store) == wanted and tree_of(other) == wanted

    return holds


def test_a_file_that_was_just_sent_and_becomes_a_folder_is_followed(travel: Travel) -> None:
    other, _ = travel.mirrored(1)
    news = StoreUpdater(other, wired(travel.store_server, 1), travel.notes.append)
    with travel.running() as mirror:
        are_equal = followed(travel, news, mirror, Path(other.path))
        for content in (b"first", b"second"):
            (mirror / "a").write_bytes(content)
            eventually(are_equal)
            (mirror / "a").unlink()
            (mirror / "a" / "deep").mkdir(parents=True)
            (mirror / "a" / "deep" / "x").write_bytes(content)
            eventually(are_equal)
            shutil.rmtree(mirror / "a")
    assert travel.notes == []
    other.close()


def test_another_folder_in_the_place_of_one_that_was_moved_is_followed(travel: Travel) -> None:
    for name in ("a/old", "a/deep/older"):
        (travel.store / name).parent.mkdir(parents=True, exist_ok=True)
        (travel.store / name).write_text(name)
    other, _ = travel.mirrored(1)
    news = StoreUpdater(other, wired(travel.store_server, 1), travel.notes.append)
    with travel.running() as mirror:
        (mirror / "a").rename(mirror / "b")
        (mirror / "a").mkdir()
        (mirror / "a" / "new").write_bytes(b"new")
        eventually(followed(travel, news, mirror, Path(other.path)))
    assert travel.notes == []
    other.close()


def test_a_removed_folder_is_removed_although_a_file_in_it_was_being_sent(travel: Travel) -> None:
    (travel.store / "out").mkdir()
    ask, removed = wired(travel.store_server), threading.Event()

    def removing(request: FileRequest[Any]) -> Any:
        if is_going_on(request) and not removed.is_set():
            shutil.rmtree(mirror / "out")
            removed.set()
        look_at = travel.outbound._due.get("out", 0.0)
        # Wait, so that the sender checks the folder before it sends the next piece of the file.
        eventually(lambda: time.monotonic() > look_at)
        return ask(request)

    with travel.running() as mirror:
        travel.outbound._sender._send_request = removing
        (mirror / "out" / "big.pt").write_bytes(os.urandom(20_000_000))
        assert removed.wait(HUNG_S)
        eventually(lambda: os.listdir(travel.store) == [])
    assert travel.notes == [] and travel.written == {}


def test_a_file_that_becomes_a_folder_before_it_is_read_is_not_refused(
    travel: Travel, tmp_path: Path
) -> None:
    ask = wired(travel.store_server)
    (tmp_path / "aside").mkdir()
    (tmp_path / "aside" / "big").write_bytes(os.urandom(1 << 20))

    def replacing(request: FileRequest[Any]) -> Any:
        if "out/big" in travel.outbound._sender.large and (mirror / "out" / "big").is_file():
            (mirror / "out" / "big").unlink()
            (mirror / "out" / "big").mkdir()
        return ask(request)

    with travel.running() as mirror:
        travel.outbound._sender._send_request = replacing
        # The first message contains the folder. The sender opens the file after this message.
        (tmp_path / "aside").rename(mirror / "out")
        eventually(lambda: (travel.store / "out" / "big").is_dir())
    assert travel.notes == [] and travel.refused == {}


def test_a_file_of_another_host_replaces_a_path_of_the_wrong_type(tmp_path: Path) -> None:
    travel = Travel(tmp_path, shared=("shards",))
    (travel.store / "shards").mkdir()
    mirror, _ = travel.mirrored(1)
    (Path(mirror.path) / "shards" / "x").write_bytes(b"a file here")
    ask = wired(travel.store_server)
    publish(ask, "shards/x/y", b"in a folder there")
    publish(ask, "shards/z", b"more")
    StoreUpdater(mirror, wired(travel.store_server, 1), travel.notes.append).catch_up()
    assert tree_of(Path(mirror.path, "shards")) == {
        "x": None,
        "x/y": b"in a folder there",
        "z": b"more",
    }
    assert travel.notes == []
    mirror.close()


def test_a_folder_with_a_hosts_own_files_stays_if_another_host_has_a_file_there(
    tmp_path: Path,
) -> None:
    travel = Travel(tmp_path, shared=("shards",))
    (travel.store / "shards" / "x").mkdir(parents=True)
    mirror, _ = travel.mirrored(1)
    mine = Path(mirror.path, "shards", "x", "mine")
    mine.write_bytes(b"not sent yet")
    ask = wired(travel.store_server)
    assert ask(WriteFiles(removed=["shards/x"])) == {}
    publish(ask, "shards/x", b"a file now")
    publish(ask, "shards/y", b"more")
    StoreUpdater(mirror, wired(travel.store_server, 1), travel.notes.append).catch_up()
    assert mine.read_bytes() == b"not sent yet"
    assert Path(mirror.path, "shards", "y").read_bytes() == b"more"
    assert [note.partition(" is a file")[0] for note in travel.notes] == ["shards/x"]
    mirror.close()


def test_received_changes_are_not_sent_back(tmp_path: Path) -> None:
    travel = Travel(tmp_path, shared=("shards",))
    (travel.store / "shards").mkdir()
    sent: list[str] = []
    ask = wired(travel.store_server)

    def spy(request: FileRequest[Any]) -> Any:
        sent.append(request.op())
        return ask(request)

    mirror, _ = travel.mirrored()
    mirror.close()
    with travel.running() as path:
        own = travel.outbound._mirror
        travel.outbound._sender._send_request = spy
        news = StoreUpdater(own, ask, travel.notes.append)
        big, small = os.urandom(600_000), b"small"
        other = wired(travel.store_server, 1)
        publish(other, "shards/small", small)
        publish(other, "shards/big", big)
        news.catch_up()
        assert (path / "shards" / "big").read_bytes() == big
    assert sent == []


def publish(ask: Any, path: str, content: bytes) -> None:
    entry = ManifestEntry(path, len(content), hashlib.sha256(content).hexdigest())
    assert ask(WriteFiles([FilePiece(entry, 0, content)])) == {}


def test_without_inotify_the_mirror_is_searched_at_intervals(
    travel: Travel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inotify._LIBC, "inotify_init1", lambda flags: -1)
    with travel.running() as mirror:
        (mirror / "out").mkdir()
        (mirror / "out" / "m.pt").write_bytes(b"one")
        eventually(reads(travel.store / "out/m.pt", b"one"))
        (mirror / "out" / "m.pt").unlink()
        eventually(lambda: not (travel.store / "out/m.pt").exists())


def test_a_flood_of_files_that_overflows_the_queue_arrives(travel: Travel) -> None:
    code = "for i in range(6000): open(str(i), 'w').close(); i < 5900 and os.unlink(str(i))"
    ask, go_on = wired(travel.store_server), threading.Event()

    def waiting(request: FileRequest[Any]) -> Any:
        assert go_on.wait(HUNG_S)
        return ask(request)

    with travel.running() as mirror:
        travel.outbound._sender._send_request = waiting
        (mirror / "first").touch()
        subprocess.run([sys.executable, "-c", f"import os\n{code}"], cwd=mirror, check=True)
        go_on.set()
        eventually(lambda: len(os.listdir(travel.store)) == 101)


@pytest.mark.fault(36)
def test_a_full_store_is_said_with_the_file(travel: Travel) -> None:
    """docs/faults.md 36: a note names the file if rank 0 runs on a host with its own mirror."""
    if os.geteuid() != 0:
        pytest.skip("a small disk takes root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", travel.store], check=True)
    try:
        full = Travel(travel.folder)
        (full.store / "old").write_text("old")
        with full.running() as mirror:
            (mirror / "big").write_bytes(os.urandom(3 << 20))
            (mirror / "old").write_bytes(os.urandom(200_000))
        assert list(full.refused) == ["big"]
        assert "big was not copied to the project store: No space left" in full.notes[0]
        assert set(os.listdir(full.store)) == {"old"}
        full.store_server.close()
    finally:
        travel.store_server.close()
        subprocess.run(["umount", travel.store], check=True)


BELIEVED = (
    ".bashrc",
    ".BashRC",
    ".profile",
    ".zshenv",
    ".ssh/authorized_keys",
    "authorized_keys",
    ".GIT/hooks/post-checkout",
    ".g\u200cit/config",
    ".git./config",
    "git~1/config",
    "sub/.git/hooks/post-merge",
    ".gitconfig",
    "taas.toml",
    "deep/Taas.TOML",
    ".taasignore",
    ".config/fish/config.fish",
    ".local/bin/python",
    "venv/lib/python3.11/site-packages/x.pth",
    "sitecustomize.py",
    ".env",
    "cache.bin",
)


@pytest.mark.fault(75)
def test_what_others_believe_never_comes_from_a_host(travel: Travel) -> None:
    """A hostile host sends files that tools would trust, such as .bashrc.

    The store server creates, changes and removes none of these files.
    """
    (travel.store / ".taasignore").write_text("cache.bin\n")
    (travel.store / ".bashrc").write_text("mine")
    (travel.store / "taas.toml").write_text("mine")
    store_server = StoreServer(travel.rule, travel.folder / "other-state")
    ask = wired(store_server)
    before = tree_of(travel.store)
    assert ask(WriteFiles([empty(path) for path in BELIEVED])).keys() == set(BELIEVED)
    assert ask(WriteFiles(removed=[*BELIEVED])).keys() == set(BELIEVED)
    assert ask(WriteFiles(folders(BELIEVED))).keys() == set(BELIEVED)
    for path in BELIEVED:
        assert ask(WriteFiles(in_two(path, b"ab"))).keys() == {path}
    assert tree_of(travel.store) == before
    store_server.close()


PATH_FILES = ("evil.pth", "deep/Evil.PTH", "e\u200cvil.p\u200cth", "evil.pth. ")


@pytest.mark.parametrize("name", PATH_FILES)
def test_a_pth_file_comes_from_a_host_only_if_it_is_a_checkpoint(travel: Travel, name: str) -> None:
    """docs/faults.md 75: Python runs code in .pth files of folders where it looks for packages."""
    ask = wired(travel.store_server)
    for content, is_refused in ((b"import os\n", True), (b"", True), (checkpoint(), False)):
        entry = ManifestEntry(name, len(content), hashlib.sha256(content).hexdigest())
        assert bool(ask(WriteFiles([FilePiece(entry, 0, content)]))) == is_refused
        for piece in (two := in_two(name, content)):
            assert bool(ask(WriteFiles([piece]))) == (is_refused and piece is two[-1])
        assert (travel.store / name).exists() != is_refused


def checkpoint() -> bytes:
    """Return the bytes of a file that torch.save writes."""
    file = io.BytesIO()
    torch.save({"weights": torch.ones(2)}, file)
    return file.getvalue()


@pytest.mark.fault(75)
def test_what_stays_on_the_host_is_named_once(travel: Travel) -> None:
    with travel.running() as mirror:
        (mirror / ".bashrc").write_text("evil")
        (mirror / ".profile").write_text("evil")
        (mirror / ".env").write_text("key")
        (mirror / "evil.pth").write_text("import evil")
        (mirror / "model.pth").write_bytes(checkpoint())
        eventually(reads(travel.store / "model.pth", checkpoint()))
    assert set(tree_of(travel.store)) == {"model.pth"}
    assert set(travel.refused) == {".bashrc", ".profile", ".env", "evil.pth"}
    assert len([note for note in travel.notes if "would trust it" in note]) == 1
    assert len([note for note in travel.notes if ".env was not copied" in note]) == 1
    assert len([note for note in travel.notes if "evil.pth was not copied" in note]) == 1
