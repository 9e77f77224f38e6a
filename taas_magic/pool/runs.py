"""A run in the pool's process: starts it on its hosts, starts it again, and ends it.

Hosts report how their ranks ended, `verdict` says what the reports add up to, and all hosts are
told together what follows. Nobody but the hosts of a run's attempt is listened to.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from msgspec import UNSET, structs

from taas_magic.errors import PoolError, ProtocolError
from taas_magic.host.spec import HostSpec, of_host
from taas_magic.host.system import LOOPBACK
from taas_magic.host.topics import (
    CALL_AGAIN,
    CALL_END,
    CALL_PLACE,
    CALL_START,
    CALL_STOP,
)
from taas_magic.host.watch import HALT_S, first_failure, host_failure
from taas_magic.messages import (
    Event,
    Failure,
    FetcherEnded,
    FetcherPlace,
    FetcherStarted,
    Hang,
    HostEnded,
    LoaderPlaces,
    Note,
    RankEvent,
    RankFailure,
    Restart,
    RunEnded,
    RunStacks,
    Settled,
    StateChanged,
    StorePort,
    pack,
)
from taas_magic.plan import Plan, next_size
from taas_magic.pool.files import QUESTIONS, RunDesk, StoreDoor
from taas_magic.pool.hosts import Member, Members, require_fit, stacks_of
from taas_magic.pool.verdict import Outcome, Report, Standing, decide, worst

END_S = 600.0
"""How long a host may be busy, without a word, with the files of a run that is over."""

_LOOK_S = 1.0


@dataclass
class Share:
    """One host's part in an attempt."""

    member: Member
    host_rank: int
    report: Report | None = None
    ended: bool = False
    """Nothing of the run is on the host (any more)."""
    heard_at: float = field(default_factory=time.monotonic)
    """When the host last said something of the run, or asked."""


