"""All that happened in a run, on disk: a folder a run, which any kernel of the user can read.

    <state folder>/runs/<run_id>/      0700
        plan.json                      what was decided
        cell.py                        what the user ran
        payload                        what the ranks load (removed when the run has ended)
        events.jsonl                   every event, in the order the pool's process saw it
        logs/rank-<N>.log              all that rank N wrote to its descriptors 1 and 2
        result                         what rank 0 sent back

The state folder is `$TAAS_STATE_DIR`, else `$XDG_STATE_HOME/taas`, else `~/.local/state/taas`:
never the project store, which only rank 0 may write.
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from taas_magic.errors import UsageError

Event = dict[str, Any]

ENDED_STATES = frozenset({"SUCCEEDED", "FAILED", "INTERRUPTED", "LOST"})


def state_dir() -> Path:
    """The user's own folder for runs and pools; made 0700 on first use."""
    named = os.environ.get("TAAS_STATE_DIR")
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    path = Path(named) if named else base / "taas"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def event(kind: str, host: str = "", **fields: Any) -> Event:
    """An event of the moment; see docs/events.md for the kinds."""
    return {"kind": kind, "time": time.time(), "host": host, **fields}


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run, the same for every process that shares the file system."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def payload(self) -> Path:
        return self.path / "payload"

    @property
    def result(self) -> Path:
        return self.path / "result"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    def log(self, rank: int) -> Path:
        """The file that holds everything rank `rank` wrote."""
        return self.path / "logs" / f"rank-{rank}.log"

    @classmethod
    def create(cls, run_id: str, plan: Mapping[str, Any], cell: str) -> "RunFolder":
        """Makes the folder of a new run and writes down what was decided."""
        folder = cls(state_dir() / "runs" / run_id)
        (folder.path / "logs").mkdir(mode=0o700, parents=True)
        folder.path.chmod(0o700)
        (folder.path / "plan.json").write_text(json.dumps(plan, indent=1))
        (folder.path / "cell.py").write_text(cell)
        return folder

    def plan(self) -> dict[str, Any]:
        """What was decided, as JSON values."""
        values: dict[str, Any] = json.loads((self.path / "plan.json").read_text())
        return values

    def read_events(self) -> Iterator[Event]:
        """The events so far; a line that is still being written is left out."""
        if not self.events.exists():
            return
        with self.events.open(encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):
                    yield json.loads(line)


class Writer:
    """Appends events to a run's journal; lives in the pool's process, one a run.

    It holds the file's lock, which the system releases with the process, however that ends: so a
    reader can tell a run that goes on from one that nobody will ever report the end of.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._file: IO[str] = folder.events.open("a", encoding="utf-8", buffering=1)
        with contextlib.suppress(BlockingIOError):  # a run given up while its pool hangs
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def append(self, event: Event) -> None:
        self._file.write(json.dumps(event, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class RunRecord:
    """A run as its journal tells it, for `taas.runs()` and `%taas status`."""

    run_id: str
    name: str
    pool: str
    world_size: int
    state: str
    started: float
    ended: float | None
    path: Path

    @property
    def elapsed_s(self) -> float:
        """Seconds from the start to the end, or until now."""
        return (self.ended or time.time()) - self.started

    def logs(self, rank: int = 0) -> str:
        """All that a rank wrote.

        Raises:
            UsageError: The run has no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise UsageError(
                f"run {self.run_id} has no rank {rank}; possible is 0 to {self.world_size - 1}"
            )
        path = RunFolder(self.path).log(rank)
        return path.read_text(errors="replace") if path.exists() else ""


def runs() -> list[RunRecord]:
    """The runs whose folders are kept, newest first."""
    return [record(folder) for folder in _folders()]


def _folders() -> list[RunFolder]:
    root = state_dir() / "runs"
    folders = sorted(root.iterdir(), reverse=True) if root.exists() else []
    return [RunFolder(path) for path in folders if (path / "plan.json").exists()]


def record(folder: RunFolder) -> RunRecord:
    """Reads one run's folder."""
    plan = folder.plan()
    started = changed = (folder.path / "plan.json").stat().st_mtime
    state, ended = "STARTING", None
    for seen in folder.read_events():
        if seen["kind"] in ("state", "ended"):
            state, changed = seen["state"], seen["time"]
    if state == "RUNNING" and not _has_writer(folder):
        state = "LOST"
    if state in ENDED_STATES:
        ended = changed
    return RunRecord(
        run_id=folder.run_id,
        name=plan["name"],
        pool=plan["pool"],
        world_size=plan["world_size"],
        state=state,
        started=started,
        ended=ended,
        path=folder.path,
    )


def _has_writer(folder: RunFolder) -> bool:
    with folder.events.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def find(run_id: str | None) -> RunRecord:
    """The run of that id, of an id that begins so, or of that name; None is the newest.

    Raises:
        UsageError: There is none.
    """
    known = runs()
    for seen in known:
        if run_id is None or seen.run_id.startswith(run_id) or run_id == seen.name:
            return seen
    listed = ", ".join(seen.run_id for seen in known[:5]) or "none"
    which = f"no run {run_id}" if run_id else "no run"
    raise UsageError(f"{which} is kept; the newest are: {listed}")


def prune(keep_runs: int, keep_bytes: int) -> None:
    """Removes the oldest ended runs beyond a number and a size; never one that may still run."""
    total = 0
    for index, folder in enumerate(_folders()):
        total += _size_bytes(folder.path)
        is_beyond = index >= keep_runs or total > keep_bytes
        if is_beyond and record(folder).state in ENDED_STATES:  # a journal takes long to read
            shutil.rmtree(folder.path, ignore_errors=True)


def _size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
