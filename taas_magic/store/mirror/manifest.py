"""What of a project store travels: its regular files by hash, and its folders."""

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct

from taas_magic.errors import StoreError
from taas_magic.messages import pack, unpack
from taas_magic.store.mirror.paths import FILE_NAME, Cases, Ignore, shown, why_unsafe
from taas_magic.store.mirror.tree import Seen, Tree

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
        with suppress(OSError, ValueError):  # it is a cache: what is unreadable is new
            stored = unpack(file.read_bytes(), list[tuple[str, Key, str]])
            self._known = {path: (key, sha256) for path, key, sha256 in stored}

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
        beside.write_bytes(pack(rows))
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


MAX_FILES = 250_000
_NAMED_AT_MOST = 5


class Entry(Struct, frozen=True, array_like=True):
    """One file: where it lies, and what it is."""

    path: str
    size: int
    sha256: str
    executable: bool = False
    mtime_ns: int = 0

    @classmethod
    def of(cls, seen: Seen, sha256: str) -> "Entry":
        status = seen.status
        executable = bool(status.st_mode & 0o100)
        return cls(seen.path, status.st_size, sha256, executable, status.st_mtime_ns)


class Listing(Struct):
    """A `Manifest` as it travels."""

    files: list[Entry]
    folders: list[str]
    skipped: dict[str, str]


@dataclass(frozen=True)
class Manifest:
    """All that travels, and what does not though nobody asked for that.

    Attributes:
        files: By path.
        folders: Every folder, those before what lies in them.
        skipped: Why, by path as it can be shown.
    """

    files: Mapping[str, Entry]
    folders: tuple[str, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)

    def listing(self) -> Listing:
        """What a host is told of it."""
        return Listing([*self.files.values()], [*self.folders], dict(self.skipped))

    @classmethod
    def of(cls, listed: Listing) -> "Manifest":
        """The inverse of `listing`; what has an unsafe path is skipped, whoever sent it."""
        paths = (*(entry.path for entry in listed.files), *listed.folders)
        unsafe = {path: why for path in paths if (why := why_unsafe(path))}
        files = {entry.path: entry for entry in listed.files if entry.path not in unsafe}
        folders = tuple(path for path in listed.folders if path not in unsafe)
        named = {shown(path): why for path, why in unsafe.items()}
        return cls(files, folders, {**listed.skipped, **named})


class Change(Struct, frozen=True):
    """What a host has done to a path: a file that it wrote, a folder, or None for one gone."""

    number: int
    host_rank: int
    path: str
    entry: Entry | None
    is_folder: bool


class ChangeList(Struct):
    """What other hosts have changed, oldest first, and the number of the last change."""

    number: int
    changes: list[Change]


@dataclass
class Survey:
    """A tree as it was walked, nothing of it read yet."""

    files: list[Seen] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list)
    cases: Cases = field(default_factory=Cases)

    @property
    def size_bytes(self) -> int:
        return sum(seen.status.st_size for seen in self.files)


def ignore_of(tree: Tree) -> Ignore:
    """The rules of a store's own `.taasignore`, where it has one.

    Raises:
        StoreError: A line of it is no pattern.
    """
    lines: list[str] = []
    with suppress(FileNotFoundError), open(tree.open_file(FILE_NAME), errors="replace") as file:
        lines = file.read().splitlines()
    try:
        return Ignore(lines)
    except ValueError as error:
        raise StoreError(f"{tree.root}/{FILE_NAME}: {error}") from error


def survey(tree: Tree, ignore: Ignore) -> Survey:
    """Walks a tree; what cannot travel is left out, and said."""
    found = Survey()

    def takes(seen: Seen) -> bool:
        if ignore.leaves_out(seen.path, seen.is_folder):
            return False
        if ignore.is_secret(seen.path):
            found.secrets.append(seen.path)
            return False
        if why := _why_not(seen, found.cases):
            found.skipped[shown(seen.path)] = why
        return not why

    for seen in tree.walk(takes):
        if seen.is_folder:
            found.folders.append(seen.path)
        else:
            found.files.append(seen)
    if found.secrets:
        found.skipped = {shown(found.secrets[0]): _about(found.secrets)} | found.skipped
    return found


