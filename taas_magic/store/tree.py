"""A folder whose files are reached by descriptors alone, and how a file arrives in it.

A path is relative, its parts are joined by `/`. It is checked, then walked part by part (openat(2)
with O_NOFOLLOW), so that a link, also one that takes the place of a folder at the worst moment,
ends the walk instead of leading it away.

A file that arrives is written beside its place, verified, and moved there in one step. It is locked
until then: so whoever looks the store through next tells what a dead writer has left.
"""

import errno
import hashlib
import os
import secrets
import stat
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO

from taas_magic.shared_files import lock

MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 3500
"""Below PATH_MAX (4096), so that a mirror's own folder fits before it."""

ARRIVING = ".taas-arriving-"
"""How the name of a file begins that is on its way into a tree."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def why_astray(path: str) -> str:
    """Return why a path cannot be walked inside a tree; "" when it can."""
    if not path:
        return "it has no name"
    if "\0" in path:
        return "a NUL in its name"
    if path.startswith("/"):
        return "an absolute path"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "its path leads elsewhere"
    return ""


def why_unsafe(path: str) -> str:
    """Return why a path may not travel to another machine; "" when it may."""
    if why := why_astray(path):
        return why
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    too_long = len(encoded) > MAX_PATH_BYTES
    if too_long or any(len(part) > MAX_NAME_BYTES for part in encoded.split(b"/")):
        return "its name is too long"
    return ""


def shown(path: str) -> str:
    """Return a path as it can be printed and sent, whatever bytes its name is made of."""
    return path.encode(errors="backslashreplace").decode()


def parted(path: str) -> tuple[str, str]:
    """Return the folder of a path and its last part.

    Raises:
        UnsafeError: The path is unsafe.
    """
    if why := why_astray(path):
        raise UnsafeError(path, why)
    folder, _, name = path.rpartition("/")
    return folder, name


def folders_of(path: str) -> Iterator[str]:
    """Yield the folders that a path lies in, the inner ones first."""
    while path := path.rpartition("/")[0]:
        yield path


class Cases:
    """Finds paths that a file system which does not tell upper from lower case would take for one.

    Of two such paths the first one known is kept.
    """

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def clash(self, path: str) -> str:
        """Return the known path that this one differs from by case alone.

        Returns:
            "" if there is none, and then the path is known.
        """
        ends = [at for at, char in enumerate(path) if char == "/"] + [len(path)]
        prefixes = {_folded(path[:end]): path[:end] for end in ends}
        for folded, prefix in prefixes.items():
            other = self._known.get(folded, prefix)
            if other != prefix:
                return other
        self._known.update(prefixes)
        return ""

    def forget(self, path: str) -> None:
        """Forget a path that is gone; what lies below it must be forgotten on its own."""
        self._known.pop(_folded(path), None)


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", path).casefold()


class UnsafeError(OSError):
    """Raised for an unsafe path or what is no regular file; says which and why."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(errno.EPERM, why, path)
        self.why = why


