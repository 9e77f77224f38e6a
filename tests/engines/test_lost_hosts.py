"""Hosts that die, leave the network (docs/faults.md 10 to 14), or have wrong clocks (54)."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from taas_magic.errors import RunLost
from tests.events import Line
from tests.harness import Notebook, Outcome, on_event, words
from tests.rig.hosts import Hosts, hosts_up
from tests.rig.pools import enter, given_back, settings_in, ssh_pool

pytestmark = [pytest.mark.network]

MEET = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
"""

READY = """
if rank == 0:
    with open(os.environ["READY"], "w") as ready:
        ready.write(os.uname().nodename)
"""

TRAIN = """
while True:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
"""

SHIFTED = """
import os, time
if "OFFSET_S" in os.environ:
    shift_s, now = float(os.environ["OFFSET_S"]), time.time
    time.time = lambda: now() + shift_s
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts_up(3, share=[tmp_path_factory.getbasetemp()]) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def settings(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configure a pool of the hosts with one rank each. Two hosts have wrong clocks."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "sitecustomize.py").write_text(SHIFTED)
    python = folder / "python"
    python.write_text(
        f"""#!/bin/sh
        case $(hostname) in
            {hosts.name(2)}) export OFFSET_S=86400 ;;
            {hosts.name(3)}) export OFFSET_S=-86400 ;;
        esac
        export PYTHONPATH={folder}:$PYTHONPATH
        exec {sys.executable} "$@"
        """
    )
    python.chmod(0o755)
    return settings_in(folder, ssh_pool("far", hosts, python=python))


@pytest.fixture(scope="module")
def hosts_given_back(warm_notebook: Notebook, settings: Path, hosts: Hosts) -> Iterator[None]:
    """Keep the pool for all tests. At the end, check that no host has a process of ours left."""
    with given_back(warm_notebook, settings, "far"):
        yield
    for number in range(1, hosts.count + 1):
        assert not left_on(hosts, number)


@pytest.fixture
def far(
    warm_notebook: Notebook,
    settings: Path,
    hosts: Hosts,
    hosts_given_back: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Notebook]:
    """Yield a notebook with the pool. After each test, connect all hosts to the network again."""
    enter(warm_notebook, settings, monkeypatch)
    yield warm_notebook
    for number in range(1, hosts.count + 1):
        hosts.unhole(number)
        hosts.heal(number)
        hosts.undeafen(number)


def left_on(hosts: Hosts, number: int) -> list[psutil.Process]:
    """Wait for our processes on a host to end; return those that do not, except sshd."""
    return hosts.left(number, ignoring="sshd")


def first(outcome: Outcome) -> dict[str, object]:
    failure: dict[str, object] = outcome.of_kind("ended")[0]["first"]
    return failure


def run_on_all(notebook: Notebook, source: str, flags: str = "") -> Outcome:
    """Run a cell on all hosts."""
    return notebook.run(source, f"--pool far {flags}", gpus=3)


def run_and_break(notebook: Notebook, tmp_path: Path, fault: Callable[[], None]) -> Outcome:
    """Run an endless cell. Inject a fault when all ranks have joined their process group."""
    pipe = tmp_path / "ready"
    os.mkfifo(pipe)
    met: list[str] = []

    def inject() -> None:
        met.append(pipe.read_text())
        if met[0]:
            fault()

    thread = threading.Thread(target=inject)
    thread.start()
    outcome = run_on_all(notebook, MEET + READY + TRAIN, f"--env READY={pipe}")
    if not met:
        os.close(os.open(pipe, os.O_WRONLY))
    thread.join()
    assert met[0], outcome.shown
    return outcome


@pytest.mark.nightly
def test_ranks_of_several_hosts_meet_on_the_network_that_they_share(
    far: Notebook, hosts: Hosts
) -> None:
    source = 'print(os.environ["GLOO_SOCKET_IFNAME"], os.environ["MASTER_ADDR"])'
    outcome = run_on_all(far, MEET + source)
    assert outcome.error is None
    assert outcome.run is not None
    first = hosts.address(1 + hosts.names.index(outcome.run.hosts[0]))
    assert {lines[-1] for lines in outcome.lines.values()} == {f"eth0 {first}"}
    assert sorted(outcome.run.hosts) == hosts.names


@pytest.mark.nightly
@pytest.mark.fault(10)
def test_an_agent_is_killed(far: Notebook, hosts: Hosts, tmp_path: Path) -> None:
    def kill() -> None:
        there = hosts.processes(2)
        [supervisor] = [p for p in there if "taas_magic.host.supervisor" in words(p)]
        [agent] = [child for child in supervisor.children() if child in there]
        agent.kill()

    outcome = run_and_break(far, tmp_path, kill)
    assert isinstance(outcome.error, RunLost)
    assert first(outcome)["host"] == hosts.name(2)
    assert not left_on(hosts, 2)


@pytest.mark.fault(11)
def test_all_processes_of_a_host_die(far: Notebook, hosts: Hosts, tmp_path: Path) -> None:
    outcome = run_and_break(far, tmp_path, lambda: hosts.kill_processes(2))
    assert isinstance(outcome.error, RunLost)
    assert first(outcome)["host"] == hosts.name(2)


@pytest.mark.fault(12, 13)
@pytest.mark.parametrize("fault", ["hole", "deafen"])
def test_a_host_leaves_the_network(far: Notebook, hosts: Hosts, tmp_path: Path, fault: str) -> None:
    outcome = run_and_break(far, tmp_path, lambda: getattr(hosts, fault)(2))
    assert isinstance(outcome.error, RunLost)
    assert first(outcome)["host"] == hosts.name(2)
    assert not left_on(hosts, 2), "the far side did not end itself"


@pytest.mark.nightly
@pytest.mark.fault(14)
def test_a_partition_that_heals_changes_nothing(
    far: Notebook, hosts: Hosts, tmp_path: Path
) -> None:
    """After a network partition longer than the lease, the host writes nothing more."""
    saves = "step = 0\nwhile True:\n    step += 1\n    open('step', 'w').write(str(step))\n"
    pipe = tmp_path / "ready"
    os.mkfifo(pipe)
    host: list[int] = []

    def cut() -> None:
        host.append(1 + hosts.names.index(pipe.read_text()))
        hosts.cut(host[0])

    thread = threading.Thread(target=cut)
    thread.start()
    outcome = far.run(MEET + READY + saves, f"--pool far --env READY={pipe}", gpus=1)
    thread.join()
    assert isinstance(outcome.error, RunLost)
    saved = Path("step").stat()
    assert not left_on(hosts, host[0])
    hosts.heal(host[0])
    again = run_on_all(far, MEET)
    assert again.error is None
    assert again.run is not None and hosts.name(host[0]) in again.run.hosts
    assert Path("step").stat().st_mtime_ns == saved.st_mtime_ns


@pytest.mark.fault(54)
def test_clocks_a_day_apart_change_nothing(far: Notebook) -> None:
    """The hosts have wrong clocks because `sitecustomize` replaces `time.time` there.

    libfaketime would also shift the clock of `time.sleep`, which would then fail.
    """
    source = """
