"""The list of a store's files and folders to copy to hosts, with the hash of each file.

A host may be hostile, and the store may contain names that are impossible on a host. So the
notebook's side and the host both check paths.
"""

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path

from msgspec import Struct

from taas_magic.config import size_text
from taas_magic.errors import StoreError
from taas_magic.messages import from_json, to_json
from taas_magic.shared_files import replace_atomically
from taas_magic.store.ignore import FILE_NAME, read_ignore_rules
from taas_magic.store.tree import CaseChecker, Tree, TreeEntry, printable, why_unsafe

FOLDER = "folder"
"""Value of `ManifestEntry.sha256` for a folder, which has no hash."""

MAX_FILES = 250_000
"""Maximum number of files that are copied to a host."""

_FRESH_NS = 2_000_000_000
"""Nanoseconds that must have passed since a file's last change before its hash is cached.

A second change shortly after the first may leave the file's time stamp unchanged, because NFS may
store time stamps in whole seconds. Then the cached hash would be wrong.
"""

_BLOCK_BYTES = 1 << 20

_MAX_LISTED = 5

Key = tuple[int, int, int, int]

_NO_KEY = (0, 0, 0, 0)


class ManifestEntry(Struct, frozen=True, array_like=True):
    """One file or folder of a store, or a file of a run folder.

    Attributes:
        path: Path relative to the store or the run folder.
        size: Size in bytes; 0 for a folder.
        sha256: Hash of the file; `FOLDER` for a folder; "" for a file without a hash.
        executable: Whether the file's owner may execute it.
        mtime_ns: Time of the last change of the content, in nanoseconds since 1970; 0 for a folder.
    """

    path: str
    size: int
    sha256: str
    executable: bool = False
    mtime_ns: int = 0

    @classmethod
    def of(cls, tree_entry: TreeEntry, sha256: str) -> "ManifestEntry":
        """Make the entry of a file or folder. For a folder, `sha256` is ignored."""
        status = tree_entry.status
        if tree_entry.is_folder:
            return cls(tree_entry.path, 0, FOLDER)
        executable = bool(status.st_mode & 0o100)
        return cls(tree_entry.path, status.st_size, sha256, executable, status.st_mtime_ns)

    @property
    def is_folder(self) -> bool:
        """Whether the entry is a folder."""
        return self.sha256 == FOLDER


class Manifest(Struct):
    """List of the files and folders of a store that are copied, and of those that cannot be copied.

    Attributes:
        entries: Files and folders to copy; a folder comes before its contents.
        skipped: For each path that cannot be copied, the reason. Paths that an ignore rule names
            are not listed. Bytes of a path that are not UTF-8 are escaped (`printable`).
    """

    entries: list[ManifestEntry]
    skipped: dict[str, str]

    def safe(self) -> "Manifest":
        """Return a copy in which unsafe paths are in `skipped` instead of in `entries`.

        For example, a path is unsafe if it leads out of the store. A host calls this method for
        each manifest that it receives, because the sender may be hostile.
        """
        unsafe = {it.path: why for it in self.entries if (why := why_unsafe(it.path))}
        return Manifest(
            [entry for entry in self.entries if entry.path not in unsafe],
            {**self.skipped, **{printable(path): why for path, why in unsafe.items()}},
        )


class ChangeList(Struct):
    """Response to `ListChanges`: changes that other hosts than the requesting host have made.

    Attributes:
        number: Number of the last change of any host; the next request passes it as `since`.
        entries: Changed files and folders as they are now, in the order of their changes. A file
            may have become a folder, and a folder may have become a file.
        removed: Paths that were removed; a folder comes after its contents.
    """

    number: int
    entries: list[ManifestEntry]
    removed: list[str]


