"""The notebook's side of a travelling store: answers the hosts of one run.

Lives in the pool's process, one a run. A host names itself by its number in the run, which the
keeper has checked. Everything that it says besides is checked here.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taas_magic.errors import ProtocolError
from taas_magic.store import StoreRule
from taas_magic.travel.chunks import CHUNK_BYTES, MAX_PARTS, Part, pack
from taas_magic.travel.hashes import Hashes
from taas_magic.travel.intake import Intake
from taas_magic.travel.intents import Intents
from taas_magic.travel.look import Look
from taas_magic.travel.manifest import Entry, Manifest
from taas_magic.travel.tree import Tree


@dataclass(frozen=True)
class Change:
    """What a host has done to a path: a file that it wrote, a folder, or None for one gone."""

    number: int
    host_rank: int
    path: str
    entry: Entry | None
    is_folder: bool

    def to_wire(self) -> dict[str, Any]:
        entry = self.entry.to_wire() if self.entry else None
        return {"path": self.path, "entry": entry, "is_folder": self.is_folder}


class Desk:
    """Answers the hosts of a run; any thread may call `answer`.

    Args:
        rule: The run's store.
        folder: Where hashes and intents of that store are kept between runs.
        writer: The host that runs rank 0, by its number.
    """

    def __init__(self, rule: StoreRule, folder: Path, writer: int = 0) -> None:
        self._rule = rule
        self._tree = Tree(rule.path)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._hashes = Hashes(folder / "hashes.json")
        self._intents = Intents(folder / "arriving", self._tree)
        self._intents.clear()
        self._intake = Intake(rule, self._tree, self._intents, writer, self._note)
        self._lock = threading.RLock()
        self._look: Look | None = None
        self._manifest: Manifest | None = None
        self._changes: dict[str, Change] = {}
        self._number = 0
        self._token = ""
        self._is_closed = False
        self._answers: Mapping[str, Callable[..., Any]] = {
            "token": self._make_token,
            "list": self._list,
            "read": self._read,
            "news": self._news,
            "publish": self._intake.publish,
            "write": self._intake.write,
        }

    def answer(self, host_rank: int, what: str, arguments: Mapping[str, Any]) -> Any:
        """Carries out what a host asks; may take as long as a disk does.

        Raises:
            ProtocolError: The protocol has no such question, or the run is over.
            StoreError: The store is too much to travel.
        """
        with self._lock:
            if self._is_closed:
                raise ProtocolError("the run has ended: its project store takes nothing more")
            try:
                return self._answers[what](host_rank, **arguments)
            except (KeyError, TypeError, ValueError) as error:
                raise ProtocolError(f"host {host_rank} asked for {what!r}: {error}") from error

    def close(self) -> None:
        """Ends what is under way; what has not wholly arrived leaves no trace."""
        with self._lock:
            self._is_closed = True
            if self._look is not None:
                self._look.wait()
            self._intake.close()
            if self._token:
                self._tree.remove(self._token)
            self._intents.clear()
            self._hashes.save()
            self._tree.close()

    def _make_token(self, host_rank: int) -> str:
        """A file that is in the store until the run ends: who sees it shares the store."""
        self._token = self._token or self._intents.make_token()
        return self._token

    def _list(self, host_rank: int, fresh: bool = False) -> dict[str, Any] | None:
        """What travels to every host, as the store was when the first one asked.

        Args:
            host_rank: Who asks.
            fresh: Look again, since something was not as it said.

        Returns:
            None while the store is being looked through: a host must ask again.
        """
        if self._look is None or (fresh and self._look.is_over):
            self._look = Look(self._tree, self._hashes, self._rule)
        if not self._look.is_over:
            return None
        found, self._manifest = self._look.result()
        self._intake.cases = found.cases
        return self._manifest.to_wire()

    def _read(self, host_rank: int, parts: Sequence[Part]) -> dict[str, Any]:
        """Parts of files that are in the list or in the news; None for what cannot be read."""
        if len(parts) > MAX_PARTS or sum(max(0, size) for _, _, size in parts) > CHUNK_BYTES:
            raise ValueError("too much at once")
        return pack([self._part(path, offset, size) for path, offset, size in parts])

    def _part(self, path: str, offset: int, size: int) -> bytes | None:
        listed = self._manifest is not None and path in self._manifest.files
        changed = path in self._changes and self._changes[path].entry is not None
        if offset < 0 or size < 0 or not (listed or changed):
            return None
        try:
            descriptor = self._tree.open_file(path)
        except OSError:
            return None
        try:
            return os.pread(descriptor, size, offset)
        finally:
            os.close(descriptor)

    def _news(self, host_rank: int, since: int) -> dict[str, Any]:
        """What other hosts have changed after the change of that number, oldest first."""
        found = []
        for change in reversed(self._changes.values()):
            if change.number <= since:
                break
            if change.host_rank != host_rank:
                found.append(change.to_wire())
        return {"number": self._number, "changes": found[::-1]}

    def _note(self, host_rank: int, path: str, entry: Entry | None, is_folder: bool) -> None:
        self._number += 1
        self._changes.pop(path, None)
        self._changes[path] = Change(self._number, host_rank, path, entry, is_folder)
