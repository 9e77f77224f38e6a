"""A folder whose files are reached by descriptors alone, and how a file arrives in it.

A path is checked, then walked part by part (openat(2) with O_NOFOLLOW), so that a link, also one
that takes the place of a folder at the worst moment, ends the walk instead of leading it away.

A file that arrives is written beside its place, verified, and moved there in one step. The folder's
name is written down first; whoever opens the store next clears the folders on that list.
"""

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from taas_magic.store.mirror.paths import ARRIVING, why_astray

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class UnsafeError(OSError):
    """A path that may not be gone, or what lies there is no regular file; says which and why."""

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
        return stat.S_ISDIR(self.status.st_mode)

    @property
    def oddity(self) -> str:
        """What it is if it is neither a regular file nor a folder; else ""."""
        return "" if self.is_folder else oddity(self.status)


def oddity(status: os.stat_result) -> str:
    """What something is that is no regular file; "" for one."""
    kind = stat.S_IFMT(status.st_mode)
    return "" if kind == stat.S_IFREG else _KINDS.get(kind, "no regular file")


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
        os.close(self._descriptor)

    def __enter__(self) -> "Tree":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def folder(self, path: str, make: bool = False) -> Iterator[int]:
        """The descriptor of a folder; "" is the root.

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

    def open_file(self, path: str) -> int:
        """A descriptor to read a regular file.

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
        return descriptor

    def status(self, path: str) -> os.stat_result | None:
        """What lies at a path, itself; None if nothing does.

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
        """Makes a folder, and those that it lies in, where they are missing."""
        with self.folder(path, make=True):
            pass

    def flush_folder(self, path: str) -> None:
        """Forces a folder's own entries to the disk: what was moved into it stays there."""
        with suppress(FileNotFoundError), self.folder(path) as here:
            os.fsync(here)

    def remove(self, path: str) -> None:
        """Removes whatever is no folder; nothing where it is gone already."""
        folder, name = parted(path)
        with suppress(FileNotFoundError), self.folder(folder) as here:
            os.unlink(name, dir_fd=here)

    def remove_folder(self, path: str) -> bool:
        """Removes an empty folder; says whether it is gone now."""
        folder, name = parted(path)
        try:
            with self.folder(folder) as here:
                os.rmdir(name, dir_fd=here)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def entries(self, path: str) -> list[Seen]:
        """What lies directly in a folder, sorted; nothing where it is gone or not ours to read."""
        prefix = f"{path}/" if path else ""
        found = []
        with suppress(OSError), self.folder(path) as here, os.scandir(here) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found.append(Seen(prefix + entry.name, status))
        return sorted(found, key=lambda seen: seen.path)

    def walk(self, takes: Callable[[Seen], bool] = lambda seen: True) -> Iterator[Seen]:
        """All that `takes` takes; a folder comes before what lies in it."""
        folders = [""]
        while folders:
            below = []
            for seen in filter(takes, self.entries(folders.pop())):
                yield seen
                if seen.is_folder:
                    below.append(seen.path)
            folders += reversed(below)


def parted(path: str) -> tuple[str, str]:
    """The folder of a path and its last part.

    Raises:
        UnsafeError: The path is unsafe.
    """
    if why := why_astray(path):
        raise UnsafeError(path, why)
    folder, _, name = path.rpartition("/")
    return folder, name


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


def _refuse_odd(path: str, status: os.stat_result) -> None:
    if what := oddity(status):
        raise UnsafeError(path, what)


class DamagedError(OSError):
    """What arrived is not what was sent; names the file."""

    def __init__(self, path: str, size: int, received: int) -> None:
        what = f"{received:,} of {size:,} bytes" if received != size else "its hash differs"
        super().__init__(f"{path} was damaged on its way: {what}")


_BEGINS_BYTES = 16


