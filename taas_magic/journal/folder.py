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
import functools
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
from taas_magic.journal.reader import JournalReader, decode_lines
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
    RanksStarted,
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
"""Size in bytes above which a journal receives no more bulk events (`_BULK`), such as output lines.

Other events, such as a failure or the end of the run, are still written.
"""

WAITING_BYTES = 64 << 20
"""Maximum bytes of events that wait in memory for a slow disk; further bulk events are left out."""

CLOSE_S = 5.0
"""Maximum seconds that the pool's process waits at a run's end until the journal is written."""

_BULK = (
    *(Lines, LinesDropped, Progress, Display, ClearOutput),
    *(RankReport, FetcherReport, Metrics, Usage),
)
"""Bulk events: kinds of events of which a run may send any number, such as lines of output.

If the journal or the disk is almost full, the writer leaves bulk events out.
"""

_LOCK_TRIES, _LOCK_AGAIN_S = 20, 0.01

_YOUNG_S = 60.0
"""Minimum age in seconds at which `prune` removes a run folder without a readable plan.

A younger folder may belong to a run that a kernel is just creating.
"""


def state_dir() -> Path:
    """Return the path of the state folder; create it with mode 0700 if it does not exist.

    The folder is `$TAAS_STATE_DIR`, else `$XDG_STATE_HOME/taas`, else `~/.local/state/taas`.

    Raises:
        PoolError: The folder cannot be created or written, its file system has no locks, or the
            user has no home folder.
    """
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = Path(os.environ.get("TAAS_STATE_DIR") or os.path.join(base, "taas"))
    try:
        if str(path).startswith("~"):
            raise FileNotFoundError(errno.ENOENT, "you have no home folder (HOME is not set)")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        _require_locks(path)
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


@functools.cache
def _require_locks(folder: Path) -> None:
    """Check, once for each folder, that the folder's file system has locks.

    Raises:
        OSError: The file system has no locks, for example Lustre without the mount option `flock`.
    """
    try:
        is_unlocked(folder / "lock")
    except OSError as error:  # if the file cannot be made, later writes say why
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise OSError(error.errno, "its file system has no file locks (flock)") from error


def cannot_write(path: Path, error: OSError) -> PoolError:
    """Return a `PoolError` which tells the user why a write to the state folder has failed.

    If this process has too many open files, advise to close some, or to raise the limit. Otherwise,
    advise to correct the error, or to use another state folder.

    Args:
        path: The file or folder that could not be written.
        error: The error of the write.
    """
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
    """The plan of the fetchers in `plan.json`, with only the field that a list of runs shows."""

    pool: str


class RunContext(msgspec.Struct, kw_only=True):
    """Facts about a run's notebook and pools, which other processes read from `run.json`.

    Attributes:
        labels: Labels of the notebook's cells in tracebacks (`Cell In[5]`), by the cells' file
            names.
        pool_folder: Path of the folder of the pool's process that controls the ranks.
        data_folder: Path of the folder of the pool's process that controls the fetchers; "" if the
            run has no fetchers.
        notify: Command to run at the end of a detached run; "" for none.
    """

    project: str = ""
    labels: dict[str, str] = {}
    pool_folder: str = ""
    data_folder: str = ""
    notify: str = ""


