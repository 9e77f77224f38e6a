"""Tests of `Inbox`, which reads frames from a socket, and of a client if its fetchers fail."""

import contextlib
import os
import signal
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from taas_magic.data import client as client_module
from taas_magic.data import connection, encode, protocol
from taas_magic.data.client import Client, Route
from taas_magic.data.connection import FetcherLink, Inbox, PeerSilent
from taas_magic.data.encode import checksum
from taas_magic.data.memory import BorrowedSpans, ReceiveBlocks
from taas_magic.data.protocol import (
    FromServer,
    LoaderRequest,
    ProtocolState,
    RequestKind,
    Response,
    ResponseKind,
    Role,
    SharedBody,
    SharedSpan,
)
from taas_magic.data.sharding import VOID, SlotRequest
from taas_magic.errors import ProtocolError, RunLost
from taas_magic.leases import FetchLease
from taas_magic.messages import Address, LoaderAddresses
from tests.data.data_rig import ready

SIZES = st.sampled_from([0, 64, 4096, 32 << 10, 200 << 10, 448 << 10, 600 << 10, 3 << 20])


def batch(number: int, size: int) -> bytes:
    """Return the frame of a batch. Its body repeats one byte, which depends on `number`."""
    body = bytes([number % 251 + 1]) * size
    response = Response(ResponseKind.BATCH, 1, number, body_sum=checksum(body))
    return protocol.encode_header(response, size) + body


def tick(sock: socket.socket, seconds: float) -> None:
    """Set the receive timeout of a socket."""
    whole = int(seconds)
    timeval = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Inbox]]:
    server, rank = socket.socketpair()
    tick(rank, 0.2)
    with server, rank:
        yield server, box_of(rank)


def box_of(sock: socket.socket, silence_limit_s: float = 60.0) -> Inbox:
    return Inbox(sock, ready(Role.RANK), silence_limit_s)


def sent(sock: socket.socket, data: bytes, cuts: Sequence[int] = ()) -> threading.Thread:
    """Start a thread that sends `data` in pieces; return the thread.

    Args:
        sock: Socket to send to.
        data: Bytes to send.
        cuts: Positions in `data` at which a new piece begins.
    """

    def run() -> None:
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            sock.sendall(data[start:end])

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def responded(whole: tuple[FromServer, memoryview] | None) -> Response:
    """Return the message of a received frame, which must be a response."""
    assert whole is not None and isinstance(whole[0], Response)
    return whole[0]


def over_unix() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def over_tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = socket.create_connection(listener.getsockname())
        return server, listener.accept()[0]


@pytest.mark.parametrize("connected", [over_unix, over_tcp])
@hypothesis.settings(deadline=None, max_examples=25)
@hypothesis.given(st.lists(SIZES, min_size=1, max_size=9), st.data())
def test_frames_arrive_complete_and_are_not_overwritten(
    connected: Callable[[], tuple[socket.socket, socket.socket]],
    sizes: list[int],
    data: st.DataObject,
) -> None:
    stream = b"".join(batch(number, size) for number, size in enumerate(sizes))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    server, rank = connected()
    tick(rank, 60.0)
    with server, rank:
        sender, box, blocks = sent(server, stream, cuts), box_of(rank), ReceiveBlocks(8 << 20)
        heard = [box.receive(blocks) for _ in sizes]
        sender.join()
        # Compare the bodies only now: no later frame may have overwritten an earlier one.
        for number, whole in enumerate(heard):
            assert (responded(whole).slot, len(whole[1])) == (number, sizes[number])
            assert bytes(whole[1]) == bytes([number % 251 + 1]) * sizes[number]


def test_one_call_receives_all_frames_that_have_arrived(ends: tuple[socket.socket, Inbox]) -> None:
    server, box = ends
    server.sendall(b"".join(batch(number, 1024) for number in range(20)))
    assert responded(box.receive(ReceiveBlocks(0))).slot == 0
    assert [responded(box.next_complete()).slot for _ in range(19)] == list(range(1, 20))
    assert box.next_complete() is None


def test_one_response_may_have_many_batches_and_each_small_batch_has_its_own_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link, route = Link(), route_to(1)
    monkeypatch.setattr(route, "connect", lambda number: link)
    client, slots = Client(route, 0), range(3)
    client.send_requests([SlotRequest(slot, True) for slot in slots])
    sizes, bodies = [], []
    for slot in slots:
        encoded = encode.encode(torch.full((100,), slot))
        sizes.append((len(encoded.head), encoded.body_bytes))
        bodies.append(bytearray(encoded.body_bytes))
        encoded.copy_to(memoryview(bodies[-1]))
    response = Response(ResponseKind.BATCH, 0, 0, head_bytes=sizes[0][0], more=2)
    client._store_response(link, response, memoryview(bytearray().join(bodies)))
    for slot in slots:
        batch = client.wait_for_response(SlotRequest(slot, True)).batch
        assert batch.tolist() == [slot] * 100
        assert batch.untyped_storage().nbytes() <= sizes[0][1]
    with pytest.raises(ProtocolError, match="and 2 more, but this rank expects fewer batches"):
        client._store_response(link, response, memoryview(bytearray().join(bodies)))


