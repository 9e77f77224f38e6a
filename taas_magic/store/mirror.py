"""A host's copy of a project store, updated before the ranks of a run start and while they run.

Before the ranks start, `update_mirror` fetches files that changed in the store. While the ranks
run, `StoreUpdater` fetches changes that other hosts made, and `outbound.py` sends files written in
the mirror back to the store.
"""

import hashlib
import os
import platform
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from taas_magic import probe
from taas_magic.errors import StoreError, TaasError
from taas_magic.shared_files import locked
from taas_magic.store.manifest import FOLDER, Hashes, Manifest, ManifestEntry, blocks
from taas_magic.store.requests import (
    ListChanges,
    ListFiles,
    MessageSizer,
    ReadFiles,
    SendRequest,
    part_lists,
)
from taas_magic.store.rule import is_below
from taas_magic.store.tree import (
    DamagedError,
    IncomingFile,
    Tree,
    UnsafeError,
    folders_of,
    printable,
    why_unsafe,
)

MAX_MIRRORS = 16
"""Maximum number of copies of one store on a host. Each of several simultaneous runs needs one."""

KEPT_S = 30 * 24 * 3600.0
"""Seconds without use after which `reserve` removes a mirror."""


class Mirror:
    """A host's copy of the project store, reserved for one run, or for a session and its cells.

    Each user of the copy calls `close` once. The last of these calls releases the copy.

    Attributes:
        path: Path of the copy; the ranks' working directory.
        staging: Descriptor of the folder in which arriving files are written.
        hashes: Hashes of the files that have the same content in the store and in the copy, as far
            as this host knows. Also lists the folders that both have.

    Args:
        folder: Folder with the copy and its lock file.
        until_end: Exit stack that holds the lock. The last `Mirror.close` closes this stack.
    """

    def __init__(self, folder: Path, until_end: ExitStack) -> None:
        self._until_end = until_end
        self._users, self._users_lock = 1, threading.Lock()
        shutil.rmtree(folder / "arriving", ignore_errors=True)  # remove leftovers of a killed run
        for name in ("tree", "arriving"):
            (folder / name).mkdir(exist_ok=True)
        self.path = os.path.realpath(folder / "tree")
        self.tree = Tree(self.path)
        until_end.callback(self.tree.close)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self.staging = os.open(folder / "arriving", flags)
        until_end.callback(os.close, self.staging)
        self.hashes = Hashes(folder / "hashes.json")

    def share(self) -> "Mirror":
        """Return this mirror for one more user, who must also call `close`.

        Raises:
            StoreError: The mirror has been released.
        """
        with self._users_lock:
            if not self._users:
                raise StoreError(f"the copy of the project store in {self.path} was released")
            self._users += 1
            return self

    def close(self) -> None:
        """End the caller's use. If it was the last use, save the hashes and release the mirror."""
        with self._users_lock:
            self._users -= 1
            if self._users:
                return
        self.hashes.save()
        self._until_end.close()


def reserve(store: str, owner: str, cache: Path | None = None) -> Mirror:
    """Reserve the first free mirror of a store on this host; make a new mirror if none is free.

    A mirror is free if no run uses it. First remove all free mirrors, of any store, that were last
    used more than `KEPT_S` seconds ago. The reserved mirror counts as used from now on. The result
    holds the mirror's lock until the last `Mirror.close`.

    Args:
        store: Path of the store on the notebook's machine.
        owner: Machine and user of the notebook.
        cache: Folder of all mirrors; None for the default folder in the user's cache.

    Raises:
        StoreError: No mirror can be made, or `MAX_MIRRORS` are in use.
    """
    cache = cache or Path(probe.cache_folder()) / "projects"
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_old_mirrors(cache, time.time() - KEPT_S)
        for folder in _mirror_paths(cache, store, owner):
            folder.mkdir(mode=0o700, exist_ok=True)
            with ExitStack() as opening:
                if opening.enter_context(locked(folder / "lock", wait=False)):
                    os.utime(folder / "lock")
                    return Mirror(folder, opening.pop_all())
    except OSError as error:
        raise StoreError(f"cannot copy the project store to {cache}: {error}") from error
    raise StoreError(f"all {MAX_MIRRORS} copies of the project store {store} in {cache} are in use")


