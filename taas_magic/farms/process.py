"""The farm's process: a Dask scheduler for jobs, with a manager that starts and ends nodes.

The kernel starts this process. When the kernel closes the standard input of this process, the farm
ends. Each node is a run of one rank in a pool. The pool handles the host, lease, processes and
journal of this run as for any run. The pool has its own Dask scheduler, which never receives jobs.
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
from taas_magic.capture.work import FunctionWork
from taas_magic.config import load_config
from taas_magic.engines.keys import Keys
from taas_magic.errors import TaasError
from taas_magic.farms.messages import (
    DROP_PART,
    GET_PART,
    LOST_NODES,
    PUT_PART,
    TOPIC,
    FarmAddress,
    FarmSettings,
    JobUpdate,
    NodeSettings,
    NodeUpdate,
)
from taas_magic.farms.node import run_node
from taas_magic.host.spec import RunSpec
from taas_magic.host.system import CALM_DASK, LOOPBACK
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import Event, Failure, RunEnded
from taas_magic.plan import Flags, make_plan, new_run_id
from taas_magic.pool.client import Pool, PoolConnection, PoolWait

DASK_SETTINGS = {
    **CALM_DASK,
    "distributed.admin.low-level-log-length": 0,  # this log would keep results in memory
    "distributed.admin.max-error-length": 1 << 20,
    "distributed.scheduler.allowed-failures": LOST_NODES,
    "distributed.scheduler.worker-saturation": 1.0,  # jobs wait in the scheduler for any free node
}

INTERVAL_S = 0.5
"""Seconds between two checks whether the farm needs more or fewer nodes."""

IDLE_CHECKS = 20
"""Number of checks in a row that must find too many nodes before the farm ends a node."""

LOST_RUN_END_S = 2.0
"""Seconds that the farm waits for the run of a lost node to end by itself.

The wait is useful because the last event of the run has the reason for the loss. After the wait,
the farm ends the run.
"""

FAILED_STARTS = 3
"""Number of failed starts of nodes in a row after which the farm starts no more nodes."""


def main() -> int:
    """Run a farm until the kernel writes a second line to standard input or closes standard input.

    The first line of standard input is a `FarmSettings` as JSON. When the scheduler listens, the
    process writes a `FarmAddress` as JSON to standard output.

    Returns:
        The exit code of the process: 0.
    """
    settings = messages.from_json(sys.stdin.buffer.readline(), FarmSettings)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("distributed").setLevel(logging.WARNING)
    dask.config.set(DASK_SETTINGS)
    asyncio.run(_run_farm(settings))
    return 0


async def _run_farm(settings: FarmSettings) -> None:
    """Run the farm's Dask scheduler and its nodes until standard input has a line or is closed.

    Create keys, listen on the loopback interface, and write the `FarmAddress` to standard output. A
    thread waits for the line on standard input, and then stops `NodeManager.maintain`. At the end,
    close the `NodeManager`.
    """
    from taas_magic.host.agent_worker import use_steady_clock

    use_steady_clock()
    keys, loop = Keys(), asyncio.get_running_loop()
    secure = Security(**keys.scheduler())
    async with FarmScheduler(host=LOOPBACK, protocol="tls://", security=secure) as scheduler:
        nodes = NodeManager(settings, keys, scheduler)
        scheduler.add_plugin(nodes)
        keeping = asyncio.ensure_future(nodes.maintain())

        def wait_for_end() -> None:
            sys.stdin.readline()
            loop.call_soon_threadsafe(keeping.cancel)

        address = FarmAddress(scheduler.address, keys.kernel(), nodes.slots)
        sys.stdout.write(messages.to_json(address).decode() + "\n")
        sys.stdout.flush()
        threading.Thread(target=wait_for_end, name="taas-lease", daemon=True).start()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        await nodes.close()


class FarmScheduler(Scheduler):
    """The farm's Dask scheduler, with a store of large arguments and payloads for the nodes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._sent_updates: list[dict[str, Any]] = []
        self._stored_parts: dict[str, Any] = {}
        self.handlers |= {
            PUT_PART: self._store_part,
            GET_PART: self._get_part,
            DROP_PART: self._drop_part,
        }

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Start no web server, because Dask's web pages require no key. Called by Dask."""

    def publish_state(self, update: NodeUpdate) -> None:
        """Send a change of a node's state to the kernel, and store the message.

        If the kernel subscribes only after this message, `subscribe_topic` sends the message again.
        """
        self._sent_updates.append(message := msgspec.to_builtins(update))
        self.log_event(TOPIC, message)

    def subscribe_topic(self, topic: str, client: str) -> None:
        """Subscribe the kernel to a topic. For `TOPIC`, also send all earlier node updates.

        Called by Dask.
        """
        super().subscribe_topic(topic, client)
        for message in list(self._sent_updates) if topic == TOPIC else ():
            self.log_event(TOPIC, message)

    def _store_part(self, name: str, data: Any) -> None:
        self._stored_parts[name] = data

    def _get_part(self, name: str) -> Any:
        return self._stored_parts[name]

    def _drop_part(self, name: str) -> None:
        self._stored_parts.pop(name, None)
        dropped = [{"op": DROP_PART, "name": name}]
        self.send_all({}, dict.fromkeys(self.workers, dropped))


