"""Folders under TMPDIR: one for each host of a pool, which goes with the host.

    <TMPDIR>/taas-<uid>-<random>/   0700; locked by the host's supervisor while it lives
        lock
        pymp-…                      multiprocessing's, of the agent
        run-…                       pipes and scratch folders of a run

What a supervisor that was killed has left, the next one of the same user removes.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from taas_magic.errors import PoolError, reason_of

_LOCK = "lock"


@contextmanager
def host_folder() -> Iterator[Path]:
    """The folder of this host, for as long as the block.

    Raises:
        PoolError: It cannot be made.
    """
    sweep()
    folder = _make(f"taas-{os.getuid()}-")
    lock = _lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def run_folder() -> Path:
    """A new folder for what a run needs on this host; in the agent.

    Raises:
        PoolError: It cannot be made.
    """
    return _make("run-")


def sweep() -> None:
    """Remove the folders of hosts of this user whose supervisors were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"taas-{os.getuid()}-*"):
        if _is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _make(prefix: str) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise PoolError(
            f"no folder can be made in {tempfile.gettempdir()}: {reason_of(error)}; "
            f"make room there, or set TMPDIR to another folder before the kernel starts"
        ) from error


def _lock(folder: Path) -> int:
    """Lock a new folder; nobody sees the lock before it is held."""
    beside = folder / ".lock"
    lock = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    beside.rename(folder / _LOCK)
    return lock


def _is_abandoned(folder: Path) -> bool:
    try:
        if folder.lstat().st_uid != os.getuid():
            return False
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # another user's, or one that is just being made or removed
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
