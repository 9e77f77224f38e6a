"""Helpers for tests with pools: write their settings, use them in a notebook, and end them."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from taas_magic.config import PoolConfig, load_config
from taas_magic.engines.base import make_engine
from taas_magic.engines.keys import Keys
from taas_magic.notebook import pools
from taas_magic.pool.controller import Controller
from taas_magic.pool.gate import PoolScheduler
from taas_magic.pool.hosts import PoolHost
from tests.conftest import describe, is_tracker
from tests.eventually import HUNG_S
from tests.harness import Notebook, below
from tests.rig.hosts import Hosts

PRELOAD_FOR_TRAINING = 'preload = ["torch._dynamo"]'
"""Line of taas.toml for a new pool whose first cell trains a model.

With this line, each host imports `torch._dynamo` once. Without this line, each rank imports the
module in the first step of an optimizer, which takes 1.2 s of processor time.
"""


def settings_in(folder: Path, toml: str) -> Path:
    """Write taas.toml into a configuration folder; return the folder."""
    (folder / "taas").mkdir()
    (folder / "taas" / "taas.toml").write_text(toml)
    return folder


def ssh_pool(
    name: str,
    hosts: Hosts,
    numbers: Sequence[int] = (),
    python: str | Path = sys.executable,
    gpus: int = 1,
    more: str = "",
) -> str:
    """Return a table of taas.toml for a pool of these hosts, with one core for each rank.

    Args:
        name: Name of the pool.
        hosts: The running hosts.
        numbers: Numbers of the hosts in the pool; empty for all hosts.
        python: Python interpreter on the hosts.
        gpus: Ranks on each host; 0 for a pool of fetchers.
        more: Further lines of the table.
    """
    return f"""
[pools.{name}]
engine = "ssh"
hosts = {[hosts.name(number) for number in numbers] or hosts.names}
python = "{python}"
gpus = {gpus}
cores = {max(1, gpus)}
options = {{ ssh_config = "{hosts.ssh_config}" }}
{more}
"""


def enter(notebook: Notebook, settings: Path, patch: pytest.MonkeyPatch) -> None:
    """Let this process use a notebook's state folder and project, and a configuration folder."""
    patch.setenv("TAAS_STATE_DIR", str(notebook.state_dir))
    patch.setenv("XDG_CONFIG_HOME", str(settings))
    patch.chdir(notebook.project)


def give_back(notebook: Notebook, settings: Path, *names: str) -> None:
    """End pools of a notebook.

    Args:
        settings: Configuration folder with the pools' taas.toml.
        names: Names of the pools.
    """
    with pytest.MonkeyPatch.context() as patch:
        enter(notebook, settings, patch)
        for name in names:
            pools.down(name, load_config(notebook.project))


@contextmanager
def given_back(notebook: Notebook, settings: Path, *names: str) -> Iterator[None]:
    """End pools after the block, and check that they leave no process.

    Other pools of this process continue. Their processes do not count, even if they are new
    because a host was replaced during the block.
    """
    before = set(below(psutil.Process().pid))
    yield
    give_back(notebook, settings, *names)
    tree = below(psutil.Process().pid)
    left = {it for it in tree if not is_tracker(it)} - before - _of_other_pools(names)
    _, alive = psutil.wait_procs(left, timeout=HUNG_S)
    assert not alive, [describe(process) for process in alive]


def _of_other_pools(names: Sequence[str]) -> set[psutil.Process]:
    """Return the processes of this process's pools, except the pools with these names."""
    found = set()
    for name, pool in pools._pools.items():
        if name not in names and (connection := pool.connection) is not None:
            process = psutil.Process(connection.process.pid)
            found.update([process, *below(process.pid)])
    return found


@dataclass(frozen=True)
class PoolHere:
    """A pool whose scheduler and controller run in this process, with one host."""

    scheduler: PoolScheduler
    controller: Controller
    keys: Keys
    member: PoolHost


@contextmanager
def pool_here(
    folder: Path,
) -> Iterator[tuple[PoolHere, Callable[[Coroutine[Any, Any, None]], None]]]:
    """Run a pool in this process until the block ends; check that it leaves no process.

    Yields:
        The pool, and a function that runs a coroutine on the pool's event loop. The loop runs only
        during such calls.
    """
    before = set(below(os.getpid()))
    loop, opening = asyncio.new_event_loop(), _opened(folder)
    yield loop.run_until_complete(opening.__aenter__()), loop.run_until_complete
    loop.run_until_complete(opening.__aexit__(None, None, None))
    loop.close()
    left = {process for process in below(os.getpid()) if not is_tracker(process)} - before
    _, alive = psutil.wait_procs(left, timeout=HUNG_S)
    assert not alive


@asynccontextmanager
async def _opened(folder: Path) -> AsyncIterator[PoolHere]:
    engine, keys = make_engine(PoolConfig("local", lease_s=60)), Keys()
    async with engine.open(PoolScheduler, keys, str(folder)) as scheduler:
        controller = Controller(scheduler, engine, engine.pool, linger_s=600)
        [member] = await controller.pool_hosts.acquire(1)
        yield PoolHere(scheduler, controller, keys, member)
