"""Hosts that die or leave the network (FAULTS 10 to 14), and whose clocks are off (54)."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from taas_magic import pools, taas_toml
from taas_magic.errors import RunLost
from tests.harness import Notebook, Outcome
from tests.rig.hosts import Hosts, hosts_up
from tests.rig.pools import enter, settings_in, ssh_pool

pytestmark = [pytest.mark.network, pytest.mark.timeout(300)]

WITHIN_S = 60.0

MEET = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
"""

READY = """
if rank == 0:
    with open(os.environ["READY"], "w") as ready:
        ready.write("ready")
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


@pytest.fixture
def settings(hosts: Hosts, tmp_path: Path) -> Path:
    """A configuration folder with a pool of the hosts, one rank each."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n. {tmp_path}/environment\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "environment").touch()
    return settings_in(tmp_path, ssh_pool("far", hosts, python=python, more="lease_s = 6"))


@pytest.fixture
def far(
    warm_notebook: Notebook, settings: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Notebook]:
    """A notebook with the pool; at the end nothing of it is left on any host."""
    enter(warm_notebook, settings, monkeypatch)
    yield warm_notebook
    for number in range(1, hosts.count + 1):
        hosts.heal(number)
        hosts.undeafen(number)
    pools.down("far", taas_toml.load(warm_notebook.project))
    for number in range(1, hosts.count + 1):
        assert not left_on(hosts, number)


def left_on(hosts: Hosts, number: int) -> list[psutil.Process]:
    """What of ours is still there on a host after a while; its sshd waits longer for a peer."""
    ours = [process for process in hosts.processes(number) if process.name() != "sshd"]
    _, alive = psutil.wait_procs(ours, timeout=WITHIN_S)
    return alive


@dataclass
class Broken:
    """A cell that runs on all hosts, and what broke meanwhile.

    Attributes:
        outcome: How it ended.
        took_s: Seconds from the fault to the end of the cell.
    """

    outcome: Outcome
    took_s: float

    @property
    def first(self) -> dict[str, object]:
        failure: dict[str, object] = self.outcome.of_kind("ended")[0]["first"]
        return failure


def run_and_break(notebook: Notebook, tmp_path: Path, fault: Callable[[], None]) -> Broken:
    """Runs a cell that would go on for ever, and injects a fault when all ranks have met."""
    pipe = tmp_path / "ready"
    os.mkfifo(pipe)
    at: list[float] = []

    def inject() -> None:
        pipe.read_text()
        at.append(time.monotonic())
        fault()

    thread = threading.Thread(target=inject)
    thread.start()
    outcome = notebook.run(MEET + READY + TRAIN, f"--pool far --env READY={pipe}", gpus=3)
    ended = time.monotonic()
    if not at:
        os.close(os.open(pipe, os.O_WRONLY))
    thread.join()
    print(f"the cell ended {ended - at[0]:.1f} s after the fault")
    return Broken(outcome, ended - at[0])


def test_ranks_of_several_hosts_meet_on_the_network_that_they_share(
    far: Notebook, hosts: Hosts
) -> None:
    source = 'print(os.environ["GLOO_SOCKET_IFNAME"], os.environ["MASTER_ADDR"])'
    outcome = far.run(MEET + source, "--pool far", gpus=3)
    assert outcome.error is None
    assert outcome.run is not None
    first = hosts.address(1 + hosts.names.index(outcome.run.hosts[0]))
    assert {lines[-1] for lines in outcome.lines.values()} == {f"eth0 {first}"}
    assert sorted(outcome.run.hosts) == hosts.names


def test_10_an_agent_is_killed(far: Notebook, hosts: Hosts, tmp_path: Path) -> None:
    def kill() -> None:
        there = hosts.processes(2)
        [supervisor] = [p for p in there if "taas_magic.remote.supervisor" in p.cmdline()[-2]]
        [agent] = [child for child in supervisor.children() if child in there]
        agent.kill()

    broken = run_and_break(far, tmp_path, kill)
    assert isinstance(broken.outcome.error, RunLost)
    assert broken.first["host"] == hosts.name(2)
    assert broken.took_s < WITHIN_S
    assert not left_on(hosts, 2)


def test_11_all_processes_of_a_host_die(far: Notebook, hosts: Hosts, tmp_path: Path) -> None:
    def kill() -> None:
        for process in hosts.processes(2):
            process.kill()

    broken = run_and_break(far, tmp_path, kill)
    assert isinstance(broken.outcome.error, RunLost)
    assert broken.first["host"] == hosts.name(2)
    assert broken.took_s < WITHIN_S


@pytest.mark.parametrize("fault", ["cut", "hole", "deafen"])
def test_12_13_a_host_leaves_the_network(
    far: Notebook, hosts: Hosts, tmp_path: Path, fault: str
) -> None:
    broken = run_and_break(far, tmp_path, lambda: getattr(hosts, fault)(2))
    assert isinstance(broken.outcome.error, RunLost)
    assert broken.first["host"] == hosts.name(2)
    assert broken.took_s < WITHIN_S
    assert not left_on(hosts, 2), "the far side did not end itself"
    hosts.unhole(2)


def test_14_a_partition_that_heals_changes_nothing(
    far: Notebook, hosts: Hosts, tmp_path: Path
) -> None:
    saves = "step = 0\nwhile True:\n    step += 1\n    open('step', 'w').write(str(step))\n"
    pipe = tmp_path / "ready"
    os.mkfifo(pipe)
    thread = threading.Thread(target=lambda: (pipe.read_text(), hosts.cut(1)))
    thread.start()
    outcome = far.run(MEET + READY + saves, f"--pool far --env READY={pipe}", gpus=1)
    thread.join()
    assert isinstance(outcome.error, RunLost)
    saved = Path("step").stat()
    assert not left_on(hosts, 1)
    hosts.heal(1)
    again = far.run(MEET, "--pool far", gpus=3)
    assert again.error is None
    assert again.run is not None and hosts.name(1) in again.run.hosts
    assert Path("step").stat().st_mtime_ns == saved.st_mtime_ns


@pytest.mark.parametrize("offset_s", [86_400, -86_400])
def test_54_clocks_a_day_apart_change_nothing(
    far: Notebook, hosts: Hosts, settings: Path, offset_s: int
) -> None:
    """Not by libfaketime: it shifts the clock by which `time.sleep` waits, too, and sleeps fail."""
    (settings / "sitecustomize.py").write_text(SHIFTED)
    told = f"[ $(hostname) = {hosts.name(2)} ] && export OFFSET_S={offset_s}\n"
    told += f"export PYTHONPATH={settings}:$PYTHONPATH\n"
    (settings / "environment").write_text(told)
    source = """
print(time.time())
if rank == 1:
    time.sleep(1)
    os.kill(os.getpid(), 9)
dist.barrier()
"""
    before = time.time()
    outcome = far.run(MEET + source, "--pool far", gpus=3)
    times = {rank: float(lines[-1]) - before for rank, lines in outcome.lines.items()}
    assert sum(abs(seconds) > 80_000 for seconds in times.values()) == 1
    failure = outcome.of_kind("ended")[0]["first"]
    assert (failure["rank"], failure["signal"]) == (1, "SIGKILL")
    assert all(0 <= event["time"] - before < 600 for event in outcome.events)
