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
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
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
from taas_magic.engines.keys import Peer, PeerRole
from taas_magic.errors import TaasError
from taas_magic.farms.parts import PartsScheduler
from taas_magic.farms.terms import FarmPlace, FarmTerms, NodeNews, NodeTerms
from taas_magic.farms.worker import LOST_NODES, TOPIC
from taas_magic.host.spec import HostSpec
from taas_magic.host.system import LOOPBACK
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import Event, Failure, RunEnded
from taas_magic.plan import Flags, make_plan, new_run_id
from taas_magic.pool.client import Pool, Wait

DASK_SETTINGS = {
    "distributed.admin.low-level-log-length": 1,
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
    """Keep a farm until standard input closes; returns the process's exit code.

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
    async with FarmCluster(fleet, keys) as cluster:
        fleet.tell = lambda news: loop.call_soon_threadsafe(
            cluster.scheduler.log_event, TOPIC, msgspec.to_builtins(news)
        )
        fleet.listen = lambda host: asyncio.run_coroutine_threadsafe(
            _listen(cluster.scheduler, host), loop
        ).result()
        fleet.drop = lambda name: asyncio.run_coroutine_threadsafe(cluster.scale_down([name]), loop)
        cluster.scheduler.add_plugin(_Nodes(fleet, cluster.scheduler))
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
        _at_end_of_input(lambda: loop.call_soon_threadsafe(over.set))
        await over.wait()
        fleet.leaves(list(cluster.worker_spec))
    await asyncio.to_thread(fleet.close)


async def _listen(scheduler: Scheduler, host: str) -> str:
    """Have the scheduler listen on one more address of this machine; returns it with the port."""
    await scheduler.listen(
        f"tls://{host}:0",
        allow_offload=False,
        handshake_overrides={"pickle-protocol": 4, "compression": None},  # as Dask's own ports
        **scheduler.security.get_listen_args("scheduler"),
    )
    return str(scheduler.listeners[-1].contact_address)


def _at_end_of_input(act: Any) -> None:
    def listen() -> None:
        sys.stdin.read()
        act()

    threading.Thread(target=listen, name="taas-lease", daemon=True).start()


class _Keys:
    """Certificates of one farm: each part of it trusts those that were signed for it, no others."""

    def __init__(self) -> None:
        self._authority = certificate.Authority("taas-magic farm")

    def of(self, role: str, name: str = "") -> dict[str, str | bool]:
        """Keyword arguments of dask's `Security` for `scheduler`, `client` or `worker`."""
        kind = PeerRole.KERNEL if role == "client" else PeerRole.HOST
        identity = Peer(kind, name or role).identity
        shown, key = self._authority.issue(role, identity, serves=role == "scheduler")
        pair = {f"tls_{role}_cert": shown, f"tls_{role}_key": key}
        return {"require_encryption": True, "tls_ca_file": self._authority.certificate, **pair}


class FarmScheduler(PartsScheduler):
    """The farm's Dask scheduler.

    Args:
        fleet: Starts and ends its nodes.
    """

    def __init__(self, *args: Any, fleet: "Fleet", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fleet = fleet

    def subscribe_topic(self, topic: str, client: str) -> None:
        """Called by Dask; nodes may have come before a kernel that is slow listens."""
        super().subscribe_topic(topic, client)
        for news in list(self._fleet.told) if topic == TOPIC else ():
            self.log_event(TOPIC, msgspec.to_builtins(news))


class FarmCluster(SpecCluster):
    """Nodes as Dask's cluster of them.

    Args:
        fleet: Starts and ends them.
        keys: The farm's.
    """

    def __init__(self, fleet: "Fleet", keys: _Keys) -> None:
        secure = {
            **keys.of("scheduler"),
            **keys.of("client"),
            "tls_ca_file": keys.of("client")["tls_ca_file"],
        }
        self._numbers = itertools.count()
        options = {"host": LOOPBACK, "protocol": "tls://", "security": Security(**secure)}
        super().__init__(
            scheduler={"cls": FarmScheduler, "options": {"fleet": fleet, **options}},
            worker={"cls": Node, "options": {"fleet": fleet}},
            security=Security(**secure),
            asynchronous=True,
            name="taas-farm",
        )

    def new_worker_spec(self) -> dict[str, Any]:
        """See Dask, which would give the name of a node that has ended to the next one."""
        return {f"node-{next(self._numbers)}": self.new_spec}


class JobsAdaptive(Adaptive):
    """As many nodes as have a slot for each job; a node that works stays.

    Args:
        fleet: Starts and ends them.
    """

    def __init__(self, *args: Any, fleet: "Fleet", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fleet = fleet

    async def target(self) -> int:
        """How many nodes there should be."""
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
    """A node as Dask's cluster sees it.

    Args:
        scheduler: The scheduler's address; Dask gives it.
        fleet: Starts and ends it.
        name: Its name.
    """

    def __init__(self, scheduler: str, fleet: "Fleet", name: str) -> None:
        super().__init__(scheduler=scheduler, name=name)
        self._fleet, self._name, self._joins = fleet, str(name), scheduler
        self._coming: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._coming = asyncio.create_task(self._come())
        await super().start()

    async def _come(self) -> None:
        await asyncio.to_thread(self._fleet.start, self._name, self._joins)
        await asyncio.sleep(self._fleet.start_s)
        self._fleet.overdue(self._name)

    async def close(self) -> None:
        if self._coming is not None:
            self._coming.cancel()
        await asyncio.to_thread(self._fleet.end, self._name)
        await super().close()


class _Nodes(SchedulerPlugin):
    """Tells the kernel which nodes come and go."""

    name = "taas-nodes"

    def __init__(self, fleet: "Fleet", scheduler: FarmScheduler) -> None:
        self._fleet, self._scheduler = fleet, scheduler
        self._names: dict[str, str] = {}

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Called by Dask."""
        name = self._names[worker] = str(scheduler.workers[worker].name)
        self._fleet.joined(name)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Called by Dask, before the jobs of the node are done elsewhere."""
        self._fleet.gone(self._names.pop(worker))

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Called by Dask with each change of a job."""
        if finish == "forgotten":
            self._scheduler.forget(key)


def _place(name: str) -> str:
    """An address that no other node of the farm has, by which Dask knows it."""
    number = int(name.rpartition("-")[2])
    return f"tls://127.1.{number // 256 % 256}.{number % 256}:1"


def _why(ended: RunEnded) -> str:
    first = ended.first or Failure()
    said = str(ended.why or first.message or ended.state)
    return f"{said} ({first.log_path})" if first.log_path else said


class Fleet:
    """The runs that are nodes.

    Args:
        terms: What the kernel said.
        keys: The farm's.
    """

    def __init__(self, terms: FarmTerms, keys: _Keys) -> None:
        self._terms, self._keys = terms, keys
        config, project = load_config(Path.cwd()), Path.cwd()
        self._pools = [Pool(config.pool(name), project) for name in terms.pools]
        self._lock = threading.Lock()
        self._runs: dict[str, tuple[Pool, str]] = {}
        self._waits: dict[str, tuple[Pool, Wait]] = {}
        self._heard: dict[str, str] = {}
        self._ended: set[str] = set()
        self._joined: set[str] = set()
        self._leaving: set[str] = set()
        self._failed, self._why = 0, ""
        self._failures: Counter[str] = Counter()
        self.told: list[NodeNews] = []
        self.start_s = terms.start_s
        self.listen: Callable[[str], str] = lambda host: ""
        self.tell: Callable[[NodeNews], object] = lambda news: None
        self.drop: Callable[[str], Any] = lambda name: None
        self.slots = min(self._slots(pool) for pool in self._pools)

    def _slots(self, pool: Pool) -> int:
        """Jobs that a host of a pool runs at a time."""
        offers, terms = pool.capacity(), self._terms
        by_cores = max(1, offers.cores // terms.cpus)
        return min(by_cores, offers.gpus // terms.gpus) if terms.gpus else by_cores

    def start(self, name: str, scheduler: str) -> None:
        """Start a node; blocks until its run has begun, in a thread."""
        with self._lock:
            if name in self._ended:  # Dask would have a node again that was lost: others come
                self.drop(name)
                return
            if self._failed >= FAILED_STARTS:
                why = f"{FAILED_STARTS} nodes did not start, no more are: {self._why}"
                self.said(name, "given up", why)
                return
            pool = self._choose()
            self._runs[name] = pool, ""
            _, wait = self._waits[name] = pool, Wait()
            hosts = min(self._count(pool), pool.config.max_hosts)
        try:
            self.said(name, "asked for")
            pool.open(hosts, wait=wait)
            with self._lock:  # one after the other, each on the host that then runs least
                if self._waits.pop(name, None) is not None:
                    self._launch(name, pool, scheduler)
        except Exception as error:  # of whatever kind: nobody waits for this thread
            self._waits.pop(name, None)
            self._lost(name, str(error) or repr(error))

    def _choose(self) -> Pool:
        """A pool that has a host without a node: the first of those that failed least of late."""
        room = [pool for pool in self._pools if self._count(pool) < pool.config.max_hosts]
        return min(room or self._pools, key=lambda pool: self._failures[pool.name])

    def _count(self, pool: Pool) -> int:
        return sum(one is pool for one, _ in self._runs.values())

    def _launch(self, name: str, pool: Pool, scheduler: str) -> None:
        spec = self._spec(name, pool, self._reach(pool, scheduler))
        run_id = spec.plan.run_id
        self._runs[name] = pool, run_id

        def hear(event: Event) -> None:
            if isinstance(event, RunEnded):
                self._lost(name, _why(event))
                self._runs.pop(name, None)

        with spec.folder.held():
            hosts = pool.launch(spec, hear, [])
        self.said(name, "starting", host=hosts[0])

    def _reach(self, pool: Pool, scheduler: str) -> str:
        """The scheduler's address for a pool: on the address at which its hosts reach the pool."""
        host = get_address_host(pool.address)
        if host == get_address_host(scheduler):
            return scheduler
        if host not in self._heard:
            self._heard[host] = self.listen(host)
        return self._heard[host]

    def _spec(self, name: str, pool: Pool, scheduler: str) -> HostSpec:
        """A run of one rank that keeps a node, its folder written."""
        terms, config = self._terms, pool.config
        flags = Flags(gpus=1, pool=pool.name, name=f"{terms.name} {name}", hang_s=0)
        plan = make_plan(flags, pool.capacity(), new_run_id(), config.max_hosts, terms.store)
        plan = structs.replace(plan, hang_s=0, notes=())
        node = NodeTerms(
            name=name,
            place=_place(name),
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
        if name in self._leaving:
            return
        self.said(name, "lost", why)
        if name in self._ended:
            return
        self._ended.add(name)
        if name not in self._joined:
            self._failed, self._why = self._failed + 1, why
            if name in self._runs:
                self._failures[self._runs[name][0].name] += 1
        self.drop(name)

    def overdue(self, name: str) -> None:
        """Give up a node whose run goes on, but that takes no jobs yet."""
        if name in self._runs and name not in self._joined:
            self._lost(name, f"it did not come within {self.start_s:g} s")

    def joined(self, name: str) -> None:
        """A node takes jobs."""
        self._joined.add(name)
        self._failed = 0
        if name in self._runs:
            self._failures[self._runs[name][0].name] = 0
        self.said(name, "here")

    def gone(self, name: str) -> None:
        """A node takes no jobs any more; why may be heard later."""
        if name not in self._leaving and name not in self._ended:
            self.said(name, "lost", "its process ended, or its connection broke")

    def leaves(self, names: Iterable[str]) -> None:
        """Nodes are going to be ended because nobody needs them."""
        self._leaving.update(map(str, names))

    def end(self, name: str) -> None:
        """End a node, or what there is of one that was lost; blocks until its pool was told."""
        with self._lock:
            self._ended.add(name)
            known = self._runs.pop(name, None)
            waiting = self._waits.pop(name, None)
        self.drop(name)
        if name in self._leaving:
            self.said(name, "left")
        with contextlib.suppress(TaasError, OSError):  # the pool is gone, and the run with it
            if waiting is not None:
                waiting[0].give_up(waiting[1])
            elif known is not None and known[1]:
                pool, run_id = known
                pool.halt(run_id, "interrupt")
                pool.forget(run_id)

    def said(self, name: str, state: str, why: str = "", host: str = "") -> None:
        """Tell the kernel how a node stands."""
        news = NodeNews(name, state, why, host)
        self.told.append(news)
        self.tell(news)

    def close(self) -> None:
        """Leave the pools."""
        for pool in self._pools:
            pool.close()
