"""Which files of a project store belong to the user, and which to runs.

A host that does not share the store sends what rank 0 wrote. It may replace and remove files that
runs made and that nobody changed since. A file of the user stays: rank 0's version is kept beside
it. In the user's own folders a host makes no hidden files, programs and modules, as shells, tools
and Python find these there by themselves. `[store] overwrite` of taas.toml names exceptions.

What runs made is recorded in the state folder, never in the store.
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

from taas_magic.messages import pack, unpack
from taas_magic.shared_files import replacing
from taas_magic.store.tree import Tree, oddity

KEPT_BESIDE = ".from-host"
"""How the name ends under which rank 0's version of a user's file is kept."""

OVERWRITE = "[store] overwrite in taas.toml names files that hosts may write"
_YOURS = "no run made the file that is there, or it was changed since"
WHY_BESIDE = f"{_YOURS}: rank 0's is kept with {KEPT_BESIDE} at the end of its name; {OVERWRITE}"
WHY_NOT_KEPT = f"{_YOURS}, and so is the one with {KEPT_BESIDE} at its end; {OVERWRITE}"
WHY_NOT_REMOVED = f"{_YOURS}, so no host removes it; {OVERWRITE}"
WHY_NOT_NEW = f"a new hidden file, program, module or start-up file; {OVERWRITE}"

_DATA = re.compile(r"\.(?:metadata|z(?:array|attrs|group|metadata)|hydra|complete|done|success)")
"""Hidden names that libraries give to data: torch's checkpoints, zarr, Hydra, markers."""

_HIDDEN = re.compile(r"[._]netrc|\..+", re.DOTALL)

_CODE = re.compile(
    r".*\.(?:py[cdiow]?|so(?:\.[\d.]+)?|dylib|dll|exe|sh|bash|zsh|fish|command|ps1|bat|cmd|mk|cmake)",
    re.DOTALL,
)
"""Names of modules, libraries and scripts."""

_STARTS_BY_ITSELF = re.compile(
    r"(?:gnu)?makefile|justfile|rakefile|gemfile|vagrantfile|jenkinsfile|procfile|snakefile"
    r"|dockerfile.*|containerfile.*|(?:docker-)?compose\.ya?ml|cmakelists\.txt|meson\.build"
    r"|setup\.cfg|pyproject\.toml|tox\.ini|pytest\.ini|uv\.toml|pixi\.toml"
    r"|requirements.*\.txt|constraints.*\.txt|environment\.ya?ml|package\.json|cargo\.toml"
    r"|pip\.(?:conf|ini)",
    re.DOTALL,
)
"""Names by which tools find what they run or install in the folder that they are called in."""

_COLLECTED = re.compile(
    r"(?:conftest|sitecustomize|usercustomize|test_.*|.*_test)\.py[co]?|activate(?:[._].*)?"
    r"|activate\.d|deactivate\.d",
    re.DOTALL,
)
"""Names that pytest, Python, conda and virtual environments look for in every folder."""

_PROGRAM = (b"#!", b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
"""First bytes of a program: a script, and executables of Linux, Windows and macOS."""


def is_start_up(name: str, *, in_users_folder: bool) -> bool:
    """Return whether a new file or folder of a name may not come from a host.

    Args:
        name: As `manifest.known_as` has it.
        in_users_folder: Whether the user made the folder; a run may put code into its own folders.
    """
    if _COLLECTED.fullmatch(name):
        return True
    if not in_users_folder:
        return False
    hidden = _HIDDEN.fullmatch(name) and not _DATA.fullmatch(name)
    return bool(hidden or _CODE.fullmatch(name) or _STARTS_BY_ITSELF.fullmatch(name))


def is_program(begins: bytes) -> bool:
    """Return whether a file with these first bytes is one that the system can execute."""
    return begins.startswith(_PROGRAM)


class _Record(Struct, array_like=True):
    """What a run put at a path.

    Attributes:
        path: Relative to the store.
        key: Inode, bytes and time of the last change; None of a folder, or of what is gone.
        sha256: "" if it is not known.
        is_gone: Whether it was removed.
    """

    path: str
    key: tuple[int, int, int] | None = None
    sha256: str = ""
    is_gone: bool = False


class RunsFiles:
    """Files and folders that runs made in a store; each change is on disk at once.

    Args:
        folder: `state_folder` of the store.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "made-by-runs"
        self._lock = threading.Lock()
        self._known: dict[str, _Record] = {}
        n_lines = 0
        for n_lines, record in enumerate(_read(self._path), 1):  # noqa: B007
            if record.is_gone:
                self._known.pop(record.path, None)
            else:
                self._known[record.path] = record
        if n_lines > 2 * len(self._known) + 1000:
            with replacing(self._path) as file:
                file.writelines(_line(record) for record in self._known.values())

    def has_folder(self, path: str) -> bool:
        """Return whether a run made a folder."""
        known = self._known.get(path)
        return known is not None and known.key is None

    def has_file(self, tree: Tree, path: str, status: os.stat_result) -> bool:
        """Return whether a file is as a run left it.

        Its content is read only if the file was copied or touched.
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
        """Record a file before it is moved to its place: a kill leaves it known."""
        self._append(_Record(path, file_key(status), sha256))

    def record_folder(self, path: str) -> None:
        """Record a folder that a run makes."""
        self._append(_Record(path))

    def forget(self, path: str) -> None:
        """Record that a file or a folder is gone."""
        if path in self._known:
            self._append(_Record(path, is_gone=True))

    def record_written(self, store: str, paths: Iterable[str]) -> None:
        """Record what rank 0 wrote on a host that shares the store."""
        for path in paths:
            with suppress(OSError):
                status = os.lstat(os.path.join(store, path))
                if not oddity(status):
                    self.record_file(path, status)

    def _append(self, record: _Record) -> None:
        with self._lock:
            if record.is_gone:
                self._known.pop(record.path, None)
            else:
                self._known[record.path] = record
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with open(descriptor, "ab") as file:
                file.write(_line(record))


def file_key(status: os.stat_result) -> tuple[int, int, int]:
    """Return what tells a file from one that was changed or put in its place."""
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def _line(record: _Record) -> bytes:
    return pack(record) + b"\n"


def _read(path: Path) -> Iterator[_Record]:
    """Yield the records of a file; a line that a kill has cut is left out."""
    with suppress(FileNotFoundError):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                yield unpack(line, _Record)


class Exceptions:
    """What `[store] overwrite` lets hosts write: patterns in gitignore's language."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._spec = GitIgnoreSpec.from_lines(patterns)

    def has(self, path: str) -> bool:
        """Return whether hosts may write a path, whosever it is."""
        return self._spec.match_file(path)