print("CLOCK", time.time())
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), 9)
dist.barrier()
"""
    before = time.time()
    outcome = run_on_all(far, MEET + source)
    lines = [line.split() for some in outcome.lines.values() for line in some if "CLOCK" in line]
    days = [round((float(clock) - before) / 86_400) for _, clock in lines]
    assert sorted(days) == [-1, 0, 1]
    failure = first(outcome)
    assert (failure["rank"], failure["signal"]) == (1, "SIGKILL")
    assert all(0 <= event["time"] - before < 600 for event in outcome.events)


@pytest.mark.nightly
def test_a_restart_waits_for_a_host_that_cannot_be_reached_yet(
    far: Notebook, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only spare host is unreachable until the status header reports the wait for a host."""
    pipe = tmp_path / "ready"
    os.mkfifo(pipe)

    def leave() -> None:
        if pipe.read_text():
            hosts.cut(2)

    leaving = threading.Thread(target=leave)
    leaving.start()
    again = 'if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":\n'
    source = MEET + again + "".join(f"    {line}\n" for line in (READY + TRAIN).splitlines())

    def waits(event: Line) -> bool:
        return event["kind"] == "note" and "for another host" in event["text"]

    with on_event(monkeypatch, waits, lambda run: hosts.heal(2)) as noted:
        outcome = run_on_all(far, source, f"--env READY={pipe} --max-restarts 1")
    leaving.join()
    assert noted and hosts.name(2) in noted[0]["text"]
    assert outcome.error is None, outcome.shown
    assert [event["attempt"] for event in outcome.of_kind("restart")] == [1]
