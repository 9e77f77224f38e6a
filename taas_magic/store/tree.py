"""Access to the files below a folder without following links, and atomic writing of received files.

Paths are relative, with parts joined by `/`. A path is opened part by part (openat(2) with
O_NOFOLLOW). So an access through a symbolic link fails, even if somebody replaces a folder by a
link during the access.

An arriving file is written under a temporary name, verified, and moved to its path in one step.
Until the move, the writer holds a lock on the file. A later search of the store removes temporary
files without a lock.
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
"""Maximum bytes of a relative path; below PATH_MAX (4096) to leave space for a mirror's path."""

ARRIVING = ".taas-arriving-"
"""Prefix of the temporary name of an arriving file."""

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


def why_invalid(path: str) -> str:
    """Return why a path is invalid or may lead out of its root folder; "" if it is safe."""
    if not path:
        return "it has no name"
    if "\0" in path:
        return "its name contains a NUL"
    if path.startswith("/"):
        return "an absolute path"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "its path leads elsewhere"
    return ""


def why_unsafe(path: str) -> str:
    """Return why a path must not be copied to another machine; "" if it may be copied.

    Unlike `why_invalid`, this function also refuses names that are not UTF-8 or are too long.
    """
    if why := why_invalid(path):
        return why
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    too_long = len(encoded) > MAX_PATH_BYTES
    if too_long or any(len(part) > MAX_NAME_BYTES for part in encoded.split(b"/")):
        return "its name is too long"
    return ""


def printable(path: str) -> str:
    """Return a printable form of a path, with backslash escapes for bytes that are not UTF-8."""
    return path.encode(errors="backslashreplace").decode()


def split_path(path: str) -> tuple[str, str]:
    """Return the parent folder and the last part of a path.

    Raises:
        UnsafeError: The path is invalid, or may lead out of a tree.
    """
    if why := why_invalid(path):
        raise UnsafeError(path, why)
    folder, _, name = path.rpartition("/")
    return folder, name


def folders_of(path: str) -> Iterator[str]:
    """Yield the folders that contain `path`, innermost first, without the root."""
    while path := path.rpartition("/")[0]:
        yield path


class CaseChecker:
    """Set of paths of a tree in which no two paths differ only by case.

    Some file systems treat such paths as the same path, and cannot store both.
    """

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def find_clash_or_add(self, path: str) -> str:
        """Add `path` and its parent folders to the set, unless one of them clashes.

        Two paths clash if they differ only by case.

        Returns:
            The path in the set that clashes; "" if there is none, and `path` was added.
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
        """Remove `path` from the set. Paths below `path` stay."""
        self._known.pop(_folded(path), None)


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", path).casefold()


class UnsafeError(OSError):
    """Error for a path that must not be used, for example because no regular file is there.

    The attribute `why` has the reason as text.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(errno.EPERM, why, path)
        self.why = why


@dataclass(frozen=True)
class TreeEntry:
    """Path and status (`os.lstat`) of a file, a folder or another entry of a tree."""

    path: str
    status: os.stat_result

    @property
    def is_folder(self) -> bool:
        """Whether the entry is a folder, and not a link to a folder."""
        return stat.S_ISDIR(self.status.st_mode)

    @property
    def special_kind(self) -> str:
        """Kind of a special entry, such as "a FIFO"; "" for a regular file or a folder."""
        return "" if self.is_folder else special_kind(self.status)


def special_kind(status: os.stat_result) -> str:
    """Return the kind of an entry, such as "a folder" or "a FIFO"; "" for a regular file."""
    kind = stat.S_IFMT(status.st_mode)
    return "" if kind == stat.S_IFREG else _KINDS.get(kind, "no regular file")


def _refuse_special(path: str, status: os.stat_result) -> None:
    if what := special_kind(status):
        raise UnsafeError(path, what)


