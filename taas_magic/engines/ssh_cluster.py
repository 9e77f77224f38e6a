"""The hosts of a pool of kind `ssh`: which are free, which are coming, which were refused.

Lives in the pool's process, on its event loop; `ssh_host` brings one host up.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from distributed import SpecCluster
from distributed.core import Status

from taas_magic.config import PoolConfig
from taas_magic.errors import PoolError
from taas_magic.ssh.target import Target

_LOOK_S = 0.25

_T = TypeVar("_T")


class Roster:
    """The hosts of a pool: which are free, and what is wrong with those that could not be had.

    Args:
        pool: The pool's settings.
        targets: Its hosts.
        security: Keyword arguments of dask's `Security`, for the agents.
    """

    def __init__(
        self, pool: PoolConfig, targets: Iterable[Target], security: Mapping[str, Any]
    ) -> None:
        self.pool, self.security = pool, security
        self._free = list(targets)
        self._executor = ThreadPoolExecutor(2 * len(self._free), "taas-ssh")
        self.refusals: list[str] = []
        self.has_joined: Callable[[object], bool] = lambda name: False

    def take(self, besides: Iterable[Target]) -> Target | None:
        """A free host; None when there is none but those."""
        target = next((target for target in self._free if target not in besides), None)
        if target is not None:
            self._free.remove(target)
        return target

    def give_back(self, target: Target) -> None:
        """Makes a host free again; it is taken after the others."""
        self._free.append(target)

    async def in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Runs what blocks. Dask's and asyncio's own threads are too few for all hosts at once."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, work, *arguments)

    def close(self) -> None:
        """Starts no more threads."""
        self._executor.shutdown(wait=False)


class SshCluster(SpecCluster):
    """A SpecCluster whose hosts come in the background, and may be refused or given up.

    Args:
        roster: The pool's hosts.
    """

    def __init__(self, roster: Roster, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._roster = roster
        self._coming: asyncio.Future[Any] | None = None
        roster.has_joined = lambda name: name in self.scheduler.aliases

    async def bring(self) -> list[str]:
        """Brings hosts up, for a moment at a time.

        Returns:
            What those are doing that take long.

        Raises:
            PoolError: One of them could not be had.
        """
        if self._coming is None or self._coming.done():
            self._coming = asyncio.ensure_future(self)
        await asyncio.wait({self._coming}, timeout=_LOOK_S)
        if self._roster.refusals:
            refusals, self._roster.refusals = self._roster.refusals, []
            raise PoolError("\n".join(dict.fromkeys(refusals)))
        error = self._coming.exception() if self._coming.done() else None
        if error is not None and not isinstance(error, PoolError):
            raise error
        return sorted(filter(None, (host.news() for host in self._created)))

    async def why_lost(self, name: str) -> str:
        """What is known of a lost host, in one line."""
        hosts = [host for host in self._created if str(host.name) == name]
        said = [await self._roster.in_thread(host.why_lost) for host in hosts]
        return next(filter(None, said), "")

    def give_up(self, keep: Collection[str] = ()) -> None:
        """Ends every attempt to bring a host up, but for those that are named."""
        for host in self._created:
            if str(host.name) not in keep:
                host.give_up()
        self._roster.refusals = []

    async def _correct_state_internal(self) -> None:
        for name in [n for n, host in self.workers.items() if host.status == Status.failed]:
            del self.workers[name]  # Dask would take it for a host that is coming
        await super()._correct_state_internal()

    async def _close(self) -> None:
        self.give_up()
        await super()._close()
        self._roster.close()