@dataclass
class _NodeRun:
    """The record of a node and its run in a pool. The record remains when the node has ended.

    Attributes:
        state: "coming" at first; "ready" when the node accepts jobs. At the end, "left" if the farm
            ended the node, else "lost". Always "given up" if the farm does not start the node.
        pool: The pool that provides the node's host; None until the farm has chosen a pool.
        connection: The connection to the pool's process by which the farm launched the node's run;
            None before the launch.
        run_id: Id of the node's run; "" before the launch.
        wait: The node's pending wait for a host; None if the node does not wait for a host.
    """

    state: str = "coming"
    pool: Pool | None = None
    connection: PoolConnection | None = None
    run_id: str = ""
    wait: PoolWait | None = None


class NodeManager(SchedulerPlugin):
    """Dask scheduler plugin that starts and ends nodes, as the jobs need them.

    The states of nodes change only on the scheduler's event loop. Calls that wait for a pool run in
    threads.

    Attributes:
        slots: Number of jobs that the smallest node runs at a time. The farm plans the number of
            nodes with this value.
    """

    name = "taas-nodes"

    def __init__(self, settings: FarmSettings, keys: Keys, scheduler: FarmScheduler) -> None:
        self._settings, self._keys, self._scheduler = settings, keys, scheduler
        self._loop = asyncio.get_running_loop()
        config, project = load_config(Path.cwd()), Path.cwd()
        self._pools = [Pool(config.pool(name), project) for name in settings.pools]
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(4 * settings.most + 4)
        self._numbers = itertools.count()
        self._nodes: dict[str, _NodeRun] = {}
        self._name_by_address: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._failed_starts, self._why_failed = 0, ""
        self._failures: Counter[str] = Counter()
        self.slots = min(self._slots_on(pool) for pool in self._pools)

    def _slots_on(self, pool: Pool) -> int:
        offers, settings = pool.capacity(), self._settings
        by_cores = max(1, offers.cores // settings.cpus)
        return min(by_cores, offers.gpus // settings.gpus) if settings.gpus else by_cores

    async def maintain(self) -> None:
        """Start nodes that the jobs need, and end nodes that no job needs.

        Every `INTERVAL_S`, compare the number of nodes with `_needed_nodes`, and start missing
        nodes in threads. But if the last `FAILED_STARTS` nodes did not start, start no nodes. If
        then no node is left, give up. End unneeded nodes only if `IDLE_CHECKS` checks in a row have
        found too many nodes. This coroutine runs until its task is cancelled.
        """
        idle_checks = 0
        while True:
            active = self._active_nodes()
            spare = len(active) - self._needed_nodes()
            if self._failed_starts < FAILED_STARTS:
                for _ in range(-spare):
                    self._threads.submit(self._start_node, self._add_node("coming"))
            elif spare < 0 and not active:
                self._give_up()
            idle_checks = idle_checks + 1 if spare > 0 else 0
            if idle_checks >= IDLE_CHECKS:
                idle_checks = 0
                await self._end_unneeded_nodes(spare)
            await asyncio.sleep(INTERVAL_S)

    def _add_node(self, state: str) -> str:
        """Add the record of a new node in this state, and return the node's name."""
        name = f"node-{next(self._numbers)}"
        self._nodes[name] = _NodeRun(state)
        return name

    def _give_up(self) -> None:
        """Report once that the farm starts no more nodes. The kernel then ends all jobs."""
        if not self._active_nodes(["given up"]):
            why = (
                f"{FAILED_STARTS} nodes did not start, so no more are requested: {self._why_failed}"
            )
            self._report_node_state(self._add_node("given up"), "given up", why)

    def _active_nodes(self, states: Collection[str] = ("coming", "ready")) -> list[str]:
        return [name for name, node in list(self._nodes.items()) if node.state in states]

    def _needed_nodes(self) -> int:
        """Return the number of nodes that the farm should have now.

        The number is large enough to run all unfinished jobs at the same time. It is at least the
        number of nodes that run a job now, so that the farm ends no such node. But the result is
        always within the farm's limits (`least` to `most`).
        """
        waiting = ("queued", "no-worker", "processing", "waiting")
        jobs = sum(task.state in waiting for task in self._scheduler.tasks.values())
        busy = sum(bool(worker.processing) for worker in self._scheduler.workers.values())
        wanted = max(busy, math.ceil(jobs / self.slots), self._settings.least)
        return min(wanted, self._settings.most)

    async def _end_unneeded_nodes(self, count: int) -> None:
        """End at most `count` nodes that no job needs, so that their pools can use the hosts.

        A job needs its node until the kernel has its outcome: otherwise, Dask would run it again.
        First end nodes that have not joined yet, then idle nodes. Also remove an idle node from
        Dask's scheduler, so that Dask gives no job to this node before it ends.
        """
        ready, workers = self._active_nodes(["ready"]), self._scheduler.workers
        addresses = {
            name: address for address, name in self._name_by_address.items() if name in ready
        }
        idle = [
            name
            for name, address in addresses.items()
            if not (workers[address].processing or workers[address].has_what)
        ]
        for name in [*self._active_nodes(["coming"]), *idle][:count]:
            self._end_node(name)
            if name in idle:  # so that Dask gives no job to the node meanwhile
                await self._scheduler.remove_worker(addresses[name], stimulus_id=self.name)

    def _end_node(self, name: str) -> None:
        """Record and report the state "left" of a node, and end the node's run in a thread."""
        self._nodes[name].state = "left"
        self._report_node_state(name, "left")
        self._threads.submit(self._end_run, name)

    def _start_node(self, name: str) -> None:
        """Choose a pool for a node, wait for a host, and launch the node's run. Runs in a thread.

        Choose the pool with the fewest failures since its last successful start. If some pools have
        a free host, choose only among these pools. Report the node as "requested" before the wait.
        There are two exceptions:

        - If the farm has ended the node meanwhile, do not launch the node's run.
        - If the pool cannot get a host, or the launch fails, record the node as lost.
        """
        node = self._nodes[name]
        with self._lock:
            if node.state != "coming":
                return
            free_pools = [
                pool for pool in self._pools if self._count_nodes(pool) < pool.config.max_hosts
            ]
            pool = min(free_pools or self._pools, key=lambda pool: self._failures[pool.name])
            node.pool, node.wait = pool, PoolWait(pool)
            wait, hosts = node.wait, min(self._count_nodes(pool), pool.config.max_hosts)
        try:
            self._report_node_state(name, "requested")
            connection = pool.open(hosts, wait=wait)
            with self._lock:  # one launch at a time, so that each node gets the least loaded host
                if node.wait is None:
                    return
                node.wait = None
                self._launch(name, pool, connection)
        except Exception as error:  # of any kind, because no caller waits for this thread
            node.wait = None
            self._call_on_loop(self._record_lost_node, name, str(error) or repr(error))

    def _count_nodes(self, pool: Pool) -> int:
        return sum(self._nodes[name].pool is pool for name in self._active_nodes())

    def _launch(self, name: str, pool: Pool, connection: PoolConnection) -> None:
        """Launch a node's run in the pool's process, without waiting for the run's end.

        Write the run folder, and report the node as starting on its host. When the run ends later,
        the node is recorded as lost, unless the farm has ended the node.
        """
        spec = self._make_spec(name, pool, self._scheduler_address(connection))
        node = self._nodes[name]
        node.connection, node.run_id = connection, spec.plan.run_id

        def on_event(event: Event) -> None:
            if isinstance(event, RunEnded):
                first = event.first or Failure()
                why = str(event.why or first.message or event.state)
                why = f"{why} ({first.log_path})" if first.log_path else why
                self._call_on_loop(self._record_lost_node, name, why)

        with spec.folder.lock_for_launch():
            hosts = connection.launch(spec, on_event, [])
        self._report_node_state(name, "starting", host=hosts[0])

    def _scheduler_address(self, connection: PoolConnection) -> str:
        """Return the address at which the hosts of a pool can connect to the farm's scheduler.

        The hosts can reach the IP address on which the pool's process listens. If the farm's
        scheduler does not listen on this address yet, make it listen there.
        """
        host = get_address_host(connection.address)
        if host == get_address_host(self._scheduler.address):
            return str(self._scheduler.address)
        if host not in self._addresses:
            listening = asyncio.run_coroutine_threadsafe(self._listen_on(host), self._loop)
            self._addresses[host] = listening.result()
        return self._addresses[host]

    async def _listen_on(self, host: str) -> str:
        """Make the farm's scheduler also listen on the IP address `host`, on a free port.

        Returns:
            The address with the port, as "tls://host:port".
        """
        scheduler = self._scheduler
        await scheduler.listen(
            f"tls://{host}:0",
            allow_offload=False,
            handshake_overrides={"pickle-protocol": 4, "compression": None},  # as Dask's own ports
            **scheduler.security.get_listen_args("scheduler"),
        )
        return str(scheduler.listeners[-1].contact_address)

    def _make_spec(self, name: str, pool: Pool, scheduler: str) -> RunSpec:
        """Write the run folder for a node's run; return the description of the run.

        The run has one rank, which calls `node.run_node` with the node's settings, such as its own
        key and address. The run only reads the project store, has no limit for hangs, and needs a
        tunnel to the farm's scheduler.

        Args:
            name: Name of the node.
            scheduler: Address at which the pool's hosts can reach the farm's scheduler.
        """
        settings, config = self._settings, pool.config
        flags = Flags(gpus=1, pool=pool.name, name=f"{settings.name} {name}", hang_s=0)
        plan = make_plan(flags, pool.capacity(), new_run_id(), config.max_hosts, settings.store)
        plan = structs.replace(plan, hang_s=0, notes=())
        number = int(name.rpartition("-")[2])
        node = NodeSettings(
            name=name,
            unique_address=f"tls://127.1.{number // 256 % 256}.{number % 256}:1",
            security=self._keys.host(name),
            slots=self._slots_on(pool),
            gpus=settings.gpus,
            cpus=settings.cpus,
            store=settings.store,
            start_timeout_s=config.start_timeout_s,
        )
        work = FunctionWork(run_node, (node,), raw=f"node {name}")
        captured = payload.capture(
            work,
            {},
            project=Path.cwd(),
            limit_bytes=1 << 20,
            source_of=lambda filename: None,
        )
        folder = RunFolder.create(plan.run_id, plan, work.raw)
        payload.write(captured, folder.payload)
        return RunSpec.for_pool(
            config.engine, plan, folder, settings.origin, reach=scheduler, reads_only=True
        )

    def _record_lost_node(self, name: str, why: str) -> None:
        """Record and report that a node is lost, because it ended by itself or did not start.

        - If the farm itself has ended the node, do nothing.
        - If the node is already recorded as lost, only report the new reason.
        - If the node has accepted jobs, end the node's run `LOST_RUN_END_S` later.
        - If the node has never accepted jobs, end the node's run at once. Count a failed start for
          the farm, and for the pool if the farm has chosen a pool.

        A thread ends the run, so this method does not wait.

        Args:
            why: The reason, for the user.
        """
        node = self._nodes[name]
        if node.state == "left":
            return
        self._report_node_state(name, "lost", why)
        if node.state == "coming":
            self._failed_starts, self._why_failed = self._failed_starts + 1, why
            if node.pool is not None:
                self._failures[node.pool.name] += 1
        if node.state != "lost":
            self._threads.submit(
                self._end_run, name, LOST_RUN_END_S if node.state == "ready" else 0.0
            )
            node.state = "lost"

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Record and report that a node accepts jobs. Called by Dask when the node has joined.

        Set two counts of failed starts to 0: the farm's count, and the count of the node's pool. If
        the farm has ended the node meanwhile, only record the node's address.
        """
        name = self._name_by_address[worker] = str(scheduler.workers[worker].name)
        node = self._nodes[name]
        if node.state == "coming":
            node.state, self._failed_starts = "ready", 0
            if node.pool is not None:
                self._failures[node.pool.name] = 0
            self._report_node_state(name, "ready")

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Record a node as lost when its Dask worker has left. Called by Dask.

        If the farm has ended the node itself, do nothing. The last event of the node's run, which
        arrives later, has the reason for the loss.
        """
        name = self._name_by_address.pop(worker)
        if self._nodes[name].state == "ready":
            self._record_lost_node(name, "its process ended, or its connection broke")

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """If a job has failed and Dask will not retry it, report the failure to the kernel.

        Dask calls this method when the state of a job's task changes.

        Args:
            key: Name of the job.
            finish: Dask's new state of the task.
        """
        if finish == "erred":
            self._scheduler.log_event(TOPIC, msgspec.to_builtins(JobUpdate(key, "", "erred")))

    def _end_run(self, name: str, wait_s: float = 0.0) -> None:
        """Cancel a node's wait for a host, and interrupt the node's run. Blocks.

        Before the interrupt, stop receiving events of the run. A missing wait or a missing run is
        not an error. Ignore errors of the interrupt, because the pool's process may have ended.

        Args:
            wait_s: Seconds to wait first. In this time, the run may end by itself and send its last
                event.
        """
        time.sleep(wait_s)
        node = self._nodes[name]
        with self._lock:
            wait, node.wait = node.wait, None
        if wait is not None:
            wait.cancel()
        if node.connection is not None:
            with contextlib.suppress(TaasError):  # the pool's process may have ended, with the run
                node.connection.stop_events(node.run_id)
                node.connection.halt(node.run_id, "interrupt")

    def _call_on_loop(self, call: Callable[..., object], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(call, *arguments)

    def _report_node_state(self, name: str, state: str, why: str = "", host: str = "") -> None:
        self._call_on_loop(self._scheduler.publish_state, NodeUpdate(name, state, why, host))

    async def close(self) -> None:
        """End the runs of all nodes, wait for this object's threads, and disconnect from the pools.

        This method does not wait until the nodes have ended.
        """
        for name in self._active_nodes():
            self._end_node(name)
        await asyncio.to_thread(self._threads.shutdown)
        for pool in self._pools:
            await asyncio.to_thread(pool.close)
