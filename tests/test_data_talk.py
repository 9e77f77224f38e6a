"""Who may say what when: whatever the table does not list is refused."""

import os

import hypothesis
import hypothesis.strategies as st
import pytest

from taas_magic.data import wire
from taas_magic.data.talk import Assembler, Role, Talk, prove, proven
from taas_magic.errors import ProtocolError


def ready_lane():
    talk = Talk(Role.LANE)
    talk.hear(wire.Kind.PROOF)
    return Assembler(talk)


@hypothesis.settings(deadline=None)
@hypothesis.given(st.lists(st.binary(max_size=300), max_size=5), st.data())
def test_a_stream_cut_anywhere_gives_the_same_frames(bodies, data):
    sent = [
        (wire.Frame(wire.Kind.GET, batch=n, body_bytes=len(body)), body)
        for n, body in enumerate(bodies)
    ]
    stream = b"".join(wire.pack(frame) + body for frame, body in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    assembler, heard = ready_lane(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        heard += assembler.feed(stream[start:end])
    assert heard == sent


@hypothesis.given(st.binary(min_size=wire.HEADER_BYTES, max_size=200))
def test_noise_is_refused(noise):
    with pytest.raises(ProtocolError):
        list(ready_lane().feed(noise))


def test_a_cut_header_waits_for_the_rest():
    assert list(ready_lane().feed(wire.pack(wire.Frame(wire.Kind.OPEN))[:-1])) == []


@pytest.mark.parametrize("kind", [kind for kind in wire.Kind if kind is not wire.Kind.PROOF])
def test_nothing_is_heard_before_the_proof(kind):
    with pytest.raises(ProtocolError, match="may not hear"):
        Talk(Role.LANE).hear(kind)


def test_the_whole_conversation():
    lane, rank = Talk(Role.LANE), Talk(Role.RANK)
    for talk, kinds in [
        (rank, [wire.Kind.CHALLENGE, wire.Kind.WELCOME, wire.Kind.OPENED, wire.Kind.BATCH]),
        (lane, [wire.Kind.PROOF, wire.Kind.OPEN, wire.Kind.GET, wire.Kind.PEEK]),
    ]:
        for kind in kinds:
            talk.hear(kind)
    with pytest.raises(ProtocolError):
        rank.hear(wire.Kind.CHALLENGE)
    with pytest.raises(ProtocolError):
        lane.hear(wire.Kind.PROOF)


def test_a_proof_holds_for_one_key_one_nonce_and_one_side():
    key, nonce = os.urandom(32), os.urandom(32)
    mac = prove(key, Role.RANK, nonce)
    assert proven(key, Role.RANK, nonce, mac)
    assert not proven(os.urandom(32), Role.RANK, nonce, mac)
    assert not proven(key, Role.LANE, nonce, mac)
    assert not proven(key, Role.RANK, os.urandom(32), mac)