class Hashes:
    """Cache of the hashes (SHA-256) of a store's or mirror's files, by path.

    The cache also lists folders, with `FOLDER` in place of a hash. A hash is valid while the file's
    inode, size, mtime and ctime are unchanged, as in git's index.

    Args:
        file: File that stores the cache between runs.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, tuple[Key, str]] = {}
        with suppress(OSError, ValueError):  # without the cache, every file is hashed again
            stored = from_json(file.read_bytes(), list[tuple[str, Key, str]])
            self._known = {path: (key, sha256) for path, key, sha256 in stored}

    def __contains__(self, path: str) -> bool:
        return path in self._known

    def paths(self) -> list[str]:
        """Return the paths of all files and folders in the cache."""
        return list(self._known)

    def hash_of(self, tree: Tree, tree_entry: TreeEntry) -> str:
        """Return the hash of a file, or `FOLDER` for a folder.

        The hash covers only the bytes that the file had when `tree_entry` was made, because a
        program may have appended more bytes since.

        If the cache has a valid hash, return it without reading the file. Otherwise, read the file.
        The new hash is cached only if the file did not change since `tree_entry` was made, and if
        the file's last change is older than `_FRESH_NS`.

        Raises:
            OSError: The file cannot be read, or is no longer a regular file.
        """
        if tree_entry.is_folder:
            return FOLDER
        known, status = self._known.get(tree_entry.path), tree_entry.status
        if known is not None and known[0] == _key(status):
            return known[1]
        settled = time.time_ns() - max(status.st_ctime_ns, status.st_mtime_ns) > _FRESH_NS
        with tree.open_file(tree_entry.path) as file:
            digest = hashlib.sha256()
            for block in blocks(file, status.st_size):
                digest.update(block)
            if settled and _key(status) == _key(os.fstat(file.fileno())):
                self.remember(tree_entry.path, digest.hexdigest(), status)
        return digest.hexdigest()

    def remember(self, path: str, sha256: str, status: os.stat_result | None = None) -> None:
        """Add a file with its hash, or a folder, to the cache.

        Args:
            path: Path of the file or folder.
            sha256: Hash of the file, or `FOLDER`.
            status: Status of the file when it was hashed; None for a folder.
        """
        self._known[path] = (_key(status) if status else _NO_KEY, sha256)

    def forget(self, path: str) -> None:
        """Remove a path from the cache, so that the next `hash_of` reads the file again."""
        self._known.pop(path, None)

    def keep_only(self, paths: set[str]) -> None:
        """Remove from the cache all paths that are not in `paths`."""
        self._known = {path: known for path, known in self._known.items() if path in paths}

    def has_hash(self, path: str, sha256: str) -> bool:
        """Return whether the cache has the hash `sha256` for `path`. Does not read the file.

        With `FOLDER` as `sha256`, return whether the cache lists a folder at `path`.
        """
        known = self._known.get(path)
        return known is not None and known[1] == sha256

    def is_same(self, path: str, status: os.stat_result) -> bool:
        """Return whether `status` has the inode, size and mtime that the cache has for the file.

        If the cache does not list the file, return False. ctime is not compared, because a move
        changes a file's ctime.
        """
        known = self._known.get(path)
        return known is not None and known[0][:3] == _key(status)[:3]

    def save(self) -> None:
        """Write the cache to its file, from which the next run reads it."""
        with replace_atomically(self._file) as file:
            file.write(to_json([(path, *known) for path, known in self._known.items()]))


def scan_store(tree: Tree, hashes: Hashes, limit_bytes: int) -> tuple[CaseChecker, Manifest]:
    """Search a store for all files and folders to copy to hosts, and hash the changed files.

    The manifest lists the files and folders to copy in `entries`. In `skipped`, it lists the paths
    that are not copied, with the reasons:

    - secrets (one item stands for all secrets)
    - special files
    - unsafe names, and names that differ from another name only by case
    - files that cannot be read

    The manifest does not list ignored files, and files that disappear during the search. The search
    removes temporary files that killed processes left in the store (`Tree.remove_leftover`).

    Args:
        tree: The store.
        hashes: Cache of hashes from earlier searches. This function adds new hashes, and removes
            all paths that the manifest does not list in `entries`.
        limit_bytes: Maximum total size of the files to copy.

    Returns:
        The set of all paths found, for finding names that differ only by case; and the manifest.

    Raises:
        StoreError: The files are too large or too many, or a line of `.taasignore` is not a valid
            pattern.
    """
    ignore = read_ignore_rules(tree)
    cases, skipped, secrets = CaseChecker(), dict[str, str](), list[str]()

    def includes(tree_entry: TreeEntry) -> bool:
        tree.remove_leftover(tree_entry.path)
        if ignore.leaves_out(tree_entry.path, tree_entry.is_folder):
            return False
        if ignore.is_secret(tree_entry.path):
            secrets.append(printable(tree_entry.path))
            return False
        why = why_unsafe(tree_entry.path) or tree_entry.special_kind
        if not why and (other := cases.find_clash_or_add(tree_entry.path)):
            why = f"its name differs from {other} only by case"
        if why:
            skipped[printable(tree_entry.path)] = why
        return not why

    found = list(tree.walk(includes))
    _check_limit(
        [tree_entry for tree_entry in found if not tree_entry.is_folder], tree.root, limit_bytes
    )
    if secrets:
        first, others = secrets[0], len(secrets) - 1
        more = f", like {others:,} more" if others else ""
        why = f"it may hold a secret{more}; to copy it, write !{first} in {FILE_NAME}"
        skipped = {first: why} | skipped
    entries = list(_hashed(tree, found, hashes, skipped))
    hashes.keep_only({entry.path for entry in entries})
    return cases, Manifest(entries, skipped)


def _hashed(
    tree: Tree, found: list[TreeEntry], hashes: Hashes, skipped: dict[str, str]
) -> Iterator[ManifestEntry]:
    for tree_entry in found:
        try:
            yield ManifestEntry.of(tree_entry, hashes.hash_of(tree, tree_entry))
        except FileNotFoundError:
            continue
        except OSError as error:
            skipped[tree_entry.path] = f"it cannot be read: {error.strerror}"


def _check_limit(files: list[TreeEntry], store: str, limit_bytes: int) -> None:
    """Raise StoreError if `files` are more than `MAX_FILES`, or larger than `limit_bytes` in total.

    Args:
        files: Files of a store that would be copied to hosts.
        store: Path of the store, for the message.
    """
    size_bytes = sum(tree_entry.status.st_size for tree_entry in files)
    if size_bytes > limit_bytes:
        raise StoreError(
            f"the project store {store} is not on this pool's hosts, and its "
            f"{size_text(size_bytes, 1024)} are more than the limit of copies, "
            f"{size_text(limit_bytes, 1024)}: {_biggest(files)}. Name the files that ranks do not "
            f"need in {store}/{FILE_NAME}, or raise [store] limit in taas.toml"
        )
    if len(files) > MAX_FILES:
        raise StoreError(
            f"the project store {store} is not on this pool's hosts, and its {len(files):,} "
            f"files are more than the limit of copies, {MAX_FILES:,}: name the files that ranks do "
            f"not need in {store}/{FILE_NAME}, or pack files into one"
        )


def _biggest(files: list[TreeEntry]) -> str:
    sizes: Counter[str] = Counter()
    for tree_entry in files:
        top, slash, _ = tree_entry.path.partition("/")
        sizes[top + slash] += tree_entry.status.st_size
    named = sizes.most_common(_MAX_LISTED)
    return ", ".join(f"{name} {size_text(size, 1024)}" for name, size in named)


def blocks(file: FileIO, size_bytes: int) -> Iterator[bytes]:
    """Yield the first `size_bytes` of a file in blocks of at most `_BLOCK_BYTES` (1 MiB).

    If the file is shorter, yield the whole file.
    """
    while block := file.read(min(_BLOCK_BYTES, size_bytes)):
        size_bytes -= len(block)
        yield block


def _key(status: os.stat_result) -> Key:
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