class PlanHead(msgspec.Struct):
    """The plan in `plan.json`, with only the fields that a list of runs shows."""

    run_id: str
    name: str
    pool: str
    world_size: int
    data: DataPlanHead | None = None


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run: the paths of the run's files, and methods that use these files."""

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
        """Create the folder of a new run, and write the files with the plan and the cell.

        If a file cannot be written, or the user interrupts, the folder is removed.

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
        """Run a `with` block that writes to the folder; remove the folder if the block fails.

        The block may also fail by a KeyboardInterrupt.

        Raises:
            PoolError: The block raised OSError.
        """
        try:
            yield
        except BaseException as error:
            self.discard()
            if isinstance(error, OSError):
                raise cannot_write(self.path, error) from error
            raise

    def discard(self) -> None:
        """Remove the folder of a run that was never started."""
        shutil.rmtree(self.path, ignore_errors=True)

    def plan(self) -> PlanHead:
        """Read the run's plan; return only the fields that a list of runs shows.

        Raises:
            OSError: The plan cannot be read.
            ValueError: The file is not a plan.
        """
        return messages.from_json((self.path / "plan.json").read_bytes(), PlanHead)

    def context(self) -> RunContext:
        """Read the facts about the run's notebook and pools from `run.json`.

        If an older version of taas-magic created the run, or the file is damaged, return a
        `RunContext` without facts.
        """
        try:
            return messages.from_json((self.path / "run.json").read_bytes(), RunContext)
        except (FileNotFoundError, ValueError):
            return RunContext()

    def write_context(self, context: RunContext) -> None:
        """Write facts about the run's notebook and pools to `run.json`, for other processes.

        Raises:
            OSError: The folder cannot be written.
        """
        with replace_atomically(self.path / "run.json") as file:
            file.write(messages.to_json(context))

    @contextlib.contextmanager
    def lock_for_launch(self) -> Iterator[None]:
        """Hold a lock on the plan in a `with` block, to show that this kernel is starting the run.

        Until the pool's process takes the run over, only this kernel can record the run's end. If
        this kernel dies, the system releases the lock, so other processes see that the run is lost.
        """
        with (self.path / "plan.json").open("r+b") as file:
            lock(file.fileno(), wait=True)
            yield

    @contextlib.contextmanager
    def lock_against_pruning(self) -> Iterator[None]:
        """Hold a lock in a `with` block, so that no kernel removes the folder of the ended run.

        Several processes may hold this lock at the same time. If a process dies, the system
        releases the process's lock.
        """
        with self._cell.open("rb") as file:
            lock(file.fileno(), shared=True, wait=True)
            yield

    @property
    def is_in_use(self) -> bool:
        """Whether a process reads the folder and has locked it by `lock_against_pruning`."""
        return self._cell.exists() and not is_unlocked(self._cell, 0)

    @property
    def _cell(self) -> Path:
        return self.path / "cell.py"

    def read_events(self) -> Iterator[Event]:
        """Yield all events that are in the journal now; skip lines that cannot be decoded.

        Also skip an incomplete last line, because another process may just be writing it.
        """
        for chunk in JournalReader(self.events).chunks():
            yield from decode_lines(chunk)


KEPT_FREE_BYTES = 64 << 20
"""Bytes of free disk space that logs and the journal must leave for the run's results.

