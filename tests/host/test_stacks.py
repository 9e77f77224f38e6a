"""Reports of hanging runs, `%taas stacks` and `%taas ranks`; no report while a rank computes."""

import contextlib
import gc
import inspect
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from taas_magic.config import Config
from taas_magic.display import head
from taas_magic.display.head import RunState, header_text
from taas_magic.display.view import TerminalScreen
from taas_magic.host import tracebacks
from taas_magic.host.output import PipeReader
from taas_magic.host.spec import LocalShare, Origin, RunSpec, ShareSpec
from taas_magic.host.stacks import StackMonitor, StackSample, sample_fetcher, waits_for
from taas_magic.host.watch import Ranks, last_progress_at
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import (
    Event,
    Hang,
    RankFailure,
    RanksEnded,
    RanksStarted,
    RankStack,
    Restart,
    RunEnded,
    StackFrame,
)
from taas_magic.notebook.magic import run_command
from taas_magic.notebook.run import RunDriver
from taas_magic.plan import Flags, HostCapacity, make_plan
from tests.events import Line, failure, line_of, new_state
from tests.eventually import HUNG_S, eventually
from tests.harness import AFTER_BEATS, Notebook, on_event
from tests.nightly import nightly

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

HANG = "--hang 2s"
MEET = """
import os, subprocess, sys, threading, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
"""


def stop(run: RunDriver) -> None:
    run_command(f"stop {run.run_id}", Config())


def says_hang(event: Line) -> bool:
    return event["kind"] == "hang" and bool(event["ranks"])


def hung(notebook: Notebook, source: str, patch: pytest.MonkeyPatch, gpus: int = 2) -> list[Any]:
    """Run a cell until the run is reported to hang, and stop the run.

    Returns:
        The report's rows, one for each rank, in the order of the ranks.
    """
    with on_event(patch, says_hang, stop) as seen:
        outcome = notebook.run(source, HANG, gpus=gpus)
    assert isinstance(outcome.error, KeyboardInterrupt)
    rows: list[Any] = seen[0]["ranks"]
    assert outcome.run is not None
    header = header_text(outcome.run.head, time.time())
    assert re.search(r"no rank had made progress for .* when the interrupted run ended:\n", header)
    assert all(row["place"] in header for row in rows)
    return sorted(rows, key=lambda row: row["rank"])


