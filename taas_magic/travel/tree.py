"""A folder whose files are reached by descriptors alone: no symbolic link is ever followed.

A path is checked, then walked part by part (openat(2) with O_NOFOLLOW), so that a link, also one
that takes the place of a folder at the worst moment, ends the walk instead of leading it away.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from taas_magic.travel.names import why_astray

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
