"""Wrong system clocks, here and on hosts, have no effect (docs/faults.md 54)."""

import asyncio
import time
from typing import Any

import distributed.batched
import pytest
from cryptography import x509
from distributed.batched import BatchedSend
from tornado.ioloop import IOLoop

from taas_magic import certificate
from taas_magic.host.agent_worker import steady_time, use_steady_clock


class Comm:
    """A connection that records what is written."""

    def __init__(self) -> None:
        self.written: asyncio.Queue[Any] = asyncio.Queue()

    async def write(self, message: Any, **kwargs: Any) -> int:
        self.written.put_nowait(message)
        return 1

    def closed(self) -> bool:
        return False

    async def close(self) -> None:
        """Do nothing."""


@pytest.mark.fault(54)
def test_a_stream_goes_on_after_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed.batched, "time", distributed.batched.time)

    async def play() -> None:
        use_steady_clock()
        comm, stream = Comm(), BatchedSend("2ms", IOLoop.current())
        stream.start(comm)
        stream.send("first")
        assert await asyncio.wait_for(comm.written.get(), 60) == ["first"]
        set_back = time.time() - 86_400
        monkeypatch.setattr(time, "time", lambda: set_back)
        stream.send("second")
        assert await asyncio.wait_for(comm.written.get(), 60) == ["second"]
        assert IOLoop.current().time() >= steady_time() - 60
        await stream.close()

    asyncio.run(play())


@pytest.mark.fault(54)
def test_certificates_hold_whatever_a_clock_shows() -> None:
    """The clock of a board without a battery starts in 1970."""
    own, key = certificate.make_self_signed("pool")
    signed, _ = certificate.make_server_certificate(own, key, "127.0.0.1")
    issued, _ = certificate.Authority("members").issue("host", "taas:host:a")
    for text in (own, signed, issued):
        read = x509.load_pem_x509_certificate(text.encode())
        years = read.not_valid_before_utc.year, read.not_valid_after_utc.year
        assert years == (1970, 9999)
