"""`%taas attach`, `%taas stop` and `%taas logs` for runs of another kernel, or in a terminal."""

import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from taas_magic.notebook import runs
from tests.eventually import HUNG_S, eventually
from tests.frontend import Frontend, kernel
from tests.notebook.test_kernel_life import ANSI

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

WAITS = """%%taas --gpus 2 --out total --name slow
import os, time
rank = int(os.environ["RANK"])
print("before", rank)
while not os.path.exists({go!r}):
    time.sleep(0.02)
print("after", rank)
total = 42
"""


@pytest.fixture
def frontend(frontend_of_module: Frontend, monkeypatch: pytest.MonkeyPatch) -> Frontend:
    """Return the module's kernel; programs that a test starts use the same state folder."""
    asked = frontend_of_module.run("import os; print(os.environ['TAAS_STATE_DIR'])")
    monkeypatch.setenv("TAAS_STATE_DIR", frontend_of_module.text(asked).strip())
    return frontend_of_module


@contextmanager
def beside(folder: Path) -> Iterator[Frontend]:
    """Yield a second kernel with the same state folder. Its project folder has had no runs."""
    with kernel(folder / "beside", TAAS_WARM="0") as other:
        yield other


@pytest.fixture(scope="module")
def other(
    frontend_of_module: Frontend, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Frontend]:
    """Yield a second kernel beside the module's kernel."""
    with beside(tmp_path_factory.mktemp("other")) as other:
        yield other


def head(frontend: Frontend, request: str) -> str:
    """Return the newest text of a cell's status header; "" if the cell shows none."""
    kinds = ("display_data", "update_display_data")
    shown = [m["content"] for m in frontend.outputs[request] if m["msg_type"] in kinds]
    heads = [it for it in shown if it["transient"].get("display_id", "").endswith(":head")]
    return str(heads[-1]["data"]["text/plain"]) if heads else ""


