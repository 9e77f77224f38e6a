"""The pool's hosts: calls through their own streams, and who is not listened to."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from taas_magic.config import PoolConfig
from taas_magic.engines.base import HostSource, find_engine
from taas_magic.engines.head import HeadScheduler
from taas_magic.engines.keeper import Keeper
from taas_magic.engines.keys import make_security
from taas_magic.engines.member import Member
from taas_magic.engines.members import Members
from taas_magic.errors import PoolError

pytestmark = pytest.mark.usefixtures("no_leftovers")

Play = Callable[[Any, Keeper, Member], Coroutine[Any, Any, None]]


@pytest.fixture
def with_host(tmp_path: Path) -> Callable[[Play], None]:
    """Runs a play with a scheduler, its keeper, and one host that has joined."""

    def run(play: Play) -> None:
        async def live() -> None:
            engine = find_engine(PoolConfig("local", lease_s=30))
            async with engine.open(HeadScheduler, make_security(), str(tmp_path)) as cluster:
                source = HostSource(engine, cluster)
                keeper = Keeper(cluster.scheduler, source, engine.pool, linger_s=600)
                [member] = await keeper.members.take(1)
                await play(cluster, keeper, member)

        asyncio.run(live())

    return run


def test_a_call_is_answered_and_opens_no_connection(with_host: Callable[[Play], None]) -> None:
    async def play(cluster: Any, keeper: Keeper, member: Member) -> None:
        said = await keeper.members.call(member.address, "taas_hello")
        assert said["host"] == member.name
        with pytest.raises(PoolError, match=f"{member.name}: KeyError: 'nonesuch'"):
            await keeper.members.call(member.address, "nonesuch")
        assert cluster.scheduler.rpc.open == 0

    with_host(play)


def test_a_call_to_a_host_that_goes_ends_with_it(with_host: Callable[[Play], None]) -> None:
    async def play(cluster: Any, keeper: Keeper, member: Member) -> None:
        number = 10**9
        waiting = member.pending[number] = asyncio.get_running_loop().create_future()
        await cluster.scheduler.remove_worker(member.address, stimulus_id="test")
        with pytest.raises(PoolError, match=f"{member.name} is gone"):
            await waiting
        with pytest.raises(PoolError, match="is gone"):
            await keeper.members.call(member.address, "taas_hello")

    with_host(play)


def test_a_silent_host_is_lost(with_host: Callable[[Play], None]) -> None:
    """FAULTS 12: however it came to be silent."""

    async def play(cluster: Any, keeper: Keeper, member: Member) -> None:
        gone = asyncio.Event()
        keeper.members._on_lost = lambda lost, why: gone.set()
        member.heard_at -= 10_000
        await asyncio.wait_for(gone.wait(), 60)
        assert member.address not in cluster.scheduler.workers

    with_host(play)


def test_what_is_not_a_members_is_refused_and_counted(with_host: Callable[[Play], None]) -> None:
    """FAULTS 49: a stale generation, answers nobody waits for, events of no run of the host."""

    async def play(cluster: Any, keeper: Keeper, member: Member) -> None:
        handlers = cluster.scheduler.stream_handlers
        handlers["taas_answer"](worker=member.address, id=12345, answer="late")
        handlers["taas_answer"](worker="tls://nobody:1", id=1, answer="forged")
        handlers["taas_beat"](worker="tls://nobody:1", beat=1)
        said = {"kind": "settled", "attempt": 0, "state": "SUCCEEDED", "host": "x"}
        handlers["taas_event"](worker=member.address, run_id="no-such-run", event=said)
        assert (await keeper.status())["refused"] == 4

    with_host(play)


def test_hosts_to_keep_come_first_then_those_that_run_least() -> None:
    async def play() -> None:
        scheduler = HeadScheduler(dashboard=False)
        members = Members(scheduler, _Nothing(), 1, 30)  # type: ignore[arg-type]
        for number, runs in enumerate([{"a", "b"}, {"a"}, set(), {"a"}]):
            members._members[str(number)] = Member(str(number), name=f"h{number}", runs=runs)
        assert [m.name for m in await members.take(3)] == ["h2", "h1", "h3"]
        assert [m.name for m in await members.take(2, keep=["0"])] == ["h0", "h2"]

    asyncio.run(play())


class _Nothing:
    """No hosts come from here."""
