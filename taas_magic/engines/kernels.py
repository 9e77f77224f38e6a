"""The kernels of a pool: which are there, which wait for hosts, and when the pool is over.

Lives in the pool's process, on its event loop.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from taas_magic.engines.member import Member
from taas_magic.engines.members import Members
from taas_magic.errors import PoolError


class Kernels:
    """The kernels of a pool.

    Args:
        members: The pool's hosts.
        linger_s: How long the pool goes on without a kernel.
        is_busy: Says whether the pool has runs.
    """

    def __init__(self, members: Members, linger_s: float, is_busy: Callable[[], bool]) -> None:
        self._members, self._linger_s, self._is_busy = members, linger_s, is_busy
        self._connected: set[str] = set()
        self._waiting: dict[str, set[asyncio.Future[list[Member]]]] = {}
        self._lingering: asyncio.TimerHandle | None = None
        self.over = asyncio.Event()
        """Nobody needs the pool any more."""
        self._linger()

    @property
    def count(self) -> int:
        """How many are connected."""
        return len(self._connected)

    def come(self, client: str) -> None:
        """A kernel has connected."""
        self._connected.add(client)
        if self._lingering is not None:
            self._lingering.cancel()

    def go(self, client: str) -> None:
        """A kernel has left or died."""
        self._connected.discard(client)
        self.give_up(client)
        if not self._connected:
            self._linger()

    async def ready(self, owner: str, hosts: int) -> dict[str, Any]:
        """Returns when so many hosts are there and can start ranks at once.

        A kernel may wait several times at once: a cell does while its pool is being warmed.

        Args:
            owner: The Dask client of the kernel; when it is gone or gives up, so is its wait.
            hosts: How many.

        Returns:
            `hosts`: their names. Or `error`, why there are none.
        """
        waiting = asyncio.ensure_future(self._members.take(hosts))
        self._waiting.setdefault(owner, set()).add(waiting)
        try:
            return {"hosts": [member.name for member in await waiting]}
        except PoolError as error:
            return {"error": str(error)}
        except asyncio.CancelledError:
            if not waiting.cancelled():
                raise
            return {"error": "nobody waits for its hosts any more"}
        finally:
            self._waiting.get(owner, set()).discard(waiting)

    def give_up(self, owner: str) -> None:
        """A kernel does not wait for hosts any more: those that nobody uses are given back."""
        for waiting in self._waiting.pop(owner, set()):
            waiting.cancel()

    def _linger(self) -> None:
        loop = asyncio.get_running_loop()
        self._lingering = loop.call_later(self._linger_s, self._end_if_alone)

    def _end_if_alone(self) -> None:
        if self._connected or self._is_busy():
            self._linger()
        else:
            self.over.set()
