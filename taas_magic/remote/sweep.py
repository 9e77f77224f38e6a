"""Finds what a run left behind on its host: processes that outlived the ranks they came from."""

import os
from pathlib import Path

import psutil

from taas_magic.remote.process import with_token
from taas_magic.remote.spec import RUN_TOKEN


def leftovers(run_id: str, pipes: Path, alone: bool) -> list[psutil.Process]:
    """The processes of a run that has ended, to be called in the agent.

    Three marks tell them: the run's token in their environment (what a rank started as a program),
    an open pipe of the run (what it forked), and being an orphan that the supervisor adopted, which
    counts only while no other run is on this host, since an orphan does not say whose it was.

    Args:
        run_id: The run.
        pipes: The run's folder of named pipes on this host.
        alone: Whether no other run is on this host.
    """
    below = _below_supervisor()
    found = with_token(RUN_TOKEN, run_id, below)
    found += [process for process in below if _holds_pipe(process, str(pipes))]
    return found + (_orphans() if alone else [])


def _below_supervisor() -> list[psutil.Process]:
    own = psutil.Process()
    supervisor = own.parent()
    below = supervisor.children(recursive=True) if supervisor else own.children(recursive=True)
    return [process for process in below if process.pid != own.pid]


def _orphans() -> list[psutil.Process]:
    own = psutil.Process()
    supervisor = own.parent()
    if supervisor is None or supervisor.pid == 1:
        return []
    return [child for child in supervisor.children() if child.pid != own.pid]


def _holds_pipe(process: psutil.Process, folder: str) -> bool:
    base = f"/proc/{process.pid}/fd"
    try:
        links = [os.readlink(f"{base}/{fd}") for fd in os.listdir(base)]
    except OSError:
        return False
    return any(link.startswith(folder) for link in links)
