"""The supervisor, a host's first process: when it or the agent ends, no other process is left."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from taas_magic.host.system import spawn_command, supervisor_arguments
from tests.eventually import HUNG_S

pytestmark = pytest.mark.usefixtures("no_leftovers")


LEASE_S = 2.0


def supervisor_command(lease_s: float | None, start_timeout_s: float = HUNG_S) -> list[str]:
    command = spawn_command("taas_magic.host.supervisor")
    return [*command, *supervisor_arguments(lease_s, start_timeout_s, [])]


@pytest.fixture
def supervisor() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a supervisor whose agent waits for its settings."""
    command = supervisor_command(None)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True
    ) as process:
        seen = psutil.Process(process.pid)
        while not seen.children():
            assert process.poll() is None
        yield process


STUCK = """
import importlib.abc, sys, time

class Stuck(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("distributed", "torch"):
            time.sleep(3600)

sys.meta_path.insert(0, Stuck())
"""


def test_a_supervisor_ends_if_its_agent_is_stuck_in_an_import(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(STUCK)
    with subprocess.Popen(
        supervisor_command(None, start_timeout_s=2.0),
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(b"settings\n")
        process.wait(HUNG_S)
        assert b"start_timeout_s = 2 before it had joined the pool" in process.stderr.read()


def test_a_supervisor_ends_when_its_standard_input_closes(
    supervisor: subprocess.Popen[bytes],
) -> None:
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    supervisor.wait(HUNG_S)


def test_a_supervisor_ends_with_its_agent(supervisor: subprocess.Popen[bytes]) -> None:
    psutil.Process(supervisor.pid).children()[0].kill()
    assert supervisor.wait(HUNG_S) != 0


def test_an_agent_ends_with_its_supervisor(supervisor: subprocess.Popen[bytes]) -> None:
    below = psutil.Process(supervisor.pid).children(recursive=True)
    supervisor.kill()
    supervisor.wait()
    _, alive = psutil.wait_procs(below, timeout=HUNG_S)
    assert not alive


def test_a_supervisor_ignores_an_interrupt(supervisor: subprocess.Popen[bytes]) -> None:
    supervisor.send_signal(2)
    assert supervisor.stdin is not None
    supervisor.stdin.write(b"not JSON\n")
    assert supervisor.wait(HUNG_S) != 0


def longest_pause(supervisor: subprocess.Popen[bytes], for_s: float) -> float:
    """Write a byte to a supervisor about every 0.25 s, until it ends or `for_s` seconds are over.

    Returns:
        The longest time between two writes in seconds. On a busy machine, it exceeds 0.25 s.
    """
    assert supervisor.stdin is not None
    pauses_s, at = [0.0], time.monotonic()
    until = at + for_s
    while at < until and supervisor.poll() is None:
        with suppress(BrokenPipeError):
            supervisor.stdin.write(b" ")
        with suppress(subprocess.TimeoutExpired):
            supervisor.wait(0.25)
        pauses_s.append(time.monotonic() - at)
        at += pauses_s[-1]
    return max(pauses_s)


def test_a_supervisor_ends_after_a_lease_without_bytes_from_the_pool() -> None:
    command = supervisor_command(LEASE_S)
    pause_s = LEASE_S
    while pause_s >= LEASE_S / 2:  # repeat if the machine paused this loop
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        ) as supervisor:
            pause_s = longest_pause(supervisor, 2 * LEASE_S)
            lived = supervisor.poll() is None
            supervisor.wait(HUNG_S)
            assert supervisor.stderr is not None
            assert "no message from the pool for 2.0 s" in supervisor.stderr.read().decode()
    assert lived


def test_only_the_first_line_reaches_the_agent(supervisor: subprocess.Popen[bytes]) -> None:
    assert supervisor.stdin is not None
    agent = psutil.Process(supervisor.pid).children()[0]
    for data in (b"not ", b"JSON\n\n", b"\n"):
        with suppress(BrokenPipeError):  # the agent may end before the last write
            supervisor.stdin.write(data)
    assert agent.wait(HUNG_S) != 0


ORPHAN = """
import os
from taas_magic.host import forkserver

forkserver._own_pid = os.getpid()
if os.fork():
    os._exit(0)  # before the fork has set its parent-death signal
while os.getppid() == forkserver._own_pid:
    pass
forkserver.call("builtins.print", "nobody ends this")
"""


def test_a_process_that_was_forked_just_before_its_forkserver_was_killed_ends() -> None:
    command = [sys.executable, "-c", ORPHAN]
    said = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=HUNG_S)
    assert said.stdout == b""


@pytest.mark.parametrize("module", ["taas_magic.host.agent", "taas_magic.farms.node"])
def test_a_process_that_was_started_just_before_its_parent_was_killed_ends(module: str) -> None:
    others = psutil.Process().parent()
    assert others is not None
    command = [*spawn_command(module), str(others.pid), "", ""]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:  # nothing closes stdin
        assert process.wait(HUNG_S) == 1
