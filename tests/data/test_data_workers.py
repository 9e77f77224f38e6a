"""Tests of the server's handle of a worker (`WorkerHandle`), and of `StoppedProcessWatchdog`."""

import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from taas_magic.data.protocol import LoaderRequest, Reply, RequestKind, ResponseKind
from taas_magic.data.watchdog import StoppedProcessWatchdog
from taas_magic.data.worker import WorkerHandle


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def test_all_replies_that_a_worker_sent_before_its_end_are_read(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = sockets
    one = WorkerHandle(0, 0, ours, is_suspect=False)
    replies = [Reply(number, ResponseKind.BATCH, 1) for number in range(3)]
    for reply in replies:
        one.queue_command(reply.number, LoaderRequest(RequestKind.GET, 0, reply.number))
        theirs.send(msgspec.msgpack.encode([reply]))
    theirs.close()
    received = one.receive_replies()
    assert [next(received) for _ in replies] == replies
    with pytest.raises(EOFError):
        next(received)


def test_replies_are_not_waited_for(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = sockets
    assert list(WorkerHandle(0, 0, ours, is_suspect=False).receive_replies()) == []


def test_a_child_that_was_reaped_meanwhile_is_no_error() -> None:
    """The watchdog may check a child that `Process.start()` of multiprocessing has reaped."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    watchdog = StoppedProcessWatchdog()
    watchdog.kill_stopped([ended.pid])
    assert not watchdog.killed