def _about(secrets: list[str]) -> str:
    more = f", like {len(secrets) - 1:,} more" if len(secrets) > 1 else ""
    return (
        f"it may hold a secret{more}; to take it along, write !{shown(secrets[0])} in {FILE_NAME}"
    )


def _why_not(seen: Seen, cases: Cases) -> str:
    if why := why_unsafe(seen.path) or seen.oddity:
        return why
    other = cases.clash(seen.path)
    return f"its name differs from {other} by case alone" if other else ""


def check_limit(found: Survey, store: str, limit_bytes: int) -> None:
    """Refuses what is too much to travel.

    Raises:
        StoreError: It is; names the biggest entries and what to do.
    """
    if found.size_bytes > limit_bytes:
        raise StoreError(
            f"the project store {store} is not on this pool's hosts, and its "
            f"{_size_text(found.size_bytes)} are more than the {_size_text(limit_bytes)} that may "
            f"travel: {_biggest(found.files)}. Name what the ranks do not need in "
            f"{store}/{FILE_NAME}, or raise [store] limit in taas.toml"
        )
    if len(found.files) > MAX_FILES:
        raise StoreError(
            f"the project store {store} is not on this pool's hosts, and its {len(found.files):,} "
            f"files are more than the {MAX_FILES:,} that may travel: name what the ranks do not "
            f"need in {store}/{FILE_NAME}, or put it into one file"
        )


def _biggest(files: list[Seen]) -> str:
    sizes: Counter[str] = Counter()
    for seen in files:
        top, slash, _ = seen.path.partition("/")
        sizes[top + slash] += seen.status.st_size
    named = sizes.most_common(_NAMED_AT_MOST)
    return ", ".join(f"{name} {_size_text(size)}" for name, size in named)


def describe(tree: Tree, found: Survey, hashes: Hashes) -> Manifest:
    """Hashes what has changed since the last time; a file that is gone meanwhile is left out."""
    files, skipped = {}, dict(found.skipped)
    for seen in found.files:
        try:
            files[seen.path] = Entry.of(seen, hashes.of(tree, seen))
        except FileNotFoundError:
            continue
        except OSError as error:
            skipped[seen.path] = f"it cannot be read: {error.strerror}"
    hashes.keep_only(set(files))
    return Manifest(files, tuple(found.folders), skipped)


def _size_text(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


@dataclass(frozen=True)
class Have:
    """What lies in the tree.

    Attributes:
        files: Entries of its regular files.
        folders: Its folders, outer ones first.
        odd: Paths of what is neither.
    """

    files: Mapping[str, Entry]
    folders: Sequence[str]
    odd: Sequence[str] = ()


@dataclass(frozen=True)
class Difference:
    """Steps, in the order of the fields.

    Attributes:
        blocking: To remove: they lie where a folder is to be.
        folders: To make; outer ones first.
        copies: Files whose content is in the tree already, with the path it is at.
        remove: What else the other tree has not.
        remove_folders: The same of folders; inner ones first.
        fetch: Files whose content must travel.
    """

    blocking: Sequence[str]
    folders: Sequence[str]
    copies: Sequence[tuple[Entry, str]]
    remove: Sequence[str]
    remove_folders: Sequence[str]
    fetch: Sequence[Entry]


def difference(have: Have, want: Manifest) -> Difference:
    """From what there is to what is wanted."""
    had, folders = set(have.folders), set(want.folders)
    at = {entry.sha256: path for path, entry in have.files.items()}
    wanted = [entry for entry in want.files.values() if not _is_there(entry, have)]
    copied = [entry.sha256 in at and entry.path not in had for entry in wanted]
    gone = [path for path in have.files if path not in want.files] + list(have.odd)
    return Difference(
        blocking=[path for path in gone if path in folders],
        folders=[path for path in want.folders if path not in had],
        copies=[(e, at[e.sha256]) for e, is_copy in zip(wanted, copied, strict=True) if is_copy],
        remove=[path for path in gone if path not in folders],
        remove_folders=[path for path in reversed(have.folders) if path not in folders],
        fetch=[entry for entry, is_copy in zip(wanted, copied, strict=True) if not is_copy],
    )


def _is_there(entry: Entry, have: Have) -> bool:
    mine = have.files.get(entry.path)
    return mine is not None and (mine.sha256, mine.executable) == (entry.sha256, entry.executable)
