"""The first process on a host: starts the agent, and ends whatever the agent leaves behind.

Run by an engine (`spawn_command`). Its standard input is its lease: the first line that the engine
writes there goes to the agent, and when it closes, because the pool's process ended in whatever
way, everything on the host ends. On the far side of a network nothing closes it when the cable is
cut; there the engine goes on to write a byte now and then, and names, as the first argument, the
seconds after which silence means the same (0: never). The second argument is the agent's: what its
forkserver imports. It imports neither torch nor Dask, so that it can
neither run out of memory with them nor hang with them.

A subreaper inherits every orphan below it (prctl(2)), so a cell's daemon that forked twice or
called setsid is still found.

What a host needs for the time of its life lies in one folder:

    <TMPDIR>/taas-<uid>-<random>/   0700; locked by the host's supervisor while it lives
        lock
        pymp-…                      multiprocessing's, of the agent
        run-…                       pipes and scratch folders of a run

What a supervisor that was killed has left, the next one of the same user removes.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from taas_magic.errors import PoolError, reason_of
from taas_magic.host.system import (
    adopt_orphans,
    end_all,
    end_at_once,
    is_tracker,
    spawn_command,
)
from taas_magic.shared_files import is_free, take_lock

GRACE_S = 3.0
"""What the agent gets to end its ranks and to close its connections, before all is killed."""


def main() -> int:
    """Run until the agent or the lease ends; returns the agent's exit code."""
    lease_s, preload = float(sys.argv[1]) or None, sys.argv[2]
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    try:
        with host_folder() as folder:
            return _supervise(preload, folder, lease_s)
    except PoolError as error:
        sys.exit(str(error))


def _supervise(preload: str, folder: Path, lease_s: float | None) -> int:
    """Run an agent, and leave nothing of it; returns its exit code, as a shell has it."""
    arguments = [str(os.getpid()), preload, str(folder)]
    command = [*spawn_command("taas_magic.host.agent"), *arguments]
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        threading.Thread(target=_hold_lease, args=(agent, lease_s), daemon=True).start()
        while (child := os.wait())[0] != agent.pid:
            pass  # an orphan has ended
        agent.returncode = os.waitstatus_to_exitcode(child[1])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finally:
        _end_below(agent)
        _end_agent(agent)
        end_at_once(psutil.Process().children(recursive=True))
    code = agent.returncode or 0
    return code if code >= 0 else 128 - code


def _leave(*_: object) -> None:
    """Handle SIGTERM, once: what follows is not to be interrupted."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _hold_lease(agent: subprocess.Popen[bytes], lease_s: float | None) -> None:
    """Tell the agent the first line; make the main thread leave when nobody holds the lease."""
    assert agent.stdin is not None
    heard = b""
    while (ready := select.select([0], [], [], lease_s)[0]) and (data := os.read(0, 65536)):
        if not agent.stdin.closed and b"\n" in (heard := heard + data):
            with suppress(BrokenPipeError):  # it has just ended, which the main thread sees
                agent.stdin.write(heard[: heard.index(b"\n") + 1])
                agent.stdin.close()
    if not ready:
        sys.stderr.write(f"nothing heard from the pool for {lease_s} s: this host ends\n")
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _end_below(agent: subprocess.Popen[bytes]) -> None:
    """Kill the ranks before the agent, which may be slow to end, or stopped.

    Nobody holds the lease any more: the same ranks may start elsewhere, and only one rank 0 may
    write to the project store.
    """
    below = psutil.Process().children(recursive=True)
    end_all([p for p in below if p.pid != agent.pid and not is_tracker(p)], grace_s=0)


def _end_agent(agent: subprocess.Popen[bytes]) -> None:
    agent.terminate()
    agent.send_signal(signal.SIGCONT)  # a stopped one would not see it
    try:
        agent.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()


@contextmanager
def host_folder() -> Iterator[Path]:
    """Make the folder of this host, for as long as the block.

    Raises:
        PoolError: It cannot be made.
    """
    sweep()
    folder = _make(f"taas-{os.getuid()}-")
    lock = _lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def run_folder() -> Path:
    """Return a new folder for what a run needs on this host; in the agent.

    Raises:
        PoolError: It cannot be made.
    """
    return _make("run-")


def sweep() -> None:
    """Remove the folders of hosts of this user whose supervisors were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"taas-{os.getuid()}-*"):
        if _is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _make(prefix: str) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise PoolError(
            f"no folder can be made in {tempfile.gettempdir()}: {reason_of(error)}; "
            f"make room there, or set TMPDIR to another folder before the kernel starts"
        ) from error


def _lock(folder: Path) -> int:
    """Lock a new folder; nobody sees the lock before it is held."""
    beside = folder / ".lock"
    lock = take_lock(beside)
    assert lock is not None
    beside.rename(folder / "lock")
    return lock


def _is_abandoned(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid == os.getuid() and is_free(folder / "lock", os.O_NOFOLLOW)
    except OSError:
        return False  # another user's, or one that is just being made or removed