def test_a_body_after_a_body_of_odd_size_is_aligned(ends: tuple[socket.socket, Inbox]) -> None:
    server, box = ends
    odd = protocol.encode_header(Response(ResponseKind.VALUE, 0, 0), 3) + b"abc"
    server.sendall(odd + batch(0, 64 << 10))
    box.receive(ReceiveBlocks(0))
    _, body = box.receive(ReceiveBlocks(0))
    assert isinstance(body.obj, bytearray)


@pytest.mark.fault(24)
@pytest.mark.parametrize("size", [4096, 200 << 10, 3 << 20])
def test_a_damaged_body_is_refused(ends: tuple[socket.socket, Inbox], size: int) -> None:
    server, box = ends
    data = bytearray(batch(0, size))
    data[-1] ^= 1
    sender = sent(server, bytes(data))
    with pytest.raises(ProtocolError, match="batch 0 of epoch 1 was damaged"):
        for _ in range(300):
            receive_once(box)
    sender.join()


def receive_once(box: Inbox) -> tuple[FromServer, memoryview] | None:
    try:
        return box.receive(ReceiveBlocks(0))
    except PeerSilent:
        return None


def test_a_silent_peer_and_a_closed_connection_raise_different_errors(
    ends: tuple[socket.socket, Inbox],
) -> None:
    server, box = ends
    with pytest.raises(PeerSilent):
        box.receive(ReceiveBlocks(0))
    server.close()
    with pytest.raises(ConnectionError, match="closed"):
        box.receive(ReceiveBlocks(0))


@pytest.mark.parametrize("size", [4096, 3 << 20])
def test_a_frame_that_stops_arriving_raises(size: int) -> None:
    server, rank = socket.socketpair()
    tick(rank, 0.05)
    with server, rank:
        server.sendall(batch(0, size)[: protocol.HEADER_BYTES + 100])
        with pytest.raises(ConnectionError, match="stopped in the middle"):
            box_of(rank, silence_limit_s=0.2).receive(ReceiveBlocks(0))


def test_descriptors_come_with_their_frames(ends: tuple[socket.socket, Inbox]) -> None:
    server, box = ends
    body = SharedBody(SharedSpan(1, 0), 64, is_new=True)
    shared = Response(ResponseKind.BATCH, 0, 0, shared=body)
    with open(os.devnull) as one:
        server.sendall(batch(0, 4096))
        socket.send_fds(server, [protocol.encode_header(shared)], [one.fileno()])
        server.sendall(batch(1, 4096))
        heard = [responded(box.receive(ReceiveBlocks(0))) for _ in range(3)]
        assert [one.shared for one in heard] == [None, body, None]
        descriptor = box.pop_descriptor()
        assert os.path.samestat(os.fstat(descriptor), os.fstat(one.fileno()))
        os.close(descriptor)
    with pytest.raises(ProtocolError, match="did not send it"):
        box.pop_descriptor()


def test_what_may_not_be_said_is_refused_before_its_body() -> None:
    server, rank = socket.socketpair()
    with server, rank:
        response = Response(ResponseKind.BATCH, 0, 0)
        server.sendall(protocol.encode_header(response, protocol.MAX_BATCH_BYTES))
        with pytest.raises(ProtocolError, match="is too long; the limits are 2048 and 0"):
            Inbox(rank, ProtocolState(Role.RANK), 1.0).receive(ReceiveBlocks(0))


class Link(FetcherLink):
    """Link to a fetcher that breaks when a test calls `cut`.

    A test cannot make a real link break between two frames of a chunk.
    """

    def __init__(self) -> None:
        self.address = Address(0, "cpu1", 7000, "", "")
        self.pending, self.unsent, self.borrowed = deque(), [], BorrowedSpans(int)
        self._is_tls = False
        ends = contextlib.ExitStack()
        self._socket, _ = map(ends.enter_context, socket.socketpair())
        self.close = weakref.finalize(self, ends.close)

    def cut(self) -> None:
        self._socket.close()