@pytest.mark.fault(6, 60)
def test_a_missing_collective_is_told_with_its_number(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits in a collective that rank 1 never calls. The report names both places."""
    source = """
if rank == 1:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
dist.all_reduce(torch.ones(1))
"""
    zero, one = hung(notebook, MEET + source, monkeypatch)
    assert zero["waits_for"] == "all_reduce #2 of torch.distributed"
    assert zero["place"] == "Cell In[1], line 12: dist.all_reduce(torch.ones(1))"
    assert one["waits_for"] == "a C call"
    assert one["place"] == "Cell In[1], line 11: lock.acquire()"
    assert one["quiet_s"] >= 2


def test_a_missing_collective_is_reported_within_half_a_minute(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "if rank == 1:\n    time.sleep(600)\ndist.barrier()\n"
    with on_event(monkeypatch, says_hang, stop) as seen:
        notebook.run(MEET + source)
    assert all(20 <= row["quiet_s"] < 60 for row in seen[0]["ranks"])


def test_the_flight_recorder_shows_an_all_reduce_of_ddp(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
loss = model(torch.ones(1, 2)).sum()
if rank == 0:
    threading.Event().wait()
loss.backward()
"""
    zero, one = hung(notebook, MEET + source, monkeypatch)
    assert zero["waits_for"] == "a lock, an event or a thread"
    assert zero["place"] == "Cell In[1], line 11: threading.Event().wait()"
    assert re.fullmatch(r"all_reduce #\d+ of torch.distributed", one["waits_for"])
    assert one["place"] == "Cell In[1], line 12: loss.backward()"


def test_a_c_call_that_sleeps_with_the_gil_is_reported(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
import ctypes

def wait():
    while True:
        ctypes.PyDLL(None).sleep(600)
wait()
"""
    [row] = hung(notebook, source, monkeypatch, gpus=1)
    assert row["waits_for"] == "a C call that holds the interpreter's lock"
    assert row["place"] == "Cell In[1], line 7, in wait: ctypes.PyDLL(None).sleep(600)"


def test_a_c_call_that_computes_with_the_gil_is_reported(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def look(run: RunDriver) -> None:
        shown.append(str(run_command("stacks", Config())))
        stop(run)

    with on_event(monkeypatch, lambda it: it["kind"] == "lines", look):
        notebook.run("import re\nprint('up')\nre.match('(a+)+b', 'a' * 60)", gpus=1)
    assert "  waits for a C call that holds the interpreter's lock (running)\n" in shown[0]
    assert "    Cell In[1], line 4: re.match('(a+)+b', 'a' * 60)\n" in shown[0]


@pytest.mark.fault(60)
def test_the_worker_that_a_data_loader_waits_for_is_told(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook.define("""\
import time

class Slow:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(600)
""")
    source = (
        "from torch.utils.data import DataLoader\nfor _ in DataLoader(Slow(), num_workers=1):\n"
    )
    [row] = hung(notebook, source + "    pass\n", monkeypatch, gpus=1)
    assert row["place"].startswith("Cell In[2], line 3: for _ in DataLoader(")
    assert row["waits_for"].startswith("a DataLoader's worker (process ")
    assert row["waits_for"].endswith("at Cell In[1], line 8, in __getitem__: time.sleep(600))")


LATER = "--hang 4s"
"""Flag with a hang limit that is shorter than the runs, and longer than several heartbeats."""

COMPUTES = {  # with pauses, because a small part of a core is enough
    "a rank": (
        "x = torch.ones(300, 300)\nwhile time.monotonic() < until:\n"
        "    for _ in range(50): x = x @ x\n    time.sleep(0.2)\n"
    ),
    "its child": (
        "code = 'import time; t = time.monotonic() + 6\\nwhile time.monotonic() < t: '"
        "'sum(range(2_000_000)); time.sleep(0.2)'\n"
        "subprocess.run([sys.executable, '-c', code])\n"
    ),
    "prints": "while time.monotonic() < until:\n    print('on')\n    time.sleep(0.4)\n",
}


@pytest.mark.parametrize("how", COMPUTES)
def test_a_run_that_makes_progress_is_not_reported_to_hang(notebook: Notebook, how: str) -> None:
    lines = COMPUTES[how].replace("\n", "\n    ")
    source = f"until = time.monotonic() + 6\nif rank == 0:\n    {lines}\ndist.barrier()\n"
    outcome = notebook.run(MEET + source, LATER)
    assert outcome.error is None
    assert not outcome.of_kind("hang")


def test_collectives_count_as_progress(notebook: Notebook) -> None:
    source = "for _ in range(12):\n    time.sleep(0.5)\n    dist.barrier()\n"
    outcome = notebook.run(MEET + source, LATER)
    assert outcome.error is None
    assert not outcome.of_kind("hang")


def test_the_report_of_a_hang_is_withdrawn_when_the_run_continues(
    notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"""
import os, time
while not os.path.exists("{tmp_path}/go on"):
    time.sleep(0.2)
print("on")
while not os.path.exists("{tmp_path}/end"):
    time.sleep(0.2)
"""

    def go_on(run: RunDriver) -> None:
        (tmp_path / "go on").touch()

    def end(run: RunDriver) -> None:
        (tmp_path / "end").touch()

    with (
        on_event(monkeypatch, says_hang, go_on),
        on_event(monkeypatch, lambda it: it["kind"] == "hang" and not it["ranks"], end),
    ):
        outcome = notebook.run(source, HANG, gpus=1)
    assert outcome.error is None
    assert [bool(event["ranks"]) for event in outcome.of_kind("hang")][:2] == [True, False]


def test_the_report_of_a_hang_says_which_rank_has_ended(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import os, time\nif os.environ['RANK'] == '0':\n    time.sleep(600)\n"
    zero, one = hung(notebook, source, monkeypatch)
    assert (zero["waits_for"], one["waits_for"]) == ("a C call", "nothing: it has ended")


def test_hang_0_turns_reports_of_hangs_off(notebook: Notebook) -> None:
    outcome = notebook.run("import time\ntime.sleep(3)", "--hang 0", gpus=1)
    assert outcome.error is None
    assert not outcome.of_kind("hang")


def stacks_with(*words: str) -> str:
    """Run `%taas stacks` until its output has all `words`, or time is over; return the output."""
    shown = ""

    def is_there() -> bool:
        nonlocal shown
        shown = str(run_command("stacks", Config()))
        return all(word in shown for word in words)

    with contextlib.suppress(AssertionError):  # the assertions name what is missing
        eventually(is_there)
    return shown


def test_the_command_stacks_shows_all_threads_and_children(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
import multiprocessing, subprocess, threading, time

def in_a_thread():
    threading.Event().wait()

forked = multiprocessing.get_context("fork")
is_up = forked.Event()

def in_a_child():
    is_up.set()
    time.sleep(600)

threading.Thread(target=in_a_thread, name="reader", daemon=True).start()
forked.Process(target=in_a_child, daemon=True).start()
program = subprocess.Popen(["sleep", "600"])
is_up.wait()
print("ready")
time.sleep(600)
"""
    awaited = (
        "waits for a C call (sleeping)",
        "MainThread:\n    Cell In[1], line 20: time.sleep(600)",
        "Cell In[1], line 6, in in_a_thread: ",
        "Cell In[1], line 13, in in_a_child: time.sleep(600)",
        ": sleep 600\n    waits for an unknown event (sleeping)",
    )
    shown: list[str] = []

    def look(run: RunDriver) -> None:
        shown.append(stacks_with(*awaited))
        stop(run)

    with on_event(monkeypatch, lambda it: it["kind"] == "lines", look):
        notebook.run(source, gpus=1)
    assert shown[0].startswith("rank 0 on ")
    assert "reader:\n" in shown[0]
    assert [words for words in awaited if words not in shown[0]] == []
    assert "taas-" not in shown[0]


BUSY = """
import sys
from pathlib import Path
from taas_magic.host import tracebacks

tracebacks.write_stack_on_signal(Path(sys.argv[1]))
print("up", flush=True)
while True:
    pass
"""


def test_a_process_that_computes_gets_no_signal(tmp_path: Path) -> None:
    """A signal could crash the process, as faulthandler would read frames while they change."""
    written = tmp_path / "stacks"
    command = [sys.executable, "-c", BUSY, str(written)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_RUNNING)
        samples = [sample_fetcher(process.pid, written) for _ in range(20)]
        process.kill()
    assert {waits_for(sample) for sample in samples} == {"nothing: it is running"}
    assert not any(sample.threads for sample in samples)
    assert not written.read_text()


FAMILY = Path(__file__).parents[1] / "children" / "forked_family.py"


def test_each_fork_has_its_own_stack_and_a_program_gets_no_signal(tmp_path: Path) -> None:
    """A process, its fork and another program: the process's main thread is in a C call."""
    written = tmp_path / "stacks"
    command = [sys.executable, str(FAMILY), str(written)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
        eventually(lambda: {it.status() for it in family} == {psutil.STATUS_SLEEPING})
        sample = sample_fetcher(process.pid, written)
        states = [it.status() for it in family]
        for one in family:
            one.kill()
    assert states == 3 * [psutil.STATUS_SLEEPING]
    found = [it.main[-1].function if it.main else "" for it in (sample, *sample.children)]
    assert found == ["lock_twice", "größe", ""]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="collects between instructions only")
def test_no_garbage_is_collected_while_the_frames_of_threads_are_read() -> None:
    collected_in = []

    def note(phase: str, info: dict[str, int]) -> None:
        if (here := inspect.currentframe()) and here.f_back:
            collected_in.append(here.f_back.f_code)

    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        for _ in range(100):
            kept = [tracebacks.current_frames(), {}]
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
    assert threading.get_ident() in kept[0]
    assert collected_in, "nothing was collected at all: this shows nothing"
    assert tracebacks.current_frames.__code__ not in collected_in


SLOW_LOADER = """\
import time, taas, torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(0.2 if index == 0 else 600)

slow = taas.register(DataLoader(Slow(), collate_fn=len))
"""


def test_the_command_stacks_shows_fetchers_and_their_workers(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook.define(SLOW_LOADER)
    shown: list[str] = []

    def look(run: RunDriver) -> None:
        shown.append(stacks_with("Cell In[1], line 9, in __getitem__"))
        stop(run)

    with on_event(monkeypatch, lambda it: it["kind"] == "lines", look):
        notebook.run("for batch in slow:\n    print(batch)", "--cpus 1", gpus=1)
    assert shown[0].startswith("rank 0 on ")
    assert re.search(r"^fetcher 0 on \S+ \(process \d+\)$", shown[0], re.MULTILINE)
    assert re.search(r"^    child \d+: worker$", shown[0], re.MULTILINE)
    assert "Cell In[1], line 9, in __getitem__" in shown[0]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["queue.py", "threading.py"], "a queue"),
        (["subprocess.py"], "a child process"),
        (["http/client.py", "socket.py"], "a C call"),
        (["site-packages/torch/utils/data/dataloader.py", "queue.py"], "a DataLoader's worker"),
        (["site-packages/taas_magic/data/stream.py", "queue.py"], "batches of a registered loader"),
        (["site-packages/torch/distributed/distributed_c10d.py"], "recv of torch.distributed"),
    ],
)
def test_the_frames_of_a_stack_show_what_a_process_waits_for(files: list[str], words: str) -> None:
    library = os.path.dirname(os.__file__)
    frames = [StackFrame(f"{library}/{file}", 1, "recv") for file in files]
    cell = StackFrame("Cell In[1]", 1, "<module>")
    sample = StackSample(1, "", "sleeping", {"MainThread": [cell, *frames]}, answers=True)
    assert waits_for(sample) == words


