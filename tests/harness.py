"""A notebook without a browser: cells run through the same door as in Jupyter, in this process."""

import contextlib
import os
import re
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell

from taas_magic.host.system import status_of
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import Event
from taas_magic.notebook import launch
from taas_magic.notebook.run import RunDriver
from taas_magic.notebook.runs import Run
from tests.conftest import GONE_WITHIN_S
from tests.events import Line, line_of

ANSI = re.compile(r"\x1b\[[0-9;]*m")

AFTER_BEATS = """
import os
from taas_magic.host import tracebacks
where, (told, beats) = tracebacks.where, os.pipe()
def beat(thread):
    os.write(beats, b".")
    return where(thread)
tracebacks.where = beat
for _ in range(3):
    os.read(told, 1)
"""
"""What a cell begins with that goes on when a beat of its rank has said where it stands: here."""


@dataclass
class Outcome:
    """How a cell ended.

    Attributes:
        run: The run; None when nothing was started.
        error: What the cell raised; None on success.
        shown: What the notebook would show of the error.
    """

    run: Run | None
    error: BaseException | None
    shown: str = ""

    @property
    def events(self) -> list[Line]:
        """The run's journal."""
        assert self.run is not None
        return [line_of(event) for event in RunFolder(self.run.path).read_events()]

    def of_kind(self, kind: str) -> list[Line]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def lines(self) -> dict[int, list[str]]:
        """The lines that reached the journal, by rank."""
        found: dict[int, list[str]] = {}
        for event in self.of_kind("lines"):
            found.setdefault(event["rank"], []).extend(event["lines"])
        return found


@contextlib.contextmanager
def without_pytests_filter() -> Iterator[None]:
    """Leave out that warnings are errors: pytest set it, and it would go to the ranks."""
    with warnings.catch_warnings():
        warnings.filters[:] = [f for f in warnings.filters if f[0] != "error"]  # type: ignore[index]
        yield


@dataclass
class Notebook:
    """Runs cells.

    Attributes:
        shell: The IPython shell whose namespace cells use; the extension is loaded.
        project: The notebook's folder.
        state_dir: Where its runs and pools are.
    """

    shell: InteractiveShell
    project: Path
    state_dir: Path

    def define(self, source: str) -> None:
        """Run an ordinary cell in the notebook's own process."""
        self.shell.run_cell(source, store_history=True).raise_error()

    def run(self, source: str, flags: str = "", gpus: int | str = 2) -> Outcome:
        """Run a cell below a `%%taas` head."""
        before = launch.last_run
        cell = f"%%taas --gpus {gpus} {flags}\n{source}"
        with without_pytests_filter():
            result = self.shell.run_cell(cell, store_history=True)
        run = launch.last_run if launch.last_run is not before else None
        error = result.error_before_exec or result.error_in_exec
        render = getattr(error, "_render_traceback_", lambda: [str(error)])
        return Outcome(run, error, ANSI.sub("", "\n".join(render())) if error else "")


@contextlib.contextmanager
def on_event(patch: pytest.MonkeyPatch, wanted: Any, act: Any) -> Iterator[list[Line]]:
    """Call `act` with a run, in a thread, at its first event that is wanted; yield these."""
    seen: list[Line] = []
    put = RunDriver.put

    def take(run: RunDriver, event: Event) -> None:
        put(run, event)
        if wanted(line := line_of(event)):
            seen.append(line)
            if len(seen) == 1:
                threading.Thread(target=act, args=(run,), daemon=True).start()

    with patch.context() as inner:
        inner.setattr(RunDriver, "put", take)
        yield seen


def below(pid: int) -> list[psutil.Process]:
    """Return the processes that descend from a process."""
    return psutil.Process(pid).children(recursive=True)


def processes(pids: Iterable[int]) -> list[psutil.Process]:
    """Those of processes that are (still) there."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def left_of(ending: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those of processes that do not go; returns as soon as all have gone, or are zombies."""
    _, alive = psutil.wait_procs(list(ending), timeout=GONE_WITHIN_S)
    return [process for process in alive if status_of(process) not in ("", psutil.STATUS_ZOMBIE)]


def remove_cgroup(folder: Path) -> None:
    """Remove a cgroup; the system may still count a process that has ended."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while folder.exists():
        try:
            folder.rmdir()
        except OSError:
            assert time.monotonic() < deadline, f"{folder} is in use"
            threading.Event().wait(0.01)


FORKSERVER = "multiprocessing.forkserver"
AGENT = "taas_magic.host.agent"


def forkservers(tree: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Return the agents' forkservers in a tree; what they fork has their command line."""
    found = set()
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = process.parent()
            if FORKSERVER in words(process) and parent is not None and AGENT in words(parent):
                found.add(process)
    return found


def words(process: psutil.Process) -> str:
    """Return a process's command line; "" when it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def listening_ports(processes: Iterable[psutil.Process]) -> set[int]:
    """Return the TCP ports on which processes listen.

    psutil reads the whole table of connections for each process: that takes five times as long.
    """
    by_network: dict[str, dict[str, int]] = {}
    found = set()
    for process in processes:
        folder = Path(f"/proc/{process.pid}")
        with contextlib.suppress(OSError):  # it is gone
            network = os.readlink(folder / "ns" / "net")
            if network not in by_network:
                by_network[network] = _listeners(folder / "net")
            found |= {by_network[network].get(link, 0) for link in _links(folder / "fd")}
    return found - {0}


def _listeners(tables: Path) -> dict[str, int]:
    """Return the port of each socket that listens, by the link to it."""
    lines = "".join((tables / name).read_text() for name in ("tcp", "tcp6")).splitlines()
    seen = [line.split() for line in lines if " 0A " in line]
    return {f"socket:[{words[9]}]": int(words[1][-4:], 16) for words in seen}


def _links(folder: Path) -> Iterator[str]:
    """Yield what a process's descriptors are; some are closed meanwhile."""
    for link in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(folder / link)


def shared_memory() -> set[str]:
    """Return the files of POSIX shared memory and semaphores."""
    return {str(path) for path in Path("/dev/shm").iterdir() if path.is_file()}


def mapped(process: psutil.Process) -> set[str]:
    """Those of them that a process has mapped."""
    try:
        lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line[line.index("/dev/shm") :] for line in lines if "/dev/shm" in line}
