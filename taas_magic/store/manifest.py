"""Selection of the files to copy between hosts and the notebook, and the requests that copy them.

Version control, caches, secrets and the files named in `.taasignore` are copied neither to a host
nor back. Some files are executed, or read as settings, by shells, ssh, git, Python or this package.
The notebook's side never accepts such a file from a host. Some file systems ignore case and
invisible characters in names. So the rules for secrets and for executed files ignore both, too.

A `Manifest` lists all files of a store that are to be copied, with the hash of each regular file
(`Hashes`). Files are cut into pieces. The size of a message is adapted to the speed of the link and
is at most `CHUNK_BYTES`.

The requests that copy files of the store also copy files of the run folder (`FileRoot`). The rules
above do not apply to files of the run folder.

Both sides check paths: a host may be hostile, and the notebook's folder may contain names that are
impossible on a host.
"""

import hashlib
import os
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import Enum
from io import FileIO
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from msgspec import Struct, field
from pathspec import GitIgnoreSpec

from taas_magic.config import size_text
from taas_magic.errors import ProtocolError, StoreError
from taas_magic.messages import Request, from_json, to_json
from taas_magic.shared_files import replacing
from taas_magic.store.tree import ARRIVING, CaseChecker, Tree, TreeEntry, printable, why_unsafe

FILE_NAME = ".taasignore"
"""Name of the file in which the user lists files that are not copied to or from hosts."""

DEFAULTS = (
    ".git/",
    ".hg/",
    ".svn/",
    ".venv/",
    ".tox/",
    ".nox/",
    "__pycache__/",
    ".ipynb_checkpoints/",
    ".mypy_cache/",
    ".pytest_cache/",
    ".ruff_cache/",
    "node_modules/",
    ".DS_Store",
    ".nfs*",
    "*.taas-saving/",
    f"{ARRIVING}*",
)
"""Patterns of files that are not copied, in gitignore's syntax; `.taasignore` can override them."""

SECRETS = (
    r"\.ssh",
    r"\.aws",
    r"\.azure",
    r"\.gnupg",
    r"\.kube",
    r"\.docker",
    r"\.oci",
    r"\.kaggle",
    r"\.huggingface",
    r"\.password-store",
    r"\.env[^/]*",
    r"[._]netrc",
    r"\.git-credentials",
    r"\.pypirc",
    r"\.npmrc",
    r"\.pgpass",
    r"\.my\.cnf",
    r"\.s3cfg",
    r"\.boto",
    r"\.databrickscfg",
    r"\.vault-token",
    r"id_(?:rsa|dsa|ecdsa|ed25519)[^/]*",
    r"\.config/(?:gcloud|gh|hub|op|rclone|doctl)",
    r"\.cache/huggingface/(?:stored_)?tokens?",
)
"""Patterns of names of files and folders that may hold keys. They are not copied.

A line of `.taasignore` such as `!.env` makes an exception.
"""

RUN_BY_TOOLS = (
    r"\.git",
    r"git~\d+",
    r"\.git(?:config|modules|attributes)",
    r"\.hg",
    r"\.hgrc",
    r"\.svn",
    r"\.bash(?:rc|_profile|_login|_logout|_aliases)",
    r"\.(?:profile|login|logout|inputrc|[ck]shrc|tcshrc)",
    r"\.z(?:shrc|shenv|profile|login|logout)",
    r"\.x(?:profile|initrc|session|sessionrc|resources)",
    r"\.(?:vimrc|vim|exrc|emacs|emacs\.d|tmux\.conf|screenrc|selected_editor)",
    r"\.(?:config|local|ipython|jupyter|vscode|idea|pip|condarc|pythonrc(?:\.py)?|pdbrc)",
    r"authorized_keys2?",
    r"\.[rs]hosts",
    r"(?:site|dist)-packages",
    r"(?:site|user)customize\.py",
    r"pyvenv\.cfg",
    r"jupyter_[^/]*config\.(?:py|json)",
    r"ipython_config\.py",
    r"taas\.toml",
    r"\.taasignore",
)
"""Patterns of names of files and folders that tools run, or read as settings, by themselves."""

_TORCH_BEGINS = (b"PK\x03\x04", b"\x80")
"""First bytes of a file from `torch.save`: a zip archive, or a pickle from an old version."""

_IMPORT_LINE = re.compile(rb"[\n\r\v\f\x1c-\x1e\x85\xa8\xa9]import[ \t]")
"""Pattern of a line that begins with `import`, and of the separator before the line.

The separators are all bytes at which some version of Python splits a path file into lines.
"""

