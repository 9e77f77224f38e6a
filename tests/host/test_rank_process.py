"""A rank behaves like a process that torchrun started, while it runs and when it ends."""

import os

import pytest

from taas_magic.errors import RankFailed
from taas_magic.host.agent_worker import DEFERRED_IDLE_S
from tests.cellfiles import cells_of
from tests.eventually import eventually
from tests.harness import Notebook


def test_spawned_children_have_the_notebooks_names_and_do_not_run_the_cell(
    notebook: Notebook,
) -> None:
    square, cell = cells_of("spawned_children")
    notebook.define(square)
    outcome = notebook.run(cell, gpus=1)
    assert outcome.lines == {0: ["the cell runs", "None MainProcess", "[6, 9]", "[0, 0]"]}


def test_a_cell_with_a_main_guard_is_imported_whole_by_its_children(notebook: Notebook) -> None:
    source = """
import os
import torch.multiprocessing as mp

table = dict(one=1)
print("imported", __name__)

def work(index):
    print("child", table["one"] + index)

if __name__ == "__main__":
    mp.spawn(work, nprocs=1)
"""
    outcome = notebook.run(source, gpus=1)
    assert outcome.lines[0] == ["imported __main__", "imported __mp_main__", "child 1"]
    # only a rank can run magics and a top-level await
    for needs_shell in ("%matplotlib inline\n", "import asyncio\nawait asyncio.sleep(0)\n"):
        outcome = notebook.run(needs_shell + source, gpus=1)
        assert outcome.lines[0] == ["imported __main__", "imported __mp_main__", "child 1"]


def test_random_numbers_differ_between_ranks_and_runs(notebook: Notebook) -> None:
    source = """
import random, numpy, torch
print(torch.rand(1).item(), numpy.random.rand(), random.random())
"""
    lines = [line for _ in range(2) for line in notebook.run(source).lines.values()]
    numbers = [number for (line,) in lines for number in line.split()]
    assert len(set(numbers)) == len(numbers) == 12


def test_a_rank_ends_as_a_python_program_does(notebook: Notebook) -> None:
    source = """
import atexit, tempfile, threading, time, weakref, os

class Kept:
    pass

kept = Kept()
weakref.finalize(kept, print, "finalized")
atexit.register(print, "at exit")
folder = tempfile.TemporaryDirectory()
print(folder.name)
unflushed = open(os.path.join(os.environ["OUT"], os.environ["RANK"]), "w")
unflushed.write("written")

def late(ready=threading.Event()):
    ready.wait(0.2)
    print("a thread ended")

threading.Thread(target=late).start()
"""
    notebook.define("import os, tempfile\nos.environ['OUT'] = tempfile.mkdtemp()")
    outcome = notebook.run(source)
    where = notebook.shell.user_ns["os"].environ["OUT"]
    for rank, (folder, *rest) in outcome.lines.items():
        assert rest == ["a thread ended", "at exit", "finalized"]
        assert not notebook.shell.user_ns["os"].path.exists(folder)
        with open(f"{where}/{rank}") as file:
            assert file.read() == "written"


def test_a_rank_that_ends_keeps_its_connections_while_others_begin(notebook: Notebook) -> None:
    """A rank waits 0.4 s before it exits, because another rank's gloo may still be connecting."""
    source = """
import atexit, os, select, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
first = torch.tensor([os.getpid()])
dist.broadcast(first, 0)
if dist.get_rank() == 0:
    atexit.register(lambda: open("ended", "w").write(str(time.monotonic())))
    dist.recv(first, 1)
else:
    process = os.pidfd_open(first.item())
    dist.send(first, 0)  # rank 0 can end only after this
    select.select([process], [], [])
    print(time.monotonic() - float(open("ended").read()) >= 0.4)
"""
    outcome = notebook.run(source)
    assert outcome.error is None, outcome.shown
    assert outcome.lines[1] == ["True"]


