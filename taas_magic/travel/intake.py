"""What hosts send back into the project store: checked, verified, put in its place in one step."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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

Step = tuple[str, Callable[[], None]]
"""A path, and what is to be done to it."""


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
        steps: list[Step] = [
            *((path, partial(self._make_folder, host_rank, path)) for path in folders),
            *(self._whole(host_rank, entries, parts)),
            *((path, partial(self._remove, host_rank, path)) for path in removed),
            *((path, partial(self._remove_folder, host_rank, path)) for path in removed_folders),
        ]
        answers = {path: self._try(host_rank, path, step) for path, step in steps}
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

    def _whole(
        self, host_rank: int, entries: Sequence[Entry], parts: Sequence[bytes | None]
    ) -> Iterator[Step]:
        for entry, part in zip(entries, parts, strict=True):
            yield entry.path, partial(self._take, host_rank, entry.path, 0, part or b"", entry)

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
            self._begin(key)
        arrival = self._arriving.get(key)
        if arrival is None or arrival.received != offset:
            raise UnsafeError(path, f"its part at {offset:,} does not follow on")
        try:
            arrival.write(part)
            if end is None:
                return
            arrival.verify(path, end.size, end.sha256)
            arrival.place(self._tree, path, executable=end.executable, durable=True)
        except OSError:
            self._drop(key)
            raise
        del self._arriving[key]
        self._note(host_rank, path, end, False)

    def _begin(self, key: tuple[int, str]) -> None:
        host_rank, path = key
        self._drop(key)
        if sum(rank == host_rank for rank, _ in self._arriving) >= MAX_OPEN:
            raise UnsafeError(path, f"more than {MAX_OPEN} files are on their way already")
        folder, _ = parted(path)
        with self._tree.folder(folder, make=True) as here:
            self._intents.add(folder)
            self._arriving[key] = Arrival(here)

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
