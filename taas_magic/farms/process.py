"""The farm's process: a Dask scheduler for jobs, and nodes that come and go as jobs do.

Started by the kernel, whose end of its standard input is its lease. Each node is a run of one rank
in a pool: what the pool does for runs (hosts, leases, the ends of processes, the journal) it does
for nodes. To the pool this process is one kernel more; the pool's own scheduler knows no job.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import msgspec
from distributed import Scheduler, SchedulerPlugin, Security
from distributed.comm import get_address_host
from msgspec import structs

from taas_magic import messages
from taas_magic.capture import payload
from taas_magic.capture.payload import Cell
from taas_magic.config import LOCAL, load_config
from taas_magic.engines.keys import Keys
from taas_magic.errors import TaasError
from taas_magic.farms.terms import (
    ASK,
    DROP,
    LOST_NODES,
    PUT,
    TOPIC,
    FarmPlace,
    FarmTerms,
    JobNews,
    NodeNews,
    NodeTerms,
)
from taas_magic.host.spec import HostSpec
from taas_magic.host.system import CALM_DASK, LOOPBACK
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import Event, Failure, RunEnded
from taas_magic.plan import Flags, make_plan, new_run_id
from taas_magic.pool.client import Pool, PoolConnection, Wait

DASK_SETTINGS = {
    **CALM_DASK,
    "distributed.admin.low-level-log-length": 0,  # results are among what is logged
    "distributed.admin.max-error-length": 1 << 20,
    "distributed.scheduler.allowed-failures": LOST_NODES,
    "distributed.scheduler.worker-saturation": 1.0,  # what waits, waits where any node can take it
}

INTERVAL_S = 0.5
"""How often it is looked whether nodes should come or go."""

IDLE_LOOKS = 20
"""For how many looks in a row there must be too many nodes before one goes."""

WHY_S = 2.0
"""How long the run of a node that is lost may take to end by itself, which says why."""

FAILED_STARTS = 3
"""How many nodes may fail to start, without one that does, before no more are asked for."""


def main() -> int:
    """Keep a farm until standard input has a second line, or ends; returns the process's exit code.

    Its first line is a packed `FarmTerms`; a packed `FarmPlace` is written to standard output.
    """
    terms = messages.unpack(sys.stdin.buffer.readline(), FarmTerms)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("distributed").setLevel(logging.WARNING)
    dask.config.set(DASK_SETTINGS)
    asyncio.run(_keep(terms))
    return 0


async def _keep(terms: FarmTerms) -> None:
    from taas_magic.host.member import use_steady_clock

    use_steady_clock()
    keys, loop = Keys(), asyncio.get_running_loop()
    secure = Security(**keys.scheduler())
    async with FarmScheduler(host=LOOPBACK, protocol="tls://", security=secure) as scheduler:
        fleet = Fleet(terms, keys, scheduler)
        scheduler.add_plugin(fleet)
        keeping = asyncio.ensure_future(fleet.keep())

        def wait_for_end() -> None:
            sys.stdin.readline()
            loop.call_soon_threadsafe(keeping.cancel)

        place = FarmPlace(scheduler.address, keys.kernel(), fleet.slots)
        sys.stdout.write(messages.pack(place).decode() + "\n")
        sys.stdout.flush()
        threading.Thread(target=wait_for_end, name="taas-lease", daemon=True).start()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        await fleet.close()


class FarmScheduler(Scheduler):
    """The farm's Dask scheduler; it keeps large parts that jobs need."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._told: list[dict[str, Any]] = []
        self._parts: dict[str, Any] = {}
        self.handlers |= {PUT: self._put, ASK: self._ask, DROP: self._drop}

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Open no port for Dask's web pages: they would ask nobody for a key."""

    def tell(self, news: NodeNews) -> None:
        """Tell the kernel how a node stands."""
        self._told.append(said := msgspec.to_builtins(news))
        self.log_event(TOPIC, said)

    def subscribe_topic(self, topic: str, client: str) -> None:
        """Tell a kernel of the nodes that came before it listened; called by Dask."""
        super().subscribe_topic(topic, client)
        for said in list(self._told) if topic == TOPIC else ():
            self.log_event(TOPIC, said)

    def _put(self, name: str, data: Any) -> None:
        self._parts[name] = data

    def _ask(self, name: str) -> Any:
        return self._parts[name]

    def _drop(self, name: str) -> None:
        self._parts.pop(name, None)
        dropped = [{"op": DROP, "name": name}]
        self.send_all({}, dict.fromkeys(self.workers, dropped))


@dataclass
class _NodeRun:
    """What is known of a node; it stays known when it has ended.

    Attributes:
        state: "coming", "here" once it has taken jobs, then "lost", or "left" if nobody needs it.
        pool: Whose host it has, or waits for.
        connection: The connection to the pool's process on which its run was launched.
        run_id: Its run, once that was launched.
        wait: Its wait for a host, as long as it lasts.
    """

    state: str = "coming"
    pool: Pool | None = None
    connection: PoolConnection | None = None
    run_id: str = ""
    wait: Wait | None = None


