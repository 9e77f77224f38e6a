"""The run folder: everything on disk about one run, readable by all kernels of the user.

    <state folder>/runs/<run_id>/      0700
        plan.json                      the plan of the run
        cell.py                        the cell that the user ran
        run.json                       `RunContext`: facts about the notebook and its pools
        payload                        the objects that ranks load (removed when the run has ended)
        events.jsonl                   the journal: events in the order of their arrival at the pool
        logs/rank-<N>.log              all output of rank N to its descriptors 1 and 2
        results/                       the results of ranks; see host/results.py
        metrics.csv                    the values from `taas.log`; see journal/metrics.py

The state folder is never the project store, because only rank 0 may write there.

A problem with the journal must never end a run. So a writer leaves out events that it cannot write,
and a reader skips lines that are incomplete.
"""

import contextlib
import errno
import os
import queue
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

import msgspec

from taas_magic import messages
from taas_magic.errors import PoolError, reason_of
from taas_magic.journal import metrics
from taas_magic.journal.reader import JournalReader
from taas_magic.messages import (
    ClearOutput,
    Display,
    Event,
    Failure,
    FetcherReport,
    Lines,
    LinesDropped,
    Metrics,
    Progress,
    RankReport,
    Usage,
)
from taas_magic.shared_files import is_unlocked, lock, replace_atomically

T = TypeVar("T")


class RunStatus(str, Enum):
    """State of a run. Each member equals its name as a string, such as "FAILED".

    Attributes:
        STARTING: The run waits for hosts.
        RUNNING: The run has its hosts.
        SUCCEEDED: The cell ran to its end on all ranks.
        FAILED: A rank or a host failed.
        INTERRUPTED: The user interrupted or stopped the run.
        LOST: The hosts, or the process that owned the run, are gone.
    """

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    INTERRUPTED = "INTERRUPTED"
    LOST = "LOST"

    def __str__(self) -> str:
        return self.value


ENDED_STATES = frozenset(RunStatus) - {RunStatus.STARTING, RunStatus.RUNNING}

JOURNAL_BYTES = 256 << 20
"""Size in bytes above which a journal receives no bulk events, only the run's changes of state."""

WAITING_BYTES = 64 << 20
"""Maximum bytes of a journal that may wait in memory for a slow disk."""

CLOSE_S = 5.0
"""Seconds to wait at the end of a run until the journal is written."""

_BULK = (
    *(Lines, LinesDropped, Progress, Display, ClearOutput),
    *(RankReport, FetcherReport, Metrics, Usage),
)
"""Bulk events: the kinds that a run may send without limit."""

_LOCK_TRIES, _LOCK_AGAIN_S = 20, 0.01

_YOUNG_S = 60.0
"""Minimum age in seconds at which a run folder without a plan counts as broken.

A younger folder may belong to a run that is being created.
"""


def state_dir() -> Path:
    """Return the path of the state folder; create it with mode 0700 if it does not exist.

    The folder is `$TAAS_STATE_DIR`, else `$XDG_STATE_HOME/taas`, else `~/.local/state/taas`.

    Raises:
        PoolError: The folder cannot be created or written.
    """
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = Path(os.environ.get("TAAS_STATE_DIR") or os.path.join(base, "taas"))
    try:
        if str(path).startswith("~"):
            raise FileNotFoundError(errno.ENOENT, "you have no home folder (HOME is not set)")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


