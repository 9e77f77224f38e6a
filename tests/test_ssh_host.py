"""Pools of SSH hosts: cells run there, and whatever happens, nothing is left there."""

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from taas_magic import launch
from taas_magic.taas_toml import load
from tests.harness import Notebook
from tests.rig.hosts import Hosts, hosts_up

pytestmark = pytest.mark.network

GONE_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts_up(3, share=[tmp_path_factory.getbasetemp()]) as hosts:
        yield hosts


@pytest.fixture
def remote(notebook: Notebook, hosts: Hosts) -> Iterator[Notebook]:
    """A notebook whose project has pools of SSH hosts; at the end its hosts are clean."""
    settings = notebook.project / "taas.toml"
    settings.write_text(
        pool_table("g", [hosts.name(1)], hosts.ssh_config)
        + pool_table("g2", [hosts.name(1), hosts.name(2)], hosts.ssh_config)
    )
    config = load(notebook.project)
    yield notebook
    settings.unlink()
    for name in ("g", "g2"):
        launch.down(name, config)
    for number in range(1, hosts.count + 1):
        assert not left_on(hosts, number)


def pool_table(name: str, names: list[str], ssh_config: Path, more: str = "") -> str:
    return f"""
[pools.{name}]
engine = "ssh"
hosts = {names}
python = "{sys.executable}"
gpus = 0
cores = 2
options = {{ ssh_config = "{ssh_config}" }}
{more}
"""


def left_on(hosts: Hosts, number: int) -> list[psutil.Process]:
    """What is still there on a host after a while."""
    _, alive = psutil.wait_procs(hosts.processes(number), timeout=GONE_WITHIN_S)
    return alive


def test_a_cell_runs_there(remote: Notebook, hosts: Hosts) -> None:
    cell = "import os, socket\nprint(socket.gethostname(), os.environ['RANK'])"
    outcome = remote.run(cell, "--pool g")
    assert outcome.error is None
    assert outcome.lines == {0: [f"{hosts.name(1)} 0"], 1: [f"{hosts.name(1)} 1"]}