class Fleet(SchedulerPlugin):
    """The nodes of a farm, each a run: as many as have a slot for each job.

    How nodes stand changes on the scheduler's loop; what waits for pools is done in threads.

    Attributes:
        slots: Jobs that a node runs at a time.
    """

    name = "taas-nodes"

    def __init__(self, terms: FarmTerms, keys: Keys, scheduler: FarmScheduler) -> None:
        self._terms, self._keys, self._scheduler = terms, keys, scheduler
        self._loop = asyncio.get_running_loop()
        config, project = load_config(Path.cwd()), Path.cwd()
        self._pools = [Pool(config.pool(name), project) for name in terms.pools]
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(4 * terms.most + 4)
        self._numbers = itertools.count()
        self._nodes: dict[str, _NodeRun] = {}
        self._names: dict[str, str] = {}
        self._heard: dict[str, str] = {}
        self._failed, self._why = 0, ""
        self._failures: Counter[str] = Counter()
        self.slots = min(self._slots(pool) for pool in self._pools)

    def _slots(self, pool: Pool) -> int:
        """Return how many jobs a host of a pool runs at a time."""
        offers, terms = pool.capacity(), self._terms
        by_cores = max(1, offers.cores // terms.cpus)
        return min(by_cores, offers.gpus // terms.gpus) if terms.gpus else by_cores

    async def keep(self) -> None:
        """Let nodes come, and go when there were too many for a while; until it is cancelled."""
        looks = 0
        while True:
            spare = len(self._living()) - self._wanted()
            for _ in range(-spare):
                name = f"node-{next(self._numbers)}"
                self._nodes[name] = _NodeRun()
                self._threads.submit(self._start, name)
            looks = looks + 1 if spare > 0 else 0
            if looks >= IDLE_LOOKS:
                looks = 0
                await self._give_back(spare)
            await asyncio.sleep(INTERVAL_S)

    def _living(self, states: Collection[str] = ("coming", "here")) -> list[str]:
        """Return the nodes that stand so."""
        return [name for name, node in list(self._nodes.items()) if node.state in states]

    def _wanted(self) -> int:
        """Return how many nodes there should be; a node that works stays."""
        waiting = ("queued", "no-worker", "processing", "waiting")
        jobs = sum(task.state in waiting for task in self._scheduler.tasks.values())
        busy = sum(bool(worker.processing) for worker in self._scheduler.workers.values())
        wanted = max(busy, math.ceil(jobs / self.slots), self._terms.least)
        return min(wanted, self._terms.most)

    async def _give_back(self, count: int) -> None:
        """End so many nodes: those that have not come, then those that do nothing."""
        here, workers = self._living(["here"]), self._scheduler.workers
        places = {name: place for place, name in self._names.items() if name in here}
        idle = [name for name in places if not workers[places[name]].processing]
        for name in [*self._living(["coming"]), *idle][:count]:
            self._leave(name)
            if name in idle:  # so that it is given no job meanwhile
                await self._scheduler.remove_worker(places[name], stimulus_id=self.name)

    def _leave(self, name: str) -> None:
        """End a node because nobody needs it."""
        self._nodes[name].state = "left"
        self._said(name, "left")
        self._threads.submit(self._end, name)

    def _start(self, name: str) -> None:
        """Start a node; blocks until its run has begun, in a thread."""
        node = self._nodes[name]
        with self._lock:
            if node.state != "coming":
                return
            if self._failed >= FAILED_STARTS:
                why = f"{FAILED_STARTS} nodes did not start, no more are: {self._why}"
                self._said(name, "given up", why)
                return
            # a pool that has a host without a node: the first of those that failed least of late
            room = [pool for pool in self._pools if self._count(pool) < pool.config.max_hosts]
            pool = min(room or self._pools, key=lambda pool: self._failures[pool.name])
            node.pool, node.wait = pool, Wait(pool)
            wait, hosts = node.wait, min(self._count(pool), pool.config.max_hosts)
        try:
            self._said(name, "asked for")
            connection = pool.open(hosts, wait=wait)
            with self._lock:  # one after the other, each on the host that then runs least
                if node.wait is None:
                    return
                node.wait = None
                self._launch(name, pool, connection)
        except Exception as error:  # of whatever kind: nobody waits for this thread
            node.wait = None
            self._on_loop(self._lost, name, str(error) or repr(error))

    def _count(self, pool: Pool) -> int:
        return sum(self._nodes[name].pool is pool for name in self._living())

    def _launch(self, name: str, pool: Pool, connection: PoolConnection) -> None:
        spec, node = self._spec(name, pool, self._reach(connection)), self._nodes[name]
        node.connection, node.run_id = connection, spec.plan.run_id

        def hear(event: Event) -> None:
            if isinstance(event, RunEnded):
                first = event.first or Failure()
                why = str(event.why or first.message or event.state)
                why = f"{why} ({first.log_path})" if first.log_path else why
                self._on_loop(self._lost, name, why)

        with spec.folder.held():
            hosts = connection.launch(spec, hear, [])
        self._said(name, "starting", host=hosts[0])

    def _reach(self, connection: PoolConnection) -> str:
        """Return the scheduler's address for a pool: where its hosts reach the pool's process."""
        host = get_address_host(connection.address)
        if host == get_address_host(self._scheduler.address):
            return str(self._scheduler.address)
        if host not in self._heard:
            listening = asyncio.run_coroutine_threadsafe(self._listen(host), self._loop)
            self._heard[host] = listening.result()
        return self._heard[host]

    async def _listen(self, host: str) -> str:
        """Have the scheduler listen on one more address of this machine; returns it."""
        scheduler = self._scheduler
        await scheduler.listen(
            f"tls://{host}:0",
            allow_offload=False,
            handshake_overrides={"pickle-protocol": 4, "compression": None},  # as Dask's own ports
            **scheduler.security.get_listen_args("scheduler"),
        )
        return str(scheduler.listeners[-1].contact_address)

    def _spec(self, name: str, pool: Pool, scheduler: str) -> HostSpec:
        """Return a run of one rank that keeps a node, its folder written."""
        terms, config = self._terms, pool.config
        flags = Flags(gpus=1, pool=pool.name, name=f"{terms.name} {name}", hang_s=0)
        plan = make_plan(flags, pool.capacity(), new_run_id(), config.max_hosts, terms.store)
        plan = structs.replace(plan, hang_s=0, notes=())
        number = int(name.rpartition("-")[2])
        node = NodeTerms(
            name=name,
            place=f"tls://127.1.{number // 256 % 256}.{number % 256}:1",  # no other node's
            security=self._keys.host(name),
            slots=self._slots(pool),
            gpus=terms.gpus,
            cpus=terms.cpus,
            store=terms.store,
            start_timeout_s=config.start_timeout_s,
        )
        source = "from taas_magic.farms.node import keep\nkeep(terms)"
        cell = Cell(source, filename="<a node>", raw=source)
        captured = payload.capture(
            cell,
            {"terms": node},
            transform=str,
            project=Path.cwd(),
            limit_bytes=1 << 20,
            source_of=lambda filename: None,
        )
        folder = RunFolder.create(plan.run_id, plan, source)
        payload.write(captured, folder.payload)
        return HostSpec(
            plan,
            0,
            str(folder.path),
            terms.origin,
            requires=None if config.engine == LOCAL else (),
            reach=scheduler,
            reads_only=True,
        )

    def _lost(self, name: str, why: str) -> None:
        """Have another in the place of a node that has ended by itself, or never began."""
        node = self._nodes[name]
        if node.state == "left":
            return
        self._said(name, "lost", why)
        if node.state == "coming":
            self._failed, self._why = self._failed + 1, why
            if node.pool is not None:
                self._failures[node.pool.name] += 1
        if node.state != "lost":
            self._threads.submit(self._end, name, WHY_S if node.state == "here" else 0.0)
            node.state = "lost"

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Take down that a node takes jobs; called by Dask."""
        name = self._names[worker] = str(scheduler.workers[worker].name)
        node = self._nodes[name]
        if node.state == "coming":
            node.state, self._failed = "here", 0
            if node.pool is not None:
                self._failures[node.pool.name] = 0
            self._said(name, "here")

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Take down that a node is gone; called by Dask before its jobs are done elsewhere.

        Why may be heard later.
        """
        name = self._names.pop(worker)
        if self._nodes[name].state == "here":
            self._lost(name, "its process ended, or its connection broke")

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Say when a job is not called again; called by Dask with each change of one."""
        if finish == "erred":
            self._scheduler.log_event(TOPIC, msgspec.to_builtins(JobNews(key, "", "erred")))

    def _end(self, name: str, wait_s: float = 0.0) -> None:
        """End what there is of a node after a while; blocks until its pool was told."""
        time.sleep(wait_s)
        node = self._nodes[name]
        with self._lock:
            wait, node.wait = node.wait, None
        if wait is not None:
            wait.give_up()
        if node.connection is not None:
            with contextlib.suppress(TaasError):  # the run has ended with the pool's process
                node.connection.forget(node.run_id)
                node.connection.halt(node.run_id, "interrupt")

    def _on_loop(self, call: Callable[..., object], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(call, *arguments)

    def _said(self, name: str, state: str, why: str = "", host: str = "") -> None:
        """Tell the kernel how a node stands."""
        self._on_loop(self._scheduler.tell, NodeNews(name, state, why, host))

    async def close(self) -> None:
        """End all nodes and leave the pools; returns when these were told."""
        for name in self._living():
            self._leave(name)
        await asyncio.to_thread(self._threads.shutdown)
        for pool in self._pools:
            await asyncio.to_thread(pool.close)
