"""Tests of the pool's port under attack by malicious hosts and strangers (docs/faults.md)."""

import asyncio
import contextlib
import itertools
import json
import os
import socket
from collections.abc import Callable, Collection, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
from distributed import Client, Scheduler, Security
from distributed.comm import CommClosedError, connect, listen
from distributed.protocol.serialize import Serialize, ToPickle

from taas_magic.config import PoolConfig
from taas_magic.engines.base import Engine
from taas_magic.engines.keys import Keys, Peer, PeerRole
from taas_magic.errors import PoolError, ProtocolError
from taas_magic.host.spec import LaunchFetchers, LaunchRanks, Origin, RunSpec, StartShare
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import (
    AnswerInput,
    DescribeHost,
    Detach,
    EndPool,
    EndRun,
    ForwardEvents,
    GetAgentKeys,
    GetHostFacts,
    GetStacks,
    GetStatus,
    Halt,
    HostHello,
    PauseClocks,
    PrepareFetchers,
    RegisterKernel,
    Request,
    SetFetcherAddress,
    TakeOverFetchers,
    TakeOverSession,
    UpdateStoreCopy,
    WaitForHosts,
    from_bytes,
    leaf_subclasses,
    send_request,
    to_bytes,
)
from taas_magic.plan import Flags, HostCapacity, make_plan
from taas_magic.pool import gate, hosts
from taas_magic.pool.controller import Controller
from taas_magic.pool.gate import PoolScheduler
from taas_magic.pool.runs import PoolRun
from taas_magic.store.manifest import ManifestEntry
from taas_magic.store.requests import (
    FilePiece,
    FileRoot,
    ListChanges,
    ListFiles,
    MakeToken,
    ReadFiles,
    WriteFiles,
)
from tests.events import Line
from tests.eventually import HUNG_S
from tests.rig.pools import PoolHere, pool_here

pytestmark = pytest.mark.usefixtures("no_leftovers")

Kinds = set[type[Request[Any]]]


class Pool(PoolHere):
    """A pool with one honest host, and methods to connect as a malicious host."""

    @property
    def port(self) -> tuple[str, int]:
        return self.scheduler.ip, self.scheduler.port

    async def connect(self, security: dict[str, Any], role: str = "worker") -> Any:
        arguments = Security(**security).get_connection_args(role)
        return await connect(self.scheduler.address, timeout=HUNG_S, **arguments)

    async def bad_host(self, name: str = "bad") -> Any:
        """Connect with the keys of a host, and do not register; return the connection."""
        return await self.connect(self.keys.host(name))

    async def join(self, comm: Any, **told: Any) -> None:
        await comm.write(registration(**told))


def registration(**told: Any) -> dict[str, Any]:
    """Return the message by which an agent registers with the pool.

    Args:
        told: Fields that differ from the usual ones.
    """
    usual = {
        "op": "register-worker",
        "reply": False,
        "address": "tls://127.0.0.1:9",
        "status": "running",
        "nthreads": 1,
        "name": "bad",
        "now": 0.0,
        "resources": {},
        "memory_limit": 0,
        "local_directory": "",
        "services": {},
        "nanny": None,
        "pid": 0,
        "versions": 7,
        "metrics": {"bandwidth": {"total": 0, "workers": 5}},  # malformed; the gate replaces it
        "extra": {"taas_agent": True},
        "stimulus_id": "x",
        "server_id": "bad",
    }
    return {**usual, **told}


Play = Callable[[Pool], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def with_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Play], None]]:
    """Yield a function that runs a coroutine with the module's pool, which must keep its host."""
    with pool_here(tmp_path_factory.mktemp("pool")) as (here, run):
        pool = Pool(here.scheduler, here.controller, here.keys, here.member)

        async def live(play: Play) -> None:
            await play(pool)
            assert pool.controller.pool_hosts.all() == [pool.member]

        yield lambda play: run(live(play))


