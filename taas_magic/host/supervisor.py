"""The first process on a host: starts the agent, and ends the host's processes when the agent ends.

An engine starts the supervisor and writes to the supervisor's standard input. The first line is for
the agent. When the pool's process ends for any reason, standard input closes. The supervisor then
ends all its descendants, including the agent, and exits. A cut network cable does not close
standard input. So an engine that works over a network also writes a byte regularly, and the
supervisor ends all processes of the host if no byte arrives in time.

`system.supervisor_arguments` makes the supervisor's command-line arguments.

The supervisor must import neither torch nor Dask, so that an error in these libraries cannot block
or end it. The supervisor is a subreaper (prctl(2)): orphans among its descendants become its
children. So it finds even a cell's daemon that forked twice or called setsid.

All temporary files of a host are in one folder:

    <TMPDIR>/taas-<uid>-<random>/   mode 0700; locked by the host's supervisor while it runs
        lock
        joined                      made by the agent when it has joined the pool
        pymp-…                      temporary files of multiprocessing, in the agent
        run-…                       pipes and scratch folders of a run

If a supervisor was killed, the next supervisor of the same user removes the killed supervisor's
folder.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from taas_magic.errors import PoolError, reason_of
from taas_magic.host.activity import IdleTimer
from taas_magic.host.system import (
    adopt_orphans,
    end_all,
    is_tracker,
    kill_all,
    spawn_command,
    wait_or_kill,
)
from taas_magic.shared_files import is_unlocked, open_and_lock

GRACE_S = 3.0
"""Seconds that the agent has to exit after SIGTERM. Then the supervisor kills the agent."""

_JOINED = "joined"
"""Name of the file that the agent creates in the host's folder when it has joined the pool."""

_CHECK_S = 0.5


def main() -> int:
    """Create the host's folder and run the agent. At the end, kill this process's descendants.

    First makes this process the new parent of orphans among its descendants. SIGINT is ignored.
    SIGTERM makes the supervisor end all processes and exit. `system.supervisor_arguments` makes the
    command-line arguments.

    Returns:
        The agent's exit code. If signal N killed the agent, 128 + N.

    Raises:
        SystemExit: With exit code 0 after SIGTERM, after the end of the lease, or if the agent was
            stuck. With exit code 1 if the host's folder could not be created.
    """
    lease_s, start_timeout_s, preload = float(sys.argv[1]) or None, float(sys.argv[2]), sys.argv[3]
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        with host_folder() as folder:
            return _supervise(preload, folder, lease_s, start_timeout_s)
    except PoolError as error:
        sys.exit(str(error))


def _supervise(preload: str, folder: Path, lease_s: float | None, start_timeout_s: float) -> int:
    """Start an agent, and wait until it ends or SIGTERM arrives. Then end all descendants.

    First writes an empty line to standard error, which tells an engine that uses SSH that this
    process has started. After the start of the agent, starts two threads. One thread sends SIGTERM
    to this process when the lease ends. The other thread sends SIGTERM to this process if the agent
    gets stuck before it has joined the pool.

    The descendants end in this order:

    1. Kill all descendants except the agent and resource trackers.
    2. Send SIGTERM to the agent, and kill it if it has not exited after `GRACE_S` seconds.
    3. Kill the remaining descendants.

    Args:
        preload: Modules for the forkserver to import, separated by commas.
        folder: The host's folder for temporary files.
        lease_s: Seconds without input after which the lease ends; None for no limit.
        start_timeout_s: Seconds after which the agent counts as stuck if it has used no CPU time
            and read no data.

    Returns:
        The agent's exit code as a shell reports it: 128 + N for signal N.

    Raises:
        SystemExit: SIGTERM arrived before the agent ended.
    """
    arguments = [str(os.getpid()), preload, str(folder)]
    command = [*spawn_command("taas_magic.host.agent"), *arguments]
    sys.stderr.write("\n")  # tells an engine that uses SSH that this process has started
    sys.stderr.flush()
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        got_settings = threading.Event()
        watches = (
            (_watch_lease, (agent, lease_s, got_settings)),
            (
                _watch_start,
                (agent.pid, folder, start_timeout_s, got_settings),
            ),
        )
        for watch, arguments_of_watch in watches:
            threading.Thread(target=watch, args=arguments_of_watch, daemon=True).start()
        while (child := os.wait())[0] != agent.pid:
            pass  # an orphan has ended
        agent.returncode = os.waitstatus_to_exitcode(child[1])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finally:
        _kill_descendants(agent)
        _end_agent(agent)
        kill_all(psutil.Process().children(recursive=True))
    code = agent.returncode or 0
    return code if code >= 0 else 128 - code


