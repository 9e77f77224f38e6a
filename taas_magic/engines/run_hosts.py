"""The hosts of a run's attempt: told what to do, and what each of them has reported.

Lives in the pool's process. `kept_run` says when an attempt begins and what follows from it.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from taas_magic.engines.member import Member
from taas_magic.engines.members import Members
from taas_magic.engines.verdict import Report, Standing
from taas_magic.errors import PoolError
from taas_magic.remote.interface import LOOPBACK
from taas_magic.remote.report import host_failure
from taas_magic.remote.spec import of_host
from taas_magic.remote.topics import CALL_AGAIN, CALL_END, CALL_START


@dataclass
class Share:
    """One host's part in an attempt."""

    member: Member
    host_rank: int
    report: Report | None = None
    ended: bool = False
    """Nothing of the run is on the host (any more)."""


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

    def report(self, share: Share, state: str, cause: str, failures: list[Any]) -> None:
        """Takes down how a host's ranks ended; what it says first counts."""
        if share.report is None:
            share.report = Report(state, cause, time.monotonic(), tuple(failures))
            self._on_change()

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

    async def start(self, members: list[Member], spec: dict[str, Any]) -> None:
        """Starts an attempt: the first host makes the meeting place, the others are told of it.

        Args:
            members: Its hosts, by their ranks.
            spec: A `HostSpec` as plain values, of the first of them.
        """
        running = set(self.running())
        shares = [Share(member, number) for number, member in enumerate(members)]
        self._shares = {share.member.address: share for share in shares}
        spec = {**spec, "master_addr": members[0].place if len(members) > 1 else LOOPBACK}
        first, *others = shares
        port = await self._start_one(first, spec, running)
        if port:
            spec = {**spec, "master_port": port}
            await asyncio.gather(*(self._start_one(share, spec, running) for share in others))
        else:
            for share in others:
                share.ended = share.member.address not in running

    async def _start_one(self, share: Share, spec: dict[str, Any], running: set[str]) -> int:
        """Starts an attempt on a host; returns the port of its meeting place, 0 if it failed."""
        spec = of_host(spec, share.host_rank)
        address = share.member.address
        share.member.runs.add(self._run_id)
        try:
            if address in running:
                said = await self._members.call(address, CALL_AGAIN, run_id=self._run_id, spec=spec)
            else:
                said = await self._members.call(address, CALL_START, spec=spec)
        except PoolError as error:
            failure = host_failure(share.member.name, error)
            self.report(share, "FAILED", "host", [failure])
            self.leave(share)
            return 0
        port: int = said["port"]
        return port

    async def tell_all(self, name: str, **arguments: Any) -> None:
        """Calls all hosts that the run is on; of those that fail the keeper hears otherwise."""
        calls = (
            self._members.call(address, name, run_id=self._run_id, **arguments)
            for address in self.running()
        )
        await asyncio.gather(*calls, return_exceptions=True)

    async def end(self) -> list[dict[str, Any]]:
        """Has all hosts end their ranks and clean up; returns the failures of those lost then."""
        there = [share for share in self._shares.values() if not share.ended]
        for share in there:
            share.report = None
        await self.tell_all(CALL_END)
        while not all(share.ended for share in there):
            self._left.clear()
            await self._left.wait()
        reports = [share.report for share in there if share.report is not None]
        return [f for report in reports if report.state == "LOST" for f in report.failures]