class Makes:
    """Object that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (str(self.file),)


@pytest.mark.fault(73)
def test_nothing_that_is_sent_is_unpickled(
    with_pool: Callable[[Play], None], tmp_path: Path
) -> None:
    """docs/faults.md 73: without the gate, Dask would unpickle a message before it reads `op`."""
    file = tmp_path / "made"

    async def play(pool: Pool) -> None:
        for wrap, op in itertools.product((ToPickle, Serialize), ("identity", "taas_ListFiles")):
            told = pool.keys.host("bad"), pool.keys.cluster(workers_connect=False)
            for comm in [await pool.connect(security) for security in told]:
                with pytest.raises(CommClosedError):
                    await comm.write({"op": op, "reply": True, "address": wrap(Makes(file))})
                    await comm.read()

    with_pool(play)
    assert not file.exists()


@pytest.mark.fault(73)
def test_a_host_may_ask_for_nothing_else(with_pool: Callable[[Play], None]) -> None:
    """docs/faults.md 73: the gate refuses all other operations of Dask and of the controller."""

    async def play(pool: Pool) -> None:
        kernels = {name for name in pool.scheduler.handlers if name.startswith("taas_")}
        dasks = set(Scheduler.__dict__) | {"feed", "connection_stream", "register-client"}
        asked = (dasks | kernels) - gate.ALLOWED_OPERATIONS[PeerRole.HOST]
        before = (await pool.controller.status(GetStatus())).refused
        for op in asked:
            comm = await pool.bad_host()
            with pytest.raises(CommClosedError):
                await comm.write({"op": op, "reply": True})
                await comm.read()
        assert len(kernels) > 5 and not pool.controller.must_end.is_set()
        status = await pool.controller.status(GetStatus())
        assert status.refused - before == len(asked)

    with_pool(play)


def test_only_the_allowed_processes_may_send_each_request(
    with_pool: Callable[[Play], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request has allowed senders and a receiver. Add each new request class to a set here."""
    by_hosts: Kinds = {ListFiles, ReadFiles, WriteFiles, ListChanges, MakeToken}
    by_kernels: Kinds = {
        WaitForHosts,
        LaunchRanks,
        LaunchFetchers,
        ForwardEvents,
        Halt,
        GetStatus,
        GetStacks,
    }
    by_kernels |= {GetHostFacts, EndPool, RegisterKernel, Detach, TakeOverFetchers, AnswerInput}
    by_kernels |= {TakeOverSession, PrepareFetchers}
    of_hosts: Kinds = {
        DescribeHost,
        GetHostFacts,
        StartShare,
        Halt,
        EndRun,
        SetFetcherAddress,
        GetStacks,
    }
    of_hosts |= {AnswerInput, PauseClocks, UpdateStoreCopy}
    kinds = {it for it in leaf_subclasses(Request) if it.__module__.startswith("taas_magic.")}
    assert kinds == by_hosts | by_kernels | of_hosts | {GetAgentKeys}
    ops = {kind.op() for kind in kinds}
    assert len(ops) == len(kinds)
    assert gate.ALLOWED_OPERATIONS[PeerRole.HOST] & ops == {kind.op() for kind in by_hosts}
    assert gate.ALLOWED_OPERATIONS[PeerRole.VEHICLE] & ops == {GetAgentKeys.op()}

    async def play(pool: Pool) -> None:
        answered = {op for op in pool.scheduler.handlers if op.startswith("taas_")}
        assert answered == {kind.op() for kind in by_hosts | by_kernels}
        monkeypatch.setattr(hosts, "to_bytes", lambda request: b"none")
        for kind in of_hosts:
            # `to_bytes` is replaced, so only the name of the request is sent
            request = cast("Request[object]", kind)
            with pytest.raises(PoolError, match=f"ProtocolError: {kind.op()}"):
                await pool.controller.pool_hosts.call(pool.member.address, request)

    with_pool(play)


def test_a_kernel_cannot_run_functions_in_the_pool(with_pool: Callable[[Play], None]) -> None:
    async def play(pool: Pool) -> None:
        comm = await pool.connect(pool.keys.kernel(), "client")
        for op in ("run_function", "feed", "broadcast", "register_worker_plugin"):
            await comm.write({"op": op, "reply": True})
            assert await comm.read() is None  # the pool has no such operation
        comm.abort()

    with_pool(play)


