"""The fetchers of a run in the pool's process: starts them on their hosts, and ends them.

They are a share of the run of their own: they begin before its ranks do, perhaps in another pool.
Their events go to the run's kernel, which passes them on to where the run's journal is.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from taas_magic.engines import fitness
from taas_magic.engines.member import Member
from taas_magic.engines.members import Members
from taas_magic.engines.run_desk import QUESTIONS, RunDesk
from taas_magic.engines.store_door import StoreDoor
from taas_magic.errors import PoolError, ProtocolError
from taas_magic.journal import Event, event
from taas_magic.remote.spec import HostSpec
from taas_magic.remote.topics import CALL_END_FETCH, CALL_FETCH, share_id

END_S = 10.0
"""How long hosts may take to end their fetchers."""


class KeptFetch:
    """The fetchers of a run that have not ended.

    Args:
        spec: A `HostSpec` as plain values, of the first host.
        owner: The Dask client of the run's kernel.
        members: The pool's hosts.
        publish: Takes the fetchers' events, in their order.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        owner: str,
        members: Members,
        publish: Callable[[Event], None],
    ) -> None:
        self._spec, self.owner = spec, owner
        self._members, self.publish = members, publish
        first = HostSpec.from_json(spec)
        plan, self._desk = first.plan, RunDesk(first.folder)
        assert plan.data is not None
        self._data = plan.data
        self.run_id = share_id(plan.run_id)
        self._door = StoreDoor(plan.store, writes=False)
        self._hosts: dict[str, tuple[int, Member]] = {}
        self._changed = asyncio.Event()
        self._taking: asyncio.Future[list[Member]] | None = None

    async def start(self) -> list[str]:
        """Takes hosts and starts the fetchers; returns the hosts' names.

        Raises:
            PoolError: There are not so many, one could not start them, or nobody wants them any
                more.
        """
        members = await self._take()
        chosen = members[: self._data.hosts]
        self._hosts = {member.address: (place, member) for place, member in enumerate(chosen)}
        for member in chosen:
            member.runs.add(self.run_id)
        if (requires := self._spec.get("requires")) is not None:
            await fitness.require(self._members, chosen, requires)
        specs = [{**self._spec, "host_rank": place} for place in range(len(chosen))]
        calls = [
            self._members.call(member.address, CALL_FETCH, spec=spec)
            for member, spec in zip(chosen, specs, strict=True)
        ]
        failed = [said for said in await asyncio.gather(*calls, return_exceptions=True) if said]
        for error in failed:
            if isinstance(error, BaseException):
                raise error
        return [member.name for member in chosen]

    async def _take(self) -> list[Member]:
        self._taking = asyncio.ensure_future(self._members.take(self._data.pool_hosts))
        try:
            return await self._taking
        except asyncio.CancelledError:
            if not self._taking.cancelled():
                raise
            raise PoolError("nobody waits for its hosts any more") from None

    async def carry_out(self) -> None:
        """Returns when no host has fetchers of the run any more."""
        while self._hosts:
            await self._changed.wait()
            self._changed.clear()
        await self._door.close()

    def take(self, address: str, event: Event) -> bool:
        """Takes an event from a host; False when the fetchers have nothing to do with it."""
        if address not in self._hosts:
            return False
        event["time"] = time.time()  # clocks of hosts may be days apart
        if event["kind"] == "fetch_ended":
            self._leave(address)
        else:
            self.publish(event)
        return True

    async def ask_store(self, address: str, what: str, arguments: Mapping[str, Any]) -> Any:
        """What a host asks of the run's folder, or of the project store, if it does not share them.

        Raises:
            ProtocolError: It has no fetchers of the run (any more).
        """
        if address not in self._hosts:
            raise ProtocolError(f"the host at {address} runs no fetchers of {self.run_id}")
        place, _ = self._hosts[address]
        if what in QUESTIONS:
            # the result is the ranks' to bring: no host of fetchers is the run's first one
            return await asyncio.to_thread(self._desk.answer, 1 + place, what, arguments)
        return await self._door.answer(place, what, arguments)

    def lose(self, member: Member, why: str) -> None:
        """A host is gone; of no concern where no fetcher of the run is on it."""
        if member.address not in self._hosts:
            return
        place, _ = self._hosts[member.address]
        numbers = [fetcher.number for fetcher in self._data.on(place)]
        named = f"fetcher{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
        others = (
            "their batches come from the others" if len(self._hosts) > 1 else "no other is left"
        )
        text = f"host {member.name} with {named} is gone ({why}); {others}"
        self.publish(event("note", member.name, text=text))
        for number in numbers:
            self.publish(event("fetcher_ended", member.name, number=number))
        self._leave(member.address)

    async def halt(self, how: str) -> None:
        """Ends the fetchers on all hosts; returns when they are gone, or a host does not say so."""
        if self._taking is not None:
            self._taking.cancel()
        calls = [
            self._members.call(address, CALL_END_FETCH, run_id=self.run_id)
            for address in list(self._hosts)
        ]
        try:
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), END_S)
        except asyncio.TimeoutError:
            left = ", ".join(member.name for _, member in self._hosts.values())
            raise PoolError(f"fetchers on {left} did not end within {END_S:.0f} s") from None

    def _leave(self, address: str) -> None:
        _, member = self._hosts.pop(address)
        member.runs.discard(self.run_id)
        self._changed.set()
