"""A notebook without Jupyter: cells run by an IPython shell in this process."""

import contextlib
import os
import re
import signal
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
from taas_magic.notebook.run import Interrupts, RunDriver
from taas_magic.notebook.runs import Run
from tests.events import Line, line_of
from tests.eventually import HUNG_S, eventually

ANSI = re.compile(r"\x1b\[[0-9;]*m")

AFTER_BEATS = """
import os
from taas_magic.host import tracebacks
where, (told, beats) = tracebacks.innermost_frames, os.pipe()
def beat(thread):
    os.write(beats, b".")
    return where(thread)
tracebacks.innermost_frames = beat
for _ in range(3):
    os.read(told, 1)
"""
"""Code for the start of a cell: wait until the rank has prepared three heartbeats.

A heartbeat carries the rank's stack. After this code, the rank has sent a stack in this code.
"""


@dataclass
class Outcome:
    """Result of a cell.

    Attributes:
        run: The run; None if no run was started.
        error: The exception that the cell raised; None on success.
        shown: The error as the notebook shows it, without colors.
    """

    run: Run | None
    error: BaseException | None
    shown: str = ""

    @property
    def events(self) -> list[Line]:
        """The events of the run's journal."""
        assert self.run is not None
        return [line_of(event) for event in RunFolder(self.run.path).read_events()]

    def of_kind(self, kind: str) -> list[Line]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def lines(self) -> dict[int, list[str]]:
        """The lines of output in the journal, by rank."""
        found: dict[int, list[str]] = {}
        for event in self.of_kind("lines"):
            found.setdefault(event["rank"], []).extend(event["lines"])
        return found


@contextlib.contextmanager
def without_pytests_filter() -> Iterator[None]:
    """Remove pytest's filter that turns warnings into errors until the block ends.

    Otherwise, ranks would get this filter too.
    """
    with warnings.catch_warnings():
        warnings.filters[:] = [f for f in warnings.filters if f[0] != "error"]  # type: ignore[index]
        yield


@dataclass
class Notebook:
    """A notebook that runs cells in an IPython shell, with the extension loaded."""

    shell: InteractiveShell
    project: Path
    state_dir: Path

    def define(self, source: str) -> None:
        """Run a cell without a magic, in the notebook's process; raise its error."""
        self.shell.run_cell(source, store_history=True).raise_error()

    def run(self, source: str, flags: str = "", gpus: int | str = 2) -> Outcome:
        """Run a cell below a `%%taas` line with these flags."""
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
    """Call `act` with the run, in a thread, at the first event for which `wanted` is true.

    Yields:
        A list, to which all such events are added.
    """
    seen: list[Line] = []
    put = RunDriver.queue_event

    def take(run: RunDriver, event: Event) -> None:
        put(run, event)
        if wanted(line := line_of(event)):
            seen.append(line)
            if len(seen) == 1:
                threading.Thread(target=act, args=(run,), daemon=True).start()

    with patch.context() as inner:
        inner.setattr(RunDriver, "queue_event", take)
        yield seen


def interrupt_twice() -> None:
    """Interrupt a cell of this process twice, from another thread than the cell's.

    Send the second SIGINT when the first has been counted, because two signals at the same time
    count as one.
    """
    interrupts = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    assert isinstance(interrupts, Interrupts)
    before = interrupts.count
    os.kill(os.getpid(), signal.SIGINT)
    eventually(lambda: interrupts.count > before)
    os.kill(os.getpid(), signal.SIGINT)


def below(pid: int) -> list[psutil.Process]:
    """Return the descendants of a process."""
    return psutil.Process(pid).children(recursive=True)


def processes(pids: Iterable[int]) -> list[psutil.Process]:
    """Return the processes with these ids that still exist."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def left_of(ending: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Wait until processes have ended; return those that have not ended in time.

    Zombies count as ended.
    """
    _, alive = psutil.wait_procs(list(ending), timeout=HUNG_S)
    return [process for process in alive if status_of(process) not in ("", psutil.STATUS_ZOMBIE)]


def remove_cgroup(folder: Path) -> None:
    """Remove a cgroup. Retry, because it may still list a process that has ended."""
    deadline = time.monotonic() + HUNG_S
    while folder.exists():
        try:
            folder.rmdir()
        except OSError:
            assert time.monotonic() < deadline, f"{folder} is in use"
            threading.Event().wait(0.01)


FORKSERVER = "multiprocessing.forkserver"
AGENT = "taas_magic.host.agent"


def forkservers(tree: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Return the agents' forkservers, without their forks, which have the same command line."""
    found = set()
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = process.parent()
            if FORKSERVER in words(process) and parent is not None and AGENT in words(parent):
                found.add(process)
    return found


def words(process: psutil.Process) -> str:
    """Return a process's command line; "" if the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def listening_ports(processes: Iterable[psutil.Process]) -> set[int]:
    """Return the TCP ports on which processes listen.

    Five times as fast as psutil, which reads the whole table of connections for each process.
    """
    by_network: dict[str, dict[str, int]] = {}
    found = set()
    for process in processes:
        folder = Path(f"/proc/{process.pid}")
        with contextlib.suppress(OSError):  # the process has ended
            network = os.readlink(folder / "ns" / "net")
            if network not in by_network:
                by_network[network] = _listeners(folder / "net")
            found |= {by_network[network].get(link, 0) for link in _links(folder / "fd")}
    return found - {0}


def _listeners(tables: Path) -> dict[str, int]:
    """Return the port of each listening socket, by its link in /proc/PID/fd.

    Args:
        tables: A folder /proc/PID/net.
    """
    lines = "".join((tables / name).read_text() for name in ("tcp", "tcp6")).splitlines()
    seen = [line.split() for line in lines if " 0A " in line]
    return {f"socket:[{words[9]}]": int(words[1][-4:], 16) for words in seen}


def _links(folder: Path) -> Iterator[str]:
    """Yield the targets of the links in /proc/PID/fd; skip descriptors that close meanwhile."""
    for link in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(folder / link)


def shared_memory() -> set[str]:
    """Return the paths of all POSIX shared-memory and semaphore files."""
    return {str(path) for path in Path("/dev/shm").iterdir() if path.is_file()}


def mapped(process: psutil.Process) -> set[str]:
    """Return the shared-memory files that a process has mapped."""
    try:
        lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line[line.index("/dev/shm") :] for line in lines if "/dev/shm" in line}
