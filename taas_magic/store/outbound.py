"""Send files that ranks write in a mirror back to the project store, soon after they are closed.

An event of inotify(7) only tells at which path something has changed. Soon afterwards,
`_ChangeSender` sends the file that is then at this path. If events were lost, or inotify is not
available, all paths are checked for changes.

Neither a package nor polling can replace inotify: docs/decisions.md has the measurements.
"""

import ctypes
import fcntl
import hashlib
import os
import select
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from io import FileIO

from taas_magic.errors import TaasError
from taas_magic.store.ignore import IgnoreRules, read_ignore_rules
from taas_magic.store.manifest import FOLDER, ManifestEntry
from taas_magic.store.mirror import Mirror
from taas_magic.store.ownership import WHY_BESIDE
from taas_magic.store.receipt import ReceiptBuilder
from taas_magic.store.requests import (
    CHUNK_BYTES,
    MAX_PARTS,
    FilePiece,
    MessageSizer,
    SendRequest,
    WriteFiles,
)
from taas_magic.store.rule import is_below
from taas_magic.store.tree import TreeEntry, UnsafeError, folders_of, printable, why_unsafe

BLIND_S = 0.5
"""Seconds between two searches of the mirror for changes if inotify misses some folders."""

_LIBC = ctypes.CDLL(None, use_errno=True)

_CLOSE_WRITE, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x8, 0x40, 0x80, 0x100, 0x200
_Q_OVERFLOW, _IGNORED = 0x4000, 0x8000
_ONLYDIR, _DONT_FOLLOW, _EXCL_UNLINK, _ISDIR = 0x1000000, 0x2000000, 0x4000000, 0x40000000
_WANTED = _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
_FLAGS = _WANTED | _ONLYDIR | _DONT_FOLLOW | _EXCL_UNLINK

_EVENT = struct.Struct("iIII")


class _Watch:
    """Watcher that learns from inotify what changes in a folder and in all folders below it.

    Folders that are made later are watched, too.

    Args:
        root: Path of the folder.
        skips: Function that gets the path of a folder relative to `root`, and returns True if the
            folder need not be watched.
    """

    def __init__(self, root: str, skips: Callable[[str], bool]) -> None:
        self._root, self._skips = root, skips
        self._folders: dict[int, str] = {}
        self._stop_fd = os.eventfd(0)
        self._poll = select.poll()
        self._poll.register(self._stop_fd, select.POLLIN)
        self._inotify = _LIBC.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self._misses_events = self._inotify < 0
        if self._inotify >= 0:
            self._poll.register(self._inotify, select.POLLIN)
            self._watch_tree("")

    def close(self) -> None:
        for descriptor in (self._stop_fd, self._inotify):
            if descriptor >= 0:
                os.close(descriptor)

    def wake(self) -> None:
        """Make `wait` return at once: the current call in another thread, and all later calls."""
        os.eventfd_write(self._stop_fd, 1)

    def wait(self, timeout_s: float | None) -> tuple[set[str], bool]:
        """Wait until something below `root` changes, `timeout_s` passes, or `wake` is called.

        If some folder cannot be watched, wait at most `BLIND_S` seconds, after which the caller
        must check all paths. If folders were made, watch these folders, too. If events were lost,
        search `root` again for folders to watch.

        Args:
            timeout_s: Seconds to wait at most; None for no limit.

        Returns:
            Paths at which something may have changed; and whether all other paths must also be
            checked, because events may have been lost.
        """
        if self._misses_events:
            timeout_s = BLIND_S if timeout_s is None else min(timeout_s, BLIND_S)
        self._poll.poll(None if timeout_s is None else timeout_s * 1000)
        paths, overflowed = set[str](), False
        for watch, mask, name in self._events():
            if mask & _Q_OVERFLOW:
                overflowed = True
                paths.update(self._watch_tree(""))
            elif mask & _IGNORED:
                self._folders.pop(watch, None)
            elif watch in self._folders and name:
                path = _below(self._folders[watch], name)
                paths.add(path)
                if mask & _ISDIR and mask & (_CREATE | _MOVED_TO):
                    paths.update(self._watch_tree(path))
        return paths, overflowed or self._misses_events

    def _events(self) -> Iterator[tuple[int, int, str]]:
        """Yield the watch descriptor, the mask and the file name of each pending inotify event."""
        while self._inotify >= 0:
            try:
                data = os.read(self._inotify, 1 << 16)
            except BlockingIOError:
                return
            offset = 0
            while offset < len(data):
                watch, mask, _, length = _EVENT.unpack_from(data, offset)
                offset += _EVENT.size
                name = data[offset : offset + length].rstrip(b"\0")
                offset += length
                yield watch, mask, os.fsdecode(name)

    def _watch_tree(self, path: str) -> list[str]:
        """Watch a folder and all folders below it; return all paths that already exist below it.

        Skip a folder that no longer exists, or for which `skips` is true. If an existing folder
        cannot be watched, record that events are missed from now on. The system keeps the watch of
        a folder that is moved within the tree. For such a folder, this method records the new path.
        """
        if path and self._skips(path):
            return []
        folder = os.path.join(self._root, path)
        watch = _LIBC.inotify_add_watch(self._inotify, os.fsencode(folder), _FLAGS)
        if watch < 0:
            gone = not os.path.isdir(folder) or os.path.islink(folder)
            self._misses_events = self._misses_events or not gone
            return []
        self._folders[watch] = path
        found = []
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                found.append(_below(path, entry.name))
                if entry.is_dir(follow_symlinks=False):
                    found += self._watch_tree(found[-1])
        return found


