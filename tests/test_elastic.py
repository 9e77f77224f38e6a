"""The hosts' meeting place."""

import threading

import psutil
import pytest

from taas_magic.errors import PoolError
from taas_magic.plan import Flags, HostCapacity
from taas_magic.planning import make_plan
from taas_magic.remote import elastic
from taas_magic.remote.elastic import HostRendezvous, serve_store
from taas_magic.remote.spec import HostSpec, Origin, of_host


def spec(host_rank: int, port: int = 0) -> HostSpec:
    plan = make_plan(Flags(gpus=2), HostCapacity(gpus=1, cores=1), "run", max_hosts=2)
    origin = Origin("/", {}, ())
    return HostSpec(plan, host_rank, "/nowhere", origin, "127.0.0.1", port, n_hosts=2)


def test_hosts_meet_and_get_their_places() -> None:
    store = serve_store(spec(0))
    assert store is not None
    first = HostRendezvous(spec(0), store)
    second = HostRendezvous(spec(1, store.port), serve_store(spec(1)))
    met = [first.next_rendezvous(), second.next_rendezvous()]
    assert [(info.rank, info.world_size) for info in met] == [(0, 2), (1, 2)]
    assert {info.bootstrap_store_info.master_port for info in met} == {store.port}
    thread = threading.Thread(target=lambda: met[0].store.set("word", "yes"))
    thread.start()
    assert met[1].store.get("word") == b"yes"
    thread.join()


def test_another_attempt_does_not_see_the_last_ones_keys() -> None:
    rendezvous = HostRendezvous(spec(0), serve_store(spec(0)))
    rendezvous.next_rendezvous().store.set("word", "old")
    assert rendezvous.num_nodes_waiting() == 0
    rendezvous.call_again(spec(0), serve_store(spec(0)))
    assert rendezvous.num_nodes_waiting() == 1
    assert not rendezvous.next_rendezvous().store.check(["word"])
    assert rendezvous.num_nodes_waiting() == 0


def test_the_store_listens_on_its_address_only() -> None:
    store = serve_store(spec(0))
    assert store is not None
    connections = psutil.Process().net_connections("tcp")
    listening = [c.laddr for c in connections if c.status == psutil.CONN_LISTEN]
    assert [place.ip for place in listening if place.port == store.port] == ["127.0.0.1"]


def test_a_first_host_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "REACH_TIMEOUT_S", 0.1)
    with pytest.raises(PoolError, match=r"127\.0\.0\.1, port 1: .*`interface`"):
        HostRendezvous(spec(1, port=1), None).next_rendezvous()


def test_a_host_is_told_only_its_own_ranks() -> None:
    whole = spec(0).to_json()
    mine = HostSpec.from_json(of_host(whole, 1))
    assert (mine.n_hosts, mine.host_rank, len(mine.plan.hosts)) == (2, 1, 1)
    assert mine.share == HostSpec.from_json(whole).plan.hosts[1]
