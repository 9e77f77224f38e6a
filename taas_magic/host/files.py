"""Transfer of a run's files to and from this host: the run folder and the project store.

If a host does not share the notebook's folders, the agent copies both folders before the processes
start, and sends back what the processes wrote. The agent transfers files by requests to the pool's
process (`pool/files.py`, `store/requests.py`). Each request has a small part of a file, because
heartbeats use the same connection and must not wait for long.
"""

import os
import platform
import re
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from msgspec import structs

from taas_magic import probe
from taas_magic.capture.reducers import copy_environ
from taas_magic.errors import PoolError, listed
from taas_magic.host.spec import EventSink, HostAddress, LocalShare, RunSpec, ShareSpec
from taas_magic.host.supervisor import is_abandoned, lock_folder
from taas_magic.journal import timeline
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import Note, StoreMessage, StoreReceipt
from taas_magic.store.manifest import Manifest, ManifestEntry
from taas_magic.store.mirror import Mirror, StoreUpdater, reserve, update_mirror
from taas_magic.store.outbound import MirrorSender
from taas_magic.store.ownership import RunFileRecord
from taas_magic.store.receipt import ReceiptBuilder
from taas_magic.store.requests import (
    FilePiece,
    FileRoot,
    ListFiles,
    MakeToken,
    MessageSizer,
    ReadFiles,
    SendRequest,
    WriteFiles,
    part_lists,
)
from taas_magic.store.rule import StoreRule, is_below, store_state_folder

LOG_BYTES = 64 << 20
"""Maximum bytes of one log that a host sends to the notebook; only the end of a longer log is sent.
"""

RESULT = re.compile(r"results/(\d+)-(\d+)-\d+", re.ASCII)
"""Pattern for the path of a result in the run folder. The groups are the attempt and the rank."""

PROFILE = re.compile(r"profile/(\d+)-(\d+)\.json\.gz", re.ASCII)
"""Pattern for the path of a profile in the run folder. The groups are the attempt and the rank."""

_MAX_LISTED = 5


