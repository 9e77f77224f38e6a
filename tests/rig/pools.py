"""Pools for tests: their settings, a notebook that has them, and giving them back."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from taas_magic import pools, taas_toml
from tests.harness import Notebook, below
from tests.rig.hosts import Hosts

GONE_WITHIN_S = 60


def settings_in(folder: Path, toml: str) -> Path:
    """Makes a folder one of configuration, with a taas.toml; returns it."""
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
    """A pool of hosts in taas.toml, with as many cores as ranks.

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
    """Has this process be the notebook's kernel, with these settings."""
    patch.setenv("TAAS_STATE_DIR", str(notebook.state_dir))
    patch.setenv("XDG_CONFIG_HOME", str(settings))
    patch.chdir(notebook.project)


def give_back(notebook: Notebook, settings: Path, *names: str) -> None:
    """Ends pools that a notebook has by its settings."""
    with pytest.MonkeyPatch.context() as patch:
        enter(notebook, settings, patch)
        for name in names:
            pools.down(name, taas_toml.load(notebook.project))


@contextmanager
def given_back(notebook: Notebook, settings: Path, *names: str) -> Iterator[None]:
    """Pools go on for the time of the block; then they are given back, and leave no process."""
    before = set(below(psutil.Process().pid))
    yield
    give_back(notebook, settings, *names)
    left = set(below(psutil.Process().pid)) - before
    _, alive = psutil.wait_procs(left, timeout=GONE_WITHIN_S)
    assert not alive
