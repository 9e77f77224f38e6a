"""Tests of `PoolHosts`: calls to hosts, refused messages, lost hosts, and the choice of hosts."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from msgspec import structs

from taas_magic import messages
from taas_magic.engines.base import Engine
from taas_magic.errors import PoolError
from taas_magic.host.spec import (
    BEAT,
    LaunchFetchers,
    LaunchRanks,
    Origin,
    RunSpec,
    StartShare,
    fetchers_share_id,
)
from taas_magic.messages import (
    DescribeHost,
    EndRun,
    Failure,
    FetcherEnded,
    GetHostFacts,
    GetStatus,
    Halt,
    HostEnded,
    Note,
    RanksEnded,
    Request,
    RunEnded,
)
from taas_magic.plan import DataPlan, Flags, HostCapacity, make_plan
from taas_magic.pool.controller import Controller
from taas_magic.pool.gate import PoolScheduler
from taas_magic.pool.hosts import PoolHost, PoolHosts
from taas_magic.pool.runs import PoolRun, RunClock
from taas_magic.store.manifest import ManifestEntry
from taas_magic.store.requests import FilePiece, FileRoot, WriteFiles
from tests.eventually import HUNG_S
from tests.harness import below, words
from tests.rig.pools import pool_here

Play = Callable[[PoolScheduler, Controller, PoolHost], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def with_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Play], None]]:
    """Yield a function that runs a coroutine with the module's pool and its host.

    Only the last tests of the module may lose the host.
    """
    with pool_here(tmp_path_factory.mktemp("pool")) as (here, run):
        yield lambda play: run(play(here.scheduler, here.controller, here.member))


def named(name: str) -> Request[None]:
    """Return a request without fields, whose operation has this name and whose answer is None."""

    class Named(Request[None]):
        @classmethod
        def op(cls) -> str:
            return name

    return Named()


def test_a_call_of_a_host_is_answered_without_a_new_connection(
    with_host: Callable[[Play], None],
) -> None:
    async def play(scheduler: PoolScheduler, controller: Controller, member: PoolHost) -> None:
        said = await controller.pool_hosts.call(member.address, DescribeHost())
        assert said.host == member.name
        with pytest.raises(PoolError, match=f"{member.name}: KeyError: 'taas_Nonesuch'"):
            await controller.pool_hosts.call(member.address, named("taas_Nonesuch"))
        with pytest.raises(PoolError, match=f"{member.name} answered taas_DescribeHost: .*`null`"):
            await controller.pool_hosts.call(member.address, named("taas_DescribeHost"))
        with pytest.raises(PoolError, match=f"{member.name}: ProtocolError: taas_Halt: .*`run_id`"):
            await controller.pool_hosts.call(member.address, named("taas_Halt"))
        with pytest.raises(PoolError, match="did not answer taas_DescribeHost within 0 s"):
            await controller.pool_hosts.call(member.address, DescribeHost(), limit_s=0)
        assert scheduler.rpc.open == 0

    with_host(play)


def test_requests_and_answers_are_unchanged_after_encoding_and_decoding() -> None:
    plan = make_plan(Flags(gpus=1, units=10**30), HostCapacity(gpus=1, cores=1), "a-run")
    origin = Origin("/caf\udce9", {"A": "\udcff"}, (), changed={"B": None})
    said = [Note(text="ü"), FetcherEnded(number=1)]
    request = LaunchRanks("kernel", RunSpec(plan, "/", origin), said)
    assert messages.from_bytes(messages.to_bytes(request), LaunchRanks) == request
    piece = FilePiece(ManifestEntry("results/0-0-0", 256, ""), 0, bytes(range(256)))
    written = WriteFiles([piece], root=FileRoot.RUN)
    assert messages.from_bytes(messages.to_bytes(written), WriteFiles) == written
    for packed in (
        b"",
        b"\xc1",
        b"\x81\x90\x01",
        b"\x81\x80\x01",
        b"\x91" * 10_000,
        b"\xd4\x00x",
        5,
    ):
        with pytest.raises(ValueError):
            messages.from_bytes(packed, WriteFiles)  # type: ignore[arg-type]


@pytest.mark.fault(49)
def test_messages_of_strangers_are_refused_and_counted(with_host: Callable[[Play], None]) -> None:
    """Strangers send answers without a call, beats of unknown hosts, and events of unknown runs."""

    async def play(scheduler: PoolScheduler, controller: Controller, member: PoolHost) -> None:
        handlers = scheduler.stream_handlers
        before = (await controller.status(GetStatus())).refused
        handlers["taas_answer"](worker=member.address, id=12345, answer=b"late")
        handlers["taas_answer"](worker="tls://nobody:1", id=1, answer=b"forged")
        handlers["taas_beat"](worker="tls://nobody:1", beat=1)
        said = messages.encode(messages.RanksEnded(state="SUCCEEDED", host="x"))
        handlers["taas_event"](worker=member.address, run_id="no-such-run", event=said)
        assert (await controller.status(GetStatus())).refused - before == 4

    with_host(play)


def fetchers_without_a_module(folder: Path) -> LaunchFetchers:
    """Return a request for fetchers that need a module which no host has."""
    plan = make_plan(Flags(gpus=1), HostCapacity(gpus=1, cores=1), "a-run")
    data = DataPlan("local", hosts=1, pool_hosts=1, fetchers=(), crosses=False, cores=1)
    plan, origin = structs.replace(plan, data=data), Origin("/", {}, ())
    run = RunSpec(plan, str(folder), origin, requires=("nonesuch_module",))
    return LaunchFetchers("kernel", run)


def test_a_host_whose_fetchers_cannot_start_does_not_count_as_busy(
    with_host: Callable[[Play], None], tmp_path: Path
) -> None:
    """If the host still counted as busy, the pool would never give it back and never end."""

    async def play(scheduler: PoolScheduler, controller: Controller, member: PoolHost) -> None:
        controller.add_client(scheduler, "kernel")
        said = await controller.launch_fetchers(fetchers_without_a_module(tmp_path))
        assert "nonesuch_module" in said.error
        assert not member.runs
        for _ in range(10):  # let the run's remaining tasks end
            await asyncio.sleep(0)
        assert fetchers_share_id("a-run") not in controller._runs
        controller.remove_client(scheduler, "kernel")

    with_host(play)


def test_a_pool_whose_notify_command_runs_does_not_count_as_idle(
    with_host: Callable[[Play], None],
) -> None:
    """Otherwise, an ending process would keep the pool's lock until the command has ended.

    A real command would have to run for longer than a pool stays without a run.
    """

    async def play(scheduler: PoolScheduler, controller: Controller, member: PoolHost) -> None:
        beats, is_notifying = asyncio.Queue[bool](), asyncio.Event()
        loop, may_end = asyncio.get_running_loop(), threading.Event()

        def run_command(*about: object) -> None:
            loop.call_soon_threadsafe(is_notifying.set)
            may_end.wait(HUNG_S)

        async def next_beat() -> bool:
            while not beats.empty():
                beats.get_nowait()
            return await asyncio.wait_for(beats.get(), HUNG_S)

        run = mock.Mock(PoolRun, run_id="detached", session_id="", owner="")
        run.run_to_end.return_value = RunEnded(state="SUCCEEDED")
        with (
            mock.patch("taas_magic.pool.controller.notify", run_command),
            mock.patch.object(
                controller._kernels, "end_if_idle", lambda has_runs: beats.put_nowait(has_runs)
            ),
        ):
            until_end = contextlib.AsyncExitStack()
            ending = asyncio.ensure_future(controller._run_to_end(run, mock.Mock(), until_end))
            await asyncio.wait_for(is_notifying.wait(), HUNG_S)
            assert await next_beat()
            may_end.set()
            await ending
            assert not await next_beat()

    with_host(play)


def test_a_call_of_a_host_that_leaves_raises_an_error(with_host: Callable[[Play], None]) -> None:
    async def play(scheduler: PoolScheduler, controller: Controller, member: PoolHost) -> None:
        number = 10**9
        waiting = member.pending[number] = asyncio.get_running_loop().create_future()
        await scheduler.remove_worker(member.address, stimulus_id="test")
        with pytest.raises(PoolError, match=f"{member.name} is gone"):
            await waiting
        with pytest.raises(PoolError, match="is gone"):
            await controller.pool_hosts.call(member.address, DescribeHost())

    with_host(play)


def test_a_host_that_cannot_describe_itself_is_replaced(with_host: Callable[[Play], None]) -> None:
    async def play(scheduler: PoolScheduler, controller: Controller, member: PoolHost) -> None:
        call, failed = controller.pool_hosts.call, list[str]()

        async def fail_first(address: str, request: Request[Any]) -> Any:
            if not failed:
                failed.append(address)
                raise PoolError("it can start nothing")
            return await call(address, request)

        with mock.patch.object(controller.pool_hosts, "call", fail_first):
            await controller.pool_hosts.release(lambda host: False)
            [taken] = await controller.pool_hosts.acquire(1)
        assert failed and taken.address not in failed

    with_host(play)


def test_a_host_that_a_failed_wait_has_returned_is_replaced(
    with_host: Callable[[Play], None], tmp_path: Path
) -> None:
    """While a run checks its host, the wait of another run fails, and all idle hosts go back."""

    async def play(scheduler: PoolScheduler, controller: Controller, _: PoolHost) -> None:
        [chosen] = await controller.pool_hosts.acquire(1)
        call, checked = controller.pool_hosts.call, list[str]()

        async def return_first(address: str, request: Request[Any], *limit: float) -> Any:
            if isinstance(request, GetHostFacts):
                checked.append(address)
                if len(checked) == 1:
                    await controller.pool_hosts.release()
            return await call(address, request, *limit)

        controller.add_client(scheduler, "kernel")
        with mock.patch.object(controller.pool_hosts, "call", return_first):
            said = await controller.launch_fetchers(fetchers_without_a_module(tmp_path))
        assert "nonesuch_module" in said.error
        assert checked[0] == chosen.address and len(set(checked)) == 2
        controller.remove_client(scheduler, "kernel")

    with_host(play)


def supervisors() -> set[psutil.Process]:
    """Return the supervisors among this process's descendants."""
    return {it for it in below(os.getpid()) if "taas_magic.host.supervisor" in words(it)}