def test_a_host_can_join_only_by_its_own_name(with_pool: Callable[[Play], None]) -> None:
    async def play(pool: Pool) -> None:
        comm = await pool.bad_host()
        await pool.join(comm, name="another")
        with pytest.raises(CommClosedError):
            await comm.read()

    with_pool(play)


@pytest.mark.fault(73)
def test_a_host_speaks_for_itself_alone(with_pool: Callable[[Play], None]) -> None:
    """Without the gate, Dask would trust the sender that a message names in its field `worker`."""

    async def play(pool: Pool) -> None:
        comm = await pool.bad_host()
        await pool.join(comm)
        assert (await comm.read())["status"] == "OK"
        await comm.write([{"op": "taas_beat", "beat": 1, "worker": pool.member.address}])
        with pytest.raises(CommClosedError):
            while True:
                await comm.read()
        other = await pool.bad_host("worse")
        metrics: dict[str, Any] = {}
        await other.write(
            {"op": "heartbeat_worker", "address": pool.member.address, "metrics": metrics}
        )
        answer = await other.read()
        assert answer["status"] == "uncaught-error"
        other.abort()

    with_pool(play)


def test_a_vehicle_cannot_register_as_an_agent(with_pool: Callable[[Play], None]) -> None:
    async def play(pool: Pool) -> None:
        comm = await pool.connect(pool.keys.cluster(workers_connect=False))
        await pool.join(comm, name="any")
        await comm.write({"op": "identity"})
        with pytest.raises(CommClosedError):
            await comm.read()
        assert "any" not in {worker.name for worker in pool.scheduler.workers.values()}

    with_pool(play)


@pytest.mark.fault(73)
def test_no_host_connects_to_another(with_pool: Callable[[Play], None]) -> None:
    """An agent's port is closed, and an agent that listens refuses other hosts and kernels."""

    async def play(pool: Pool) -> None:
        host, _, port = pool.member.address.removeprefix("tls://").rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))
        shows = Security(**pool.keys.host("x")).get_listen_args("worker")
        async with listen("tls://127.0.0.1:0", pytest.fail, **shows) as agent:
            for told, role in ((pool.keys.host("bad"), "worker"), (pool.keys.kernel(), "client")):
                arguments = Security(**told).get_connection_args(role)
                with pytest.raises(OSError, match=r"certificate|TLS|closed|Timed out"):
                    comm = await connect(agent.contact_address, timeout=3, **arguments)
                    await comm.read()

    with_pool(play)


@pytest.mark.fault(47)
def test_the_key_of_another_pool_opens_nothing(with_pool: Callable[[Play], None]) -> None:
    """docs/faults.md 47: the pool refuses the connection at the TLS handshake."""

    async def play(pool: Pool) -> None:
        [listening] = pool.scheduler.listeners
        before = listening.refused
        with pytest.raises(OSError):
            await pool.connect(Keys().host("local-0"))
        forged = {**Keys().kernel(), "tls_ca_file": pool.keys.kernel()["tls_ca_file"]}
        with pytest.raises(OSError):
            comm = await pool.connect(forged, "client")
            await comm.read()
        assert listening.refused > before

    with_pool(play)


