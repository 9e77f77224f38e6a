"""Registered loaders in a cell on several hosts: batches come over the network, under TLS."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from taas_magic.config import load_config
from taas_magic.data import service
from taas_magic.notebook import pools
from tests.data.test_data_cell import CELL, LOADER, streams
from tests.harness import Notebook

SETTINGS = """
[pools.apart]
engine = "local"
gpus = 1
max_hosts = 2
network = "{network}"
"""

# Both hosts are this machine, whose ranks would take the way that needs no network.
APART = """
from taas_magic.data import connection
connection.machine = lambda: "another"
print("tls", loader.feed.tls is not None)
"""


@pytest.fixture(params=["shared", "private"])
def network(request: pytest.FixtureRequest, notebook: Notebook, tmp_path: Path) -> Iterator[str]:
    """Set up a pool of two hosts, on a network that is shared with others or not."""
    (tmp_path / "taas").mkdir()
    (tmp_path / "taas" / "taas.toml").write_text(SETTINGS.format(network=request.param))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        yield request.param
        pools.down("apart", load_config(notebook.project))


def test_batches_come_from_host_to_host(notebook: Notebook, network: str) -> None:
    notebook.define(LOADER)
    near = streams(notebook.run(CELL, "--cpus 1"))
    outcome = notebook.run(APART + CELL, "--pool apart --cpus 1", gpus=2)
    far = streams(outcome)
    assert {rank: lines[1:] for rank, lines in far.items()} == near
    assert [far[rank][0] for rank in (0, 1)] == 2 * [f"tls {network == 'shared'}"]
    assert outcome.run is not None
    served = service.read(outcome.run.path)
    assert served is not None
    assert (served.tls is None) is (network == "private")
