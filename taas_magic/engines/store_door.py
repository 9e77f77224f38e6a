"""The way to a run's project store for its hosts that do not share it: opened when one asks."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from taas_magic.errors import ProtocolError
from taas_magic.store import StoreRule, state_folder
from taas_magic.travel.desk import Desk


class StoreDoor:
    """One run's; what takes a disk's time is done in a thread of its own.

    Args:
        rule: The run's store; None where it has none.
        writes: Whether the hosts' ranks write; a desk for fetchers alone has files of its own.
    """

    def __init__(self, rule: StoreRule | None, writes: bool = True) -> None:
        self._rule, self._writes = rule, writes
        self._thread = ThreadPoolExecutor(1, "taas-store")
        self._desk: Desk | None = None
        self._is_closed = False

    async def answer(self, host_rank: int, what: str, arguments: Mapping[str, Any]) -> Any:
        """What a host asked of the desk.

        Raises:
            ProtocolError: It cannot be asked.
            StoreError: The store is too much to travel.
        """
        if self._is_closed or self._rule is None:
            raise ProtocolError("the run has no project store (any more)")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._answer, host_rank, what, arguments)

    async def close(self) -> None:
        """Returns when nothing of what was on its way is left."""
        self._is_closed = True
        if self._desk is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._desk.close)
        self._thread.shutdown(wait=False)

    def _answer(self, host_rank: int, what: str, arguments: Mapping[str, Any]) -> Any:
        if self._desk is None:
            assert self._rule is not None
            folder = state_folder(self._rule.path)
            if self._writes:
                self._desk = Desk(self._rule, folder)
            else:
                self._desk = Desk(self._rule, folder / "fetchers", writer=-1)
        return self._desk.answer(host_rank, what, arguments)
