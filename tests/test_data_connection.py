"""A lane's connection: served by its own thread, or by the thread that prepares."""

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from taas_magic.data import encode, wire
from taas_magic.data.answer import Answer, Sent
from taas_magic.data.checksum import checksum, combined
from taas_magic.data.connection import Connection
from taas_magic.data.outbox import LIGHT_BYTES, Outbox
from taas_magic.data.shelf import Shelf
from taas_magic.data.sockets import TICK_S, receive_into, tick
from taas_magic.data.stock import Key
from taas_magic.data.talk import Role, State, Talk
from taas_magic.data.visits import Visits
from taas_magic.data.wire import Flag, Frame, Kind

SMALL = 40 << 10
PATIENCE_S = 30.0


class Ends:
    """A lane's end and a rank's end of one connection over TCP."""

    def __init__(self, is_visited: bool) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.rank = socket.create_connection(server.getsockname())
            self.lane, _ = server.accept()
        tick(self.lane, TICK_S)
        tick(self.rank, PATIENCE_S)
        self.stats = [0.0, 0.0]
        self.shelf = Shelf(1 << 30)
        talk = Talk(Role.LANE)
        talk.hear(Kind.PROOF)
        assert talk.state is State.READY
        self.outbox = Outbox(self.lane, Sent(self.stats, 0, 1), 1 << 20)
        self.connection = Connection(
            self.lane, talk, self.shelf, self.outbox, lambda: self.is_visited
        )
        self.is_visited = is_visited
        self.raised: list[BaseException] = []
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.connection.run()
        except OSError as error:
            self.raised.append(error)

    def ask(self, *slots: int) -> None:
        body = wire.pack_numbers(slots[1:])
        self.rank.sendall(wire.pack(Frame(Kind.GET, 0, slots[0], body_bytes=len(body))) + body)
        if self.is_visited:
            assert select.select([self.lane], [], [], PATIENCE_S)[0]

    def prepare(self, slot: int, size: int = SMALL) -> None:
        """Lay a batch on the shelf, as the thread that prepares does."""
        batch = torch.full((size,), slot, dtype=torch.uint8)
        self.shelf.put(Key(Kind.GET, 0, slot), Answer(Kind.BATCH, encode.encode(batch)))

    def hear(self) -> tuple[Frame, list[torch.Tensor]]:
        """The next frame, and the batches that it brings."""
        header = memoryview(bytearray(wire.HEADER_BYTES))
        receive_into(self.rank, header, PATIENCE_S)
        frame = wire.unpack(header)
        body = memoryview(bytearray(frame.batches * frame.body_bytes))
        receive_into(self.rank, body, PATIENCE_S)
        parts = wire.parts(frame, body)
        assert frame.flags & Flag.SUMMED and combined(map(checksum, parts)) == frame.body_sum
        return frame, [encode.decode(part, frame.head_bytes) for part in parts]


@contextmanager
def connected(is_visited: bool) -> Iterator[Ends]:
    ends = Ends(is_visited)
    ends.thread.start()
    try:
        yield ends
    finally:
        ends.is_visited = False
        ends.rank.close()
        ends.thread.join()
        ends.lane.close()


def test_a_visit_sends_what_is_ready_and_waits_for_nothing() -> None:
    with connected(is_visited=True) as ends:
        ends.prepare(0)
        ends.ask(0, 1)
        assert ends.connection.visit()
        frame, (batch,) = ends.hear()
        assert frame.batch == 0 and batch.tolist() == [0] * SMALL
        assert not ends.connection.visit()
        ends.prepare(1)
        assert ends.connection.visit()
        assert ends.hear()[0].batch == 1
        assert ends.stats[0] == 2