class RunFolderCopy:
    """The copy of the run folder on a host that does not share the notebook's run folder.

    The constructor removes an older copy, and copies of agents on this host that were killed. Then
    it creates and locks an empty copy. `copy_in` fills the copy. The copy's name contains the name
    of this host, because several hosts may share a home folder.

    Args:
        cache: Folder in which the copy is created.
    """

    def __init__(self, spec: ShareSpec, send_request: SendRequest, cache: Path) -> None:
        self._send_request, self._sizer = send_request, MessageSizer()
        self._folder = RunFolder(cache / f"{spec.plan.run_id}@{platform.node()}")
        self._attempt = spec.attempt
        self._lock: int | None = None
        self.close()
        for earlier in filter(is_abandoned, cache.glob(f"*@{platform.node()}")):
            shutil.rmtree(earlier, ignore_errors=True)
        (self._folder.path / "logs").mkdir(mode=0o700, parents=True)
        self._folder.path.chmod(0o700)
        with suppress(OSError):  # the file system of the home folder may have no locks
            self._lock = lock_folder(self._folder.path)

    @property
    def path(self) -> Path:
        """Path of the copy on this host."""
        return self._folder.path

    def begin_attempt(self, attempt: int) -> None:
        """Set the current attempt. `send_back` sends results and profiles of this attempt only."""
        self._attempt = attempt

    def copy_in(self, is_wanted: Callable[[], bool]) -> bool:
        """Copy to this host all files of the notebook's run folder that ranks and fetchers read.

        The pool's process lists these files and sends them in parts.

        Args:
            is_wanted: Function that is called before each request for a part of the files. If it
                returns False, the transfer stops.

        Returns:
            True if all files were copied; False if the transfer was stopped.

        Raises:
            PoolError: The pool's process does not respond, or a file was truncated during the
                transfer.
        """
        listed = self._send_request(ListFiles(root=FileRoot.RUN))
        assert listed is not None
        for parts in part_lists(listed.safe().entries, self._sizer):
            if not is_wanted():
                return False
            contents = self._sizer.send(self._send_request, ReadFiles(parts, root=FileRoot.RUN))
            for (name, offset, size), data in zip(parts, contents, strict=True):
                if data is None or len(data) != size:
                    what = f"{name} of the run folder was truncated during its copy to this host"
                    raise PoolError(f"{what}; run the cell again")
                self._write_part(name, offset, data)
        return True

    def send_back(self) -> None:
        """Send to the notebook's machine the files that ranks and fetchers wrote on this host.

        These files are all logs and ledgers in this copy, and the results and profiles of the
        current attempt. Of a log, only the last `LOG_BYTES` bytes are sent. Hidden files are
        skipped, because they are incomplete.

        Call this method when all processes of the run on this host have ended.

        Raises:
            PoolError: The pool's process does not respond.
        """
        base = self._folder.path
        profiles = base / timeline.FOLDER
        folders = (base / "logs", base / "data" / "ledger", self._folder.results, profiles)
        found = [path for path in folders if path.exists()]
        files = [file for folder in found for file in sorted(folder.iterdir()) if file.is_file()]
        for path in files:
            name = path.relative_to(base).as_posix()
            of_attempt = RESULT.fullmatch(name) or PROFILE.fullmatch(name)
            is_old = of_attempt is not None and int(of_attempt[1]) != self._attempt
            # Hidden files are incomplete: a rank was killed while it wrote them.
            if not path.name.startswith(".") and not is_old:
                self._send_file(path, name)

    def close(self) -> None:
        """Remove the copy of the run folder from this host."""
        shutil.rmtree(self._folder.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _write_part(self, name: str, offset: int, data: bytes) -> None:
        """Append a part to a file of the copy. The parts of a file must arrive in order.

        Args:
            name: Path of the file in the run folder.
            offset: Position of the part in the file, in bytes. If 0, the file is created.
        """
        path = self._folder.path / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        new = 0 if offset else os.O_CREAT | os.O_EXCL
        with open(os.open(path, os.O_WRONLY | os.O_APPEND | new, 0o600), "ab") as file:
            file.write(data)

    def _send_file(self, path: Path, name: str) -> None:
        """Send a file in pieces to the notebook's run folder.

        If a log has more than `LOG_BYTES` bytes, only its last `LOG_BYTES` bytes are sent. The
        notebook's file then begins with a line that says how many bytes are missing.

        Args:
            path: Path of the file on this host.
            name: Path of the file in the run folder.
        """
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            left_out = max(0, size - LOG_BYTES) if name.startswith("logs/") else 0
            file.seek(left_out)
            first = f"… {left_out:,} bytes before this are not shown …\n" if left_out else ""
            data, offset, is_last = first.encode(), 0, False
            while not is_last:
                read = file.read(self._sizer.size - len(data))
                data += read
                is_last = file.tell() >= size or not read  # a process may have truncated the file
                end = offset + len(data)
                entry = ManifestEntry(name, end if is_last else end + size - file.tell(), "")
                piece = FilePiece(entry, offset, data)
                self._sizer.send(self._send_request, WriteFiles([piece], root=FileRoot.RUN))
                data, offset = b"", end


def _shares_run_folder(run: RunSpec) -> bool:
    """Return whether this host has the notebook's run folder, at the same path.

    Read the plan in the folder at this path. Return False if the plan cannot be read, or belongs to
    another run.
    """
    try:
        return run.folder.plan().run_id == run.plan.run_id
    except (OSError, ValueError):
        return False


class StoreCopy:
    """The copy of the project store (mirror) on a host that does not share the store.

    The constructor copies the store to the mirror, and sends a note about files that were not
    copied. After `start_copying`, background threads copy changes between the mirror and the store.

    Args:
        note: Function that sends a note to the user.
        session_copy: For a cell in a session: the `StoreCopy` of the session, whose mirror the cell
            uses. None to reserve a separate mirror.

    Raises:
        StoreError: The store cannot be copied to this host.
    """

    def __init__(
        self,
        spec: ShareSpec,
        send_request: SendRequest,
        note: Callable[[str], None],
        session_copy: "StoreCopy | None" = None,
    ) -> None:
        store = spec.run.origin.store
        assert spec.plan.store is not None and store is not None
        self._rule, self._send_request, self._note = spec.plan.store, send_request, note
        self._has_others = spec.n_hosts > 1
        self._receipt_builder: ReceiptBuilder | None = None
        self._sent_folders: Sequence[str] | None = []
        self._updater: StoreUpdater | None = None
        self._outbound: MirrorSender | None = None
        self._mirror: Mirror = (
            reserve(self._rule.path, store.kernel)
            if session_copy is None
            else session_copy._mirror.share()
        )
        try:
            # Fetchers of a session may start again long after the store was listed.
            fresh = spec.attempt > 0 or (spec.is_fetchers and bool(spec.run.session))
            _report_skipped(update_mirror(self._mirror, send_request, fresh=fresh), note)
        except BaseException:
            self.close()
            raise

    def start_copying(self, spec: ShareSpec, receipt_builder: ReceiptBuilder | None) -> None:
        """Start to copy this host's changes to the store, and changes of other hosts to the mirror.

        Background threads copy the changes until `finish_copying`. Do not call this method for a
        session, because each cell of the session copies its own changes.

        Args:
            receipt_builder: Record of the files that this host sends to the store. None if the host
                sends no files.
        """
        self._receipt_builder = receipt_builder
        self._start_transfer(_folders_to_send(spec))

    def rule(self) -> StoreRule:
        """Return the run's settings for the project store, with the mirror's paths on this host."""
        shared = tuple(map(self.locate, self._rule.shared))
        return structs.replace(self._rule, path=self._mirror.path, shared=shared)

    def environ(self) -> dict[str, str]:
        """Return environment variables that tell ranks the paths of the store and its mirror."""
        return copy_environ(self._rule.path, self._mirror.path)

    def locate(self, path: str) -> str:
        """Translate a path in the project store into the path of the same file in the mirror.

        Return a path outside the project store unchanged.
        """
        if not is_below(path, self._rule.path):
            return path
        below = os.path.relpath(path, self._rule.path)
        return os.path.normpath(os.path.join(self._mirror.path, below))

    def prepare_next_attempt(self, spec: ShareSpec) -> None:
        """Prepare the mirror for the next attempt, in which rank 0 may run on another host.

        First sends the remaining changes to the store. Then updates the mirror from the store, so
        that all ranks find the same last checkpoint. Last, starts to copy changes again.

        There is one exception: if rank 0 ran on this host in the last attempt and runs here again,
        this method does not update the mirror. The mirror already has the newest files, and an
        update would remove files that the store did not accept.

        Raises:
            StoreError: The store cannot be copied to this host any more.
        """
        folders = _folders_to_send(spec)
        is_newest = self._sent_folders is None and folders is None
        self.finish_copying()
        if not is_newest:
            update_mirror(self._mirror, self._send_request, fresh=True)
        self._start_transfer(folders)

    def update(self) -> None:
        """Copy changed files of the store to the mirror. Fetchers may read the mirror meanwhile.

        Files that the fetchers wrote to folders of `--shared-writes` stay in the mirror.

        Raises:
            StoreError: The store cannot be copied, or the mirror is not in use any more.
            PoolError: The pool's process does not respond.
        """
        with closing(self._mirror.share()) as mirror:
            kept = [self.locate(folder) for folder in self._rule.shared]
            update_mirror(mirror, self._send_request, fresh=True, kept=kept)

    def finish_copying(self) -> None:
        """Send the remaining changed files to the store, and stop the transfer in both directions.

        Call this method after each attempt, when all processes of the run on this host have ended.
        """
        if self._updater is not None:
            self._updater.finish()
        if self._outbound is not None:
            self._outbound.finish()
        self._outbound = self._updater = None

    def close(self) -> None:
        """End this use of the mirror. A session and its cells use the same mirror."""
        self._mirror.close()

    def _start_transfer(self, folders: Sequence[str] | None) -> None:
        """Start the transfer of changes between the mirror and the store, in background threads.

        One thread sends this host's changes to the store, unless `folders` is empty. If the run has
        other hosts, a second thread copies the changes of these hosts from the store to the mirror.

        Args:
            folders: Folders whose changes this host sends to the store. None for all folders; empty
                to send no changes.
        """
        self._sent_folders = folders
        if folders is None or folders:
            assert self._receipt_builder is not None
            self._outbound = MirrorSender(
                self._mirror, self._send_request, self._note, self._receipt_builder, folders
            )
            self._outbound.start()
        if self._has_others:
            self._updater = StoreUpdater(self._mirror, self._send_request, self._note)
            self._updater.start()


def _report_skipped(manifest: Manifest, note: Callable[[str], None]) -> None:
    """Send a note to the user if files of the project store were not copied to this host.

    The note names the files and the reasons.
    """
    if manifest.skipped:
        skipped = [f"{path} ({why})" for path, why in manifest.skipped.items()]
        note(f"not copied from the project store: {listed(skipped, _MAX_LISTED)}")


def _folders_to_send(spec: ShareSpec) -> Sequence[str] | None:
    """Return the folders of the project store whose changed files this host sends to the store.

    Returns:
        Paths relative to the store. Empty if the host sends no files, as for fetchers. None if the
        host sends the changed files of all folders, as the host of rank 0 does.
    """
    rule = spec.plan.store
    if spec.run.reads_only or spec.is_fetchers:
        return []
    if rule is None or spec.has_rank_0:
        return None
    return [os.path.relpath(folder, rule.path) for folder in rule.shared]


class HostFiles:
    """The files of one share on this host: the run folder and the project store.

    If the host does not share the notebook's folders, this class copies files from these folders to
    the host and back. This class also makes the share's receipt, a list of the files that the share
    wrote.
    """

    def __init__(
        self, spec: ShareSpec, host_address: HostAddress, send_request: SendRequest, emit: EventSink
    ) -> None:
        self._spec, self._host_address = spec, host_address
        self._send_request, self._emit = send_request, emit
        self._has_rank_0 = spec.has_rank_0
        self._folder: RunFolderCopy | None = None
        self._store_copy: StoreCopy | None = None
        self._first_copy_lock = threading.Lock()  # held while `copy_in` copies the store
        self._receipt_builder: ReceiptBuilder | None = None
        self._session: HostFiles | None = None

    def share_mirror(self, session: "HostFiles") -> None:
        """Make `copy_in` use the mirror of a session, instead of reserving another mirror.

        Call this method before `copy_in`, and only for the files of a cell of the session.

        Args:
            session: The files of the session on this host.
        """
        self._session = session

    def copy_in(self, is_wanted: Callable[[], bool]) -> LocalShare | None:
        """Copy the share's files to this host, and start the record of files that the share writes.

        - If this host does not share the notebook's run folder, this method copies the folder.
        - If this host does not share the project store, this method copies the store to a mirror:
          the session's mirror if `share_mirror` was called, else a newly reserved mirror. Then it
          starts background threads, which copy changes between the mirror and the store. For a
          session, it starts no threads, because each cell of the session copies its own changes.
        - The record of written files becomes the receipt. Fetchers, sessions, and runs that only
          read the store have neither record nor receipt.

        Args:
            is_wanted: Function that returns False when the share must end. It can only stop the
                copy of the run folder. The copy of the project store does not call this function.

        Returns:
            The share with this host's paths. None if the copy of the run folder was stopped. If
            this host shares the run folder, the result is never None.

        Raises:
            PoolError: The pool's process does not respond, or a file of the run folder was
                truncated during the copy.
            StoreError: The store cannot be copied to this host.
        """
        spec = self._spec
        # Ranks and fetchers of one run may be on the same host, so their folders must differ.
        cache = Path(probe.cache_folder()) / ("fetching" if spec.is_fetchers else "runs")
        if not _shares_run_folder(spec.run):
            self._folder = RunFolderCopy(spec, self._send_request, cache)
            if not self._folder.copy_in(is_wanted):
                return None
        store = spec.run.origin.store if spec.plan.store is not None else None
        if store is not None and not store.is_here(lambda: self._send_request(MakeToken())):
            session_copy = self._session._store_copy if self._session is not None else None
            with self._first_copy_lock:
                self._store_copy = StoreCopy(spec, self._send_request, self._note, session_copy)
        here = self._local_share(spec)
        builds_receipt = not (spec.run.reads_only or spec.is_fetchers or spec.run.is_session)
        if (rule := here.store) and builds_receipt:
            self._receipt_builder = ReceiptBuilder(rule.path, rule.shared)
        if self._store_copy is not None and not spec.run.is_session:
            self._store_copy.start_copying(spec, self._receipt_builder)
        return here

    def prepare_next_attempt(self, spec: ShareSpec) -> LocalShare:
        """Prepare the run folder's copy and the mirror on this host, if any, for the next attempt.

        Call this method when the ranks of the last attempt have ended.

        Args:
            spec: The share in the next attempt.

        Returns:
            The share with this host's paths.

        Raises:
            StoreError: The store cannot be copied to this host any more.
        """
        self._has_rank_0 = self._has_rank_0 or spec.has_rank_0
        if self._store_copy is not None:
            self._store_copy.prepare_next_attempt(spec)
        if self._folder is not None:
            self._folder.begin_attempt(spec.attempt)
        return self._local_share(spec)

    def update_store_copy(self) -> None:
        """Copy changed files of the project store to this host. Fetchers may run meanwhile.

        If `copy_in` is copying the store, first wait for the end of this copy: the copy may have
        read a file before the file was changed. If this host shares the store, or if `copy_in` has
        not begun to copy the store, do nothing.

        Raises:
            StoreError: The store cannot be copied, or the fetchers have ended.
            PoolError: The pool's process does not respond.
        """
        with self._first_copy_lock:
            store_copy = self._store_copy
        if store_copy is not None:
            store_copy.update()

    def record(self, rank: int, message: StoreMessage) -> None:
        """Record a rank's message about a write to the project store, for the receipt.

        If the share has no receipt, do nothing.
        """
        if self._receipt_builder is not None:
            self._receipt_builder.record(rank, message)

    def send_back(self) -> None:
        """Send the receipt, and the files that the share wrote, to the notebook's machine.

        The order is: files of the project store, the receipt, files of the run folder. At the end,
        removes the copy of the run folder, even after an error. Call this method when all processes
        of the run on this host have ended.

        Raises:
            PoolError: The pool's process does not respond.
        """
        try:
            self._close_store()
            if self._folder is not None:
                self._folder.send_back()
        finally:
            if self._folder is not None:
                self._folder.close()

    def _local_share(self, spec: ShareSpec) -> LocalShare:
        """Return the share `spec` with the paths, environment and import path of this host.

        - On the notebook's machine, environment and import path are the kernel's.
        - On other hosts, the environment is the agent's, with the changes that the notebook has
          made to its own variables. The import path is the agent's, followed by the user's entries
          of the kernel's import path.
        - If this host has a mirror, paths in the project store become paths in the mirror. Further
          environment variables tell ranks the paths of the store and the mirror.
        """
        origin, store, cwd = spec.run.origin, spec.plan.store, spec.run.origin.cwd
        environ, sys_path = dict(origin.environ), origin.sys_path
        if self._host_address.is_foreign:
            environ, sys_path = origin.environ_on(os.environ), origin.sys_path_on(sys.path)
        if (mirror := self._store_copy) is not None:
            store, cwd = mirror.rule(), mirror.locate(cwd)
            sys_path = tuple(map(mirror.locate, sys_path))
            environ |= mirror.environ()
        run_dir = str(self._folder.path) if self._folder is not None else spec.run.run_dir
        return LocalShare(spec, run_dir, store, cwd, environ, sys_path)

    def _close_store(self) -> None:
        """Send this host's remaining files to the project store, then the receipt to the pool.

        Fetchers, sessions, and runs that only read the store have no receipt. If this host has no
        mirror, there are two more steps before the receipt is sent:

        - If rank 0 ran on this host in any attempt, search the store for further files that belong
          in the receipt.
        - If this host is the notebook's machine, record that this run wrote the files in the
          receipt (`_record_receipt`). Later runs on other hosts may then replace these files.

        At the end, release the mirror, if any, even after an error.
        """
        mirror = self._store_copy
        try:
            if mirror is not None:
                mirror.finish_copying()
            if self._receipt_builder is not None:
                receipt = self._receipt_builder.build(searches=self._has_rank_0 and mirror is None)
                if mirror is None and not self._host_address.is_foreign:
                    self._record_receipt(receipt)
                self._emit(receipt)
        finally:
            if mirror is not None:  # last, because the receipt's builder reads the mirror
                mirror.close()

    def _record_receipt(self, receipt: StoreReceipt) -> None:
        """Record that this run wrote the files of a receipt, so that later runs may replace them.

        The record is in the store's state folder (`store_state_folder`). If the record cannot be
        written, return without an error.
        """
        rule = self._spec.plan.store
        assert rule is not None
        # Without this record, a later run on another host could not replace these files. The files
        # of the later run would be stored beside these files.
        with suppress(OSError):
            folder = store_state_folder(rule.path)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            RunFileRecord(folder).record_written(rule.path, [it.path for it in receipt.written])

    def _note(self, text: str) -> None:
        self._emit(Note(text=text))
