"""pytest plugin: fixtures for tests that run cells, and the order of test files.

All tests of a process share one notebook and one warm pool, unless they need their own.
"""

import contextlib
import gc
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config as ShellConfig

from taas_magic.config import Config
from taas_magic.journal import folder as journal
from taas_magic.notebook import pools
from taas_magic.notebook import run as notebook_run
from tests.conftest import TOKEN, carriers, describe
from tests.eventually import HUNG_S, left_after
from tests.frontend import Frontend, environment, kernel
from tests.harness import (
    FORKSERVER,
    Notebook,
    below,
    forkservers,
    listening_ports,
    mapped,
    remove_cgroup,
    shared_memory,
    words,
)
from tests.processes import mark_process_tests, no_process_starts
from tests.rig.pools import enter, given_back, settings_in

LONGEST = (
    *("farm", "sessions", "programs", "data_registered", "aftermath", "torch_loader_cases"),
    *("federation", "data_streams", "multi_host", "kernel_life", "stacks", "waits", "notebooks"),
    *("capture_kernel", "functions", "lost_hosts", "data_faults", "browser", "fetching_hosts"),
    *("debugpy", "faults", "travel_runs", "data_loader", "setup_hosts", "farm_hosts", "pool"),
    *("capture", "slurm", "torch_stateful_cases", "rank_process", "fetching", "rank", "detach"),
    *("detached_sessions", "keyboard", "unshared_runs", "rehearsal", "data_programs", "lightning"),
    *("docs_samples", "shown_errors", "engines", "results", "data_robust", "short_name", "attach"),
    *("ssh_host", "pbs", "data_cell", "data_parties", "data_fed", "forkserver", "ssh_connect"),
    *("logs", "supervisor", "setup_install", "install", "ssh_notebook", "hpc_notebook", "docs"),
)
"""Names of the slowest test files, slowest first; the files in tests/chaos come before them."""

_SEVERAL = """
[pools.many]
engine = "local"
gpus = 2
max_hosts = 3
"""

_KEPT = (
    *("taas_magic.pool.process", "taas_magic.host.supervisor", "taas_magic.host.agent"),
    *("multiprocessing.resource_tracker", FORKSERVER),
)


def pytest_collection() -> None:
    """Turn garbage collection off during imports; it takes a third of their time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Turn garbage collection on again. It ignores the objects that the imports created."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # `-m` selects tests by the marks that this sets
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start processes. Sort slow files first, so that all workers end together."""
    mark_process_tests(items)
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda it: (it.path.parent.name != "chaos", order.get(it.path.stem, len(order))))


@pytest.fixture(autouse=True)
def processes_are_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """In `make unit`, fail a test that starts a process without having the mark `process`."""
    is_unit = request.config.getoption("markexpr") == "not process"
    with no_process_starts() if is_unit else contextlib.nullcontext():
        yield


@pytest.fixture(scope="session")
def warm_notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """Yield a notebook whose pool `local` stays warm for the whole test session."""
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
    """Yield a notebook with an empty namespace and a new random seed, on the warm pool.

    Cells wait up to `HUNG_S` seconds for the end of an interrupted run. After the test, fail if
    processes, ports or shared memory are left that are not the pool's.
    """
    monkeypatch.setenv("TAAS_STATE_DIR", str(warm_notebook.state_dir))
    monkeypatch.chdir(warm_notebook.project)
    monkeypatch.setattr(notebook_run, "KILL_WAIT_S", HUNG_S)
    _empty(warm_notebook.shell)
    if "torch" in sys.modules:  # otherwise, ranks would get the seed of an earlier test
        sys.modules["torch"].seed()
    files = shared_memory()
    of_others = set(_left_behind(files))
    yield warm_notebook
    assert not left_after(lambda: set(_left_behind(files)) - of_others, HUNG_S)


def _empty(shell: InteractiveShell) -> None:
    """Reset a shell. Keep the dunder names: the namespace is that of pytest's `__main__` module."""
    own = {name: value for name, value in shell.user_ns.items() if name.startswith("__")}
    shell.reset(new_session=True)
    shell.user_ns.update(own)


def _left_behind(files_before: set[str]) -> list[str]:
    """Return descriptions of processes, ports and shared memory that are not the pool's.

    Args:
        files_before: Shared-memory files before the test.
    """
    tree = below(os.getpid())
    left = [f"process {process.pid} {words(process)}" for process in tree if not _is_kept(process)]
    forks = {process for process in tree if FORKSERVER in words(process)}
    left += [f"rank {fork.pid}" for fork in forks - forkservers(tree)]
    ports = listening_ports(tree)
    left += [f"ports {sorted(ports)}"] if len(ports) > 2 else []  # of scheduler and agent
    new = shared_memory() - files_before
    return left + sorted(new - _mapped_elsewhere() if new else new)


def _mapped_elsewhere() -> set[str]:
    """Return the shared-memory files that processes unrelated to these tests have mapped."""
    ours = {os.getpid(), *(process.pid for process in below(os.getpid()))}
    others = (process for process in psutil.process_iter() if process.pid not in ours)
    return {path for process in others for path in mapped(process)}


def _is_kept(process: psutil.Process) -> bool:
    said = words(process)
    return not said or any(kept in said for kept in _KEPT)


@pytest.fixture(scope="module")
def frontend_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    """Yield a real kernel with a warm pool for a module's tests; fail if processes are left."""
    folder, token = tmp_path_factory.mktemp("kernel"), secrets.token_hex(8)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**environment(folder), TOKEN: token}.items():
            patch.setenv(name, value)
        with kernel(folder / "project") as started:
            started.run("%%taas --gpus 1\npass")  # so that no test sees messages about the warm-up
            yield started
        left = left_after(lambda: carriers(token), HUNG_S)
        assert not [describe(process) for process in left]


@pytest.fixture
def memory_limit() -> Iterator[Path]:
    """Yield the folder of a new cgroup (v1 or v2) with a memory limit of 600 MiB."""
    name = f"taas-{secrets.token_hex(4)}"
    version_1 = Path("/sys/fs/cgroup/memory")
    folder = (version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")) / name
    limit = "memory.limit_in_bytes" if version_1.is_dir() else "memory.max"
    folder.mkdir()
    (folder / limit).write_text(str(600 << 20))
    yield folder
    remove_cgroup(folder)


@pytest.fixture(scope="module")
def several_settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a configuration folder with the pool `many` of three hosts."""
    return settings_in(tmp_path_factory.mktemp("config"), _SEVERAL)


@pytest.fixture(scope="module")
def several_given_back(warm_notebook: Notebook, several_settings: Path) -> Iterator[None]:
    """Keep the pool `many` for all tests of a module; then end it and check for leftovers."""
    with given_back(warm_notebook, several_settings, "many"):
        yield


@pytest.fixture
def several(
    warm_notebook: Notebook,
    several_settings: Path,
    several_given_back: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Notebook:
    """Return a notebook whose pool `many` has three hosts with two ranks each."""
    enter(warm_notebook, several_settings, monkeypatch)
    return warm_notebook


@pytest.fixture
def without_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop kernels from starting the pool `local` on their own, for tests that do not use the pool.

    A test requests this fixture by `usefixtures`, so that pytest sets it up before the kernel.
    """
    monkeypatch.setenv("TAAS_WARM", "0")


@pytest.fixture
def kernel_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leftovers: str
) -> Iterator[Frontend]:
    """Yield a kernel for one test, with its own pools; fail if anything is left after it."""
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    with kernel(tmp_path / "project") as started:
        yield started
