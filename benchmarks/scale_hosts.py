"""Measure the work of the pool's process for a run on many hosts, with simulated agents.

The scheduler, the controller, its journal, TLS and the kernel's Dask client are real. A simulated
agent is only a connection, which sends the events of eight ranks. Everything runs in one process.
So a figure is the sum over the pool's process, the kernel, and the agents' ends of the connections.
"""

import asyncio
import contextlib
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dask
import psutil
from distributed import Client, Security
from distributed.batched import BatchedSend
from distributed.comm import CommClosedError, connect
from scale_view import LINES, host_of, plan_of

from taas_magic.config import PoolConfig
from taas_magic.engines.base import Engine
from taas_magic.engines.keys import Keys
from taas_magic.host import spec as words
from taas_magic.host.spec import Origin, RunSpec
from taas_magic.journal.folder import RunFolder
from taas_magic.leases import BEATS_PER_LEASE
from taas_magic.messages import (
    Event,
    HostEnded,
    HostHello,
    Lines,
    RanksEnded,
    RanksStarted,
    RunEnded,
    decode_event,
    encode,
    from_bytes,
    send_request,
    to_bytes,
)
from taas_magic.plan import HostCapacity, Plan
from taas_magic.pool.controller import Controller
from taas_magic.pool.gate import PoolScheduler
from taas_magic.pool.process import DASK_SETTINGS

LEASE_S = 8.0
"""Lease in seconds that determines how often the agents send beats."""

PATIENT_S = 600.0
"""Lease in seconds that the pool enforces.

It is long, because one process does the work of all agents and may be late.
"""

JOINING = 32
"""Number of hosts that join at the same time."""

QUIET_S = 4.0
"""Seconds for which the beats are measured."""

_METRICS = {"bandwidth": {"total": 1, "workers": {}, "types": {}}, "cpu": 0, "memory": 0}
_METRICS |= {"time": 0, "host_net_io": {}, "event_loop_interval": 0, "task_counts": {}}
_METRICS |= {"managed_bytes": 0, "spilled_bytes": {"memory": 0, "disk": 0}, "transfer": {}}
_METRICS |= {"digests_total_since_heartbeat": {}}


class Figures(NamedTuple):
    """Costs of a run. Times are CPU times, except `late_ms`.

    Attributes:
        join_ms: Milliseconds per host for joining, including the TLS handshake.
        launch_us: Microseconds per rank, from the launch to the start of the last rank.
        line_us: Microseconds per line, from its host to the kernel's callback and the journal.
        late_ms: Milliseconds from the sending of the last line to its arrival in the kernel.
        end_us: Microseconds per rank, from the end of the ranks to the end of the run.
        beat_percent: CPU usage by the beats of a quiet run, in percent of a core.
        rank_kib: Memory per rank, in KiB.
    """

    join_ms: float
    launch_us: float
    line_us: float
    late_ms: float
    end_us: float
    beat_percent: float
    rank_kib: float


class Agent:
    """Simulated agent.

    Hosts join in any order. So the agent learns the numbers of its ranks only from the request to
    start these ranks.
    """

    def __init__(self, number: int, name: str, keys: Keys) -> None:
        self.name, self._number = name, number
        self._ranks = range(0)
        self._security = Security(**keys.host(str(number)))
        self._stream = BatchedSend(interval="2ms")
        self._run_id = ""
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self, address: str) -> None:
        """Register at the scheduler as a worker, and start to send beats and to answer calls."""
        self._comm = await connect(address, **self._security.get_connection_args("worker"))
        high, low = divmod(self._number, 250)
        await self._comm.write(
            {
                "op": "register-worker",
                "reply": False,
                "address": f"tls://10.1.{high}.{low + 1}:1000",
                "resolve_address": False,
                "status": "running",
                "nthreads": 1,
                "name": self._number,
                "now": time.time(),
                "resources": {},
                "memory_limit": 0,
                "local_directory": "",
                "services": {},
                "nanny": None,
                "pid": 1,
                "versions": {},
                "metrics": _METRICS,
                "extra": {words.AGENT: True},
                "stimulus_id": "join",
                "server_id": f"agent-{self._number}",
            }
        )
        await self._comm.read()
        self._stream.start(self._comm)
        self._tasks = [
            asyncio.create_task(self._receive_calls()),
            asyncio.create_task(self._beat()),
        ]

    def send_events(self, events: list[Event]) -> None:
        for said in events:
            message = {"op": words.EVENT, "run_id": self._run_id, "event": encode(said)}
            self._stream.send(message)

    def lines(self, i: int) -> None:
        """Send one line for each rank; no two lines are the same."""
        text = f"of step {i}: loss 0.12345"
        self.send_events(
            [Lines(host=self.name, rank=r, lines=[f"{r} {text}"]) for r in self._ranks]
        )

    def report_success(self) -> None:
        self.send_events([RanksEnded(host=self.name, state="SUCCEEDED")])

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._stream.abort()
        self._comm.abort()

    async def _beat(self) -> None:
        number = 0
        with contextlib.suppress(CommClosedError):
            while True:
                number += 1
                self._stream.send({"op": words.BEAT, "beat": number})
                await asyncio.sleep(LEASE_S / BEATS_PER_LEASE)

    async def _receive_calls(self) -> None:
        with contextlib.suppress(CommClosedError):
            while True:
                for message in await self._comm.read():
                    if message["op"] == words.CALL:
                        self._answer(message)

    def _answer(self, call: dict[str, Any]) -> None:
        """Answer a call of the controller, and send the event that it causes, if any.

        At the start of the ranks, learn the run's id and the ranks' numbers.
        """
        said: object = None
        match call["name"]:
            case "taas_DescribeHost":
                said = HostHello(host=self.name, address="10.1.0.1", protection="mount", gpus=8)
            case "taas_StartShare":
                spec = from_bytes(call["request"], words.StartShare).spec
                self._run_id = spec.plan.run_id
                self._ranks = spec.ranks
                said = 1000
        answer = {"op": words.ANSWER, "id": call["id"], "answer": to_bytes(said), "error": ""}
        self._stream.send(answer)
        match call["name"]:
            case "taas_StartShare":
                pids = {rank: 1000 + rank for rank in self._ranks}
                self.send_events([RanksStarted(host=self.name, pids=pids)])
            case "taas_EndRun":
                self.send_events([HostEnded(host=self.name, state="SUCCEEDED")])