def test_a_run_can_be_attached_in_another_kernel_and_in_a_terminal(
    frontend: Frontend, other: Frontend, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    run = frontend.send(WAITS.format(go=str(go)))
    frontend.wait(lambda: len(re.findall("before", frontend.text(run))) == 2)
    seen = other.send("%taas attach")
    other.wait(lambda: "before 1" in other.text(seen) and "RUNNING" in head(other, seen))
    assert "ranks 2 · pool local" in head(other, seen)
    other.manager.interrupt_kernel()
    reply = other.finish(seen)
    assert reply["ename"] == "KeyboardInterrupt" and "continues: `%taas attach" in reply["evalue"]
    assert head(other, seen).startswith("NOT ATTACHED slow")
    assert "%taas stop" in head(other, seen)

    again = other.send("%taas attach slow")
    other.wait(lambda: "before 1" in other.text(again))
    terminal, ours = pty.openpty()
    command = [sys.executable, "-m", "taas_magic", "attach", "slow"]
    process = subprocess.Popen(command, stdin=ours, stdout=ours, stderr=ours)
    os.close(ours)
    printed = b""
    while b"before" not in printed:
        printed += os.read(terminal, 4096)
    go.touch()
    assert frontend.finish(run)["status"] == other.finish(again)["status"] == "ok"
    # each view has its own order of lines that ranks print at the same time
    printed_lines = sorted(frontend.text(run).splitlines())
    assert sorted(other.text(again).splitlines()) == printed_lines
    assert head(other, again).startswith("SUCCEEDED slow")
    html = other.contents(again, "update_display_data")[-1]["data"]["text/html"]
    assert "<summary>rank 1</summary>" in html and ">before 1\nafter 1</div>" in html
    assert process.wait(HUNG_S) == 0
    with open(terminal, "rb", closefd=True) as rest:
        printed += _all_of(rest.fileno())
    shown = ANSI.sub("", printed.decode())
    assert shown.count("after") == 2 and "SUCCEEDED slow" in shown

    other.run("import taas; run = taas.last_run; assert run.out == {'total': 42}, run.out")
    other.run("assert run.wait() == {'total': 42} and run.state == 'SUCCEEDED'")
    other.run("assert taas.runs()[0].path == run.path and 'slow' in run._repr_html_()")
    once_more = other.text(other.run("%taas attach slow"))
    assert sorted(once_more.splitlines()) == printed_lines
    frontend.run("import taas; assert taas.last_run.out == {'total': 42} and total == 42")


@pytest.mark.nightly
def test_a_removed_notebook_folder_is_reported_in_one_line(tmp_path: Path) -> None:
    with kernel(tmp_path / "removed", TAAS_WARM="0") as frontend:
        (tmp_path / "removed").rmdir()
        for cell in ("%%taas --gpus 1\n1", "%taas attach", "import taas; taas.run(print, gpus=1)"):
            reply = frontend.fail(cell)
            assert reply["ename"] == "UsageError", reply
            assert "the notebook's folder has been removed" in reply["evalue"]
        frontend.run(f"%cd {tmp_path}")
        frontend.run("%%taas --gpus 1\n1")


def _all_of(descriptor: int) -> bytes:
    found = b""
    while True:
        try:
            read = os.read(descriptor, 4096)
        except OSError:  # the other end is closed
            return found
        if not read:
            return found
        found += read


def test_a_status_header_of_a_detached_view_is_updated_by_the_next_cell(
    frontend: Frontend, other: Frontend, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    run = frontend.send(WAITS.format(go=str(go)))
    frontend.wait(lambda: len(re.findall("before", frontend.text(run))) == 2)
    seen = other.send("%taas attach")
    other.wait(lambda: "RUNNING" in head(other, seen))
    other.manager.interrupt_kernel()
    other.finish(seen)
    assert "update_display_data" not in kinds(other, other.run("1 + 1"))
    go.touch()
    frontend.finish(run)
    cell = other.run("1 + 1")
    [update] = other.contents(cell, "update_display_data")
    assert update["data"]["text/plain"].startswith("SUCCEEDED slow")
    [first] = other.contents(seen, "display_data")
    assert update["transient"] == first["transient"]
    assert "update_display_data" not in kinds(other, other.run("1 + 1"))


def test_cells_after_the_removal_of_a_detached_runs_folder_show_no_error(
    frontend: Frontend, other: Frontend, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    for name in ("removed", "kept"):
        (store := tmp_path / name).mkdir()
        cell = WAITS.format(go=str(go))
        frontend.run(cell.replace("--name slow", f"--store {store} --detach"))
    kept, removed = runs.runs()[:2]
    go.touch()
    eventually(lambda: not removed.is_active and not kept.is_active)
    shutil.rmtree(removed.path)
    cell = frontend.run("1 + 1")
    assert "Error" not in frontend.text(cell)
    [update] = frontend.contents(cell, "update_display_data")
    assert update["transient"] == {"display_id": f"{kept.id}:head"}


def kinds(frontend: Frontend, request: str) -> list[str]:
    return [message["msg_type"] for message in frontend.outputs[request]]


def test_stop_ends_a_run_of_another_project_from_a_terminal(
    frontend: Frontend, tmp_path: Path
) -> None:
    run = frontend.send(WAITS.format(go=str(tmp_path / "never")))
    frontend.wait(lambda: len(re.findall("before", frontend.text(run))) == 2)
    (tmp_path / "elsewhere").mkdir()
    pools = Path(os.environ["TAAS_STATE_DIR"]) / "pools"
    before = set(pools.iterdir())
    command = [sys.executable, "-m", "taas_magic", "stop"]
    done = subprocess.run(
        command, cwd=tmp_path / "elsewhere", capture_output=True, text=True, timeout=HUNG_S
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("stopping run ")
    assert frontend.finish(run)["ename"] == "KeyboardInterrupt"
    assert set(pools.iterdir()) == before, "no other pool was started for it"


def test_logs_can_be_limited_and_searched_and_a_terminal_shows_failures(frontend: Frontend) -> None:
    frontend.run("%%taas --gpus 2\nfor i in range(100):\n    print('step', i)")
    assert frontend.text(frontend.run("%taas logs --rank 1 --tail 2")) == "step 98\nstep 99\n"
    found = frontend.text(frontend.run("%taas logs --rank 1 --grep 'p [12]0$'"))
    assert found == "step 10\nstep 20\n"
    frontend.run(
        "import taas; assert taas.last_run.logs(rank=1, tail=1, grep='p 1') == 'step 19\\n'"
    )
    assert "is not a valid regular expression" in frontend.fail("%taas logs --grep '('")["evalue"]
    assert frontend.fail("taas.last_run.logs(tail=-1)")["ename"] == "UsageError"
    frontend.fail("%%taas --gpus 2 --name bad\n1 / 0")
    command = [sys.executable, "-m", "taas_magic", "attach", "bad"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG_S)
    assert done.returncode == 1 and done.stderr.strip().endswith("ended as FAILED")
    assert done.stdout.count("FAILED bad") == 1  # the header is shown once, below the log
    command = [sys.executable, "-m", "taas_magic", "logs", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG_S)
    assert done.returncode == 1 and done.stderr.startswith('UsageError: No run "nothing"')
    assert frontend.fail("%taas attach nothing")["evalue"].startswith('No run or session "nothing"')
