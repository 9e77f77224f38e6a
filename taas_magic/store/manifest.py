"""What of a project store travels between the notebook's machine and a host, and how.

Version control, caches, secrets and what `.taasignore` names stay; what shells, ssh, git, Python or
this package would believe never comes from a host. Case and invisible characters tell no names
apart here: file systems may not tell them either. Of the rest, regular files are known by their
hash (`Hashes`), and all that lies in a store is its `Manifest`. Files are cut into pieces, of which
a message carries so many as the link bears, at most `CHUNK_BYTES`.
Paths are checked on both sides: a host may be hostile to the notebook, and the notebook's tree may
hold names that a host cannot have.
"""

import hashlib
import os
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from msgspec import Struct, field
from pathspec import GitIgnoreSpec

from taas_magic.config import size_text
from taas_magic.errors import StoreError
from taas_magic.messages import Request, pack, unpack
from taas_magic.shared_files import replacing
from taas_magic.store.tree import ARRIVING, Cases, Seen, Tree, shown, why_unsafe

FILE_NAME = ".taasignore"

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
"""Names of files and folders that hold keys, as patterns."""

BELIEVED = (
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
"""Names of what runs, or changes what runs, without being asked; as patterns."""

_TORCH_BEGINS = (b"PK\x03\x04", b"\x80")
"""First bytes of what `torch.save` writes: a zip archive, or a pickle in its older format."""

_IMPORT_LINE = re.compile(rb"[\n\r\v\f\x1c-\x1e\x85\xa8\xa9]import[ \t]")
"""A line, as any version of Python divides a text into lines."""

_OVERLAP_BYTES = 16


def _anywhere(patterns: Iterable[str]) -> re.Pattern[str]:
    """Match such a name anywhere on a path, and all that lies below it."""
    return re.compile(rf"(?:.*/)?(?:{'|'.join(patterns)})(?:/.*)?", re.DOTALL)


_SECRET, _BELIEVED = _anywhere(SECRETS), _anywhere(BELIEVED)


def is_believed(path: str) -> bool:
    """Return whether a shell, ssh, git, Python or this package would believe a file at a path."""
    return _BELIEVED.fullmatch(known_as(path)) is not None


class PathFileCheck:
    """Looks through a `.pth` file as it arrives; checkpoints have the same suffix.

    Python runs the lines of one that begin with `import`, where it looks for packages.
    """

    def __init__(self) -> None:
        self._begins = self._end = b""
        self._has_import = False

    def add(self, data: bytes) -> None:
        """Look through the next bytes of the file."""
        self._begins = self._begins or data[:_OVERLAP_BYTES]
        seen = self._end + data
        self._has_import = self._has_import or _IMPORT_LINE.search(seen) is not None
        self._end = seen[-_OVERLAP_BYTES:]

    @property
    def is_checkpoint(self) -> bool:
        """Whether `torch.save` wrote it, and Python would find no line to run in it."""
        return self._begins.startswith(_TORCH_BEGINS) and not self._has_import


def known_as(path: str) -> str:
    """Return a path as the file system sees it that tells the fewest names apart."""
    seen = path.lower()
    if not path.isascii():
        seen = unicodedata.normalize("NFKC", path).casefold()
        seen = "".join(char for char in seen if unicodedata.category(char) != "Cf")
    return "/".join(part.rstrip(". ") for part in seen.split("/"))


class Ignore:
    """Patterns of what stays where it is.

    Args:
        lines: Of a `.taasignore`, in gitignore's language; they come after the defaults, so that
            `!__pycache__/` takes one back, and `!.env` a secret. `!*/` takes back neither: what
            is the user's own must be named.
    """

    def __init__(self, lines: Iterable[str] = ()) -> None:
        own = list(lines)
        broad = [at for at, line in enumerate(own, 1) if _takes_any_folder_back(line)]
        at = max(broad, default=0)
        self._spec = GitIgnoreSpec.from_lines([*own[:at], *DEFAULTS, *own[at:]])
        named = (line[1:] for line in own if line.startswith("!") and _is_secret(line[1:]))
        self._named = GitIgnoreSpec.from_lines(named)

    def is_secret(self, path: str) -> bool:
        """Return whether a path is, or lies in, what holds keys; unless the user named it."""
        return _is_secret(path) and not any(self._named.match_file(it) for it in (path, path + "/"))

    def why_not_back(self, path: str) -> str:
        """Return why what a host wrote does not come into the store; "" when it does."""
        if self.is_secret(path):
            return "it may hold a secret"
        if is_believed(path):
            return "shells, ssh, git, Python or taas-magic would believe it"
        if _ALWAYS.leaves_out_within(path):
            return "caches and version control do not travel"
        return f"{FILE_NAME} names it" if self.leaves_out_within(path) else ""

    def leaves_out(self, path: str, folder: bool = False) -> bool:
        """Return whether a path stays; of a folder that does, nothing in it is looked at."""
        if not folder:
            return self._spec.match_file(path)
        # to the spec, `*` outdoes `!*/`, as it does for what lies in the folder
        matching = (it for it in reversed(self._spec.patterns) if it.match_file(path + "/"))
        return bool(getattr(next(matching, None), "include", False))

    def leaves_out_within(self, path: str) -> bool:
        """Return whether a path, or a folder that it lies in, stays."""
        return self.leaves_out(path) or self.leaves_out(path, folder=True)


def _is_secret(path: str) -> bool:
    return _SECRET.fullmatch(known_as(path)) is not None


def _takes_any_folder_back(line: str) -> bool:
    """Return whether a line is one like `!*/`, `!*` or `!.*/`, which names no folder."""
    spec = GitIgnoreSpec.from_lines([line[1:]] if line.startswith("!") else [])
    return any(map(spec.match_file, ("folder/", ".folder/")))


_ALWAYS = Ignore()


_FRESH_NS = 2_000_000_000
"""A file that changed so recently may change again without a new time stamp: NFS counts seconds."""

_BLOCK_BYTES = 1 << 20

Key = tuple[int, int, int, int]
_NO_KEY = (0, 0, 0, 0)

FOLDER = "folder"
"""What stands for a folder where a file has its hash."""


class Hashes:
    """SHA-256 of files by path, and folders that are known.

    A hash is valid while inode, size and both times are the same (git's index does so).

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
        """Return the paths of which a hash is known."""
        return list(self._known)

    def of(self, tree: Tree, seen: Seen) -> str:
        """Return the hash of a regular file; reads it only if it is new or has changed.

        Returns:
            `FOLDER` of a folder.

        Raises:
            OSError: It cannot be read, or is a regular file no more.
        """
        if seen.is_folder:
            return FOLDER
        known = self._known.get(seen.path)
        if known is not None and known[0] == _key(seen.status):
            return known[1]
        with tree.open_file(seen.path) as file:
            before = os.fstat(file.fileno())
            digest = hashlib.sha256()
            for block in blocks(file):
                digest.update(block)
            settled = time.time_ns() - max(before.st_ctime_ns, before.st_mtime_ns) > _FRESH_NS
            if settled and _key(before) == _key(os.fstat(file.fileno())):
                self.remember(seen.path, digest.hexdigest(), before)
        return digest.hexdigest()

    def remember(self, path: str, sha256: str, status: os.stat_result | None = None) -> None:
        """Take down what lies at a path: a folder, or a file, which is as `status` says."""
        self._known[path] = (_key(status) if status else _NO_KEY, sha256)

    def forget(self, path: str) -> None:
        """Hash the file anew when it is asked for next."""
        self._known.pop(path, None)

    def keep_only(self, paths: set[str]) -> None:
        """Forget all other paths."""
        self._known = {path: known for path, known in self._known.items() if path in paths}

    def is_content(self, path: str, sha256: str) -> bool:
        """Return whether the file's content, or a folder, was that when it was last looked at."""
        known = self._known.get(path)
        return known is not None and known[1] == sha256

    def is_same(self, path: str, status: os.stat_result) -> bool:
        """Return whether a file is the known one, but for when it was moved to its place."""
        known = self._known.get(path)
        return known is not None and known[0][:3] == _key(status)[:3]

    def save(self) -> None:
        """Keep them for the next run."""
        with replacing(self._file) as file:
            file.write(pack([(path, *known) for path, known in self._known.items()]))


def blocks(file: FileIO) -> Iterator[bytes]:
    """Yield a file, in blocks."""
    while block := file.read(_BLOCK_BYTES):
        yield block


def _key(status: os.stat_result) -> Key:
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


MAX_FILES = 250_000
_NAMED_AT_MOST = 5


class Entry(Struct, frozen=True, array_like=True):
    """One file or folder: where it lies, and what it is.

    Attributes:
        sha256: Of a folder `FOLDER`.
    """

    path: str
    size: int
    sha256: str
    executable: bool = False
    mtime_ns: int = 0

    @classmethod
    def of(cls, seen: Seen, sha256: str) -> "Entry":
        """Return the entry of a regular file with that hash, or of a folder."""
        status = seen.status
        if seen.is_folder:
            return cls(seen.path, 0, FOLDER)
        executable = bool(status.st_mode & 0o100)
        return cls(seen.path, status.st_size, sha256, executable, status.st_mtime_ns)

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return self.sha256 == FOLDER


class Manifest(Struct):
    """All that travels, and what does not though nobody asked for that.

    Attributes:
        entries: In the order of a walk: a folder comes before what lies in it.
        skipped: Why, by path as it can be shown.
    """

    entries: list[Entry]
    skipped: dict[str, str]

    def safe(self) -> "Manifest":
        """Return this with what has an unsafe path among the skipped, whoever sent it."""
        unsafe = {it.path: why for it in self.entries if (why := why_unsafe(it.path))}
        return Manifest(
            [entry for entry in self.entries if entry.path not in unsafe],
            {**self.skipped, **{shown(path): why for path, why in unsafe.items()}},
        )


class ChangeList(Struct):
    """What other hosts have changed, oldest first.

    Attributes:
        number: Of the last change.
        entries: Files and folders as they are now: one may be of another kind than before.
        removed: Files and folders that are gone, inner ones first.
    """

    number: int
    entries: list[Entry]
    removed: list[str]


def ignore_of(tree: Tree) -> Ignore:
    """Return the rules of a store's own `.taasignore`, where it has one.

    Raises:
        StoreError: A line of it is no pattern.
    """
    lines: list[str] = []
    with suppress(FileNotFoundError), tree.open_file(FILE_NAME) as file:
        lines = file.read().decode(errors="replace").splitlines()
    try:
        return Ignore(lines)
    except ValueError as error:
        raise StoreError(f"{tree.root}/{FILE_NAME}: {error}") from error


def look_through(tree: Tree, hashes: Hashes, limit_bytes: int) -> tuple[Cases, Manifest]:
    """Return what a store has, as it travels; what a kill left unfinished is removed.

    What cannot travel is left out, and said. Only what has changed since the last time is hashed;
    a file that is gone meanwhile is left out.

    Raises:
        StoreError: It is too much to travel; names the biggest entries and what to do. Or a line of
            `.taasignore` is no pattern.
    """
    ignore = ignore_of(tree)
    cases, skipped, secrets = Cases(), dict[str, str](), list[str]()

    def takes(seen: Seen) -> bool:
        tree.remove_leftover(seen.path)
        if ignore.leaves_out(seen.path, seen.is_folder):
            return False
        if ignore.is_secret(seen.path):
            secrets.append(shown(seen.path))
            return False
        why = why_unsafe(seen.path) or seen.oddity
        if not why and (other := cases.clash(seen.path)):
            why = f"its name differs from {other} by case alone"
        if why:
            skipped[shown(seen.path)] = why
        return not why

    found = list(tree.walk(takes))
    _check_limit([seen for seen in found if not seen.is_folder], tree.root, limit_bytes)
    if secrets:
        first, others = secrets[0], len(secrets) - 1
        more = f", like {others:,} more" if others else ""
        why = f"it may hold a secret{more}; to take it along, write !{first} in {FILE_NAME}"
        skipped = {first: why} | skipped
    entries = list(_hashed(tree, found, hashes, skipped))
    hashes.keep_only({entry.path for entry in entries})
    return cases, Manifest(entries, skipped)


def _hashed(
    tree: Tree, found: list[Seen], hashes: Hashes, skipped: dict[str, str]
) -> Iterator[Entry]:
    for seen in found:
        try:
            yield Entry.of(seen, hashes.of(tree, seen))
        except FileNotFoundError:
            continue
        except OSError as error:
            skipped[seen.path] = f"it cannot be read: {error.strerror}"


def _check_limit(files: list[Seen], store: str, limit_bytes: int) -> None:
    size_bytes = sum(seen.status.st_size for seen in files)
    if size_bytes > limit_bytes:
        raise StoreError(
            f"the project store {store} is not on this pool's hosts, and its "
            f"{size_text(size_bytes, 1024)} are more than the {size_text(limit_bytes, 1024)} that "
            f"may travel: {_biggest(files)}. Name what the ranks do not need in "
            f"{store}/{FILE_NAME}, or raise [store] limit in taas.toml"
        )
    if len(files) > MAX_FILES:
        raise StoreError(
            f"the project store {store} is not on this pool's hosts, and its {len(files):,} "
            f"files are more than the {MAX_FILES:,} that may travel: name what the ranks do not "
            f"need in {store}/{FILE_NAME}, or put it into one file"
        )


def _biggest(files: list[Seen]) -> str:
    sizes: Counter[str] = Counter()
    for seen in files:
        top, slash, _ = seen.path.partition("/")
        sizes[top + slash] += seen.status.st_size
    named = sizes.most_common(_NAMED_AT_MOST)
    return ", ".join(f"{name} {size_text(size, 1024)}" for name, size in named)


CHUNK_BYTES = 4 << 20
"""What one message carries at most; and what is in memory of a file at a time."""

MAX_PARTS = 1000
_FIRST_BYTES, _LEAST_BYTES = 1 << 18, 1 << 16
_QUICK_S, _SLOW_S = 0.25, 1.0

_T = TypeVar("_T")

Part = tuple[str, int, int]
"""Path, offset, bytes."""


class Piece(Struct, frozen=True, array_like=True):
    """The next bytes of a file; or a folder that was made.

    Attributes:
        entry: The file; its hash is "" while more follows.
        offset: Of the bytes; 0 begins the file anew.
    """

    entry: Entry
    offset: int
    data: bytes


class FileRequest(Request[_T], Generic[_T], kw_only=True):
    """What a host asks of a run's folder, or of the project store, where it does not share them.

    Attributes:
        run_id: The run, or its fetchers; the agent says it.
    """

    run_id: str = ""


class ListRunFiles(FileRequest[dict[str, int]]):
    """Tell the bytes of each file that a host needs for its ranks and fetchers, by its name."""


class ReadRunFile(FileRequest[bytes]):
    """Give a part of such a file."""

    name: str
    offset: int
    size: int


class WriteRunFile(FileRequest[None]):
    """Take a part of a result, a log or a ledger; with the last part the file is there."""

    name: str
    offset: int
    data: bytes
    last: bool


class MakeToken(FileRequest[str]):
    """Make a file that is in the store until the run ends: who sees it shares the store."""


class ListStore(FileRequest[Manifest | None]):
    """Tell what travels to every host, as the store was when the first one asked.

    The answer is None while the store is being looked through: a host must ask again.

    Attributes:
        fresh: Look again, since something was not as it said.
    """

    fresh: bool = False


class ReadStore(FileRequest[list[bytes | None]]):
    """Give parts of files that are in the list or in the news; None is what cannot be read."""

    parts: list[Part]


class ListChanges(FileRequest[ChangeList]):
    """Tell what other hosts have changed after a change."""

    since: int


class PublishFiles(FileRequest[dict[str, str]]):
    """Take over what a host has changed; answered by why, by path, of what is refused.

    Attributes:
        pieces: Folders come before what lies in them.
        removed: Files and folders that are gone there, inner ones first; they go after all that is
            new is in its place, and a folder in which something lies stays.
    """

    pieces: list[Piece] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)