def test_a_received_batch_is_not_requested_again_if_its_link_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links, aside = [Link(), Link()], set[int]()
    route = route_to(2)
    monkeypatch.setattr(
        route, "choose_fetcher", lambda slot, streams, preferred: 1 if 0 in aside else 0
    )
    monkeypatch.setattr(route, "connect", links.__getitem__)
    monkeypatch.setattr(route, "record_failure", lambda number, why, silent_s: aside.add(number))
    client = Client(route, 0)
    client._order = 5
    client.send_requests([SlotRequest(slot, True) for slot in range(4)])
    links[0].cut()
    body = encode.encode(7)
    # The order in the response differs from the client's order. So the client requests the slot
    # again, over a link that is broken.
    response = Response(ResponseKind.BATCH, 0, 0, order=9, head_bytes=len(body.head))
    client._store_response(links[0], response, memoryview(bytearray(body.body_bytes)))
    again = [LoaderRequest(RequestKind.GET, 0, slot) for slot in range(1, 4)]
    assert sorted(links[1].pending) == sorted([LoaderRequest(RequestKind.ORDER, 0, 0), *again])
    assert client.retried == 4


def ring(number: int, frame: object) -> None:
    """Raise TimeoutError, as a cell's handler of SIGALRM may do."""
    raise TimeoutError("took too long")


def rings(*_: object) -> None:
    """Send SIGALRM to this process. A test replaces a method by this function.

    So the signal arrives while the method is called.
    """
    signal.raise_signal(signal.SIGALRM)


@pytest.fixture
def alarm() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("during", ["connect", "send", "receive", "cancel"])
def test_an_exception_of_a_signal_handler_does_not_count_against_a_fetcher(
    monkeypatch: pytest.MonkeyPatch, alarm: None, during: str
) -> None:
    route = route_to(1)
    link, client, ask = Link(), Client(route, 0), SlotRequest(0, True)
    monkeypatch.setattr(route, "connect", rings if during == "connect" else lambda number: link)
    monkeypatch.setattr(link, "send", rings if during == "send" else link.send)
    monkeypatch.setattr(link, "receive", rings)
    monkeypatch.setattr(link, "cancel", rings)
    monkeypatch.setattr(route, "record_failure", lambda *said: pytest.fail(f"aside: {said}"))
    with pytest.raises(TimeoutError, match="took too long"):
        if during == "cancel":
            client.send_requests([ask])
            client.close()
        client.wait_for_response(ask)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock of connections and clients by one that a test sets.

    Returns:
        A list whose only item is the clock's time.
    """
    now = [0.0]
    for module in (connection, client_module):
        stopped = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
        monkeypatch.setattr(module, "time", stopped)
    return now


def test_a_rank_that_was_stopped_reads_again_before_it_drops_a_fetcher(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    route, link = route_to(1), Link()
    client, came = Client(route, 0), [Response(ResponseKind.VOID, 0, 0)]

    def receive(blocks: ReceiveBlocks) -> list[tuple[FromServer, memoryview]]:
        if not clock[0]:
            clock[0] = 3600.0  # the machine was suspended, or a call in the cell held the GIL
            raise PeerSilent
        return [(came.pop(), memoryview(b""))]

    monkeypatch.setattr(route, "connect", lambda number: link)
    monkeypatch.setattr(link, "receive", receive)
    assert client.wait_for_response(SlotRequest(0, True)).units == VOID
    assert client.retried == 0


def route_to(fetchers: int) -> Route:
    """Return a route to `fetchers` fetchers."""
    found = {number: Address(number, "cpu1", 7000 + number, "", "") for number in range(fetchers)}
    place = LoaderAddresses(fetchers=fetchers, workers=fetchers, addresses=found)
    return Route("train", lambda _: place, b"", lease=FetchLease(4.0))


def test_a_fetcher_that_does_not_answer_is_tried_seldom(clock: list[float]) -> None:
    route = route_to(2)
    assert route.choose_fetcher(0, None) == 0
    route.record_failure(0, PeerSilent(), silent_s=2.0)
    for at, picked in ((0.0, 1), (19.0, 1), (21.0, 0)):
        clock[0] = at
        route.record_response(1)
        assert route.choose_fetcher(0, None) == picked


def test_each_fetcher_is_tried_before_all_are_lost(clock: list[float]) -> None:
    route = route_to(3)
    tried: list[int] = []
    with pytest.raises(RunLost) as lost:
        for _ in range(9):
            clock[0] += 100.0  # longer than any pause between two attempts
            tried.append(route.choose_fetcher(0, None))
            assert route.silence_limit_s >= 1.0
            route.record_failure(tried[-1], PeerSilent(), silent_s=route.silence_limit_s)
    assert sorted(tried) == [0, 1, 2]
    for number in range(3):
        assert f"fetcher {number} at cpu1:{7000 + number} is silent" in str(lost.value)
