"""Looks for the hosts by which a run may grow, while it runs on those that it has."""

import asyncio
from collections.abc import Callable, Collection

from taas_magic.engines.member import Member
from taas_magic.engines.members import Members
from taas_magic.errors import PoolError
from taas_magic.plan import Plan
from taas_magic.planning import next_size

AGAIN_S = 5.0
"""After hosts could not be had, how long until they are asked for again."""


class Growth:
    """What one run may grow to.

    Args:
        members: The pool's hosts.
        on_found: Called when hosts for a larger attempt are there.
    """

    def __init__(self, members: Members, on_found: Callable[[], None]) -> None:
        self._members, self._on_found = members, on_found
        self._search: asyncio.Task[tuple[Plan, list[Member]]] | None = None

    def seek(self, plan: Plan, has: Collection[str]) -> None:
        """Looks for more hosts from now on, if the plan may grow.

        Args:
            plan: The run as it is.
            has: Addresses of its hosts.
        """
        self.close()
        larger = next_size(plan)
        if larger is not None:
            self._search = asyncio.create_task(self._find(larger, has))
            self._search.add_done_callback(lambda _: self._on_found())

    def found(self) -> tuple[Plan, list[Member]] | None:
        """The larger plan and its hosts, once they are there."""
        search = self._search
        return search.result() if search and search.done() and not search.cancelled() else None

    def close(self) -> None:
        """Ends the search."""
        if self._search is not None:
            self._search.cancel()
            self._search = None

    async def _find(self, plan: Plan, has: Collection[str]) -> tuple[Plan, list[Member]]:
        while True:
            try:
                members = await self._members.take(len(plan.hosts), keep=has)
            except PoolError:
                members = []
            if members and not any(m.runs for m in members if m.address not in has):
                return plan, members
            await asyncio.sleep(AGAIN_S)