def test_a_child_that_hangs_in_its_fork_is_reported() -> None:
    forked = StackFrame(
        f"{os.path.dirname(os.__file__)}/multiprocessing/popen_fork.py", 66, "_launch"
    )
    sample = StackSample(1, "python", "sleeping", {"MainThread": [forked]})
    assert waits_for(sample).startswith("os.fork, in which Python before 3.11.10 can hang")


def test_a_suspended_host_or_a_wait_for_the_user_is_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, said, reader = Ranks([0]), threading.Event(), mock.Mock(PipeReader)
    plan = make_plan(Flags(gpus=1), HostCapacity(gpus=1, cores=1), "a-run")
    spec = ShareSpec(RunSpec(plan, str(tmp_path), Origin("/", {}, ())), 0, plan.hosts[0])
    share = LocalShare(spec, str(tmp_path), None, "/", {}, ())
    with subprocess.Popen(["sleep", "600"]) as sleeping:
        ranks.record_start({0: sleeping.pid})
        reader.last_output_at.return_value = 0.0
        monkeypatch.setattr(StackMonitor, "_report_hang", lambda monitor, still_s: said.set())
        monitor = StackMonitor(share, ranks, reader, tmp_path, print)
        monitor.is_paused = True  # a rank waits for the user
        for second in range(3, 303, 3):
            monitor.check(time.monotonic() + second)
        monitor.is_paused = False
        woke = time.monotonic() + 300
        monitor.check(woke)
        assert not said.is_set()
        assert woke - last_progress_at(ranks.states(), woke) < 10
        for second in range(3, 63, 3):
            monitor.check(woke + second)
        sleeping.kill()
    assert said.wait(HUNG_S)


