"""Runs in a real kernel: how they end with it, and where their output appears."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from taas_magic import journal
from tests.conftest import TOKEN, carriers
from tests.frontend import Frontend, environment, kernel

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ALL_GONE_S = 60.0
ENDLESS = """%%taas --gpus 2
import time
print("pid", __import__("os").getpid())
while True:
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    """One kernel with a warm pool, for the tests that leave both as they were."""
    folder = tmp_path_factory.mktemp("kernel")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**environment(folder), TOKEN: folder.name}.items():
            patch.setenv(name, value)
        with kernel(folder / "project") as started:
            yield started
        assert not carriers(folder.name)


@pytest.fixture
def kernel_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leftovers: str
) -> Iterator[Frontend]:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    with kernel(tmp_path / "project") as started:
        yield started


def rank_processes(frontend: Frontend, request: str) -> list[psutil.Process]:
    """The ranks of an endless run, when both have said who they are."""
    pids: list[str] = []

    def found_both() -> bool:
        pids[:] = re.findall(r"pid (\d+)", frontend.text(request))
        return len(pids) == 2

    frontend.wait(found_both)
    return [psutil.Process(int(pid)) for pid in pids]


def test_a_killed_kernel_leaves_no_process(kernel_of_its_own: Frontend, no_leftovers: str) -> None:
    frontend = kernel_of_its_own
    ranks = rank_processes(frontend, frontend.send(ENDLESS))
    processes = carriers(no_leftovers)
    assert {*ranks} < {*processes}
    [kernel_process] = [p for p in processes if "taas_magic.kernel" in p.cmdline()]
    kernel_process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=ALL_GONE_S)
    assert not alive
    _, alive = psutil.wait_procs(processes, timeout=ALL_GONE_S)
    assert not alive
    assert [run.state for run in journal.runs()] == ["INTERRUPTED"]


def test_an_interrupt_ends_the_run_and_the_kernel_goes_on(frontend: Frontend) -> None:
    request = frontend.send(ENDLESS)
    ranks = rank_processes(frontend, request)
    frontend.manager.interrupt_kernel()
    reply = frontend.finish(request)
    assert reply["ename"] == "KeyboardInterrupt"
    assert not [rank for rank in ranks if rank.is_running()]
    heads = frontend.contents(request, "update_display_data")
    assert heads[-1]["data"]["text/plain"].startswith("INTERRUPTED")
    assert frontend.text(frontend.run("print(6 * 7)")) == "42\n"
    assert "] on\n" in frontend.text(frontend.run("%%taas --gpus 2\nprint('on')"))


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
    assert not [rank for rank in ranks if rank.is_running()]
    assert "[0] on" in frontend.text(frontend.run("%%taas --gpus 1\nprint('on')"))


def test_output_stays_with_its_cell_while_another_runs(frontend: Frontend, tmp_path: Path) -> None:
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
    assert frontend.text(other) == "meanwhile\n"
    assert frontend.text(run) == "[0] before\n[0] after\n"


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


def test_a_progress_bar_goes_into_the_head(frontend: Frontend) -> None:
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


def test_a_second_kernel_reads_the_runs_of_the_first(
    frontend: Frontend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend.run("%%taas --gpus 2 --name shared\nimport os\nprint('I am', os.environ['RANK'])")
    frontend.run("import os, taas; print(os.environ['TAAS_STATE_DIR'], taas.last_run.run_id)")
    request = frontend.run("print(os.environ['TAAS_STATE_DIR'], taas.last_run.run_id)")
    state_dir, run_id = frontend.text(request).split()
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    with kernel(tmp_path / "project", TAAS_STATE_DIR=state_dir, TAAS_WARM="0") as second:
        status = second.text(second.run("%taas status"))
        assert re.search(rf"{run_id} +SUCCEEDED +2 +local .* shared", status)
        assert second.text(second.run(f"%taas logs {run_id} --rank 1")) == "I am 1\n"
        assert second.text(second.run("%taas logs shared")) == "I am 0\n"


TERMINAL_CELLS = (
    "%load_ext taas_magic",
    "%%taas --gpus 2 --name plain\nprint('hello')\n6 * 7",
    "%%taas --gpus 1 --name broken\nvalues = {}\nvalues['a']",
    "print('not reached')",
)


@pytest.mark.usefixtures("no_leftovers")
def test_a_terminal_shows_plain_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    cells = [new_code_cell(cell) for cell in TERMINAL_CELLS]
    nbformat.write(new_notebook(cells=cells), "cells.ipynb")
    ipython = [sys.executable, "-m", "IPython", "--colors=NoColor"]
    shown = in_terminal([*ipython, "cells.ipynb"])
    subprocess.run([*ipython, "-c", "%load_ext taas_magic\n%taas down"], timeout=60, check=True)
    assert "<div" not in shown
    assert "] hello\n" in shown and "\n42\n" in shown
    assert "SUCCEEDED plain · ranks 2" in shown
    assert "FAILED broken · ranks 1" in shown
    assert re.search(r"Cell In\[(\d+|\?)\], line 3\b", shown)
    assert shown.count("KeyError: 'a'") >= 1
    assert "not reached" not in shown


def in_terminal(command: list[str]) -> str:
    """What a terminal that a program was started in would show, its carriage returns left in."""
    primary, secondary = pty.openpty()
    process = subprocess.Popen(command, stdout=secondary, stderr=secondary)
    os.close(secondary)
    shown = b""
    try:
        while block := os.read(primary, 65536):
            shown += block
    except OSError:  # Linux says so when the other end is closed.
        pass
    os.close(primary)
    process.wait(timeout=ALL_GONE_S)
    return shown.decode().replace("\r\n", "\n")
