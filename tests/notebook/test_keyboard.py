"""Input for ranks: from the notebook's input box, in debuggers, and where nobody can type."""

import re
import sys
from pathlib import Path

import pytest
from msgspec import structs

from taas_magic.messages import InputRequested
from taas_magic.notebook.keyboard import SAME_RANK_S, InputQueue, prompt_of
from taas_magic.plan import Flags, HostCapacity, Plan, make_plan
from tests.frontend import Frontend
from tests.harness import words

on_kernel = pytest.mark.usefixtures("no_leftovers")

QUESTIONS = """%%taas --gpus 2
import getpass, sys, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
print("before", flush=True)
name = input("name? ")
secret = getpass.getpass("secret? ")
print("line? ", end="")
line = sys.stdin.readline()
dist.barrier()
print([name, secret, line])
"""


def answer(frontend: Frontend, request: str, line: str) -> str:
    """Type a line into the next input box; return the box's prompt."""
    prompt = frontend.asked(request)["prompt"]
    frontend.type_line(line)
    return str(prompt)


def plain(frontend: Frontend, request: str) -> str:
    """Return the traceback that a failed cell shows, without colours."""
    [shown] = frontend.contents(request, "error")
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(shown["traceback"]))


def test_one_rank_at_a_time_can_ask_for_input() -> None:
    waiting = InputQueue()
    assert waiting.pop_next(0.0) is None
    for rank in (2, 1):
        waiting.add(InputRequested(rank=rank, number=0))
    first = waiting.pop_next(0.0)
    assert first is not None and first.rank == 1
    waiting.record_answer(1, now=5.0)
    assert waiting.pop_next(5.0 + SAME_RANK_S / 2) is None
    waiting.add(InputRequested(rank=1, number=1))
    again = waiting.pop_next(5.0 + SAME_RANK_S / 2)
    assert again is not None and (again.rank, again.number) == (1, 1)
    waiting.record_answer(1, now=6.0)
    assert waiting.next_due() == 6.0 + SAME_RANK_S
    other = waiting.pop_next(6.0 + SAME_RANK_S)
    assert other is not None and other.rank == 2
    assert waiting.next_due() == float("inf")


def test_the_prompt_names_the_rank_if_there_are_several() -> None:
    request = InputRequested(rank=1, number=0, prompt="(Pdb) ")
    assert prompt_of(request, plan_of(4)) == "(Pdb) rank 1 of 4 > "
    assert prompt_of(request, plan_of(1)) == "(Pdb) "
    assert prompt_of(InputRequested(rank=0, number=0), plan_of(2)) == "rank 0 of 2 > "
    strange = structs.replace(plan_of(1), trusted=False, pool="lab")
    assert prompt_of(request, strange) == "[untrusted pool lab] (Pdb) "


def plan_of(ranks: int) -> Plan:
    return make_plan(Flags(gpus=ranks), HostCapacity(gpus=ranks, cores=1), "a-run")


@on_kernel
def test_ranks_ask_one_after_the_other(frontend_of_module: Frontend) -> None:
    frontend = frontend_of_module
    request = frontend.send(QUESTIONS, allows_input=True)
    boxes = []
    for _ in range(6):
        boxes.append(frontend.asked(request))
        frontend.wait(lambda: "before" in frontend.text(request))  # printed before the prompt
        frontend.type_line(f"answer {len(boxes)}")
    assert frontend.finish(request)["status"] == "ok"
    prompts = [box["prompt"] for box in boxes]
    by_rank = [[prompt for prompt in prompts if f"rank {rank} of 2" in prompt] for rank in (0, 1)]
    assert by_rank[0] == [
        "name? rank 0 of 2 > ",
        "secret? rank 0 of 2 > ",
        "rank 0 of 2 > ",
    ]
    assert by_rank[1] == [
        "name? rank 1 of 2 > ",
        "secret? rank 1 of 2 > ",
        "rank 1 of 2 > ",
    ]
    hidden = {box["prompt"].partition("?")[0]: box["password"] for box in boxes}
    assert hidden["secret"] and not hidden["name"]
    text = frontend.text(request)
    assert "line? " in text
    for rank in (0, 1):
        mine = [n for n, prompt in enumerate(prompts, 1) if f"rank {rank} of 2" in prompt]
        said = [f"answer {mine[0]}", f"answer {mine[1]}", f"answer {mine[2]}\n"]
        assert f"[{rank}] {said}" in text