def _below(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def is_being_written(file: FileIO) -> bool:
    """Return whether any process has the file open for writing; False if unknown.

    The system grants a read lease (F_SETLEASE in fcntl(2)) only if no process has the file open for
    writing. If another process opens the file during the lease, the caller's process gets SIGURG.
    By default, SIGURG has no effect.
    """
    try:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return True
    except OSError:
        return False  # this file system does not support leases
    with suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def has_changed(file: FileIO, before: os.stat_result) -> bool:
    """Return whether an open file has another size or modification time than in `before`."""
    now = os.fstat(file.fileno())
    return (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns)


SMALL_BYTES = 1 << 18
"""Maximum size in bytes of a file that is sent as one piece. Larger files have several pieces."""

_FRESH_NS = 100_000_000


class _ChangeSender:
    """Sender of the changes in one host's mirror to the notebook's side.

    A file is large if it has more than `SMALL_BYTES` bytes. A large file is sent in several pieces.

    Args:
        note: Function that shows the user which file could not be sent, and why.
        receipt_builder: Record of sent and refused files, which this class updates.

    Attributes:
        large: Remaining pieces of the large files that are being sent, by path.
    """

    def __init__(
        self,
        mirror: Mirror,
        send_request: SendRequest,
        note: Callable[[str], None],
        receipt_builder: ReceiptBuilder,
    ) -> None:
        self._mirror, self._send_request = mirror, send_request
        self._note, self._receipt_builder = note, receipt_builder
        self._ignore = read_ignore_rules(mirror.tree)
        self._noted_reasons: set[str] = set()
        self._sizer = MessageSizer()
        self._unsent = WriteFiles()
        self._statuses: dict[str, os.stat_result] = {}
        self.large: dict[str, Iterator[FilePiece]] = {}

    def send_changes(self, paths: Iterable[str]) -> None:
        """Send the changes at `paths`; put large files into `large`, for `send_large`.

        Changes are queued, and the queue is sent when it is full and at the end. A path that no
        longer exists is sent as a removal. A path that may not be copied, that cannot be read, or
        that is neither a file nor a folder, is recorded as refused.

        Args:
            paths: Paths relative to the mirror; a folder comes before its contents.
        """
        for path in paths:
            try:
                self._queue_change(path)
            except UnsafeError as error:
                self._refuse(path, error.why)
            unsent = self._unsent
            n_parts = len(unsent.pieces) + len(unsent.removed)
            n_bytes = sum(len(piece.data) for piece in unsent.pieces)
            if n_parts >= MAX_PARTS or n_bytes >= min(self._sizer.size, CHUNK_BYTES - SMALL_BYTES):
                self._send_queued()
        self._send_queued()

    def send_large(self) -> None:
        """Send the next piece of the first file in `large`, which must not be empty.

        After the last piece, remove the file from `large`. Remove the file earlier in these cases:

        - The file has changed since its first piece, or a process has the file open for writing.
        - No regular file is at the path any more.
        - The file cannot be read, or the store refuses the file. Also record the file as refused.
        """
        path, pieces = next(iter(self.large.items()))
        try:
            piece = next(pieces, None)
        except UnsafeError as error:
            self._refuse(path, error.why)
            piece = None
        self._unsent.pieces += [piece] if piece else []
        if path in self._send_queued() or piece is None or piece.entry.sha256:
            del self.large[path]

    def send_all(self, paths: Iterable[str]) -> None:
        """Send the changes at `paths`, and then all files in `large`."""
        self.send_changes(paths)
        while self.large:
            self.send_large()

    def _pieces(self, path: str) -> Iterator[FilePiece]:
        """Yield the pieces of a file, and store the file's status in `_statuses`.

        A small file is a single piece. Only the last piece has the hash of the file. If no regular
        file is at the path, yield nothing. If a process has the file open for writing, or if the
        file has changed since the first piece, end early.

        Raises:
            UnsafeError: The file cannot be read.
        """
        try:
            file = self._mirror.tree.open_file(path)
        except (FileNotFoundError, NotADirectoryError, UnsafeError):
            return  # removed or replaced by a folder or link; this causes its own event
        except OSError as error:
            raise UnsafeError(path, str(error.strerror)) from error
        with file:
            self._statuses[path] = before = os.fstat(file.fileno())
            sha256, offset, is_last = hashlib.sha256(), 0, False
            while not is_last:
                size = self._sizer.size if before.st_size > SMALL_BYTES else SMALL_BYTES
                data = file.read(size)
                is_last = offset + len(data) >= before.st_size
                if is_being_written(file) or has_changed(file, before):
                    return
                sha256.update(data)
                entry = ManifestEntry.of(
                    TreeEntry(path, before), sha256.hexdigest() if is_last else ""
                )
                yield FilePiece(entry, offset, data)
                offset += len(data)

    def _queue_change(self, path: str) -> None:
        """Queue the change at `path` for the next message; add a large file to `large` instead.

        If nothing is at `path` now, queue a removal. If a folder has replaced a file, or a file has
        replaced a folder, first send the removal of the replaced entry. Do not queue a folder that
        the store already has, or a file that has not changed.

        Raises:
            UnsafeError: The path may not be sent, or the entry is neither a file nor a folder.
        """
        mirror = self._mirror
        if why := why_unsafe(path) or self._ignore.why_not_accepted(path):
            raise UnsafeError(path, why)
        status = mirror.tree.status(path)
        if status is None:
            self._queue_removal(path)
            return
        tree_entry = TreeEntry(path, status)
        if what := tree_entry.special_kind:
            raise UnsafeError(path, what)
        was_folder = mirror.hashes.has_hash(path, FOLDER)
        if path in mirror.hashes and was_folder is not tree_entry.is_folder:
            self._queue_removal(path)
            self._send_queued()
        if not tree_entry.is_folder:
            self._queue_file(path, status)
        elif not was_folder:
            self._unsent.pieces.append(FilePiece(ManifestEntry.of(tree_entry, FOLDER), 0, b""))

    def _queue_removal(self, path: str) -> None:
        """Queue the removal of a file, or of a folder with its contents, from the store.

        Only paths that `mirror.hashes` lists are queued: the store has no other paths of this
        mirror. These things also happen:

        - The queued paths are removed from `mirror.hashes`.
        - `path` and the queued paths are removed from the receipt.
        - If the store has a folder at `path`, the large files in this folder are no longer sent.
        """
        hashes = self._mirror.hashes
        self._receipt_builder.record_removed(path)
        gone = [path] if path in hashes else []
        if hashes.has_hash(path, FOLDER):
            gone = sorted((it for it in hashes.paths() if is_below(it, path)), reverse=True)
            for it in [it for it in self.large if is_below(it, path)]:
                del self.large[it]
        for it in gone:
            hashes.forget(it)
            self._receipt_builder.record_removed(it)
        self._unsent.removed += gone

    def _queue_file(self, path: str, status: os.stat_result) -> None:
        """Queue a changed small file for the next message; add a changed large file to `large`.

        Unchanged files are not queued. `mirror.hashes` tells whether a file has changed:

        - A small file has changed if its hash differs. If the hash is equal, only record the file's
          new status in `mirror.hashes`. A small file that is being written is not queued.
        - A large file counts as changed if its inode, size or modification time differs, or if it
          was written less than `_FRESH_NS` nanoseconds ago.
        """
        if status.st_size > SMALL_BYTES:
            # Shortly after a write, another write may leave the file's time stamp unchanged.
            settled = time.time_ns() - status.st_mtime_ns > _FRESH_NS
            if not (settled and self._mirror.hashes.is_same(path, status)):
                self.large[path] = self._pieces(path)
            return
        piece = next(self._pieces(path), None)
        if piece is None or not piece.entry.sha256:
            return  # the file is being written; its close causes another event
        if self._mirror.hashes.has_hash(path, piece.entry.sha256):
            self._mirror.hashes.remember(path, piece.entry.sha256, self._statuses.pop(path))
        else:
            self._unsent.pieces.append(piece)

    def _send_queued(self) -> dict[str, str]:
        """Send the queued changes, and record which of them the store has accepted.

        If nothing is queued, do nothing. For each change, the store accepts or refuses its path:

        - For an accepted file, record the new hash in `mirror.hashes`, and the file in the receipt.
        - For a refused path, record the reason in the receipt. The user gets one note for each
          reason.
        - If the store has put the file beside the user's file (`a.txt.from-host`), the path counts
          as refused, but record the new hash.

        Returns:
            The reason for each refused path.
        """
        unsent, self._unsent = self._unsent, WriteFiles()
        if unsent == self._unsent:
            return {}
        refused = self._sizer.send(self._send_request, unsent)
        for entry in (piece.entry for piece in unsent.pieces if piece.entry.sha256):
            path, status = entry.path, self._statuses.pop(entry.path, None)
            is_kept_beside = refused.get(path) == WHY_BESIDE  # the file arrived, under another name
            if is_kept_beside:
                self._mirror.hashes.remember(path, entry.sha256, status)
            elif path not in refused:
                self._mirror.hashes.remember(path, entry.sha256, status)
                self._receipt_builder.record_sent(entry)
        for path, why in refused.items():
            self._refuse(path, why)
        return refused

    def _refuse(self, path: str, why: str) -> None:
        """Record that a path was refused, and why.

        If this is the first path with this reason, show the user a note with the path and the
        reason.
        """
        self._receipt_builder.record_refused(path, why)
        if why not in self._noted_reasons:
            self._note(f"{printable(path)} was not copied to the project store: {why}")
        # Show one note for each reason, because thousands of files may have the same reason.
        self._noted_reasons.add(why)


SEND_DELAY_S = 0.05
"""Seconds from a change of a file until the file is sent.

By then, most temporary files have been renamed, so they are not sent under their temporary names.
"""

QUIET_S = 0.2
"""Minimum seconds between the sending of a file and the next check of the same file."""


class MirrorSender:
    """Thread that sends changes in a host's mirror back to the project store.

    Args:
        note: Function that shows the user which files could not be sent, and why.
        receipt_builder: Record of sent and refused files, which this class updates.
        shared: Shared folders, relative to the mirror. A host without rank 0 sends only changes in
            these folders. None on the host of rank 0, which sends all changes.
    """

    def __init__(
        self,
        mirror: Mirror,
        send_request: SendRequest,
        note: Callable[[str], None],
        receipt_builder: ReceiptBuilder,
        shared: Sequence[str] | None = None,
    ) -> None:
        self._mirror, self._shared, self._note = mirror, shared, note
        self._sender = _ChangeSender(mirror, send_request, note, receipt_builder)
        self._ignore = IgnoreRules()
        self._watch = _Watch(mirror.path, lambda path: self._ignore.leaves_out(path, folder=True))
        self._due: dict[str, float] = {}
        self._quiet_until: dict[str, float] = {}
        self._finishing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="taas-store-out", daemon=True)

    def start(self) -> None:
        """Start the thread, which sends each change soon after it happens."""
        self._thread.start()

    def finish(self) -> None:
        """Send all remaining changes, stop the thread, and wait until it has ended."""
        self._finishing.set()
        self._watch.wake()
        self._thread.join()
        self._watch.close()

    def _run(self) -> None:
        """Send each change when it is due, until `finish` is called; then send all other changes.

        After `finish`, first send the remaining pieces of large files. Then send the changes at all
        paths at which the mirror differs from the store. On an error, show a note to the user and
        stop.
        """
        try:
            while not self._finishing.is_set():
                first = min(self._due.values(), default=None)
                wait_s = None if first is None else max(0.0, first - time.monotonic())
                self._schedule_checks(*self._watch.wait(0 if self._sender.large else wait_s))
                self._send_due()
            self._sender.send_all(())
            self._schedule_checks(self._watch.wait(0)[0], everything=True)
            self._sender.send_all(self._paths_to_check({*self._due}))
        except (OSError, TaasError) as error:
            self._note(f"rank 0's writes are no longer copied to the project store: {error}")

    def _schedule_checks(self, paths: Iterable[str], everything: bool) -> None:
        """For each path in `paths`, schedule a check whether something at the path has changed.

        Skip paths that this host does not send (`_sends_path`). The check is due `SEND_DELAY_S`
        seconds from now, but not earlier than `QUIET_S` seconds after the path was last sent. A
        check that is already scheduled keeps its time.

        Args:
            paths: Paths relative to the mirror.
            everything: Whether to schedule checks also for all other paths at which the mirror may
                differ from the store.
        """
        now = time.monotonic()
        self._quiet_until = {p: until for p, until in self._quiet_until.items() if until > now}
        for path in (*paths, *(self._differing_paths() if everything else ())):
            if self._sends_path(path):
                self._due.setdefault(
                    path, max(now + SEND_DELAY_S, self._quiet_until.get(path, now))
                )

    def _sends_path(self, path: str) -> bool:
        """Return whether this host sends changes at `path`.

        A host without rank 0 sends only paths in shared folders. No host sends paths that the
        default ignore rules name.
        """
        is_ours = self._shared is None or any(is_below(path, it) for it in self._shared)
        return is_ours and not self._ignore.leaves_out_file_or_folder(path)

    def _paths_to_check(self, paths: set[str]) -> list[str]:
        """Return all paths to check because of changes at `paths`, outer folders first.

        The result has `paths` and their parent folders, because new parent folders must be sent
        first. If the store has a folder at a path in `paths`, the result also has all paths that
        the store has below this folder. Reason: the mirror may have another folder there now.
        Parent folders that this host does not send are left out.
        """
        hashes = self._mirror.hashes
        named = {path for path in paths if hashes.has_hash(path, FOLDER)}
        above = (it for path in paths for it in folders_of(path) if self._sends_path(it))
        known = hashes.paths() if named else ()
        below = (it for it in known if named.intersection(folders_of(it)))
        return sorted(paths.union(above, below))

    def _send_due(self) -> None:
        """Send the changes at all paths whose check is due, and the next piece of a large file.

        Also send the changes of the parent folders of these paths, and the changes below these
        paths. While pieces of a file are still to be sent, the check of this file waits. The next
        check of a sent path is due `QUIET_S` seconds later at the earliest.
        """
        now, large = time.monotonic(), self._sender.large
        due = [path for path, at in self._due.items() if at <= now and path not in large]
        for path in due:
            del self._due[path]
        self._sender.send_changes(self._paths_to_check({*due}))
        self._quiet_until.update(dict.fromkeys(due, time.monotonic() + QUIET_S))
        if large:
            self._sender.send_large()

    def _differing_paths(self) -> Iterator[str]:
        """Yield all paths at which the mirror may differ from the store; read no file.

        A path differs if it is new, if it no longer exists, or if the inode, size or time of its
        file has changed. Paths that a default ignore rule names are not searched.
        """
        hashes, there = self._mirror.hashes, set()
        left_out = self._ignore.leaves_out
        for found in self._mirror.tree.walk(lambda it: not left_out(it.path, it.is_folder)):
            there.add(found.path)
            if found.is_folder:
                same = hashes.has_hash(found.path, FOLDER)
            else:
                same = not found.special_kind and hashes.is_same(found.path, found.status)
            if not same:
                yield found.path
        yield from (path for path in hashes.paths() if path not in there)