def cannot_write(path: Path, error: OSError) -> PoolError:
    """Return the exception to raise if a write to the state folder has failed."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return PoolError(
            f"this kernel cannot open {path}: {reason_of(error)}; close some of its files, or "
            f"raise its limit (`ulimit -n`)"
        )
    return PoolError(
        f"cannot write to {path}, the folder of runs and pools: {reason_of(error)}; "
        f"correct this, or set TAAS_STATE_DIR to another folder before the kernel starts"
    )


class DataPlanHead(msgspec.Struct):
    """The only field of the data plan in `plan.json` that a list of runs shows."""

    pool: str


class RunContext(msgspec.Struct, kw_only=True):
    """Facts about a run's notebook and pools for other processes (`run.json`).

    Attributes:
        labels: Labels of the notebook's cells in tracebacks (`Cell In[5]`), by the cells' file
            names.
        pool_folder: The folder of the pool process that runs the ranks.
        data_folder: The folder of the pool process that runs the fetchers; "" without fetchers.
        notify: Command to run at the end of a detached run; "" for none.
    """

    project: str = ""
    labels: dict[str, str] = {}
    pool_folder: str = ""
    data_folder: str = ""
    notify: str = ""


class PlanHead(msgspec.Struct):
    """The fields of the plan in `plan.json` that a list of runs shows."""

    run_id: str
    name: str
    pool: str
    world_size: int
    data: DataPlanHead | None = None


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run and its paths, for every process that shares the file system."""

    path: Path

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.path.name

    @property
    def payload(self) -> Path:
        """The path of the payload, which is removed when the run has ended."""
        return self.path / "payload"

    @property
    def results(self) -> Path:
        """The folder with the results of ranks."""
        return self.path / "results"

    @property
    def events(self) -> Path:
        """The path of the journal, which has one event per line."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """The path of the table with the values that ranks logged by `taas.log`."""
        return self.path / metrics.FILE

    def log(self, rank: int) -> Path:
        """Return the path of the file with all output of a rank."""
        return self.path / "logs" / f"rank-{rank}.log"

    @classmethod
    def create(cls, run_id: str, plan: msgspec.Struct, cell: str) -> "RunFolder":
        """Create the folder of a new run and write the plan and the cell to it.

        If this fails, the folder is removed.

        Raises:
            PoolError: The state folder cannot be written.
        """
        folder = cls(state_dir() / "runs" / run_id)
        with folder.discard_on_error():
            (folder.path / "logs").mkdir(mode=0o700, parents=True)
            folder.path.chmod(0o700)
            (folder.path / "plan.json").write_bytes(messages.to_json(plan, indent=1))
            folder._cell.write_text(messages.escaped(cell), encoding="utf-8")
        return folder

    @contextlib.contextmanager
    def discard_on_error(self) -> Iterator[None]:
        """Remove the folder if the block, which fills the folder, raises OSError.

        Raises:
            PoolError: The block raised OSError.
        """
        try:
            yield
        except OSError as error:
            self.discard()
            raise cannot_write(self.path, error) from error

    def discard(self) -> None:
        """Remove the folder of a run that was never started."""
        shutil.rmtree(self.path, ignore_errors=True)

    def plan(self) -> PlanHead:
        """Read only those fields of the plan that are shown in a list of runs.

        Raises:
            OSError: The plan cannot be read.
            ValueError: The file is not a plan.
        """
        return messages.from_json((self.path / "plan.json").read_bytes(), PlanHead)

    def context(self) -> RunContext:
        """Return the run's context; an empty one if an older version created the run."""
        try:
            return messages.from_json((self.path / "run.json").read_bytes(), RunContext)
        except FileNotFoundError:
            return RunContext()

    def write_context(self, context: RunContext) -> None:
        """Write the run's context.

        Raises:
            OSError: The folder cannot be written.
        """
        with replace_atomically(self.path / "run.json") as file:
            file.write(messages.to_json(context))

    @contextlib.contextmanager
    def lock_for_launch(self) -> Iterator[None]:
        """Lock the plan during the block, to show other processes that this kernel starts the run.

        Until the pool takes the run over, only the kernel can record the run's end. If the kernel
        ends, the system releases the lock, so other processes can recognize that the run is lost.
        """
        with (self.path / "plan.json").open("r+b") as file:
            lock(file.fileno(), wait=True)
            yield

    @contextlib.contextmanager
    def lock_against_pruning(self) -> Iterator[None]:
        """Keep `prune` from removing the folder during the block, even if the run has ended.

        Several processes may hold this lock. The system releases the lock of a process that ends.
        """
        with self._cell.open("rb") as file:
            lock(file.fileno(), shared=True, wait=True)
            yield

    @property
    def is_in_use(self) -> bool:
        """Whether a process is in a block of `lock_against_pruning` for this folder."""
        return self._cell.exists() and not is_unlocked(self._cell, 0)

    @property
    def _cell(self) -> Path:
        return self.path / "cell.py"

    def read_events(self) -> Iterator[Event]:
        """Yield all events in the journal so far, except incomplete lines.

        A line is incomplete while it is being written, or if the disk was full or the writer was
        killed.
        """
        for chunk in JournalReader(self.events).chunks():
            for line in chunk.splitlines():
                with contextlib.suppress(msgspec.DecodeError):
                    yield messages.decode_event(line)


KEPT_FREE_BYTES = 64 << 20
"""Maximum bytes of free disk space that logs and the journal leave for the run's results.

On a small or full disk, the limit is an eighth of the disk or half of the free space, whichever is
less. The free space for this limit is measured once, when the `DiskRoom` is created.
"""

GRANT_BYTES = 256 << 10
NO_ROOM = "its file system is almost full, and the rest is reserved for the run's results"