def _on_sigterm(*_: object) -> None:
    """Handle SIGTERM: raise SystemExit, which starts the cleanup; ignore SIGTERM from now on.

    A second SIGTERM would interrupt the cleanup.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _watch_lease(
    agent: subprocess.Popen[bytes], lease_s: float | None, got_settings: threading.Event
) -> None:
    """Pass the first line of standard input to the agent. When the lease ends, start the cleanup.

    The cleanup ends the supervisor and all its descendants. The lease ends when standard input
    closes, or after `lease_s` seconds without input. In the second case, write the reason to
    standard error. Runs in a thread.

    Args:
        lease_s: Seconds without input after which the lease ends. None for no limit.
        got_settings: Event that this function sets after it has passed the first line to the agent.
    """
    assert agent.stdin is not None
    heard = b""
    while (ready := select.select([0], [], [], lease_s)[0]) and (data := os.read(0, 65536)):
        if not agent.stdin.closed and b"\n" in (heard := heard + data):
            with suppress(BrokenPipeError):  # the agent has just ended; the main thread notices
                agent.stdin.write(heard[: heard.index(b"\n") + 1])
                agent.stdin.close()
            got_settings.set()
    _end_host("" if ready else f"no message from the pool for {lease_s} s: this host ends")


def _watch_start(
    pid: int, folder: Path, start_timeout_s: float, got_settings: threading.Event
) -> None:
    """If the agent gets stuck before it has joined the pool, end the supervisor and the agent.

    Runs in a thread. Returns when the agent has joined the pool.

    Args:
        pid: Process id of the agent.
        folder: The host's folder, in which the agent creates a file when it has joined the pool.
        start_timeout_s: Seconds after which the agent counts as stuck if it has used no CPU time
            and read no data.
        got_settings: Event that is set when the agent has got its first line of input. The agent's
            time counts from this event.
    """
    got_settings.wait()
    timer = IdleTimer(pid)
    while not (folder / _JOINED).exists():
        if timer.idle_s() >= start_timeout_s:
            _end_host(
                f"the agent (process {pid}) used no processor time and read nothing for "
                f"start_timeout_s = {start_timeout_s:g} before it had joined the pool"
            )
            return
        time.sleep(_CHECK_S)


def _end_host(why: str) -> None:
    """End the supervisor and its descendants: send SIGTERM to the main thread, which cleans up.

    Args:
        why: Reason, which is written to standard error; "" to write nothing.
    """
    if why:
        sys.stderr.write(f"{why}\n")
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _kill_descendants(agent: subprocess.Popen[bytes]) -> None:
    """Kill all descendants of this process except the agent and resource trackers.

    Called before the agent is ended, because the agent may be suspended or slow to end. Ranks
    must end quickly: after the end of the lease, the pool may already start the same ranks on
    another host, and only one rank 0 may write to the project store.
    """
    below = psutil.Process().children(recursive=True)
    end_all([p for p in below if p.pid != agent.pid and not is_tracker(p)], grace_s=0)


def _end_agent(agent: subprocess.Popen[bytes]) -> None:
    agent.terminate()
    agent.send_signal(signal.SIGCONT)  # a stopped agent would not handle SIGTERM
    wait_or_kill(agent, GRACE_S)


@contextmanager
def host_folder() -> Iterator[Path]:
    """Create the host's folder for temporary files; remove it when the `with` block ends.

    A locked file in the folder shows other supervisors that the folder is in use. First removes the
    folders of this user's earlier supervisors that were killed.

    Raises:
        PoolError: The folder cannot be created.
    """
    remove_abandoned_folders()
    folder = _make_temporary_folder(f"taas-{os.getuid()}-")
    lock = lock_folder(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def report_joined() -> None:
    """Create the file that tells the supervisor that the agent has joined the pool.

    Runs in the agent.
    """
    Path(tempfile.gettempdir(), _JOINED).touch()


def create_run_folder() -> Path:
    """Create a folder for a share's pipes and scratch folders on this host. Runs in the agent.

    Raises:
        PoolError: The folder cannot be created.
    """
    return _make_temporary_folder("run-")


def remove_abandoned_folders() -> None:
    """Remove the temporary folders of this user's supervisors that were killed.

    A killed supervisor cannot remove its folder itself.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"taas-{os.getuid()}-*"):
        if is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _make_temporary_folder(prefix: str) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise PoolError(
            f"cannot create a folder in {tempfile.gettempdir()}: {reason_of(error)}; "
            f"make room there, or set TMPDIR to another folder before the kernel starts"
        ) from error


def lock_folder(folder: Path) -> int:
    """Create and lock the file `lock` in a new folder; return the descriptor that holds the lock.

    The file gets the name `lock` only after it is locked. So no other process ever sees an unlocked
    `lock` in a folder that is in use.
    """
    beside = folder / ".lock"
    lock = open_and_lock(beside)
    assert lock is not None
    beside.rename(folder / "lock")
    return lock


def is_abandoned(folder: Path) -> bool:
    """Return whether this user owns `folder`, and the process that locked it has ended."""
    try:
        return folder.lstat().st_uid == os.getuid() and is_unlocked(folder / "lock", os.O_NOFOLLOW)
    except OSError:
        return False  # another user's folder, or one that is being created or removed
