"""What of a project store travels: its regular files by hash, and its folders."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from taas_magic.errors import StoreError
from taas_magic.travel.hashes import Hashes
from taas_magic.travel.ignore import FILE_NAME, Ignore
from taas_magic.travel.names import Cases, shown, why_unsafe
from taas_magic.travel.tree import Seen, Tree

MAX_FILES = 250_000
_NAMED_AT_MOST = 5


@dataclass(frozen=True)
class Entry:
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

    def to_wire(self) -> list[Any]:
        return [self.path, self.size, self.sha256, self.executable, self.mtime_ns]


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

    def to_wire(self) -> dict[str, Any]:
        return {
            "files": [entry.to_wire() for entry in self.files.values()],
            "folders": list(self.folders),
            "skipped": dict(self.skipped),
        }

    @classmethod
    def from_wire(cls, values: Mapping[str, Any]) -> "Manifest":
        """The inverse of `to_wire`; what has an unsafe path is skipped, whoever sent it."""
        skipped = dict(values["skipped"])
        entries = [Entry(*fields) for fields in values["files"]]
        for path in (*(entry.path for entry in entries), *values["folders"]):
            if why := why_unsafe(path):
                skipped[shown(path)] = why
        files = {entry.path: entry for entry in entries if not why_unsafe(entry.path)}
        folders = tuple(path for path in values["folders"] if not why_unsafe(path))
        return cls(files, folders, skipped)


@dataclass
class Survey:
    """A tree as it was walked, nothing of it read yet."""

    files: list[Seen] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
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
        if why := _why_not(seen, found.cases):
            found.skipped[shown(seen.path)] = why
        return not why

    for seen in tree.walk(takes):
        if seen.is_folder:
            found.folders.append(seen.path)
        else:
            found.files.append(seen)
    return found


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
