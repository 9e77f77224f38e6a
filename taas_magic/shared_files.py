"""Files that several processes use: locks, what appears whole or not at all, whose kernel it is.

A lock is held as long as its file is open in the process that took it, or in one that has inherited
it: the system releases it when they end, however they do.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def lock(descriptor: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file; return False where another process has it and `wait` is False.

    Args:
        shared: Whether others may have it as well, if they share it, too.

    Raises:
        OSError: The file system has no locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def take_lock(path: Path, flags: int = os.O_CREAT, *, wait: bool = False) -> int | None:
    """Return the lock of a file, a descriptor; None while a living process holds it.

    Args:
        flags: How the file is opened, besides.
        wait: Whether to wait until it is free.

    Raises:
        OSError: It cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    if lock(descriptor, wait=wait):
        return descriptor
    os.close(descriptor)
    return None


def is_free(path: Path, flags: int = os.O_CREAT) -> bool:
    """Return whether nobody holds the lock of a file; see `take_lock`."""
    if (descriptor := take_lock(path, flags)) is not None:
        os.close(descriptor)
    return descriptor is not None


@contextlib.contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a file's lock; yield False where another process has it and `wait` is False."""
    descriptor = take_lock(path, wait=wait)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that takes the place of `path` when the block ends without error.

    Only its owner may read it. It is not forced to disk: see `store.publish` for what is.

    Raises:
        OSError: The disk is full, or the folder cannot be written.
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
    """Return what was drawn at boot and tells this kernel from all others; "" where unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
