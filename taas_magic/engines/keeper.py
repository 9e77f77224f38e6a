"""Keeps a pool's runs: which hosts they have, whose they are, how they end; and their journals.

A Dask scheduler plugin in the pool's own process. The kernel asks (`taas_launch`, `taas_halt`, …
are calls of the scheduler), agents report (events), and clients or hosts that are gone are seen
here first.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from distributed import Scheduler, SchedulerPlugin

from taas_magic.errors import PoolError, StoreError
from taas_magic.journal import Event, Writer, event
from taas_magic.plan import Plan
from taas_magic.remote.report import host_failure
from taas_magic.remote.spec import HostSpec
from taas_magic.remote.topics import CALL_HELLO, CALL_START, CALL_STOP, topic
from taas_magic.remote.watch import Failure, first_failure
from taas_magic.store import owned

ASK_AGAIN_S = 0.5
"""How often the engine is asked for hosts that have not joined."""

_WORST_LAST = ("SUCCEEDED", "INTERRUPTED", "FAILED", "LOST")


@dataclass
class KeptRun:
    """A run that has not ended."""

    run_id: str
    name: str
    owner: str
    journal: Writer
    hosts: dict[str, str]
    """Name by address, of the hosts that have not ended their share."""
    store: contextlib.ExitStack
    """Keeps the project store this run's while it is open."""
    started: float = field(default_factory=time.time)
    states: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