class DiskRoom:
    """Limit on the size of a log or journal, so that the run's results still fit on the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        free, total = self._space()
        self._kept_bytes = min(KEPT_FREE_BYTES, total // 8, free // 2)
        self._granted_bytes = 0

    def reserve(self, size_bytes: int) -> bool:
        """Return whether the caller may write `size_bytes` more; if so, count them as written.

        Bytes are granted in portions. The free space of the disk is measured only when the last
        portion is used up.
        """
        if size_bytes > self._granted_bytes:
            free = self._space()[0] - self._kept_bytes
            if size_bytes > free:
                return False
            self._granted_bytes = max(size_bytes, min(free // 4, GRANT_BYTES))
        self._granted_bytes -= size_bytes
        return True

    def _space(self) -> tuple[int, int]:
        """Return the free and the total bytes of the disk; huge numbers if they are unknown."""
        try:
            found = os.statvfs(self._folder)
        except OSError:
            return 1 << 62, 1 << 62
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


class JournalWriter:
    """Writer of a run's journal, with its own thread. The pool's process has one for each run.

    `append` never blocks, because the event loop that calls it also answers the hosts' heartbeats.
    If the disk fails, the writer leaves out the events that it cannot write.

    The writer locks the journal, and the system releases the lock if the pool's process ends for
    any reason. So a reader can recognize a run that is not active any more, although its end is
    missing.

    Args:
        on_incomplete: Called once, in any thread, with the reason why the journal is incomplete.
        limit_bytes: Size of the journal above which the writer leaves out bulk events (`_BULK`).
    """

    def __init__(
        self,
        folder: RunFolder,
        on_incomplete: Callable[[str], None] = lambda why: None,
        limit_bytes: int = JOURNAL_BYTES,
    ) -> None:
        self.folder = folder
        self._on_incomplete, self._limit_bytes = on_incomplete, limit_bytes
        self._waiting: queue.SimpleQueue[tuple[Event, bytes] | None] = queue.SimpleQueue()
        self._room = DiskRoom(folder.path)
        self._appended_bytes = self._handled_bytes = 0
        self._descriptor: int | None = None
        self._is_torn = self._is_incomplete = False
        self._thread = threading.Thread(target=self._run, name="taas-journal", daemon=True)
        self._thread.start()

    def append(self, event: Event) -> bytes:
        """Queue an event for the journal, and return the encoded event without waiting.

        A bulk event (`_BULK`) is left out if the journal has reached its limit, or if too many
        bytes wait to be written. The writer then reports once that the journal is incomplete.
        """
        encoded = messages.encode(event)
        line = encoded + b"\n"
        if isinstance(event, _BULK) and (why := self._why_full(len(line))):
            self._report_incomplete(why)
        else:
            self._appended_bytes += len(line)
            self._waiting.put((event, line))
        return encoded

    def close(self) -> None:
        """Wait until all events are written, at most `CLOSE_S`."""
        self._waiting.put(None)
        self._thread.join(CLOSE_S)

    def _why_full(self, size: int) -> str:
        """Return why a bulk event of `size` bytes must be left out; "" if there is room for it."""
        if self._appended_bytes + size > self._limit_bytes:
            return f"it has reached {self._limit_bytes >> 20} MiB; the ranks' logs have all lines"
        if self._appended_bytes - self._handled_bytes + size > WAITING_BYTES:
            return f"the disk is too slow ({WAITING_BYTES >> 20} MiB are waiting)"
        return ""

    def _run(self) -> None:
        """Write the queued events until `close` is called; then close the journal's file.

        Runs in the writer's thread.

        Metrics are also written to `metrics.csv`. If the disk is almost full, bulk events are left
        out. If an event cannot be written, report once that the journal is incomplete, and go on.
        """
        while (taken := self._waiting.get()) is not None:
            event, line = taken
            try:
                if isinstance(event, _BULK) and not self._room.reserve(2 * len(line)):
                    self._report_incomplete(f"{NO_ROOM} ({self.folder.events})")
                else:
                    self._write(line)
                    if isinstance(event, Metrics):
                        self._write_metrics(event)
            except OSError as error:
                self._report_incomplete(f"{reason_of(error)} ({self.folder.events})")
            self._handled_bytes += len(line)
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _write(self, line: bytes) -> None:
        """Write a line; before the first line, open and lock the journal.

        If the last line may be incomplete, write a newline first.
        """
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            descriptor = os.open(self.folder.events, flags, 0o600)
            _lock(descriptor)
            # a pool's process that was killed may have left an incomplete line
            self._is_torn = os.fstat(descriptor).st_size > 0
            self._descriptor = descriptor
        if self._is_torn:
            line = b"\n" + line
        self._is_torn = True
        while line:
            line = line[os.write(self._descriptor, line) :]
        self._is_torn = False

    def _write_metrics(self, event: Metrics) -> None:
        with open(self.folder.metrics, "ab", opener=_private) as table:
            table.write(metrics.rows(event, is_first=table.tell() == 0))

    def _report_incomplete(self, why: str) -> None:
        if not self._is_incomplete:
            self._is_incomplete = True
            self._on_incomplete(why)


def _private(path: str, flags: int) -> int:
    """Open a file; make it readable only for the user if it is new. Used as `opener` of `open`."""
    return os.open(path, flags, 0o600)


def _lock(descriptor: int) -> None:
    """Lock a journal, with retries because readers lock it for an instant.

    Returns without the lock if another process keeps it, such as a pool that hangs.
    """
    for _ in range(_LOCK_TRIES):
        if lock(descriptor):
            return
        time.sleep(_LOCK_AGAIN_S)


@dataclass(frozen=True)
class RunSummary:
    """The state and times of a run.

    Attributes:
        started: Time at which the run's hosts were ready, in seconds since 1970; before that, the
            time at which the run folder was created.
        elapsed_s: Seconds from the start to the end, or until now.
        first: The failure that caused the run to fail; None if there is none.
        why: Reason for the end if no rank failed, for example that the pool's process is gone.
    """

    state: str
    started: float
    elapsed_s: float
    first: Failure | None = None
    why: str = ""


LOST_WHY = "the process that owned the run is gone"


def summary(folder: RunFolder) -> RunSummary:
    """Return the state and times of a run, usually from the journal's first and last events.

    A run without an end is STARTING or RUNNING while its owner lives, else LOST.

    Raises:
        OSError: The folder has no plan.
    """
    made = (folder.path / "plan.json").stat().st_mtime
    reader = JournalReader(folder.events)
    ended, is_active = reader.end(), True
    if ended is None and not has_live_owner(folder):
        # Another process may have written the end after the first read. Or a kernel wrote the end
        # for a pool that hung, and the pool added events after the end.
        ended, is_active = reader.end(whole=True), False
    started = reader.started()
    begun = made if started is None else started
    if ended is not None:
        took_s = ended.time - begun if ended.elapsed_s is None else ended.elapsed_s
        return RunSummary(ended.state, begun, took_s, ended.first, ended.why)
    if is_active:
        state = "STARTING" if started is None else "RUNNING"
        return RunSummary(state, begun, max(0.0, time.time() - begun))
    last = reader.last()
    return RunSummary("LOST", begun, last.time - begun if last else 0.0, why=LOST_WHY)


def has_live_owner(folder: RunFolder) -> bool:
    """Return whether the kernel or pool process that will record the run's end is alive."""
    for path in (folder.events, folder.path / "plan.json"):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            if not lock(file.fileno(), shared=True):
                return True
    return False