@dataclass(frozen=True)
class Seen:
    """Something in a tree: its path and status."""

    path: str
    status: os.stat_result

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder, and no link to one."""
        return stat.S_ISDIR(self.status.st_mode)

    @property
    def oddity(self) -> str:
        """What it is if it is neither a regular file nor a folder; else ""."""
        return "" if self.is_folder else oddity(self.status)


def oddity(status: os.stat_result) -> str:
    """Return what something is that is no regular file; "" for one."""
    kind = stat.S_IFMT(status.st_mode)
    return "" if kind == stat.S_IFREG else _KINDS.get(kind, "no regular file")


def _refuse_odd(path: str, status: os.stat_result) -> None:
    if what := oddity(status):
        raise UnsafeError(path, what)


class Tree:
    """A folder, held open.

    Args:
        root: The folder's path, which may lead over links: it is the user's own word.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)
        self._descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        """Free the descriptor; nothing can be reached by it any more."""
        os.close(self._descriptor)

    @contextmanager
    def folder(self, path: str, make: bool = False) -> Iterator[int]:
        """Yield the descriptor of a folder; "" is the root.

        Args:
            path: Relative.
            make: Make it, and the folders that it lies in, if they are missing.

        Raises:
            UnsafeError: The path is unsafe, or leads over what is no folder.
            FileNotFoundError: It is not there.
        """
        if path and (why := why_astray(path)):
            raise UnsafeError(path, why)
        here = os.dup(self._descriptor)
        try:
            for part in path.split("/") if path else ():
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=here)
                below = _open_folder(part, here, path)
                os.close(here)
                here = below
            yield here
        finally:
            os.close(here)

    def open_file(self, path: str) -> FileIO:
        """Open a regular file to read it.

        Raises:
            UnsafeError: It is something else, or its path is unsafe.
            OSError: It is not there, or cannot be read.
        """
        folder, name = parted(path)
        with self.folder(folder) as here:
            _refuse_odd(path, os.stat(name, dir_fd=here, follow_symlinks=False))
            descriptor = os.open(name, _FILE, dir_fd=here)
        try:
            _refuse_odd(path, os.fstat(descriptor))
        except UnsafeError:
            os.close(descriptor)
            raise
        return FileIO(descriptor)

    def status(self, path: str) -> os.stat_result | None:
        """Return the status of what lies at a path, itself; None if nothing does.

        Raises:
            UnsafeError: The path is unsafe, or leads over a link.
        """
        folder, name = parted(path)
        try:
            with self.folder(folder) as here:
                return os.stat(name, dir_fd=here, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def make_folder(self, path: str) -> None:
        """Make a folder, and those that it lies in, where they are missing."""
        with self.folder(path, make=True):
            pass

    def flush_folder(self, path: str) -> None:
        """Force a folder's own entries to the disk: what was moved into it stays there."""
        with suppress(FileNotFoundError), self.folder(path) as here:
            os.fsync(here)

    def remove(self, path: str) -> bool:
        """Remove what lies at a path, a folder if it is empty; return whether nothing is there."""
        status, (folder, name) = self.status(path), parted(path)
        if status is None:
            return True
        remove = os.rmdir if stat.S_ISDIR(status.st_mode) else os.unlink
        try:
            with self.folder(folder) as here:
                remove(name, dir_fd=here)
        except FileNotFoundError:
            return True
        except OSError:
            if remove is os.unlink:
                raise
            return False  # something lies in it
        return True

    def remove_leftover(self, path: str) -> None:
        """Remove a file if it is an arrival whose writer is dead: nobody has its lock."""
        if path.rpartition("/")[2].startswith(ARRIVING):
            with suppress(OSError), self.open_file(path) as file:  # it is gone, or being written
                if lock(file.fileno(), shared=True):
                    self.remove(path)

    def entries(self, path: str) -> list[Seen]:
        """Return what lies in a folder, sorted; nothing where it is gone or not ours to read."""
        prefix = f"{path}/" if path else ""
        found = []
        with suppress(OSError), self.folder(path) as here, os.scandir(here) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found.append(Seen(prefix + entry.name, status))
        return sorted(found, key=lambda seen: seen.path)

    def walk(self, takes: Callable[[Seen], bool] = lambda seen: True) -> Iterator[Seen]:
        """Yield all that `takes` takes; a folder comes before what lies in it."""
        folders = [""]
        while folders:
            below = []
            for seen in filter(takes, self.entries(folders.pop())):
                yield seen
                if seen.is_folder:
                    below.append(seen.path)
            folders += reversed(below)


def _open_folder(part: str, here: int, path: str) -> int:
    try:
        return os.open(part, _FOLDER, dir_fd=here)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        kind = oddity(os.stat(part, dir_fd=here, follow_symlinks=False))
        if not kind:
            raise NotADirectoryError(errno.ENOTDIR, f"{part} is a file", path) from error
        raise UnsafeError(path, f"{part} on its path is {kind}") from error


class DamagedError(UnsafeError):
    """Raised where what arrived is not what was sent; names the file."""

    def __init__(self, path: str, size: int, received: int) -> None:
        what = f"{received:,} of {size:,} bytes" if received != size else "its hash differs"
        super().__init__(path, f"{path} was damaged on its way: {what}")


_BEGINS_BYTES = 16


class Arrival:
    """One file that arrives; `place` or `discard` ends it.

    Args:
        staging: Descriptor of a folder on the destination's file system, in which it is written.

    Attributes:
        name: Its name there until it is placed.
        file: Its descriptor.
        received: How many bytes have come.
        begins: The first of them.
    """

    def __init__(self, staging: int) -> None:
        self._staging = os.dup(staging)
        self.name = ARRIVING + secrets.token_hex(8)
        try:
            self.file = os.open(self.name, _NEW, 0o666, dir_fd=self._staging)
        except OSError:
            os.close(self._staging)
            raise
        with suppress(OSError):  # this file system has no locks: then leftovers stay
            lock(self.file, wait=True)
        self._hash = hashlib.sha256()
        self.received, self.begins = 0, b""
        self._is_open = True

    def write(self, data: bytes) -> None:
        """Take the file's next bytes.

        Raises:
            OSError: The disk is full; the arrival is to be discarded.
        """
        view = memoryview(data)
        self.begins += bytes(view[: _BEGINS_BYTES - len(self.begins)])
        self._hash.update(view)
        self.received += len(view)
        while view:
            view = view[os.write(self.file, view) :]

    def verify(self, path: str, size: int, sha256: str) -> None:
        """Make sure that all of it came as it was sent.

        Raises:
            DamagedError: It did not.
        """
        if self.received != size or self._hash.hexdigest() != sha256:
            raise DamagedError(path, size, self.received)

    def place(self, tree: Tree, path: str, *, executable: bool) -> None:
        """Move it to its place, in the stead of the file that is there; an old file's mode stays.

        Args:
            path: Relative; the folders that it lies in are made where they are missing.

        Raises:
            UnsafeError: The path is unsafe, or something that is no file is there.
            OSError: It cannot be written.
        """
        old = tree.status(path)
        if old is not None and (what := oddity(old)):
            raise UnsafeError(path, f"{what} of that name is there")
        # without an old file, the mode that this process gives new ones
        mode = (old or os.fstat(self.file)).st_mode & 0o777
        may_run = (mode & 0o444) >> 2
        os.fchmod(self.file, mode | may_run if executable else mode & ~0o111)
        folder, name = parted(path)
        with tree.folder(folder, make=True) as here:
            os.replace(self.name, name, src_dir_fd=self._staging, dst_dir_fd=here)
        self._close()

    def discard(self) -> None:
        """Leave nothing of it; do nothing to one that was placed or discarded."""
        if self._is_open:
            with suppress(FileNotFoundError):
                os.unlink(self.name, dir_fd=self._staging)
            self._close()

    def _close(self) -> None:
        self._is_open = False
        os.close(self.file)
        os.close(self._staging)
