"""Registered loaders in a cell on several hosts: batches come over the network."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from taas_magic.config import load_config
from taas_magic.data import service
from taas_magic.notebook import pools
from tests.data.test_data_cell import CELL, LOADER, streams
from tests.harness import Notebook

PRIVATE = """
[pools.apart]
engine = "local"
gpus = 1
max_hosts = 2
network = "private"
"""

# All hosts are this machine, where ranks would connect by a Unix socket and map the batches.
APART = """
from collections import Counter
from taas_magic.data import connection
connection.machine_id = lambda: "another"
received = Counter()
def receive_into(inbox, memory, flags=0, original=connection.Inbox._receive_into):
    size = original(inbox, memory, flags)
    received[type(inbox._socket).__name__, inbox._socket.family.name] += size
    return size
connection.Inbox._receive_into = receive_into
"""
REPORT = """
for (kind, family), size in received.items():
    print("received", kind, family, size)
"""


def check_batches_come_from_host_to_host(
    notebook: Notebook, pool: str, gpus: int, tls: bool
) -> None:
    """Assert that ranks of two hosts get the batches of one host, by TCP only, with or without TLS.

    Args:
        pool: Pool of the ranks and fetchers, with two hosts.
        gpus: Number of ranks.
        tls: Whether the ranks must receive all batches over TLS.
    """
    notebook.define(LOADER)
    near = streams(notebook.run(CELL, "--cpus 1", gpus=gpus))
    outcome = notebook.run(APART + CELL + REPORT, f"--pool {pool} --cpus 1", gpus=gpus)
    far = streams(outcome)
    assert {rank: lines[:-1] for rank, lines in far.items()} == near
    for lines in far.values():
        word, kind, family, size = lines[-1].split()
        assert (word, kind, family) == ("received", "SSLSocket" if tls else "socket", "AF_INET")
        assert int(size) > 0
    assert outcome.run is not None and len(outcome.run.hosts) == 2
    served = service.read_settings(outcome.run.path)
    assert served is not None
    assert (served.tls is not None) is tls


@pytest.fixture
def private(notebook: Notebook, tmp_path: Path) -> Iterator[Notebook]:
    """Yield a notebook whose pool `apart` has two hosts, on a network that is the user's alone."""
    (tmp_path / "taas").mkdir()
    (tmp_path / "taas" / "taas.toml").write_text(PRIVATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        yield notebook
        pools.down("apart", load_config(notebook.project))


@pytest.mark.nightly
def test_batches_need_no_tls_on_a_network_that_is_the_users_alone(private: Notebook) -> None:
    check_batches_come_from_host_to_host(private, "apart", gpus=2, tls=False)