def new_one(known: set[psutil.Process]) -> psutil.Process:
    """Wait for a supervisor that is not in `known`; return it."""
    while not (new := supervisors() - known):
        threading.Event().wait(0.01)
    return new.pop()


def test_a_silent_host_is_lost(with_host: Callable[[Play], None]) -> None:
    """docs/faults.md 12: the reason for the silence does not matter."""

    async def play(scheduler: PoolScheduler, controller: Controller, _: PoolHost) -> None:
        [member] = await controller.pool_hosts.acquire(1)
        gone = asyncio.Event()
        with (
            mock.patch.object(controller.pool_hosts, "_on_lost_host", lambda lost, why: gone.set()),
            # a late beat would end the silence
            mock.patch.dict(scheduler.stream_handlers, {BEAT: lambda **beat: None}),
        ):
            member.last_message_at -= 10_000
            await asyncio.wait_for(gone.wait(), 100)
        assert member.address not in scheduler.workers

    with_host(play)


async def failed(task: asyncio.Task[Any]) -> bool:
    """Wait for a task; return whether it failed."""
    await asyncio.wait({task})
    return task.exception() is not None


def test_a_failed_host_does_not_block_the_next_one(with_host: Callable[[Play], None]) -> None:
    """Two calls wait when a host fails. One call raises the error; the other gets the next host."""

    async def play(scheduler: PoolScheduler, controller: Controller, _: PoolHost) -> None:
        await controller.pool_hosts.release(lambda host: False)
        known = supervisors()
        takes = [asyncio.create_task(controller.pool_hosts.acquire(1)) for _ in range(2)]
        (await asyncio.to_thread(new_one, known)).kill()
        [told] = [take.exception() for take in takes if await failed(take)]
        assert isinstance(told, PoolError) and "before it was ready" in str(told)

    with_host(play)