def test_stacks_of_a_rank_that_is_stopped(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"print('up')\n{AFTER_BEATS}\nos.kill(os.getpid(), 19)\n"
    shown: list[str] = []

    def look(run: RunDriver) -> None:
        while not begun:  # a rank's line may arrive before the event with the rank's pid
            threading.Event().wait(0.05)
        [pid] = begun[0]["pids"].values()
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            threading.Event().wait(0.05)
        shown.append(str(run_command("stacks", Config())))

    with (
        on_event(monkeypatch, lambda it: it["kind"] == "started", lambda run: None) as begun,
        on_event(monkeypatch, lambda it: it["kind"] == "lines", look),
    ):
        notebook.run(source, gpus=1)
    assert "waits for SIGCONT: another program stopped it (SIGSTOP) (stopped" in shown[0]
    assert (
        "MainThread, when it was last seen:\n    Cell In[1], line 12: os.read(told, 1)" in shown[0]
    )


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("disk-sleep", "an uninterruptible system call"),
        ("running", "nothing: it is running"),
        ("sleeping", "a C call"),
    ],
)
def test_the_systems_process_state_shows_what_a_process_waits_for(state: str, words: str) -> None:
    frames = [StackFrame("Cell In[1]", 1, "<module>")]
    sample = StackSample(1, "", state, {"MainThread": frames}, answers=True)
    assert waits_for(sample) == words