_OVERLAP_BYTES = 16


def _anywhere(patterns: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for paths in which a file or folder name matches any of `patterns`."""
    return re.compile(rf"(?:.*/)?(?:{'|'.join(patterns)})(?:/.*)?", re.DOTALL)


_SECRET, _RUN_BY_TOOLS = _anywhere(SECRETS), _anywhere(RUN_BY_TOOLS)


def is_run_by_tools(path: str) -> bool:
    """Return whether a tool would run the file at `path`, or read it as settings, by itself.

    The tools are shells, ssh, git, Python and this package. The result depends only on `path`. The
    store does not accept a file from a host if the result is True.
    """
    return _RUN_BY_TOOLS.fullmatch(normal_form(path)) is not None


class PathFileCheck:
    """Checker of an arriving file with the suffix `.pth`: is the file a checkpoint of torch?

    Python uses the same suffix for its path files. In a folder of installed packages, Python
    executes each line of a path file that begins with `import`.
    """

    def __init__(self) -> None:
        self._begins = self._end = b""
        self._has_import = False

    def add(self, data: bytes) -> None:
        """Check the next bytes of the file."""
        self._begins = self._begins or data[:_OVERLAP_BYTES]
        seen = self._end + data
        self._has_import = self._has_import or _IMPORT_LINE.search(seen) is not None
        self._end = seen[-_OVERLAP_BYTES:]

    @property
    def is_checkpoint(self) -> bool:
        """Whether the file begins as files of `torch.save` do, and has no line that Python runs."""
        return self._begins.startswith(_TORCH_BEGINS) and not self._has_import


def normal_form(path: str) -> str:
    """Return a normal form of `path`.

    Two paths have the same normal form if some file system treats them as the same file, for
    example a file system that ignores case.
    """
    seen = path.lower()
    if not path.isascii():
        seen = unicodedata.normalize("NFKC", path).casefold()
        seen = "".join(char for char in seen if unicodedata.category(char) != "Cf")
    return "/".join(part.rstrip(". ") for part in seen.split("/"))


class Ignore:
    """Patterns of files that are not copied to or from hosts.

    Args:
        lines: Lines of a `.taasignore`, in gitignore's syntax. They can override the defaults:
            with the line `!__pycache__/`, these folders are copied; with `!.env`, the file `.env`
            is copied. A general line such as `!*/` overrides no default.
    """

    def __init__(self, lines: Iterable[str] = ()) -> None:
        own = list(lines)
        broad = [at for at, line in enumerate(own, 1) if _includes_any_folder(line)]
        at = max(broad, default=0)
        self._spec = GitIgnoreSpec.from_lines([*own[:at], *DEFAULTS, *own[at:]])
        named = (line[1:] for line in own if line.startswith("!") and _is_secret(line[1:]))
        self._named = GitIgnoreSpec.from_lines(named)

    def is_secret(self, path: str) -> bool:
        """Return whether `path` may hold keys, and no `!` line of `.taasignore` names the path."""
        return _is_secret(path) and not any(self._named.match_file(it) for it in (path, path + "/"))

    def why_not_accepted(self, path: str) -> str:
        """Return why the store refuses a file at `path` from a host; "" if the store accepts it."""
        if self.is_secret(path):
            return "it may hold a secret"
        if is_run_by_tools(path):
            return "shells, ssh, git, Python or taas-magic would trust it"
        if _ALWAYS.leaves_out_any_kind(path):
            return "caches and version control are not copied"
        return f"{FILE_NAME} names it" if self.leaves_out_any_kind(path) else ""

    def leaves_out(self, path: str, folder: bool = False) -> bool:
        """Return whether an ignore rule matches `path` or a parent folder of `path`.

        Such a path is not copied. If the path is a folder, the folder is not searched.

        Args:
            path: Path relative to the store.
            folder: Whether the path is a folder.
        """
        if not folder:
            return self._spec.match_file(path)
        # For a folder, the spec's `match_file` lets `*` win over a later `!*/`. In git, the last
        # matching pattern wins, so look for this pattern here.
        matching = (it for it in reversed(self._spec.patterns) if it.match_file(path + "/"))
        return bool(getattr(next(matching, None), "include", False))

    def leaves_out_any_kind(self, path: str) -> bool:
        """Return whether `leaves_out` is true for `path` as a file, or for `path` as a folder.

        Use this method if the kind of the entry at `path` is unknown.
        """
        return self.leaves_out(path) or self.leaves_out(path, folder=True)


def _is_secret(path: str) -> bool:
    return _SECRET.fullmatch(normal_form(path)) is not None


def _includes_any_folder(line: str) -> bool:
    """Return whether a `!` line re-includes folders of any name, as `!*/`, `!*` and `!.*/` do."""
    spec = GitIgnoreSpec.from_lines([line[1:]] if line.startswith("!") else [])
    return any(map(spec.match_file, ("folder/", ".folder/")))


_ALWAYS = Ignore()


_FRESH_NS = 2_000_000_000
"""Nanoseconds after a change of a file in which the file's hash is not cached.

A second change in this time may leave the time stamp as it is, because NFS may store time stamps in
whole seconds. The change would then go unnoticed.
"""

_BLOCK_BYTES = 1 << 20

Key = tuple[int, int, int, int]
_NO_KEY = (0, 0, 0, 0)

FOLDER = "folder"
"""Value that is stored for a folder instead of a hash."""


class Hashes:
    """Cache of the SHA-256 hashes of files by path, and list of known folders.

    A hash is valid while the file's inode, size, mtime and ctime are unchanged, as in git's index.

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
        """Return the paths of all known files and folders."""
        return list(self._known)

    def hash_of(self, tree: Tree, tree_entry: TreeEntry) -> str:
        """Return the hash of a regular file; read the file only if it is new or has changed.

        Returns:
            The hash; `FOLDER` for a folder.

        Raises:
            OSError: The file cannot be read, or is no longer a regular file.
        """
        if tree_entry.is_folder:
            return FOLDER
        known = self._known.get(tree_entry.path)
        if known is not None and known[0] == _key(tree_entry.status):
            return known[1]
        with tree.open_file(tree_entry.path) as file:
            before = os.fstat(file.fileno())
            digest = hashlib.sha256()
            for block in blocks(file):
                digest.update(block)
            settled = time.time_ns() - max(before.st_ctime_ns, before.st_mtime_ns) > _FRESH_NS
            if settled and _key(before) == _key(os.fstat(file.fileno())):
                self.remember(tree_entry.path, digest.hexdigest(), before)
        return digest.hexdigest()

    def remember(self, path: str, sha256: str, status: os.stat_result | None = None) -> None:
        """Record the hash of a file, or a folder.

        Args:
            path: Path of the file or folder.
            sha256: Hash of the file, or `FOLDER`.
            status: Status of the file at the time of the hash; None for a folder.
        """
        self._known[path] = (_key(status) if status else _NO_KEY, sha256)

    def forget(self, path: str) -> None:
        """Remove a path from the cache. The next call of `hash_of` hashes its file again."""
        self._known.pop(path, None)

    def keep_only(self, paths: set[str]) -> None:
        """Remove all paths that are not in `paths`."""
        self._known = {path: known for path, known in self._known.items() if path in paths}

    def is_content(self, path: str, sha256: str) -> bool:
        """Return whether the last known hash at `path` is `sha256` (`FOLDER` for a folder)."""
        known = self._known.get(path)
        return known is not None and known[1] == sha256

    def is_same(self, path: str, status: os.stat_result) -> bool:
        """Return whether a file has the inode, size and mtime that were recorded with its hash.

        ctime is not compared, because a move changes a file's ctime.
        """
        known = self._known.get(path)
        return known is not None and known[0][:3] == _key(status)[:3]

    def save(self) -> None:
        """Write the cache to its file for the next run."""
        with replacing(self._file) as file:
            file.write(to_json([(path, *known) for path, known in self._known.items()]))


def blocks(file: FileIO) -> Iterator[bytes]:
    """Yield the content of a file in blocks of `_BLOCK_BYTES`."""
    while block := file.read(_BLOCK_BYTES):
        yield block


def _key(status: os.stat_result) -> Key:
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


MAX_FILES = 250_000
"""Maximum number of files that are copied to a host."""

_NAMED_AT_MOST = 5


class Entry(Struct, frozen=True, array_like=True):
    """One file or folder of a store, or a file of a run folder.

    Attributes:
        path: Path relative to the store or the run folder.
        size: Bytes; 0 for a folder.
        sha256: Hash of the file; `FOLDER` for a folder; "" for a file without a hash.
        executable: Whether the file's owner may execute it.
        mtime_ns: Time of the last change of the content.
    """

    path: str
    size: int
    sha256: str
    executable: bool = False
    mtime_ns: int = 0

    @classmethod
    def of(cls, tree_entry: TreeEntry, sha256: str) -> "Entry":
        """Make the entry of a file with the hash `sha256`. For a folder, `sha256` is ignored."""
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
            are not listed. The paths are printable (`printable`).
    """

    entries: list[Entry]
    skipped: dict[str, str]

    def safe(self) -> "Manifest":
        """Return a copy with unsafe paths moved to `skipped`, because the sender may be hostile."""
        unsafe = {it.path: why for it in self.entries if (why := why_unsafe(it.path))}
        return Manifest(
            [entry for entry in self.entries if entry.path not in unsafe],
            {**self.skipped, **{printable(path): why for path, why in unsafe.items()}},
        )


class ChangeList(Struct):
    """Changes of the store by hosts other than the one that asked (`ListChanges`), oldest first.

    Attributes:
        number: Number of the last change of any host; the next request passes it as `since`.
        entries: Changed files and folders as they are now. A path that was a file may now be a
            folder, and the other way round.
        removed: Paths that were removed; a folder comes after its contents.
    """

    number: int
    entries: list[Entry]
    removed: list[str]


def ignore_of(tree: Tree) -> Ignore:
    """Return the ignore rules of a store: the defaults, and its `.taasignore` if it has one.

    Raises:
        StoreError: A line of `.taasignore` is not a valid pattern.
    """
    lines: list[str] = []
    with suppress(FileNotFoundError), tree.open_file(FILE_NAME) as file:
        lines = file.read().decode(errors="replace").splitlines()
    try:
        return Ignore(lines)
    except ValueError as error:
        raise StoreError(f"{tree.root}/{FILE_NAME}: {error}") from error


def scan_store(tree: Tree, hashes: Hashes, limit_bytes: int) -> tuple[CaseChecker, Manifest]:
    """Search a store for all files and folders to copy to hosts, and hash the changed files.

    The manifest lists files that cannot be copied as skipped. A file that disappears during the
    search is left out. The search removes temporary files of killed writers
    (`Tree.remove_leftover`).

    Args:
        tree: The store.
        hashes: Known hashes. This function updates them.
        limit_bytes: Maximum total size of the files.

    Returns:
        A checker that knows all paths found, and the manifest.

    Raises:
        StoreError: The files are too large or too many, or a line of `.taasignore` is not a valid
            pattern.
    """
    ignore = ignore_of(tree)
    cases, skipped, secrets = CaseChecker(), dict[str, str](), list[str]()

    def includes(tree_entry: TreeEntry) -> bool:
        tree.remove_leftover(tree_entry.path)
        if ignore.leaves_out(tree_entry.path, tree_entry.is_folder):
            return False
        if ignore.is_secret(tree_entry.path):
            secrets.append(printable(tree_entry.path))
            return False
        why = why_unsafe(tree_entry.path) or tree_entry.special_kind
        if not why and (other := cases.clash(tree_entry.path)):
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
) -> Iterator[Entry]:
    for tree_entry in found:
        try:
            yield Entry.of(tree_entry, hashes.hash_of(tree, tree_entry))
        except FileNotFoundError:
            continue
        except OSError as error:
            skipped[tree_entry.path] = f"it cannot be read: {error.strerror}"


def _check_limit(files: list[TreeEntry], store: str, limit_bytes: int) -> None:
    """Raise StoreError if a store has too many files or bytes to be copied to hosts."""
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
    named = sizes.most_common(_NAMED_AT_MOST)
    return ", ".join(f"{name} {size_text(size, 1024)}" for name, size in named)


CHUNK_BYTES = 4 << 20
"""Maximum bytes of file content in one message, and in memory at a time for one file."""

MAX_PARTS = 1000
"""Maximum number of parts that one message requests, or of changes that one message carries.

The changes are pieces of files and removals.
"""

_FIRST_BYTES, _LEAST_BYTES = 1 << 18, 1 << 16
_QUICK_S, _SLOW_S = 0.25, 1.0

_T = TypeVar("_T")

Part = tuple[str, int, int]
"""Part of a file: path, offset in bytes, number of bytes."""


class FilePiece(Struct, frozen=True, array_like=True):
    """The next bytes of a file that is being sent, or a new folder.

    Attributes:
        entry: The file or folder. The hash of a file is "" in all pieces except the last. A file
            of the run folder has no hash; its last piece ends at `entry.size`.
        offset: Position of `data` in the file. A piece with offset 0 starts the file anew.
        data: Content; empty for a folder.
    """

    entry: Entry
    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """Position in the file after `data`."""
        return self.offset + len(self.data)


class FileRoot(Enum):
    """Folder on the notebook's machine that a `FileRequest` is about."""

    STORE = "store"
    """The project store."""

    RUN = "run"
    """The run folder. Its files have no hashes: they do not change while they are copied."""


class FileRequest(Request[_T], Generic[_T], kw_only=True):
    """Request of a host about files of the project store or the run folder.

    A host sends `MakeToken` to learn whether it shares the store with the notebook's machine. All
    other requests copy files of a folder that the host does not share. The requests to list, read
    and write files work for both folders. `MakeToken` and `ListChanges` work for the store only.

    Attributes:
        run_id: Id of the run, or of the run's fetchers; set by the agent.
        root: Folder of the request. Paths in the request are relative to this folder.
    """

    run_id: str = ""
    root: FileRoot = FileRoot.STORE

    def check_size(self) -> None:
        """Check that the request, or its response, is not too large for one message.

        Raises:
            ProtocolError: The request or its response is too large.
        """


class MakeToken(FileRequest[str]):
    """Request to make a marker file in the store; the response is the file's name.

    A host that sees the file shares the store. The notebook's side removes the file when the run
    ends.
    """


class ListFiles(FileRequest[Manifest | None]):
    """Request for the list of files to copy to the host.

    For the run folder, the response lists the files that the host's ranks or fetchers need. For the
    store, the response is the manifest from the last search of the store. The first request starts
    a search. While the store is being searched, the response is None, and the host must ask again.

    Attributes:
        fresh: Whether to search the store again, because a file differed from the last manifest.
    """

    fresh: bool = False


class ReadFiles(FileRequest[list[bytes | None]]):
    """Request for parts of files, which `ListFiles` or `ListChanges` must have listed before.

    The response has the bytes of each part, or None for a part that cannot be read.
    """

    parts: list[Part]

    def check_size(self) -> None:
        """See `FileRequest.check_size`."""
        size_bytes = sum(max(0, size) for _, _, size in self.parts)
        if len(self.parts) > MAX_PARTS or size_bytes > CHUNK_BYTES:
            raise ProtocolError(f"{self.op()}: too much at once")


class ListChanges(FileRequest[ChangeList]):
    """Request for the changes that other hosts have made after change number `since`.

    Attributes:
        since: `number` of the last `ChangeList`; 0 in the first request.
    """

    since: int


class WriteFiles(FileRequest[dict[str, str]]):
    """Request to apply a host's changes. The response has the reason for each refused path.

    Attributes:
        pieces: New content; a folder comes before its contents.
        removed: Files and folders to remove from the store, after all new files are in place. A
            folder comes after its contents. A folder that is not empty stays.
    """

    pieces: list[FilePiece] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    def check_size(self) -> None:
        """See `FileRequest.check_size`."""
        if sum(len(piece.data) for piece in self.pieces) > CHUNK_BYTES:
            raise ProtocolError(f"{self.op()}: too much at once")


class SendRequest(Protocol):
    """Function that sends a request to the notebook's side, and returns the response."""

    def __call__(self, request: FileRequest[_T]) -> _T:
        """Send a request, and block until the response arrives. Any thread may call this."""


class MessageSizer:
    """The size of messages, adapted to the speed of the link after each message.

    The run's logs and heartbeats use the same link, so no message may occupy a slow link for long.

    Attributes:
        size: Bytes of file content that the next message should carry.
    """

    def __init__(self) -> None:
        self.size = _FIRST_BYTES

    def send(self, send_request: SendRequest, request: FileRequest[_T]) -> _T:
        """Send a request, and adapt `size` to the time until the response arrived."""
        began = time.monotonic()
        answer = send_request(request)
        self.record_duration(time.monotonic() - began)
        return answer

    def record_duration(self, seconds: float) -> None:
        """Double `size` if the request took less than 0.25 s; halve `size` if it took over 1 s.

        Args:
            seconds: Time from the last request to its response.
        """
        if seconds < _QUICK_S:
            self.size = min(2 * self.size, CHUNK_BYTES)
        elif seconds > _SLOW_S:
            self.size = max(self.size // 2, _LEAST_BYTES)


def batches(entries: Iterable[Entry], sizer: MessageSizer) -> Iterator[list[Part]]:
    """Yield lists of parts of files; each list is for one `ReadFiles` request.

    The parts cover all files in `entries`, in order. The sizer limits the bytes of a list, and
    `MAX_PARTS` the number of parts.
    """
    batch: list[Part] = []
    room = sizer.size
    for entry in entries:
        offset = 0
        while True:
            size = min(entry.size - offset, room)
            batch.append((entry.path, offset, size))
            offset, room = offset + size, room - size
            if room == 0 or len(batch) == MAX_PARTS:
                yield batch
                batch, room = [], sizer.size
            if offset == entry.size:
                break
    if batch:
        yield batch
