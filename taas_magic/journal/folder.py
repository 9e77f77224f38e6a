"""All that happened in a run, on disk: a folder a run, which any kernel of the user can read.

    <state folder>/runs/<run_id>/      0700
        plan.json                      what was decided
        cell.py                        what the user ran
        run.json                       `RunContext`: what readers need of the notebook and its pools
        payload                        what the ranks load (removed when the run has ended)
        events.jsonl                   every event, in the order the pool's process saw it
        logs/rank-<N>.log              all that rank N wrote to its descriptors 1 and 2
        results/                       what ranks sent back; see host/results.py
        metrics.csv                    what ranks logged by `taas.log`; see journal/metrics.py

The state folder is `$TAAS_STATE_DIR`, else `$XDG_STATE_HOME/taas`, else `~/.local/state/taas`:
never the project store, which only rank 0 may write.

The journal tells of a run and never decides its fate: what cannot be written is left out, and what
is torn is read as far as it goes.
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
)
from taas_magic.shared_files import lock, replacing

T = TypeVar("T")

ENDED_STATES = frozenset({"SUCCEEDED", "FAILED", "INTERRUPTED", "LOST"})

JOURNAL_BYTES = 256 << 20
"""What a journal may hold; beyond it only what says how the run stands is added."""

WAITING_BYTES = 64 << 20
"""How much of a journal may wait for a slow disk."""

CLOSE_S = 5.0
"""How long the last lines of a journal may take to be written."""

_BULK = (Lines, LinesDropped, Progress, Display, ClearOutput, RankReport, FetcherReport, Metrics)
"""Events that a run may have without end."""

_LOCK_TRIES, _LOCK_AGAIN_S = 20, 0.01

_YOUNG_S = 60.0
"""A folder without a plan may be one that is just being made."""


def state_dir() -> Path:
    """Return the user's own folder for runs and pools; made 0700 on first use.

    Raises:
        PoolError: There is none that can be written.
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
    """Say what is wrong when something cannot be written in the state folder."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return PoolError(
            f"this kernel cannot open {path}: {reason_of(error)}; close some of its files, or "
            f"raise its limit (`ulimit -n`)"
        )
    return PoolError(
        f"runs and pools are kept in {path}, which cannot be written: {reason_of(error)}; "
        f"mend that, or set TAAS_STATE_DIR to another folder before the kernel starts"
    )


class DataPlanHead(msgspec.Struct):
    """Where a run's fetchers are."""

    pool: str


class RunContext(msgspec.Struct, kw_only=True):
    """What other processes need to know of a run's notebook and pools (`run.json`).

    Attributes:
        project: The notebook's folder.
        labels: What tracebacks call the notebook's cells, by the file names of these.
        pool_folder: The folder of the pool's process that has the ranks.
        data_folder: The folder of the pool's process that has the fetchers; "" without fetchers.
        notify: Command to run at the end of a detached run; "" for none.
    """

    project: str = ""
    labels: dict[str, str] = {}
    pool_folder: str = ""
    data_folder: str = ""
    notify: str = ""