class Tree:
    """A folder held open by a descriptor, with access to its files that follows no links.

    Args:
        root: Path of the folder. Symbolic links in this path are followed.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)
        self._descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the descriptor of the folder."""
        os.close(self._descriptor)

    @contextmanager
    def folder(self, path: str, make: bool = False) -> Iterator[int]:
        """Yield the descriptor of a folder; close it at the end. Follow no links below the root.

        Args:
            path: Relative path; "" for the root.
            make: Whether to make the folder and its parents if they are missing.

        Raises:
            UnsafeError: The path is unsafe, or one of its parts is a link or another special file.
            NotADirectoryError: One of its parts is a file.
            FileNotFoundError: A folder is missing, and `make` is False.
        """
        if path and (why := why_invalid(path)):
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
        """Open a regular file for reading. Follow no links.

        Raises:
            UnsafeError: The path is unsafe, or the entry is not a regular file.
            OSError: The file does not exist, or cannot be read.
        """
        folder, name = split_path(path)
        with self.folder(folder) as here:
            _refuse_special(path, os.stat(name, dir_fd=here, follow_symlinks=False))
            descriptor = os.open(name, _FILE, dir_fd=here)
        try:
            _refuse_special(path, os.fstat(descriptor))
        except UnsafeError:
            os.close(descriptor)
            raise
        return FileIO(descriptor)

    def status(self, path: str) -> os.stat_result | None:
        """Return the status of the entry at `path`; None if there is no entry. Follow no links.

        Raises:
            UnsafeError: The path is unsafe, or one of its parent folders is a link.
        """
        folder, name = split_path(path)
        try:
            with self.folder(folder) as here:
                return os.stat(name, dir_fd=here, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def make_folder(self, path: str) -> None:
        """Make a folder and its parents if they are missing."""
        with self.folder(path, make=True):
            pass

    def flush_folder(self, path: str) -> None:
        """Force a folder's list of entries to the disk, so that the list survives a power cut."""
        with suppress(FileNotFoundError), self.folder(path) as here:
            os.fsync(here)

    def remove(self, path: str) -> bool:
        """Remove a file or an empty folder.

        Returns:
            True if nothing is at the path now; False if a folder there is not empty and stays.

        Raises:
            OSError: A file is at the path, and cannot be removed.
        """
        status, (folder, name) = self.status(path), split_path(path)
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
            return False  # the folder is not empty
        return True

    def remove_leftover(self, path: str) -> None:
        """Remove `path` if it is a temporary file of an `IncomingFile` whose writer has ended."""
        if path.rpartition("/")[2].startswith(ARRIVING):
            with suppress(OSError), self.open_file(path) as file:  # the file may be gone by now
                if lock(file.fileno(), shared=True):
                    self.remove(path)

    def entries(self, path: str) -> list[TreeEntry]:
        """Return a folder's entries, sorted by path; [] if the folder is missing or unreadable."""
        prefix = f"{path}/" if path else ""
        found = []
        with suppress(OSError), self.folder(path) as here, os.scandir(here) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found.append(TreeEntry(prefix + entry.name, status))
        return sorted(found, key=lambda tree_entry: tree_entry.path)

    def walk(
        self, includes: Callable[[TreeEntry], bool] = lambda tree_entry: True
    ) -> Iterator[TreeEntry]:
        """Yield all entries for which `includes` is true; a folder comes before its contents.

        Folders for which `includes` is false are not searched.
        """
        folders = [""]
        while folders:
            below = []
            for tree_entry in filter(includes, self.entries(folders.pop())):
                yield tree_entry
                if tree_entry.is_folder:
                    below.append(tree_entry.path)
            folders += reversed(below)


def _open_folder(part: str, here: int, path: str) -> int:
    """Open a folder, and return its descriptor. Follow no link.

    Args:
        part: Name of the folder.
        here: Descriptor of the folder that contains it.
        path: The whole path, for messages.

    Raises:
        UnsafeError: A link or another special file has this name.
        NotADirectoryError: A regular file has this name.
    """
    try:
        return os.open(part, _FOLDER, dir_fd=here)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        kind = special_kind(os.stat(part, dir_fd=here, follow_symlinks=False))
        if not kind:
            raise NotADirectoryError(errno.ENOTDIR, f"{part} is a file", path) from error
        raise UnsafeError(path, f"{part} on its path is {kind}") from error


class DamagedError(UnsafeError):
    """Error for an arrived file that differs from the file that was sent."""

    def __init__(self, path: str, size: int, received: int) -> None:
        what = f"{received:,} of {size:,} bytes" if received != size else "its hash differs"
        super().__init__(path, f"{path} was damaged in transit: {what}")


_BEGINS_BYTES = 16


class IncomingFile:
    """A file that is being received under a temporary name.

    The caller must end with `move_to` or `discard`.

    Args:
        staging: Descriptor of the folder in which the file is written, on the destination's file
            system.

    Attributes:
        name: Temporary name in the staging folder.
        file: Descriptor of the file.
        begins: The first bytes received, at most `_BEGINS_BYTES`.
    """

    def __init__(self, staging: int) -> None:
        self._staging = os.dup(staging)
        self.name = ARRIVING + secrets.token_hex(8)
        try:
            self.file = os.open(self.name, _NEW, 0o666, dir_fd=self._staging)
        except OSError:
            os.close(self._staging)
            raise
        with suppress(OSError):  # without locks on this file system, leftovers are not removed
            lock(self.file, wait=True)
        self._hash = hashlib.sha256()
        self.received, self.begins = 0, b""
        self._is_open = True

    def write(self, data: bytes) -> None:
        """Append the file's next bytes.

        Raises:
            OSError: The bytes cannot be written. The caller must call `discard`.
        """
        view = memoryview(data)
        self.begins += bytes(view[: _BEGINS_BYTES - len(self.begins)])
        self._hash.update(view)
        self.received += len(view)
        while view:
            view = view[os.write(self.file, view) :]

    def verify(self, path: str, size: int, sha256: str) -> None:
        """Raise DamagedError unless the file has the size and hash that the sender has named.

        Args:
            path: Path of the file, for the message.
        """
        if self.received != size or self._hash.hexdigest() != sha256:
            raise DamagedError(path, size, self.received)

    def move_to(self, tree: Tree, path: str, *, executable: bool) -> None:
        """Move the file to `path`, and replace an old file there.

        The new file keeps the old file's permissions for reading and writing. At the end, close the
        file, which releases its lock.

        Args:
            path: Relative path; missing parent folders are made.
            executable: Whether users who may read the file may also execute it.

        Raises:
            UnsafeError: The path is unsafe, or the entry at the path is not a regular file.
        """
        old = tree.status(path)
        if old is not None and (what := special_kind(old)):
            raise UnsafeError(path, f"{what} of this name exists")
        # If there is no old file, use the permissions that the umask has given to the new file.
        mode = (old or os.fstat(self.file)).st_mode & 0o777
        may_run = (mode & 0o444) >> 2
        os.fchmod(self.file, mode | may_run if executable else mode & ~0o111)
        folder, name = split_path(path)
        with tree.folder(folder, make=True) as here:
            os.replace(self.name, name, src_dir_fd=self._staging, dst_dir_fd=here)
        self._close()

    def discard(self) -> None:
        """Remove the temporary file; do nothing if it was already moved or discarded."""
        if self._is_open:
            with suppress(FileNotFoundError):
                os.unlink(self.name, dir_fd=self._staging)
            self._close()

    def _close(self) -> None:
        self._is_open = False
        os.close(self.file)
        os.close(self._staging)