def _mirror_paths(cache: Path, store: str, owner: str) -> Iterator[Path]:
    """Yield the paths of the `MAX_MIRRORS` folders that may hold mirrors of a store on this host.

    The folders may not exist. Their names depend on the host's name. So two hosts that share a home
    folder use different mirrors, even if the file system has no locks.
    """
    digest = hashlib.sha256(f"{owner}\0{store}\0{platform.node()}".encode()).hexdigest()[:12]
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", os.path.basename(store))[:40].lstrip(".")
    for number in range(MAX_MIRRORS):
        yield cache / f"{readable}-{digest}{f'-{number}' if number else ''}"


def _remove_old_mirrors(cache: Path, before: float) -> None:
    """Remove all mirrors in `cache` that are not in use and were last used before a time.

    Args:
        before: Time in seconds since 1970.
    """
    for lock in cache.glob("*/lock"):
        with suppress(FileNotFoundError):
            if lock.stat().st_mtime < before:
                with locked(lock, wait=False) as free:
                    if free:
                        shutil.rmtree(lock.parent, ignore_errors=True)


ATTEMPTS = 3
"""Maximum number of times that `update_mirror` tries to make a mirror equal to the store.

An attempt fails if a file arrives damaged, or changes while it is copied.
"""

_ASK_AGAIN_S = 0.05


def update_mirror(
    mirror: Mirror, send_request: SendRequest, fresh: bool = False, kept: Collection[str] = ()
) -> Manifest:
    """Make the mirror equal to the store; fetch only content that the mirror does not have.

    If the notebook's side is searching the store, wait for the result. If a file cannot be fetched,
    or arrives damaged, repeat everything after a new search of the store. At the end, save the
    mirror's hashes.

    Args:
        fresh: Whether the first attempt needs a new search of the store. If False, the first
            attempt uses the result of the run's last search.
        kept: Absolute paths of folders in the mirror. Files and folders in these folders stay if
            they did not come from the store, unless the store has something at the same path.

    Returns:
        Manifest of the store, which now also describes the mirror, except for what stays in `kept`.

    Raises:
        StoreError: The mirror cannot be written, or some files could not be fetched undamaged in
            any of the `ATTEMPTS` attempts.
    """
    damaged: list[str] = []
    for attempt in range(ATTEMPTS):
        listed = send_request(ListFiles(fresh or attempt > 0))
        while listed is None:  # the store is being searched
            time.sleep(_ASK_AGAIN_S)
            listed = send_request(ListFiles())
        want = listed.safe()
        try:
            damaged = _apply_manifest(mirror, want, send_request, kept)
        except OSError as error:
            where = f"{mirror.path}: {error.strerror} ({error.filename or 'its disk'})"
            raise StoreError(f"the project store cannot be copied to {where}") from error
        if not damaged:
            mirror.hashes.keep_only({entry.path for entry in want.entries})
            mirror.hashes.save()
            return want
    raise StoreError(
        f"{', '.join(damaged[:5])} of the project store could not be copied in {ATTEMPTS} "
        "attempts: a program keeps writing it, or it is damaged in transit"
    )


def _apply_manifest(
    mirror: Mirror, want: Manifest, send_request: SendRequest, kept: Collection[str]
) -> list[str]:
    """Make the mirror equal to `want`; fetch only files whose content the mirror does not have.

    1. Hash the files whose content may be wanted, and remove all other files (`_scan_files`).
    2. Make the missing folders, except where a file is in the way.
    3. Copy each missing or changed file whose content is elsewhere in the mirror.
    4. Remove the files and folders that `want` does not list; a file at the path of a wanted
       folder; and a folder at the path of a wanted file.
    5. Make the folders for which a file was in the way.
    6. Record all wanted folders in `mirror.hashes`.
    7. Fetch all other missing and changed files.

    Returns:
        Paths of the files that could not be fetched, or arrived damaged.
    """
    tree = mirror.tree
    there = _scan_files(mirror, {entry.path for entry in want.entries}, kept)
    kinds = {entry.path: entry.is_folder for entry in want.entries}
    folders = [path for path, is_folder in kinds.items() if is_folder]
    missing = [path for path in folders if path not in there or not there[path].is_folder]
    for path in missing:
        with suppress(OSError):  # if a file is in the way, the folder is made below
            tree.make_folder(path)
    to_fetch = _copy_known_content(mirror, want, there)
    for path, entry in reversed(there.items()):
        if kinds.get(path) is not entry.is_folder:
            tree.remove(path)
    for path in missing:
        tree.make_folder(path)
    for path in folders:
        mirror.hashes.remember(path, FOLDER)
    return list(_fetch_files(mirror, to_fetch, send_request))