@on_kernel
@pytest.mark.parametrize(
    "stop",
    [
        "breakpoint()",
        "from IPython.core.debugger import set_trace; set_trace()",
        "dist.breakpoint(rank=1)",
    ],
)
def test_a_debugger_stops_a_rank_while_the_others_wait(
    stop: str, frontend_of_module: Frontend
) -> None:
    frontend = frontend_of_module
    cell = f"""%%taas --gpus 2
import torch, torch.distributed as dist
dist.init_process_group("gloo")
loss = torch.ones(1) * (dist.get_rank() + 3)
if dist.get_rank() == 1 or "dist" in {stop!r}:
    {stop}
    dist.all_reduce(loss)
else:
    dist.all_reduce(loss)
print("sum", loss.item())
"""
    request = frontend.send(cell, allows_input=True)
    if "dist" in stop:
        answer(frontend, request, "up")  # as the message of `dist.breakpoint` says
    assert "rank 1 of 2 > " in answer(frontend, request, "p loss")
    frontend.wait(lambda: any("waiting for your input" in it for it in heads(frontend, request)))
    answer(frontend, request, "!loss += 10")
    answer(frontend, request, "c")
    assert frontend.finish(request)["status"] == "ok"
    assert "tensor([4.])" in frontend.text(request)
    assert "sum 17.0" in frontend.text(request)
    assert "waiting for your input" not in heads(frontend, request)[-1]


def heads(frontend: Frontend, request: str) -> list[str]:
    """Return all texts that a cell's status header has shown, oldest first."""
    shown = frontend.contents(request, "update_display_data")
    return [str(each["data"]["text/plain"]) for each in shown]


STEPS = """%%taas --gpus 1
values = [1]
breakpoint()
values.append(2)
for step in range(2):
    values.append(step)
print("end", values)
"""


@on_kernel
def test_the_debugger_steps_from_statement_to_statement(frontend_of_module: Frontend) -> None:
    frontend = frontend_of_module
    request = frontend.send(STEPS, allows_input=True)
    for line in ("p len(values)", "n", "p ('at', values)", "n", "n", "n", "p step", "b 7", "c"):
        answer(frontend, request, line)
    for line in ("p 'at 7'", "n"):  # after the last statement, no input box opens
        answer(frontend, request, line)
    assert frontend.finish(request)["status"] == "ok"
    text = frontend.text(request)
    assert "end [1, 2, 0, 1]" in text and "('at', [1])" in text and "at 7" in text
    shown = [line.partition("] > ")[2] for line in text.splitlines() if "] > " in line]
    lines = [line.partition("(")[2].partition(")")[0] for line in shown]
    assert lines == ["3", "4", "5", "6", "5", "7"], text
    assert not re.search("IPython|taas_magic|--Call--", text)


AT_THE_CALL = ("n",) * (sys.version_info >= (3, 13))
"""What to type in a function to get from the call of `breakpoint()` to the next line.

Before Python 3.13, the debugger stops at the next line already.
"""

LAST_STOPS = (
    "breakpoint()",
    "import pdb; pdb.set_trace()",
    "if seen: breakpoint()",
    "def stop():\n    breakpoint()\nstop()",
)


@on_kernel
@pytest.mark.parametrize("first_line", ["%%taas --gpus 1", "%%taas --session exp"])
def test_the_debugger_stops_in_the_cell_at_its_last_statement(
    first_line: str, frontend_of_module: Frontend
) -> None:
    frontend = frontend_of_module
    if "session" in first_line:
        frontend.run("%%taas --gpus 1 --session exp\npass")
    for stop in LAST_STOPS:
        cell = f"{first_line}\nseen = 'here'\n{stop}"
        last = cell.splitlines()[3 if "def" in stop else -1].strip()
        request = frontend.send(cell, allows_input=True)
        leave = (*AT_THE_CALL, "n") if "def" in stop else ("n",)  # after this, no input box opens
        for line in ("where", "list", "p 'in', seen", *leave):
            answer(frontend, request, line)
        assert frontend.finish(request)["status"] == "ok"
        text = frontend.text(request)
        assert "('in', 'here')" in text and f"-> {last}\n" in text, text
        assert re.search(r" 2\s+seen = 'here'", text), text
        assert re.search(rf" ->\t *{re.escape(last)}", text), text
        assert not re.search("IPython|taas_magic|forkserver|--Call--", text), text
    if "session" in first_line:
        assert "False" in frontend.text(
            frontend.run("%%taas --session exp\nprint('__return__' in globals())")
        )
        frontend.run("%taas end exp")