class RunHosts:
    """The hosts that a run is on.

    Args:
        run_id: The run's.
        members: The pool's hosts.
        on_change: Called when a host has reported, or is left.
    """

    def __init__(self, run_id: str, members: Members, on_change: Callable[[], None]) -> None:
        self._run_id, self._members, self._on_change = run_id, members, on_change
        self._shares: dict[str, Share] = {}
        self._left = asyncio.Event()
        self._late: set[asyncio.Future[None]] = set()
        self._ways = contextlib.AsyncExitStack()

    def addresses(self) -> list[str]:
        """The hosts of the attempt, by their ranks."""
        return list(self._shares)

    def running(self) -> list[str]:
        """The addresses of those that the run is (still) on."""
        return [address for address, share in self._shares.items() if not share.ended]

    def share(self, address: str) -> Share | None:
        """A host's part; None when the run is not on it (any more)."""
        share = self._shares.get(address)
        return None if share is None or share.ended else share

    def standings(self) -> list[Standing]:
        """What `verdict` judges."""
        return [Standing(share.report, share.member.heard_at) for share in self._shares.values()]

    def any_settled(self) -> bool:
        """Whether a host has reported how its ranks ended."""
        return any(share.report for share in self._shares.values())

    def report(self, share: Share, state: str, cause: str, failures: list[Failure]) -> None:
        """Takes down how a host's ranks ended; what it says first counts."""
        if share.report is None:
            share.report = Report(state, cause, time.monotonic(), tuple(failures))
            self._on_change()

    def drop(self, share: Share, why: str) -> None:
        """Have a host taken for lost that can run nothing any more."""
        task = asyncio.ensure_future(self._members.drop(share.member.address, why))
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    def leave(self, share: Share) -> None:
        """The run is not on that host any more."""
        share.ended = True
        share.member.runs.discard(self._run_id)
        self._left.set()
        self._on_change()

    def seated(self, members: list[Member]) -> list[Member]:
        """Hosts in the order of an attempt: each that was in the last one keeps its place."""
        old = {share.host_rank: share.member for share in self._shares.values()}
        stay = {rank: member for rank, member in old.items() if member in members}
        new = (member for member in members if member not in stay.values())
        return [stay[rank] if rank in stay else next(new) for rank in range(len(members))]

    async def start(self, members: list[Member], spec: HostSpec) -> None:
        """Starts an attempt: the first host makes the meeting place, the others are told of it.

        Args:
            members: Its hosts, by their ranks.
            spec: What the first of them is told.
        """
        running = set(self.running())
        shares = [Share(member, number) for number, member in enumerate(members)]
        self._shares = {share.member.address: share for share in shares}
        address = members[0].place if len(members) > 1 else LOOPBACK
        spec = structs.replace(spec, master_addr=address)
        first, *others = shares
        port = await self._start_one(first, spec, running)
        if port:
            spec = structs.replace(spec, master_port=port)
            await asyncio.gather(*(self._start_one(share, spec, running) for share in others))
        else:
            for share in others:
                share.ended = share.member.address not in running

    async def _start_one(self, share: Share, spec: HostSpec, running: set[str]) -> int:
        """Starts an attempt on a host; returns the port of its meeting place, 0 if it failed."""
        address = share.member.address
        share.member.runs.add(self._run_id)
        try:
            if spec.reach:
                way = self._members.way(share.member, spec.reach)
                reach = await self._ways.enter_async_context(way)
                spec = structs.replace(spec, reach=reach)
            packed = pack(of_host(spec, share.host_rank))
            if address in running:
                said = await self._members.call(
                    address, CALL_AGAIN, StorePort, run_id=self._run_id, spec=packed
                )
            else:
                said = await self._members.call(address, CALL_START, StorePort, spec=packed)
        except PoolError as error:
            failure = host_failure(share.member.name, error)
            self.report(share, "FAILED", "host", [failure])
            self.leave(share)
            return 0
        return said.port

    async def tell_all(self, name: str, **arguments: str | bytes) -> None:
        """Calls all hosts that the run is on; of those that fail the controller hears otherwise."""
        calls = (
            self._members.call(address, name, NoneType, run_id=self._run_id, **arguments)
            for address in self.running()
        )
        await asyncio.gather(*calls, return_exceptions=True)

    def end_late(self, limit_s: float = HALT_S) -> None:
        """From now on hosts have so long to end the run; one that does not is ended itself.

        A host that sends files home asks and says things meanwhile: it has as long from each.
        """
        task = asyncio.ensure_future(self._end_late(list(self._shares.values()), limit_s))
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _end_late(self, shares: list[Share], limit_s: float) -> None:
        began = time.monotonic()
        while left := [share for share in shares if not share.ended]:
            late = [s for s in left if time.monotonic() - max(s.heard_at, began) >= limit_s]
            for share in late:
                why = f"it did not end run {self._run_id} within {limit_s:.0f} s; it is replaced"
                await self._members.drop(share.member.address, why)
            await asyncio.sleep(_LOOK_S)

    async def stacks(self) -> RunStacks:
        """Where the ranks of all hosts stand."""
        there = [share.member for share in self._shares.values() if not share.ended]
        return await stacks_of(self._members, there, self._run_id)

    async def end(self) -> list[Failure]:
        """Has all hosts end their ranks and clean up; returns the failures of those lost then."""
        there = [share for share in self._shares.values() if not share.ended]
        for share in there:
            share.report = None
        self.end_late(END_S)
        await self.tell_all(CALL_END)
        while not all(share.ended for share in there):
            self._left.clear()
            await self._left.wait()
        await self._ways.aclose()
        reports = [share.report for share in there if share.report is not None]
        return [f for report in reports if report.state == "LOST" for f in report.failures]


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


POOLS_OWN = (StateChanged, Restart, RunEnded)
"""Events that no host sends: the pool decides what they say."""

TICK_S = 0.1
"""How often hosts that settled are judged again, while others have not."""


