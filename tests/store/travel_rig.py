"""Store of a run and its hosts' mirrors on one machine, with requests encoded as for a network."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from taas_magic.messages import from_bytes, to_bytes
from taas_magic.store.manifest import FOLDER, Manifest, ManifestEntry
from taas_magic.store.mirror import Mirror, reserve, update_mirror
from taas_magic.store.outbound import MirrorSender
from taas_magic.store.receipt import ReceiptBuilder
from taas_magic.store.requests import FileRequest, ListFiles, SendRequest
from taas_magic.store.rule import StoreRule
from taas_magic.store.server import StoreServer

_one_at_a_time = threading.Lock()
"""Lock for each request, because a store server serves one thread at a time (`FileServer`)."""


def wired(store_server: StoreServer, host_rank: int = 0) -> SendRequest:
    """Return a function that encodes a host's request and passes it to a store server.

    The function returns the server's answer, also encoded and decoded.
    """

    def ask(request: FileRequest[Any]) -> Any:
        asked = from_bytes(to_bytes(request), type(request))
        with _one_at_a_time:
            answer = store_server.answer(host_rank, asked)
        return request.read_answer(to_bytes(answer))

    return ask


class Travel:
    """Store of one run, with its server and the mirrors of its hosts.

    Args:
        limit_bytes: Maximum total size of the files to copy.
        shared: Folders that all ranks may write.
        overwrite: Patterns of the user's files that hosts may overwrite; all by default.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: int = 1 << 30,
        shared: tuple[str, ...] = (),
        overwrite: tuple[str, ...] = ("*",),
    ) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.store.mkdir(exist_ok=True)
        open_to_all = tuple(str(self.store / name) for name in shared)
        self.rule = StoreRule(
            str(self.store), shared=open_to_all, limit_bytes=limit_bytes, overwrite=overwrite
        )
        self.store_server = StoreServer(self.rule, folder / "state")
        self.receipt_builder = ReceiptBuilder(self.rule.path, self.rule.shared)
        self.notes: list[str] = []

    def look_again(self) -> None:
        """Make the store server list its files again, and wait until the list is complete."""
        listed = self.store_server.answer(0, ListFiles(fresh=True))
        while listed is None:
            threading.Event().wait(0.01)
            listed = self.store_server.answer(0, ListFiles())

    def host(self, number: int = 0) -> Mirror:
        """Reserve and return a mirror on the host with this number."""
        return reserve(self.rule.path, "me", self.folder / f"host-{number}")

    def mirrored(self, number: int = 0) -> tuple[Mirror, Manifest]:
        mirror = self.host(number)
        return mirror, update_mirror(mirror, wired(self.store_server, number))

    @property
    def written(self) -> dict[str, int]:
        """Size in bytes of each file that the store has accepted from hosts, by path."""
        return {
            file.path: file.bytes for file in self.receipt_builder.build(searches=False).written
        }

    @property
    def refused(self) -> dict[str, str]:
        """For each path that the store has refused from hosts, the reason."""
        return {file.path: file.why for file in self.receipt_builder.build(searches=False).not_sent}

    @contextmanager
    def running(self, number: int = 0, shared: tuple[str, ...] | None = None) -> Iterator[Path]:
        """Yield a host's mirror, and send changes in it to the store, as during a run.

        When the block ends, send all remaining changes.
        """
        mirror, _ = self.mirrored(number)
        ask = wired(self.store_server, number)
        self.outbound = MirrorSender(mirror, ask, self.notes.append, self.receipt_builder, shared)
        self.outbound.start()
        try:
            yield Path(mirror.path)
        finally:
            self.outbound.finish()
            mirror.close()


def files_of(manifest: Manifest) -> set[str]:
    """Return the paths of a manifest's files, without folders."""
    return {entry.path for entry in manifest.entries if not entry.is_folder}


def folder(path: str) -> ManifestEntry:
    """Return a manifest's entry for a folder."""
    return ManifestEntry(path, 0, FOLDER)


def tree_of(folder: Path) -> dict[str, bytes | None]:
    """Return the contents of a folder's files by path; None for folders, links and other files."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        if path.is_file() and not path.is_symlink()
        else None
        for path in sorted(folder.rglob("*"))
    }


def descriptors() -> int:
    """Return the number of this process's open file descriptors, after a garbage collection."""
    gc.collect()
    return psutil.Process().num_fds()