@on_kernel
def test_the_debugger_steps_out_of_a_function_that_ranks_run(frontend_of_module: Frontend) -> None:
    frontend = frontend_of_module
    cell = """
import taas
def inner():
    breakpoint()
    return 1
def outer():
    found = inner()
    return found + 1
"""
    frontend.run(cell)
    request = frontend.send("taas.run(outer, gpus=1).result", allows_input=True)
    for line in (*AT_THE_CALL, "n", "n", "p found", "n", "n"):
        answer(frontend, request, line)
    assert frontend.finish(request)["status"] == "ok"
    [result] = frontend.contents(request, "execute_result")
    assert result["data"]["text/plain"] == "2"
    assert "taas_magic" not in frontend.text(request)


@on_kernel
def test_quitting_the_debugger_ends_the_cell(frontend_of_module: Frontend) -> None:
    frontend = frontend_of_module
    request = frontend.send(
        "%%taas --gpus 1\nbreakpoint()\nprint('not reached')", allows_input=True
    )
    assert answer(frontend, request, "q") == "(Pdb) "
    assert frontend.finish(request)["status"] == "error"
    assert "BdbQuit: you quit the debugger" in plain(frontend, request)


@on_kernel
def test_ctrl_d_ends_the_input(frontend_of_module: Frontend) -> None:
    frontend = frontend_of_module
    cell = "%%taas --gpus 1\nfor _ in range(2):\n    try: print(len(input('? ')))\n"
    cell += "    except EOFError as error: print(error)"
    request = frontend.send(cell, allows_input=True)
    answer(frontend, request, "\x04")  # Ctrl-D, as terminals and ipykernel send it
    answer(frontend, request, "x" * 5000)
    assert "too long" in answer(frontend, request, "é" * 1500)
    assert frontend.finish(request)["status"] == "ok"
    assert frontend.text(request).endswith("the user ended the input\n[0] 1500\n")


@on_kernel
def test_an_interrupt_ends_the_input_and_the_cell(frontend_of_module: Frontend) -> None:
    frontend = frontend_of_module
    frontend.be_patient()
    request = frontend.send("%%taas --gpus 2\nname = input('name? ')", allows_input=True)
    frontend.asked(request)
    frontend.manager.interrupt_kernel()
    assert frontend.finish(request)["status"] == "error"
    assert "Stopped by you" in plain(frontend, request)
    assert frontend.text(frontend.run("%%taas --gpus 1\nprint('next')")).endswith("next\n")


@on_kernel
def test_the_end_of_the_run_closes_the_input(frontend_of_module: Frontend, tmp_path: Path) -> None:
    frontend = frontend_of_module
    go = tmp_path / "go"
    cell = f"""%%taas --gpus 2
import os, pathlib, time
if os.environ["RANK"] == "1":
    input("name? ")
while not pathlib.Path({str(go)!r}).exists():
    time.sleep(0.02)
raise ValueError("rank 0 fails")
"""
    request = frontend.send(cell, allows_input=True)
    frontend.asked(request)
    go.touch()
    assert frontend.finish(request)["status"] == "error"
    assert "ValueError: rank 0 fails" in plain(frontend, request)


@on_kernel
def test_a_pool_that_is_silent_for_too_long_closes_the_input(frontend_of_module: Frontend) -> None:
    frontend = frontend_of_module
    frontend.run("import taas_magic.notebook.run as run; limit_s, run.SILENT_LOST_S = 60.0, 3.0")
    request = frontend.send("%%taas --gpus 1\ninput('name? ')", allows_input=True)
    frontend.asked(request)
    [pool] = [it for it in frontend.process.children() if "taas_magic.pool.process" in words(it)]
    pool.suspend()
    try:
        assert frontend.finish(request)["ename"] == "RunLost"
        assert f"its process {pool.pid} has been silent for" in plain(frontend, request)
    finally:
        pool.kill()
        frontend.run("run.SILENT_LOST_S = limit_s")


