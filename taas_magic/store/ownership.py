"""Rules that decide which files of a project store belong to the user, and which to runs.

A host with a mirror may replace or remove a file if a run made the file, and nobody has changed the
file since. All other files belong to the user. If rank 0 writes a file of the user, the store keeps
both versions. The name of rank 0's version ends with `KEPT_BESIDE`.

In the user's own folders, a host may not make hidden files, programs or modules. Shells, tools and
Python would use such files without being asked. `[store] overwrite` in taas.toml names exceptions.
"""

import hashlib
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from pathspec import GitIgnoreSpec

from taas_magic.messages import from_json, to_json
from taas_magic.shared_files import replace_atomically
from taas_magic.store.tree import Tree, special_kind

KEPT_BESIDE = ".from-host"
"""Suffix of rank 0's version of a user's file, which the store keeps beside the file."""

OVERWRITE = "[store] overwrite in taas.toml names files that hosts may write"
_YOURS = "the existing file is not from a run, or was changed since"
WHY_BESIDE = f"{_YOURS}: rank 0's file is kept as NAME{KEPT_BESIDE}; {OVERWRITE}"
WHY_NOT_KEPT = f"{_YOURS}, and the same is true of NAME{KEPT_BESIDE}; {OVERWRITE}"
WHY_NOT_REMOVED = f"{_YOURS}, so no host can remove it; {OVERWRITE}"
WHY_NOT_NEW = f"a new hidden file, program, module or start-up file; {OVERWRITE}"

_DATA = re.compile(r"\.(?:metadata|z(?:array|attrs|group|metadata)|hydra|complete|done|success)")
"""Names of hidden files that hosts may make: of torch, zarr and Hydra, and of marker files."""

_HIDDEN = re.compile(r"[._]netrc|\..+", re.DOTALL)

_CODE = re.compile(
    r".*\.(?:py[cdiow]?|so(?:\.[\d.]+)?|dylib|dll|exe|sh|bash|zsh|fish|command|ps1|bat|cmd|mk|cmake)",
    re.DOTALL,
)
"""Names of Python modules, shared libraries and scripts."""

_STARTS_BY_ITSELF = re.compile(
    r"(?:gnu)?makefile|justfile|rakefile|gemfile|vagrantfile|jenkinsfile|procfile|snakefile"
    r"|dockerfile.*|containerfile.*|(?:docker-)?compose\.ya?ml|cmakelists\.txt|meson\.build"
    r"|setup\.cfg|pyproject\.toml|tox\.ini|pytest\.ini|uv\.toml|pixi\.toml"
    r"|requirements.*\.txt|constraints.*\.txt|environment\.ya?ml|package\.json|cargo\.toml"
    r"|pip\.(?:conf|ini)",
    re.DOTALL,
)
"""Names of files, such as `makefile`, that a tool reads if the tool is started in their folder."""

_COLLECTED = re.compile(
    r"(?:conftest|sitecustomize|usercustomize|test_.*|.*_test)\.py[co]?|activate(?:[._].*)?"
    r"|activate\.d|deactivate\.d",
    re.DOTALL,
)
"""Names that pytest, Python, conda and virtual environments look for in every folder.

Hosts may not make files of these names, even in folders that belong to runs.
"""