def _copy_known_content(
    mirror: Mirror, want: Manifest, there: Mapping[str, ManifestEntry]
) -> list[ManifestEntry]:
    """Copy files whose content is already elsewhere in the mirror, for example after a rename.

    Folders are skipped, and files that the mirror already has with the wanted content at the wanted
    path.

    Args:
        want: Manifest to which the mirror shall become equal.
        there: Files and folders of the mirror by path.

    Returns:
        Entries of the files that must be fetched, because the mirror does not have their content,
        or because the copy has failed.
    """
    path_by_hash = {entry.sha256: path for path, entry in there.items()}
    rest = []
    for entry in want.entries:
        mine = there.get(entry.path)
        is_same = mine and (mine.sha256, mine.executable) == (entry.sha256, entry.executable)
        if is_same or entry.is_folder:
            continue
        source = path_by_hash.get(entry.sha256)
        if source is None or not _copy(mirror, entry, source):
            rest.append(entry)
    return rest


def _scan_files(
    mirror: Mirror, wanted: Collection[str], kept: Collection[str]
) -> dict[str, ManifestEntry]:
    """List and hash the files of a mirror whose content may be wanted; remove all other files.

    The content of a file may be wanted if the file's path is in `wanted`, or if `mirror.hashes`
    lists this path. Example for the second case: the store's file was renamed, and the mirror still
    has its content under the old name.

    All folders stay. Outside the folders `kept`, files that cannot be read and special files such
    as links are removed. In the folders `kept`, all files stay. The result does not list files that
    stay only for this reason, and folders in `kept` that did not come from the store.

    Returns:
        The remaining files and folders by path, outer folders first.
    """
    found: dict[str, ManifestEntry] = {}
    for tree_entry in mirror.tree.walk():
        is_kept = any(is_below(os.path.join(mirror.path, tree_entry.path), it) for it in kept)
        with suppress(OSError):  # the entry is not a regular file, or cannot be read
            if (
                (tree_entry.is_folder and not is_kept)
                or tree_entry.path in wanted
                or tree_entry.path in mirror.hashes
            ):
                found[tree_entry.path] = ManifestEntry.of(
                    tree_entry, mirror.hashes.hash_of(mirror.tree, tree_entry)
                )
        if tree_entry.path not in found and not is_kept:
            mirror.tree.remove(tree_entry.path)
    return found


def _copy(mirror: Mirror, entry: ManifestEntry, source: str) -> bool:
    """Copy the mirror's file `source` to the path of `entry`; return whether this succeeded.

    Like an arrived file, the copy is verified before it gets its path (`_install_file`). If a step
    raises OSError, return False.
    """
    with suppress(OSError), mirror.tree.open_file(source) as file:
        incoming = IncomingFile(mirror.staging)
        try:
            for block in blocks(file, entry.size):
                incoming.write(block)
            _install_file(mirror, incoming, entry)
            return True
        finally:
            incoming.discard()
    return False


def _fetch_files(
    mirror: Mirror, entries: Sequence[ManifestEntry], send_request: SendRequest
) -> dict[str, OSError]:
    """Fetch files from the notebook's side, and move them to their paths in the mirror.

    A file is moved as soon as its last part has arrived. A file that arrives damaged counts as not
    fetched. At the end, incomplete files are discarded.

    Returns:
        The error of each file that could not be fetched or moved, by path.

    Raises:
        OSError: The mirror's disk is full or broken.
    """
    sought = {entry.path: entry for entry in entries}
    missed: dict[str, OSError] = {}
    arrivals: dict[str, IncomingFile] = {}
    sizer = MessageSizer()
    try:
        for parts in part_lists(entries, sizer):
            contents = sizer.send(send_request, ReadFiles(parts))
            for (path, offset, size), data in zip(parts, contents, strict=True):
                incoming = arrivals.get(path) or arrivals.setdefault(
                    path, IncomingFile(mirror.staging)
                )
                incoming.write(data or b"")
                if offset + size == sought[path].size:
                    try:
                        _install_file(mirror, arrivals.pop(path), sought[path])
                    except (UnsafeError, FileNotFoundError, NotADirectoryError) as error:
                        missed[path] = error
    finally:
        for incoming in arrivals.values():
            incoming.discard()
    return missed


