"""Faults of runs on the local engine (docs/faults.md): clear errors, and no process left."""

import contextlib
import os
import re
import signal
import socket
from pathlib import Path

import pytest

from taas_magic.errors import RankFailed, RunLost, RunTimeout
from taas_magic.host.watch import oom_kills
from tests.events import Line
from tests.harness import (
    AFTER_BEATS,
    Notebook,
    Outcome,
    below,
    forkservers,
    left_of,
    on_event,
    processes,
)
from tests.nightly import nightly

TORCHS_PORT = 29500
"""Default port of torchrun's rendezvous."""

ALL_REDUCE = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
"""


def first(outcome: Outcome) -> Line:
    assert outcome.run is not None
    failure: Line = outcome.of_kind("ended")[0]["first"]
    return failure


@pytest.mark.fault(1)
def test_the_first_failure_is_the_one_that_raised(notebook: Notebook) -> None:
    outcome = notebook.run(
        ALL_REDUCE + "if rank == 1:\n    1 / 0\ndist.all_reduce(torch.ones(1))\n"
    )
    assert isinstance(outcome.error, RankFailed)
    assert outcome.error.rank == 1
    assert outcome.error.etype == "ZeroDivisionError"
    assert re.search(r"Cell In\[\d+\], line 8\b", outcome.shown)
    assert re.search(r"-> 8 +1 / 0", outcome.shown)
    assert outcome.run is not None and outcome.run.state == "FAILED"
    others = [failure for failure in outcome.run.failures if failure.rank == 0]
    assert all(failure.consequence for failure in others)


def test_the_cause_of_a_failure_says_what_torch_found(notebook: Notebook) -> None:
    outcome = notebook.run(
        "import torch\ntorch.nn.Linear(1, 1).load_state_dict({'module.weight': torch.ones(1)})",
        gpus=1,
    )
    cause = str(outcome.error)
    assert 'for Linear: Missing key(s) in state_dict: "weight", "bias".' in cause
    assert 'Unexpected key(s) in state_dict: "module.weight".' in cause


@pytest.mark.fault(2)
def test_a_killed_rank_is_named_with_its_signal(notebook: Notebook) -> None:
    source = "if rank == 1:\n    os.kill(os.getpid(), 9)\ndist.all_reduce(torch.ones(1))\n"
    outcome = notebook.run(ALL_REDUCE + source)
    assert first(outcome)["rank"] == 1
    assert first(outcome)["signal"] == "SIGKILL"


@pytest.mark.fault(3)
def test_a_segfault_says_so_and_where(notebook: Notebook) -> None:
    outcome = notebook.run(ALL_REDUCE + "if rank == 0:\n    import ctypes; ctypes.string_at(0)\n")
    assert first(outcome)["rank"] == 0
    assert first(outcome)["signal"] == "SIGSEGV"
    assert "string_at" in outcome.shown


@pytest.mark.fault(39)
def test_a_rank_without_descriptors_says_so(notebook: Notebook) -> None:
    source = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
kept = []
while True:
    kept.append(os.dup(0))
"""
    outcome = notebook.run(source)
    assert first(outcome)["etype"] == "OSError" and "Too many open files" in outcome.shown
    assert re.search(r"Cell In\[\d+\], line 7\b", outcome.shown)
    assert outcome.run is not None
    assert "another exception occurred" not in outcome.run.logs(first(outcome)["rank"])
    assert notebook.run("print('fine')").error is None


@pytest.mark.fault(56)
def test_a_run_takes_no_port_that_another_program_has(notebook: Notebook) -> None:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # another program uses the port already
            stack.enter_context(socket.create_server(("127.0.0.1", TORCHS_PORT)))
        source = f"assert os.environ['MASTER_PORT'] != '{TORCHS_PORT}'\n"
        assert notebook.run(ALL_REDUCE + source).error is None


def test_an_abort_in_native_code_shows_its_last_output(notebook: Notebook) -> None:
    source = "os.write(2, b'terminate called: bad thing\\n')\nos.abort()\n"
    outcome = notebook.run("import os\n" + source, gpus=1)
    assert first(outcome)["signal"] == "SIGABRT"
    assert "terminate called: bad thing" in outcome.shown


