"""A file on its way into a tree: written beside its place, verified, moved there in one step."""

import hashlib
import os
import secrets
from contextlib import suppress

from taas_magic.travel.ignore import ARRIVING
from taas_magic.travel.tree import Tree, UnsafeError, oddity, parted


class DamagedError(OSError):
    """What arrived is not what was sent; names the file."""

    def __init__(self, path: str, size: int, received: int) -> None:
        what = f"{received:,} of {size:,} bytes" if received != size else "its hash differs"
        super().__init__(f"{path} was damaged on its way: {what}")


class Arrival:
    """One file that arrives; `place` or `discard` ends it.

    Args:
        staging: Descriptor of a folder on the destination's file system, in which it is written.
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
        self.received = 0
        self._is_open = True

    def write(self, data: bytes) -> None:
        """Takes the file's next bytes.

        Raises:
            OSError: The disk is full; the arrival is to be discarded.
        """
        view = memoryview(data)
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
