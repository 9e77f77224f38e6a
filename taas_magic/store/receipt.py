"""Receipt of a run: rank 0's files in the store, and other ranks' files kept out of the store.

Each host records in a `ReceiptBuilder` what its ranks wrote:

- On a host that shares the store, rank 0 reports the files that its Python code opens for writing.
  At the end, a search finds files of rank 0's subprocesses and C++ writers.
- On a host with a mirror, `outbound.py` records each file that the store has accepted.
"""

import os
import stat
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from taas_magic.messages import (
    KeptOutFile,
    StoreMessage,
    StoreProtectionReported,
    StoreReceipt,
    StoreWriteReported,
    UnsentFile,
    WrittenFile,
)
from taas_magic.store.manifest import ManifestEntry
from taas_magic.store.publish import remove_leftover
from taas_magic.store.rule import is_below
from taas_magic.store.tree import Tree, TreeEntry, folders_of, printable

SEARCH_LIMIT_S = 0.25
"""Maximum seconds to search a store for files that a run wrote.

If the search takes longer, it ends early. Then the receipt may miss files of rank 0's subprocesses
and C++ writers.
"""

_NOTEBOOK = ".ipynb"
"""Suffix of notebooks. The search skips them, because the front end saves them during a run."""

_CLOCK_REALTIME_COARSE = 5
"""Id of Linux's coarse clock (linux/time.h), for which Python has no constant.

File systems use this clock for the times of files.
"""


@dataclass(frozen=True)
class Receipt:
    """List of a run's writes to its store (`run.receipt`). Paths are relative to the store.

    Attributes:
        written: Size in bytes of each file that rank 0 wrote and that still exists, by path.
        kept_out: Numbers of the ranks whose writes were kept out of the store, by path.
        missing: Paths in `kept_out` at which the store has no file, because rank 0 wrote no file
            there. A file that rank 0 wrote and then moved or removed is not missing.
        shared: Folders that every rank could write.
        means: Mechanism that protected the store from ranks other than 0 (value of
            `guard.StoreProtection`); "" if rank 0 was the only rank.
        complete: Whether the search for changed files covered all of the store.
        not_sent: For each file of rank 0 that was not copied from its host to the store, the
            reason, by path.
    """

    written: Mapping[str, int] = field(default_factory=dict)
    kept_out: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    shared: tuple[str, ...] = ()
    means: str = ""
    complete: bool = True
    not_sent: Mapping[str, str] = field(default_factory=dict)

    def with_event(self, event: StoreReceipt) -> "Receipt":
        """Return a copy of this receipt with the receipt of one more host added.

        A path that any host lists as written is not missing, and the folders of a written path are
        not missing either. The result is complete only if this receipt and the host's receipt are
        both complete.
        """
        kept_out = {path: set(ranks) for path, ranks in self.kept_out.items()}
        for file in event.kept_out:
            kept_out.setdefault(file.path, set()).add(file.rank)
        missing = {file.path for file in event.kept_out if not file.in_store}
        written = {**self.written, **{file.path: file.bytes for file in event.written}}
        in_store = {*written, *(folder for path in written for folder in folders_of(path))}
        return Receipt(
            written=written,
            kept_out={path: tuple(sorted(ranks)) for path, ranks in sorted(kept_out.items())},
            # A host that does not share the store reports a path as missing although rank 0 wrote
            # the file, or made the folder, on another host. So remove what the store has.
            missing=(self.missing | missing) - in_store,
            shared=tuple(event.shared),
            means=self.means or event.means,
            complete=self.complete and event.complete,
            not_sent={**self.not_sent, **{file.path: file.why for file in event.not_sent}},
        )


