"""Keeps a pool's runs: whose they are, which hosts they have, how they end; and their journals.

A Dask scheduler plugin in the pool's own process. The kernel asks (`taas_launch`, `taas_halt`, …
are calls of the scheduler), agents report (events), and clients or hosts that are gone are seen
here first.
"""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from distributed import Scheduler, SchedulerPlugin

from taas_magic.config import PoolConfig
from taas_magic.engines import fitness
from taas_magic.engines.base import HostSource
from taas_magic.engines.kept_fetch import KeptFetch
from taas_magic.engines.kept_run import KeptRun
from taas_magic.engines.kernels import Kernels
from taas_magic.engines.member import Member
from taas_magic.engines.members import Members
from taas_magic.engines.upkeep import Upkeep
from taas_magic.errors import PoolError, ProtocolError, StoreError
from taas_magic.journal import Event, Writer, event
from taas_magic.plan import Plan
from taas_magic.remote.spec import HostSpec
from taas_magic.remote.topics import ASK_STORE, EVENT, share_id, topic
from taas_magic.store import owned


class Keeper(SchedulerPlugin):
    """The pool's keeper.

    Args:
        scheduler: The pool's.
        source: Where hosts come from.
        pool: The pool's settings.
        linger_s: How long the pool goes on without a kernel.
    """

    name = "taas-keeper"

    def __init__(
        self, scheduler: Scheduler, source: HostSource, pool: PoolConfig, linger_s: float
    ) -> None:
        self._scheduler = scheduler
        self._runs: dict[str, KeptRun | KeptFetch] = {}
        self._background: set[asyncio.Future[Any]] = set()
        self.members = Members(scheduler, source, pool.start_timeout_s, pool.lease_s, self._on_lost)
        self._kernels = Kernels(self.members, linger_s, lambda: bool(self._runs))
        self._upkeep = Upkeep(self.members, pool.idle_timeout_s)
        scheduler.add_plugin(self)
        scheduler.stream_handlers[EVENT] = self._on_event
        scheduler.handlers["taas_ready"] = self._kernels.ready
        scheduler.handlers["taas_give_up"] = self._kernels.give_up
        scheduler.handlers["taas_launch"] = self.launch
        scheduler.handlers["taas_fetch"] = self.fetch
        scheduler.handlers["taas_relay"] = self.relay
        scheduler.handlers["taas_halt"] = self.halt
        scheduler.handlers["taas_status"] = self.status
        scheduler.handlers["taas_facts"] = self.facts
        scheduler.handlers["taas_down"] = self.down
        scheduler.handlers[ASK_STORE] = self.ask_store
        self._in_background(self.members.watch())
        self._in_background(self._upkeep.watch())

    @property
    def over(self) -> asyncio.Event:
        """Set when the pool is to end."""
        return self._kernels.over

    async def launch(self, owner: str, spec: dict[str, Any], said: list[Event]) -> dict[str, Any]:
        """Starts a run on as many hosts as its plan has.

        Args:
            owner: The Dask client of the kernel; when it is gone, so is the run.
            spec: A `HostSpec` as plain values, of the first host.
            said: What the run's fetchers have said before.

        Returns:
            `hosts`: their names. Or `error`, why there are none, or `store_error`, why the run may
            not have its project store: in one line.
        """
        first = HostSpec.from_json(spec)
        self._subscribe(owner, first.plan.run_id)
        with contextlib.ExitStack() as until_end:
            try:
                _own_store(until_end, first.plan)
                journal = Writer(first.folder)
                until_end.callback(journal.close)
                run = KeptRun(spec, owner, self.members, self._publisher(journal))
                self._runs[run.run_id] = run
                until_end.callback(self._runs.pop, run.run_id)
                await run.relay(said)
                hosts = await run.start()
            except StoreError as error:
                return {"store_error": str(error)}
            except PoolError as error:
                return {"error": str(error)}
            self._in_background(_carry_out(run, journal, until_end.pop_all()))
        return {"hosts": hosts}

    async def fetch(self, owner: str, spec: dict[str, Any]) -> dict[str, Any]:
        """Starts a run's fetchers on hosts of this pool.

        Args:
            owner: The Dask client of the kernel; when it is gone, so are they.
            spec: A `HostSpec` of the run as plain values.

        Returns:
            `hosts`: their names. Or `error`, why there are none.
        """
        name = share_id(spec["plan"]["run_id"])
        self._subscribe(owner, name)
        publish = functools.partial(self._scheduler.log_event, topic(name))
        fetch = KeptFetch(spec, owner, self.members, publish)
        self._runs[fetch.run_id] = fetch
        try:
            hosts = await fetch.start()
        except PoolError as error:
            await fetch.halt("kill")
            return {"error": str(error)}
        finally:
            self._in_background(self._carry_out_fetch(fetch))
        return {"hosts": hosts}

    async def relay(self, run_id: str, events: list[Event]) -> None:
        """Takes what the fetchers of a run said, perhaps those of another pool."""
        run = self._runs.get(run_id)
        if isinstance(run, KeptRun):
            await run.relay(events)

    async def halt(self, run_id: str, how: str) -> str:
        """Interrupts or kills a run on all its hosts; says whether it is running."""
        run = self._runs.get(run_id)
        if run is None:
            return "ended"
        await run.halt(how)
        return "stopping"

    async def status(self) -> dict[str, Any]:
        """The pool's hosts and what each does, and the pool's kernels."""
        hosts = [
            {
                "host": member.name,
                "address": member.place,
                "means": member.means,
                "since": member.joined,
                "runs": sorted(member.runs),
                **self._upkeep.host(member),
            }
            for member in self.members.all()
        ]
        refused = self.members.refused
        counted = {"kernels": self._kernels.count, "refused": refused, **self._upkeep.pool()}
        return {"hosts": hosts, **counted}

    async def ask_store(
        self, run_id: str, address: str, what: str, arguments: dict[str, Any]
    ) -> Any:
        """Answers a host that does not share its run's project store; see `travel.desk`.

        Raises:
            ProtocolError: The host has nothing to do with the run (any more).
        """
        run = self._runs.get(run_id)
        try:
            if run is None:
                raise ProtocolError(f"there is no run {run_id} (any more)")
            return await run.ask_store(address, what, arguments)
        except ProtocolError:
            self.members.refused += 1
            raise

    async def facts(self, packages: list[str], mark: str) -> list[dict[str, Any]]:
        """What the pool's hosts are like, as plain `Facts`, and what holds ranks off the store.

        Args:
            packages: Distributions whose versions are asked for.
            mark: A file in the project store.
        """
        hosts = self.members.all()
        found = await fitness.ask_all(self.members, hosts, packages=packages, mark=mark)
        return [
            {"facts": dataclasses.asdict(facts), "means": host.means}
            for facts, host in zip(found, hosts, strict=True)
        ]

    async def down(self) -> str:
        """Ends every run and then the pool's process."""
        await asyncio.gather(*(run.halt("kill") for run in list(self._runs.values())))
        asyncio.get_running_loop().call_later(0.1, self.over.set)
        return "going"

    def add_client(self, scheduler: Scheduler, client: str) -> None:
        """Called by Dask when a kernel has connected."""
        self._kernels.come(client)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Called by Dask when a kernel has left or died: its runs end."""
        for run in self._runs.values():
            if run.owner == client:
                note = event("note", text="the notebook's kernel is gone: the run is ended")
                run.publish(note)
                self._in_background(run.halt("interrupt"))
        self._kernels.go(client)

    def _subscribe(self, owner: str, name: str) -> None:
        """Has a kernel get the events: its own word for it goes another way than its call."""
        self._scheduler.subscribe_topic(topic(name), owner)

    def _publisher(self, journal: Writer) -> Callable[[Event], None]:
        """Takes a run's events: into its journal, and to the kernels that listen."""
        name = topic(journal.folder.run_id)

        def publish(event: Event) -> None:
            journal.append(event)
            self._scheduler.log_event(name, event)

        return publish

    def _on_event(self, worker: str, run_id: str, event: Event) -> None:
        """Takes an event from a host; what is not (any more) a member's is refused."""
        run = self._runs.get(run_id)
        if run is None or not run.take(worker, event):
            self.members.refused += 1

    def _on_lost(self, member: Member, why: str) -> None:
        for run in list(self._runs.values()):
            run.lose(member, why)

    async def _carry_out_fetch(self, fetch: KeptFetch) -> None:
        await fetch.carry_out()
        del self._runs[fetch.run_id]

    def _in_background(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _carry_out(run: KeptRun, journal: Writer, until_end: contextlib.ExitStack) -> None:
    with until_end:
        await run.carry_out()
    journal.folder.payload.unlink(missing_ok=True)


def _own_store(until_end: contextlib.ExitStack, plan: Plan) -> None:
    """Makes the project store the run's until `until_end` is closed."""
    if plan.store is not None:
        until_end.enter_context(owned(plan.store.path, plan.run_id, plan.name))
