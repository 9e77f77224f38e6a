"""The notebook's side of a mirrored project store: responds to the requests of one run's hosts.

The pool's process has one `StoreServer` for all ranks of a run, and one for all fetchers of a run.
The controller checks which host sent a request. This module checks everything else, because a host
may be hostile.
"""

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from taas_magic.errors import ProtocolError
from taas_magic.store.ignore import PathFileCheck, normal_form, read_ignore_rules
from taas_magic.store.manifest import ChangeList, Hashes, Manifest, ManifestEntry, scan_store
from taas_magic.store.ownership import (
    KEPT_BESIDE,
    WHY_BESIDE,
    WHY_NOT_KEPT,
    WHY_NOT_NEW,
    WHY_NOT_REMOVED,
    OverwriteRules,
    RunFileRecord,
    is_program,
    may_be_run_by_tools,
)
from taas_magic.store.requests import (
    FilePiece,
    FileRequest,
    ListChanges,
    ListFiles,
    MakeToken,
    ReadFiles,
    WriteFiles,
)
from taas_magic.store.rule import StoreRule, is_below
from taas_magic.store.tree import (
    CaseChecker,
    IncomingFile,
    Tree,
    UnsafeError,
    folders_of,
    printable,
    split_path,
    why_unsafe,
)

_T = TypeVar("_T")

MAX_OPEN = 16
"""Maximum number of large files that one host may send at the same time."""

PIECES_PER_FLUSH = 64
"""Maximum number of pieces that are written before complete files are forced to the disk."""

FLUSHERS = 16
"""Number of threads that force files to the disk."""


class _Change(NamedTuple):
    """The last change that a host made at one path of the store.

    Attributes:
        number: Number of the change, ascending over all changes of the run.
        entry: The file or folder that was written; None for a removal.
    """

    number: int
    host_rank: int
    entry: ManifestEntry | None