def test_objects_that_are_deleted_at_exit_can_use_the_cells_names(notebook: Notebook) -> None:
    """A `__del__` that runs at exit can use the cell's modules, functions and classes.

    The object is the value of a variable, or part of a reference cycle.
    """
    notebook.define("""
import json
def told(name): return json.dumps([name, Writer.__name__])
class Writer:
    def __init__(self, name): self.name = name
    def __del__(self): print(told(self.name))
""")
    outcome = notebook.run("first = Writer(1)\ncycle = [Writer(2)]\ncycle.append(cycle)")
    assert [sorted(lines) for lines in outcome.lines.values()] == [
        ['[1, "Writer"]', '[2, "Writer"]']
    ] * 2
    outcome = notebook.run("last = Writer(3)")
    assert list(outcome.lines.values()) == [['[3, "Writer"]']] * 2
    notebook.run("class Log:\n    file = open('log.txt', 'w')\nLog.file.write('written')")
    assert (notebook.project / "log.txt").read_text() == "written"


def test_forked_children_are_not_the_rank(notebook: Notebook) -> None:
    source = """
import os, sys
def running():  # only a rank has both ends of the pipe `running`
    files = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    return sum(file.endswith("/running") for file in files) == 2
if os.fork() == 0:
    print("a child runs on", running())
else:
    os.wait()
    print("the rank goes on", running())
    if os.fork() == 0:
        raise ValueError("of a child")
    os.wait()
    os._exit(0)
"""
    outcome = notebook.run(source, gpus=1)
    assert "exited with code 0" in outcome.shown
    assert outcome.lines[0][:2] == ["a child runs on False", "the rank goes on True"]
    assert outcome.lines[0].count("ValueError: of a child") == 1


def test_displays_of_forked_children_arrive_whole(notebook: Notebook) -> None:
    source = """
import multiprocessing
from IPython.display import HTML, display

def show(letter):
    for _ in range(20):
        display(HTML(letter * 200_000))

children = [multiprocessing.get_context("fork").Process(target=show, args=it) for it in "abc"]
for child in children:
    child.start()
for child in children:
    child.join()
"""
    outcome = notebook.run(source, gpus=1)
    assert outcome.error is None
    shown = [display["data"]["text/html"] for display in outcome.of_kind("display")]
    assert sorted(shown) == sorted(20 * [letter * 200_000 for letter in "abc"])


def test_a_program_that_reads_standard_input_gets_end_of_file(notebook: Notebook) -> None:
    source = "import subprocess\nprint(subprocess.run(['wc', '-c'], timeout=30, check=True))"
    outcome = notebook.run(source, gpus=1)
    assert outcome.lines[0][0] == "0"


@pytest.mark.parametrize("end", ["sys.stdout = None", "sys.stdout.close()"])
def test_an_output_that_the_cell_has_closed_is_no_failure(notebook: Notebook, end: str) -> None:
    source = f"import sys\nprint('written')\n{end}"
    outcome = notebook.run(source, gpus=1)
    assert outcome.error is None
    assert outcome.lines[0] == ["written"]


def test_a_rank_that_exits_with_an_error_after_its_last_line_fails(notebook: Notebook) -> None:
    outcome = notebook.run("import atexit, os\natexit.register(os._exit, 4)\nprint('x')", gpus=1)
    assert isinstance(outcome.error, RankFailed)
    assert "failed after the cell's end: exit code 4" in outcome.shown


def test_matplotlib_inline_and_exit_work_and_input_says_why_not(notebook: Notebook) -> None:
    source = """
%matplotlib inline
for ask in (input, __import__("sys").stdin.read):
    try:
        ask()
    except EOFError as error:
        print(error)
exit()
"""
    outcome = notebook.run(source, gpus=1)
    assert outcome.error is None
    asked = [line.partition(":")[0].partition(",")[0] for line in outcome.lines[0]]
    assert asked == ["nobody can type here", "sys.stdin.read()"]
    outcome = notebook.run("exit(3)", gpus=1)
    assert isinstance(outcome.error, RankFailed) and outcome.error.etype == "SystemExit"


def test_a_rank_ends_though_a_thread_of_a_destroyed_group_waits_for_the_gil(
    notebook: Notebook,
) -> None:
    """On a busy machine, gloo's thread may wait for the GIL after it has finished a collective."""
    source = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
if dist.get_rank() == 1:
    time.sleep(0.5)
