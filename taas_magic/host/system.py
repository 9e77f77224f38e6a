"""This host as its operating system shows it: GPUs, network addresses, processes.

Processes tie their lifetimes to one another here, find what is left of a run, and end it. Imports
neither torch nor anything of this package: supervisor, agent and ranks use it.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

LOOPBACK = "127.0.0.1"

RUN_TOKEN = "TAAS_RUN_ID"
"""The environment variable by which the children of a run's ranks are known."""

CALM_DASK = {
    "distributed.admin.tick.interval": "1s",
    "distributed.worker.profile.enabled": False,
}
"""Of Dask's settings, those of each process of ours that uses it.

By default each looks 150 times a second at what it does itself: that was two thirds of what an
idle pool costs.
"""

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def address_of(name: str) -> str:
    """Return the address of an interface, IPv4 where it has one; "" for no such interface."""
    addresses = psutil.net_if_addrs().get(name, [])
    found = [seen.address for family in _FAMILIES for seen in addresses if seen.family == family]
    return found[0] if found else ""


def name_of(address: str) -> str:
    """Return the name of the interface that has an address; "" where none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(seen.address == address and seen.family in _FAMILIES for seen in addresses):
            return name
    return ""


def facing(peer: str) -> str:
    """Return the address of this host on the route to another; sends nothing."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        address: str = probe.getsockname()[0]
    return address


def choose_address(interface: str, environ: Mapping[str, str], scheduler: str) -> str:
    """Return the address that ranks and fetchers of this host use.

    A host's own name is no help: Debian resolves it to 127.0.1.1, and a host with several networks
    has one name for all of them. What counts is the address at which others just reached this host.

    Args:
        interface: What the pool's settings say: a name or an address; "" finds one.
        environ: The agent's environment; under sshd it says where this host was reached.
        scheduler: Host part of the scheduler's address as this host reaches it.

    Raises:
        ValueError: The interface that the settings name is not here.
    """
    if interface:
        address = interface if name_of(interface) else address_of(interface)
        if not address:
            have = ", ".join(sorted(psutil.net_if_addrs()))
            raise ValueError(f"this host has no network interface {interface!r}; it has {have}")
        return address
    reached = environ.get("SSH_CONNECTION", "").split()
    name = name_of(reached[2]) if len(reached) == 4 else ""
    # a batch job inherits the variable from the host on which it was submitted: not ours then
    return address_of(name) if name else facing(scheduler)


def spawn_command(module: str) -> list[str]:
    """Return the command that runs `module.main()` in a fresh Python.

    Not `-m`: a forkserver's children import their parent's main module again, and with `-c` there
    is none (`-m` costs every rank 0.35 s).
    """
    return [sys.executable, "-c", entry_code(module)]


def entry_code(module: str) -> str:
    """Return the program, for `python -c`, that runs `module.main()`.

    A random.py beside a notebook is not for us: the current folder is taken off the import path, or
    comes last where PYTHONPATH names it (unless this package is there).
    """
    return (
        "import os, sys; sys.path[0] or sys.path.pop(0); "
        f"here = os.getcwd(); sys.path.sort(key=lambda folder: folder == here != {_ROOT!r}); "
        f"from {module} import main; sys.exit(main())"
    )


def supervisor_arguments(lease_s: float | None, preload: Sequence[str]) -> list[str]:
    """Return what a supervisor is started with.

    Args:
        lease_s: Seconds of silence after which its host ends; None where silence means nothing.
        preload: Modules that the pool's settings add to what ranks find imported.
    """
    return [f"{lease_s or 0:g}", ",".join(preload)]


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Have the system kill this process when its parent ends; end at once where that is gone.

    Args:
        parent_pid: As the parent has told it: one that has ended is not this process's any more.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"prctl({option})")


TRACKERS_END_S = 10.0
"""Seconds that resource trackers may take to end after the processes that they serve."""


def end_all(processes: list[psutil.Process], grace_s: float) -> list[psutil.Process]:
    """End processes: SIGTERM, `grace_s` seconds, then SIGKILL. Returns what is still there.

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
    return [it for it in processes if status_of(it)]


def _send(process: psutil.Process, number: int) -> bool:
    """Send a signal; returns whether it may be sent."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False
    return True


def end_at_once(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Kill processes, but let resource trackers end themselves. Returns what is still there.

    A tracker ends when the last process that it serves has ended, and then removes the semaphores
    and shared memory that those have left; killed, it could not.
    """
    trackers = [process for process in processes if is_tracker(process)]
    left = end_all([process for process in processes if process not in trackers], grace_s=0)
    _, stuck = psutil.wait_procs(trackers, timeout=TRACKERS_END_S)
    return left + end_all(stuck, grace_s=0)


def is_tracker(process: psutil.Process) -> bool:
    """Return whether a process is a resource tracker, multiprocessing's or joblib's."""
    try:
        return any("resource_tracker import main" in word for word in process.cmdline())
    except psutil.Error:
        return False


def status_of(process: psutil.Process | None) -> str:
    """Return psutil's word for a process's state; "" for one that has ended.

    One that was killed runs for the system as long as its memory is taken down, some 20 ms.
    """
    try:
        has_memory = process is not None and process.memory_info().rss > 0
        return str(process.status()) if process is not None and has_memory else ""
    except psutil.NoSuchProcess:
        return ""


def named(processes: Iterable[psutil.Process]) -> str:
    """Return processes as a user finds them: `4711 (sudo)`."""
    found = []
    for process in processes:
        try:
            name = process.name()
        except psutil.Error:
            name = "?"
        found.append(f"{process.pid} ({name})")
    return ", ".join(found)


def leftovers(run_id: str, pipes: Path, alone: bool) -> list[psutil.Process]:
    """Find the processes of a run that has ended; called in the agent.

    Three marks tell them: the run's token in their environment (what a rank started as a program),
    an open pipe of the run (what it forked), and being an orphan that the supervisor adopted, which
    counts only while no other run is on this host, since an orphan does not say whose it was.

    Args:
        pipes: How the paths of the run's named pipes on this host begin.
        alone: Whether no other run is on this host.
    """
    own = psutil.Process()
    supervisor = own.parent()
    below = [it for it in (supervisor or own).children(recursive=True) if it.pid != own.pid]
    found = [it for it in below if _is_of_run(it, run_id, str(pipes))]
    if alone and supervisor is not None and supervisor.pid != 1:
        found += [it for it in supervisor.children() if it.pid != own.pid and it not in found]
    return found


def _is_of_run(process: psutil.Process, run_id: str, pipes: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        if process.environ().get(RUN_TOKEN) == run_id:
            return True
    base = f"/proc/{process.pid}/fd"  # of open files psutil lists the regular ones only
    try:
        return any(os.readlink(f"{base}/{fd}").startswith(pipes) for fd in os.listdir(base))
    except OSError:
        return False
