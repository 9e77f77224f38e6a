"""Helpers for files that several processes use: locks, and files that appear atomically.

A lock belongs to an open file, whose descriptor child processes may inherit. The system releases
the lock when all processes with this descriptor have closed it or have ended, for any reason.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def lock(descriptor: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file; return whether this process now holds the lock.

    The result is False only if another process holds the lock and `wait` is False.

    Args:
        shared: Whether to take a shared lock, which several processes can hold at once.
        wait: Whether to block until the lock is free.

    Raises:
        OSError: The file system has no locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_and_lock(path: Path, flags: int = os.O_CREAT, *, wait: bool = False) -> int | None:
    """Open a file, lock it and return its descriptor; None if another process holds the lock.

    Args:
        flags: Flags for `os.open`; by default, make the file if it is missing.
        wait: Whether to wait until the lock is free, instead of returning None.

    Raises:
        OSError: The file cannot be opened, or the file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    has_lock = False
    try:
        has_lock = lock(descriptor, wait=wait)
    finally:
        if not has_lock:
            os.close(descriptor)
    return descriptor if has_lock else None


def is_unlocked(path: Path, flags: int = os.O_CREAT) -> bool:
    """Return whether no process holds the lock of a file. Take and release the lock to find out.

    Args:
        flags: Flags for `os.open`; by default, make the file if it is missing.
    """
    if (descriptor := open_and_lock(path, flags)) is not None:
        os.close(descriptor)
    return descriptor is not None


@contextlib.contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a file's lock during the `with` block, and yield whether this process has the lock.

    Make the file if it is missing. If another process holds the lock and `wait` is False, the block
    runs without the lock.
    """
    descriptor = open_and_lock(path, wait=wait)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextlib.contextmanager
def replace_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Yield a temporary file that replaces `path` when the block ends without an error.

    After an error, remove the temporary file. Only the user can read the file. The file is not
    flushed to the disk, so a crash of the machine may lose the file. `store.publish` writes files
    that survive such a crash.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            yield file
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def boot_id() -> str:
    """Return the random id that the system chose at this boot; "" if the system has no such id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