class Kernel:
    """Stand-in for a kernel that counts the received events by their type."""

    def __init__(self) -> None:
        self.counts: dict[type[Event], int] = {}
        self._changed = asyncio.Condition()

    async def take(self, pair: tuple[float, tuple[str, bytes]]) -> None:
        kind = type(decode_event(pair[1][1]))
        self.counts[kind] = self.counts.get(kind, 0) + 1
        async with self._changed:
            self._changed.notify_all()

    async def wait_for(self, kind: type[Event], count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.counts.get(kind, 0) >= count)


def measure(world_size: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TAAS_STATE_DIR"] = folder
        return asyncio.run(_measure(world_size, Path(folder)))


async def _measure(world_size: int, folder: Path) -> Figures:
    """Run all phases of a run with simulated agents, and return the costs of each phase.

    The agents join, the run is launched, ranks print lines, nothing happens for `QUIET_S` seconds,
    and the run ends.
    """
    logging.getLogger("distributed").setLevel(logging.WARNING)
    plan = plan_of(world_size)
    memory = psutil.Process().memory_info
    before = memory().rss
    async with _pool() as (address, keys, controller), _client(address, keys) as client:
        agents = [Agent(h.host_rank, host_of(h.first_rank), keys) for h in plan.hosts]
        kernel = Kernel()
        client.subscribe_topic(words.topic(client.id), kernel.take)
        join_s = await _cpu(_join(agents, address, controller))
        launch_s = await _cpu(_launch(plan, folder, client, kernel, len(agents)))
        late: list[float] = []
        lines_s = await _cpu(_print(agents, kernel, LINES * world_size, late))
        beats_s = await _cpu(asyncio.sleep(QUIET_S))
        grown = memory().rss - before
        end_s = await _cpu(_end(agents, kernel))
        for agent in agents:
            await agent.leave()
    return Figures(
        join_s / len(agents) * 1e3,
        launch_s / world_size * 1e6,
        lines_s / (LINES * world_size) * 1e6,
        late[0] * 1e3,
        end_s / world_size * 1e6,
        beats_s / QUIET_S * 100,
        grown / 1024 / world_size,
    )


async def _cpu(work: Awaitable[None]) -> float:
    """Await `work`, and return the CPU seconds that this process used meanwhile."""
    began = time.process_time()
    await work
    return time.process_time() - began


async def _join(agents: Sequence[Agent], address: str, controller: Controller) -> None:
    for start in range(0, len(agents), JOINING):
        await asyncio.gather(*(agent.join(address) for agent in agents[start : start + JOINING]))
    await controller.pool_hosts.acquire(len(agents))


async def _launch(plan: Plan, folder: Path, client: Client, kernel: Kernel, hosts: int) -> None:
    run = RunFolder.create(plan.run_id, plan, "")
    origin = Origin(str(folder), dict(os.environ), ())
    spec = RunSpec(plan, str(run.path), origin)
    said = await send_request(client.scheduler, words.LaunchRanks(client.id, spec))
    if error := said.error:
        raise RuntimeError(error)
    await kernel.wait_for(RanksStarted, hosts)


async def _print(agents: Sequence[Agent], kernel: Kernel, count: int, late: list[float]) -> None:
    for i in range(LINES):
        for agent in agents:
            agent.lines(i)
            await asyncio.sleep(0)
    sent = time.perf_counter()
    await kernel.wait_for(Lines, count)
    late.append(time.perf_counter() - sent)


async def _end(agents: Sequence[Agent], kernel: Kernel) -> None:
    for agent in agents:
        agent.report_success()
    await kernel.wait_for(RunEnded, 1)


@contextlib.asynccontextmanager
async def _client(address: str, keys: Keys) -> AsyncIterator[Client]:
    security = Security(**keys.kernel())
    async with Client(address, security=security, asynchronous=True) as client:
        yield client


class _Nowhere(Engine):
    """Engine that requests no hosts, because the agents join by themselves."""

    def capacity(self) -> HostCapacity:
        return HostCapacity(0, 1)

    def open(self, scheduler: type, keys: Keys, folder: str) -> Any:
        """Return None, because there is no cluster."""

    async def request_hosts(self, count: int) -> list[str]:
        return []

    async def release_hosts(self, keep: Collection[str]) -> None:
        """Do nothing; the hosts stay."""


@contextlib.asynccontextmanager
async def _pool() -> AsyncIterator[tuple[str, Keys, Controller]]:
    """Run a scheduler and a controller, whose engine requests no hosts, until the block ends.

    Yields:
        The scheduler's address, the keys for its TLS, and the controller.
    """
    dask.config.set(DASK_SETTINGS)
    keys = Keys()
    security = Security(**keys.scheduler())
    scheduler = PoolScheduler(host="127.0.0.1", protocol="tls://", security=security)
    async with scheduler:
        pool = PoolConfig("big", lease_s=PATIENT_S)
        controller = Controller(scheduler, _Nowhere(pool), pool, 3600.0)
        yield scheduler.address, keys, controller
