"""A run in the pool's process: starts it on its hosts, starts it again, and ends it.

Hosts report how their ranks ended, `verdict` says what the reports add up to, and all hosts are
told together what follows. Nobody but the members of a run's attempt is listened to.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from taas_magic.engines import fitness
from taas_magic.engines.growth import Growth
from taas_magic.engines.member import Member
from taas_magic.engines.members import Members
from taas_magic.engines.run_desk import QUESTIONS, RunDesk
from taas_magic.engines.run_hosts import RunHosts
from taas_magic.engines.store_door import StoreDoor
from taas_magic.engines.verdict import Outcome, decide, worst
from taas_magic.errors import PoolError, ProtocolError
from taas_magic.journal import Event, event
from taas_magic.plan import Plan
from taas_magic.remote.report import host_failure
from taas_magic.remote.spec import HostSpec
from taas_magic.remote.topics import CALL_PLACE, CALL_STOP
from taas_magic.remote.watch import first_failure

TICK_S = 0.1
"""How often hosts that settled are judged again, while others have not."""


class KeptRun:
    """A run that has not ended.

    Args:
        spec: A `HostSpec` as plain values, of the first host.
        owner: The Dask client of its kernel.
        members: The pool's hosts.
        publish: Takes the run's events, in their order.
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
        self.plan, self._desk = first.plan, RunDesk(first.folder)
        self.run_id = self.plan.run_id
        self._door = StoreDoor(self.plan.store)
        self._attempt = self._restarts = 0
        self._fetchers: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self._hosts = RunHosts(self.run_id, members, self._changed.set)
        self._halted = asyncio.Event()
        self._growth = Growth(members, self._changed.set)
        self._started = time.monotonic()

    async def start(self) -> list[str]:
        """Takes hosts and starts the ranks; returns the hosts' names.

        Raises:
            PoolError: There are not so many, or they are not fit.
        """
        members = await self._members.take(len(self.plan.hosts))
        await self._check(members)
        self.publish(event("state", state="RUNNING"))
        await self._start_on(members)
        return [member.name for member in members]

    async def carry_out(self) -> None:
        """Returns when the run has ended on all hosts; then its last event is published."""
        outcome = await self._outcome()
        while self._may_restart(outcome) and await self._start_again(outcome):
            outcome = await self._outcome()
        self._growth.close()
        lost = await self._hosts.end()
        await self._door.close()
        failures = [*outcome.failures, *lost]
        ended = {"state": worst([outcome.state, "LOST"] if lost else [outcome.state])}
        elapsed_s = time.monotonic() - self._started
        first = first_failure(failures)
        self.publish(event("ended", **ended, failures=failures, first=first, elapsed_s=elapsed_s))

    def take(self, address: str, event: Event) -> bool:
        """Takes an event from a host; False when the run has nothing to do with it."""
        share = self._hosts.share(address)
        if share is None:
            return False
        event["time"] = time.time()  # clocks of hosts may be days apart
        self.publish(event)
        if event["kind"] == "settled" and event["attempt"] == self._attempt:
            self._hosts.report(share, event["state"], event["cause"], event["failures"])
        elif event["kind"] == "host_ended":
            self._hosts.report(share, event["state"], "host", event["failures"])
            self._hosts.leave(share)
        return True

    async def ask_store(self, address: str, what: str, arguments: Mapping[str, Any]) -> Any:
        """What a host asks of the run's folder, or of the project store, if it does not share them.

        Raises:
            ProtocolError: The run is not on that host (any more).
        """
        share = self._hosts.share(address)
        if share is None:
            raise ProtocolError(f"run {self.run_id} is not on the host at {address} (any more)")
        if what in QUESTIONS:
            return await asyncio.to_thread(self._desk.answer, share.host_rank, what, arguments)
        return await self._door.answer(share.host_rank, what, arguments)

    def lose(self, member: Member, why: str) -> None:
        """A host is gone; of no concern where the run is not on it."""
        share = self._hosts.share(member.address)
        if share is None:
            return
        failure = {**host_failure(member.name, PoolError(why)), "traceback": []}
        self.publish(event("failure", member.name, failure=failure))
        share.report = None
        self._hosts.report(share, "LOST", "lost", [failure])
        self._hosts.leave(share)

    async def halt(self, how: str) -> None:
        """Interrupts or kills the run on all its hosts; it is not started again."""
        self._halted.set()
        await self._hosts.tell_all(CALL_STOP, how=how)

    async def relay(self, events: list[Event]) -> None:
        """Takes what the run's fetchers said; its hosts are told where they listen."""
        for said in events:
            entry = said.pop("entry", None)
            self.publish(said)
            if entry:
                self._fetchers[str(said["number"])] = entry
                await self._hosts.tell_all(CALL_PLACE, number=said["number"], entry=entry)

    async def _outcome(self) -> Outcome:
        while (outcome := decide(self._hosts.standings(), time.monotonic())) is None:
            settling = self._hosts.any_settled()
            found = None if settling or self._halted.is_set() else self._growth.found()
            if found is not None:
                await self._grow(*found)
            await self._change(TICK_S if settling else None)
        return outcome

    async def _grow(self, plan: Plan, members: list[Member]) -> None:
        """Starts all ranks again, with those of hosts that have come since."""
        cause = f"it grows from {self.plan.world_size} to {plan.world_size} ranks"
        self._attempt += 1
        self.plan, self._spec = plan, {**self._spec, "plan": plan.to_json()}
        grown: dict[str, Any] = {"attempt": self._attempt, "failure": None, "cause": cause}
        self.publish(event("restart", **grown, world_size=plan.world_size))
        await self._start_on(self._hosts.seated(members))

    async def _change(self, timeout_s: float | None = None) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        self._changed.clear()

    def _may_restart(self, outcome: Outcome) -> bool:
        left = self.plan.max_restarts - self._restarts
        return outcome.curable and left > 0 and not self._halted.is_set()

    async def _start_again(self, outcome: Outcome) -> bool:
        """Starts all ranks again, on other hosts for those that are gone; False: it cannot."""
        first = first_failure(outcome.failures)
        self.publish(event("restart", attempt=self._attempt + 1, failure=first))
        try:
            members = await self._take_again()
            await self._check(members or [])
        except PoolError as error:
            self.publish(event("note", text=f"not started again: {error}"))
            return False
        if members is None:
            return False
        self._attempt += 1
        self._restarts += 1
        await self._start_on(self._hosts.seated(members))
        return True

    async def _take_again(self) -> list[Member] | None:
        """The hosts of the next attempt; None when the run was halted while it waited for them."""
        keep = self._hosts.running()
        taking = asyncio.ensure_future(self._members.take(len(self.plan.hosts), keep))
        halted = asyncio.ensure_future(self._halted.wait())
        await asyncio.wait({taking, halted}, return_when=asyncio.FIRST_COMPLETED)
        halted.cancel()
        if self._halted.is_set():
            taking.cancel()
            return None
        return taking.result()

    async def _check(self, members: list[Member]) -> None:
        """Returns when hosts, unless they are this machine, have been found fit for the run."""
        requires = self._spec.get("requires")
        if requires is not None:
            await fitness.require(self._members, members, requires)

    async def _start_on(self, members: list[Member]) -> None:
        spec = {**self._spec, "attempt": self._attempt, "fetchers": self._fetchers}
        await self._hosts.start(members, spec)
        self._growth.seek(self.plan, self._hosts.addresses())
