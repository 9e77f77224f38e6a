"""A run in the pool's process: starts it on its hosts, starts it again, and ends it.

Hosts report how their ranks ended, `verdict` says what the reports add up to, and all hosts are
told together what follows. Nobody but the members of a run's attempt is listened to.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from taas_magic.engines import fitness
from taas_magic.engines.growth import Growth
from taas_magic.engines.members import Member, Members
from taas_magic.engines.run_desk import QUESTIONS, RunDesk
from taas_magic.engines.store_door import StoreDoor
from taas_magic.engines.verdict import Outcome, Report, Standing, decide, worst
from taas_magic.errors import PoolError, ProtocolError
from taas_magic.journal import Event, event
from taas_magic.plan import Plan
from taas_magic.remote.interface import LOOPBACK
from taas_magic.remote.report import host_failure
from taas_magic.remote.spec import HostSpec, of_host
from taas_magic.remote.topics import CALL_AGAIN, CALL_END, CALL_PLACE, CALL_START, CALL_STOP
from taas_magic.remote.watch import first_failure

TICK_S = 0.1
"""How often hosts that settled are judged again, while others have not."""


@dataclass
class _Share:
    """One host's part in an attempt."""

    member: Member
    host_rank: int
    report: Report | None = None
    ended: bool = False
    """Nothing of the run is on the host (any more)."""


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
        self._shares: dict[str, _Share] = {}
        self._changed = asyncio.Event()
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
        lost = await self._end_hosts()
        await self._door.close()
        failures = [*outcome.failures, *lost]
        ended = {"state": worst([outcome.state, "LOST"] if lost else [outcome.state])}
        elapsed_s = time.monotonic() - self._started
        first = first_failure(failures)
        self.publish(event("ended", **ended, failures=failures, first=first, elapsed_s=elapsed_s))

    def take(self, address: str, event: Event) -> bool:
        """Takes an event from a host; False when the run has nothing to do with it."""
        share = self._shares.get(address)
        if share is None or share.ended:
            return False
        event["time"] = time.time()  # clocks of hosts may be days apart
        self.publish(event)
        if event["kind"] == "settled" and event["attempt"] == self._attempt:
            self._report(share, event["state"], event["cause"], event["failures"])
        elif event["kind"] == "host_ended":
            self._report(share, event["state"], "host", event["failures"])
            self._leave(share)
        return True

    async def ask_store(self, address: str, what: str, arguments: Mapping[str, Any]) -> Any:
        """What a host asks of the run's folder, or of the project store, if it does not share them.

        Raises:
            ProtocolError: The run is not on that host (any more).
        """
        share = self._shares.get(address)
        if share is None or share.ended:
            raise ProtocolError(f"run {self.run_id} is not on the host at {address} (any more)")
        if what in QUESTIONS:
            return await asyncio.to_thread(self._desk.answer, share.host_rank, what, arguments)
        return await self._door.answer(share.host_rank, what, arguments)

    def lose(self, member: Member, why: str) -> None:
        """A host is gone; of no concern where the run is not on it."""
        share = self._shares.get(member.address)
        if share is None or share.ended:
            return
        failure = {**host_failure(member.name, PoolError(why)), "traceback": []}
        self.publish(event("failure", member.name, failure=failure))
        share.report = None
        self._report(share, "LOST", "lost", [failure])
        self._leave(share)

    async def halt(self, how: str) -> None:
        """Interrupts or kills the run on all its hosts; it is not started again."""
        self._halted.set()
        await self._tell_all(CALL_STOP, how=how)

    async def relay(self, events: list[Event]) -> None:
        """Takes what the run's fetchers said; its hosts are told where they listen."""
        for said in events:
            entry = said.pop("entry", None)
            self.publish(said)
            if entry:
                self._fetchers[str(said["number"])] = entry
                await self._tell_all(CALL_PLACE, number=said["number"], entry=entry)

    def _report(self, share: _Share, state: str, cause: str, failures: list[Any]) -> None:
        """Takes down how a host's ranks ended; what it says first counts."""
        if share.report is None:
            share.report = Report(state, cause, time.monotonic(), tuple(failures))
            self._changed.set()

    def _leave(self, share: _Share) -> None:
        share.ended = True
        share.member.runs.discard(self.run_id)
        self._changed.set()

    async def _outcome(self) -> Outcome:
        while (outcome := decide(self._standings(), time.monotonic())) is None:
            settling = any(share.report for share in self._shares.values())
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
        await self._start_on(self._seated(members))

    def _seated(self, members: list[Member]) -> list[Member]:
        """Hosts in the order of an attempt: each that was in the last one keeps its place."""
        old = {share.host_rank: share.member for share in self._shares.values()}
        stay = {rank: member for rank, member in old.items() if member in members}
        new = (member for member in members if member not in stay.values())
        return [stay[rank] if rank in stay else next(new) for rank in range(len(members))]

    def _standings(self) -> list[Standing]:
        return [Standing(share.report, share.member.heard_at) for share in self._shares.values()]

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
        await self._start_on(self._seated(members))
        return True

    async def _take_again(self) -> list[Member] | None:
        """The hosts of the next attempt; None when the run was halted while it waited for them."""
        keep = [address for address, share in self._shares.items() if not share.ended]
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
        """Starts an attempt: the first host makes the meeting place, the others are told of it."""
        running = {address for address, share in self._shares.items() if not share.ended}
        shares = [_Share(member, number) for number, member in enumerate(members)]
        self._shares = {share.member.address: share for share in shares}
        several = len(shares) > 1
        spec = {
            **self._spec,
            "attempt": self._attempt,
            "fetchers": self._fetchers,
            "master_addr": members[0].place if several else LOOPBACK,
        }
        first, *others = shares
        port = await self._start_one(first, spec, running)
        if port:
            spec = {**spec, "master_port": port}
            await asyncio.gather(*(self._start_one(share, spec, running) for share in others))
        else:
            for share in others:
                share.ended = share.member.address not in running
        self._growth.seek(self.plan, list(self._shares))

    async def _start_one(self, share: _Share, spec: dict[str, Any], running: set[str]) -> int:
        """Starts an attempt on a host; returns the port of its meeting place, 0 if it failed."""
        spec = of_host(spec, share.host_rank)
        address = share.member.address
        share.member.runs.add(self.run_id)
        try:
            if address in running:
                said = await self._call(address, CALL_AGAIN, run_id=self.run_id, spec=spec)
            else:
                said = await self._call(address, CALL_START, spec=spec)
        except PoolError as error:
            failure = host_failure(share.member.name, error)
            self._report(share, "FAILED", "host", [failure])
            self._leave(share)
            return 0
        port: int = said["port"]
        return port

    async def _call(self, address: str, name: str, **arguments: Any) -> Any:
        return await self._members.call(address, name, **arguments)

    async def _tell_all(self, name: str, **arguments: Any) -> None:
        there = [address for address, share in self._shares.items() if not share.ended]
        calls = (self._call(address, name, run_id=self.run_id, **arguments) for address in there)
        await asyncio.gather(*calls, return_exceptions=True)

    async def _end_hosts(self) -> list[dict[str, Any]]:
        """Has all hosts end their ranks and clean up; returns the failures of those lost then."""
        there = [share for share in self._shares.values() if not share.ended]
        for share in there:
            share.report = None
        await self._tell_all(CALL_END)
        while not all(share.ended for share in there):
            await self._change()
        reports = [share.report for share in there if share.report is not None]
        return [f for report in reports if report.state == "LOST" for f in report.failures]