@pytest.mark.fault(5)
def test_a_stopped_rank_is_named_with_its_stack(notebook: Notebook) -> None:
    source = f"""
{AFTER_BEATS}
def stuck_here():
    if rank == 1:
        os.kill(os.getpid(), 19)
stuck_here()
dist.all_reduce(torch.ones(1))
"""
    outcome = notebook.run(ALL_REDUCE + source)
    assert first(outcome)["rank"] == 1
    assert first(outcome)["how"] == "stopped"
    assert any("Cell In[" in line for line in first(outcome)["stack"])
    assert "its last known Python stack" in outcome.shown


@pytest.mark.fault(7)
def test_a_slow_rank_is_left_alone(notebook: Notebook) -> None:
    """Rank 0 waits for rank 1 in a collective for several seconds. The run succeeds."""
    source = "if rank == 1:\n    time.sleep(7)\ndist.all_reduce(torch.ones(1))\nprint('through')\n"
    outcome = notebook.run(ALL_REDUCE + source)
    assert outcome.error is None
    assert outcome.lines == {0: ["through"], 1: ["through"]}


@pytest.mark.fault(8)
def test_leaving_early_is_no_success(notebook: Notebook) -> None:
    """If rank 1 calls `sys.exit(0)` while rank 0 runs, the run fails and names rank 1."""
    source = "if rank == 1:\n    sys.exit(0)\ntime.sleep(60)\n"
    outcome = notebook.run(ALL_REDUCE + source)
    assert first(outcome)["rank"] == 1
    assert first(outcome)["how"] == "left"


def test_a_rank_that_waits_for_an_ended_rank_gets_advice(notebook: Notebook) -> None:
    outcome = notebook.run(
        "import os, torch\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "for _ in range(3 + int(os.environ['RANK'])):\n    dist.all_reduce(torch.ones(1))"
    )
    assert isinstance(outcome.error, RankFailed) and outcome.error.rank == 1
    assert "All ranks must take the same number of steps" in outcome.shown


def test_a_run_succeeds_if_all_ranks_call_sys_exit_0(notebook: Notebook) -> None:
    assert notebook.run("import sys\nprint('bye')\nsys.exit(0)\n").error is None


def test_a_rank_that_calls_os_exit_fails(notebook: Notebook) -> None:
    outcome = notebook.run("import os\nos._exit(0)\n", gpus=1)
    assert first(outcome)["how"] == "exit"


def test_sys_exit_with_a_code_fails(notebook: Notebook) -> None:
    outcome = notebook.run("import sys\nsys.exit(3)\n", gpus=1)
    assert isinstance(outcome.error, RankFailed)
    assert outcome.error.etype == "SystemExit"


@pytest.mark.fault(9)
@pytest.mark.skipif(os.geteuid() != 0, reason="a memory limit takes root")
def test_out_of_memory_is_told_from_a_kill(notebook: Notebook, memory_limit: Path) -> None:
    """Start a rank in a cgroup with a memory limit, as in a container, and exceed the limit."""
    [server] = forkservers(below(os.getpid()))
    root = memory_limit.parent
    limited_by = [Path(name).parent for name in oom_kills(server.pid)]
    home = next((folder for folder in limited_by if folder.is_relative_to(root)), root)
    source = "grown = [bytearray(1 << 20) for _ in range(2000)]\n"
    # While the forkserver imports modules, one of its forks starts the ranks.
    servers = [server, *server.children()]

    def put_in(folder: Path) -> None:
        for process in servers:
            with contextlib.suppress(ProcessLookupError):  # the fork has ended
                (folder / "cgroup.procs").write_text(str(process.pid))

    put_in(memory_limit)
    try:
        outcome = notebook.run(source, gpus=1)
    finally:
        put_in(home)
    assert first(outcome)["signal"] == "SIGKILL"
    assert "killed by the memory limit of its cgroup" in outcome.shown


@pytest.mark.fault(9)
@pytest.mark.skipif(os.geteuid() != 0, reason="a memory limit takes root")
def test_a_kill_is_not_called_out_of_memory_because_of_a_stranger(
    notebook: Notebook, memory_limit: Path
) -> None:
    """The memory limit kills a program that the rank starts. Then the rank sends itself SIGKILL."""
    source = f"""
import os, subprocess, sys
enter = "import os; open({str(memory_limit / "cgroup.procs")!r}, 'w').write(str(os.getpid()))"
grow = "grown = [bytearray(1 << 20) for _ in range(2000)]"
print(subprocess.run([sys.executable, "-c", f"{{enter}}\\n{{grow}}"]).returncode)
sys.stdout.flush()
os.kill(os.getpid(), 9)
"""
    outcome = notebook.run(source, gpus=1)
    assert outcome.lines[0] == ["-9"]
    assert first(outcome)["signal"] == "SIGKILL" and first(outcome)["message"] == ""
    assert "memory" not in str(outcome.error)


