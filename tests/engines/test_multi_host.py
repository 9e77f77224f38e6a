"""Ranks on several hosts: agents on this machine that share nothing but the pool."""

from pathlib import Path

import psutil
import pytest

from taas_magic.errors import RankFailed, RunLost
from tests.data.test_data_hosts import check_batches_come_from_host_to_host
from tests.harness import Notebook, Outcome, left_of, on_event, processes

ALL_REDUCE = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
"""


def run(notebook: Notebook, source: str, flags: str = "", gpus: int = 6) -> Outcome:
    return notebook.run(source, f"--pool many {flags}", gpus=gpus)


def first(outcome: Outcome) -> dict[str, object]:
    failure: dict[str, object] = outcome.of_kind("ended")[0]["first"]
    return failure


def test_ranks_are_placed_on_hosts_in_order_and_form_one_process_group(several: Notebook) -> None:
    source = """
total = torch.tensor([float(rank)])
dist.all_reduce(total)
print(rank, os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"])
int(total)
"""
    outcome = run(several, ALL_REDUCE + source)
    assert outcome.error is None
    assert outcome.lines == {r: [f"{r} {r // 2} {r % 2} 2"] for r in range(6)}
    assert outcome.run is not None and outcome.run.result == 15
    hosts = [event["host"] for event in outcome.of_kind("started")]
    assert len(set(hosts)) == 3
    assert sorted(outcome.run.hosts) == sorted(hosts)


def test_ranks_of_a_fast_host_stay_until_the_ranks_of_all_hosts_have_ended(
    several: Notebook,
) -> None:
    source = """
word = torch.full((4,), 7.0)
if rank == 0:
    dist.send(word, dst=5)
elif rank == 5:
    time.sleep(1)
    dist.recv(word.zero_(), src=0)
    print(word.tolist())
"""
    outcome = run(several, ALL_REDUCE + source)
    assert outcome.error is None
    assert outcome.lines == {5: ["[7.0, 7.0, 7.0, 7.0]"]}


def test_the_cause_is_first_although_its_consequence_is_reported_first(
    several: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 5's agent is suspended when the rank dies, until rank 0's failure is reported."""
    dead = tmp_path / "dead"
    source = f"""
import pathlib, psutil
dead = pathlib.Path({str(dead)!r})
if rank == 5:
    agent = psutil.Process().parent().parent()
    agent.suspend()
    dead.with_suffix(".new").write_text(f"{{agent.pid}} {{os.getpid()}}")
    dead.with_suffix(".new").rename(dead)
    os.kill(os.getpid(), 9)
if rank == 0:
    while not dead.exists():
        time.sleep(0.01)
    pid = int(dead.read_text().split()[1])
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie":
        time.sleep(0.01)
    raise RuntimeError("Connection closed by peer")
dist.all_reduce(torch.ones(1))
"""

    def resume(run: object) -> None:
        psutil.Process(int(dead.read_text().split()[0])).resume()

    with on_event(monkeypatch, lambda event: event["kind"] == "failure", resume):
        outcome = run(several, ALL_REDUCE + source)
    assert isinstance(outcome.error, RankFailed)
    assert (first(outcome)["rank"], first(outcome)["signal"]) == (5, "SIGKILL")
    failed = [event["failure"]["rank"] for event in outcome.of_kind("failure")]
    assert failed[0] != 5, "of those that follow from it, one was reported before"


def test_all_hosts_start_again_together(several: Notebook) -> None:
    source = """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if rank == 3 and attempt < 2:
    os.kill(os.getpid(), 9)
dist.all_reduce(torch.ones(1))
print("attempt", attempt)
"""
    outcome = run(several, ALL_REDUCE + source, "--max-restarts 2")
    assert outcome.error is None
    assert outcome.lines == {rank: ["attempt 2"] for rank in range(6)}
    restarts = outcome.of_kind("restart")
    assert [event["attempt"] for event in restarts] == [1, 2]
    assert all(event["failure"]["rank"] == 3 for event in restarts)
    assert len(outcome.of_kind("started")) == 9


def test_a_host_that_had_succeeded_starts_again_too(several: Notebook, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    source = """
import os, psutil, time
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])

def others_have_ended():
    pids = os.listdir(os.environ["PIDS"])
    return len(pids) == 5 and not any(psutil.pid_exists(int(pid)) for pid in pids)

if rank == 5 and attempt == 0:
    while not others_have_ended():
        time.sleep(0.05)
    raise ValueError("once")
print(attempt)
if attempt == 0:
    open(os.path.join(os.environ["PIDS"], str(os.getpid())), "w").close()
"""
    outcome = run(several, source, f"--max-restarts 1 --env PIDS={pids}")
    assert outcome.error is None
    assert outcome.lines[0] == ["0", "1"] and outcome.lines[5] == ["1"]


def test_one_host_whose_ranks_leave_early_is_named(several: Notebook) -> None:
    source = "if rank >= 4:\n    sys.exit(0)\ndist.all_reduce(torch.ones(1))\n"
    outcome = run(several, ALL_REDUCE + source)
    assert isinstance(outcome.error, RankFailed)
    assert first(outcome)["how"] == "left" and first(outcome)["rank"] in (4, 5)


def test_a_lost_host_is_replaced_when_restarts_are_left(several: Notebook) -> None:
    source = """
import psutil
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if rank == 0 and attempt == 0:
    next(it for it in psutil.Process().parents() if 'host.agent' in str(it.cmdline())).kill()
    time.sleep(600)
dist.barrier()
print("attempt", attempt)
"""
    outcome = run(several, ALL_REDUCE + source, "--max-restarts 1")
    assert outcome.error is None
    assert outcome.lines == {rank: ["attempt 1"] for rank in range(6)}
    [restart] = outcome.of_kind("restart")
    assert restart["failure"]["how"] == "host"
    hosts = [event["host"] for event in outcome.of_kind("started")]
    assert len(hosts) == 6 and len(set(hosts)) == 3  # the new host has the lost host's name


def test_a_host_that_replaces_another_gets_the_rest_of_the_time_limit(several: Notebook) -> None:
    source = """
import os, psutil, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(5)
    next(it for it in psutil.Process().parents() if 'host.agent' in str(it.cmdline())).kill()
    time.sleep(600)
time.sleep(3)
print("had more than was left")
"""
    outcome = run(several, source, "--max-restarts 1 --timeout 6", gpus=2)
    assert first(outcome)["how"] == "timeout" and outcome.lines == {}


def test_hosts_may_have_different_numbers_of_ranks(several: Notebook) -> None:
    source = 'print(os.environ["LOCAL_WORLD_SIZE"])'
    assert run(several, "", gpus=5).run is None
    outcome = run(several, ALL_REDUCE + source, "--uneven-hosts", gpus=5)
    assert outcome.error is None
    assert outcome.lines == {0: ["2"], 1: ["2"], 2: ["2"], 3: ["2"], 4: ["1"]}


def test_an_interrupt_reaches_the_ranks_of_all_hosts(several: Notebook) -> None:
    source = """
try:
    dist.barrier()
    if rank == 0:
        import psutil, signal
        os.kill(int(os.environ["NOTEBOOK"]), signal.SIGINT)
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise
"""
    outcome = run(several, ALL_REDUCE + source, f"--env NOTEBOOK={psutil.Process().pid}")
    assert isinstance(outcome.error, KeyboardInterrupt)
    assert outcome.run is not None and outcome.run.state == "INTERRUPTED"
    assert {rank for rank, lines in outcome.lines.items() if "interrupted" in lines} == set(
        range(6)
    )


def test_a_host_whose_agent_is_suspended_is_lost_and_its_ranks_end(several: Notebook) -> None:
    """docs/faults.md 10 with SIGSTOP: the connection stays open, but the agent does not answer."""
    source = """
import psutil, signal
if rank == 2:
    above = psutil.Process().parents()
    agent = next(it for it in above if 'host.agent' in str(it.cmdline()))
    agent.send_signal(signal.SIGSTOP)
dist.barrier()
time.sleep(600)
"""
    outcome = run(several, ALL_REDUCE + source)
    assert isinstance(outcome.error, RunLost)
    ended = outcome.of_kind("ended")[0]["first"]
    assert "it was silent for 9 s" in ended["message"]
    started = {event["host"]: event["pids"] for event in outcome.of_kind("started")}
    assert set(started[ended["host"]]) == {"2", "3"}
    pids = [pid for pids in started.values() for pid in pids.values()]
    assert not left_of(processes(pids))


@pytest.mark.nightly
def test_a_host_that_is_suspended_for_less_than_its_lease_continues(several: Notebook) -> None:
    source = """
import psutil, subprocess
if rank == 2:
    agent = next(it for it in psutil.Process().parents() if 'host.agent' in str(it.cmdline())).pid
    words = f"kill -STOP {agent}; sleep 2; kill -CONT {agent}"
    subprocess.Popen(["sh", "-c", words])
    time.sleep(4)
dist.barrier()
print("done")
"""
    outcome = run(several, ALL_REDUCE + source)
    assert outcome.error is None
    assert outcome.lines == {rank: ["done"] for rank in range(6)}


@pytest.mark.nightly
def test_the_rank_0_of_a_silent_host_is_gone_before_another_rank_0_starts(
    several: Notebook,
) -> None:
    source = """
import contextlib, os, psutil, signal, time
if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    with open("first", "w") as file:
        file.write(str(os.getpid()))
    above = psutil.Process().parents()
    agent = next(it for it in above if 'host.agent' in str(it.cmdline()))
    agent.send_signal(signal.SIGSTOP)
elif os.environ["RANK"] == "0":
    first, lives = int(open("first").read()), False
    with contextlib.suppress(psutil.NoSuchProcess):
        lives = psutil.Process(first).status() != psutil.STATUS_ZOMBIE
    print("the first one lives:", lives)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(600)
"""
    run(several, "print('all hosts are there')")
    outcome = run(several, source, "--max-restarts 1", gpus=2)
    assert outcome.error is None, outcome.shown
    assert outcome.lines[0] == ["the first one lives: False"]


@pytest.mark.nightly
def test_batches_come_from_host_to_host_under_tls(several: Notebook) -> None:
    check_batches_come_from_host_to_host(several, "many", gpus=4, tls=True)
