"""Frames from a socket: whole, in order, wherever the stream is cut, and in memory that is safe."""

import os
import socket
import threading

import hypothesis
import hypothesis.strategies as st
import pytest

from taas_magic.data import wire
from taas_magic.data.blocks import Blocks
from taas_magic.data.checksum import checksum, combined
from taas_magic.data.inbox import Corrupted, Inbox, Silent
from taas_magic.data.sockets import tick
from taas_magic.data.talk import Role, Talk
from taas_magic.data.wire import Flag, Frame, Kind
from taas_magic.errors import ProtocolError

SIZES = st.sampled_from([0, 64, 4096, 32 << 10, 200 << 10, 448 << 10, 600 << 10, 3 << 20])
GROUPS = st.sampled_from([(64, 16), (32 << 10, 16), (200 << 10, 2), (200 << 10, 5)])


def batch(number, size, batches=1):
    """A frame of some batches, all of whose bytes are the number of the first of them."""
    body = bytes([number % 251 + 1]) * size
    total = combined([checksum(body)] * batches)
    frame = Frame(Kind.BATCH, 1, number, body_bytes=size, flags=Flag.SUMMED, body_sum=total)
    return wire.pack(frame._replace(batches=batches)) + body * batches


@pytest.fixture
def ends():
    lane, rank = socket.socketpair()
    tick(rank, 0.2)
    with lane, rank:
        yield lane, box_of(rank)


def box_of(sock, patience_s=60.0):
    talk = Talk(Role.RANK)
    talk.hear(Kind.CHALLENGE)
    talk.hear(Kind.WELCOME)
    return Inbox(sock, talk, patience_s)


def sent(sock, data, cuts=()):
    """Send in a thread, in pieces."""

    def run():
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            sock.sendall(data[start:end])

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def over_unix():
    return socket.socketpair()


def over_tcp():
    with socket.create_server(("127.0.0.1", 0)) as server:
        lane = socket.create_connection(server.getsockname())
        return lane, server.accept()[0]


@pytest.mark.parametrize("connected", [over_unix, over_tcp])
@hypothesis.settings(deadline=None, max_examples=25)
@hypothesis.given(
    st.lists(st.tuples(SIZES, st.just(1)) | GROUPS, min_size=1, max_size=9), st.data()
)
def test_frames_come_whole_and_stay_what_they_are(connected, sizes, data):
    stream = b"".join(batch(number, *size) for number, size in enumerate(sizes))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    lane, rank = connected()
    tick(rank, 60.0)
    with lane, rank:
        sender, box, blocks = sent(lane, stream, cuts), box_of(rank), Blocks(8 << 20)
        heard = [box.receive(blocks) for _ in sizes]
        sender.join()
        # All are looked at only now: none may have been written over by a later one.
        for number, (frame, body) in enumerate(heard):
            size, batches = sizes[number]
            assert (frame.batch, len(body)) == (number, size * batches)
            assert bytes(body) == bytes([number % 251 + 1]) * size * batches
            assert list(map(len, wire.parts(frame, body))) == [size] * batches


def test_one_call_brings_all_that_has_come(ends):
    lane, box = ends
    lane.sendall(b"".join(batch(number, 1024) for number in range(20)))
    assert box.receive(Blocks(0))[0].batch == 0
    assert [box.here()[0].batch for _ in range(19)] == list(range(1, 20))
    assert box.here() is None


def test_a_small_body_that_is_kept_keeps_no_chunk(ends):
    lane, box = ends
    lane.sendall(batch(0, 1024))
    _, body = box.receive(Blocks(0))
    assert len(body.obj) == 1024


def test_a_body_behind_an_odd_one_is_aligned(ends):
    lane, box = ends
    odd = wire.pack(Frame(Kind.VALUE, body_bytes=3)) + b"abc"
    lane.sendall(odd + batch(0, 64 << 10))
    box.receive(Blocks(0))
    _, body = box.receive(Blocks(0))
    assert isinstance(body.obj, bytearray)


@pytest.mark.parametrize("size", [4096, 200 << 10, 3 << 20])
def test_24_a_damaged_body_is_refused(ends, size):
    lane, box = ends
    data = bytearray(batch(0, size))
    data[-1] ^= 1
    sender = sent(lane, bytes(data))
    with pytest.raises(Corrupted, match="batch 0 of epoch 1"):
        for _ in range(300):
            receive_once(box)
    sender.join()


@pytest.mark.parametrize("bit", [1, 128])
def test_24_damage_of_two_batches_in_a_frame_does_not_cancel_out(ends, bit):
    lane, box = ends
    size = 4096
    data = bytearray(batch(0, size, batches=3))
    first, third = wire.HEADER_BYTES + 7, wire.HEADER_BYTES + 2 * size + 7
    data[first] = (data[first] + bit) % 256
    data[third] = (data[third] - bit) % 256
    sender = sent(lane, bytes(data))
    with pytest.raises(Corrupted, match="batch 0 of epoch 1"):
        for _ in range(300):
            receive_once(box)
    sender.join()


def receive_once(box):
    try:
        return box.receive(Blocks(0))
    except Silent:
        return None


def test_nothing_for_a_tick_is_silence_and_the_end_is_the_end(ends):
    lane, box = ends
    with pytest.raises(Silent):
        box.receive(Blocks(0))
    lane.close()
    with pytest.raises(ConnectionError, match="closed"):
        box.receive(Blocks(0))


@pytest.mark.parametrize("size", [4096, 3 << 20])
def test_a_frame_that_stands_still_is_given_up(size):
    lane, rank = socket.socketpair()
    tick(rank, 0.05)
    with lane, rank:
        lane.sendall(batch(0, size)[: wire.HEADER_BYTES + 100])
        with pytest.raises(ConnectionError, match="stopped in the middle"):
            box_of(rank, patience_s=0.2).receive(Blocks(0))


def test_descriptors_come_with_their_frames(ends):
    lane, box = ends
    shared = Frame(Kind.BATCH, body_bytes=64, flags=Flag.SHARED | Flag.NEW_BLOCK)
    with open(os.devnull) as one:
        lane.sendall(batch(0, 4096))
        socket.send_fds(lane, [wire.pack(shared)], [one.fileno()])
        lane.sendall(batch(1, 4096))
        assert [box.receive(Blocks(0))[0].flags & Flag.SHARED for _ in range(3)] == [0, 2, 0]
        descriptor = box.descriptor()
        assert os.path.samestat(os.fstat(descriptor), os.fstat(one.fileno()))
        os.close(descriptor)
    with pytest.raises(ProtocolError, match="did not come"):
        box.descriptor()


def test_what_may_not_be_said_is_refused_before_its_body():
    lane, rank = socket.socketpair()
    with lane, rank:
        lane.sendall(wire.pack(Frame(Kind.BATCH, body_bytes=wire.MAX_BATCH_BYTES)))
        with pytest.raises(ProtocolError, match="may not hear"):
            Inbox(rank, Talk(Role.RANK), 1.0).receive(Blocks(0))
