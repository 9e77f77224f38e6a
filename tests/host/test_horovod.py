"""Ranks have the variables that `horovodrun` would set, and Horovod's ranks find each other."""

import socket
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from taas_magic.host.rendezvous import Rendezvous, horovod_variables, query_horovod
from tests.harness import Notebook

ADDRESS = "127.0.0.1"
needs_horovod = pytest.mark.skipif(find_spec("horovod") is None, reason="horovod is not installed")

SUM = """
import horovod.torch as hvd, torch
hvd.init()
total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum).item()
print(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), total)
"""

DIES_ONCE = """
import os
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and hvd.rank() == 3:
    os._exit(1)
"""


def environ(port: int = 1, **places: int) -> dict[str, str]:
    """Return environment variables of a rank: address, port, network interface, and `places`."""
    meeting = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "eth0"}
    return {**meeting, **{name: str(number) for name, number in places.items()}}


def test_a_rank_has_horovodruns_variables() -> None:
    """The rank is on the second of two hosts, which have two ranks each."""
    places = {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    found = horovod_variables(environ(**places, GROUP_RANK=1, GROUP_WORLD_SIZE=2), "4711")
    assert found == {
        "HOROVOD_RANK": "3",
        "HOROVOD_SIZE": "4",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "2",
        "HOROVOD_HOSTNAME": f"{socket.gethostname()}-1",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": ADDRESS,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
        "HOROVOD_GLOO_IFACE": "eth0",
    }


@pytest.mark.parametrize(("local_rank", "hosts"), [(0, 3), (1, 3), (2, 2)])
def test_the_cross_size_counts_only_hosts_with_this_local_rank(local_rank: int, hosts: int) -> None:
    """Three hosts have 3, 3 and 2 ranks: only two of them have a local rank 2."""
    places = {"RANK": local_rank, "WORLD_SIZE": 8, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": 3}
    found = horovod_variables(environ(**places, GROUP_RANK=0, GROUP_WORLD_SIZE=3), "4711")
    assert found["HOROVOD_CROSS_SIZE"] == str(hosts)


@pytest.fixture
def meeting() -> Iterator[Rendezvous]:
    found = Rendezvous(ADDRESS)
    found.start()
    yield found
    found.close()


@pytest.mark.process
@pytest.mark.skipif(find_spec("horovod") is not None, reason="horovod is installed")
def test_a_first_host_without_horovod_is_named(meeting: Rendezvous) -> None:
    notes: list[str] = []
    assert query_horovod(environ(meeting.port), notes.append) == {}
    assert notes == [
        "horovod is not installed on the run's first host: horovod's ranks will not find each other"
    ]


@needs_horovod
def test_horovod_sums_over_the_ranks_of_one_host(notebook: Notebook) -> None:
    outcome = notebook.run(SUM)
    assert outcome.error is None, outcome.shown
    assert outcome.lines == {rank: [f"{rank} 2 {rank} 2 0 1.0"] for rank in range(2)}


@needs_horovod
def test_horovod_sums_over_the_ranks_of_several_hosts_also_after_a_restart(
    several: Notebook,
) -> None:
    outcome = several.run(SUM + DIES_ONCE, "--pool many --max-restarts 1", gpus=4)
    assert outcome.error is None, outcome.shown
    said = {rank: f"{rank} 4 {rank % 2} 2 {rank // 2} 6.0" for rank in range(4)}
    assert {rank: lines[-1] for rank, lines in outcome.lines.items()} == said
