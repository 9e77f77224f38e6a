"""Functions for the network addresses and the processes of this host.

The supervisor, the agent and ranks import this module. So this module must import neither torch nor
any other module of this package.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

LOOPBACK = "127.0.0.1"

RUN_TOKEN = "TAAS_RUN_ID"
"""Environment variable with a share's id, which marks the processes of this share.

Ranks, fetchers and the programs that they start have this variable. After the end of the share, the
agent finds remaining processes by it (`find_leftovers`).
"""

CALM_DASK = {
    "distributed.admin.system-monitor.interval": "60s",
    "distributed.admin.tick.interval": "1s",
    "distributed.worker.profile.enabled": False,
}
"""Dask settings that reduce the CPU time of idle processes, for every process that uses Dask.

By default, Dask profiles its own process 150 times a second, and measures the machine twice a
second. The profiles and measurements caused most of the CPU time of an idle pool. This package does
not use them.
"""

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def address_of(name: str) -> str:
    """Return the IP address of the network interface `name`; "" if the interface has none.

    If the interface has several addresses, an IPv4 address is preferred.
    """
    addresses = psutil.net_if_addrs().get(name, [])
    found = [seen.address for family in _FAMILIES for seen in addresses if seen.family == family]
    return found[0] if found else ""


def interface_name(address: str) -> str:
    """Return the name of the network interface with the given address; "" if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(seen.address == address and seen.family in _FAMILIES for seen in addresses):
            return name
    return ""


def local_address_to(peer: str) -> str:
    """Return this host's address that a connection to `peer` would use. Sends no packet.

    Args:
        peer: IP address of another host.
    """
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        address: str = probe.getsockname()[0]
    return address


def choose_address(interface: str, environ: Mapping[str, str], scheduler: str) -> str:
    """Return the address at which other hosts reach this host's ranks and fetchers.

    The function uses the first of these that is known:

    1. The address of the network interface that the setting `interface` names.
    2. The address of the network interface at which SSH has reached this host.
    3. The address from which this host connects to the scheduler.

    The function does not resolve the host's name, because Debian resolves this name to 127.0.1.1.

    Args:
        interface: Name or address of a network interface; "" if the pool does not have this
            setting.
        environ: The agent's environment, for SSH_CONNECTION.
        scheduler: IP address or host name of the pool's scheduler, as seen from this host.

    Raises:
        ValueError: This host has no network interface `interface`.
    """
    if interface:
        address = interface if interface_name(interface) else address_of(interface)
        if not address:
            have = ", ".join(sorted(psutil.net_if_addrs()))
            raise ValueError(f"this host has no network interface {interface!r}; it has {have}")
        return address
    reached = environ.get("SSH_CONNECTION", "").split()
    name = interface_name(reached[2]) if len(reached) == 4 else ""
    # A batch job inherits SSH_CONNECTION from the host on which it was submitted. Then no interface
    # of this host has that address, and `name` is "".
    return address_of(name) if name else local_address_to(scheduler)


def spawn_command(module: str) -> list[str]:
    """Return the command that runs `module.main()` in a new Python process.

    The command uses `python -c`. With `python -m`, each child of the forkserver would import its
    parent's main module again, and each rank would start 0.35 s later.
    """
    return [sys.executable, "-c", entry_code(module)]


def entry_code(module: str) -> str:
    """Return the code, for `python -c`, that runs `module.main()`.

    Before that, the code changes the import path. Otherwise, if the current folder is the
    notebook's folder, a file random.py in this folder could replace Python's own module.

    - With `-c`, Python puts the current folder first in the import path. The code removes this
      entry.
    - PYTHONPATH may contain the current folder, too. The code moves this entry to the end of the
      import path, unless this package itself is imported from the current folder.
    """
    return (
        "import os, sys; sys.path[0] or sys.path.pop(0); "
        f"here = os.getcwd(); sys.path.sort(key=lambda folder: folder == here != {_ROOT!r}); "
        f"from {module} import main; sys.exit(main())"
    )


def supervisor_arguments(
    lease_s: float | None, start_timeout_s: float, preload: Sequence[str]
) -> list[str]:
    """Return the command-line arguments of a supervisor.

    Args:
        lease_s: Seconds without input on standard input after which the supervisor ends all
            processes of the host. None for no limit.
        start_timeout_s: Seconds after which a starting agent counts as stuck if it has used no CPU
            time and read no data.
        preload: Modules for the forkserver to import, from the pool's settings.
    """
    return [f"{lease_s or 0:g}", f"{start_timeout_s:g}", ",".join(preload)]


def adopt_orphans() -> None:
    """Make this process a subreaper (prctl(2)): the new parent of descendants whose parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Make the system kill this process when its parent ends.

    If the parent has already ended, exit at once.

    Args:
        parent_pid: The parent's pid, which the parent itself has passed to this process.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"prctl({option})")


def seed_torch_and_numpy() -> None:
    """Give the global random generators of torch and numpy new random seeds, if they are imported.

    A forked process must call this function, because it has copies of its parent's generators.
    Python's `random` needs no call, because it seeds itself anew after a fork.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()