class StoreServer:
    """Handler of the requests that a run's hosts send for files of the store.

    The caller must not call `answer` again before the last call has returned.

    Args:
        folder: The store's state folder, in which the hashes of files are saved for the next run.
        writer: Number of the host that runs rank 0, which may write anywhere in the store. The
            other hosts may write only below `rule.shared`.
    """

    def __init__(self, rule: StoreRule, folder: Path, writer: int = 0) -> None:
        self._rule, self._writer, self._tree = rule, writer, Tree(rule.path)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._hashes = Hashes(folder / "hashes.json")
        self._ignore, self._cases = read_ignore_rules(self._tree), CaseChecker()
        self._made, self._overwrite_rules = RunFileRecord(folder), OverwriteRules(rule.overwrite)
        self._kept_beside: set[str] = set()
        """Paths of the user's files beside which the store keeps rank 0's versions."""
        self._incoming: dict[tuple[int, str], IncomingFile] = {}
        self._checks: dict[tuple[int, str], PathFileCheck] = {}
        self._flushers = ThreadPoolExecutor(FLUSHERS, "taas-store-flush")
        self._searcher = ThreadPoolExecutor(1, "taas-store-look")
        self._search: Future[tuple[CaseChecker, Manifest]] | None = None
        self._listed: set[str] = set()
        self._changes: dict[str, _Change] = {}
        self._number = 0
        self._token: IncomingFile | None = None
        self._is_closed = False
        self._answers: Mapping[type[FileRequest[Any]], Callable[[int, Any], Any]] = {
            MakeToken: self._make_token,
            ListFiles: self._current_manifest,
            ReadFiles: self._read_parts,
            ListChanges: self._list_changes,
            WriteFiles: self._apply_changes,
        }

    def answer(self, host_rank: int, request: FileRequest[_T]) -> _T:
        """Handle a host's request and return the response. Block until written data is on the disk.

        Raises:
            ProtocolError: The request is not valid or too large, or the server is closed.
            StoreError: The store is too large to be copied to a host, or a line of its
                `.taasignore` is not a valid pattern.
        """
        if self._is_closed:
            raise ProtocolError("the run has ended: its project store accepts no more files")
        request.check_size()
        try:
            answer: _T = self._answers[type(request)](host_rank, request)
        except ValueError as error:
            raise ProtocolError(f"host {host_rank}: {request.op()}: {error}") from error
        return answer

    def close(self) -> None:
        """Refuse further requests, wait until the server's threads have ended, and clean up.

        The threads search the store, and force files to the disk. After they have ended, discard
        incomplete files, remove the marker file, save the hashes, and close the store's descriptor.
        """
        self._is_closed = True
        self._searcher.shutdown()
        self._flushers.shutdown()
        for key in list(self._incoming):
            self._discard_incoming(key)
        if self._token is not None:
            self._token.discard()
        self._hashes.save()
        self._tree.close()

    def _make_token(self, host_rank: int, request: MakeToken) -> str:
        """Make a marker file in the store, if there is none yet; return the file's name.

        If the requesting host sees the file at the store's path, the host shares the store. The
        first call also removes temporary files that an earlier run left in the store's top folder.
        """
        if self._token is None:
            for seen in self._tree.entries(""):
                self._tree.remove_leftover(seen.path)
            with self._tree.folder("") as here:
                self._token = IncomingFile(here)
        return self._token.name

    def _current_manifest(self, host_rank: int, request: ListFiles) -> Manifest | None:
        """Return the manifest of the store; None while a thread searches the store.

        The first call starts a search in a thread. If `request.fresh` is true and no search is
        running, the call starts another search. This method never waits for a search: while a
        search is running, it returns None, and the host must ask again. Otherwise, it returns the
        result of the last search.

        If rank 0 writes the user's file `a.txt`, the store keeps both versions: the user's as
        `a.txt`, rank 0's as `a.txt.from-host`. The manifest has only one entry for both: it has the
        path `a.txt` and describes rank 0's version.

        Hosts may read the files that the newest returned manifest lists, and the files that a host
        has sent in this run.

        Raises:
            StoreError: The search has failed: the store's files are too large or too many, or a
                line of `.taasignore` is not a valid pattern.
        """
        if self._search is None or (request.fresh and self._search.done()):
            # The search runs in a thread. Meanwhile, no other thread may use the hashes.
            arguments = self._tree, self._hashes, self._rule.limit_bytes
            self._search = self._searcher.submit(scan_store, *arguments)
        if not self._search.done():
            return None
        self._cases, manifest = self._search.result()
        manifest = self._with_run_versions(manifest)
        self._listed = {entry.path for entry in manifest.entries}
        return manifest

    def _with_run_versions(self, manifest: Manifest) -> Manifest:
        """Return `manifest` with rank 0's versions of files in place of the user's versions.

        If rank 0 writes the user's file `a.txt`, the store keeps both versions: the user's as
        `a.txt`, rank 0's as `a.txt.from-host`. The result has no entry `a.txt.from-host`; its entry
        `a.txt` describes rank 0's version. All other entries stay as they are.
        """
        if not self._kept_beside:
            return manifest
        kept = {path + KEPT_BESIDE for path in self._kept_beside}
        entries = []
        for entry in manifest.entries:
            change = self._changes.get(entry.path) if entry.path in self._kept_beside else None
            if entry.path not in kept:
                entries.append(entry if change is None or change.entry is None else change.entry)
        return Manifest(entries, manifest.skipped)

    def _read_parts(self, host_rank: int, request: ReadFiles) -> list[bytes | None]:
        return [self._part(path, offset, size) for path, offset, size in request.parts]

    def _part(self, path: str, offset: int, size: int) -> bytes | None:
        """Read `size` bytes at `offset` of a file that was listed or changed in this run.

        Returns:
            The bytes, fewer than `size` at the end of the file. None if the file cannot be read, or
            was neither listed nor changed in this run.
        """
        changed = path in self._changes and self._changes[path].entry is not None
        if offset < 0 or size < 0 or not (changed or path in self._listed):
            return None
        try:
            with self._tree.open_file(self._path_seen_by_ranks(path)) as file:
                return os.pread(file.fileno(), size, offset)
        except OSError:
            return None

    def _list_changes(self, host_rank: int, request: ListChanges) -> ChangeList:
        """Return the changes that other hosts made after change number `request.since`.

        Files and folders are in the order of their changes. A removed folder comes after its
        removed contents.
        """
        entries, removed = [], []
        for path, change in reversed(self._changes.items()):
            if change.number <= request.since:
                break
            if change.host_rank == host_rank:
                continue
            if change.entry is None:
                removed.append(path)
            else:
                entries.append(change.entry)
        return ChangeList(self._number, entries[::-1], sorted(removed, reverse=True))

    def _apply_changes(self, host_rank: int, request: WriteFiles) -> dict[str, str]:
        """Apply a host's changes; return the reason for each refused path.

        First write the pieces of files, `PIECES_PER_FLUSH` at a time. Then remove the paths in
        `request.removed`, one by one.
        """
        answers: dict[str, str] = {}
        for first in range(0, len(request.pieces), PIECES_PER_FLUSH):
            answers |= self._write_pieces(
                host_rank, request.pieces[first : first + PIECES_PER_FLUSH]
            )
        for path in request.removed:
            answers[path] = self._apply_if_allowed(self._remove, host_rank, path)
        return {path: why for path, why in answers.items() if why}

    def _apply_if_allowed(
        self, step: Callable[..., None], host_rank: int, path: str, *more: object
    ) -> str:
        """Call `step(host_rank, path, *more)` if the host may change `path`.

        Returns:
            Why the change was refused or failed; "" if `step` succeeded.
        """
        try:
            self._check(host_rank, path)
            step(host_rank, path, *more)
        except UnsafeError as error:
            return error.why
        except OSError as error:
            return f"{error.strerror} on the disk of {self._rule.path}"
        return ""

    def _check(self, host_rank: int, path: str) -> None:
        """Raise UnsafeError if the host may never change `path`, whether or not a file is there.

        There are four possible reasons:

        - The path is unsafe (`why_unsafe`).
        - The host does not run rank 0, and the path is outside the shared folders.
        - `IgnoreRules.why_not_accepted` refuses the path.
        - The path differs only by case from another path that the store has.

        If no reason applies, add the path to the set of paths with which later paths are compared.
        """
        if why := why_unsafe(path):
            raise UnsafeError(path, why)
        place = os.path.join(self._rule.path, path)
        if host_rank != self._writer and not any(is_below(place, it) for it in self._rule.shared):
            raise UnsafeError(path, "only rank 0 writes to the project store")
        if why := self._ignore.why_not_accepted(path):
            raise UnsafeError(path, why)
        if other := self._cases.find_clash_or_add(path):
            raise UnsafeError(path, f"its name differs from {printable(other)} only by case")

    def _check_new(self, path: str) -> None:
        """Raise UnsafeError if a host may not make `path` or one of its missing parent folders.

        The store refuses new files and folders that tools may run unasked (`may_be_run_by_tools`).
        In a folder of the user, the store refuses more names than in a folder of runs.

        Exceptions:

        - A path that `[store] overwrite` names is never refused.
        - An `__init__` or `__main__` file is treated like a file in the folder that contains the
          package, because Python can import the package from there.
        """
        if self._overwrite_rules.has(path):
            return
        parts = path.split("/")
        for depth, name in enumerate(parts):
            here = "/".join(parts[: depth + 1])
            if self._tree.status(here) is not None:
                continue
            # Python can import a folder with __init__.py, as it can import a module's file. So
            # __init__.py must be allowed in the folder that contains the package.
            is_package = name.partition(".")[0] in ("__init__", "__main__")
            folder = "/".join(parts[: max(0, depth - is_package)])
            if may_be_run_by_tools(
                normal_form(name), in_users_folder=not self._is_runs_folder(folder)
            ):
                raise UnsafeError(path, WHY_NOT_NEW)

    def _is_runs_folder(self, path: str) -> bool:
        """Return whether a folder belongs to runs. Only in such a folder may hosts make programs.

        A folder belongs to runs if a run has made the folder or one of its parent folders. Folders
        of `--shared-writes`, and folders that do not exist yet, also belong to runs.
        """
        if path and self._tree.status(path) is None:
            return True
        place = os.path.join(self._rule.path, path)
        is_shared = any(is_below(place, folder) for folder in self._rule.shared)
        return is_shared or any(map(self._made.has_folder, (path, *folders_of(path))))

    def _may_replace(self, path: str) -> bool:
        """Return whether a host may replace or remove what is at `path`.

        A host may do so in three cases: no regular file is there; `[store] overwrite` names the
        path; or a run made the file, nobody has changed it since, and it is no notebook.
        """
        status = self._tree.status(path)
        if status is None or not stat.S_ISREG(status.st_mode) or self._overwrite_rules.has(path):
            return True
        is_notebook = normal_form(path).endswith(".ipynb")  # the user may have the notebook open
        return not is_notebook and self._made.has_file(self._tree, path, status)

    def _path_seen_by_ranks(self, path: str) -> str:
        """Return the path of the file that the run's ranks see at `path`.

        The result is `path`, or the path of rank 0's version beside the user's file.
        """
        return path + KEPT_BESIDE if path in self._kept_beside else path

    def _make_folders(self, path: str) -> None:
        for folder in reversed([path, *folders_of(path)]):
            if folder and self._tree.status(folder) is None:
                self._tree.make_folder(folder)
                self._made.record_folder(folder)

    def _write_pieces(self, host_rank: int, pieces: Sequence[FilePiece]) -> dict[str, str]:
        """Write pieces of files, and move all files that are now complete to their paths.

        The complete files are forced to the disk before the move. After the move, the files'
        folders are forced to the disk, too.

        Returns:
            For each path, the reason why the path was refused; "" if it was accepted.
        """
        whole: list[tuple[ManifestEntry, IncomingFile]] = []
        answers: dict[str, str] = {}
        for piece in pieces:
            path = piece.entry.path
            answers[path] = self._apply_if_allowed(self._write_piece, host_rank, path, piece, whole)
        # Force the files to the disk before they get their names. Then a power cut cannot leave
        # incomplete files at these paths.
        flushing = [self._flushers.submit(os.fsync, incoming.file) for _, incoming in whole]
        for (entry, incoming), flushed in zip(whole, flushing, strict=True):
            more = entry, incoming, flushed
            answers[entry.path] = self._apply_if_allowed(
                self._install_file, host_rank, entry.path, *more
            )
        for folder in {split_path(entry.path)[0] for entry, _ in whole}:
            self._tree.flush_folder(folder)
        return answers

    def _write_piece(
        self,
        host_rank: int,
        path: str,
        piece: FilePiece,
        whole: list[tuple[ManifestEntry, IncomingFile]],
    ) -> None:
        """Write one piece of a file to its temporary file, or make a folder.

        For a folder: check that the path may be made, make the folder and its missing parents, and
        record it as a change for the other hosts. For a file:

        - With the first piece, check that the path may be made. If this host has already begun to
          send a file to the path, discard that incomplete file. Make missing parent folders.
        - With each piece of a `.pth` file, check the content.
        - With the last piece, verify the size and hash of the file, and add the file to `whole`.
        - If a write fails, or the file is damaged, discard the file.

        Args:
            whole: List of the files that are complete, for `_install_file`.

        Raises:
            UnsafeError: The path may not be made, the host sends too many files at once, the piece
                does not continue the last one, or the file is damaged.
        """
        entry, key = piece.entry, (host_rank, path)
        if piece.offset == 0:
            self._check_new(path)
        if entry.is_folder:
            self._make_folders(path)
            self._tree.make_folder(path)  # raises if the path exists and is not a folder
            self._record_change(host_rank, path, entry)
            return
        if piece.offset == 0:
            self._discard_incoming(key)
            n_open = sum(rank == host_rank for rank, _ in self._incoming)
            if not entry.sha256 and n_open >= MAX_OPEN:
                raise UnsafeError(path, f"more than {MAX_OPEN} files are being sent already")
            self._make_folders(split_path(path)[0])
            with self._tree.folder(split_path(path)[0]) as here:
                self._incoming[key] = IncomingFile(here)
            if normal_form(path).endswith(".pth"):
                self._checks[key] = PathFileCheck()
        incoming = self._incoming.get(key)
        if incoming is None or incoming.received != piece.offset:
            raise UnsafeError(path, f"its part at {piece.offset:,} does not continue the last part")
        try:
            incoming.write(piece.data)
            if (check := self._checks.get(key)) is not None:
                check.add(piece.data)
            if entry.sha256:
                incoming.verify(path, entry.size, entry.sha256)
                whole.append((entry, self._incoming.pop(key)))
        except OSError:
            self._discard_incoming(key)
            raise

    def _install_file(
        self,
        host_rank: int,
        path: str,
        entry: ManifestEntry,
        incoming: IncomingFile,
        flushed: Future[None],
    ) -> None:
        """Move a complete file from its temporary name to its path; discard the file on failure.

        If the file at `path` is the user's, and `[store] overwrite` in taas.toml does not name the
        path, move the new file beside the user's file (`a.txt.from-host`) instead. In both cases,
        the new file becomes executable only if two conditions hold: it was executable on the host,
        and `[store] overwrite` names the path. Record the file as made by a run, and as a change
        for the other hosts.

        Args:
            flushed: Result of forcing the file to the disk; awaited here.

        Raises:
            UnsafeError: The file was moved beside the user's file. Or the file was discarded for
                one of these reasons: it is an executable program that `[store] overwrite` does not
                name; it is a `.pth` file that is no checkpoint; the user has made or changed both
                `a.txt` and `a.txt.from-host`.
            OSError: The file could not be written to the disk or moved.
        """
        try:
            flushed.result()
            check = self._checks.pop((host_rank, path), None)
            if check is not None and not check.is_checkpoint:
                raise UnsafeError(path, "a .pth file that is not a checkpoint: Python would run it")
            may_overwrite = self._overwrite_rules.has(path)
            if entry.executable and is_program(incoming.begins) and not may_overwrite:
                raise UnsafeError(path, WHY_NOT_NEW)
            may_replace = self._may_replace(path)
            if not (may_replace or self._may_replace(path + KEPT_BESIDE)):
                raise UnsafeError(path, WHY_NOT_KEPT)
            (self._kept_beside.discard if may_replace else self._kept_beside.add)(path)
            self._made.record_file(
                self._path_seen_by_ranks(path), os.fstat(incoming.file), entry.sha256
            )
            may_run = entry.executable and may_overwrite
            incoming.move_to(self._tree, self._path_seen_by_ranks(path), executable=may_run)
        finally:
            incoming.discard()
        self._record_change(host_rank, path, entry)
        if not may_replace:
            raise UnsafeError(path, WHY_BESIDE)

    def _discard_incoming(self, key: tuple[int, str]) -> None:
        """Discard an incomplete file that is being received, if there is such a file.

        Args:
            key: Number of the sending host, and path of the file.
        """
        self._checks.pop(key, None)
        incoming = self._incoming.pop(key, None)
        if incoming is not None:
            incoming.discard()

    def _remove(self, host_rank: int, path: str) -> None:
        """Remove a file or an empty folder for a host; keep a file of the user.

        - A folder that is not empty stays, without an error.
        - A file of the user stays. If rank 0 has written this file in this run, rank 0's version is
          beside the user's file (`a.txt.from-host`): remove rank 0's version. Otherwise, raise
          UnsafeError. In both cases, the other hosts remove the path from their mirrors.
        - Files that this host is just sending to `path` or below are discarded.

        Raises:
            UnsafeError: The file is the user's, and rank 0 has no version beside it. Or the entry
                is no regular file and no folder.
        """
        status = self._tree.status(path)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            self._tree.open_file(path).close()  # raises if the entry is not a regular file
        for key in [it for it in self._incoming if it[0] == host_rank and is_below(it[1], path)]:
            self._discard_incoming(key)  # its temporary file is in the folder that may be removed
        if not self._may_replace(path):
            self._record_change(host_rank, path, None)
            if path not in self._kept_beside:
                raise UnsafeError(path, WHY_NOT_REMOVED)
        place = self._path_seen_by_ranks(path)
        if self._tree.remove(place):
            self._kept_beside.discard(path)
            self._made.forget(place)
            self._cases.forget(place)
            self._record_change(host_rank, path, None)

    def _record_change(self, host_rank: int, path: str, entry: ManifestEntry | None) -> None:
        """Record a change, which the other hosts then get by `ListChanges`.

        The record replaces an earlier change of the same path.
        """
        self._number += 1
        self._changes.pop(path, None)
        self._changes[path] = _Change(self._number, host_rank, entry)
