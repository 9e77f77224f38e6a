"""What hosts send back into the project store: checked, verified, put in its place in one step."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from taas_magic.store import StoreRule, is_below
from taas_magic.travel.arrival import Arrival, DamagedError
from taas_magic.travel.chunks import unpack
from taas_magic.travel.ignore import Ignore
from taas_magic.travel.intents import Intents
from taas_magic.travel.manifest import Entry
from taas_magic.travel.names import Cases, shown, why_unsafe
from taas_magic.travel.tree import Tree, UnsafeError, parted

MAX_OPEN = 16
"""Large files that one host may be sending at a time."""

GROUP = 64
"""Small files that are forced to the disk together, by so many threads:"""

FLUSHERS = 16


class Intake:
    """Takes what the hosts of a run send; one thread at a time.

    Args:
        rule: The run's store.
        tree: The same, open.
        intents: Where unfinished files may be.
        writer: The host that runs rank 0, by its number: it may write anywhere, the others only
            below the rule's shared folders.
        note: Called with (host, path, entry or None, is_folder) of every change that was made.
    """

    def __init__(
        self,
        rule: StoreRule,
        tree: Tree,
        intents: Intents,
        writer: int,
        note: Callable[[int, str, Entry | None, bool], None],
    ) -> None:
        self._rule, self._tree, self._intents = rule, tree, intents
        self._writer, self._note = writer, note
        self._ignore = Ignore()
        self._arriving: dict[tuple[int, str], Arrival] = {}
        self._flushers = ThreadPoolExecutor(FLUSHERS, "taas-store-flush")
        self.cases = Cases()

    def publish(
        self,
        host_rank: int,
        files: Sequence[Sequence[Any]] = (),
        contents: Mapping[str, Any] | None = None,
        removed: Sequence[str] = (),
        folders: Sequence[str] = (),
        removed_folders: Sequence[str] = (),
    ) -> dict[str, str]:
        """Takes over what a host has changed; removes after all that is new is in its place.

        Args:
            host_rank: The host.
            files: `Entry`s as values.
            contents: Theirs, packed.
            removed: Files that are gone there.
            folders: Folders that were made, outer ones first.
            removed_folders: Folders that are gone there, inner ones first.

        Returns:
            Why, by path, of what was refused.
        """
        entries = [Entry(*fields) for fields in files]
        parts = unpack(contents) if contents else []
        groups = [(self._make_folder, folders), (self._remove, removed)]
        groups += [(self._remove_folder, removed_folders)]
        answers = self._carry_out(host_rank, *groups[0])
        pairs = list(zip(entries, parts, strict=True))
        for first in range(0, len(pairs), GROUP):
            answers |= self._take_whole(host_rank, pairs[first : first + GROUP])
        for call, paths in groups[1:]:
            answers |= self._carry_out(host_rank, call, paths)
        return {path: why for path, why in answers.items() if why}

    def write(
        self,
        host_rank: int,
        path: str,
        offset: int,
        contents: Mapping[str, Any],
        end: Sequence[Any] | None = None,
    ) -> str:
        """Takes the next part of a large file; returns why it is refused, or "".

        Args:
            host_rank: The host.
            path: Of the file.
            offset: Of the part; 0 begins the file anew.
            contents: The part, packed.
            end: With the last part, the file's `Entry` as values.
        """
        (part,) = unpack(contents)
        entry = Entry(*end) if end else None
        step = partial(self._take, host_rank, path, offset, part or b"", entry)
        return self._try(host_rank, path, step)

    def close(self) -> None:
        """Drops what has not wholly arrived."""
        for key in list(self._arriving):
            self._drop(key)
        self._flushers.shutdown()

    def _carry_out(
        self, host_rank: int, call: Callable[[int, str], None], paths: Sequence[str]
    ) -> dict[str, str]:
        return {path: self._try(host_rank, path, partial(call, host_rank, path)) for path in paths}

    def _take_whole(
        self, host_rank: int, group: Sequence[tuple[Entry, bytes | None]]
    ) -> dict[str, str]:
        """Takes small files together: a disk is forced to keep many in hardly more time than one.

        Returns:
            Why, by path, of what was refused; "" of what was not.
        """
        staged: list[tuple[Entry, Arrival]] = []
        answers = {
            entry.path: self._try(host_rank, entry.path, partial(self._stage, staged, entry, part))
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

    def _place(
        self, host_rank: int, entry: Entry, arrival: Arrival, flush: Callable[[], None]
    ) -> None:
        """Puts a file that is whole into its place; it is gone if it cannot get there."""
        try:
            flush()
            arrival.place(self._tree, entry.path, executable=entry.executable)
        finally:
            arrival.discard()
        self._note(host_rank, entry.path, entry, False)

    def _try(self, host_rank: int, path: str, step: Callable[[], None]) -> str:
        """Why a step was refused, or could not be done; "" when it was."""
        try:
            self._check(host_rank, path)
            step()
        except UnsafeError as error:
            return error.why
        except DamagedError as error:
            return str(error)
        except OSError as error:
            return f"{error.strerror} on the disk of {self._rule.path}"
        return ""

    def _check(self, host_rank: int, path: str) -> None:
        """Raises where a host may not change a path."""
        if why := why_unsafe(path):
            raise UnsafeError(path, why)
        place = os.path.join(self._rule.path, path)
        if host_rank != self._writer and not any(is_below(place, it) for it in self._rule.shared):
            raise UnsafeError(path, "only rank 0 writes to the project store")
        if self._ignore.leaves_out_within(path):
            raise UnsafeError(path, "caches and version control do not travel")
        if other := self.cases.clash(path):
            raise UnsafeError(path, f"its name differs from {shown(other)} by case alone")

    def _take(self, host_rank: int, path: str, offset: int, part: bytes, end: Entry | None) -> None:
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