class Keeper(SchedulerPlugin):
    """The pool's keeper.

    Args:
        ensure_hosts: Brings the cluster to so many hosts; returns when they were asked for.
        start_timeout_s: How long hosts may take to join.
        linger_s: How long the pool goes on without a kernel.
    """

    name = "taas-keeper"

    def __init__(
        self,
        ensure_hosts: Callable[[int], Awaitable[None]],
        start_timeout_s: float,
        linger_s: float,
    ) -> None:
        self._ensure_hosts = ensure_hosts
        self._start_timeout_s, self._linger_s = start_timeout_s, linger_s
        self._runs: dict[str, KeptRun] = {}
        self._kernels: set[str] = set()
        self._names: dict[str, str] = {}
        self._means: dict[str, str] = {}
        self._joined = asyncio.Condition()
        self._lingering: asyncio.TimerHandle | None = None
        self._background: set[asyncio.Future[Any]] = set()
        self.over = asyncio.Event()

    async def start(self, scheduler: Scheduler) -> None:
        """Called by Dask; makes the keeper's calls known."""
        self._scheduler = scheduler
        scheduler.handlers["taas_ready"] = self.ready
        scheduler.handlers["taas_launch"] = self.launch
        scheduler.handlers["taas_halt"] = self.halt
        scheduler.handlers["taas_status"] = self.status
        scheduler.handlers["taas_down"] = self.down
        self._linger()

    async def ready(self, hosts: int = 1) -> list[str]:
        """Returns the names of the hosts when so many are there and can start ranks at once."""
        return [self._names[address] for address in await self._take_hosts(hosts)]

    async def launch(self, owner: str, spec: dict[str, Any]) -> dict[str, Any]:
        """Starts a run on as many hosts as its plan has.

        Args:
            owner: The Dask client of the kernel; when it is gone, so is the run.
            spec: A `HostSpec` as plain values, of the first host.

        Returns:
            `hosts`: their names. Or `error`, why there are none, or `store_error`, why the run may
            not have its project store: in one line.
        """
        first = HostSpec.from_json(spec)
        run_id = first.plan.run_id
        with contextlib.ExitStack() as until_end:
            try:
                _own_store(until_end, first.plan)
                addresses = await self._take_hosts(len(first.plan.hosts))
            except StoreError as error:
                return {"store_error": str(error)}
            except PoolError as error:
                return {"error": str(error)}
            names = {address: self._names[address] for address in addresses}
            journal = Writer(first.folder)
            self._runs[run_id] = KeptRun(
                run_id, first.plan.name, owner, journal, names, until_end.pop_all()
            )
        self._publish(run_id, event("state", state="RUNNING"))
        starts = (
            self._call(address, CALL_START, spec={**spec, "host_rank": host_rank})
            for host_rank, address in enumerate(addresses)
        )
        await asyncio.gather(*starts)
        return {"hosts": list(names.values())}

    async def halt(self, run_id: str, how: str) -> str:
        """Interrupts or kills a run on all its hosts; says whether it is running."""
        run = self._runs.get(run_id)
        if run is None:
            return "ended"
        calls = (self._call(a, CALL_STOP, run_id=run_id, how=how) for a in list(run.hosts))
        await asyncio.gather(*calls, return_exceptions=True)
        return "stopping"

    async def status(self) -> dict[str, Any]:
        """The pool's hosts and what each does, and the pool's kernels."""
        hosts = [
            {
                "host": self._names.get(worker.address, ""),
                "address": worker.address,
                "means": self._means.get(worker.address, ""),
                "runs": [run.run_id for run in self._runs.values() if worker.address in run.hosts],
            }
            for worker in self._scheduler.workers.values()
        ]
        return {"hosts": hosts, "kernels": len(self._kernels)}

    async def down(self) -> str:
        """Ends every run and then the pool's process."""
        await asyncio.gather(*(self.halt(run_id, "kill") for run_id in list(self._runs)))
        asyncio.get_running_loop().call_later(0.1, self.over.set)
        return "going"

    def log_event(self, topic: str, msg: Any) -> None:
        """Called by Dask for every event of every topic."""
        run = self._runs.get(topic.removeprefix("taas-"))
        if run is None or not isinstance(msg, dict) or "kind" not in msg:
            return
        run.journal.append(msg)
        if msg["kind"] == "host_ended":
            self._end_host(run, msg)

    async def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Called by Dask when a host has joined."""
        async with self._joined:
            self._joined.notify_all()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Called by Dask when a host is gone, in whatever way."""
        self._names.pop(worker, None)
        for run in [run for run in self._runs.values() if worker in run.hosts]:
            name = run.hosts[worker]
            lost = PoolError("its agent ended or could not be reached")
            failure = {**host_failure(name, lost), "traceback": []}
            self._publish(run.run_id, event("failure", name, failure=failure))
            over = {"state": "LOST", "failures": [failure], "host_rank": -1}
            self._publish(run.run_id, event("host_ended", name, **over))

    def add_client(self, scheduler: Scheduler, client: str) -> None:
        """Called by Dask when a kernel has connected."""
        self._kernels.add(client)
        if self._lingering is not None:
            self._lingering.cancel()

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Called by Dask when a kernel has left or died: its runs end."""
        self._kernels.discard(client)
        for run in self._runs.values():
            if run.owner == client:
                note = event("note", text="the notebook's kernel is gone: the run is ended")
                self._publish(run.run_id, note)
                self._in_background(self.halt(run.run_id, "interrupt"))
        if not self._kernels:
            self._linger()

    async def _take_hosts(self, count: int) -> list[str]:
        try:
            await asyncio.wait_for(self._have_joined(count), self._start_timeout_s)
        except asyncio.TimeoutError:
            have = len(self._scheduler.workers)
            raise PoolError(
                f"{have} of {count} hosts joined within {self._start_timeout_s:.0f} s; "
                "see the pool's log"
            ) from None
        addresses = list(self._scheduler.workers)[:count]
        await asyncio.gather(*(self._learn_name(address) for address in addresses))
        return addresses

    async def _learn_name(self, address: str) -> None:
        """Asks a new host what it is called; so the way to it is open before the first run."""
        if address not in self._names:
            said = await self._call(address, CALL_HELLO)
            self._names[address], self._means[address] = said["host"], said["means"]

    async def _have_joined(self, count: int) -> None:
        """Waits for hosts; asks again now and then, since one that is coming may die."""
        while len(self._scheduler.workers) < count:
            await self._ensure_hosts(count)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._next_join(), ASK_AGAIN_S)

    async def _next_join(self) -> None:
        async with self._joined:
            await self._joined.wait()

    async def _call(self, address: str, name: str, **arguments: Any) -> Any:
        return await getattr(self._scheduler.rpc(address), name)(**arguments)

    def _publish(self, run_id: str, event: Event) -> None:
        self._scheduler.log_event(topic(run_id), event)

    def _end_host(self, run: KeptRun, msg: Event) -> None:
        run.states.append(msg["state"])
        run.failures += msg["failures"]
        ended = [address for address, name in run.hosts.items() if name == msg["host"]]
        for address in ended:
            del run.hosts[address]
        if not run.hosts:
            self._end_run(run)
        elif msg["state"] != "SUCCEEDED":
            self._in_background(self.halt(run.run_id, "kill"))

    def _end_run(self, run: KeptRun) -> None:
        over = event(
            "ended",
            state=worst(run.states),
            failures=run.failures,
            first=first_failure(run.failures),
            elapsed_s=time.time() - run.started,
        )
        run.store.close()
        self._publish(run.run_id, over)
        del self._runs[run.run_id]
        run.journal.close()
        run.journal.folder.payload.unlink(missing_ok=True)

    def _linger(self) -> None:
        loop = asyncio.get_running_loop()
        self._lingering = loop.call_later(self._linger_s, self._end_if_alone)

    def _end_if_alone(self) -> None:
        if self._kernels or self._runs:
            self._linger()
        else:
            self.over.set()

    def _in_background(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _own_store(until_end: contextlib.ExitStack, plan: Plan) -> None:
    """Makes the project store the run's until `until_end` is closed."""
    if plan.store is not None:
        until_end.enter_context(owned(plan.store.path, plan.run_id, plan.name))


def worst(states: Iterable[str]) -> str:
    """The state of a run whose hosts ended in these."""
    return max(states, key=_WORST_LAST.index)