def row(rank: int, place: str = "Cell In[1], line 3: x", waits: str = "a lock") -> RankStack:
    return RankStack(rank=rank, pid=rank + 10, quiet_s=60.0, place=place, waits_for=waits)


ALL = "all_reduce #7 of torch.distributed"


def hang(host: str, *rows: RankStack, attempt: int = 0) -> Event:
    return Hang(host=host, attempt=attempt, ranks=list(rows))


def started(host: str, *ranks: int, attempt: int = 0) -> Event:
    pids = {rank: rank + 10 for rank in ranks}
    return RanksStarted(host=host, attempt=attempt, pids=pids)


def of_events(*events: Event) -> RunState:
    state = new_state(world_size=4, n_hosts=2, state="RUNNING")
    for seen in events:
        state.apply(seen, 100.0)
    return state


def test_the_status_header_groups_hanging_ranks_and_lists_the_different_one_first() -> None:
    both = started("gpu1", 0, 1), started("gpu2", 2, 3)
    first = hang("gpu1", row(0, waits=ALL), row(1, "Cell In[1], line 9: <b>", "a lock"))
    state = of_events(*both, first, hang("gpu2", row(2, waits=ALL), row(3, waits=ALL)))
    lines = header_text(state, 105.0).splitlines()
    at = next(
        i for i, line in enumerate(lines) if "no rank has made progress for 1 min 05 s" in line
    )
    assert lines[at + 2].split()[:2] == ["1", "gpu1"]
    assert lines[at + 2].endswith("a lock")
    assert lines[at + 3].split()[:3] == ["0,2-3", "2", "hosts"]
    assert lines[at + 3].endswith(ALL)
    assert "&lt;b&gt;" in head.mime_bundle(state, 105.0)["text/html"]


def test_a_terminal_shows_a_hang_once(capsys: pytest.CaptureFixture[str]) -> None:
    state, screen = of_events(started("gpu1", 0), hang("gpu1", row(0))), TerminalScreen()
    screen.show(state, 101.0)
    screen.show(state, 102.0)
    assert capsys.readouterr().out.count("no rank has made progress") == 1
    state.apply(hang("gpu1"), 103.0)
    screen.show(state, 103.0)
    state.apply(hang("gpu1", row(0)), 104.0)
    screen.show(state, 104.0)
    assert capsys.readouterr().out.count("no rank has made progress") == 1


def test_the_status_header_shows_no_hang_while_a_host_makes_progress() -> None:
    both = started("gpu1", 0, 1), started("gpu2", 2, 3)
    assert not of_events(*both, hang("gpu1", row(0))).hang
    said = (*both, hang("gpu1", row(0)), hang("gpu2", row(2)))
    assert of_events(*said).hang
    assert not of_events(*said, hang("gpu2")).hang
    assert not of_events(*said, RunEnded(state="FAILED")).hang
    settled = RanksEnded(host="gpu2")
    assert of_events(*both, settled, hang("gpu1", row(0))).hang


def test_a_lost_host_does_not_delay_the_report_of_a_hang() -> None:
    both = started("gpu1", 0, 1), started("gpu2", 2, 3)
    lost = RankFailure(host="gpu2", failure=failure(how="host", host="gpu2"))
    [left] = of_events(*both, hang("gpu2", row(2)), lost, hang("gpu1", row(0))).hang
    assert left.host == "gpu1"  # a federation goes on without a lost host
    again = Restart(attempt=1), started("gpu1", 0, 1, attempt=1), started("gpu3", 2, 3, attempt=1)
    late = RanksEnded(host="gpu1", attempt=0)
    replaced = *both, lost, *again, late, hang("gpu3", row(2), attempt=1)
    assert not of_events(*replaced).hang
    state = of_events(*replaced, hang("gpu1", row(0), attempt=1))
    assert {stand.host for stand in state.hang} == {"gpu1", "gpu3"}
    assert "hosts 2 (gpu1, gpu3)" in header_text(state, 100.0)


