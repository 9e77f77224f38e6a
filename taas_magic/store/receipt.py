"""Receipt of a run: files that rank 0 wrote to the store, and other ranks' files kept out of it.

Rank 0 notes the files that its Python code opens for writing. Files from its subprocesses and C++
writers are found afterwards by a search of the store for files that changed since the run began.
The search skips hidden folders, in which tools keep their own files. The host collects both when
its ranks have ended, so that the files of a killed rank are included.
"""

import os
import stat
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from taas_magic.messages import (
    KeptOutFile,
    RankHeld,
    RankTouched,
    StoreMessage,
    StoreReceipt,
    WrittenFile,
)
from taas_magic.store.publish import remove_leftover
from taas_magic.store.tree import Tree, TreeEntry

LOOK_LIMIT_S = 0.25
"""Maximum seconds for the search of a store.

Changed files that the search has not found by then are listed only if rank 0 noted them.
"""

_NOTEBOOK = ".ipynb"
"""Suffix of files that the search skips: the front end saves notebooks during a run."""


@dataclass(frozen=True)
class Receipt:
    """List of a run's writes to its store (`run.receipt`). Paths are relative to the store.

    Attributes:
        written: Bytes of each existing file that rank 0 wrote, by path.
        kept_out: Ranks whose write of a file was kept out of the store, by path.
        missing: Paths in `kept_out` that do not exist in the store, because rank 0 wrote no such
            file.
        shared: Folders that every rank could write.
        means: Mechanism that protected the store from ranks other than 0 (value of
            `guard.StoreProtection`); "" if there were no such ranks.
        complete: Whether the search for changed files covered all of the store.
        not_sent: Reason for each of rank 0's files that did not arrive in the store from a host
            that does not share it, by path.
    """

    written: Mapping[str, int] = field(default_factory=dict)
    kept_out: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    shared: tuple[str, ...] = ()
    means: str = ""
    complete: bool = True
    not_sent: Mapping[str, str] = field(default_factory=dict)

    def with_event(self, event: StoreReceipt) -> "Receipt":
        """Return a copy with one more host's receipt merged in."""
        kept_out = {path: set(ranks) for path, ranks in self.kept_out.items()}
        for file in event.kept_out:
            kept_out.setdefault(file.path, set()).add(file.rank)
        missing = {file.path for file in event.kept_out if not file.in_store}
        written = {**self.written, **{file.path: file.bytes for file in event.written}}
        return Receipt(
            written=written,
            kept_out={path: tuple(sorted(ranks)) for path, ranks in sorted(kept_out.items())},
            # rank 0's file may not have reached a host that does not share the store
            missing=(self.missing | missing) - set(written),
            shared=tuple(event.shared),
            means=self.means or event.means,
            complete=self.complete and event.complete,
            not_sent={**self.not_sent, **{file.path: file.why for file in event.not_sent}},
        )


class Ledger:
    """Collects the messages of one host's ranks about files that they wrote, for the receipt.

    Any thread may call it.

    Args:
        store: Path of the store, absolute and without symbolic links.
        shared: Absolute paths of folders in the store that every rank may write.
    """

    def __init__(self, store: str, shared: Iterable[str]) -> None:
        self._store, self._shared = store, tuple(shared)
        self._lock = threading.Lock()
        self._began_ns = _now_ns()
        self._noted: dict[tuple[int, str], None] = {}
        self._means = ""

    def record(self, rank: int, message: StoreMessage) -> None:
        """Record a message from a rank."""
        with self._lock:
            if isinstance(message, RankTouched):
                self._noted[rank, message.path] = None
            elif isinstance(message, RankHeld):
                self._means = message.means

    def close(self, has_rank_0: bool) -> StoreReceipt:
        """Return this host's receipt. Call when the host's ranks have ended.

        If the store is searched, unfinished saves of killed ranks are removed.

        Args:
            has_rank_0: Whether the host ran rank 0; only then the store is searched.
        """
        with self._lock:
            noted = list(self._noted)
        found, is_complete = set[str](), True
        if has_rank_0:
            found, is_complete = changed(self._store, self._shared, self._began_ns)
        written = sorted(found | {path for rank, path in noted if rank == 0})
        files = ((path, _status(path)) for path in written)
        return StoreReceipt(
            written=[
                WrittenFile(self._name(path), status.st_size)
                for path, status in files
                if status is not None and stat.S_ISREG(status.st_mode)
            ],
            kept_out=[
                KeptOutFile(rank, self._name(path), os.path.lexists(path))
                for rank, path in noted
                if rank != 0
            ],
            shared=[self._name(path) for path in self._shared],
            means=self._means,
            complete=is_complete,
        )

    def _name(self, path: str) -> str:
        return os.path.relpath(path, self._store)


def changed(
    store: str, shared: Iterable[str], since_ns: int, limit_s: float = LOOK_LIMIT_S
) -> tuple[set[str], bool]:
    """Search a store for files that were made or changed since `since_ns`.

    Unfinished saves of killed ranks are removed. A file's ctime decides, because no call can set it
    back.

    Args:
        store: Absolute path of the store.
        shared: Absolute paths of folders to skip, as files there may be from any rank.
        since_ns: Time on the file system's clock, in nanoseconds.
        limit_s: Maximum seconds for the search.

    Returns:
        Absolute paths of the files, and whether the search covered all of the store.
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

    with suppress(OSError), closing(Tree(store)) as tree:
        for tree_entry in tree.walk(includes):
            if not tree_entry.is_folder and tree_entry.status.st_ctime_ns >= since_ns:
                found.add(os.path.join(store, tree_entry.path))
            if time.monotonic() >= deadline:
                return found, False
    return found, True


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


_CLOCK_REALTIME_COARSE = 5
"""Id of the kernel's coarse clock (linux/time.h), for which Python has no constant."""


def _now_ns() -> int:
    """Return the time of the clock that file systems use for time stamps.

    It lags the usual clock by up to one kernel tick.
    """
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)