@on_kernel
def test_where_nobody_can_type_the_error_says_so(frontend_of_module: Frontend) -> None:
    frontend = frontend_of_module
    cell = """%%taas --gpus 2
import multiprocessing, sys
for ask in (input, sys.stdin.readline, sys.stdin.read):
    try:
        ask()
    except EOFError as error:
        print(error)
def child():
    try:
        input()
    except EOFError as error:
        print("child:", error, flush=True)
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
"""
    text = frontend.text(frontend.run(cell))
    assert text.count("nobody can type here") == 4  # twice on each rank
    request = frontend.send("%%taas --gpus 1 --detach\ninput()", allows_input=True)
    assert frontend.finish(request)["status"] == "ok"
    run = "import taas\ntry: taas.last_run.wait()\nexcept Exception as error: print(error)"
    assert "EOFError: nobody can type here" in frontend.text(frontend.run(run))
    assert "only single lines can be read here" in text
    assert "child:" in text
    request = frontend.send("%%taas --gpus 2\nbreakpoint()")
    assert frontend.finish(request)["status"] == "error"
    assert "the debugger cannot be used here: nobody can type" in plain(frontend, request)


@on_kernel
def test_a_session_is_debugged_where_a_rank_raised(frontend_of_module: Frontend) -> None:
    frontend = frontend_of_module
    frontend.be_patient()
    frontend.run("%%taas --gpus 2 --session exp\nimport os\nrank = int(os.environ['RANK'])")
    request = frontend.send("%taas debug exp")
    frontend.finish(request)
    assert "nothing to debug" in plain(frontend, request)
    request = frontend.send("%taas debug --rank 2")
    frontend.finish(request)
    assert plain(frontend, request).endswith(
        '--rank 2: session "exp" has ranks 0 to 1. No rank has raised an exception. Use '
        "`breakpoint()` in a cell to stop there"
    )
    cell = """%%taas --session exp
def step(batch):
    scale = batch * 10
    if rank == 1:
        raise ValueError("bad batch")
    return scale
kept = step(rank + 2)
"""
    frontend.fail(cell)
    request = frontend.send("%taas debug", allows_input=True)
    assert "rank 1 of 2 > " in answer(frontend, request, "p scale + 1")
    answer(frontend, request, "up")
    answer(frontend, request, "p rank * 100")
    answer(frontend, request, "q")
    assert frontend.finish(request)["status"] == "ok", plain(frontend, request)
    text = frontend.text(request)
    assert "31" in text and "100" in text
    for rank in (0, 2):
        request = frontend.send(f"%taas debug --rank {rank}")
        assert frontend.finish(request)["ename"] == "UsageError"
        why = (
            'rank 0 of session "exp" has raised no exception, so there is nothing to debug'
            if rank == 0
            else '--rank 2: session "exp" has ranks 0 to 1'
        )
        assert plain(frontend, request).splitlines()[-1] == (
            f"UsageError: {why}. Ranks that have raised an exception: rank 1 (ValueError: bad "
            "batch). Run: %taas debug exp --rank 1"
        )
    # Quitting or interrupting at a breakpoint ends the cell, but not the session.
    request = frontend.send("%%taas --session exp --ranks 0\nbreakpoint()", allows_input=True)
    answer(frontend, request, "q")
    assert frontend.finish(request)["status"] == "error"
    request = frontend.send("%%taas --session exp --ranks 0\nbreakpoint()", allows_input=True)
    frontend.asked(request)
    frontend.manager.interrupt_kernel()
    assert frontend.finish(request)["status"] == "error"
    assert "alive 1" in frontend.text(frontend.run("%%taas --session exp\nprint('alive', rank)"))
    frontend.run("%taas end exp")


@on_kernel
@pytest.mark.parametrize("rank_0", ["breakpoint()", "raise ValueError('bad')"])
def test_a_session_outlives_a_cell_that_ends_while_ranks_are_in_the_debugger(
    rank_0: str, frontend_of_module: Frontend
) -> None:
    frontend = frontend_of_module
    frontend.run("%%taas --gpus 2 --session exp\nimport os\nrank = int(os.environ['RANK'])")
    cell = f"""%%taas --session exp
for step in range(2):
    if rank == 1:
        breakpoint()
    else:
        {rank_0}
    seen = step
"""
    request = frontend.send(cell, allows_input=True)
    if rank_0.startswith("break"):
        answer(frontend, request, "q")
    assert frontend.finish(request)["status"] == "error"
    shown = plain(frontend, request)
    assert (
        "BdbQuit: you quit" in shown if rank_0.startswith("break") else "ValueError: bad" in shown
    )
    assert "alive 1" in frontend.text(frontend.run("%%taas --session exp\nprint('alive', rank)"))
    frontend.run("%taas end exp")