_PROGRAM = (b"#!", b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
"""First bytes of a program: a script, and executables of Linux, Windows and macOS."""


def may_be_run_by_tools(name: str, *, in_users_folder: bool) -> bool:
    """Return whether a shell, Python or another tool may run a file of this name unasked.

    A host may make such a file in the project store only if `[store] overwrite` names the file.

    Args:
        name: Last part of the path, as normalized by `normal_form`.
        in_users_folder: Whether the folder of the file belongs to the user. In folders of runs,
            only names in `_COLLECTED` count, such as `conftest.py`.
    """
    if _COLLECTED.fullmatch(name):
        return True
    if not in_users_folder:
        return False
    hidden = _HIDDEN.fullmatch(name) and not _DATA.fullmatch(name)
    return bool(hidden or _CODE.fullmatch(name) or _STARTS_BY_ITSELF.fullmatch(name))


def is_program(begins: bytes) -> bool:
    """Return whether a file with these first bytes is a script or an executable program."""
    return begins.startswith(_PROGRAM)


class _Record(Struct, array_like=True):
    """Record of a file or folder that a run made or removed.

    Attributes:
        path: Path relative to the store.
        key: Inode, size and modification time of a file (`file_key`); None for a folder and for a
            removal.
        sha256: Hash of the file; "" if the hash is not known.
        is_gone: Whether the file or folder was removed.
    """

    path: str
    key: tuple[int, int, int] | None = None
    sha256: str = ""
    is_gone: bool = False


class RunFileRecord:
    """Record of the files and folders that runs made in a store; kept in a file for later runs.

    Args:
        folder: The store's state folder. Each change is appended immediately to a file there.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "made-by-runs"
        self._lock = threading.Lock()
        self._known: dict[str, _Record] = {}
        n_lines = 0
        for n_lines, record in enumerate(_read_records(self._path), 1):  # noqa: B007
            if record.is_gone:
                self._known.pop(record.path, None)
            else:
                self._known[record.path] = record
        if n_lines > 2 * len(self._known) + 1000:
            with replace_atomically(self._path) as file:
                file.writelines(_line(record) for record in self._known.values())

    def has_folder(self, path: str) -> bool:
        """Return whether a run made the folder `path`."""
        known = self._known.get(path)
        return known is not None and known.key is None

    def has_file(self, tree: Tree, path: str, status: os.stat_result) -> bool:
        """Return whether a run made the file, and nobody has changed its content since then.

        If inode, size and modification time are as recorded, the file counts as unchanged. If the
        size differs, or if no hash was recorded, the file counts as changed. In all other cases,
        the file's hash decides.

        Raises:
            OSError: The file must be read for its hash, and cannot be read.
        """
        known = self._known.get(path)
        if known is None or known.key is None:
            return False
        if known.key == file_key(status):
            return True
        if not known.sha256 or known.key[1] != status.st_size:
            return False
        digest = hashlib.sha256()
        with tree.open_file(path) as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest() == known.sha256

    def record_file(self, path: str, status: os.stat_result, sha256: str = "") -> None:
        """Record that a run made the file `path`.

        Call this before an arrived file is moved to `path`. Then the record has every file of a
        run, even if this process is killed.
        """
        self._append(_Record(path, file_key(status), sha256))

    def record_folder(self, path: str) -> None:
        """Record that a run makes the folder `path`."""
        self._append(_Record(path))

    def forget(self, path: str) -> None:
        """Record that a file or folder of a run was removed; do nothing for any other path."""
        if path in self._known:
            self._append(_Record(path, is_gone=True))

    def record_written(self, store: str, paths: Iterable[str]) -> None:
        """Record the files that rank 0 wrote on a host that shares the store.

        Skip paths at which no regular file is, and files for which any step raises OSError.

        Args:
            paths: Paths relative to the store.
        """
        for path in paths:
            with suppress(OSError):
                status = os.lstat(os.path.join(store, path))
                if not special_kind(status):
                    self.record_file(path, status)

    def _append(self, record: _Record) -> None:
        """Add a record to the list in memory and to the file, while holding the lock.

        If the record says that a file or folder was removed, add the record only to the file, and
        remove the path from the list in memory.
        """
        with self._lock:
            if record.is_gone:
                self._known.pop(record.path, None)
            else:
                self._known[record.path] = record
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with open(descriptor, "ab") as file:
                file.write(_line(record))


def file_key(status: os.stat_result) -> tuple[int, int, int]:
    """Return the inode number, size and modification time of a file.

    Normally, each change of the file alters at least one of these three values.
    """
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def _line(record: _Record) -> bytes:
    return to_json(record) + b"\n"


def _read_records(path: Path) -> Iterator[_Record]:
    """Yield the records in a file; skip lines that a killed process left incomplete."""
    with suppress(FileNotFoundError):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                yield from_json(line, _Record)


class OverwriteRules:
    """Patterns of files that a host with a mirror may make or replace: `[store] overwrite`.

    The host may do so even if a file belongs to the user, or if a tool may run the file unasked.

    Args:
        patterns: Patterns in gitignore's syntax.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._spec = GitIgnoreSpec.from_lines(patterns)

    def has(self, path: str) -> bool:
        """Return whether a pattern of `[store] overwrite` matches `path`."""
        return self._spec.match_file(path)