def test_batches_that_are_alike_share_a_header() -> None:
    with connected(is_visited=True) as ends:
        sizes = [SMALL, SMALL, SMALL, SMALL // 2, SMALL]
        for slot, size in enumerate(sizes):
            ends.prepare(slot, size)
        ends.ask(*range(len(sizes)))
        assert ends.connection.visit()
        heard = []
        while sum(map(len, heard)) < len(sizes):
            heard.append(ends.hear()[1])
        assert [len(group) for group in heard] == [3, 1, 1]
        batches = [batch for group in heard for batch in group]
        assert [batch.tolist() for batch in batches] == [[n] * size for n, size in enumerate(sizes)]


def test_without_visits_the_connection_answers_by_itself() -> None:
    with connected(is_visited=False) as ends:
        ends.ask(0)
        ends.prepare(0)
        assert ends.hear()[0].batch == 0


def test_what_the_kernel_has_no_room_for_goes_later_and_in_order() -> None:
    count, size = 64, 700 << 10
    assert size < LIGHT_BYTES
    with connected(is_visited=True) as ends:
        for slot in range(count):
            ends.prepare(slot, size)
        ends.ask(*range(count))
        ends.connection.visit()
        assert ends.outbox, "so much does not fit into a socket"
        heard: list[tuple[int, list[int]]] = []

        def listen() -> None:
            for _ in range(count):
                frame, (batch,) = ends.hear()
                heard.append((frame.batch, batch.unique().tolist()))

        listener = threading.Thread(target=listen)
        listener.start()
        while listener.is_alive():
            ends.connection.visit()
            listener.join(0.001)
        assert heard == [(slot, [slot]) for slot in range(count)]


def test_a_rank_that_waits_hears_that_the_lane_is_alive_however_often_it_is_visited() -> None:
    with connected(is_visited=True) as ends:
        ends.ask(0)
        ends.connection.visit()
        header = memoryview(bytearray(wire.HEADER_BYTES))
        receive_into(ends.rank, header, PATIENCE_S)
        assert wire.unpack(header).kind is Kind.ALIVE


def test_large_batches_are_left_to_the_connections_own_thread() -> None:
    with connected(is_visited=True) as ends:
        ends.prepare(0, 2 * LIGHT_BYTES)
        ends.ask(0)
        ends.connection.visit()
        assert ends.hear()[0].batch == 0
        ends.prepare(1, 2 * LIGHT_BYTES)
        ends.is_visited = False
        ends.ask(1)
        assert ends.hear()[0].batch == 1


def test_a_peer_that_is_gone_ends_the_connection_and_not_the_visitor() -> None:
    ends = Ends(is_visited=True)
    ends.thread.start()
    ends.ask(*range(200))
    for slot in range(200):
        ends.prepare(slot)
    ends.rank.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    ends.rank.close()
    while ends.thread.is_alive():
        ends.connection.visit()
        ends.thread.join(0.001)
    assert isinstance(ends.raised[0], OSError)
    assert ends.shelf.ready_batches, "what is prepared stays for whoever asks again"
    sent = ends.stats[0]
    ends.connection.visit()
    assert ends.stats[0] == sent
    ends.lane.close()


@pytest.mark.parametrize("is_visited", [True, False])
def test_a_peer_that_says_goodbye_ends_the_connection(is_visited: bool) -> None:
    with connected(is_visited) as ends:
        ends.rank.shutdown(socket.SHUT_WR)
        if is_visited:
            assert select.select([ends.lane], [], [], PATIENCE_S)[0]
            assert not ends.connection.visit()
        ends.thread.join(PATIENCE_S)
        assert not ends.thread.is_alive()
        assert not ends.raised


def test_visits_go_on_while_the_connections_own_thread_does_not_know_what_is_left() -> None:
    count, size = 64, 700 << 10
    visits = Visits(is_allowed=True)
    with connected(is_visited=False) as ends:
        visits.add(ends.connection)
        for slot in range(count):
            ends.prepare(slot, size)
        while not ends.connection._is_waiting:
            ends.thread.join(0.001)
        # What a visitor hears before the thread wakes up, the thread has not heard of.
        ends.connection._is_waiting, ends.is_visited = True, True
        ends.ask(*range(count))
        assert visits.rest(time.monotonic()) is not None
        assert ends.outbox, "so much does not fit into a socket"
        ends.connection._is_waiting = True
        assert visits.rest(time.monotonic() + 60) is not None
        ends.connection._is_waiting = False
        assert visits.rest(time.monotonic() + 60) is None


def test_after_a_death_there_are_no_visits() -> None:
    visits = Visits(is_allowed=False)
    with connected(is_visited=True) as ends:
        visits.add(ends.connection)
        ends.prepare(0)
        ends.ask(0)
        visits.look_in(time.monotonic())
        assert visits.rest(time.monotonic()) is None
        assert not visits.are_frequent()
        ends.is_visited = False
        assert ends.hear()[0].batch == 0


def test_many_connections_are_left_to_their_own_threads() -> None:
    visits = Visits(is_allowed=True)
    with connected(is_visited=False) as ends:
        visits.add(ends.connection)
        visits.look_in(time.monotonic())
        assert visits.are_frequent()
        for _ in range(40):
            visits.add(ends.connection)
        assert visits.rest(time.monotonic()) is None
        visits.look_in(time.monotonic() + 60)
        assert not visits.are_frequent()
        visits.remove(ends.connection)
        visits.look_in(time.monotonic() + 120)
        assert visits.are_frequent()
