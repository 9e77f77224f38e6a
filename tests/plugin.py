"""Fixtures for tests that run cells: one notebook and one warm pool for all of them."""

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config as ShellConfig

from taas_magic import journal, pools
from taas_magic.config import Config
from tests.harness import Notebook, below, listening_ports, mapped, shared_memory
from tests.rig.pools import enter, given_back, settings_in

GONE_WITHIN_S = 10.0

_SEVERAL = """
[pools.many]
engine = "local"
gpus = 2
max_hosts = 3
"""

_KEPT = ("taas_magic.engines.process", "taas_magic.remote.supervisor", "taas_magic.remote.agent")
_KEPT += ("multiprocessing.resource_tracker",)


@pytest.fixture(scope="session")
def warm_notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A notebook whose pool `local` stays warm for the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAAS_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        patch.chdir(tmp_path_factory.mktemp("project"))
        settings = ShellConfig()
        settings.HistoryManager.hist_file = ":memory:"
        patch.setenv("TAAS_WARM", "0")
        shell = InteractiveShell.instance(config=settings)
        shell.run_line_magic("load_ext", "taas_magic")
        pools.warm(Config()).join()
        yield Notebook(shell, Path.cwd(), journal.state_dir())
        pools.down("local", Config())
        InteractiveShell.clear_instance()


@pytest.fixture
def notebook(warm_notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    """A notebook with an empty namespace, on the warm pool; checks that its runs leave nothing.

    What may stay is the pool itself: no process besides its own, no port, no shared memory.
    """
    monkeypatch.setenv("TAAS_STATE_DIR", str(warm_notebook.state_dir))
    monkeypatch.chdir(warm_notebook.project)
    _empty(warm_notebook.shell)
    files = shared_memory()
    of_others = set(_left_behind(files))
    yield warm_notebook
    deadline = time.monotonic() + GONE_WITHIN_S
    while (left := set(_left_behind(files)) - of_others) and time.monotonic() < deadline:
        threading.Event().wait(0.1)
    assert not left


def _empty(shell: InteractiveShell) -> None:
    """Resets a shell; its namespace is that of pytest's own main module, which stays one."""
    own = {name: value for name, value in shell.user_ns.items() if name.startswith("__")}
    shell.reset(new_session=True)
    shell.user_ns.update(own)


def _left_behind(files_before: set[str]) -> list[str]:
    """What is there besides the pool itself: processes, ports, shared memory."""
    tree = below(os.getpid())
    left = [f"process {process}" for process in tree if not _is_kept(process)]
    agents = [process for process in tree if "taas_magic.remote.agent" in _words(process)]
    left += [f"rank {process}" for process in agents[2:]]  # the agent, its forkserver, their forks
    ports = listening_ports(tree)
    left += [f"ports {sorted(ports)}"] if len(ports) > 2 else []  # the scheduler's and the agent's
    new = shared_memory() - files_before
    return left + sorted(new - _mapped_elsewhere() if new else new)


def _mapped_elsewhere() -> set[str]:
    """Shared memory of programs that have nothing to do with these tests."""
    ours = {os.getpid(), *(process.pid for process in below(os.getpid()))}
    others = (process for process in psutil.process_iter() if process.pid not in ours)
    return {path for process in others for path in mapped(process)}


def _words(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def _is_kept(process: psutil.Process) -> bool:
    words = _words(process)
    return not words or any(kept in words for kept in _KEPT)


@pytest.fixture
def memory_limit() -> Iterator[Path]:
    """A memory cgroup of 600 MiB that a process may enter; cgroup v1 or v2."""
    name = f"taas-{secrets.token_hex(4)}"
    version_1 = Path("/sys/fs/cgroup/memory")
    folder = (version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")) / name
    limit = "memory.limit_in_bytes" if version_1.is_dir() else "memory.max"
    folder.mkdir()
    (folder / limit).write_text(str(600 << 20))
    yield folder
    folder.rmdir()


@pytest.fixture(scope="module")
def several_settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration folder with a pool of three hosts."""
    return settings_in(tmp_path_factory.mktemp("config"), _SEVERAL)


@pytest.fixture(scope="module")
def several_given_back(warm_notebook: Notebook, several_settings: Path) -> Iterator[None]:
    """The pool goes on from test to test; it is given back in the end, and leaves nothing."""
    with given_back(warm_notebook, several_settings, "many"):
        yield


@pytest.fixture
def several(
    warm_notebook: Notebook,
    several_settings: Path,
    several_given_back: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Notebook:
    """A notebook whose pool `many` has three hosts with two ranks each."""
    enter(warm_notebook, several_settings, monkeypatch)
    return warm_notebook
