"""What a run did to its project store: files that rank 0 wrote, files of other ranks kept out.

Rank 0 notes what its Python opens for writing; its subprocesses and C++ writers are found by
looking the store through afterwards for what changed since the run began (hidden folders, which
tools keep their own things in, are left out). Both are taken down on
the host, when its ranks are gone, so that a killed rank's files are there too.
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
from taas_magic.store.tree import Seen, Tree

LOOK_LIMIT_S = 0.25
"""How long a store may be looked through; of a larger one, rank 0's own notes are all there is."""

_NOTEBOOK = ".ipynb"
"""The front end saves notebooks while a run goes on."""


@dataclass(frozen=True)
class Receipt:
    """What a run did to its store; `run.receipt`. Paths are relative to the store.

    Attributes:
        written: Bytes of each file that rank 0 wrote and that is there, by path.
        kept_out: Ranks whose file was kept out, by path.
        missing: Those of `kept_out` that the store has not: rank 0 wrote no such file.
        shared: Folders that every rank could write.
        means: What held the ranks that are not 0; "" where there were none.
        complete: Whether all of the store was looked through.
        not_sent: Why, by path, of rank 0's files that did not get into the store from a host that
            does not share it.
    """

    written: Mapping[str, int] = field(default_factory=dict)
    kept_out: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    shared: tuple[str, ...] = ()
    means: str = ""
    complete: bool = True
    not_sent: Mapping[str, str] = field(default_factory=dict)

    def with_event(self, event: StoreReceipt) -> "Receipt":
        """Return this and what one more host says."""
        kept_out = {path: set(ranks) for path, ranks in self.kept_out.items()}
        for file in event.kept_out:
            kept_out.setdefault(file.path, set()).add(file.rank)
        missing = {file.path for file in event.kept_out if not file.in_store}
        written = {**self.written, **{file.path: file.bytes for file in event.written}}
        return Receipt(
            written=written,
            kept_out={path: tuple(sorted(ranks)) for path, ranks in sorted(kept_out.items())},
            # a host that does not share the store may not have had rank 0's file yet
            missing=(self.missing | missing) - set(written),
            shared=tuple(event.shared),
            means=self.means or event.means,
            complete=self.complete and event.complete,
            not_sent={**self.not_sent, **{file.path: file.why for file in event.not_sent}},
        )


class Ledger:
    """What the ranks of one host say of the store; any thread may call it.

    Args:
        store: Absolute, without symbolic links.
        shared: Folders in it that every rank may write.
    """

    def __init__(self, store: str, shared: Iterable[str]) -> None:
        self._store, self._shared = store, tuple(shared)
        self._lock = threading.Lock()
        self._began_ns = _now_ns()
        self._noted: dict[tuple[int, str], None] = {}
        self._means = ""

    def take(self, rank: int, message: StoreMessage) -> None:
        """Take down what a rank says."""
        with self._lock:
            if isinstance(message, RankTouched):
                self._noted[rank, message.path] = None
            elif isinstance(message, RankHeld):
                self._means = message.means

    def close(self, has_rank_0: bool) -> StoreReceipt:
        """Return what this host's ranks did; called when they are gone.

        Also clears away saves that a kill left unfinished.
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
    """Look a store through for files that were made or changed since a moment.

    Also clears away saves that a kill left unfinished.

    Args:
        shared: Folders in it that are left out: what is there may be any rank's.
        since_ns: On the file system's clock.
        limit_s: When to give up.

    Returns:
        Absolute paths, by the time of the last change of any kind, as no call sets that back; and
        whether all of the store was looked through.
    """
    deadline = time.monotonic() + limit_s
    found, left_out = set(), {os.path.relpath(folder, store) for folder in shared}

    def takes(seen: Seen) -> bool:
        name = os.path.basename(seen.path)
        if not seen.is_folder:
            return not name.endswith(_NOTEBOOK)
        is_leftover = remove_leftover(Path(store, seen.path))
        is_hidden = name.startswith(".") or name == "__pycache__"
        return not (is_leftover or is_hidden or seen.path in left_out)

    with suppress(OSError), closing(Tree(store)) as tree:
        for seen in tree.walk(takes):
            if not seen.is_folder and seen.status.st_ctime_ns >= since_ns:
                found.add(os.path.join(store, seen.path))
            if time.monotonic() >= deadline:
                return found, False
    return found, True


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


_CLOCK_REALTIME_COARSE = 5
"""From linux/time.h; Python has no name for it."""


def _now_ns() -> int:
    """Read the clock that file systems stamp by: it lags the other by a tick of the kernel."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)