KILL_AGENT = """
import os, psutil, time
agent = next(it for it in psutil.Process().parents() if 'host.agent' in str(it.cmdline()))
supervisor = agent.parent()
while not os.path.exists({go!r}):
    time.sleep(0.01)
if os.environ["RANK"] == "0":
    {killed}.kill()
time.sleep(60)
"""


@pytest.mark.fault(10)
@pytest.mark.parametrize("killed", ["agent", nightly("supervisor")])
def test_a_dead_agent_takes_its_ranks_along(
    notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    go = tmp_path / "go"
    with on_event(monkeypatch, lambda it: it["kind"] == "started", lambda run: go.touch()) as seen:
        outcome = notebook.run(KILL_AGENT.format(go=str(go), killed=killed))
    assert outcome.run is not None and outcome.run.state == "LOST"
    assert not left_of(processes(seen[0]["pids"].values()))
    assert notebook.run("print('again')", gpus=1).error is None


@pytest.mark.fault(55)
@pytest.mark.parametrize("daemon", ["fork twice", "setsid program"])
def test_a_daemon_of_the_cell_ends_with_the_run(notebook: Notebook, daemon: str) -> None:
    sources = {
        "fork twice": """
import os, time
reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    if (pid := os.fork()) == 0:
        for fd in (0, 1, 2):
            os.close(fd)
        time.sleep(600)
    os.write(writing, str(pid).encode())
    os._exit(0)
print(int(os.read(reading, 100)))
""",
        "setsid program": """
import subprocess
print(subprocess.Popen(["setsid", "sleep", "600"], start_new_session=True).pid)
""",
    }
    outcome = notebook.run(sources[daemon], gpus=1)
    assert outcome.error is None
    assert not left_of(processes([int(outcome.lines[0][0])]))


@pytest.mark.fault(55)
def test_a_program_that_writes_on_and_on_keeps_no_run_from_its_end(notebook: Notebook) -> None:
    """A child that writes output endlessly is ended with the run, which succeeds."""
    source = "import subprocess\npid = subprocess.Popen(['yes']).pid"
    outcome = notebook.run(source, "--out pid", gpus=1)
    assert outcome.error is None
    assert not left_of(processes([notebook.shell.user_ns["pid"]]))


@pytest.mark.fault(6)
def test_a_timeout_says_where_the_ranks_stood(notebook: Notebook) -> None:
    source = "import time\ndef long_wait():\n    time.sleep(600)\nlong_wait()\n"
    outcome = notebook.run(source, gpus=1, flags="--timeout 10")
    assert isinstance(outcome.error, RunTimeout)
    assert "line 4: time.sleep(600)" in outcome.shown


@pytest.mark.fault(2)
def test_restarts_until_it_works(notebook: Notebook) -> None:
    """Ranks start again until an attempt succeeds."""
    source = """
import os
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt)
if attempt < 2 and os.environ["RANK"] == "1":
    os.kill(os.getpid(), 9)
attempt
"""
    outcome = notebook.run(source, gpus=2, flags="--max-restarts 3")
    assert outcome.error is None
    assert outcome.run is not None and outcome.run.result == 2
    assert [event["attempt"] for event in outcome.of_kind("restart")] == [1, 2]
    assert outcome.of_kind("restart")[0]["failure"]["signal"] == "SIGKILL"


@pytest.mark.fault(2)
def test_restarts_end(notebook: Notebook) -> None:
    """A rank that always dies fails the run after `--max-restarts` restarts."""
    outcome = notebook.run("import os\nos.kill(os.getpid(), 9)\n", gpus=1, flags="--max-restarts 1")
    assert isinstance(outcome.error, RankFailed)
    assert len(outcome.of_kind("started")) == 2


def test_an_interrupt_ends_the_ranks(notebook: Notebook) -> None:
    source = "import os, time\nif os.environ['RANK'] == '0':\n    os.kill(%d, 2)\ntime.sleep(600)\n"
    outcome = notebook.run(source % os.getpid())
    assert isinstance(outcome.error, KeyboardInterrupt)
    assert outcome.run is not None and outcome.run.state == "INTERRUPTED"
    assert notebook.run("print('usable')", gpus=1).error is None


def test_an_interrupted_cell_may_clean_up(notebook: Notebook) -> None:
    source = """
try:
    dist.barrier()
    if rank == 0:
        os.kill(%d, 2)
    time.sleep(600)
finally:
    print("saved")
"""
    outcome = notebook.run(ALL_REDUCE + source % os.getpid())
    assert isinstance(outcome.error, KeyboardInterrupt)
    assert outcome.lines == {0: ["saved"], 1: ["saved"]}


def test_an_interrupt_before_the_cell_shows_none_of_our_frames(notebook: Notebook) -> None:
    notebook.define(f"""
import os, time
def arrive():
    os.kill({os.getpid()}, 2)
    time.sleep(600)
class Slow:
    def __reduce__(self):
        return arrive, ()
slow = Slow()
""")
    outcome = notebook.run("print(slow)")
    assert isinstance(outcome.error, KeyboardInterrupt)
    assert outcome.lines == {}


AFTER_THE_CELL = {
    "a thread": "threading.Thread(target=arrive).start()",
    "a result": "class Slow:\n    def __reduce__(self):\n        return arrive()\nslow = Slow()",
}
"""Code for the end of a cell. The rank then calls `arrive` after the cell's last line."""


@pytest.mark.parametrize("what", AFTER_THE_CELL)
def test_an_interrupt_after_the_cell_shows_none_of_our_frames(
    what: str, notebook: Notebook
) -> None:
    source = f"""
import os, threading, time
slow = None
def arrive():
    os.kill({os.getpid()}, 2)
    time.sleep(600)
{AFTER_THE_CELL[what]}
"""
    outcome = notebook.run(source, "--out slow", gpus=1)
    assert isinstance(outcome.error, KeyboardInterrupt)
    assert outcome.lines == {}


def test_a_keyboard_interrupt_between_the_cell_and_the_end_of_its_rank_shows_no_traceback(
    notebook: Notebook,
) -> None:
    source = """
import sys
def interrupt(frame, event, argument):
    if frame.f_code.co_name == "__exit__" and frame.f_back.f_code.co_name == "_work_and_wait":
        sys.setprofile(None)
        raise KeyboardInterrupt
sys.setprofile(interrupt)
"""
    outcome = notebook.run(source, gpus=1)
    assert isinstance(outcome.error, RankFailed)  # nobody has interrupted the run
    assert outcome.lines == {}


def test_an_interrupt_while_a_rank_ends_shows_none_of_our_frames(notebook: Notebook) -> None:
    """When the interrupt arrives, rank 0 has run its cell and waits until rank 1 ends."""
    source = f"""
import os, time
import torch.distributed as dist
class Last:
    def __del__(self):
        os.kill({os.getpid()}, 2)
dist.init_process_group("gloo")
if dist.get_rank():
    time.sleep(600)
last = Last()
"""
    outcome = notebook.run(source)
    assert isinstance(outcome.error, KeyboardInterrupt)
    assert 0 not in outcome.lines


@pytest.mark.fault(34)
def test_three_interrupts_leave_nothing(notebook: Notebook) -> None:
    source = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "0":
    for _ in range(3):
        os.kill(%d, 2)
        time.sleep(0.2)
time.sleep(600)
"""
    before = signal.getsignal(signal.SIGINT)
    outcome = notebook.run(source % os.getpid())
    assert isinstance(outcome.error, KeyboardInterrupt)
    assert not left_of(processes(outcome.of_kind("started")[0]["pids"].values()))
    assert signal.getsignal(signal.SIGINT) == before


def test_a_killed_pools_process_is_reported_and_replaced(notebook: Notebook) -> None:
    source = """
import os, psutil, time
pool = next(it for it in psutil.Process().parents() if 'pool.process' in str(it.cmdline()))
assert "taas_magic.pool.process" in str(pool.cmdline())
pool.kill()
time.sleep(60)
"""
    outcome = notebook.run(source, gpus=1)
    assert isinstance(outcome.error, RunLost)
    assert re.search(r'pool "local": its process \d+ was killed by SIGKILL', outcome.shown)
    assert notebook.run("print('again')", gpus=1).error is None
