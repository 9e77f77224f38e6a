"""Looks at paths of a mirror and sends what is new there into the project store.

It goes by how the mirror lies now, whatever happened before, and it never sends what somebody is
still writing: that will be closed, and looked at then.
"""

import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from taas_magic.store import is_below
from taas_magic.travel.ask import Ask, ask_at_pace
from taas_magic.travel.chunks import CHUNK_BYTES, MAX_PARTS, Pace, pack
from taas_magic.travel.manifest import Entry
from taas_magic.travel.mirror import Mirror
from taas_magic.travel.names import shown, why_unsafe
from taas_magic.travel.settled import has_changed, is_being_written
from taas_magic.travel.tree import Seen, UnsafeError, oddity

SMALL_BYTES = 1 << 18
"""Files up to this size go many to a message."""

_FRESH_NS = 100_000_000


@dataclass
class Parcel:
    """What goes in one message."""

    folders: list[str] = field(default_factory=list)
    files: list[tuple[Entry, bytes, os.stat_result]] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    removed_folders: list[str] = field(default_factory=list)

    def is_full(self) -> bool:
        changes = [*self.folders, *self.files, *self.removed, *self.removed_folders]
        size = sum(len(data) for _, data, _ in self.files)
        return len(changes) >= MAX_PARTS or size + SMALL_BYTES > CHUNK_BYTES


class Sender:
    """Sends what one host has written.

    Args:
        mirror: The host's.
        ask: Asks the desk.
        note: Tells the user, at once, what could not be sent.

    Attributes:
        written: Bytes of each file that is in the store now, by path.
        refused: Why, by path, of what is not.
    """

    def __init__(self, mirror: Mirror, ask: Ask, note: Callable[[str], None]) -> None:
        self._mirror, self._ask, self._note = mirror, ask, note
        self._pace = Pace()
        self.written: dict[str, int] = {}
        self.refused: dict[str, str] = {}

    def send_small(self, paths: Iterable[str]) -> list[str]:
        """Sends what there is to be said of some paths; returns which are large files."""
        large: list[str] = []
        parcel = Parcel()
        for path in sorted(paths):
            try:
                self._look(path, parcel, large)
            except UnsafeError as error:
                self._refuse(path, error.why)
            if parcel.is_full():
                self._send(parcel)
                parcel = Parcel()
        self._send(parcel)
        return large

    def send_large(self, path: str, between: Callable[[], None]) -> None:
        """Sends a file part by part.

        Args:
            path: The file; if it changes on its way it is left, since it will be closed again.
            between: Called after every part, so that small files need not wait for a large one.
        """
        try:
            descriptor = self._mirror.tree.open_file(path)
        except OSError:
            return  # gone meanwhile: that is an event of its own
        try:
            before = os.fstat(descriptor)
            if is_being_written(descriptor) or self._is_known(path, before):
                return
            sha256, offset, refused = hashlib.sha256(), 0, ""
            while offset < before.st_size and not refused:
                part = os.pread(descriptor, self._pace.size, offset)
                if not part or has_changed(descriptor, before):
                    return
                sha256.update(part)
                is_last = offset + len(part) == before.st_size
                entry = Entry.of(Seen(path, before), sha256.hexdigest()) if is_last else None
                refused = self._send_part(path, offset, part, entry)
                offset += len(part)
                between()
            self._take_answer(path, refused, before, sha256.hexdigest())
        finally:
            os.close(descriptor)

    def _is_known(self, path: str, status: os.stat_result) -> bool:
        """Whether the store has this file; of one just written, its time stamp does not tell."""
        settled = time.time_ns() - status.st_mtime_ns > _FRESH_NS
        return settled and self._mirror.hashes.is_same(path, status)

    def _send_part(self, path: str, offset: int, part: bytes, entry: Entry | None) -> str:
        values = {"path": path, "offset": offset, "contents": pack([part])}
        end = entry.to_wire() if entry else None
        refused: str = ask_at_pace(self._ask, self._pace, "write", **values, end=end)
        return refused

    def _look(self, path: str, parcel: Parcel, large: list[str]) -> None:
        mirror = self._mirror
        if why := why_unsafe(path):
            raise UnsafeError(path, why)
        status = mirror.tree.status(path)
        if status is None:
            self._add_gone(path, parcel)
        elif stat.S_ISDIR(status.st_mode):
            if path in mirror.hashes:  # it was a file
                self._send(Parcel(removed=[path]))
            if path not in mirror.folders:
                parcel.folders.append(path)
        elif what := oddity(status):
            raise UnsafeError(path, what)
        else:
            if path in mirror.folders:  # it was a folder
                gone = Parcel()
                self._add_gone(path, gone)
                self._send(gone)
            if status.st_size > SMALL_BYTES:
                large.append(path)
            else:
                self._add_file(path, parcel)

    def _add_gone(self, path: str, parcel: Parcel) -> None:
        """What is known to be in the store at a path, and below it, goes there too."""
        mirror = self._mirror
        self.refused.pop(path, None)
        if path in mirror.hashes:
            parcel.removed.append(path)
        if path in mirror.folders:
            below = [folder for folder in list(mirror.folders) if is_below(folder, path)]
            parcel.removed_folders += sorted(below, reverse=True)
            parcel.removed += [file for file in mirror.hashes.paths() if is_below(file, path)]

    def _add_file(self, path: str, parcel: Parcel) -> None:
        """Reads a small file, if nobody writes it and it is not the one that the store has."""
        try:
            descriptor = self._mirror.tree.open_file(path)
        except FileNotFoundError:
            return
        try:
            before = os.fstat(descriptor)
            data = os.pread(descriptor, SMALL_BYTES + 1, 0)
            settled = not is_being_written(descriptor) and not has_changed(descriptor, before)
        finally:
            os.close(descriptor)
        entry = Entry.of(Seen(path, before), hashlib.sha256(data).hexdigest())
        if not settled or len(data) != before.st_size:
            return  # whoever writes it will close it
        if self._mirror.hashes.is_content(path, entry.sha256):
            self._mirror.hashes.remember(path, before, entry.sha256)
        else:
            parcel.files.append((entry, data, before))

    def _send(self, parcel: Parcel) -> None:
        if parcel == Parcel():
            return
        refused = self._ask(
            "publish",
            folders=parcel.folders,
            files=[entry.to_wire() for entry, _, _ in parcel.files],
            contents=pack([data for _, data, _ in parcel.files]),
            removed=parcel.removed,
            removed_folders=parcel.removed_folders,
        )
        for entry, _, status in parcel.files:
            self._take_answer(entry.path, refused.pop(entry.path, ""), status, entry.sha256)
        for path in parcel.removed:
            self._mirror.hashes.forget(path)
            self.written.pop(path, None)
        self._mirror.folders.update(set(parcel.folders) - set(refused))
        self._mirror.folders.difference_update(parcel.removed_folders)
        for path, why in refused.items():
            self._refuse(path, why)

    def _take_answer(self, path: str, why: str, status: os.stat_result, sha256: str) -> None:
        if why:
            self._refuse(path, why)
            return
        self._mirror.hashes.remember(path, status, sha256)
        self.refused.pop(path, None)
        self.written[path] = status.st_size

    def _refuse(self, path: str, why: str) -> None:
        if self.refused.get(path) != why:
            self.refused[path] = why
            self._note(f"{shown(path)} did not get into the project store: {why}")


def covers(path: str, shared: Sequence[str] | None) -> bool:
    """Whether a host may send a path: any, or those below some folders."""
    return shared is None or any(is_below(path, folder) for folder in shared)
