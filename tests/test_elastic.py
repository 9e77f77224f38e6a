"""The hosts' meeting place."""

import threading

import psutil

from taas_magic.remote.elastic import HostRendezvous


def test_hosts_meet_and_get_their_places() -> None:
    first = HostRendezvous("run", 0, 2, "127.0.0.1")
    second = HostRendezvous("run", 1, 2, "127.0.0.1", first.port)
    met = [first.next_rendezvous(), second.next_rendezvous()]
    assert [(info.rank, info.world_size) for info in met] == [(0, 2), (1, 2)]
    thread = threading.Thread(target=lambda: met[0].store.set("word", "yes"))
    thread.start()
    assert met[1].store.get("word") == b"yes"
    thread.join()


def test_a_new_round_does_not_see_the_last_ones_keys() -> None:
    rendezvous = HostRendezvous("run", 0, 1, "127.0.0.1")
    rendezvous.next_rendezvous().store.set("word", "old")
    assert not rendezvous.next_rendezvous().store.check(["word"])


def test_the_store_listens_on_its_address_only() -> None:
    rendezvous = HostRendezvous("run", 0, 1, "127.0.0.1")
    connections = psutil.Process().net_connections("tcp")
    listening = [c.laddr for c in connections if c.status == psutil.CONN_LISTEN]
    assert [place.ip for place in listening if place.port == rendezvous.port] == ["127.0.0.1"]
