"""A host's own copy of a project store, kept between runs; one run uses it at a time."""

import fcntl
import hashlib
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from taas_magic.errors import StoreError
from taas_magic.travel import arrival
from taas_magic.travel.hashes import Hashes
from taas_magic.travel.tree import Tree

MAX_MIRRORS = 16
"""Copies of one store on a host: one for each run at a time."""

KEPT_S = 30 * 24 * 3600.0
"""How long a mirror that nobody uses is kept."""


def cache_folder() -> Path:
    """Where a host keeps its mirrors: `$XDG_CACHE_HOME/taas/projects`, by default in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "taas" / "projects"


class Mirror:
    """A copy that is this run's while it is open.

    Attributes:
        path: The copy itself, the ranks' working directory.
        tree: The same, to be changed.
        hashes: What is known to lie in it, and in the store alike.
        folders: Its folders that the store has as well.

    Args:
        folder: Of the mirror; its lock is held by the caller.
        until_end: Releases the lock.
    """

    def __init__(self, folder: Path, until_end: ExitStack) -> None:
        self._until_end = until_end
        for name in ("tree", "arriving"):
            (folder / name).mkdir(exist_ok=True)
        self.path = os.path.realpath(folder / "tree")
        self.tree = Tree(self.path)
        until_end.callback(self.tree.close)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self.staging = os.open(folder / "arriving", flags)
        until_end.callback(os.close, self.staging)
        arrival.clear(self.staging)
        self.hashes = Hashes(folder / "hashes.json")
        self.folders: set[str] = set()

    def close(self) -> None:
        """Keeps what is known of it, and gives it free."""
        self.hashes.save()
        self._until_end.close()


def take(store: str, owner: str, cache: Path | None = None) -> Mirror:
    """The first free mirror of a store on this host, made if there is none.

    Args:
        store: Its path, where the notebook is.
        owner: Whose store it is: machine and user of the notebook.
        cache: Where mirrors are; None is the usual place.

    Raises:
        StoreError: None can be made, or all are in use.
    """
    cache = cache or cache_folder()
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        _forget_old(cache, time.time() - KEPT_S)
        for folder in _candidates(cache, store, owner):
            folder.mkdir(mode=0o700, exist_ok=True)
            with ExitStack() as opening:
                if _lock(folder / "lock", opening):
                    return Mirror(folder, opening.pop_all())
    except OSError as error:
        raise StoreError(f"no copy of the project store can be made in {cache}: {error}") from error
    raise StoreError(f"all {MAX_MIRRORS} copies of the project store {store} in {cache} are in use")


def _candidates(cache: Path, store: str, owner: str) -> Iterator[Path]:
    """Each host has its own: hosts may share a home folder on a file system without locks."""
    digest = hashlib.sha256(f"{owner}\0{store}\0{platform.node()}".encode()).hexdigest()[:12]
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", os.path.basename(store))[:40].lstrip(".")
    for number in range(MAX_MIRRORS):
        yield cache / f"{readable}-{digest}{f'-{number}' if number else ''}"


def _forget_old(cache: Path, before: float) -> None:
    """Removes mirrors that were last used before a time, and that nobody uses now."""
    for lock in cache.glob("*/lock"):
        with suppress(FileNotFoundError), ExitStack() as removing:
            if lock.stat().st_mtime < before and _lock(lock, removing):
                shutil.rmtree(lock.parent, ignore_errors=True)


def _lock(path: Path, opening: ExitStack) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    opening.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    os.utime(descriptor)
    return True
