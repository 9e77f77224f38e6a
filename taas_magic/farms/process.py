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
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import msgspec
from distributed import Adaptive, Scheduler, SchedulerPlugin, Security, SpecCluster
from distributed.comm import get_address_host
from distributed.deploy.spec import ProcessInterface
from msgspec import structs

from taas_magic import certificate, messages
from taas_magic.capture import payload
from taas_magic.capture.payload import Cell
from taas_magic.config import LOCAL, load_config
from taas_magic.engines.keys import Peer, PeerRole, security
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
from taas_magic.pool.client import Pool, Wait

DASK_SETTINGS = {
    **CALM_DASK,
    "distributed.admin.low-level-log-length": 0,  # results are among what is logged
    "distributed.admin.max-error-length": 1 << 20,
    "distributed.deploy.lost-worker-timeout": "100ms",
    "distributed.scheduler.allowed-failures": LOST_NODES,
    "distributed.scheduler.worker-saturation": 1.0,  # what waits, waits where any node can take it
}

INTERVAL_S = 0.5
"""How often it is looked whether nodes should come or go."""

IDLE_LOOKS = 20
"""For how many looks in a row there must be too many nodes before one goes."""

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
    keys, loop = _Keys(), asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(4 * terms.most + 4))  # nodes wait for hosts there
    over = asyncio.Event()
    fleet = Fleet(terms, keys)

    def wait_for_end() -> None:
        sys.stdin.readline()
        loop.call_soon_threadsafe(over.set)

    async with FarmCluster(fleet, keys) as cluster:
        fleet.cluster = cluster
        cluster.scheduler.add_plugin(fleet)
        cluster.adapt(
            Adaptive=JobsAdaptive,
            minimum=terms.least,
            maximum=terms.most,
            interval=INTERVAL_S,
            wait_count=IDLE_LOOKS,
            fleet=fleet,
        )
        place = FarmPlace(cluster.scheduler_address, keys.of("client"), fleet.slots)
        sys.stdout.write(messages.pack(place).decode() + "\n")
        sys.stdout.flush()
        threading.Thread(target=wait_for_end, name="taas-lease", daemon=True).start()
        await over.wait()
        fleet.leaves(list(cluster.worker_spec))
    await asyncio.to_thread(fleet.close)


class _Keys:
    """Certificates of one farm: each part of it trusts those that were signed for it, no others."""

    def __init__(self) -> None:
        self._authority = certificate.Authority("taas-magic farm")

    def of(self, role: str, name: str = "") -> dict[str, str | bool]:
        """Return keyword arguments of dask's `Security` for `scheduler`, `client` or `worker`."""
        kind = PeerRole.KERNEL if role == "client" else PeerRole.HOST
        identity = Peer(kind, name or role).identity
        issued = self._authority.issue(role, identity, serves=role == "scheduler")
        return security(self._authority.certificate, **{role: issued})


