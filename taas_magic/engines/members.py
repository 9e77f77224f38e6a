"""The pool's hosts as its process knows them: who joined, who is heard, and how to call one.

Nobody connects to a host: calls, answers and beats go through the stream that its agent opened.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from distributed import Scheduler, SchedulerPlugin
from distributed.comm import CommClosedError

from taas_magic.engines.base import HostSource
from taas_magic.engines.member import Member
from taas_magic.errors import PoolError
from taas_magic.remote.topics import AGENT, ANSWER, BEAT, CALL, CALL_HELLO, HEARD, POOL_TOPIC

ASK_AGAIN_S = 0.5
"""How often the engine is asked for hosts that have not joined."""

LOST_AFTER_S = 1.0
"""How much longer than its lease a host may be silent: it has ended itself by then."""

_CHECKS_PER_LEASE = 32

logger = logging.getLogger(__name__)


class Members(SchedulerPlugin):
    """The hosts of a pool.

    Args:
        scheduler: The pool's.
        source: Where hosts come from.
        start_timeout_s: How long hosts may take to join.
        lease_s: How long a host lives without hearing this process.
        on_lost: Called with a host that is gone, in whatever way, and why.
    """

    name = "taas-members"

    def __init__(
        self,
        scheduler: Scheduler,
        source: HostSource,
        start_timeout_s: float,
        lease_s: float,
        on_lost: Callable[[Member, str], None] = lambda member, why: None,
    ) -> None:
        self._scheduler, self._source = scheduler, source
        self._start_timeout_s, self._lease_s = start_timeout_s, lease_s
        self._on_lost = on_lost
        self._members: dict[str, Member] = {}
        self._silent: dict[str, str] = {}
        self._changed = asyncio.Condition()
        self._background: set[asyncio.Task[None]] = set()
        self._takes = 0
        self._awaited: list[str] = []
        self.refused = 0
        """Messages of hosts that had nothing (any more) to say."""
        scheduler.stream_handlers[ANSWER] = self._on_answer
        scheduler.stream_handlers[BEAT] = self._on_beat
        scheduler.add_plugin(self)

    def all(self) -> list[Member]:
        """The hosts that have joined and can start ranks, in the order in which they came."""
        return [m for m in self._members.values() if m.name and not m.leaves]

    def get(self, address: str) -> Member | None:
        """The host of that address, if it is (still) one."""
        return self._members.get(address)

    async def take(self, count: int, keep: Collection[str] = ()) -> list[Member]:
        """Returns so many hosts when they are there: those to keep, then those that run least.

        Args:
            count: How many.
            keep: Addresses of hosts that must be among them.

        Raises:
            PoolError: They did not join in time, or one will not. None is kept that has no run.
        """
        self._takes += 1
        try:
            await asyncio.wait_for(self._have_joined(count), self._start_timeout_s)
        except asyncio.TimeoutError:
            raise PoolError(self._too_late(count)) from None
        finally:
            self._takes -= 1
            self._say([])
            if len(self.all()) < count:
                self._in_background(self.release())
        kept = [member for member in self.all() if member.address in keep]
        others = [member for member in self.all() if member.address not in keep]
        taken = (kept + sorted(others, key=lambda member: len(member.runs)))[:count]
        for member in taken:
            member.taken_at = time.monotonic()
        return taken

    async def release(
        self, stays: Callable[[Member], bool] = lambda member: bool(member.runs)
    ) -> None:
        """Gives back hosts, and those to come; unless others wait for them.

        Args:
            stays: Says which are kept; left out, those that have a run.
        """
        if not self._takes:
            for member in self._members.values():
                member.leaves = member.leaves or not stays(member)
            await self._source.release({m.agent for m in self._members.values() if not m.leaves})

    async def call(self, address: str, name: str, **arguments: Any) -> Any:
        """Calls a host's agent and returns what it answers.

        Raises:
            PoolError: It is gone, or the call failed there.
        """
        member = self._members.get(address)
        if member is None:
            raise PoolError(f"the host at {address} is gone")
        with member.asked() as (number, answer):
            self._send(address, op=CALL, id=number, name=name, arguments=arguments)
            return await answer

    async def watch(self) -> None:
        """Takes hosts that are not heard any more for lost; runs until it is cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / _CHECKS_PER_LEASE)
            limit_s = self._lease_s + LOST_AFTER_S
            now = time.monotonic()
            for member in list(self._members.values()):
                if now - member.heard_at > limit_s:
                    why = f"nothing was heard of it for {limit_s:g} s: it, or its network, failed"
                    self._silent[member.address] = why
                    await self._scheduler.remove_worker(member.address, stimulus_id="taas-lease")

    async def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Called by Dask when a host has joined; its stream opens when this has returned."""
        joined = scheduler.workers[worker]
        if AGENT in joined.extra:
            member = self._members[worker] = Member(worker, str(joined.name))
            self._in_background(self._greet(member))

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Called by Dask when a host is gone, in whatever way."""
        member = self._members.pop(worker, None)
        why = self._silent.pop(worker, "its agent ended, or its connection broke")
        if member is None:
            return
        member.is_gone(why)
        self._in_background(self._lose(member, why))

    async def _lose(self, member: Member, why: str) -> None:
        said = await self._source.why_lost(member.agent)
        self._on_lost(member, f"{why}; {said}" if said else why)

    async def _greet(self, member: Member) -> None:
        """Asks a new host who it is; only then is it one of the pool's."""
        try:
            said = await self.call(member.address, CALL_HELLO)
        except PoolError as error:
            logger.warning("a new host did not answer: %s", error)
            return
        member.name, member.means, member.place = said["host"], said["means"], said["address"]
        member.gpus = said["gpus"]
        async with self._changed:
            self._changed.notify_all()

    async def _have_joined(self, count: int) -> None:
        """Waits for hosts; asks again now and then, since one that is coming may die."""
        while len(self.all()) < count:
            self._say(await self._source.ensure(count))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._next_change(len(self.all())), ASK_AGAIN_S)

    async def _next_change(self, known: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.all()) != known)

    def _too_late(self, count: int) -> str:
        about = "\n".join(self._awaited) or "see the pool's log"
        joined = f"{len(self.all())} of {count} hosts joined within {self._start_timeout_s:.0f} s"
        return f"{joined}: {about}"

    def _say(self, lines: list[str]) -> None:
        """Tells kernels what is known of the hosts that are awaited, when that has changed."""
        if lines != self._awaited:
            self._awaited = lines
            self._scheduler.log_event(POOL_TOPIC, {"awaited": lines})

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _send(self, address: str, **message: Any) -> None:
        stream = self._scheduler.stream_comms.get(address)
        with contextlib.suppress(CommClosedError):  # Dask says soon that the host is gone
            if stream is not None:
                stream.send(message)

    def _on_answer(self, worker: str, id: int, answer: Any = None, error: str = "") -> None:
        member = self._members.get(worker)
        if member is None or not member.answers(id, answer, error):
            self.refused += 1

    def _on_beat(self, worker: str, beat: int) -> None:
        member = self._members.get(worker)
        if member is None:
            self.refused += 1
            return
        member.heard_at = time.monotonic()
        self._send(worker, op=HEARD, beat=beat)
