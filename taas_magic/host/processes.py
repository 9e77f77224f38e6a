"""What the processes of a host do to one another: tie lifetimes, find what is left, end it."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

RUN_TOKEN = "TAAS_RUN_ID"
"""The environment variable by which the children of a run's ranks are known."""

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_ZOMBIE = psutil.STATUS_ZOMBIE
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def spawn_command(module: str) -> list[str]:
    """The command that runs `module.main()` in a fresh Python.

    Not `-m`: a forkserver's children import their parent's main module again, and with `-c` there
    is none (`-m` costs every rank 0.35 s).
    """
    return [sys.executable, "-c", entry_code(module)]


def entry_code(module: str) -> str:
    """The program, for `python -c`, that runs `module.main()`.

    A random.py beside a notebook is not for us: the current folder is taken off the import path, or
    comes last where PYTHONPATH names it (unless this package is there).
    """
    return (
        "import os, sys; sys.path[0] or sys.path.pop(0); "
        f"here = os.getcwd(); sys.path.sort(key=lambda folder: folder == here != {_ROOT!r}); "
        f"from {module} import main; sys.exit(main())"
    )


def supervisor_arguments(lease_s: float | None, preload: Sequence[str]) -> list[str]:
    """What a supervisor is started with.

    Args:
        lease_s: Seconds of silence after which its host ends; None where silence means nothing.
        preload: Modules that the pool's settings add to what ranks find imported.
    """
    return [f"{lease_s or 0:g}", ",".join(preload)]


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"prctl({option})")


def adopt_orphans() -> None:
    """Makes this process the parent of every orphan below it (Linux; elsewhere nothing)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int | None = None) -> None:
    """Has the kernel kill this process when its parent ends.

    Args:
        parent_pid: The parent that the caller was started by; when it is gone already, this
            process ends at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def with_token(name: str, value: str, among: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those processes whose environment, as they were started, says `name=value`."""
    found = []
    for process in among:
        try:
            if process.environ().get(name) == value:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def end_all(processes: list[psutil.Process], grace_s: float) -> list[psutil.Process]:
    """Ends processes: SIGTERM, `grace_s` seconds, then SIGKILL. Returns what is still there.

    A stopped process does not see SIGTERM, so it is continued first. A process that may not be
    signalled (`sudo` in a cell) is not waited for.
    """
    if grace_s > 0:
        for process in processes:
            _send(process, signal.SIGTERM)
            _send(process, signal.SIGCONT)
        _, processes = psutil.wait_procs(processes, timeout=grace_s)
    killed = [process for process in processes if _send(process, signal.SIGKILL)]
    psutil.wait_procs(killed, timeout=5)
    return [process for process in processes if status_of(process) not in ("", _ZOMBIE)]


def status_of(process: psutil.Process | None) -> str:
    """psutil's word for a process's state; empty for one that is gone."""
    if process is None:
        return ""
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return ""


def end_host(processes: list[psutil.Process]) -> None:
    """Ends all processes of a host at once; multiprocessing's resource trackers end themselves.

    A tracker goes when the last process that it serves has gone, and then removes the semaphores
    and shared memory that those have left; killed, it could not.
    """
    trackers = [process for process in processes if is_tracker(process)]
    end_all([process for process in processes if process not in trackers], grace_s=0)
    _, stuck = psutil.wait_procs(trackers, timeout=2)
    end_all(stuck, grace_s=0)


def is_tracker(process: psutil.Process) -> bool:
    """Whether a process is a resource tracker of multiprocessing."""
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def _send(process: psutil.Process, number: int) -> bool:
    """Sends a signal; says whether it may be sent."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False
    return True


def named(processes: Iterable[psutil.Process]) -> str:
    """Processes as a user finds them: `4711 (sudo)`."""
    return ", ".join(f"{process.pid} ({_name_of(process)})" for process in processes)


def _name_of(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "?"


def signal_name(exitcode: int) -> str:
    """`SIGSEGV` for the exit code -11; empty for an exit code that is no signal."""
    if exitcode >= 0:
        return ""
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"


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