class PoolRun:
    """A run that has not ended.

    Args:
        spec: What its first host is told.
        owner: The Dask client of its kernel.
        members: The pool's hosts.
        publish: Takes the run's events, in their order.
        over: Set when nothing of it is left, on hosts or here.
    """

    def __init__(
        self,
        spec: HostSpec,
        owner: str,
        members: Members,
        publish: Callable[[Event], None],
        over: asyncio.Event,
    ) -> None:
        self._spec, self.owner = spec, owner
        self._members, self.publish = members, publish
        self.plan, self._desk = spec.plan, RunDesk(spec.folder)
        self.run_id = self.plan.run_id
        self._door = StoreDoor(self.plan.store, is_owner=not spec.reads_only)
        self._attempt = self._restarts = 0
        self._fetchers: dict[int, LoaderPlaces] = {}
        self._changed = asyncio.Event()
        self._hosts = RunHosts(self.run_id, members, self._changed.set)
        self._halted, self._how_halted = asyncio.Event(), ""
        self.over = over
        self._growth = Growth(members, self._changed.set)
        self._started = time.monotonic()

    @property
    def is_halted(self) -> bool:
        """Whether it was interrupted or killed."""
        return self._halted.is_set()

    async def start(self) -> list[str]:
        """Takes hosts and starts the ranks; returns the hosts' names.

        Raises:
            PoolError: There are not so many, or they are not fit.
        """
        members = await self._unless_halted(self._take())
        if members is None:
            raise PoolError("nobody waits for its hosts any more")
        await self._check(members)
        self.publish(StateChanged(state="RUNNING"))
        await self._start_on(members)
        return [member.name for member in members]

    async def carry_out(self) -> RunEnded:
        """Returns the run's last event, when it has ended on all hosts."""
        outcome = await self._outcome()
        while self._may_restart(outcome):
            if await self._start_again(outcome):
                outcome = await self._outcome()
            elif self._halted.is_set():  # what failed before was about to be done again
                outcome = Outcome("INTERRUPTED")
            else:
                break
        self._growth.close()
        lost = await self._hosts.end()
        await self._door.close()
        failures = [*outcome.failures, *lost]
        return RunEnded(
            state=worst([outcome.state, "LOST"] if lost else [outcome.state]),
            failures=failures,
            first=first_failure(failures),
            elapsed_s=time.monotonic() - self._started,
        )

    def take(self, address: str, event: Event) -> bool:
        """Takes an event from a host; False when the run has nothing to do with it."""
        share = self._hosts.share(address)
        if share is None or not self._may_say(share, event):
            return False
        share.heard_at = time.monotonic()
        event.time = time.time()  # clocks of hosts may be days apart
        event.host = share.member.name
        self.publish(event)
        if isinstance(event, Settled) and event.cause == "host":
            first = first_failure(event.failures)
            self._hosts.drop(share, first.message if first else "it can run nothing any more")
        elif isinstance(event, Settled) and event.attempt == self._attempt:
            self._report(share, event.state, event.cause, event.failures)
        elif isinstance(event, HostEnded):
            self._report(share, event.state, "host", event.failures)
            self._hosts.leave(share)
        return True

    def _may_say(self, share: Share, event: Event) -> bool:
        """Whether an event is a host's to send, and of its own ranks."""
        return not isinstance(event, POOLS_OWN) and _ranks_of(event) <= set(self._ranks(share))

    def _ranks(self, share: Share) -> range:
        mine = self.plan.hosts[share.host_rank]
        return range(mine.first_rank, mine.first_rank + mine.ranks)

    async def ask_store(self, address: str, what: str, arguments: Mapping[str, Any]) -> Any:
        """What a host asks of the run's folder, or of the project store, if it does not share them.

        Raises:
            ProtocolError: The run is not on that host (any more).
        """
        share = self._hosts.share(address)
        if share is None:
            raise ProtocolError(f"run {self.run_id} is not on the host at {address} (any more)")
        share.heard_at = time.monotonic()
        if what in QUESTIONS:
            ranks = self._ranks(share)
            return await asyncio.to_thread(
                self._desk.answer, share.host_rank, what, arguments, ranks=ranks
            )
        return await self._door.answer(share.host_rank, what, arguments)

    def lose(self, member: Member, why: str) -> None:
        """A host is gone; of no concern where the run is not on it."""
        share = self._hosts.share(member.address)
        if share is None:
            return
        failure = host_failure(member.name, PoolError(why))
        self.publish(RankFailure(host=member.name, failure=failure))
        share.report = None
        self._report(share, "LOST", "lost", [failure])
        self._hosts.leave(share)

    def _report(self, share: Share, state: str, cause: str, failures: list[Failure]) -> None:
        """Takes down how a host's ranks ended; of a federation's others, only that they have."""
        if self.plan.federated and share.host_rank and state in ("FAILED", "LOST"):
            why = "; ".join(failure.message for failure in failures)
            text = f"host {share.member.name} takes no part any more: {why}"
            self.publish(Note(host=share.member.name, text=text))
            state, failures = "SUCCEEDED", []
        self._hosts.report(share, state, cause, failures)

    async def halt(self, how: str) -> None:
        """Interrupts or kills the run on all its hosts; it is not started again."""
        self._how_halted = how
        self._halted.set()
        self._hosts.end_late()
        await self._hosts.tell_all(CALL_STOP, how=how)

    async def stacks(self) -> RunStacks:
        """Where its ranks stand."""
        return await self._hosts.stacks()

    async def relay(self, events: list[Event]) -> None:
        """Takes what the run's fetchers said; its hosts are told where they listen."""
        for said in events:
            if isinstance(said, FetcherStarted | FetcherEnded):
                self.publish(structs.replace(said, entry=UNSET))
                await self._place(said)
            else:
                self.publish(said)

    async def _place(self, said: FetcherStarted | FetcherEnded) -> None:
        if said.entry:
            self._fetchers[said.number] = said.entry
            place = FetcherPlace(number=said.number, entry=said.entry)
            await self._hosts.tell_all(CALL_PLACE, place=pack(place))

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
        self.plan, self._spec = plan, structs.replace(self._spec, plan=plan)
        size = plan.world_size
        self.publish(Restart(attempt=self._attempt, cause=cause, world_size=size))
        await self._start_on(self._hosts.seated(members))

    async def _change(self, timeout_s: float | None = None) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        self._changed.clear()

    def _may_restart(self, outcome: Outcome) -> bool:
        left = self.plan.max_restarts - self._restarts
        return outcome.curable and left > 0 and not self._halted.is_set()

    async def _start_again(self, outcome: Outcome) -> bool:
        """Start all ranks again, on other hosts for those that are gone; returns whether it did."""
        first = first_failure(outcome.failures)
        self.publish(Restart(attempt=self._attempt + 1, failure=first))
        try:
            members = await self._take_again()
            await self._check(members or [])
        except PoolError as error:
            self.publish(Note(text=f"not started again: {error}"))
            return False
        if members is None:
            return False
        self._attempt += 1
        self._restarts += 1
        await self._start_on(self._hosts.seated(members))
        return True

    async def _take_again(self) -> list[Member] | None:
        """The hosts of the next attempt; None when the run was halted while it waited for them."""
        return await self._unless_halted(self._take(self._hosts.running()))

    async def _take(self, keep: Collection[str] = ()) -> list[Member]:
        """The hosts of an attempt; the run says for which one it waits."""
        return await self._members.take(
            len(self.plan.hosts), keep, lambda line: self.publish(Note(text=line))
        )

    async def _unless_halted(self, take: Coroutine[Any, Any, list[Member]]) -> list[Member] | None:
        """The hosts that are being taken; None when the run was halted meanwhile."""
        taking = asyncio.ensure_future(take)
        halted = asyncio.ensure_future(self._halted.wait())
        await asyncio.wait({taking, halted}, return_when=asyncio.FIRST_COMPLETED)
        halted.cancel()
        if self._halted.is_set():
            taking.cancel()
            return None
        return taking.result()

    async def _check(self, members: list[Member]) -> None:
        """Returns when hosts, unless they are this machine, have been found fit for the run."""
        if self._spec.requires is not None:
            await require_fit(self._members, members, self._spec.requires)

    async def _start_on(self, members: list[Member]) -> None:
        spec = structs.replace(self._spec, attempt=self._attempt, fetchers=self._fetchers)
        await self._hosts.start(members, spec)
        if self._halted.is_set():  # hosts hear nothing of a run that is still being started there
            await self._hosts.tell_all(CALL_STOP, how=self._how_halted)
        self._growth.seek(self.plan, self._hosts.addresses())


def _ranks_of(event: Event) -> set[int]:
    """The ranks that an event speaks of."""
    match event:
        case RankEvent():
            return {event.rank}
        case Hang():
            return {row.rank for row in event.ranks}
        case RankFailure():
            failures = [event.failure]
        case Settled() | HostEnded():
            failures = event.failures
        case _:
            return set()
    return {failure.rank for failure in failures if failure.rank is not None}
