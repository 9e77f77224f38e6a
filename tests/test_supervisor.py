"""The first process of a host: whatever happens to its lease, nothing outlives it."""

import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from taas_magic.host.processes import spawn_command, supervisor_arguments

pytestmark = pytest.mark.usefixtures("no_leftovers")


def supervisor_command(lease_s: float | None) -> list[str]:
    command = spawn_command("taas_magic.host.supervisor")
    return [*command, *supervisor_arguments(lease_s, [])]


@pytest.fixture
def supervisor() -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor whose agent waits for its settings."""
    command = supervisor_command(None)
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        seen = psutil.Process(process.pid)
        while not seen.children():
            assert process.poll() is None
        yield process


def test_the_end_of_its_lease_ends_all(supervisor: subprocess.Popen[bytes]) -> None:
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    supervisor.wait(30)


def test_the_end_of_the_agent_ends_it(supervisor: subprocess.Popen[bytes]) -> None:
    psutil.Process(supervisor.pid).children()[0].kill()
    assert supervisor.wait(30) != 0


def test_its_own_end_ends_the_agent(supervisor: subprocess.Popen[bytes]) -> None:
    below = psutil.Process(supervisor.pid).children(recursive=True)
    supervisor.kill()
    supervisor.wait()
    _, alive = psutil.wait_procs(below, timeout=30)
    assert not alive


def test_an_interrupt_does_not_reach_it(supervisor: subprocess.Popen[bytes]) -> None:
    supervisor.send_signal(2)
    assert supervisor.stdin is not None
    supervisor.stdin.write(b"not JSON\n")
    supervisor.stdin.flush()
    assert supervisor.wait(60) != 0


def test_silence_of_the_network_ends_all_and_bytes_prolong_it() -> None:
    command = supervisor_command(2)
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, start_new_session=True, **pipes) as supervisor:
        assert supervisor.stdin is not None and supervisor.stderr is not None
        began = time.monotonic()
        while time.monotonic() < began + 4:
            supervisor.stdin.write(b" ")
            supervisor.stdin.flush()
            with pytest.raises(subprocess.TimeoutExpired):
                supervisor.wait(0.25)
        supervisor.wait(30)
        assert "nothing heard from the pool for 2.0 s" in supervisor.stderr.read().decode()


def test_only_the_first_line_reaches_the_agent(supervisor: subprocess.Popen[bytes]) -> None:
    assert supervisor.stdin is not None
    agent = psutil.Process(supervisor.pid).children()[0]
    for data in (b"not ", b"JSON\n\n", b"\n"):
        supervisor.stdin.write(data)
        supervisor.stdin.flush()
    assert agent.wait(60) != 0
