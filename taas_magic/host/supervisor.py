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
"""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time

import psutil

from taas_magic.errors import PoolError
from taas_magic.host import scratch
from taas_magic.host.system import adopt_orphans, end_all, end_host, is_tracker, spawn_command

GRACE_S = 3.0
"""What the agent gets to end its ranks and to close its connections, before all is killed."""


def main() -> int:
    """Runs until the agent or the lease ends; returns the agent's exit code."""
    lease_s, preload = float(sys.argv[1]) or None, sys.argv[2]
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wakeups = _wakeups_of_sigchld()
    try:
        with scratch.host_folder() as folder:
            return _supervise([preload, str(folder)], wakeups, lease_s)
    except PoolError as error:
        sys.exit(str(error))


def _supervise(arguments: list[str], wakeups: int, lease_s: float | None) -> int:
    """Run an agent, and leave nothing of it; returns its exit code."""
    command = [*spawn_command("taas_magic.host.agent"), *arguments]
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        _stay_until_end(agent, wakeups, lease_s)
    finally:
        _end_below(agent)
        _end_agent(agent)
        end_host(psutil.Process().children(recursive=True))
    return agent.returncode or 0


def _wakeups_of_sigchld() -> int:
    """A descriptor that becomes readable when a child ends."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    return reading


def _stay_until_end(agent: subprocess.Popen[bytes], wakeups: int, lease_s: float | None) -> None:
    """Returns when the agent has ended, or nobody holds the lease any more."""
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(wakeups, selectors.EVENT_READ)
    heard = time.monotonic()
    line: bytes | None = b""
    while agent.poll() is None:
        left_s = None if lease_s is None else heard + lease_s - time.monotonic()
        ready = [key.fd for key, _ in selector.select(left_s)]
        if not ready:
            sys.stderr.write(f"nothing heard from the pool for {lease_s} s: this host ends\n")
            return
        if wakeups in ready:
            os.read(wakeups, 65536)
            _reap_orphans(agent)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            heard = time.monotonic()
            if line is not None:
                line = _tell(agent, line + data)


def _tell(agent: subprocess.Popen[bytes], heard: bytes) -> bytes | None:
    """Passes the first line on; returns what there is of it so far, None once it is passed on."""
    line, end, _ = heard.partition(b"\n")
    if not end:
        return heard
    assert agent.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has just ended; the loop sees that next
        agent.stdin.write(line + end)
        agent.stdin.flush()
    return None


def _reap_orphans(agent: subprocess.Popen[bytes]) -> None:
    for child in psutil.Process().children():
        if child.pid != agent.pid and child.status() == psutil.STATUS_ZOMBIE:
            os.waitpid(child.pid, os.WNOHANG)


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


if __name__ == "__main__":
    sys.exit(main())
