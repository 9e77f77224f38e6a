"""What the processes of a host do to one another: tie lifetimes, find what is left, end it."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def spawn_command(module: str) -> list[str]:
    """The command that runs `module.main()` in a fresh Python.

    Not `-m`: a forkserver's children import their parent's main module again, and with `-c` there
    is none (`-m` costs every rank 0.35 s).
    """
    return [sys.executable, "-c", entry_code(module)]


def entry_code(module: str) -> str:
    """The program, for `python -c`, that runs `module.main()`."""
    return f"import sys; from {module} import main; sys.exit(main())"


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

    A stopped process does not see SIGTERM, so it is continued first.
    """
    if grace_s > 0:
        for process in processes:
            _send(process, signal.SIGTERM)
            _send(process, signal.SIGCONT)
        _, processes = psutil.wait_procs(processes, timeout=grace_s)
    for process in processes:
        _send(process, signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=5)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def end_host(processes: list[psutil.Process]) -> None:
    """Ends all processes of a host at once; multiprocessing's resource trackers end themselves.

    A tracker goes when the last process that it serves has gone, and then removes the semaphores
    and shared memory that those have left; killed, it could not.
    """
    trackers = [process for process in processes if _is_tracker(process)]
    end_all([process for process in processes if process not in trackers], grace_s=0)
    _, stuck = psutil.wait_procs(trackers, timeout=2)
    end_all(stuck, grace_s=0)


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _send(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def signal_name(exitcode: int) -> str:
    """`SIGSEGV` for the exit code -11; empty for an exit code that is no signal."""
    if exitcode >= 0:
        return ""
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"
