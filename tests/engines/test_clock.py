"""Dask's streams do not stand still when the system's clock is set back (FAULTS 54)."""

import asyncio
import time
from typing import Any

import distributed.batched
import pytest
from distributed.batched import BatchedSend
from tornado.ioloop import IOLoop

from taas_magic.host.member import steady, use_steady_clock


class Comm:
    """A connection that keeps what is written."""

    def __init__(self) -> None:
        self.written: asyncio.Queue[Any] = asyncio.Queue()

    async def write(self, message: Any, **kwargs: Any) -> int:
        self.written.put_nowait(message)
        return 1

    def closed(self) -> bool:
        return False

    async def close(self) -> None:
        """Nothing is to be closed."""


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
        assert IOLoop.current().time() >= steady() - 60
        await stream.close()

    asyncio.run(play())