@pytest.mark.fault(50, 74)
def test_a_crowd_that_says_nothing_keeps_nobody_out(
    with_pool: Callable[[Play], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/faults.md 50, 74: the gate closes the oldest connections that have not authenticated."""
    monkeypatch.setattr(gate, "PROVE_S", 600)

    async def play(pool: Pool) -> None:
        crowd = [socket.create_connection(pool.port) for _ in range(3 * gate.MOST_UNPROVED)]
        try:
            for number, visitor in enumerate(crowd):
                visitor.send(b"\x16\x03\x01"[: number % 4] or b"GET / HTTP/1.1\r\n\r\n"[:8])
            security = Security(**pool.keys.kernel())
            async with Client(pool.scheduler.address, security=security, asynchronous=True) as me:
                assert (await send_request(me.scheduler, GetStatus())).hosts
            comm = await pool.bad_host()
            comm.abort()
            for visitor in crowd[: 2 * gate.MOST_UNPROVED]:
                await asyncio.to_thread(_read_end, visitor)
        finally:
            for visitor in crowd:
                visitor.close()

    with_pool(play)


@pytest.mark.fault(74)
def test_a_connection_that_drips_is_ended(
    with_pool: Callable[[Play], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client must prove its key within a time limit, even if it sends single bytes meanwhile."""

    async def play(pool: Pool) -> None:
        monkeypatch.setattr(gate, "PROVE_S", 0.5)
        with socket.create_connection(pool.port) as dripping:
            with contextlib.suppress(ConnectionError):  # the pool may close it at any moment
                for byte in b"\x16\x03\x01":
                    dripping.send(bytes([byte]))
                    await asyncio.sleep(0.05)
            await asyncio.to_thread(_read_end, dripping)

    with_pool(play)


def _read_end(visitor: socket.socket) -> None:
    """Read until the other side has closed the connection."""
    visitor.settimeout(HUNG_S)
    try:
        while visitor.recv(4096):
            pass
    except ConnectionError:
        return


def test_a_message_with_an_impossible_size_is_refused() -> None:
    for begin in (b"\xff" * 24, (2**40).to_bytes(8, "little") + (1).to_bytes(8, "little") * 2):
        with pytest.raises(ProtocolError):
            gate.frame_size(begin)


def test_a_certificate_names_its_owner() -> None:
    for peer in (
        Peer(PeerRole.HOST, "g2.8-0@ab: ü"),
        Peer(PeerRole.KERNEL),
        Peer(PeerRole.VEHICLE),
    ):
        assert Peer.of({"subjectAltName": (("URI", peer.identity),)}) == peer
    with pytest.raises(ValueError, match="does not name its owner"):
        Peer.of({})


class Nowhere(Engine):
    """Engine without hosts; the test's hosts join the pool by themselves."""

    capacity = open = mock.Mock()  # this test does not call them

    async def request_hosts(self, count: int) -> list[str]:
        return []

    async def release_hosts(self, keep: Collection[str]) -> None: ...


@pytest.mark.fault(73)
def test_a_bad_host_of_a_run_says_only_what_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/faults.md 73: of two fake hosts, the second one, with rank 1, sends forged messages."""
    monkeypatch.setenv("TAAS_STATE_DIR", str(tmp_path))
    flags = Flags(gpus=2, out=("x@last",))
    plan = make_plan(flags, HostCapacity(1, 1), "a-run", max_hosts=2)
    folder = RunFolder.create("a-run", plan, "cell")
    folder.payload.write_bytes(b"payload")
    changed = {"SET_IN_A_CELL": "1"}
    origin = Origin("/", {"SECRET": "of the kernel"}, (), changed=changed)
    spec = RunSpec(plan, str(folder.path), origin)
    others: list[Line] = [
        {"kind": "lines", "host": "good", "rank": 0, "lines": ["forged"]},
        {"kind": "ended", "host": "", "state": "SUCCEEDED", "failures": [], "first": None},
        {"kind": "settled", "host": "good", "attempt": 0, "state": "FAILED", "cause": "failure",
         "failures": [{"rank": 0}]},
        {"kind": "hang", "host": "good", "attempt": 0, "ranks": [{"rank": 0, "pid": 1}]},
        {"kind": "usage", "host": "good", "attempt": 0, "ranks": [{"rank": 1}, {"rank": 0}]},
        {"kind": "lines", "host": "good", "rank": 1, "lines": ["mine"]},
    ]  # fmt: skip

    async def live() -> None:
        keys = Keys()
        options = {"host": "127.0.0.1", "protocol": "tls://"}
        async with PoolScheduler(**options, security=Security(**keys.scheduler())) as scheduler:
            pool = PoolConfig("far", engine="ssh", lease_s=600)
            controller = Controller(scheduler, Nowhere(pool), pool, linger_s=600)
            made = [MadeUp(scheduler.address, keys, name) for name in ("good", "bad")]
            for host in made:
                await host.join()
            security = Security(**keys.kernel())
            async with Client(scheduler.address, security=security, asynchronous=True) as kernel:
                await send_request(kernel.scheduler, LaunchRanks(kernel.id, spec))
                _, bad = made
                assert bad.told is not None
                told = bad.told.spec.run.origin
                assert told.environ == {}
                assert told.changed == changed
                for said in (*map(json.dumps, others), '{"kind": "new"}', "{"):
                    await bad.say(op="taas_event", run_id="a-run", event=said.encode())
                await bad.say(op="taas_event", run_id="a-run", event={"kind": "note"})
                may_write = {"logs/rank-1.log": True, "results/0-1-0": True}
                may_write |= dict.fromkeys(["logs/rank-0.log", "results/0-0-0"], False)
                may_write |= dict.fromkeys(["results/1-1-0", "results/0-2-0"], False)
                for name, may in may_write.items():
                    piece = FilePiece(ManifestEntry(name, 1, ""), 0, b"x")
                    written = WriteFiles([piece], run_id="a-run", root=FileRoot.RUN)
                    assert (await bad.ask(written) == to_bytes({})) == may
                answer = await bad.ask(ReadFiles([("a", "no number", 1)]))  # type: ignore[list-item]
                assert "Expected `int`, got `str` - at `$.parts[0][1]`" in str(answer)
                await _refuses(controller, 13)
                assert controller.pool_hosts.refused == 13
                run = controller._runs["a-run"]
                assert isinstance(run, PoolRun)
                for host in made:
                    host.leave()
                await run.cleaned_up.wait()  # after this, the journal has the end of the run

    asyncio.run(live())
    told = [json.loads(line) for line in folder.events.read_text().splitlines()]
    assert [said for said in told if said["kind"] == "lines"] == [
        {**others[-1], "host": "bad", "time": mock.ANY}
    ]
    assert [said["state"] for said in told if said["kind"] == "ended"] == ["LOST"]
    assert folder.log(1).read_bytes() == b"x" and not folder.log(0).exists()


async def _refuses(controller: Controller, count: int) -> None:
    """Wait until a pool has refused `count` messages, or return after 100 s."""
    for _ in range(10_000):
        if controller.pool_hosts.refused >= count:
            return
        await asyncio.sleep(0.01)


class MadeUp:
    """Fake host without an agent, which joins the pool and answers the pool's calls."""

    def __init__(self, address: str, keys: Keys, name: str) -> None:
        self.name, self._address = name, address
        self._arguments = Security(**keys.host(name)).get_connection_args("worker")
        self.told: StartShare | None = None

    async def join(self) -> None:
        self._comm = await connect(self._address, **self._arguments)
        place = f"tls://127.0.0.1:{len(self.name)}"
        await self._comm.write(registration(name=self.name, address=place))
        assert (await self._comm.read())["status"] == "OK"
        self._answering = asyncio.create_task(self._answer())

    async def say(self, **message: Any) -> None:
        await self._comm.write([message])

    async def ask(self, request: Request[Any]) -> Any:
        comm = await connect(self._address, **self._arguments)
        await comm.write({"op": request.op(), "reply": True, "request": to_bytes(request)})
        answer = await comm.read()
        comm.abort()
        return answer

    def leave(self) -> None:
        self._answering.cancel()
        self._comm.abort()

    async def _answer(self) -> None:
        while True:
            for call in await self._comm.read():
                if call["op"] == "taas_call":
                    await self.say(op="taas_answer", id=call["id"], answer=self._said(call))

    def _said(self, call: dict[str, Any]) -> bytes:
        if call["name"] == DescribeHost.op():
            return to_bytes(HostHello(host=self.name, address="10.0.0.1", protection="", gpus=1))
        if call["name"] == StartShare.op():
            self.told = from_bytes(call["request"], StartShare)
        return to_bytes(1 if call["name"] == StartShare.op() else None)
