"""The fetchers of a run in the pool's process: starts them on their hosts, and ends them.

They are a share of the run of their own: they begin before its ranks do, perhaps in another pool.
Their events go to the run's kernel, which passes them on to where the run's journal is.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

from msgspec import structs

from taas_magic.errors import PoolError, ProtocolError
from taas_magic.host.spec import HostSpec
from taas_magic.host.topics import CALL_END_FETCH, CALL_FETCH, share_id
from taas_magic.host.watch import HALT_S
from taas_magic.messages import (
    Event,
    FetcherEnded,
    FetcherReport,
    FetchersEnded,
    FetcherStarted,
    Note,
    RunStacks,
    pack,
)
from taas_magic.pool.files import QUESTIONS, RunDesk, StoreDoor
from taas_magic.pool.hosts import Member, Members, require_fit, stacks_of

OF_FETCHER = (FetcherStarted, FetcherReport, FetcherEnded)
"""Events of one fetcher that hosts send, besides notes and `FetchersEnded`."""

END_S = 10.0
"""How long hosts may take to end their fetchers."""


class PoolFetchers:
    """The fetchers of a run that have not ended.

    Args:
        spec: What the first host is told.
        owner: The Dask client of the run's kernel.
        members: The pool's hosts.
        publish: Takes the fetchers' events, in their order.
    """

    def __init__(
        self,
        spec: HostSpec,
        owner: str,
        members: Members,
        publish: Callable[[Event], None],
    ) -> None:
        self._spec, self.owner = spec, owner
        self._members, self.publish = members, publish
        plan, self._desk = spec.plan, RunDesk(spec.folder)
        assert plan.data is not None
        self._data = plan.data
        self.run_id = share_id(plan.run_id)
        self._door = StoreDoor(plan.store, writes=False)
        self._hosts: dict[str, tuple[int, Member]] = {}
        self._changed = asyncio.Event()
        self._taking: asyncio.Future[list[Member]] | None = None
        self._dropping: asyncio.Future[None] | None = None

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
        if self._spec.requires is not None:
            await require_fit(self._members, chosen, self._spec.requires)
        specs = [pack(structs.replace(self._spec, host_rank=at)) for at in range(len(chosen))]
        calls = [
            self._members.call(member.address, CALL_FETCH, NoneType, spec=spec)
            for member, spec in zip(chosen, specs, strict=True)
        ]
        said = await asyncio.gather(*calls, return_exceptions=True)
        failed = {
            m.address: e for m, e in zip(chosen, said, strict=True) if isinstance(e, Exception)
        }
        for address in failed:
            self._leave(address)
        for error in failed.values():
            raise error
        return [member.name for member in chosen]

    async def _take(self) -> list[Member]:
        taking = self._members.take(
            self._data.pool_hosts, say=lambda line: self.publish(Note(text=line))
        )
        self._taking = asyncio.ensure_future(taking)
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
        place, member = self._hosts[address]
        if isinstance(event, OF_FETCHER):
            is_own = event.number in self._numbers(place)
        else:
            is_own = isinstance(event, Note | FetchersEnded)
        if not is_own:
            return False
        event.time = time.time()  # clocks of hosts may be days apart
        event.host = member.name
        if isinstance(event, FetchersEnded):
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
            return await asyncio.to_thread(
                self._desk.answer, place, what, arguments, fetchers=self._numbers(place)
            )
        return await self._door.answer(place, what, arguments)

    def lose(self, member: Member, why: str) -> None:
        """A host is gone; of no concern where no fetcher of the run is on it."""
        if member.address not in self._hosts:
            return
        place, _ = self._hosts[member.address]
        numbers = self._numbers(place)
        named = f"fetcher{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
        others = (
            "their batches come from the others" if len(self._hosts) > 1 else "no other is left"
        )
        text = f"host {member.name} with {named} is gone ({why}); {others}"
        self.publish(Note(host=member.name, text=text))
        for number in numbers:
            self.publish(FetcherEnded(host=member.name, number=number))
        self._leave(member.address)

    async def halt(self, how: str) -> None:
        """Ends the fetchers on all hosts; returns when they are gone, or a host does not say so."""
        if self._taking is not None:
            self._taking.cancel()
        calls = [
            self._members.call(address, CALL_END_FETCH, NoneType, run_id=self.run_id)
            for address in list(self._hosts)
        ]
        try:
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), END_S)
        except asyncio.TimeoutError:
            left = ", ".join(member.name for _, member in self._hosts.values())
            self._dropping = asyncio.ensure_future(self._drop_late())
            raise PoolError(f"fetchers on {left} did not end within {END_S:.0f} s") from None

    async def stacks(self) -> RunStacks:
        """Where the fetchers of all hosts stand."""
        there = [member for _, member in self._hosts.values()]
        return await stacks_of(self._members, there, self.run_id)

    def _numbers(self, place: int) -> list[int]:
        """The fetchers of a host."""
        return [fetcher.number for fetcher in self._data.on(place)]

    async def _drop_late(self) -> None:
        """Ends hosts that have not ended their fetchers in HALT_S more."""
        await asyncio.sleep(HALT_S)
        for address in list(self._hosts):
            why = f"it did not end the fetchers of {self.run_id} in {END_S + HALT_S:.0f} s"
            await self._members.drop(address, why)

    def _leave(self, address: str) -> None:
        _, member = self._hosts.pop(address)
        member.runs.discard(self.run_id)
        self._changed.set()
