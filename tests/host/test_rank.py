"""Cells on ranks: IPython, torchrun's environment, the notebook's objects, and results."""

import os
import re

import pytest
import torch

from taas_magic.display.failure import EVENT_LOOP_ADVICE
from taas_magic.errors import CaptureError, RankFailed
from taas_magic.host.shell import HIDDEN_DISPLAYS
from tests.harness import Notebook


def test_the_environment_is_torchruns(notebook: Notebook) -> None:
    source = """
import os
names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
names += ["GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"]
print({name: os.environ[name] for name in names})
"""
    outcome = notebook.run(source, "--max-restarts 2")
    for rank in range(2):
        assert eval(outcome.lines[rank][0]) == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "ROLE_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_WORLD_SIZE": "1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "2",
        }


def test_cores_are_divided_into_threads_per_rank_unless_the_user_sets_a_number(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import os, torch\nprint(os.environ['OMP_NUM_THREADS'], torch.get_num_threads())"
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert notebook.run(source).lines[1] == [f"{share} {share}"]
    assert notebook.run(source, "--env OMP_NUM_THREADS=3").lines[1] == ["3 3"]
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert notebook.run(source).lines[1] == ["4 4"]
    # OpenMP, too, ignores a value that is not a positive number
    for wrong in ("", "0", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", wrong)
        assert notebook.run(source).lines[1][0].split()[-1] == str(share)


def test_the_notebooks_environment_and_flags_reach_the_ranks(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROM_NOTEBOOK", "yes")
    source = "import os\nprint(os.environ['FROM_NOTEBOOK'], os.environ['A'], os.getcwd())"
    lines = notebook.run(source, "--env A=1=2", gpus=1).lines[0]
    assert lines == [f"yes 1=2 {notebook.project}"]


def test_without_a_gpu_the_backend_nccl_becomes_gloo(notebook: Notebook) -> None:
    source = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
total = torch.ones(1)
dist.all_reduce(total)
print(dist.get_backend(), total.item())
"""
    outcome = notebook.run(source)
    assert outcome.lines == {0: ["gloo 2.0"], 1: ["gloo 2.0"]}


def test_an_open_process_group_is_closed(
    notebook: Notebook, capfd: pytest.CaptureFixture[str]
) -> None:
    source = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()"
    outcome = notebook.run(source)
    assert outcome.error is None
    assert "destroy_process_group" not in outcome.run.logs(0) if outcome.run else False


def test_each_run_has_a_clean_namespace(notebook: Notebook) -> None:
    notebook.run("left_behind = 1", gpus=1)
    assert notebook.run("print('left_behind' in globals())", gpus=1).lines[0] == ["False"]


def test_the_cell_runs_in_the_module_main(notebook: Notebook) -> None:
    source = "import sys\nclass Thing: pass\nprint(sys.modules['__main__'].Thing is Thing)"
    assert notebook.run(source, gpus=1).lines[0] == ["True"]


def test_ipython_works_as_in_the_kernel(notebook: Notebook) -> None:
    source = """
import asyncio
name = "world"
!echo hello {name}
%env TAAS_PROBE=5
listed = !echo one two
print(listed[0].split())
await asyncio.sleep(0)
print("awaited")
"""
    outcome = notebook.run(source, gpus=1)
    assert outcome.error is None
    assert "hello world" in outcome.lines[0]
    assert outcome.lines[0][-2:] == ["['one', 'two']", "awaited"]


def test_a_task_of_asyncio_needs_a_cell_with_await(notebook: Notebook) -> None:
    source = "import asyncio\nasync def work(): return 5\ntask = asyncio.create_task(work())"
    assert f"advice: {EVENT_LOOP_ADVICE}" in notebook.run(source, gpus=1).shown
    awaited = notebook.run(f"{source}\nprint(await task)", gpus=1)
    assert (awaited.error, awaited.lines[0]) == (None, ["5"])


def test_syntax_that_the_user_adds_to_the_kernel_works(notebook: Notebook) -> None:
    def expand_say(lines: list[str]) -> list[str]:
        """Turn lines such as `say 1 + 1` into calls of `print`."""
        return [re.sub(r"^say (.*)", r"print(\1)", line) for line in lines]

    transformers = notebook.shell.input_transformers_post
    transformers.append(expand_say)
    try:
        outcome = notebook.run("x = 1\nsay x + 1", gpus=1)
    finally:
        transformers.remove(expand_say)
    assert outcome.error is None
    assert outcome.lines[0] == ["2"]


def test_a_rank_has_no_sys_ps1_so_lightning_does_not_take_it_for_interactive(
    notebook: Notebook,
) -> None:
    assert notebook.run("import sys\nprint(hasattr(sys, 'ps1'))", gpus=1).lines[0] == ["False"]


def test_the_last_value_is_shown_and_kept(notebook: Notebook) -> None:
    outcome = notebook.run("import os\nint(os.environ['RANK']) + 40")
    assert [event["data"]["text/plain"] for event in outcome.of_kind("display")] == ["40"]
    assert outcome.run is not None and outcome.run.result == 40
    assert "logs" in dir(outcome.run) and "conclude" not in dir(outcome.run)  # for Tab
    assert all(hasattr(outcome.run, name) for name in dir(outcome.run))


def test_displays_of_other_ranks_are_mentioned_and_shown_on_request(
    notebook: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "from IPython.display import HTML, display\nimport os\n"
    source += "display(HTML('<b>' + os.environ['RANK'] + '</b>'))\n'a value';"
    for flags, shown in (("", [0]), ("--logs 1", [1]), ("--logs all", [0, 1])):
        outcome = notebook.run(source, flags)
        displays = outcome.of_kind("display")
        found = {event["rank"]: event["data"]["text/html"] for event in displays}
        assert found == {rank: f"<b>{rank}</b>" for rank in shown}
        notes = [event["text"] for event in outcome.of_kind("note")]
        assert (HIDDEN_DISPLAYS in notes) is (len(shown) < 2)
        assert ("[1] displays:\n<IPython" in capsys.readouterr().out) is (1 in shown)
    assert not notebook.run("1 + 1").of_kind("note")  # rank 1's value is not shown


def test_a_widget_is_shown_as_text_because_the_notebook_lacks_its_model(
    notebook: Notebook,
) -> None:
    pytest.importorskip("ipywidgets")
    outcome = notebook.run("import ipywidgets\ndisplay(ipywidgets.IntSlider(3))", gpus=1)
    [shown] = outcome.of_kind("display")
    assert set(shown["data"]) == {"text/plain"} and "IntSlider" in shown["data"]["text/plain"]


@pytest.mark.parametrize("end", ["\\n", ""])
def test_lines_displays_and_clearings_keep_their_order(notebook: Notebook, end: str) -> None:
    source = f"""
from IPython.display import clear_output, display
for number in range(8):
    print("before", number, end="{end}")
    display(number)
    print("after", number, end="{end}")
    clear_output()
"""
    outcome = notebook.run(source, gpus=1)
    seen: list[str] = []
    for event in outcome.events:
        if event["kind"] == "lines":
            seen += event["lines"]
        elif event["kind"] == "display":
            seen.append(event["data"]["text/plain"])
        elif event["kind"] == "clear":
            seen.append("cleared")
    one = ("before {0}", "{0}", "after {0}", "cleared")
    assert seen == [step.format(number) for number in range(8) for step in one]


def test_a_display_leaves_a_progress_bar_in_the_status_header(notebook: Notebook) -> None:
    source = """
from IPython.display import display
from tqdm import tqdm
handle = display("first", display_id="one")
print("dots: ", end="")
for number in range(3):
    print(".", end="")
    handle.update(number)  # replaces the first display, so the line of dots continues
print()
for number in tqdm(range(3)):
    display(number)
"""
    lines = notebook.run(source, gpus=1).lines[0]
    assert lines[0] == "dots: ..." and len(lines) == 2
    assert lines[1].startswith("100%")


def test_the_flag_out_returns_variables(notebook: Notebook) -> None:
    notebook.define("class Point:\n    def __init__(self, x): self.x = x")
    source = "import torch\nmodel = torch.nn.Linear(3, 2)\nwhere = Point(7)\nfn = lambda: where.x"
    outcome = notebook.run(source, "--out model,where,fn")
    assert outcome.error is None
    space = notebook.shell.user_ns
    assert tuple(space["model"].weight.shape) == (2, 3)
    assert isinstance(space["where"], space["Point"])
    assert space["fn"]() == 7
    assert outcome.run is not None and set(outcome.run.out) == {"model", "where", "fn"}


@pytest.mark.fault(28)
def test_what_cannot_travel_stops_the_cell_before_a_run(notebook: Notebook) -> None:
    notebook.define("import threading\nclass Box: pass\nbox = Box()\nbox.lock = threading.Lock()")
    outcome = notebook.run("print(box)")
    assert outcome.run is None
    assert isinstance(outcome.error, CaptureError)
    assert "box.lock" in outcome.shown


def test_a_cells_assignment_reaches_functions_of_earlier_cells(notebook: Notebook) -> None:
    notebook.define("rate = 1\ndef report():\n    return rate")
    assert notebook.run("rate = 2\nprint(report())", gpus=1).lines[0] == ["2"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_error_of_a_cell_that_needs_a_missing_gpu_says_what_to_write(
    notebook: Notebook,
) -> None:
    outcome = notebook.run("import torch\nmodel = torch.nn.Linear(1, 1).cuda()", gpus=1)
    assert isinstance(outcome.error, RankFailed)
    assert outcome.error.etype == ("RuntimeError" if torch.version.cuda else "AssertionError")
    assert "this rank has no GPU" in outcome.shown and "taas.device_type" in outcome.shown
    source = (
        "import taas, torch\ntorch.nn.Linear(1, 1).to(taas.device_type)\nprint(taas.device_type)"
    )
    assert notebook.run(source, gpus=1).lines[0] == ["cpu"]


@pytest.mark.parametrize(
    ("source", "etype", "words"),
    [
        ("raise KeyboardInterrupt", "KeyboardInterrupt", ""),
        ("import sys\nsys.exit('no data')", "SystemExit", "no data"),
        ("import torch\ntorch.ones(2) @ torch.ones(3)", "RuntimeError", "size"),
        ("class E(Exception):\n    def __reduce__(self): 1 / 0\nraise E('odd')", "E", "odd"),
        ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "E", ""),
        ("raise ValueError('x' * 1_000_000)", "ValueError", "xxx"),
    ],
)
def test_every_kind_of_exception_is_reported(
    notebook: Notebook, source: str, etype: str, words: str
) -> None:
    outcome = notebook.run(source, gpus=1)
    assert isinstance(outcome.error, RankFailed)
    assert outcome.error.etype == etype
    assert words in outcome.shown
    assert len(outcome.shown) < 100_000


def test_atexit_handlers_of_the_cell_run(notebook: Notebook) -> None:
    source = "import atexit\natexit.register(print, 'at exit')\nprint('cell')"
    assert notebook.run(source, gpus=1).lines[0] == ["cell", "at exit"]


def test_a_signal_handler_can_save_a_file_while_its_rank_sends_a_message(
    notebook: Notebook,
) -> None:
    """The signal arrives while the rank sends a display to its agent."""
    source = """
import os, signal, threading
def save(*_):
    open(f"saved-{len(seen)}", "w").close()
    seen.append(1)
seen, raised, write = [], [], os.write
def interrupted(descriptor, data):
    if threading.current_thread() is threading.main_thread() and not raised:
        raised.append(1)
        signal.raise_signal(signal.SIGUSR1)
    return write(descriptor, data)
signal.signal(signal.SIGUSR1, save)
os.write = interrupted
display("shown")
assert seen == [1]
"""
    outcome = notebook.run(source, "--timeout 30s", gpus=1)
    assert outcome.error is None and outcome.run is not None
    assert outcome.run.receipt.written == {"saved-0": 0}
    [shown] = outcome.of_kind("display")
    assert shown["data"] == {"text/plain": "'shown'"}


def test_threads_of_the_cell_are_waited_for(notebook: Notebook) -> None:
    source = """
import threading, time
def late():
    time.sleep(0.3)
    print("late")
threading.Thread(target=late).start()
"""
    assert notebook.run(source, gpus=1).lines[0] == ["late"]


def test_more_ranks_than_cores(notebook: Notebook) -> None:
    ranks = 2 * len(os.sched_getaffinity(0)) + 1
    outcome = notebook.run("import os\nprint(os.environ['RANK'])", gpus=ranks)
    assert outcome.lines == {rank: [str(rank)] for rank in range(ranks)}


def test_a_fast_rank_does_not_break_a_slow_ones_collective(notebook: Notebook) -> None:
    source = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
word = torch.full((4,), 7.0)
if dist.get_rank() == 0:
    dist.send(word, dst=1)
else:
    time.sleep(1)
    dist.recv(word.zero_(), src=0)
    print(word.tolist())
"""
    outcome = notebook.run(source)
    assert outcome.error is None
    assert outcome.lines[1] == ["[7.0, 7.0, 7.0, 7.0]"]
