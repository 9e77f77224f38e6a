"""Hashes of a tree's files, remembered as long as the file has not changed."""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from taas_magic.travel.tree import Seen, Tree

_FRESH_NS = 2_000_000_000
"""A file that changed so recently may change again without a new time stamp: NFS counts seconds."""

_BLOCK_BYTES = 1 << 20

Key = tuple[int, int, int, int]


class Hashes:
    """SHA-256 by path, valid while inode, size and both times are the same (git's index does so).

    Args:
        file: Where they are kept between runs.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, tuple[Key, str]] = {}
        with suppress(OSError, ValueError, TypeError):  # it is a cache: what is unreadable is new
            stored = json.loads(file.read_text())
            self._known = {path: (_four(key), sha256) for path, key, sha256 in stored}

    def __contains__(self, path: str) -> bool:
        return path in self._known

    def paths(self) -> list[str]:
        return list(self._known)

    def of(self, tree: Tree, seen: Seen) -> str:
        """The hash of a regular file; reads it only if it is new or has changed.

        Raises:
            OSError: It cannot be read, or is a regular file no more.
        """
        known = self._known.get(seen.path)
        if known is not None and known[0] == _key(seen.status):
            return known[1]
        descriptor = tree.open_file(seen.path)
        try:
            before = os.fstat(descriptor)
            sha256 = hash_of(descriptor)
            settled = time.time_ns() - max(before.st_ctime_ns, before.st_mtime_ns) > _FRESH_NS
            if settled and _key(before) == _key(os.fstat(descriptor)):
                self.remember(seen.path, before, sha256)
        finally:
            os.close(descriptor)
        return sha256

    def remember(self, path: str, status: os.stat_result, sha256: str) -> None:
        self._known[path] = (_key(status), sha256)

    def forget(self, path: str) -> None:
        self._known.pop(path, None)

    def keep_only(self, paths: set[str]) -> None:
        self._known = {path: known for path, known in self._known.items() if path in paths}

    def is_content(self, path: str, sha256: str) -> bool:
        """Whether the file's content was that when it was last looked at."""
        known = self._known.get(path)
        return known is not None and known[1] == sha256

    def is_same(self, path: str, status: os.stat_result) -> bool:
        """Whether a file is the known one, but for when it was moved to its place."""
        known = self._known.get(path)
        return known is not None and known[0][:3] == _key(status)[:3]

    def save(self) -> None:
        """Keeps them for the next run."""
        beside = self._file.with_suffix(".new")
        rows = [(path, *known) for path, known in self._known.items()]
        beside.write_text(json.dumps(rows, separators=(",", ":")))
        os.replace(beside, self._file)


def hash_of(descriptor: int) -> str:
    """The SHA-256 of a whole file, in hexadecimal."""
    digest = hashlib.sha256()
    for block in blocks(descriptor, _BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


def blocks(descriptor: int, size: int) -> Iterator[bytes]:
    """A file from its beginning, in blocks."""
    offset = 0
    while block := os.pread(descriptor, size, offset):
        yield block
        offset += len(block)


def _key(status: os.stat_result) -> Key:
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _four(key: list[int]) -> Key:
    inode, size, mtime_ns, ctime_ns = key
    return (inode, size, mtime_ns, ctime_ns)