class FarmScheduler(Scheduler):
    """The farm's Dask scheduler; it keeps large parts that jobs need."""

    def __init__(self, *args: Any, fleet: "Fleet", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fleet = fleet
        self._parts: dict[str, Any] = {}
        self.handlers |= {PUT: self._put, ASK: self._ask, DROP: self._drop}

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Open no port for Dask's web pages: they would ask nobody for a key."""

    def subscribe_topic(self, topic: str, client: str) -> None:
        """Tell a kernel of the nodes that came before it listened; called by Dask."""
        super().subscribe_topic(topic, client)
        for news in list(self._fleet.told) if topic == TOPIC else ():
            self.log_event(TOPIC, msgspec.to_builtins(news))

    def _put(self, name: str, data: Any) -> None:
        self._parts[name] = data

    def _ask(self, name: str) -> Any:
        return self._parts[name]

    def _drop(self, name: str) -> None:
        self._parts.pop(name, None)
        dropped = [{"op": DROP, "name": name}]
        self.send_all({}, dict.fromkeys(self.workers, dropped))


class FarmCluster(SpecCluster):
    """Nodes as Dask's cluster of them."""

    def __init__(self, fleet: "Fleet", keys: _Keys) -> None:
        self._numbers = itertools.count()
        secure = Security(**{**keys.of("scheduler"), **keys.of("client")})
        options = {"fleet": fleet, "host": LOOPBACK, "protocol": "tls://", "security": secure}
        super().__init__(
            scheduler={"cls": FarmScheduler, "options": options},
            worker={"cls": Node, "options": {"fleet": fleet}},
            security=secure,
            asynchronous=True,
            name="taas-farm",
        )

    def new_worker_spec(self) -> dict[str, Any]:
        """See Dask, which would give the name of a node that has ended to the next one."""
        return {f"node-{next(self._numbers)}": self.new_spec}


class JobsAdaptive(Adaptive):
    """As many nodes as have a slot for each job; a node that works stays."""

    def __init__(self, *args: Any, fleet: "Fleet", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fleet = fleet

    async def target(self) -> int:
        """Return how many nodes there should be."""
        scheduler = self.cluster.scheduler
        waiting = ("queued", "no-worker", "processing", "waiting")
        jobs = sum(task.state in waiting for task in scheduler.tasks.values())
        busy = sum(bool(worker.processing) for worker in scheduler.workers.values())
        return max(busy, math.ceil(jobs / self._fleet.slots))

    async def scale_down(self, workers: list[str]) -> None:
        """Give nodes back that nobody needs."""
        self._fleet.leaves(workers)
        await super().scale_down(workers)


class Node(ProcessInterface):
    """A node as Dask's cluster sees it; Dask gives it the scheduler's address and its name."""

    def __init__(self, scheduler: str, fleet: "Fleet", name: str) -> None:
        super().__init__(scheduler=scheduler, name=name)
        self._fleet, self._name, self._joins = fleet, str(name), scheduler
        self._coming: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Have the node's run launched in a task; called by Dask."""
        self._coming = asyncio.create_task(self._fleet.run(self._name, self._joins))
        await super().start()

    async def close(self) -> None:
        """End the node; returns when its pool was told. Called by Dask."""
        if self._coming is not None:
            self._coming.cancel()
        await asyncio.to_thread(self._fleet.end, self._name)
        await super().close()


@dataclass
class _NodeRun:
    """What is known of a node; it stays known when it has ended.

    Attributes:
        pool: Whose host it has, or waits for; None before and after.
        run_id: Its run, once that was launched.
        has_ended: Whether it has ended, or never began, or is being ended.
        has_joined: Whether it has taken jobs.
        leaves: Whether it is ended because nobody needs it.
    """

    pool: Pool | None = None
    run_id: str = ""
    wait: Wait | None = None
    has_ended: bool = False
    has_joined: bool = False
    leaves: bool = False


class Fleet(SchedulerPlugin):
    """The nodes of a farm, each a run; called by threads, and by Dask on its loop.

    Attributes:
        slots: Jobs that a node runs at a time.
    """

    name = "taas-nodes"
    cluster: FarmCluster

    def __init__(self, terms: FarmTerms, keys: _Keys) -> None:
        self._terms, self._keys = terms, keys
        self._loop = asyncio.get_running_loop()
        config, project = load_config(Path.cwd()), Path.cwd()
        self._pools = [Pool(config.pool(name), project) for name in terms.pools]
        self._lock = threading.Lock()
        self._nodes: defaultdict[str, _NodeRun] = defaultdict(_NodeRun)
        self._names: dict[str, str] = {}
        self._heard: dict[str, str] = {}
        self._failed, self._why = 0, ""
        self._failures: Counter[str] = Counter()
        self.told: list[NodeNews] = []
        self.slots = min(self._slots(pool) for pool in self._pools)

    def _slots(self, pool: Pool) -> int:
        """Return how many jobs a host of a pool runs at a time."""
        offers, terms = pool.capacity(), self._terms
        by_cores = max(1, offers.cores // terms.cpus)
        return min(by_cores, offers.gpus // terms.gpus) if terms.gpus else by_cores

    async def run(self, name: str, scheduler: str) -> None:
        """Start a node, and give it up if its run goes on but it takes no jobs in time.

        Args:
            scheduler: The scheduler's address here.
        """
        await asyncio.to_thread(self._start, name, scheduler)
        await asyncio.sleep(self._terms.start_s)
        node = self._nodes[name]
        if node.pool is not None and not node.has_joined:
            self._lost(name, f"it did not come within {self._terms.start_s:g} s")

    def _start(self, name: str, scheduler: str) -> None:
        """Start a node; blocks until its run has begun, in a thread."""
        node = self._nodes[name]
        with self._lock:
            if node.has_ended:  # Dask would have a node again that was lost: others come
                self._drop(name)
                return
            if self._failed >= FAILED_STARTS:
                why = f"{FAILED_STARTS} nodes did not start, no more are: {self._why}"
                self._said(name, "given up", why)
                return
            # a pool that has a host without a node: the first of those that failed least of late
            room = [pool for pool in self._pools if self._count(pool) < pool.config.max_hosts]
            pool = min(room or self._pools, key=lambda pool: self._failures[pool.name])
            node.pool, node.wait = pool, Wait()
            wait, hosts = node.wait, min(self._count(pool), pool.config.max_hosts)
        try:
            self._said(name, "asked for")
            pool.open(hosts, wait=wait)
            with self._lock:  # one after the other, each on the host that then runs least
                if node.wait is not None:
                    node.wait = None
                    self._launch(name, pool, scheduler)
        except Exception as error:  # of whatever kind: nobody waits for this thread
            node.wait = None
            self._lost(name, str(error) or repr(error))

    def _count(self, pool: Pool) -> int:
        return sum(node.pool is pool for node in list(self._nodes.values()))

    def _launch(self, name: str, pool: Pool, scheduler: str) -> None:
        spec, node = self._spec(name, pool, self._reach(pool, scheduler)), self._nodes[name]
        node.run_id = spec.plan.run_id

        def hear(event: Event) -> None:
            if isinstance(event, RunEnded):
                first = event.first or Failure()
                why = str(event.why or first.message or event.state)
                self._lost(name, f"{why} ({first.log_path})" if first.log_path else why)
                node.pool = None

        with spec.folder.held():
            hosts = pool.launch(spec, hear, [])
        self._said(name, "starting", host=hosts[0])

    def _reach(self, pool: Pool, scheduler: str) -> str:
        """Return the scheduler's address for a pool: where its hosts reach the pool's process."""
        host = get_address_host(pool.address)
        if host == get_address_host(scheduler):
            return scheduler
        if host not in self._heard:
            listening = asyncio.run_coroutine_threadsafe(self._listen(host), self._loop)
            self._heard[host] = listening.result()
        return self._heard[host]

    async def _listen(self, host: str) -> str:
        """Have the scheduler listen on one more address of this machine; returns it."""
        scheduler = self.cluster.scheduler
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
            security=self._keys.of("worker", name),
            slots=self._slots(pool),
            gpus=terms.gpus,
            cpus=terms.cpus,
            store=terms.store,
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
        if node.leaves:
            return
        self._said(name, "lost", why)
        if node.has_ended:
            return
        node.has_ended = True
        if not node.has_joined:
            self._failed, self._why = self._failed + 1, why
            if node.pool is not None:
                self._failures[node.pool.name] += 1
        self._drop(name)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Take down that a node takes jobs; called by Dask."""
        name = self._names[worker] = str(scheduler.workers[worker].name)
        node = self._nodes[name]
        node.has_joined, self._failed = True, 0
        if node.pool is not None:
            self._failures[node.pool.name] = 0
        self._said(name, "here")

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Take down that a node is gone; called by Dask before its jobs are done elsewhere.

        Why may be heard later.
        """
        name = self._names.pop(worker)
        node = self._nodes[name]
        if not node.leaves and not node.has_ended:
            self._said(name, "lost", "its process ended, or its connection broke")

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Say when a job is not called again; called by Dask with each change of one."""
        if finish == "erred":
            said = msgspec.to_builtins(JobNews(key, "", "erred"))
            self.cluster.scheduler.log_event(TOPIC, said)

    def leaves(self, names: Iterable[object]) -> None:
        """Know that nodes are going to be ended because nobody needs them."""
        for name in names:
            self._nodes[str(name)].leaves = True

    def end(self, name: str) -> None:
        """End a node, or what there is of one that was lost; blocks until its pool was told."""
        node = self._nodes[name]
        with self._lock:
            node.has_ended = True
            pool, wait = node.pool, node.wait
            node.pool = node.wait = None
        self._drop(name)
        if node.leaves:
            self._said(name, "left")
        with contextlib.suppress(TaasError, OSError):  # the pool is gone, and the run with it
            if pool is not None and wait is not None:
                pool.give_up(wait)
            elif pool is not None and node.run_id:
                pool.halt(node.run_id, "interrupt")
                pool.forget(node.run_id)

    def _drop(self, name: str) -> None:
        """Have Dask want a node no more."""
        asyncio.run_coroutine_threadsafe(self.cluster.scale_down([name]), self._loop)

    def _said(self, name: str, state: str, why: str = "", host: str = "") -> None:
        """Tell the kernel how a node stands."""
        news = NodeNews(name, state, why, host)
        self.told.append(news)
        log, said = self.cluster.scheduler.log_event, msgspec.to_builtins(news)
        self._loop.call_soon_threadsafe(log, TOPIC, said)

    def close(self) -> None:
        """Leave the pools."""
        for pool in self._pools:
            pool.close()