@pytest.mark.parametrize(
    ("call", "said", "advice"),
    [
        (
            'os.environ["MASTER_PORT"] = "29517"; dist.init_process_group("gloo")',
            "MASTER_PORT",
            "TORCHELASTIC_USE_AGENT_STORE",
        ),
        (
            'dist.init_process_group("gloo", "tcp://127.0.0.1:29517", rank=rank, world_size=2)',
            "init_method='tcp://127.0.0.1:29517'",
            "TORCHELASTIC_USE_AGENT_STORE",
        ),
        (
            'dist.init_process_group("gloo", rank=0, world_size=2)',
            "passed rank=0 to init_process_group on a rank with another number",
            "Leave out rank and world_size",
        ),
        nightly(
            'dist.init_process_group("gloo", rank=rank, world_size=4)',
            "passed world_size=4 to init_process_group, but there are 2 ranks",
            "Leave out rank and world_size",
        ),
    ],
)
def test_a_note_says_why_ranks_wait_in_init_process_group(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, call: str, said: str, advice: str
) -> None:
    """Guides for PBS set the address, as in `initDist`; tutorials pass the rank."""

    def says_why(event: Line) -> bool:
        return event["kind"] == "note" and said in event["text"]

    source = f"""
import os, torch.distributed as dist
rank = int(os.environ["RANK"])
{call}
"""
    with on_event(monkeypatch, says_why, stop) as seen:
        outcome = notebook.run(source, HANG)
    assert isinstance(outcome.error, KeyboardInterrupt)
    assert advice in seen[0]["text"]


def knows_use(report: Line) -> bool:
    """Return whether a `usage` event shows rank 1 in its endless loop, and rank 0 in a wait."""
    idle, busy = report["ranks"]
    there = re.search(r"Cell In\[\d+\], line (10|11): ", busy["place"])
    uses_more = busy["cpus"] > idle["cpus"] and busy["memory_bytes"] > 10e6
    return bool(there) and uses_more and "Event().wait()" in idle["place"]


def test_the_command_ranks_shows_what_each_rank_uses(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook.define(
        "import taas\nfrom torch.utils.data import DataLoader\n"
        "numbers = DataLoader(range(40), 2)\ntaas.register(numbers)"
    )
    source = """
import os, threading, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
batches = iter(numbers)
for number in range(3):
    next(batches)
print("up", flush=True)
while os.environ["RANK"] == "1":
    sum(range(500_000)) and time.sleep(0.1)
taas.log(step=7, loss=1)
work = dist.all_reduce(torch.ones(1), async_op=True)
threading.Event().wait()
"""
    table: list[list[str]] = []

    def cpu(row: list[str]) -> int:
        return int(row[3].removesuffix(" %"))

    def is_known() -> bool:
        lines = str(run_command("ranks", Config())).splitlines()
        table[:] = [re.split(r"  +", line) for line in lines]
        if [len(row) for row in table] != [11, 11, 11]:
            return False
        _, idle, busy = table
        events = map(line_of, RunFolder(path[0]).read_events())
        is_reported = any(it["kind"] == "usage" and knows_use(it) for it in events)
        has_counts = (
            is_reported and idle[5] == busy[5] == "3" and idle[9] == "7" and idle[8] != "0 %"
        )
        are_there = "Event().wait()" in idle[10] and re.search(r"line (10|11): ", busy[10])
        return has_counts and are_there is not None and cpu(busy) > cpu(idle)

    path: list[Path] = []

    def look(run: RunDriver) -> None:
        path.append(run.path)
        with contextlib.suppress(AssertionError):  # the assertions name what is missing
            eventually(is_known)
        stop(run)

    try:
        with on_event(monkeypatch, lambda it: it["kind"] == "lines", look):
            outcome = notebook.run(source)
    finally:
        notebook.define("taas.unregister(numbers)")
    assert isinstance(outcome.error, KeyboardInterrupt)
    head, idle, busy = table
    rates = ["batches", "per second", "waited", "in collectives", "step"]
    assert head == ["rank", "host", "pid", "CPU", "memory", *rates, "at"]
    assert idle[0] == "0" and busy[0] == "1" and idle[2] != busy[2]
    assert cpu(busy) > cpu(idle)
    assert idle[4].endswith("MB") and idle[5] == busy[5] == "3", table
    assert float(idle[6]) > 0 and float(busy[6]) > 0
    assert idle[8] != "0 %" == busy[8] and (idle[9], busy[9]) == ("7", "-")
    assert "threading.Event().wait()" in idle[10]
    assert re.search(r"Cell In\[\d+\], line (10|11): ", busy[10])
    assert any(map(knows_use, outcome.of_kind("usage"))), outcome.of_kind("usage")
