"""Fixtures of all tests: a private state folder, and a check for leftover processes and files."""

import gc
import os
import secrets
import signal
from collections.abc import Iterator
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import hypothesis
import psutil
import pytest

from tests.eventually import HUNG_S, left_after
from tests.rig.main_module import end_forkserver

TOKEN = "TAAS_TEST_TOKEN"
SHARED_MEMORY = Path("/dev/shm")
ROOT = Path(__file__).parents[1]
if "TAAS_TEST_GPUS" not in os.environ:
    # All tests except those in tests/gpu expect ranks on the CPU, any number of them.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# No deadline for an example: a busy machine may need long for it.
hypothesis.settings.register_profile(
    "taas", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("taas")


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create this test's own state folder and config folder, in place of the user's."""
    path = tmp_path / "state"
    monkeypatch.setenv("TAAS_STATE_DIR", str(path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return path


@pytest.fixture(autouse=True)
def own_interrupts() -> None:
    """Install Python's default SIGINT handler before each test.

    A script's shell ignores SIGINT in commands that it starts in the background (`make test &`),
    and Python inherits this. Tests that interrupt themselves need the handler.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def forkserver() -> Iterator[None]:
    """Start multiprocessing's forkserver with its preloaded modules; stop it after the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # Python 3.11 finds the package `tests` only from this folder
        ensure_running()
    yield
    gc.collect()  # server processes of loaders would keep the forkserver's pipe open
    end_forkserver()


@pytest.fixture
def no_leftovers(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Fail the test if it leaves a process, an open port or a shared-memory file.

    All processes that the test starts inherit a token in their environment. By this token, this
    fixture also finds detached processes. The fixture kills leftover processes, so that later tests
    are not affected.

    Yields:
        The token.
    """
    token = secrets.token_hex(8)
    monkeypatch.setenv(TOKEN, token)
    ports, files = listening(), set(SHARED_MEMORY.iterdir())
    yield token
    # `left_behind` reads all processes of the machine, so it is not called often.
    found = left_after(lambda: left_behind(token, ports, files), HUNG_S, every_s=0.25)
    for process in carriers(token):
        end(process)
    assert not found, "left behind: " + "; ".join(sorted(found))


def left_behind(token: str, ports: set[int], files: set[Path]) -> list[str]:
    """Return descriptions of the processes, ports and files that a test has left.

    While processes are left, return only these: the search for files is much slower, because it
    reads the memory maps of all processes.

    Args:
        token: The token of the test's processes.
        ports: Listening ports before the test.
        files: Shared-memory files before the test.
    """
    if processes := carriers(token):
        return [f"process {describe(process)}" for process in processes]
    found = [f"port {port}" for port in listening() - ports]
    return found + [f"file {path}" for path in abandoned(set(SHARED_MEMORY.iterdir()) - files)]


def carriers(token: str) -> list[psutil.Process]:
    """Return the processes whose environment has the token, except this process and its tracker."""
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
    """Return whether a process is the resource tracker of this process, which ends only with it."""
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
    """Return the ports on which this process listens. Ports of other processes end with these."""
    connections = psutil.Process().net_connections("inet")
    return {seen.laddr.port for seen in connections if seen.status == psutil.CONN_LISTEN}


def abandoned(files: set[Path]) -> set[Path]:
    """Return the files that no process uses; files in use may belong to other programs."""
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
