"""Functions that choose, check, lock and identify the project store of a run."""

import contextlib
import getpass
import hashlib
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct

from taas_magic.errors import StoreError, reason_of
from taas_magic.journal.folder import state_dir
from taas_magic.messages import from_json, to_json
from taas_magic.shared_files import boot_id, locked

WRITES = ("discard", "refuse")
"""Allowed values of `--store-writes`: how writes of ranks other than 0 are handled."""

_ANOTHER = "choose another folder with --store PATH or [store] path in taas.toml"
_PROBE_BYTES = 1 << 16
_SEARCH_LIMIT_S = 0.05


class StoreRule(Struct, frozen=True):
    """Settings for a run's project store; part of the plan.

    Attributes:
        path: Path of the store, absolute and without symbolic links.
        writes: Handling of writes by ranks other than 0. `discard` writes to a private scratch
            folder of the rank; `refuse` raises PermissionError.
        shared: Folders in the store that every rank may write (`--shared-writes`).
        limit_bytes: Maximum total size of the files that are copied to a host with a mirror.
        overwrite: Patterns of the user's files that a host with a mirror may overwrite.
    """

    path: str
    writes: str = "discard"
    shared: tuple[str, ...] = ()
    limit_bytes: int = 1 << 30
    overwrite: tuple[str, ...] = ()


def is_below(path: str, folder: str) -> bool:
    """Return whether an absolute path is `folder` or below `folder`, by comparing the strings."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def choose(
    notebook_folder: str,
    path: str = "",
    writes: str = "discard",
    shared: Sequence[str] = (),
    limit_bytes: int = 1 << 30,
    overwrite: tuple[str, ...] = (),
) -> StoreRule:
    """Choose the project store of a run, check its path, and return its settings.

    This function changes no files.

    Args:
        notebook_folder: Default store; also the base of a relative `path`.
        path: Value of `--store`, else of `[store] path`; "" for the default.
        writes: Value of `--store-writes`, one of `WRITES`.
        shared: Folders of `--shared-writes`, relative to the store.
        limit_bytes: Maximum total size of the files that are copied to a host with a mirror.
        overwrite: Patterns of the user's files that a host with a mirror may overwrite.

    Raises:
        StoreError: The store is missing, is no folder, is `/`, or is in the folder of runs; or a
            shared folder is not inside the store, or is a file.
    """
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
            f"the project store {store} is inside the folder of runs {runs}, "
            f"where old files are removed: {_ANOTHER}"
        )
    folders = tuple(_shared_folder(store, name) for name in shared)
    return StoreRule(store, writes, folders, limit_bytes, overwrite)


def _shared_folder(store: str, name: str) -> str:
    folder = os.path.realpath(os.path.join(store, name))
    if folder == store or not is_below(folder, store) or os.path.isfile(folder):
        raise StoreError(f"--shared-writes {name}: not a folder inside the project store {store}")
    return folder


def prepare(rule: StoreRule) -> None:
    """Check that the store can be written, and make missing shared folders.

    Call before any process of the run starts.

    Raises:
        StoreError: The store cannot be written, or a shared folder cannot be made.
    """
    _try_to_write(rule.path)
    for folder in rule.shared:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise StoreError(f"--shared-writes {folder}: {error.strerror}") from error


def warnings(rule: StoreRule, world_size: int) -> list[str]:
    """Return warnings for the user about the store of a run, one line each.

    There is a warning if the store is the home folder, or contains it. In a run with several ranks,
    there is also one warning if any symbolic links in the store lead to writable files or folders
    outside the store. The search for links has a time limit and skips hidden folders.
    """
    found = []
    if is_below(os.path.realpath(os.path.expanduser("~")), rule.path):
        found.append(
            f"the project store {rule.path} is or contains your home folder: rank 0 can write all "
            f"of it, and hosts of other pools get a copy, except files that may hold secrets; "
            f"{_ANOTHER}"
        )
    if world_size > 1 and (links := _find_links_out(rule.path)):
        more = f" and {len(links) - 1} more" if len(links) > 1 else ""
        found.append(
            f"{links[0]}{more} lead{'s' * (not more)} out of the project store, so ranks other "
            "than 0 can write there (docs/store.md)"
        )
    return found


def _find_links_out(store: str) -> list[str]:
    """Return symbolic links through which a rank could write outside the store.

    Each item has the form "LINK -> TARGET". The target is an existing writable file or folder. The
    search skips hidden folders, and ends after `_SEARCH_LIMIT_S` seconds even if it has not found
    all links.
    """
    found, folders, until = [], [store], time.monotonic() + _SEARCH_LIMIT_S
    while folders and time.monotonic() < until:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_symlink() and _leads_out(entry.path, store):
                    name = os.path.relpath(entry.path, store)
                    found.append(f"{name} -> {os.path.realpath(entry.path)}")
                elif entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                    folders.append(entry.path)
    return sorted(found)


def _leads_out(link: str, store: str) -> bool:
    target = os.path.realpath(link)
    exists = os.path.isdir(target) or os.path.isfile(target)
    return exists and not is_below(target, store) and os.access(target, os.W_OK)


def _try_to_write(store: str) -> None:
    """Write a temporary file to the store, to find errors that rank 0 would get.

    Only a real write detects an exceeded quota.

    Raises:
        StoreError: The file cannot be written.
    """
    try:
        with tempfile.TemporaryFile(dir=store) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(
            f"rank 0 could not write to the project store {store}: {reason_of(error)}; "
            f"correct this, or {_ANOTHER}"
        ) from error


def user_name() -> str:
    """Return the user's name, or the user id if the user has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # KeyError before Python 3.13, OSError since
        return str(os.getuid())