def run_ids() -> Iterator[str]:
    """Yield the ids of all runs that have a folder, newest first."""
    return (plan.run_id for plan in read_each_run(RunFolder.plan))


def read_each_run(read: Callable[[RunFolder], T]) -> Iterator[T]:
    """Yield the result of `read` for each run folder, newest first; skip broken folders.

    Args:
        read: Reads a folder; raises OSError or ValueError for a broken one.
    """
    for folder in _folders():
        try:
            found = read(folder)
        except (OSError, ValueError):
            continue
        yield found


def _folders() -> list[RunFolder]:
    root = state_dir() / "runs"
    paths = sorted(root.iterdir(), reverse=True) if root.exists() else []
    return [RunFolder(path) for path in paths]


def prune(keep_runs: int, keep_bytes: int) -> None:
    """Remove the folders of the oldest ended runs if all folders together exceed a limit.

    Runs that may still be active are kept, and so are folders in use (`lock_against_pruning`). A
    folder without a readable plan is removed, unless it is new. Several kernels may call this
    function at the same time.
    """
    total = 0
    for index, folder in enumerate(_folders()):
        total += _size_bytes(folder.path)
        with contextlib.suppress(OSError, ValueError):  # the folder is being created or removed
            if _is_removable(folder, is_beyond=index >= keep_runs or total > keep_bytes):
                shutil.rmtree(folder.path, ignore_errors=True)


def _is_removable(folder: RunFolder, is_beyond: bool) -> bool:
    try:
        folder.plan()
    except (ValueError, FileNotFoundError):
        return time.time() - folder.path.stat().st_mtime > _YOUNG_S
    return is_beyond and summary(folder).state in ENDED_STATES and not folder.is_in_use


def _size_bytes(path: Path) -> int:
    total = 0
    for at, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # another kernel may remove the file meanwhile
                seen = os.lstat(os.path.join(at, name))
                total += seen.st_size if stat.S_ISREG(seen.st_mode) else 0
    return total
