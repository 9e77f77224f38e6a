"""A notebook without a browser: cells run through the same door as in Jupyter, in this process."""

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from IPython.core.interactiveshell import InteractiveShell

from taas_magic import journal, launch
from taas_magic.capture.payload import Cell
from taas_magic.config import Config
from taas_magic.errors import TaasError
from taas_magic.journal import Event, RunFolder
from taas_magic.plan import Flags
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
        shell: The IPython shell whose namespace cells use.
        config: As taas.toml would say.
    """

    shell: InteractiveShell
    config: Config = field(default_factory=Config)
    cells: int = 0
    project: Path = field(default_factory=Path.cwd)
    state_dir: Path = field(default_factory=journal.state_dir)

    def define(self, source: str) -> None:
        """Runs an ordinary cell in the notebook's own process."""
        self.shell.run_cell(source, store_history=True).raise_error()

    def run(self, source: str, gpus: int = 2, **flags: Any) -> Outcome:
        """Runs a cell on `gpus` ranks, as `%%taas` does."""
        self.cells += 1
        raw = f"%%taas --gpus {gpus}\n{source}"
        cell = Cell(source, f"/tmp/ipykernel_0/{self.cells}.py", raw, 1, self.cells)
        before = launch.last_run
        try:
            launch.execute(Flags(gpus=gpus, **flags), cell, self.shell, self.config)
        except (TaasError, KeyboardInterrupt) as error:
            render = getattr(error, "_render_traceback_", lambda: [str(error)])
            shown = ANSI.sub("", "\n".join(render()))
            return Outcome(launch.last_run if launch.last_run is not before else None, error, shown)
        return Outcome(launch.last_run, None)


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
    """The names in /dev/shm."""
    return set(os.listdir("/dev/shm"))