def test_preferred_hosts_are_chosen_first_and_then_those_with_the_fewest_runs() -> None:
    async def play() -> None:
        scheduler = PoolScheduler(dashboard=False)
        pool_hosts = PoolHosts(scheduler, mock.Mock(Engine), 1, 30)
        for number, runs in enumerate([{"a", "b"}, {"a"}, set(), {"a"}]):
            pool_hosts._hosts[str(number)] = PoolHost(str(number), name=f"h{number}", runs=runs)
        assert [m.name for m in pool_hosts.choose(3)] == ["h2", "h1", "h3"]
        assert [m.name for m in pool_hosts.choose(2, preferred=["0"])] == ["h0", "h2"]

    asyncio.run(play())


Call = Callable[[str, Request[Any], float], Coroutine[Any, Any, int]]


def run_on_two_hosts(
    folder: Path, call: Call, session: str = ""
) -> tuple[PoolRun, list[PoolHost], mock.Mock]:
    """Return a run on two made-up hosts, the hosts, and their pool. The run has one restart.

    Args:
        folder: The run folder.
        call: Function that answers the requests to the hosts.
        session: Run id of the session, if the run is a cell.
    """
    capacity = HostCapacity(gpus=1, cores=1)
    plan = make_plan(Flags(gpus=2, max_restarts=1), capacity, "a-run", max_hosts=2)
    hosts = [PoolHost(f"tls://host:{number}", name=f"h{number}") for number in (1, 2)]
    pool_hosts = mock.Mock(PoolHosts, are_local=True, start_timeout_s=0, call=call)
    pool_hosts.in_configured_order = list
    pool_hosts.acquire.return_value = pool_hosts.all.return_value = hosts
    spec = RunSpec(plan, str(folder), Origin("/", {}, ()), session=session)
    of_session = mock.Mock(PoolRun, session_hosts=lambda: hosts) if session else None
    run = PoolRun(spec, "", pool_hosts, mock.Mock(), mock.Mock(), of_session)
    return run, hosts, pool_hosts