dist.all_reduce(torch.ones(1), async_op=True)
dist.destroy_process_group()
try:
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
except ValueError as error:  # there is no process group any more
    half_built = error  # its traceback refers to the model
"""
    outcome = notebook.run(source, "--timeout 30")
    assert outcome.error is None, outcome.shown


@pytest.mark.parametrize("module", ["pdb", "IPython.core.debugger"])
def test_a_debugger_where_nobody_can_type_says_so(module: str, notebook: Notebook) -> None:
    source = f"from {module} import set_trace\nset_trace()\nprint('not reached')"
    outcome = notebook.run(source, gpus=1)
    assert isinstance(outcome.error, RankFailed) and outcome.error.etype == "BdbQuit"
    assert "the debugger cannot be used here: nobody can type" in outcome.shown
    assert "taas_magic" not in outcome.shown and "os._exit" not in outcome.shown


def test_the_notebooks_variables_win_over_the_pools(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", "/of/the/notebook")
    monkeypatch.setenv("LOCAL_SETTING", "mine")
    monkeypatch.setenv("RANK", "77")
    source = "import os\nprint(*(os.environ[n] for n in ('TORCH_HOME', 'LOCAL_SETTING', 'RANK')))"
    assert notebook.run(source, gpus=1).lines[0] == ["/of/the/notebook mine 0"]


def test_torch_obeys_the_environment_variables_for_its_logs(notebook: Notebook) -> None:
    source = """
import torch, torch.distributed as dist
print(dist.get_debug_level().name)
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
"""
    env = "--env TORCH_DISTRIBUTED_DEBUG=DETAIL --env TORCH_LOGS=graph_code"
    outcome = notebook.run(source, env, gpus=1)
    assert outcome.error is None
    assert outcome.lines[0][0] == "DETAIL"
    assert any("TRACED GRAPH" in line for line in outcome.lines[0])


def test_tracebacks_of_threads_and_exit_handlers_have_the_notebooks_lines(
    notebook: Notebook,
) -> None:
    source = """
import atexit, threading
def work():
    1 / 0
atexit.register(work)
thread = threading.Thread(target=work, name="worker")
thread.start()
thread.join()
"""
    outcome = notebook.run(source, gpus=1)
    lines = outcome.lines[0]
    assert lines[0] == "Exception in thread worker:"
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert len([line for line in lines if "Cell In[" in line and "line 5, in work" in line]) == 2


def test_the_forkserver_imports_dynamo_after_the_first_run(notebook: Notebook) -> None:
    source = """
import signal, sys
print("torch._dynamo" in sys.modules, signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL)
"""

    def has_rest() -> bool:
        return notebook.run(source, gpus=1).lines == {0: ["True True"]}

    eventually(has_rest, every_s=2 * DEFERRED_IDLE_S)  # only an idle host imports torch._dynamo


def test_a_traceback_needs_no_further_import_in_a_rank(notebook: Notebook) -> None:
    source = """
import sys
before = set(sys.modules)
try:
    1 / 0
except ZeroDivisionError:
    get_ipython().showtraceback()
print(sorted(set(sys.modules) - before))
"""
    assert notebook.run(source, gpus=1).lines[0][-1] == "[]"


SHARES = """
import os, signal
import torch.distributed as dist
from multiprocessing import Process, set_start_method, shared_memory

def share():
    kept.append(shared_memory.SharedMemory(create=True, size=1 << 16))
    print(kept[-1].name, flush=True)

kept = []
share()
dist.init_process_group("gloo"); dist.barrier()  # each rank has printed its name
"""


@pytest.mark.fault(55)
@pytest.mark.parametrize(
    "ends",
    ["", "raise ValueError", "os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)"],
)
def test_shared_memory_that_a_rank_leaves_goes_with_its_run(notebook: Notebook, ends: str) -> None:
    """As under torchrun, the rank's own resource tracker removes the memory before the run ends."""
    outcome = notebook.run(f"{SHARES}{ends}")
    assert (outcome.error is None) is not bool(ends)
    names = [line for lines in outcome.lines.values() for line in lines if line.startswith("psm_")]
    assert len(names) == 2
    assert not [name for name in names if os.path.exists(f"/dev/shm/{name}")]
