"""A host of a pool, as the pool's process knows it, and the calls that it has to answer."""

import asyncio
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from taas_magic.errors import PoolError

_numbers = itertools.count(1)


@dataclass
class Member:
    """A host that has joined.

    Attributes:
        address: Its agent's, by which Dask knows it.
        agent: Its agent's name, by which the engine knows it.
        joined: When, in seconds since 1970.
        heard_at: When it was last heard, by this process's monotonic clock.
        name: What the notebook calls it; "" until it has said so.
        means: What holds its ranks off the project store.
        place: Where its ranks and fetchers are reached by those of other hosts.
        runs: What it runs.
        gpus: CUDA devices that it has.
        leaves: Whether it is being given back.
        taken_at: When it was last given to somebody, by this process's monotonic clock.
        has: Modules that are known to be installed there; None while nothing is known.
        pending: The calls that it has not answered, by their numbers.
    """

    address: str
    agent: str = ""
    joined: float = field(default_factory=time.time)
    heard_at: float = field(default_factory=time.monotonic)
    name: str = ""
    means: str = ""
    place: str = ""
    runs: set[str] = field(default_factory=set)
    gpus: int = 0
    leaves: bool = False
    taken_at: float = float("-inf")
    has: set[str] | None = None
    pending: dict[int, asyncio.Future[Any]] = field(default_factory=dict)

    @contextmanager
    def asked(self) -> Iterator[tuple[int, asyncio.Future[Any]]]:
        """Gives the number of a new call and its answer, which is awaited inside the block."""
        number = next(_numbers)
        answer = self.pending[number] = asyncio.get_running_loop().create_future()
        try:
            yield number, answer
        finally:
            self.pending.pop(number, None)

    def answers(self, number: int, answer: Any, error: str) -> bool:
        """Takes its answer to a call, or why that failed; False when nobody waits for one."""
        waiting = self.pending.get(number)
        if waiting is None or waiting.done():
            return False
        if error:
            waiting.set_exception(PoolError(f"host {self.name or self.address}: {error}"))
        else:
            waiting.set_result(answer)
        return True

    def is_gone(self, why: str) -> None:
        """It will answer no call any more."""
        for answer in self.pending.values():
            if not answer.done():
                gone = f"host {self.name or self.address} is gone: {why}"
                answer.set_exception(PoolError(gone))