TRACKERS_END_S = 10.0
"""Seconds that resource trackers have to exit after the processes that use them have ended."""


def end_all(processes: list[psutil.Process], grace_s: float) -> list[psutil.Process]:
    """End processes: send SIGTERM, wait up to `grace_s` seconds, then send SIGKILL.

    Each process also gets SIGCONT, because a suspended process does not handle SIGTERM. After
    SIGKILL, wait up to 5 s until the processes have ended. Do not wait for processes that this user
    may not signal, such as a program that a cell has started by `sudo`.

    Args:
        grace_s: Seconds between SIGTERM and SIGKILL. If 0, send only SIGKILL.

    Returns:
        The processes that are still running.
    """
    if grace_s > 0:
        for process in processes:
            _send_signal(process, signal.SIGTERM)
            _send_signal(process, signal.SIGCONT)
        _, processes = psutil.wait_procs(processes, timeout=grace_s)
    killed = [process for process in processes if _send_signal(process, signal.SIGKILL)]
    psutil.wait_procs(killed, timeout=5)
    return [it for it in processes if status_of(it)]


def _send_signal(process: psutil.Process, number: int) -> bool:
    """Send a signal to a process. Return False only if this user may not signal the process."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False
    return True


def wait_or_kill(process: "subprocess.Popen[bytes]", limit_s: float) -> bool:
    """Wait until a child process has ended. If it still runs after `limit_s` seconds, kill it.

    Return True if the process has ended without the kill; otherwise False.
    """
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def kill_all(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Kill processes immediately, but give resource trackers `TRACKERS_END_S` seconds to exit.

    Before a tracker exits, it removes semaphores and shared memory that other processes did not
    release. Trackers that do not exit in time are killed, too.

    Returns:
        The processes that are still running.
    """
    trackers = [process for process in processes if is_tracker(process)]
    left = end_all([process for process in processes if process not in trackers], grace_s=0)
    _, stuck = psutil.wait_procs(trackers, timeout=TRACKERS_END_S)
    return left + end_all(stuck, grace_s=0)


def is_tracker(process: psutil.Process) -> bool:
    """Return whether a process is a resource tracker of multiprocessing or joblib."""
    try:
        return any("resource_tracker import main" in word for word in process.cmdline())
    except psutil.Error:
        return False


def status_of(process: psutil.Process | None) -> str:
    """Return psutil's name of a process's state; "" if the process has ended.

    A killed process counts as ended when it has no memory, although it may exist for 20 ms more.
    """
    try:
        has_memory = process is not None and process.memory_info().rss > 0
        return str(process.status()) if process is not None and has_memory else ""
    except psutil.NoSuchProcess:
        return ""


def pids_and_names(processes: Iterable[psutil.Process]) -> str:
    """Return the pids and names of processes for the user, such as `4711 (sudo), 4712 (ssh)`.

    The name is `?` if it cannot be read, for example because the process has ended.
    """
    found = []
    for process in processes:
        try:
            name = process.name()
        except psutil.Error:
            name = "?"
        found.append(f"{process.pid} ({name})")
    return ", ".join(found)


def find_leftovers(share_id: str, path_prefix: Path, is_only_share: bool) -> list[psutil.Process]:
    """Return the processes that remain on this host after the end of a share. Runs in the agent.

    The function searches the supervisor's descendants except the agent. A process belongs to the
    share if any of these conditions is true:

    - The process's environment has the share's id. So the function finds programs that a rank or
      fetcher has started.
    - The process has a file or pipe of the share open. So the function finds forks of a rank.
    - The process is an orphan that the supervisor has adopted, and no other share is on this host.

    Args:
        share_id: Id of the share, the value of the variable `RUN_TOKEN`.
        path_prefix: Path prefix of the share's files and named pipes on this host.
        is_only_share: Whether no other share is on this host.
    """
    own = psutil.Process()
    supervisor = own.parent()
    below = [it for it in (supervisor or own).children(recursive=True) if it.pid != own.pid]
    found = [it for it in below if _belongs_to_share(it, share_id, str(path_prefix))]
    if is_only_share and supervisor is not None and supervisor.pid != 1:
        found += [it for it in supervisor.children() if it.pid != own.pid and it not in found]
    return found


def _belongs_to_share(process: psutil.Process, share_id: str, path_prefix: str) -> bool:
    """Return whether a process has a share's id in its environment, or a file of the share open.

    Return False if the process has ended or belongs to another user.

    Args:
        share_id: Id of the share, the value of the variable `RUN_TOKEN`.
        path_prefix: Path prefix of the share's files and named pipes.
    """
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        if process.environ().get(RUN_TOKEN) == share_id:
            return True
    base = f"/proc/{process.pid}/fd"  # psutil's open_files lists only regular files
    try:
        return any(os.readlink(f"{base}/{fd}").startswith(path_prefix) for fd in os.listdir(base))
    except OSError:
        return False