class Ask(Protocol):
    """Asks the desk."""

    def __call__(self, request: FileRequest[_T]) -> _T:
        """Block until the desk has answered; any thread may call it."""


class Pace:
    """How much one message should carry: so little that it never fills a slow link for long.

    What watches over the run, its logs and its leases, goes the same way.

    Attributes:
        size: Bytes.
    """

    def __init__(self) -> None:
        self.size = _FIRST_BYTES

    def ask(self, ask: Ask, request: FileRequest[_T]) -> _T:
        """Ask, and let the time that it takes decide how much is asked next."""
        began = time.monotonic()
        answer = ask(request)
        self.took(time.monotonic() - began)
        return answer

    def took(self, seconds: float) -> None:
        """Take down how long a message was on its way."""
        if seconds < _QUICK_S:
            self.size = min(2 * self.size, CHUNK_BYTES)
        elif seconds > _SLOW_S:
            self.size = max(self.size // 2, _LEAST_BYTES)


def batches(entries: Iterable[Entry], pace: Pace) -> Iterator[list[Part]]:
    """Yield what to ask for, message by message; the parts of a file come in order."""
    batch: list[Part] = []
    room = pace.size
    for entry in entries:
        offset = 0
        while True:
            size = min(entry.size - offset, room)
            batch.append((entry.path, offset, size))
            offset, room = offset + size, room - size
            if room == 0 or len(batch) == MAX_PARTS:
                yield batch
                batch, room = [], pace.size
            if offset == entry.size:
                break
    if batch:
        yield batch