class ReceiptBuilder:
    """Record of what one host's ranks wrote to the project store, for the run's receipt.

    Any thread may call the methods.

    Args:
        shared: Absolute paths of folders in the store that every rank may write.
    """

    def __init__(self, store: str, shared: Iterable[str]) -> None:
        self._store, self._shared = store, tuple(shared)
        self._lock = threading.Lock()
        self._began_ns = time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)
        self._reported: dict[tuple[int, str], None] = {}
        self._sent: dict[str, int] = {}
        self._refused: dict[str, str] = {}
        self._protection = ""

    def record(self, rank: int, message: StoreMessage) -> None:
        """Record a rank's message about a write to the store, or about the store's protection.

        If the message says that the rank has moved the written file away from `message.path`
        (`message.is_moved`), remove the rank's earlier write of this path from the record.
        """
        with self._lock:
            if isinstance(message, StoreWriteReported) and message.is_moved:
                self._reported.pop((rank, message.path), None)
            elif isinstance(message, StoreWriteReported):
                self._reported[rank, message.path] = None
            elif isinstance(message, StoreProtectionReported):
                self._protection = message.protection

    def record_sent(self, entry: ManifestEntry) -> None:
        """Record that the store has accepted a file or folder from this host's mirror."""
        with self._lock:
            self._refused.pop(entry.path, None)
            if not entry.is_folder:
                self._sent[entry.path] = entry.size

    def record_refused(self, path: str, why: str) -> None:
        """Record that the store refused a file from this host's mirror, and why.

        Args:
            path: Path relative to the mirror.
        """
        with self._lock:
            self._refused[path] = why

    def record_removed(self, path: str) -> None:
        """Record that a file was removed from this host's mirror, so that `build` does not list it.

        Args:
            path: Path relative to the mirror.
        """
        with self._lock:
            self._sent.pop(path, None)
            self._refused.pop(path, None)

    def build(self, searches: bool) -> StoreReceipt:
        """Return this host's receipt. Call when the host's ranks have ended.

        The receipt lists:

        - rank 0's files with their sizes, without files in shared folders
        - the writes of other ranks that were kept out, and for each of these paths, whether the
          store has a file there or rank 0 reported one
        - the shared folders, and the mechanism that protected the store
        - the mirror's files that the store has refused and never accepted, with the reasons

        Args:
            searches: Whether the host ran rank 0 and shares the store. If True, search the store:
                the receipt lists the files that rank 0 reported or that the search finds. If False,
                the receipt lists the files that were sent from the mirror.
        """
        with self._lock:
            reported = list(self._reported)
            sent, refused = dict(self._sent), sorted(self._refused.items())
        mine = (path for path in sorted(sent) if not self._is_shared(path))
        written = [WrittenFile(path, sent[path]) for path in mine]
        is_complete = True
        by_rank_0 = {path for rank, path in reported if rank == 0}
        if searches:
            written, is_complete = self._find_written(by_rank_0)
        return StoreReceipt(
            written=written,
            kept_out=[
                KeptOutFile(
                    rank, self._relative_path(path), path in by_rank_0 or os.path.lexists(path)
                )
                for rank, path in reported
                if rank != 0
            ],
            shared=[self._relative_path(path) for path in self._shared],
            means=self._protection,
            complete=is_complete,
            not_sent=[
                UnsentFile(printable(path), why) for path, why in refused if path not in sent
            ],
        )

    def _is_shared(self, path: str) -> bool:
        path = os.path.join(self._store, path)
        return any(is_below(path, folder) for folder in self._shared)

    def _find_written(self, reported: Iterable[str]) -> tuple[list[WrittenFile], bool]:
        """Return the existing files that rank 0 reported or that a search of the store finds.

        Returns:
            The files, and whether the search covered all of the store.
        """
        found, is_complete = find_changed_files(self._store, self._shared, self._began_ns)
        files = ((path, _status(path)) for path in sorted(found.union(reported)))
        written = [
            WrittenFile(self._relative_path(path), status.st_size)
            for path, status in files
            if status is not None and stat.S_ISREG(status.st_mode)
        ]
        return written, is_complete

    def _relative_path(self, path: str) -> str:
        return os.path.relpath(path, self._store)


def find_changed_files(
    store: str, shared: Iterable[str], since_ns: int, limit_s: float = SEARCH_LIMIT_S
) -> tuple[set[str], bool]:
    """Search a store for files that were made or changed since `since_ns`.

    Notebooks, hidden folders and `__pycache__` are skipped. Unfinished saves of killed ranks are
    removed. The search compares each file's ctime, because no call can set it back, unlike mtime.

    Args:
        shared: Absolute paths of folders to skip, because any rank may have written files there.
        since_ns: Time since 1970 in nanoseconds, on the clock of the file system.
        limit_s: Seconds after which the search ends, even if it has not covered all of the store.

    Returns:
        Absolute paths of the files, and whether the search covered all of the store. It did not if
        it reached the time limit, or if the store could not be opened. Folders that cannot be read
        are skipped.
    """
    deadline = time.monotonic() + limit_s
    found, left_out = set(), {os.path.relpath(folder, store) for folder in shared}

    def includes(tree_entry: TreeEntry) -> bool:
        name = os.path.basename(tree_entry.path)
        if not tree_entry.is_folder:
            return not name.endswith(_NOTEBOOK)
        is_leftover = remove_leftover(Path(store, tree_entry.path))
        is_hidden = name.startswith(".") or name == "__pycache__"
        return not (is_leftover or is_hidden or tree_entry.path in left_out)

    try:
        with closing(Tree(store)) as tree:
            for tree_entry in tree.walk(includes):
                if not tree_entry.is_folder and tree_entry.status.st_ctime_ns >= since_ns:
                    found.add(os.path.join(store, tree_entry.path))
                if time.monotonic() >= deadline:
                    return found, False
    except OSError:  # for example, the store has been removed
        return found, False
    return found, True


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None
