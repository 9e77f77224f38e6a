"""The notebook's side of a store that is mirrored: answers the hosts of one run.

Lives in the pool's process, one a run. A host names itself by its number in the run, which the
controller has checked. Everything that it says besides is checked here.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from taas_magic.errors import ProtocolError
from taas_magic.store.manifest import (
    CHUNK_BYTES,
    MAX_PARTS,
    Bundle,
    Change,
    ChangeList,
    Entry,
    FileRequest,
    Hashes,
    Ignore,
    ListChanges,
    ListStore,
    MakeToken,
    Manifest,
    PublishFiles,
    PublishPart,
    ReadStore,
    check_limit,
    describe,
    ignore_of,
    is_path_file,
    pack_parts,
    survey,
    unpack_parts,
)
from taas_magic.store.rule import StoreRule, is_below
from taas_magic.store.tree import (
    Arrival,
    Cases,
    DamagedError,
    Intents,
    Tree,
    UnsafeError,
    parted,
    shown,
    why_unsafe,
)

_T = TypeVar("_T")

MAX_OPEN = 16
"""Large files that one host may be sending at a time."""

GROUP = 64
"""Small files that are forced to the disk together, by so many threads:"""

FLUSHERS = 16


class Intake:
    """Takes what the hosts of a run send; one thread at a time.

    Args:
        tree: The store, open.
        intents: Where unfinished files may be.
        writer: The host that runs rank 0, by its number: it may write anywhere, the others only
            below the rule's shared folders.
        ignore: What does not travel.
        note: Called with (host, path, entry or None, is_folder) of every change that was made.
    """

    def __init__(
        self,
        rule: StoreRule,
        tree: Tree,
        intents: Intents,
        writer: int,
        ignore: Ignore,
        note: Callable[[int, str, Entry | None, bool], None],
    ) -> None:
        self._rule, self._tree, self._intents = rule, tree, intents
        self._writer, self._note = writer, note
        self._ignore = ignore
        self._arriving: dict[tuple[int, str], Arrival] = {}
        self._flushers = ThreadPoolExecutor(FLUSHERS, "taas-store-flush")
        self.cases = Cases()

    def publish(self, host_rank: int, asked: PublishFiles) -> dict[str, str]:
        """Take over what a host has changed; return why, by path, of what was refused."""
        pairs = [*zip(asked.files, unpack_parts(asked.contents), strict=True)]
        answers: dict[str, str] = {}
        for path in asked.folders:
            answers[path] = self._try(host_rank, path, self._make_folder, host_rank, path)
        for first in range(0, len(pairs), GROUP):
            answers |= self._take_small(host_rank, pairs[first : first + GROUP])
        for path in asked.removed:
            answers[path] = self._try(host_rank, path, self._remove, host_rank, path)
        for path in asked.removed_folders:
            answers[path] = self._try(host_rank, path, self._remove_folder, host_rank, path)
        return {path: why for path, why in answers.items() if why}

    def write(self, host_rank: int, asked: PublishPart) -> str:
        """Take the next part of a large file; return why it is refused, or ""."""
        (part,) = unpack_parts(asked.contents)
        return self._try(host_rank, asked.path, self._take, host_rank, asked, part or b"")

    def close(self) -> None:
        """Drop what has not wholly arrived."""
        for key in list(self._arriving):
            self._drop(key)
        self._flushers.shutdown()

    def _try(self, host_rank: int, path: str, step: Callable[..., None], *args: object) -> str:
        """Take a step for a path; return why it was refused, or could not be done, or ""."""
        try:
            self._check(host_rank, path)
            step(*args)
        except UnsafeError as error:
            return error.why
        except DamagedError as error:
            return str(error)
        except OSError as error:
            return f"{error.strerror} on the disk of {self._rule.path}"
        return ""

    def _check(self, host_rank: int, path: str) -> None:
        """Raise where a host may not change a path."""
        if why := why_unsafe(path):
            raise UnsafeError(path, why)
        place = os.path.join(self._rule.path, path)
        if host_rank != self._writer and not any(is_below(place, it) for it in self._rule.shared):
            raise UnsafeError(path, "only rank 0 writes to the project store")
        if why := self._ignore.why_not_back(path):
            raise UnsafeError(path, why)
        if other := self.cases.clash(path):
            raise UnsafeError(path, f"its name differs from {shown(other)} by case alone")

    def _take_small(
        self, host_rank: int, group: Sequence[tuple[Entry, bytes | None]]
    ) -> dict[str, str]:
        """Take small files together: a disk is forced to keep many in hardly more time than one.

        Returns:
            Why, by path, of what was refused; "" of what was not.
        """
        staged: list[tuple[Entry, Arrival]] = []
        answers = {
            entry.path: self._try(host_rank, entry.path, self._stage, staged, entry, part)
            for entry, part in group
        }
        flushing = [self._flushers.submit(arrival.flush) for _, arrival in staged]
        for (entry, arrival), flushed in zip(staged, flushing, strict=True):
            step = partial(self._place, host_rank, entry, arrival, flushed.result)
            answers[entry.path] = self._try(host_rank, entry.path, step)
        for folder in {parted(entry.path)[0] for entry, _ in staged}:
            self._tree.flush_folder(folder)
        return answers

    def _stage(self, staged: list[tuple[Entry, Arrival]], entry: Entry, part: bytes | None) -> None:
        arrival = self._begin(entry.path)
        try:
            arrival.write(part or b"")
            arrival.verify(entry.path, entry.size, entry.sha256)
        except OSError:
            arrival.discard()
            raise
        staged.append((entry, arrival))

    def _take(self, host_rank: int, asked: PublishPart, part: bytes) -> None:
        path, offset, end = asked.path, asked.offset, asked.end
        if end is not None and end.path != path:
            raise UnsafeError(path, f"it ends as {shown(end.path)}")
        key = (host_rank, path)
        if offset == 0:
            self._drop(key)
            if sum(rank == host_rank for rank, _ in self._arriving) >= MAX_OPEN:
                raise UnsafeError(path, f"more than {MAX_OPEN} files are on their way already")
            self._arriving[key] = self._begin(path)
        arrival = self._arriving.get(key)
        if arrival is None or arrival.received != offset:
            raise UnsafeError(path, f"its part at {offset:,} does not follow on")
        try:
            arrival.write(part)
            if end is None:
                return
            arrival.verify(path, end.size, end.sha256)
        except OSError:
            self._drop(key)
            raise
        del self._arriving[key]
        self._place(host_rank, end, arrival, arrival.flush)
        self._tree.flush_folder(parted(path)[0])

    def _begin(self, path: str) -> Arrival:
        folder, _ = parted(path)
        with self._tree.folder(folder, make=True) as here:
            self._intents.add(folder)
            return Arrival(here)

    def _place(
        self, host_rank: int, entry: Entry, arrival: Arrival, flush: Callable[[], None]
    ) -> None:
        """Put a file that is whole into its place; it is gone if it cannot get there."""
        try:
            if is_path_file(entry.path, arrival.begins):
                raise UnsafeError(entry.path, "a .pth that is no checkpoint: Python runs such")
            flush()
            arrival.place(self._tree, entry.path, executable=entry.executable)
        finally:
            arrival.discard()
        self._note(host_rank, entry.path, entry, False)

    def _drop(self, key: tuple[int, str]) -> None:
        arrival = self._arriving.pop(key, None)
        if arrival is not None:
            arrival.discard()

    def _make_folder(self, host_rank: int, path: str) -> None:
        self._tree.make_folder(path)
        self._note(host_rank, path, None, True)

    def _remove(self, host_rank: int, path: str) -> None:
        if self._tree.status(path) is not None:
            os.close(self._tree.open_file(path))  # raises for what is no regular file
            self._tree.remove(path)
        self.cases.forget(path)
        self._note(host_rank, path, None, False)

    def _remove_folder(self, host_rank: int, path: str) -> None:
        if self._tree.remove_folder(path):
            self.cases.forget(path)
            self._note(host_rank, path, None, False)


class Desk:
    """Answers the hosts of a run; any thread may call `answer`.

    Args:
        folder: Where hashes and intents of that store are kept between runs.
        writer: The host that runs rank 0, by its number.
        is_alone: Whether no other desk uses `folder` now: it removes what a killed one has left.
    """

    def __init__(
        self, rule: StoreRule, folder: Path, writer: int = 0, is_alone: bool = True
    ) -> None:
        self._rule, self._is_alone = rule, is_alone
        self._tree = Tree(rule.path)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._hashes = Hashes(folder / "hashes.json")
        self._intents = Intents(folder / "arriving", self._tree)
        if is_alone:
            self._intents.clear()
        ignore = ignore_of(self._tree)
        self._intake = Intake(rule, self._tree, self._intents, writer, ignore, self._note)
        self._lock = threading.RLock()
        self._looker = ThreadPoolExecutor(1, "taas-store-look")
        self._look: Future[tuple[Cases, Manifest]] | None = None
        self._listed: set[str] = set()
        self._changes: dict[str, Change] = {}
        self._number = 0
        self._token = ""
        self._is_closed = False
        self._answers: Mapping[type[FileRequest[Any]], Callable[[int, Any], Any]] = {
            MakeToken: self._make_token,
            ListStore: self._list,
            ReadStore: self._read,
            ListChanges: self._news,
            PublishFiles: self._intake.publish,
            PublishPart: self._intake.write,
        }

    def answer(self, host_rank: int, asked: FileRequest[_T]) -> _T:
        """Carry out what a host asks; may take as long as a disk does.

        Raises:
            ProtocolError: It asks for what cannot be, or the run is over.
            StoreError: The store is too much to travel.
        """
        with self._lock:
            if self._is_closed:
                raise ProtocolError("the run has ended: its project store takes nothing more")
            try:
                answer: _T = self._answers[type(asked)](host_rank, asked)
            except ValueError as error:
                raise ProtocolError(f"host {host_rank}: {asked.op()}: {error}") from error
            return answer

    def close(self) -> None:
        """End what is under way; what has not wholly arrived leaves no trace."""
        with self._lock:
            self._is_closed = True
            self._looker.shutdown()
            self._intake.close()
            if self._token:
                self._tree.remove(self._token)
            if self._is_alone:
                self._intents.clear()
            self._hashes.save()
            self._tree.close()

    def _make_token(self, host_rank: int, asked: MakeToken) -> str:
        self._token = self._token or self._intents.make_token()
        return self._token

    def _list(self, host_rank: int, asked: ListStore) -> Manifest | None:
        if self._look is None or (asked.fresh and self._look.done()):
            self._look = self._looker.submit(self._look_through)
        if not self._look.done():
            return None
        self._intake.cases, manifest = self._look.result()
        self._listed = {entry.path for entry in manifest.files}
        return manifest

    def _look_through(self) -> tuple[Cases, Manifest]:
        """Look the store through, in a thread; the hashes are nobody else's until it is over."""
        found = survey(self._tree, ignore_of(self._tree))
        check_limit(found, self._rule.path, self._rule.limit_bytes)
        return found.cases, describe(self._tree, found, self._hashes)

    def _read(self, host_rank: int, asked: ReadStore) -> Bundle:
        parts = asked.parts
        if len(parts) > MAX_PARTS or sum(max(0, size) for _, _, size in parts) > CHUNK_BYTES:
            raise ValueError("too much at once")
        return pack_parts([self._part(path, offset, size) for path, offset, size in parts])

    def _part(self, path: str, offset: int, size: int) -> bytes | None:
        changed = path in self._changes and self._changes[path].entry is not None
        if offset < 0 or size < 0 or not (changed or path in self._listed):
            return None
        try:
            descriptor = self._tree.open_file(path)
        except OSError:
            return None
        try:
            return os.pread(descriptor, size, offset)
        finally:
            os.close(descriptor)

    def _news(self, host_rank: int, asked: ListChanges) -> ChangeList:
        found = []
        for change in reversed(self._changes.values()):
            if change.number <= asked.since:
                break
            if change.host_rank != host_rank:
                found.append(change)
        return ChangeList(self._number, found[::-1])

    def _note(self, host_rank: int, path: str, entry: Entry | None, is_folder: bool) -> None:
        self._number += 1
        self._changes.pop(path, None)
        self._changes[path] = Change(self._number, host_rank, path, entry, is_folder)