def fail_ranks(run: PoolRun, hosts: list[PoolHost]) -> None:
    """Report for each host that its rank has failed."""
    for rank, host in enumerate(hosts):
        failures = [Failure(rank=rank)]
        run.on_event(host.address, RanksEnded(state="FAILED", failures=failures))


async def lose_second_host(
    run: PoolRun, hosts: list[PoolHost], pool_hosts: mock.Mock, new: PoolHost
) -> "asyncio.Future[RunEnded]":
    """Start a run, and lose its second host; `new` replaces it. Return the future of the end."""
    await run.start()
    pool_hosts.acquire.return_value = [hosts[0], new]
    run.record_lost_host(hosts[1], "it is silent")
    return asyncio.ensure_future(run.run_to_end())


def test_a_run_whose_hosts_are_all_lost_during_a_restart_ends(tmp_path: Path) -> None:
    """The second host is lost while the first host tries to start the second attempt."""

    async def call(address: str, request: Request[Any], limit_s: float = 0.0) -> int:
        if isinstance(request, StartShare) and request.is_next_attempt:
            run.record_lost_host(hosts[1], "it is silent")
            raise PoolError("it is gone, too")
        return 1

    run, hosts, _ = run_on_two_hosts(tmp_path, call)

    async def play() -> None:
        await run.start()
        fail_ranks(run, hosts)
        ended = await asyncio.wait_for(run.run_to_end(), HUNG_S)
        assert (ended.state, ended.attempt) == ("LOST", 1)
        assert not [host for host in hosts if host.runs]

    asyncio.run(play())


@pytest.mark.parametrize("first_starts", [True, False])
def test_a_host_that_is_chosen_for_a_restart_counts_as_busy(
    tmp_path: Path, first_starts: bool
) -> None:
    """The pool does not give back a host that replaces another until the first host has started.

    With real hosts, the first host would have to send rank 0's files for longer than the other host
    takes to join.
    """
    first_restarts, may_answer = asyncio.Event(), asyncio.Event()

    async def call(address: str, request: Request[Any], limit_s: float = 0.0) -> int:
        if isinstance(request, StartShare) and request.is_next_attempt:
            first_restarts.set()
            await may_answer.wait()
            if not first_starts:
                raise PoolError("it cannot start ranks")
        elif isinstance(request, StartShare) and address == new.address:
            for host in (hosts[0], new):
                run.on_event(host.address, RanksEnded(state="SUCCEEDED", attempt=1))
        elif isinstance(request, EndRun):
            run.on_event(address, HostEnded(state="SUCCEEDED"))
        return 1

    run, hosts, pool_hosts = run_on_two_hosts(tmp_path, call)
    new = PoolHost("tls://host:3", name="h3")

    async def play() -> None:
        ending = await lose_second_host(run, hosts, pool_hosts, new)
        await asyncio.wait_for(first_restarts.wait(), HUNG_S)
        assert new.runs == {run.run_id} and not hosts[1].runs
        may_answer.set()
        ended = await asyncio.wait_for(ending, HUNG_S)
        assert ended.state == ("SUCCEEDED" if first_starts else "FAILED")
        assert not hosts[0].runs and not new.runs

    asyncio.run(play())