class Arrival:
    """One file that arrives; `place` or `discard` ends it.

    Args:
        staging: Descriptor of a folder on the destination's file system, in which it is written.

    Attributes:
        received: How many bytes have come.
        begins: The first of them.
    """

    def __init__(self, staging: int) -> None:
        self._staging = os.dup(staging)
        self._name = ARRIVING + secrets.token_hex(8)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._file = os.open(self._name, flags, 0o666, dir_fd=self._staging)
        except OSError:
            os.close(self._staging)
            raise
        self._hash = hashlib.sha256()
        self.received, self.begins = 0, b""
        self._is_open = True

    def write(self, data: bytes) -> None:
        """Takes the file's next bytes.

        Raises:
            OSError: The disk is full; the arrival is to be discarded.
        """
        view = memoryview(data)
        self.begins = self.begins or bytes(view[:_BEGINS_BYTES])
        self._hash.update(view)
        self.received += len(view)
        while view:
            view = view[os.write(self._file, view) :]

    def verify(self, path: str, size: int, sha256: str) -> None:
        """Makes sure that all of it came as it was sent.

        Raises:
            DamagedError: It did not.
        """
        if self.received != size or self._hash.hexdigest() != sha256:
            raise DamagedError(path, size, self.received)

    def status(self) -> os.stat_result:
        """As it lies now; all but the time of the last change stays so when it is placed."""
        return os.fstat(self._file)

    def date(self, mtime_ns: int) -> None:
        os.utime(self._file, ns=(mtime_ns, mtime_ns))

    def flush(self) -> None:
        """Forces it to the disk, so that a power cut after it was placed leaves it whole."""
        os.fsync(self._file)

    def place(self, tree: Tree, path: str, *, executable: bool) -> None:
        """Moves it to its place, in the stead of the file that is there; an old file's mode stays.

        Args:
            tree: Where.
            path: Relative; its folder is there.
            executable: Whether it may be run.

        Raises:
            UnsafeError: The path is unsafe, or something that is no file is there.
            OSError: It cannot be written.
        """
        old = tree.status(path)
        if old is not None and (what := oddity(old)):
            raise UnsafeError(path, f"{what} of that name is there")
        folder, name = parted(path)
        os.fchmod(self._file, _mode(self.status(), old, executable))
        with tree.folder(folder) as here:
            os.replace(self._name, name, src_dir_fd=self._staging, dst_dir_fd=here)
        self._close()

    def discard(self) -> None:
        """Leaves nothing of it; of one that was placed or discarded, nothing changes."""
        if self._is_open:
            with suppress(FileNotFoundError):
                os.unlink(self._name, dir_fd=self._staging)
            self._close()

    def _close(self) -> None:
        self._is_open = False
        os.close(self._file)
        os.close(self._staging)


def _mode(new: os.stat_result, old: os.stat_result | None, executable: bool) -> int:
    """Permissions: the old file's, else what this process gives new files, with or without x."""
    mode = (old or new).st_mode & 0o777
    may_run = (mode & 0o444) >> 2
    return mode | may_run if executable else mode & ~0o111


def clear(staging: int) -> None:
    """Removes what arrivals in a folder have left that were killed."""
    for name in os.listdir(staging):
        if name.startswith(ARRIVING):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=staging)


class Intents:
    """The list of one store's folders.

    Args:
        file: The list; each path ends in a NUL.
        tree: The store.
    """

    def __init__(self, file: Path, tree: Tree) -> None:
        self._file, self._tree = file, tree
        self._listed: set[str] = set()

    def add(self, folder: str) -> None:
        """Before anything unfinished is put there."""
        if folder not in self._listed:
            with self._file.open("a", encoding="utf-8", newline="") as lines:
                lines.write(folder + "\0")
            self._listed.add(folder)

    def make_token(self) -> str:
        """Makes an empty file in the store's own folder; returns its name."""
        self.add("")
        name = ARRIVING + secrets.token_hex(8)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with self._tree.folder("") as here:
            os.close(os.open(name, flags, 0o600, dir_fd=here))
        return name

    def clear(self) -> None:
        """Removes what is unfinished, and then the list."""
        folders: list[str] = []
        with suppress(FileNotFoundError):
            folders = self._file.read_text(encoding="utf-8").split("\0")[:-1]
        for folder in folders:
            with suppress(OSError), self._tree.folder(folder) as here:
                clear(here)
        self._file.unlink(missing_ok=True)
        self._listed.clear()
