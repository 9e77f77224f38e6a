"""Runs in a real kernel: how they end if the kernel ends, and where their output appears."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from taas_magic.host.system import status_of
from taas_magic.notebook import runs
from tests.chaos.tree import NEXT, grown, memory_of
from tests.conftest import TOKEN, carriers
from tests.eventually import HUNG_S, eventually
from tests.frontend import ROOT, Frontend, before_start, environment, kernel
from tests.harness import AGENT, left_of, words
from tests.host.test_stacks import HANG, MEET

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ENDLESS = """%%taas --gpus 2
import time
print("pid", __import__("os").getpid())
while True:
    time.sleep(0.1)
"""


RUNS = 10
"""Number of runs in the test of leaks. Each run could leak a descriptor or a thread."""

FAILING = """import taas, torch.utils.data as data
class Failing(data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return 1 / 0
failing = taas.register(data.DataLoader(Failing(), batch_size=2), name="failing")
"""


@pytest.fixture
def frontend(frontend_of_module: Frontend) -> Frontend:
    """Return the module's kernel with a warm pool, for tests that leave both usable."""
    return frontend_of_module


def rank_processes(frontend: Frontend, request: str) -> list[psutil.Process]:
    """Wait until both ranks of an `ENDLESS` cell have printed their pids; return the processes."""
    pids: list[str] = []

    def found_both() -> bool:
        pids[:] = re.findall(r"pid (\d+)", frontend.text(request))
        return len(pids) == 2

    frontend.wait(found_both)
    return [psutil.Process(int(pid)) for pid in pids]


@pytest.mark.fault(33)
def test_an_interrupt_ends_the_run_and_the_kernel_goes_on(frontend: Frontend) -> None:
    frontend.be_patient()
    request = frontend.send(ENDLESS)
    ranks = rank_processes(frontend, request)
    frontend.manager.interrupt_kernel()
    reply = frontend.finish(request)
    assert reply["ename"] == "KeyboardInterrupt"
    [shown] = reply["traceback"]
    assert re.fullmatch(r"Stopped by you after \d+ s; nothing was returned\.", shown)
    assert not [rank for rank in ranks if status_of(rank) not in ("", psutil.STATUS_ZOMBIE)]
    heads = frontend.contents(request, "update_display_data")
    assert heads[-1]["data"]["text/plain"].startswith("INTERRUPTED")
    assert frontend.text(frontend.run("print(6 * 7)")) == "42\n"
    assert "] on\n" in frontend.text(frontend.run("%%taas --gpus 2\nprint('on')"))


INTERRUPTED_WRITE = """
import os, signal
from taas_magic.capture import payload
from taas_magic.journal.folder import state_dir

def interrupted(captured, path, write=payload.write):
    write(captured, path)
    payload.write = write
    signal.raise_signal(signal.SIGINT)

payload.write = interrupted
folders = set(os.listdir(state_dir() / "runs"))
"""


def test_an_interrupt_while_the_run_folder_is_written_leaves_no_run(frontend: Frontend) -> None:
    frontend.run("%%taas --gpus 1\npass")
    frontend.run(INTERRUPTED_WRITE)
    assert frontend.fail("%%taas --gpus 1\npass")["ename"] == "KeyboardInterrupt"
    frontend.run("assert set(os.listdir(state_dir() / 'runs')) == folders")


INTERRUPTED_WAIT = """
import signal
from taas_magic.notebook import pools

def interrupted(line, print_line=pools.print_line):
    print_line(line)
    pools.print_line = print_line
    signal.raise_signal(signal.SIGINT)

pools.print_line = interrupted
"""


def test_a_note_is_shown_once_and_not_lost_with_an_interrupted_wait_for_the_pool(
    frontend: Frontend,
) -> None:
    frontend.run("%%writefile noted_helpers.py\nLR = 0.1")
    frontend.run("import noted_helpers\nnoted_helpers.LR = 0.5\n%taas down")
    frontend.run(INTERRUPTED_WAIT)
    cell, note = "%%taas --gpus 1\nprint(noted_helpers.LR)", "noted_helpers.LR is 0.5"
    assert frontend.fail(cell)["ename"] == "KeyboardInterrupt"
    for is_shown in (True, False):
        head = frontend.contents(frontend.run(cell), "update_display_data")[-1]
        assert (note in head["data"]["text/plain"]) is is_shown


def test_three_interrupts_end_ranks_that_do_not_want_to_end(frontend: Frontend) -> None:
    stubborn = (
        "\nimport signal\nsignal.signal(signal.SIGINT, lambda *_: print('no'))\nimport time\n"
    )
    request = frontend.send(ENDLESS.replace("\nimport time\n", stubborn))
    ranks = rank_processes(frontend, request)
    frontend.manager.interrupt_kernel()
    frontend.wait(lambda: "no" in frontend.text(request))
    frontend.manager.interrupt_kernel()
    frontend.manager.interrupt_kernel()
    assert frontend.finish(request)["ename"] == "KeyboardInterrupt"
    assert not left_of(ranks)
    assert "[0] on" in frontend.text(frontend.run("%%taas --gpus 1\nprint('on')"))


def test_output_appears_below_its_own_cell_while_another_runs(
    frontend: Frontend, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    run = frontend.send(
        "%%taas --gpus 1\nimport pathlib, time\nprint('before')\n"
        f"while not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.01)\nprint('after')"
    )
    frontend.wait(lambda: "before" in frontend.text(run))
    subshell = frontend.new_subshell()
    other = frontend.send(
        f"print('meanwhile'); open({str(go)!r}, 'w').close()", subshell_id=subshell
    )
    assert frontend.finish(other)["status"] == "ok"
    assert frontend.finish(run)["status"] == "ok"
    # Two threads write IPython 8's history, so the later cell can show an error about it.
    assert re.fullmatch(
        r"meanwhile\n(ERROR! Session/line number was not .*\n)?", frontend.text(other)
    )
    assert frontend.text(run) == "[0] before\n[0] after\n"


def test_a_run_that_cannot_start_is_shown_as_failed(frontend: Frontend) -> None:
    first = frontend.send(ENDLESS)
    rank_processes(frontend, first)
    subshell = frontend.new_subshell()
    second = frontend.send("%%taas --gpus 1\nprint('never')", subshell_id=subshell)
    assert frontend.finish(second)["ename"] == "StoreError"
    head = frontend.contents(second, "update_display_data")[-1]["data"]["text/plain"]
    assert head.startswith("FAILED") and "writes to the project store" in head
    frontend.manager.interrupt_kernel()
    assert frontend.finish(first)["ename"] == "KeyboardInterrupt"


@pytest.mark.nightly
@pytest.mark.fault(62)
def test_the_next_cell_says_that_it_waits_for_a_stopped_host(frontend: Frontend) -> None:
    frontend.run(FAILING)
    frontend.run("%%taas --gpus 1\nprint('on')")
    [agent] = [it for it in frontend.process.children(recursive=True) if AGENT in words(it)]
    agent.suspend()
    request = frontend.send("%%taas --gpus 1 --cpus 1\nlen(failing)\nprint('on')")
    frontend.wait(lambda: "silent since" in before_start(frontend, request))
    assert frontend.finish(request)["status"] == "ok"
    assert "on\n" in frontend.text(request)


HANGS = f"""%%taas --gpus 3 {HANG}{MEET}
def step():
    dist.all_reduce(torch.ones(1))
if rank == 1:
    time.sleep(600)
step()
"""


def test_the_status_header_and_stacks_of_a_hang_in_a_real_kernel(frontend: Frontend) -> None:
    request = frontend.send(HANGS)

    def heads() -> list[dict[str, str]]:
        return [it["data"] for it in frontend.contents(request, "update_display_data")]

    frontend.wait(
        lambda: any("no rank has made progress" in head["text/plain"] for head in heads())
    )
    shown = next(head for head in heads() if "no rank has made progress" in head["text/plain"])
    first, second = shown["text/plain"].partition("waits for\n")[2].splitlines()[:2]
    assert re.match(r" +1 .*line 10: time.sleep\(600\) +a C call$", first)
    assert re.match(r" +0,2 .*line 8, in step: .* +all_reduce #2 of torch.distributed$", second)
    assert "<pre" in shown["text/html"]
    stacks = frontend.send("%taas stacks", subshell_id=frontend.new_subshell())
    frontend.finish(stacks)
    assert "ranks 0,2 on " in frontend.text(stacks)
    assert "line 11" in frontend.text(stacks)
    frontend.manager.interrupt_kernel()
    assert frontend.finish(request)["ename"] == "KeyboardInterrupt"
    assert "no rank has made progress" not in heads()[-1]["text/plain"]


def test_run_all_stops_at_a_failing_cell_with_one_message(frontend: Frontend) -> None:
    define = "def halve(x):\n    return x / 0"
    fails = "%%taas --gpus 2\nimport os\n\nif os.environ['RANK'] == '1':\n    halve(4)"
    cells = [frontend.send(cell) for cell in (define, fails, "print('not reached')")]
    replies = [frontend.finish(cell) for cell in cells]
    assert [reply["status"] for reply in replies] == ["ok", "error", "aborted"]
    [error] = frontend.contents(cells[1], "error")
    assert (error["ename"], replies[1]["ename"]) == ("RankFailed", "RankFailed")
    assert "rank 1" in error["evalue"] and "ZeroDivisionError" in error["evalue"]
    shown = ANSI.sub("", "\n".join(error["traceback"]))
    numbers = [reply["execution_count"] for reply in replies[:2]]
    assert re.search(rf"Cell In\[{numbers[1]}\], line 5\b", shown)
    assert re.search(rf"Cell In\[{numbers[0]}\], line 2\b", shown)
    assert "taas_magic/" not in shown
    assert frontend.text(cells[2]) == ""


def test_the_log_of_a_rank_that_raised_has_its_traceback(
    frontend: Frontend, tmp_path: Path
) -> None:
    # Rank 0 prints, and then makes this file. Rank 1 fails only after that, because its failure
    # ends rank 0.
    said = tmp_path / "said"
    request = frontend.send(
        "%%taas --gpus 2\nimport os, time\nprint('before', os.environ['RANK'], flush=True)\n"
        f"if os.environ['RANK'] == '0':\n    open({str(said)!r}, 'w').close()\n"
        f"else:\n    while not os.path.exists({str(said)!r}):\n        time.sleep(0.01)\n"
        "    print('no end', end='', flush=True)\n    1 / 0"
    )
    number = frontend.finish(request)["execution_count"]
    shown = frontend.text(frontend.run("%taas logs"))
    assert shown.startswith("rank 1, which failed first:\nbefore 1\nno end\nTraceback (most")
    assert re.search(rf'"Cell In\[{number}\]", line 10.*\nZeroDivisionError: division', shown, re.S)
    assert "taas_magic" not in shown and "IPython" not in shown
    assert frontend.text(frontend.run("%taas logs --rank 0")) == "before 0\n"
    printed = frontend.text(request)
    assert "Traceback" not in printed, "the notebook has it in the exception already"


@pytest.mark.parametrize(
    ("flags", "line", "said"),
    [
        ("", "open('no/such', 'w')", "FileNotFoundError: [Errno 2] No such file"),
        ("--store-writes refuse", "open('x', 'w')", "PermissionError: [Errno 13] rank 1 may not"),
        ("", "pass\nimport taas; taas.save({}, '/no/such.pt')", "SaveError: "),
        ("", "for batch in failing: pass", 'Cell In[{}]", line 6, in __getitem__'),
    ],
)
def test_an_error_below_our_own_frames_shows_none_of_them(
    frontend: Frontend, flags: str, line: str, said: str
) -> None:
    number = frontend.finish(frontend.send(FAILING))["execution_count"]
    reply = frontend.fail(
        f"%%taas --gpus 2 {flags}\nimport os\nif os.environ['RANK'] == '1':\n    {line}"
    )
    shown = ANSI.sub("", "\n".join(reply["traceback"]))
    assert said.format(number) in shown
    assert f"Cell In[{reply['execution_count']}]" in shown and re.search("line [45]", shown)
    assert not re.search(r"taas_magic/|contextlib|IPython|/ipykernel_", shown)


def test_a_frame_of_a_cell_that_begins_with_empty_lines_shows_its_own_line(
    frontend: Frontend,
) -> None:
    frontend.run("\n\ndef divide():\n    zero = 0\n    return 1 / zero\n")
    shown = ANSI.sub("", "\n".join(frontend.fail("%%taas --gpus 1\ndivide()")["traceback"]))
    assert "----> 3     return 1 / zero" in shown


def test_a_timeout_shows_the_notebooks_line_of_every_rank(frontend: Frontend) -> None:
    define = "def wait():\n    import time\n    time.sleep(600)"
    number = frontend.finish(frontend.send(define))["execution_count"]
    reply = frontend.fail(
        "%%taas --gpus 3 --timeout 10\nimport os\nif os.environ['RANK'] == '1':\n"
        "    import subprocess\n    subprocess.run(['sleep', '600'])\nwait()"
    )
    shown = "\n".join(reply["traceback"])
    assert reply["ename"] == "RunTimeout"
    assert re.fullmatch(r'run \S+ on pool "local" exceeded the timeout of 10 s', reply["evalue"])
    assert f"ranks 0,2: Cell In[{number}], line 3: time.sleep(600)\n" in shown
    run = reply["execution_count"]
    assert f"rank 1: Cell In[{run}], line 5: subprocess.run(['sleep', '600'])\n" in shown
    assert "taas_magic" not in shown and "IPython" not in shown


@pytest.mark.fault(76)
def test_what_is_sent_of_a_flood_is_bounded(frontend: Frontend) -> None:
    """The notebook gets a part of a flood of output, the number of missing lines, and the end."""
    request = frontend.run(
        "%%taas --gpus 2\nimport os\nfor i in range(100_000):\n"
        "    print(os.environ['RANK'], i, 'x' * 80)\nprint('ValueError: in the end')"
    )
    outputs = frontend.outputs[request]
    streams = frontend.contents(request, "stream")
    assert 400_000 < sum(len(stream["text"]) for stream in streams) < 600_000
    rest = [m["content"] for m in outputs if ":rest" in str(m["content"].get("transient"))]
    assert len(frontend.contents(request, "display_data")) == 2, "the head and the rest"
    assert all(len(content["data"]["text/plain"]) < 50_000 for content in rest)
    shown = rest[-1]["data"]["text/plain"]
    assert re.match(r"… 1[89]\d,\d{3} lines more \(1\d\.\d MB\): %taas logs \d{8}-", shown)
    assert "ValueError: in the end" in shown
    logs = frontend.text(frontend.run("%taas logs"))
    assert len(logs) < 600_000 and re.match(r"… 8\.\d MB before this: /.*rank-0\.log\n0 ", logs)
    assert logs.endswith("ValueError: in the end\n")


@pytest.mark.fault(76)
def test_a_display_that_no_browser_could_show_is_left_out(frontend: Frontend) -> None:
    request = frontend.run(
        "%%taas --gpus 1\nfrom IPython.display import HTML, display\n"
        "display(HTML('<p>x</p>' * 25_000_000))\n'y' * 100_000_000"
    )
    markup, text = (
        content["data"]
        for content in frontend.contents(request, "display_data")
        if "head" not in str(content["transient"])
    )
    assert list(markup) == ["text/plain"]
    assert "text/html of 200 MB is not shown" in markup["text/plain"]
    assert "99900002 characters cut" in text["text/plain"] and len(text["text/plain"]) < 101_000


def test_status_and_the_status_header_show_the_same_duration(frontend: Frontend) -> None:
    frontend.run("%%taas --gpus 1\npass")
    request = frontend.run("%%taas --gpus 1\nimport time\ntime.sleep(1.5)")
    head = frontend.contents(request, "update_display_data")[-1]["data"]["text/plain"]
    found = re.search(r"elapsed ([\d.]+ s) · run (\S+)", head)
    assert found is not None
    status = frontend.text(frontend.run("%taas status"))
    assert re.search(rf"{found[2]} +SUCCEEDED +1 +local +{found[1]}", status)
    assert "No GPU" not in head, "it is said once a session"


def test_notebook_and_nested_progress_bars_move_in_the_status_header(
    frontend: Frontend, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    request = frontend.send(f"""%%taas --gpus 2
import os, time
from tqdm.notebook import tqdm, trange

for epoch in trange(2, desc="epochs", mininterval=0):
    for step in tqdm(range(200), desc="steps", leave=False, mininterval=0):
        while step == 100 and not os.path.exists({str(go)!r}):
            time.sleep(0.01)
print("done")
""")

    def heads() -> list[dict[str, str]]:
        return [content["data"] for content in frontend.contents(request, "update_display_data")]

    frontend.wait(lambda: any("steps:  50%" in head["text/plain"] for head in heads()))
    go.touch()
    assert frontend.finish(request)["status"] == "ok"
    both = [head for head in heads() if "epochs:" in head["text/plain"] and "steps:" in str(head)]
    assert both[0]["text/html"].count("<progress") == 2
    lines = frontend.text(request).splitlines()
    assert all(re.fullmatch(r"\[.*\] (epochs: 100%.*2/2.*|done)", line) for line in lines), lines
    assert len(lines) <= 4


def test_displays_of_rank_0_and_the_last_value_appear(frontend: Frontend) -> None:
    request = frontend.run("""%%taas --gpus 2
import os
import matplotlib.pyplot as plt
from IPython.display import HTML, display

display(HTML("<b>bold</b>"))
plt.plot([1, 2, 4])
plt.show()
{"rank": os.environ["RANK"]}
""")
    shown = [content["data"] for content in frontend.contents(request, "display_data")]
    assert len([data for data in shown if data.get("text/html") == "<b>bold</b>"]) == 1
    assert len([data for data in shown if "image/png" in data]) == 1
    assert [data for data in shown if data.get("text/plain") == "{'rank': '0'}"]
    assert not [data for data in shown if data.get("text/plain") == "{'rank': '1'}"]
    assert "Figure(" not in frontend.text(request)


def test_a_progress_bar_appears_in_the_status_header(frontend: Frontend) -> None:
    request = frontend.run("""%%taas --gpus 1
from tqdm.auto import tqdm

for step in tqdm(range(20_000), desc="steps", mininterval=0.001):
    pass
print("done")
""")
    heads = [content["data"] for content in frontend.contents(request, "update_display_data")]
    assert "steps: 100%" in heads[-1]["text/plain"]
    assert "<progress" in heads[-1]["text/html"]
    lines = frontend.text(request).splitlines()
    assert len(lines) == 2 and "100%" in lines[0] and lines[1] == "[0] done"


def test_runs_leave_no_descriptor_and_no_thread(frontend: Frontend) -> None:
    for _ in range(3):
        frontend.run(NEXT)
    before = memory_of(frontend)
    assert before.keys() >= {"kernel", "pool", "agent"}
    for _ in range(RUNS):
        frontend.run(NEXT)
    left = grown(frontend, before, more=RUNS // 2)
    assert not left, f"(bytes, descriptors, threads) after {RUNS} runs: {left}; before: {before}"


def test_a_console_shows_the_end_of_a_run(frontend: Frontend) -> None:
    primary, secondary = pty.openpty()
    console = subprocess.Popen(
        [sys.executable, "-m", "jupyter_console", "--kernel=taas", "--simple-prompt"],
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        env={**frontend.process.environ(), "TERM": "dumb"},
        cwd=frontend.process.cwd(),
    )
    os.close(secondary)
    run = "get_ipython().run_cell_magic('taas', '--gpus 2', 'print(6 * 7)')\n"
    shown = b""
    for mark, typed in ((b"In [1]", run), (b"In [2]", "exit\n")):
        while mark not in shown:
            shown += os.read(primary, 65536)
        os.write(primary, typed.encode())
    console.wait(HUNG_S)
    os.close(primary)
    text = shown.decode()
    assert re.search(r"STARTING.*\[[01][^]]*\] 42.*SUCCEEDED · ranks 2 · ", text, re.DOTALL)


@pytest.mark.fault(32)
def test_a_second_kernel_reads_the_runs_of_the_first(
    frontend: Frontend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend.run("%%taas --gpus 2 --name shared\nimport os\nprint('I am', os.environ['RANK'])")
    frontend.run("import os, taas; print(os.environ['TAAS_STATE_DIR'], taas.last_run.id)")
    request = frontend.run("print(os.environ['TAAS_STATE_DIR'], taas.last_run.id)")
    state_dir, run_id = frontend.text(request).split()
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    with kernel(tmp_path / "project", TAAS_STATE_DIR=state_dir, TAAS_WARM="0") as second:
        status = second.text(second.run("%taas status"))
        assert re.search(rf"{run_id} +SUCCEEDED +2 +local .* shared", status)
        assert second.text(second.run(f"%taas logs {run_id} --rank 1")) == "I am 1\n"
        assert second.text(second.run("%taas logs shared")) == "I am 0\n"


@pytest.mark.fault(70)
def test_modules_beside_the_notebook_are_not_for_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leftovers: str
) -> None:
    """The notebook's folder has modules with the names of modules that the pool imports."""
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.path.relpath(ROOT, tmp_path / "project"))
    (tmp_path / "project").mkdir()
    for name in ("random", "queue", "torch", "logging"):
        (tmp_path / "project" / f"{name}.py").write_text("raise SystemExit('beside')\n")
    with kernel(tmp_path / "project") as started:
        request = started.run("%%taas --gpus 1\nprint('fine')")
        assert "[0] fine" in started.text(request)


TERMINAL_CELLS = (
    "%load_ext taas_magic",
    "%%taas --gpus 2 --name plain\nprint('hello')\n6 * 7",
    "%%taas --gpus 1 --name broken\nvalues = {}\nvalues['a']",
    "print('not reached')",
)


@pytest.mark.nightly
def test_a_terminal_shows_plain_text(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in frontend.process.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(frontend.process.cwd())
    cells = [new_code_cell(cell) for cell in TERMINAL_CELLS]
    nbformat.write(new_notebook(cells=cells), "cells.ipynb")
    shown = in_terminal([sys.executable, "-m", "IPython", "--colors=NoColor", "cells.ipynb"])
    assert "<div" not in shown
    assert "] hello\n" in shown and "\n42\n" in shown
    assert "SUCCEEDED plain · ranks 2" in shown
    assert "FAILED broken · ranks 1" in shown
    assert re.search(r"Cell In\[(\d+|\?)\], line 3\b", shown)
    assert shown.count("KeyError: 'a'") >= 1
    assert "not reached" not in shown


def in_terminal(command: list[str]) -> str:
    """Run a program in a terminal; return its output, including single carriage returns."""
    primary, secondary = pty.openpty()
    process = subprocess.Popen(command, stdout=secondary, stderr=secondary)
    os.close(secondary)
    shown = b""
    try:
        while block := os.read(primary, 65536):
            shown += block
    except OSError:  # Linux raises it when the other end is closed.
        pass
    os.close(primary)
    process.wait(timeout=HUNG_S)
    return shown.decode().replace("\r\n", "\n")


@pytest.mark.fault(31, 32)
def test_a_restarted_kernel_waits_for_its_old_run_and_a_killed_one_leaves_no_process(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This test ends the module's kernel, so it is the last one."""
    environ = frontend.process.environ()
    monkeypatch.setenv("TAAS_STATE_DIR", environ["TAAS_STATE_DIR"])
    before = len(runs.runs())
    ignoring = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)"
    rank_processes(frontend, frontend.send(ENDLESS.replace("import time", ignoring)))
    frontend.manager.restart_kernel(now=True)
    frontend.client.wait_for_ready(timeout=HUNG_S)
    frontend.run("%%taas --gpus 2\nprint('again')")

    ranks = rank_processes(frontend, frontend.send(ENDLESS))
    processes = carriers(environ[TOKEN])
    assert {*ranks} < {*processes}
    frontend.process.kill()
    assert not left_of(ranks)
    assert not left_of(processes)
    found = sorted(runs.runs(), key=lambda run: run.started_at)[before:]
    assert [run.state for run in found] == ["INTERRUPTED", "SUCCEEDED", "INTERRUPTED"]
    eventually(lambda: not frontend.manager.is_alive())
