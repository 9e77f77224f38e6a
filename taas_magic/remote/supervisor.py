"""The first process on a host: starts the agent, and ends whatever the agent leaves behind.

Run as `python -m taas_magic.remote.supervisor`, by an engine. Its standard input is its lease: what
the engine writes there goes to the agent, and when it closes, because the pool's process ended in
whatever way, everything on the host ends. It imports neither torch nor Dask, so that it can neither
run out of memory with them nor hang with them.

A subreaper inherits every orphan below it (prctl(2)), so a cell's daemon that forked twice or
called setsid is still found.
"""

import os
import selectors
import signal
import subprocess
import sys

import psutil

from taas_magic.remote.process import adopt_orphans, end_host, spawn_command

GRACE_S = 3.0
"""What the agent gets to end its ranks and to close its connections, before all is killed."""


def main() -> int:
    """Runs until the agent ends or standard input closes; returns the agent's exit code."""
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wakeups = _wakeups_of_sigchld()
    agent = subprocess.Popen(
        spawn_command("taas_magic.remote.agent"), stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        _relay_until_end(agent, wakeups)
    finally:
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


def _relay_until_end(agent: subprocess.Popen[bytes], wakeups: int) -> None:
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(wakeups, selectors.EVENT_READ)
    while agent.poll() is None:
        for key, _ in selector.select():
            data = os.read(key.fd, 65536)
            if key.fd == wakeups:
                _reap_orphans(agent)
            elif not data:
                return
            else:
                _forward(agent, data)


def _forward(agent: subprocess.Popen[bytes], data: bytes) -> None:
    assert agent.stdin is not None
    try:
        agent.stdin.write(data)
        agent.stdin.flush()
    except BrokenPipeError:
        return  # the agent has just ended; the loop sees it next


def _reap_orphans(agent: subprocess.Popen[bytes]) -> None:
    for child in psutil.Process().children():
        if child.pid != agent.pid and child.status() == psutil.STATUS_ZOMBIE:
            os.waitpid(child.pid, os.WNOHANG)


def _end_agent(agent: subprocess.Popen[bytes]) -> None:
    if agent.poll() is None:
        agent.terminate()
    try:
        agent.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()


if __name__ == "__main__":
    sys.exit(main())
