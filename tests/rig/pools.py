"""Pools for tests: their settings, a notebook that has them, and giving them back."""

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
from taas_magic.engines.base import find_engine
from taas_magic.engines.keys import Keys
from taas_magic.notebook import pools
from taas_magic.pool.controller import Controller
from taas_magic.pool.gate import HeadScheduler
from taas_magic.pool.hosts import PoolHost
from tests.conftest import GONE_WITHIN_S, describe, is_tracker
from tests.harness import Notebook, below
from tests.rig.hosts import Hosts


def settings_in(folder: Path, toml: str) -> Path:
    """Make a folder one of configuration, with a taas.toml; return it."""
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
    """Return a pool of hosts in taas.toml, with as many cores as ranks.

    Args:
        name: Its name.
        hosts: The hosts that are up.
        numbers: Which of them; all, if there are none.
        python: What the hosts run.
        gpus: Ranks on each host; 0 for one that runs fetchers.
        more: Further lines.
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
    """Have this process be the notebook's kernel, with these settings."""
    patch.setenv("TAAS_STATE_DIR", str(notebook.state_dir))
    patch.setenv("XDG_CONFIG_HOME", str(settings))
    patch.chdir(notebook.project)


def give_back(notebook: Notebook, settings: Path, *names: str) -> None:
    """End pools that a notebook has by its settings."""
    with pytest.MonkeyPatch.context() as patch:
        enter(notebook, settings, patch)
        for name in names:
            pools.down(name, load_config(notebook.project))


@contextmanager
def given_back(notebook: Notebook, settings: Path, *names: str) -> Iterator[None]:
    """Pools go on for the time of the block; then they are given back, and leave no process.

    Other pools of this process go on; their hosts may have been replaced meanwhile.
    """
    before = set(below(psutil.Process().pid))
    yield
    give_back(notebook, settings, *names)
    tree = below(psutil.Process().pid)
    left = {it for it in tree if not is_tracker(it)} - before - _of_other_pools(names)
    _, alive = psutil.wait_procs(left, timeout=GONE_WITHIN_S)
    assert not alive, [describe(process) for process in alive]


def _of_other_pools(names: Sequence[str]) -> set[psutil.Process]:
    """Return the processes of the pools of this process that have none of these names."""
    found = set()
    for name, pool in pools._pools.items():
        if name not in names and (connection := pool.connection) is not None:
            process = psutil.Process(connection.process.pid)
            found.update([process, *below(process.pid)])
    return found


@dataclass(frozen=True)
class PoolHere:
    """A pool's scheduler and controller in this process, and its host."""

    scheduler: HeadScheduler
    controller: Controller
    keys: Keys
    member: PoolHost


@contextmanager
def pool_here(
    folder: Path,
) -> Iterator[tuple[PoolHere, Callable[[Coroutine[Any, Any, None]], None]]]:
    """Run a pool for the time of the block; yield it, and what carries out a coroutine on its loop.

    Between two coroutines the loop stands still. No process is left.
    """
    before = set(below(os.getpid()))
    loop, opening = asyncio.new_event_loop(), _opened(folder)
    yield loop.run_until_complete(opening.__aenter__()), loop.run_until_complete
    loop.run_until_complete(opening.__aexit__(None, None, None))
    loop.close()
    left = {process for process in below(os.getpid()) if not is_tracker(process)} - before
    _, alive = psutil.wait_procs(left, timeout=GONE_WITHIN_S)
    assert not alive


@asynccontextmanager
async def _opened(folder: Path) -> AsyncIterator[PoolHere]:
    engine, keys = find_engine(PoolConfig("local", lease_s=60)), Keys()
    async with engine.open(HeadScheduler, keys, str(folder)) as scheduler:
        controller = Controller(scheduler, engine, engine.pool, linger_s=600)
        [member] = await controller.pool_hosts.acquire(1)
        yield PoolHere(scheduler, controller, keys, member)