async def dropped_after_halt(run: PoolRun, pool_hosts: mock.Mock, how: str) -> list[str]:
    """Halt a run without any patience; return the addresses of the hosts that the pool drops."""
    of_runs = "taas_magic.pool.runs"
    with mock.patch(f"{of_runs}.HALT_S", 0.0), mock.patch(f"{of_runs}._CHECK_S", 0.0):
        await run.halt(how)
        for _ in range(100):  # let the background tasks check the hosts
            await asyncio.sleep(0)
    return [asked.args[0] for asked in pool_hosts.drop.mock_calls]


def test_an_interrupt_of_a_restart_drops_no_host_that_was_not_asked_to_start(
    tmp_path: Path,
) -> None:
    """The first host, which runs the run already, is silent, so the pool drops only this host.

    With real hosts, the first host would have to send rank 0's files for longer than `HALT_S`.
    """
    first_restarts, is_first_gone = asyncio.Event(), asyncio.Event()

    async def call(address: str, request: Request[Any], limit_s: float = 0.0) -> int:
        if isinstance(request, StartShare) and request.is_next_attempt:
            first_restarts.set()
            await is_first_gone.wait()
            raise PoolError("it is gone")
        return 1

    run, hosts, pool_hosts = run_on_two_hosts(tmp_path, call)
    new = PoolHost("tls://host:3", name="h3")

    async def play() -> None:
        ending = await lose_second_host(run, hosts, pool_hosts, new)
        await asyncio.wait_for(first_restarts.wait(), HUNG_S)
        assert set(await dropped_after_halt(run, pool_hosts, "interrupt")) == {hosts[0].address}
        is_first_gone.set()
        await asyncio.wait_for(ending, HUNG_S)

    asyncio.run(play())


def test_a_kill_of_a_cell_whose_session_still_starts_ends_only_the_cell(tmp_path: Path) -> None:
    """With real hosts, the session would have to copy the project store for longer than `HALT_S`.

    The ranks get the cell only when the session has started, so an interrupt is then enough.
    """
    is_asked, has_started = asyncio.Event(), asyncio.Event()
    halts: list[tuple[str, str]] = []

    async def call(address: str, request: Request[Any], limit_s: float = 0.0) -> int:
        if isinstance(request, StartShare):
            is_asked.set()
            await has_started.wait()
        elif isinstance(request, Halt) and has_started.is_set():
            halts.append((address, request.how))
        return 1

    run, hosts, pool_hosts = run_on_two_hosts(tmp_path, call, session="the-session")

    async def play() -> None:
        starting = asyncio.ensure_future(run.start())
        await asyncio.wait_for(is_asked.wait(), HUNG_S)
        assert not await dropped_after_halt(run, pool_hosts, "kill")
        has_started.set()
        await asyncio.wait_for(starting, HUNG_S)
        assert halts == [(host.address, "interrupt") for host in hosts]

    asyncio.run(play())


def test_the_clock_of_a_run_stops_while_the_user_types() -> None:
    clock = RunClock()
    assert clock.ran_s(100.0) == 0.0
    clock.set_paused(False, 100.0)
    clock.set_paused(True, 103.0)
    clock.set_paused(True, 150.0)  # a second rank waits for the user's input
    assert clock.ran_s(200.0) == 3.0
    clock.set_paused(False, 200.0)  # the next attempt begins
    clock.set_paused(False, 201.0)
    assert clock.ran_s(202.0) == 5.0
