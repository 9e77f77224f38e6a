"""The project store: which folder it is, whether it can be used, which run owns it, who sees it.

On one running kernel, a folder is known by its file system and inode. Between machines neither says
anything (two clones of one disk agree in both), so there a file of random name, which is in the
store for as long as the run is, must be seen.
"""

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
from taas_magic.messages import pack, unpack
from taas_magic.shared_files import boot_id, locked

WRITES = ("discard", "refuse")
"""What `--store-writes` may say of the ranks that are not 0."""

_ANOTHER = "choose another folder with --store PATH or [store] path in taas.toml"
_PROBE_BYTES = 1 << 16
_LOOK_S = 0.05


class StoreRule(Struct, frozen=True):
    """What a run says of its store; a part of the plan.

    Attributes:
        path: The store, absolute and without symbolic links.
        writes: What becomes of the other ranks' writes: `discard` keeps each rank's to itself,
            `refuse` raises PermissionError.
        shared: Folders in the store that every rank may write (`--shared-writes`).
        limit_bytes: How much of it may travel to hosts that do not share it.
        overwrite: Files that such hosts may write though they are the user's; patterns.
    """

    path: str
    writes: str = "discard"
    shared: tuple[str, ...] = ()
    limit_bytes: int = 1 << 30
    overwrite: tuple[str, ...] = ()


def is_below(path: str, folder: str) -> bool:
    """Return whether an absolute path is `folder` or lies in it, by their names alone."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def choose(
    notebook_folder: str,
    path: str = "",
    writes: str = "discard",
    shared: Sequence[str] = (),
    limit_bytes: int = 1 << 30,
    overwrite: tuple[str, ...] = (),
) -> StoreRule:
    """Decide the store of a run; change nothing.

    Args:
        notebook_folder: The store where nothing else is said; relative paths start here.
        path: `--store`, else `[store] path`.
        writes: As of `StoreRule`, like `limit_bytes` and `overwrite`.
        shared: `--shared-writes`, relative to the store.

    Raises:
        StoreError: Not a folder, or one that cannot be the store.
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
            f"the project store {store} lies inside the run folder {runs}, "
            f"which is cleared in time: {_ANOTHER}"
        )
    folders = tuple(_shared_folder(store, name) for name in shared)
    return StoreRule(store, writes, folders, limit_bytes, overwrite)


def _shared_folder(store: str, name: str) -> str:
    folder = os.path.realpath(os.path.join(store, name))
    if folder == store or not is_below(folder, store) or os.path.isfile(folder):
        raise StoreError(f"--shared-writes {name}: not a folder inside the project store {store}")
    return folder


def prepare(rule: StoreRule) -> None:
    """Make sure, before anything starts, that the ranks can write where they may.

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
    """Return what the user should know of a store before a run, a line each."""
    said = []
    if is_below(os.path.realpath(os.path.expanduser("~")), rule.path):
        said.append(
            f"the project store {rule.path} is, or holds, your home folder: rank 0 may write all "
            f"of it, and hosts of other pools get a copy, but for what may hold secrets; {_ANOTHER}"
        )
    if world_size > 1 and (links := _links_out(rule.path)):
        more = f" and {len(links) - 1} more" if len(links) > 1 else ""
        said.append(
            f"not held: {links[0]}{more} lead{'s' * (not more)} out of the project store, so that "
            "ranks other than 0 can write there too (docs/store.md)"
        )
    return said


def _links_out(store: str) -> list[str]:
    """Return links by which a rank that may not write the store could write elsewhere.

    Hidden folders are left out, and the look ends after `_LOOK_S`.
    """
    found, folders, until = [], [store], time.monotonic() + _LOOK_S
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
    is_place = os.path.isdir(target) or os.path.isfile(target)
    return is_place and not is_below(target, store) and os.access(target, os.W_OK)


def _try_to_write(store: str) -> None:
    """Write a little into the store and take it away again, as rank 0 would.

    Only a write finds a quota; a file without a name leaves no trace, where the file system has it.
    """
    try:
        with tempfile.TemporaryFile(dir=store) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(
            f"rank 0 could not write to the project store {store}: {reason_of(error)}; "
            f"mend that, or {_ANOTHER}"
        ) from error


def user_name() -> str:
    """Return the user's name; the number where there is no name for it, as in many containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        return str(os.getuid())


def state_folder(store: str) -> Path:
    """Return where what is known of a store is kept between runs, outside of it; not made."""
    return state_dir() / "stores" / hashlib.sha256(os.fsencode(store)).hexdigest()[:20]


class StoreOwner(Struct):
    """Who has a store, for the message to others: a run, its process, and since when."""

    store: str
    run_id: str
    name: str
    pid: int
    host: str
    user: str
    since: str


@contextlib.contextmanager
def owned(store: str, run_id: str, name: str = "") -> Iterator[None]:
    """Keep every other run of this user off the store, and off what lies in it or holds it.

    The lock is a file in the state folder, so that the store stays clean, and is held by flock: the
    system releases it with the process that holds it, however that ends, so that a dead owner never
    has to be cleared away. Enter it in the process whose life is the run's.

    Args:
        store: Absolute, without symbolic links.
        run_id: Of the run that asks, like `name`; both for the message to others.

    Raises:
        StoreError: Another run has it; names that run, its process and its host.
    """
    kept = state_folder(store)
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
                path.write_bytes(pack(owner))
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
    """Raise where a living run owns a folder that is, holds, or lies in `store`."""
    with locked(path, wait=False) as free:
        if free:
            path.unlink(missing_ok=True)
            return
        owner = unpack(path.read_bytes(), StoreOwner)
    if is_below(store, owner.store) or is_below(owner.store, store):
        named = f" ({owner.name})" if owner.name else ""
        raise StoreError(
            f"run {owner.run_id}{named} writes to the project store {owner.store} since "
            f"{owner.since} (user {owner.user}, process {owner.pid} on {owner.host}): "
            f"wait until it has ended, interrupt it, or {_ANOTHER}"
        )


class Identity(Struct, frozen=True):
    """A folder, as the machine that it was looked at on knows it: `kernel` is the running one's."""

    path: str
    kernel: str
    device: int
    inode: int

    @classmethod
    def of(cls, path: str) -> "Identity":
        """Look at a folder.

        Raises:
            OSError: It is not there.
        """
        status = os.stat(path)
        return cls(path, boot_id(), status.st_dev, status.st_ino)

    def is_here(self, token: Callable[[], str]) -> bool:
        """Return whether the folder is the same on this host.

        Args:
            token: Has a file made in the folder, where the notebook is, and gives its name.
        """
        try:
            here = Identity.of(self.path)
        except OSError:
            return False
        if here.kernel and here.kernel == self.kernel:
            return here == self
        return os.path.exists(os.path.join(self.path, token()))
