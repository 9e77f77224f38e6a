"""A notebook without a browser: cells run through the same door as in Jupyter, in this process."""

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
from IPython.core.interactiveshell import InteractiveShell

from taas_magic import launch
from taas_magic.journal import Event, RunFolder
from taas_magic.run import Run

ANSI = re.compile(r"\x1b\[[0-9;]*m")


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
    def events(self) -> list[Event]:
        """The run's journal."""
        assert self.run is not None
        return list(RunFolder(self.run.path).read_events())

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def lines(self) -> dict[int, list[str]]:
        """The lines that reached the journal, by rank."""
        found: dict[int, list[str]] = {}
        for event in self.of_kind("lines"):
            found.setdefault(event["rank"], []).extend(event["lines"])
        return found


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
        """Runs an ordinary cell in the notebook's own process."""
        self.shell.run_cell(source, store_history=True).raise_error()

    def run(self, source: str, flags: str = "", gpus: int | str = 2) -> Outcome:
        """Runs a cell below a `%%taas` head."""
        before = launch.last_run
        result = self.shell.run_cell(f"%%taas --gpus {gpus} {flags}\n{source}", store_history=True)
        run = launch.last_run if launch.last_run is not before else None
        error = result.error_before_exec or result.error_in_exec
        render = getattr(error, "_render_traceback_", lambda: [str(error)])
        return Outcome(run, error, ANSI.sub("", "\n".join(render())) if error else "")


def below(pid: int) -> list[psutil.Process]:
    """The processes that descend from a process."""
    return psutil.Process(pid).children(recursive=True)


def listening_ports(processes: Iterable[psutil.Process]) -> set[int]:
    """The TCP ports on which processes listen."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            connections = process.net_connections("tcp")
            found |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def shared_memory() -> set[str]:
    """The files of POSIX shared memory and semaphores."""
    return {str(path) for path in Path("/dev/shm").iterdir()}


def mapped(process: psutil.Process) -> set[str]:
    """Those of them that a process has mapped."""
    try:
        lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line[line.index("/dev/shm") :] for line in lines if "/dev/shm" in line}