They must leave less if one of these numbers is smaller: an eighth of the disk, or half of the space
that was free when the `DiskReserve` was created.
"""

GRANT_BYTES = 256 << 10
NO_ROOM = "its file system is almost full, and the rest is reserved for the run's results"


class DiskReserve:
    """Reserve of disk space for a run's results, which logs and the journal must not use up.

    Before each write to a log or the journal, the writer calls `reserve`.

    Args:
        folder: A folder on the disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        free, total = self._space()
        self._kept_bytes = min(KEPT_FREE_BYTES, total // 8, free // 2)
        self._granted_bytes = 0

    def reserve(self, size_bytes: int) -> bool:
        """Return whether the caller may write `size_bytes` more; if so, count them as written.

        The result is False if the write would use up a part of the reserve.

        Usually, a call takes the space from a portion that an earlier call has set aside. If this
        portion is too small, measure the free space of the disk, and set aside a new portion. So
        most writes need no system call. A portion has at most `GRANT_BYTES`, unless one write is
        larger.
        """
        if size_bytes > self._granted_bytes:
            free = self._space()[0] - self._kept_bytes
            if size_bytes > free:
                return False
            self._granted_bytes = max(size_bytes, min(free // 4, GRANT_BYTES))
        self._granted_bytes -= size_bytes
        return True

    def _space(self) -> tuple[int, int]:
        """Return the free and the total bytes of the disk; 2**62 for both if unknown."""
        try:
            found = os.statvfs(self._folder)
        except OSError:
            return 1 << 62, 1 << 62
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


class JournalWriter:
    """Writer of a run's journal in the pool's process; the constructor starts a thread that writes.

    `append` never blocks, because the event loop that calls `append` also answers the hosts'
    heartbeats. If the disk fails, the writer leaves out the events that it cannot write.

    The writer locks the journal. If the pool's process ends for any reason, the system releases the
    lock. So a reader of the journal can see that the run is lost, although the journal has no event
    of the run's end.

    Args:
        folder: The folder of the run.
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
        self._disk_reserve = DiskReserve(folder.path)
        self._appended_bytes = self._handled_bytes = 0
        self._descriptor: int | None = None
        self._attempts: dict[int, int] = {}
        self._is_torn = self._is_incomplete = False
        self._thread = threading.Thread(target=self._run, name="taas-journal", daemon=True)
        self._thread.start()

    def append(self, event: Event) -> bytes:
        """Queue an event for the journal, without waiting; return the event as JSON.

        A bulk event (`_BULK`) is not queued if the journal has reached `limit_bytes`, or if more
        than `WAITING_BYTES` wait to be written. In this case, call `on_incomplete` if it was never
        called before. The method returns the JSON in any case.
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
        """End the writer's thread after it has written all events; wait at most `CLOSE_S`."""
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
        """Write the queued events in the writer's thread; after `close`, close the journal's file.

        Also write metrics to `metrics.csv`. If the disk is almost full, leave out bulk events. If
        an event is left out or cannot be written, call `on_incomplete` unless it was called before,
        and continue with the next event.
        """
        while (taken := self._waiting.get()) is not None:
            event, line = taken
            if isinstance(event, RanksStarted):
                self._attempts |= dict.fromkeys(event.pids, event.attempt)
            try:
                if isinstance(event, _BULK) and not self._disk_reserve.reserve(2 * len(line)):
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
        """Append a line to the journal; before the first line, open and lock the journal's file.

        If the last write may have left an incomplete line, write a newline first.

        Raises:
            OSError: The file cannot be opened or written. A part of the line may be written.
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
        """Append the values of an event to `metrics.csv`: either all rows, or none after an error.

        Raises:
            OSError: The file cannot be opened or written.
        """
        with open(self.folder.metrics, "ab", buffering=0, opener=_open_private) as table:
            end = table.tell()
            rows = metrics.rows(event, end == 0, self._attempts.get(event.rank, 0))
            try:
                while rows:
                    rows = rows[table.write(rows) :]
            except OSError:
                table.truncate(end)
                raise

    def _report_incomplete(self, why: str) -> None:
        if not self._is_incomplete:
            self._is_incomplete = True
            self._on_incomplete(why)


def _open_private(path: str, flags: int) -> int:
    """Open a file, with mode 0600 if the file is new; for the argument `opener` of `open`."""
    return os.open(path, flags, 0o600)


def _lock(descriptor: int) -> None:
    """Lock a journal for writing, with retries for about 0.2 s.

    The retries are necessary because readers also lock the journal, each for an instant. If another
    process keeps the lock, such as an older pool's process that hangs, return without the lock.
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
        elapsed_s: Seconds from `started` to the run's end, or until now if the run is active. If
            the run is lost without an end in the journal, the seconds until the journal's last
            event.
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
    """Return the state and times of a run, from its journal and from the locks on its files.

    If the journal has no end of the run, the state depends on the process that owns the run
    (`has_live_owner`). While this process is alive, the state is STARTING or RUNNING; else it is
    LOST. Usually, this function reads only the start and the end of the journal.

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
    """Return whether a living process holds the lock of the run's journal or plan.

    The holder is the kernel or the pool's process, whichever will record the run's end.
    """
    for path in (folder.events, folder.path / "plan.json"):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            if not lock(file.fileno(), shared=True):
                return True
    return False


def plans() -> Iterator[PlanHead]:
    """Yield the plans of all runs that have a readable folder, newest first."""
    return read_each_run(RunFolder.plan)


def read_each_run(read: Callable[[RunFolder], T]) -> Iterator[T]:
    """Yield the result of `read` for each run folder, newest first; skip unreadable folders.

    Args:
        read: Function that reads a folder. If it raises OSError or ValueError, the folder is
            skipped.
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
    """Remove the folders of old runs, beyond a number of folders and beyond a total size.

    A folder is beyond a limit if the folder and all newer folders together exceed `keep_runs` or
    `keep_bytes`. Such a folder is removed if its run has ended, and no process has locked the
    folder by `lock_against_pruning`.

    A folder without a readable plan is removed if it is older than `_YOUNG_S` seconds, even if it
    is within the limits. Several kernels may call this function at the same time.

    Args:
        keep_runs: Number of the newest run folders to keep.
        keep_bytes: Total size, in bytes, of the newest run folders to keep.
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