class PlanHead(msgspec.Struct):
    """What lists of runs show of a `plan.Plan`, and where to ask about it."""

    run_id: str
    name: str
    pool: str
    world_size: int
    data: DataPlanHead | None = None


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run, the same for every process that shares the file system."""

    path: Path

    @property
    def run_id(self) -> str:
        """The run's id, which the folder is named by."""
        return self.path.name

    @property
    def payload(self) -> Path:
        """What the ranks load; removed when the run has ended."""
        return self.path / "payload"

    @property
    def results(self) -> Path:
        """The folder of what ranks sent back."""
        return self.path / "results"

    @property
    def events(self) -> Path:
        """The journal, an event a line."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """The table of what ranks logged by `taas.log`."""
        return self.path / metrics.FILE

    def log(self, rank: int) -> Path:
        """Return the file that holds everything rank `rank` wrote."""
        return self.path / "logs" / f"rank-{rank}.log"

    @classmethod
    def create(cls, run_id: str, plan: msgspec.Struct, cell: str) -> "RunFolder":
        """Make the folder of a new run and write down what was decided.

        Raises:
            PoolError: The state folder cannot be written.
        """
        folder = cls(state_dir() / "runs" / run_id)
        with folder.whole():
            (folder.path / "logs").mkdir(mode=0o700, parents=True)
            folder.path.chmod(0o700)
            (folder.path / "plan.json").write_bytes(messages.pack(plan, indent=1))
            (folder.path / "cell.py").write_text(messages.escaped(cell), encoding="utf-8")
        return folder

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Remove the folder again, and raise PoolError, where the block cannot write something."""
        try:
            yield
        except OSError as error:
            self.discard()
            raise cannot_write(self.path, error) from error

    def discard(self) -> None:
        """Remove all of it: the run was never started."""
        shutil.rmtree(self.path, ignore_errors=True)

    def plan(self) -> PlanHead:
        """Return what was decided, as far as lists of runs show it; raises as `record`."""
        return messages.unpack((self.path / "plan.json").read_bytes(), PlanHead)

    def context(self) -> RunContext:
        """Return what the notebook recorded; an empty one for a run of an older version."""
        try:
            return messages.unpack((self.path / "run.json").read_bytes(), RunContext)
        except FileNotFoundError:
            return RunContext()

    def write_context(self, context: RunContext) -> None:
        """Record what other processes need to know.

        Raises:
            OSError: The folder cannot be written.
        """
        with replacing(self.path / "run.json") as file:
            file.write(messages.pack(context))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Mark a run whose kernel lives: until the pool has it, only the kernel will tell its end.

        The system releases the mark with the process, however that ends.
        """
        with (self.path / "plan.json").open("r+b") as file:
            lock(file.fileno(), wait=True)
            yield

    def read_events(self) -> Iterator[Event]:
        """Yield the events so far, as far as they can be read.

        A line that is still being written, or that a full disk or a killed process has cut, is left
        out.
        """
        for chunk in JournalReader(self.events).chunks():
            for line in chunk.splitlines():
                with contextlib.suppress(msgspec.DecodeError):
                    yield messages.event_of(line)


KEPT_FREE_BYTES = 64 << 20
"""Bytes that logs and the journal leave free on a large disk."""

GRANT_BYTES = 256 << 10
NO_ROOM = "its file system is almost full, and the rest is kept for the run's results"


class DiskRoom:
    """Space that logs and the journal may use on a file system; the rest is kept for results.

    Results are written after the logs. On a disk that is full they would be lost.

    Args:
        folder: Where they are written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        free, total = self._space()
        self._kept_bytes = min(KEPT_FREE_BYTES, total // 8, free // 2)
        self._granted_bytes = 0

    def take(self, size_bytes: int) -> bool:
        """Return whether so much may be written; asks the system once for many small writes."""
        if size_bytes > self._granted_bytes:
            free = self._space()[0] - self._kept_bytes
            if size_bytes > free:
                return False
            self._granted_bytes = max(size_bytes, min(free // 4, GRANT_BYTES))
        self._granted_bytes -= size_bytes
        return True

    def _space(self) -> tuple[int, int]:
        """Return the free and all bytes; where the system does not say, the write itself will."""
        try:
            found = os.statvfs(self._folder)
        except OSError:
            return 1 << 62, 1 << 62
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


class Writer:
    """Writes a run's journal in a thread of its own; lives in the pool's process, one a run.

    The loop that appends answers hosts' beats, so nothing here makes it wait. Whatever the disk
    does, nothing is raised: what cannot be written is left out, and `on_incomplete` says so once.

    It holds the file's lock, which the system releases with the process, however that ends: so a
    reader can tell a run that goes on from one that nobody will ever report the end of.

    Args:
        on_incomplete: Called once, in any thread, with the reason why the journal is incomplete.
        limit_bytes: What the journal may hold.
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

    def append(self, event: Event) -> None:
        """Take an event; returns at once."""
        line = messages.encode(event) + b"\n"
        if isinstance(event, _BULK) and (why := self._why_full(len(line))):
            self._say_incomplete(why)
            return
        self._appended_bytes += len(line)
        self._waiting.put((event, line))

    def close(self) -> None:
        """Return when all is written, or was not in CLOSE_S."""
        self._waiting.put(None)
        self._thread.join(CLOSE_S)

    def _why_full(self, size: int) -> str:
        if self._appended_bytes + size > self._limit_bytes:
            return f"it has {self._limit_bytes >> 20} MiB; what ranks print goes on in their logs"
        if self._appended_bytes - self._handled_bytes + size > WAITING_BYTES:
            return f"the disk does not keep up ({WAITING_BYTES >> 20} MiB wait)"
        return ""

    def _run(self) -> None:
        while (taken := self._waiting.get()) is not None:
            event, line = taken
            try:
                if isinstance(event, _BULK) and not self._room.take(2 * len(line)):
                    self._say_incomplete(f"{NO_ROOM} ({self.folder.events})")
                else:
                    self._write(line)
                    if isinstance(event, Metrics):
                        self._write_metrics(event)
            except OSError as error:
                self._say_incomplete(f"{reason_of(error)} ({self.folder.events})")
            self._handled_bytes += len(line)
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _write(self, line: bytes) -> None:
        """Write a line, on one of its own also where the last one was cut."""
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            descriptor = os.open(self.folder.events, flags, 0o600)
            _lock(descriptor)
            self._is_torn = os.fstat(descriptor).st_size > 0  # by a pool that was killed, perhaps
            self._descriptor = descriptor
        if self._is_torn:
            line = b"\n" + line
        self._is_torn = True
        while line:
            line = line[os.write(self._descriptor, line) :]
        self._is_torn = False

    def _write_metrics(self, event: Metrics) -> None:
        """Append logged values to the run's table of metrics."""
        with open(self.folder.metrics, "ab", opener=_private) as table:
            table.write(metrics.rows(event, is_first=table.tell() == 0))

    def _say_incomplete(self, why: str) -> None:
        if not self._is_incomplete:
            self._is_incomplete = True
            self._on_incomplete(why)


def _private(path: str, flags: int) -> int:
    """Open a file that the user alone can read."""
    return os.open(path, flags, 0o600)


def _lock(descriptor: int) -> None:
    """Lock a journal, unless a pool that hangs still has it; readers have it for an instant."""
    for _ in range(_LOCK_TRIES):
        if lock(descriptor):
            return
        time.sleep(_LOCK_AGAIN_S)


@dataclass(frozen=True)
class RunSummary:
    """State and times of a run, read from its journal without decoding all of it.

    Attributes:
        started: When its hosts were there, in seconds since 1970; before that, when its folder was
            made.
        elapsed_s: Seconds from the start to the end, or until now.
        first: The failure to blame.
        why: The reason where a run could not report its own end.
    """

    state: str
    started: float
    elapsed_s: float
    first: Failure | None = None
    why: str = ""


LOST_WHY = "the process that owned the run is gone"


def summary(folder: RunFolder) -> RunSummary:
    """Return the state of a run; reads the journal's first and last events only.

    Raises:
        OSError: The folder has no plan.
    """
    made = (folder.path / "plan.json").stat().st_mtime
    reader = JournalReader(folder.events)
    ended, is_active = reader.end(), True
    if ended is None and not is_kept(folder):
        # The end may have been written since, or by a kernel that took a hung pool for gone.
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


def is_kept(folder: RunFolder) -> bool:
    """Return whether the process lives that will record the run's end: its kernel, or its pool."""
    for path in (folder.events, folder.path / "plan.json"):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            if not lock(file.fileno(), shared=True):
                return True
    return False


def ids() -> Iterator[str]:
    """Yield the ids of the runs whose folders are kept, newest first; no journal is read."""
    return (plan.run_id for plan in readable(RunFolder.plan))


def readable(read: Callable[[RunFolder], T]) -> Iterator[T]:
    """Yield what `read` returns for each run's folder, newest first; skip broken folders.

    A folder is broken, too, while it is being made or removed.
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
    """Remove the oldest ended runs beyond a number and a size; never one that may still run.

    A folder that cannot be read is removed as soon as it is no new one. Other kernels may do the
    same at the same time.
    """
    total = 0
    for index, folder in enumerate(_folders()):
        total += _size_bytes(folder.path)
        with contextlib.suppress(OSError, ValueError):  # it is being made or removed
            if _may_go(folder, is_beyond=index >= keep_runs or total > keep_bytes):
                shutil.rmtree(folder.path, ignore_errors=True)


def _may_go(folder: RunFolder, is_beyond: bool) -> bool:
    """Return whether a run is one to remove and has ended, or its folder has long had no plan."""
    try:
        folder.plan()
    except (ValueError, FileNotFoundError):
        return time.time() - folder.path.stat().st_mtime > _YOUNG_S
    return is_beyond and summary(folder).state in ENDED_STATES


def _size_bytes(path: Path) -> int:
    total = 0
    for at, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # another kernel prunes, too
                seen = os.lstat(os.path.join(at, name))
                total += seen.st_size if stat.S_ISREG(seen.st_mode) else 0
    return total