def store_state_folder(store: str) -> Path:
    """Return the folder for data about a store that later runs need. The folder may not exist."""
    return state_dir() / "stores" / hashlib.sha256(os.fsencode(store)).hexdigest()[:20]


class StoreOwner(Struct):
    """Record of the run that owns a store.

    The lock file contains this record. Another run that needs the store names the owner in its
    error message.

    Attributes:
        name: Name that the user gave the run; "" for none.
        pid: Id of the process that holds the lock.
        since: Local time at which the run took the lock, as HH:MM:SS.
    """

    store: str
    run_id: str
    name: str
    pid: int
    host: str
    user: str
    since: str


@contextlib.contextmanager
def locked_store(store: str, run_id: str, name: str = "") -> Iterator[None]:
    """Lock the store for one run against all other runs of this user, during the `with` block.

    The lock also covers folders inside the store, and folders that contain the store. The lock file
    is in the state folder, and contains a `StoreOwner`. At the end of the block, remove the file.
    If the process that holds the lock is killed, the system releases the lock (flock(2)). So enter
    this context in the process that lives as long as the run.

    A second lock prevents races between runs. It is held only while the lock files of other runs
    are checked, and while this run's lock file is made or removed.

    Args:
        store: Path of the store, absolute and without symbolic links.

    Raises:
        StoreError: Another run owns the store, or the lock file cannot be written.
    """
    kept = store_state_folder(store)
    folder, path = kept.parent, kept.with_suffix(".lock")
    folder.mkdir(mode=0o700, exist_ok=True)
    since = time.strftime("%H:%M:%S")
    owner = StoreOwner(store, run_id, name, os.getpid(), platform.node(), user_name(), since)
    with ExitStack() as held:
        with locked(folder / "all", wait=True):
            for other in folder.glob("*.lock"):
                _refuse_overlap(store, other)
            held.enter_context(locked(path, wait=True))
            try:
                path.write_bytes(to_json(owner))
            except OSError as error:
                raise StoreError(
                    f"the project store cannot be marked as used by this run in {folder}: "
                    f"{reason_of(error)}; make room there"
                ) from error
        try:
            yield
        finally:
            with locked(folder / "all", wait=True):
                path.unlink(missing_ok=True)
                held.close()


def _refuse_overlap(store: str, path: Path) -> None:
    """Raise StoreError if the lock file at `path` belongs to a run whose store overlaps `store`.

    Two folders overlap if they are the same, or if one contains the other. If no process holds the
    lock, the run has ended: only remove the lock file.
    """
    with locked(path, wait=False) as free:
        if free:
            path.unlink(missing_ok=True)
            return
        owner = from_json(path.read_bytes(), StoreOwner)
    if is_below(store, owner.store) or is_below(owner.store, store):
        named = f" ({owner.name})" if owner.name else ""
        raise StoreError(
            f"run {owner.run_id}{named} writes to the project store {owner.store} since "
            f"{owner.since} (user {owner.user}, process {owner.pid} on {owner.host}): "
            f"wait until it has ended, end it (`%taas stop {owner.run_id}` on {owner.host}), "
            f"or {_ANOTHER}"
        )


class FolderIdentity(Struct, frozen=True):
    """Identity of a folder, by which a host finds out whether it shares the project store.

    On one machine, the numbers of the file system and the inode identify a folder. On another
    machine, these numbers prove nothing, because two clones of one disk have the same numbers. So
    the notebook's machine makes a file with a random name in the store, and a host on another
    machine looks for this file.

    Attributes:
        kernel: Boot id of the machine's running kernel.
        device: Number of the file system (`st_dev`).
        inode: Inode number.
    """

    path: str
    kernel: str
    device: int
    inode: int

    @classmethod
    def of(cls, path: str) -> "FolderIdentity":
        """Return the identity of the folder at `path` on this machine.

        Raises:
            OSError: The folder does not exist.
        """
        status = os.stat(path)
        return cls(path, boot_id(), status.st_dev, status.st_ino)

    def is_here(self, token: Callable[[], str]) -> bool:
        """Return whether this host has the identified folder at the same path.

        Args:
            token: Function that makes the notebook's machine create a file in the folder, and that
                returns the file's name. The function is called only on another machine.
        """
        try:
            here = FolderIdentity.of(self.path)
        except OSError:
            return False
        if here.kernel and here.kernel == self.kernel:
            return here == self
        return os.path.exists(os.path.join(self.path, token()))