def _install_file(mirror: Mirror, incoming: IncomingFile, entry: ManifestEntry) -> None:
    """Verify an arrived file, move it to its path in the mirror, and record its hash.

    The file gets the modification time of the sent file.

    Raises:
        DamagedError: The file differs from the file that was sent. The arrived file is discarded.
    """
    try:
        incoming.verify(entry.path, entry.size, entry.sha256)
        os.utime(incoming.file, ns=(entry.mtime_ns, entry.mtime_ns))
        # Record the hash before the file appears. Otherwise, `MirrorSender` would treat the file as
        # written by a rank, and send it back.
        mirror.hashes.remember(entry.path, entry.sha256, os.fstat(incoming.file))
        incoming.move_to(mirror.tree, entry.path, executable=entry.executable)
    finally:
        incoming.discard()
    status = mirror.tree.status(entry.path)
    if status is not None:
        mirror.hashes.remember(entry.path, entry.sha256, status)


UPDATE_GAP_S = 0.25
"""Seconds between two requests of a host for the changes that other hosts made in the store."""


class StoreUpdater:
    """Thread on a host that fetches the other hosts' changes of the store into this mirror.

    Args:
        note: Function that shows the user why a file was not copied, or why the updates have ended.
    """

    def __init__(
        self, mirror: Mirror, send_request: SendRequest, note: Callable[[str], None]
    ) -> None:
        self._mirror, self._send_request, self._note = mirror, send_request, note
        self._number = 0
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="taas-store-news", daemon=True)

    def start(self) -> None:
        """Start the thread, which applies other hosts' changes every `UPDATE_GAP_S` seconds."""
        self._thread.start()

    def finish(self) -> None:
        """Let the thread complete its current update, and wait until the thread has ended."""
        self._stop_event.set()
        self._thread.join()

    def catch_up(self) -> None:
        """Fetch and apply all changes of other hosts since the last call. Ignore unsafe paths.

        1. Remove the paths that other hosts removed; a folder that is not empty stays.
        2. Remove the file or the empty folder that is in the way of a changed file or folder. If a
           folder with files is in the way, show the user a note, and ignore this change.
        3. Make the changed folders.
        4. Fetch the changed files, except files that the mirror already has with the same hash.

        The user gets a note for each file that cannot be fetched or moved to its path. If a file
        changes while it is fetched, there is no note: a later call fetches the file again. Other
        errors, such as a full disk, reach the caller.
        """
        changes = self._send_request(ListChanges(self._number))
        for path in changes.removed:
            if not why_unsafe(path):
                self._remove(path)
        entries = [it for it in changes.entries if not why_unsafe(it.path) and self._clear_path(it)]
        for folder in (entry.path for entry in entries if entry.is_folder):
            self._mirror.hashes.remember(folder, FOLDER)
            self._mirror.tree.make_folder(folder)
        known = self._mirror.hashes.has_hash  # also includes the folders made above
        new = [entry for entry in entries if not known(entry.path, entry.sha256)]
        for path, error in _fetch_files(self._mirror, new, self._send_request).items():
            if not isinstance(error, DamagedError):  # a changed file will be listed again
                self._note(
                    f"{printable(path)} of another host is not copied here: {error.strerror}"
                )
        self._number = changes.number

    def _remove(self, path: str) -> bool:
        self._mirror.hashes.forget(path)
        return self._mirror.tree.remove(path)

    def _clear_path(self, entry: ManifestEntry) -> bool:
        """Remove files or an empty folder in the mirror that are in the way of `entry`.

        If `entry` is a file, a folder at its path is in the way. If `entry` is a folder, a file at
        its path is in the way. A file in place of a parent folder is always in the way.

        Returns:
            True if nothing is in the way now. False if a folder with files stays in the way; the
            user gets a note in this case.
        """
        for path in (*reversed([*folders_of(entry.path)]), entry.path):
            status = self._mirror.tree.status(path)
            is_folder = path != entry.path or entry.is_folder
            if status is None:
                return True
            if stat.S_ISDIR(status.st_mode) is not is_folder and not self._remove(path):
                name = printable(path)
                what = "is a file in the project store, but a folder with files here"
                self._note(f"{name} {what}")
                return False
        return True

    def _run(self) -> None:
        try:
            while not self._stop_event.wait(UPDATE_GAP_S):
                self.catch_up()
        except (OSError, TaasError) as error:
            self._note(f"other hosts' writes to the project store no longer arrive here: {error}")
