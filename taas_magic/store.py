"""The project store: which folder it is, whether it can be used, and which run owns it.

Only rank 0 may write to it. How a rank is held to that is `remote.guard`'s business (the operating
system) and `remote.divert`'s (Python); how a file appears whole is `publish`'s.
"""

import contextlib
import errno
import fcntl
import getpass
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taas_magic.errors import StoreError
from taas_magic.journal import state_dir

WRITES = ("discard", "refuse")
"""What `--store-writes` may say of the ranks that are not 0."""

_ANOTHER = "choose another folder with --store PATH or [store] path in taas.toml"
_PROBE_BYTES = 1 << 16


@dataclass(frozen=True)
class StoreRule:
    """What a run says of its store; a part of the plan.

    Attributes:
        path: The store, absolute and without symbolic links.
        writes: What becomes of the other ranks' writes: `discard` keeps each rank's to itself,
            `refuse` raises PermissionError.
        shared: Folders in the store that every rank may write (`--shared-writes`).
        limit_bytes: How much of it may travel to hosts that do not share it.
    """

    path: str
    writes: str = "discard"
    shared: tuple[str, ...] = ()
    limit_bytes: int = 1 << 30

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "StoreRule":
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**values, "shared": tuple(values["shared"])})


def is_below(path: str, folder: str) -> bool:
    """Whether an absolute path is `folder` or lies in it, by their names alone."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def choose(
    notebook_folder: str,
    path: str = "",
    writes: str = "discard",
    shared: Sequence[str] = (),
    limit_bytes: int = 1 << 30,
) -> StoreRule:
    """Decides the store of a run; changes nothing.

    Args:
        notebook_folder: The store where nothing else is said; relative paths start here.
        path: `--store`, else `[store] path`.
        writes: `--store-writes`.
        shared: `--shared-writes`, relative to the store.
        limit_bytes: `[store] limit` of taas.toml.

    Raises:
        StoreError: Not a folder, or one that cannot be the store.
    """
    if writes not in WRITES:
        raise StoreError(f"--store-writes {writes}: possible is {' or '.join(WRITES)}")
    store = os.path.realpath(os.path.join(notebook_folder, os.path.expanduser(path)))
    if not os.path.exists(store):
        raise StoreError(f"the project store {store} is not there: make the folder, or {_ANOTHER}")
    if not os.path.isdir(store):
        raise StoreError(f"the project store {store} is a file, not a folder: {_ANOTHER}")
    if store == "/":
        raise StoreError(f"the project store cannot be the whole file system (/): {_ANOTHER}")
    runs = os.path.realpath(state_dir() / "runs")
    if is_below(store, runs):
        raise StoreError(
            f"the project store {store} lies inside the run folder {runs}, "
            f"which is cleared in time: {_ANOTHER}"
        )
    folders = tuple(_shared_folder(store, name) for name in shared)
    return StoreRule(store, writes, folders, limit_bytes)


def _shared_folder(store: str, name: str) -> str:
    folder = os.path.realpath(os.path.join(store, name))
    if folder == store or not is_below(folder, store) or os.path.isfile(folder):
        raise StoreError(f"--shared-writes {name}: not a folder inside the project store {store}")
    return folder


def prepare(rule: StoreRule) -> None:
    """Makes sure, before anything starts, that the ranks can write where they may.

    Raises:
        StoreError: The store cannot be written, or a shared folder cannot be made.
    """
    _check_writable(rule.path)
    for folder in rule.shared:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise StoreError(f"--shared-writes {folder}: {error.strerror}") from error


def _check_writable(store: str) -> None:
    """Writes a little into the store and takes it away again, as rank 0 would.

    Only a write finds a quota; a file without a name leaves no trace, where the file system has it.
    """
    try:
        with tempfile.TemporaryFile(dir=store) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(
            f"rank 0 could not write to the project store {store}: {_reason(error)}; "
            f"mend that, or {_ANOTHER}"
        ) from error


def _reason(error: OSError) -> str:
    reasons = {
        errno.EROFS: "its file system is read-only",
        errno.ENOSPC: "its file system is full",
        errno.EDQUOT: "your quota on its file system is used up",
        errno.EACCES: "you have no right to write there",
    }
    return reasons.get(error.errno or 0, str(error.strerror))


def state_folder(store: str) -> Path:
    """Where what is known of a store is kept between runs, outside of it; not made."""
    return state_dir() / "stores" / hashlib.sha256(os.fsencode(store)).hexdigest()[:20]


@contextlib.contextmanager
def owned(store: str, run_id: str, name: str = "") -> Iterator[None]:
    """Keeps every other run of this user off the store, and off what lies in it or holds it.

    The lock is a file in the state folder, so that the store stays clean, and is held by flock: the
    system releases it with the process that holds it, however that ends, so that a dead owner never
    has to be cleared away. Enter it in the process whose life is the run's.

    Args:
        store: Absolute, without symbolic links.
        run_id: The run that asks.
        name: The run's name, for the message to others.

    Raises:
        StoreError: Another run has it; names that run, its process and its host.
    """
    kept = state_folder(store)
    folder, path = kept.parent, kept.with_suffix(".lock")
    folder.mkdir(mode=0o700, exist_ok=True)
    owner = {
        "store": store,
        "run_id": run_id,
        "name": name,
        "pid": os.getpid(),
        "host": platform.node(),
        "user": getpass.getuser(),
        "since": time.strftime("%H:%M:%S"),
    }
    with _locked(folder / "all", wait=True):
        for other in folder.glob("*.lock"):
            _refuse_overlap(store, other)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        path.write_text(json.dumps(owner))
    try:
        yield
    finally:
        with _locked(folder / "all", wait=True):
            path.unlink(missing_ok=True)
            os.close(lock)


def _refuse_overlap(store: str, path: Path) -> None:
    """Raises where a living run owns a folder that is, holds, or lies in `store`."""
    with _locked(path, wait=False) as free:
        if free:
            path.unlink(missing_ok=True)
            return
        owner = json.loads(path.read_text())
    if is_below(store, owner["store"]) or is_below(owner["store"], store):
        named = f" ({owner['name']})" if owner["name"] else ""
        raise StoreError(
            f"run {owner['run_id']}{named} writes to the project store {owner['store']} since "
            f"{owner['since']} (user {owner['user']}, process {owner['pid']} on {owner['host']}): "
            f"wait until it has ended, interrupt it, or {_ANOTHER}"
        )


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Holds a file's lock; yields False where another process has it and `wait` is False."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)
