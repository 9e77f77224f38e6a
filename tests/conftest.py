"""What all tests share: a state folder of their own, and proof that nothing is left behind."""

import gc
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import hypothesis
import psutil
import pytest

from tests.rig.main_module import end_forkserver

TOKEN = "TAAS_TEST_TOKEN"
GONE_WITHIN_S = 60.0
SHARED_MEMORY = Path("/dev/shm")
ROOT = Path(__file__).parents[1]

# An example may take as long as a machine that is busy takes for it.
hypothesis.settings.register_profile(
    "taas", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("taas")


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the folder for runs and pools of this test; never the user's."""
    path = tmp_path / "state"
    monkeypatch.setenv("TAAS_STATE_DIR", str(path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return path


@pytest.fixture(autouse=True)
def own_interrupts() -> None:
    """Each test begins with Python's own handler of SIGINT.

    Where a script's shell starts the tests in the background (`make test &`), SIGINT is ignored,
    and Python leaves that as it is: an interrupt that a test sends to itself would do nothing.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def forkserver() -> Iterator[None]:
    """Start what forks the tests' processes, with all that they import, before any test begins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # Python 3.11 finds `tests` nowhere else
        ensure_running()
    yield
    gc.collect()  # a rank's own server has the forkserver's pipe open, until its loader is gone
    end_forkserver()


@pytest.fixture
def no_leftovers(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """After the test no process of it lives, and no port or shared-memory file of it is left.

    Every process that the test starts carries a token in its environment, however it detached
    itself. Leftovers are ended, so that the tests after this one do not meet them.
    """
    token = secrets.token_hex(8)
    monkeypatch.setenv(TOKEN, token)
    ports, files = listening(), set(SHARED_MEMORY.iterdir())
    yield token
    deadline = time.monotonic() + GONE_WITHIN_S
    while (found := left_behind(token, ports, files)) and time.monotonic() < deadline:
        threading.Event().wait(0.25)  # each look is at all processes of the machine
    for process in carriers(token):
        end(process)
    assert not found, "left behind: " + "; ".join(sorted(found))


def left_behind(token: str, ports: set[int], files: set[Path]) -> list[str]:
    """Return what a test with a token has left so far, besides the ports and files of before."""
    found = [f"process {describe(process)}" for process in carriers(token)]
    found += [f"port {port}" for port in listening() - ports]
    return found + [f"file {path}" for path in abandoned(set(SHARED_MEMORY.iterdir()) - files)]


def carriers(token: str) -> list[psutil.Process]:
    """Return the processes with the token, but for the tests' own and its tracker."""
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and carries(process, token) and not is_tracker(process)
    ]


def carries(process: psutil.Process, token: str) -> bool:
    try:
        return process.environ().get(TOKEN) == token
    except (psutil.Error, OSError):
        return False


def is_tracker(process: psutil.Process) -> bool:
    """multiprocessing's resource tracker of this process lives as long as it does."""
    try:
        is_child = process.ppid() == os.getpid()
        return is_child and "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"{process.pid} (gone meanwhile)"


def end(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.Error:
        return
    psutil.wait_procs([process], timeout=5)


def listening() -> set[int]:
    """Ports on which this process itself listens; those of others are gone with them."""
    connections = psutil.Process().net_connections("inet")
    return {seen.laddr.port for seen in connections if seen.status == psutil.CONN_LISTEN}


def abandoned(files: set[Path]) -> set[Path]:
    """Those of new shared-memory files that no process uses: other programs make some, too."""
    if not files:
        return files
    used = {path for process in psutil.process_iter() for path in mapped(process)}
    return {path for path in files if path.is_file() and str(path) not in used}


def mapped(process: psutil.Process) -> set[str]:
    """Return the shared-memory files that a process has mapped or open."""
    try:
        open_files = {os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()}
        lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return open_files | {line[line.index("/") :] for line in lines if str(SHARED_MEMORY) in line}
