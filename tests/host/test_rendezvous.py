"""The rendezvous of an attempt's ranks, and the variables that torchrun would set for them."""

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from msgspec import structs
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from taas_magic.errors import PoolError
from taas_magic.host import rendezvous
from taas_magic.host.host_run import HostRun
from taas_magic.host.rendezvous import Rendezvous
from taas_magic.host.spec import HostAddress, Origin, RunSpec, ShareSpec, torchrun_variables
from taas_magic.messages import Event, HostEnded, from_json, to_json
from taas_magic.plan import Flags, HostCapacity, make_plan
from tests.eventually import HUNG_S, eventually

ADDRESS = "127.0.0.1"


def run(ranks: int = 2) -> RunSpec:
    plan = make_plan(Flags(gpus=ranks), HostCapacity(gpus=ranks // 2, cores=1), "run", max_hosts=2)
    return RunSpec(plan, "/nowhere", Origin("/", {}, ()), requires=("numpy",), reach="tls://x:1")


def share(host_rank: int, ranks: int = 2) -> ShareSpec:
    whole = run(ranks)
    mine = whole.plan.hosts[host_rank]
    return ShareSpec(whole.for_hosts(True), host_rank, mine, n_hosts=2, master_addr=ADDRESS)


@pytest.fixture
def meeting() -> Iterator[Rendezvous]:
    """Yield a rendezvous, whose server is a process that a forkserver started."""
    found = Rendezvous(ADDRESS)
    found.start()
    yield found
    found.close()


def store_at(port: int) -> TCPStore:
    return TCPStore(ADDRESS, port, is_master=False, timeout=timedelta(seconds=HUNG_S))


@pytest.mark.process
def test_ranks_of_an_attempt_share_a_store_and_another_attempt_has_its_own(
    meeting: Rendezvous,
) -> None:
    store_at(meeting.port).set("word", "yes")
    assert store_at(meeting.port).get("word") == b"yes"
    other = Rendezvous(ADDRESS)
    other.start()
    assert not store_at(other.port).check(["word"])
    other.close()


def test_a_first_host_that_has_lost_its_address_keeps_no_file_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = structs.replace(share(0), master_addr="192.0.2.1")
    with pytest.raises(OSError, match="Cannot assign requested address"):
        HostRun(gone, HostAddress("gpu1", "192.0.2.1", False), print, lambda: True, print)
    assert not list(tmp_path.iterdir())


def test_a_next_attempt_does_not_wait_for_a_share_that_already_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool hears of the share's failure only after the cleanup, so it may still ask for more.

    The test makes the request in the middle of the cleanup.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    events, answers = list[Event](), list[int]()

    def fail(request: object) -> NoReturn:
        raise PoolError("the pool does not answer")

    def ask_in_cleanup() -> bool:
        answered = threading.Event()

        def ask() -> None:
            answers.append(ending.start_next_attempt(structs.replace(share(1), attempt=1)))
            answered.set()

        threading.Thread(target=ask, daemon=True).start()
        answered.wait(HUNG_S)
        return False

    here = HostAddress("gpu1", ADDRESS, False)
    ending = HostRun(share(1), here, events.append, ask_in_cleanup, fail)
    ending.run()
    assert answers == [0]
    assert isinstance(events[-1], HostEnded) and events[-1].state == "FAILED"


@pytest.mark.process
def test_ranks_that_end_wait_for_one_another(meeting: Rendezvous) -> None:
    """Each rank waits until all ranks end, or until the time limit."""
    environ = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(meeting.port), "WORLD_SIZE": "2"}
    with ThreadPoolExecutor() as ranks:
        first = ranks.submit(rendezvous.await_all_ending, environ, HUNG_S)
        store_at(meeting.port).wait(["taas/ending"], timedelta(seconds=HUNG_S))
        assert not first.done()
        rendezvous.await_all_ending(environ, HUNG_S)
        first.result(HUNG_S)
    rendezvous.await_all_ending({**environ, "WORLD_SIZE": "9"}, 0.1)


@pytest.mark.process
def test_a_rank_reads_a_large_value_until_another_value_replaces_it(meeting: Rendezvous) -> None:
    environ = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(meeting.port)}
    one, other = (rendezvous.LoaderAgreement(environ, "run") for _ in range(2))
    store, values = store_at(meeting.port), [os.urandom(9 << 20), b"small"]
    store.get("taas/horovod")  # the server's own key
    before = store.num_keys()
    one.publish("0", values[0], "none")
    assert other.read("0") == values[0]
    other.publish("1", values[1], "0")
    assert one.read("1") == values[1]
    one.publish("2", b"", "1")
    assert other.read("2") == b"" and store.num_keys() == before + 1


@pytest.mark.process
def test_the_rendezvous_listens_on_one_address_and_ends_with_its_attempt(
    meeting: Rendezvous,
) -> None:
    bound = [c.laddr for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [place.ip for place in bound if place and place.port == meeting.port] == [ADDRESS]
    meeting.close()
    eventually(lambda: not is_answered(meeting.port))


def is_answered(port: int) -> bool:
    try:
        socket.create_connection((ADDRESS, port)).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_first_host_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(PoolError, match=r"127\.0\.0\.1, port 1 .*`interface`"):
        rendezvous.check_reachable(ADDRESS, 1)


def test_a_host_receives_only_what_it_needs() -> None:
    mine = from_json(to_json(share(1)), ShareSpec)
    assert (mine.n_hosts, mine.host_rank, mine.ranks) == (2, 1, range(1, 2))
    assert mine.plan == structs.replace(run().plan, hosts=())
    assert (mine.run.requires, mine.run.reach) == (None, "")


def test_a_rank_of_the_second_host_has_torchruns_variables() -> None:
    second = structs.replace(share(1, ranks=4), attempt=3)
    found = torchrun_variables(second, 1, 29500, Path("/pipes/error.json"))
    places = {"RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "ROLE_RANK": "3"}
    sizes = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    meeting = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "3"}
    assert places.items() | sizes.items() | meeting.items() <= found.items()
