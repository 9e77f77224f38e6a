"""Detached sessions: they outlive their kernel, and another kernel takes them over or ends them."""

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.eventually import HUNG_S, eventually
from tests.frontend import Frontend, kernel
from tests.harness import left_of
from tests.notebook.test_detach import kill
from tests.notebook.test_kernel import completions
from tests.notebook.test_sessions import (
    LOADER,
    error,
    fetchers_of,
    notes,
    ranks_of,
    value,
)

pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning")]

START = """%%taas --gpus 2 --session exp --detach
import os
import time
import torch
rank, pid, lr = int(os.environ["RANK"]), os.getpid(), 0.1
weights = torch.arange(3.0)
"""
TERMINAL = [sys.executable, "-m", "taas_magic", "attach", "exp"]
UNTIL = """
while not os.path.exists("{go}"):
    time.sleep(0.05)
"""
WAITS = f"""%%taas --session exp --out done
print("begun", rank, flush=True)
{UNTIL}
done = rank + 10
"""


def started_and_killed(project: Path, go: Path) -> tuple[list[list[int]], list[psutil.Process]]:
    """Start a session, and kill its kernel during a cell, in the middle of an epoch.

    Returns:
        The first batch of each rank, and the processes of the fetcher and the ranks.
    """
    with kernel(project, TAAS_WARM="0") as killed:
        killed.run(START)
        killed.run(LOADER)
        killed.run(
            "%%taas --session exp --cpus 1 --out got@all\n"
            "batches = iter(loader)\ngot = next(batches).tolist()"
        )
        begun = value(killed, "got")
        processes = [*fetchers_of(killed, 1), *ranks_of(killed)]
        cell = killed.send(WAITS.format(go=go))
        killed.wait(lambda: killed.text(cell).count("begun") == 2)
        kill(killed)
    return begun, processes


def test_another_kernel_takes_over_a_session_whose_kernel_was_killed(
    kernel_of_its_own: Frontend, tmp_path: Path
) -> None:
    project, go, other = tmp_path / "project", tmp_path / "go", kernel_of_its_own
    begun, processes = started_and_killed(project, go)
    assert 'A detached session "exp" is running' in error(other, "%%taas --session exp\npass")
    said = error(other, "%%taas --gpus 2 --session exp\npass")
    assert 'a detached session "exp" of this notebook' in said
    listed = other.text(other.run("%taas sessions"))
    assert re.search(r"exp +local +2 +\w+ +\? +\? +%taas attach exp takes it over", listed), listed

    assert {"exp"} == set(completions(other.client, "%taas attach e"))
    assert {"exp"} == set(completions(other.client, "%taas end e"))

    # the cell has continued; `%taas attach` shows its output, also in a terminal
    request = other.send("import taas\nlr = 5\ndef twice(x): return 2 * x\n%taas attach exp")
    other.wait(lambda: other.text(request).count("begun") == 2)
    with subprocess.Popen(TERMINAL, stdout=subprocess.PIPE, text=True) as terminal:
        assert terminal.stdout is not None
        assert "the cell that session exp runs" in terminal.stdout.readline()
        go.touch()
        assert terminal.stdout.read().count("begun") == 2
    assert terminal.returncode == 0
    assert other.finish(request)["status"] == "ok"
    assert "Session exp is in this kernel now: 2 ranks with " in other.text(request)
    assert value(other, "taas.last_run.out") == {"done": 10}

    # the ranks keep their variables; names that they lack are sent from this notebook
    cell = "weights += rank\nsame = os.getpid() == pid, twice(lr), weights.tolist()"
    request = other.run(f"%%taas --session exp --out same@all\n{cell}")
    assert value(other, "same") == [(True, 0.2, [0.0, 1.0, 2.0]), (True, 0.2, [1.0, 2.0, 3.0])]
    assert "cells of this session assigned `lr`" in notes(other, request)
    # a killed fetcher starts again, although its kernel and the folders of ended runs are gone
    other.run("from taas_magic.journal import folder\nfolder.prune(keep_runs=0, keep_bytes=0)")
    fetcher, *ranks = processes
    fetcher.kill()
    assert not left_of([fetcher])
    request = other.run(
        "%%taas --session exp --out got@all\ngot = [b.tolist() for b in batches], lr"
    )
    assert "`lr`" not in notes(other, request)
    left = [n for batches, _ in value(other, "got") for batch in batches for n in batch]
    assert sorted([*left, *(n for first in begun for n in first)]) == list(range(32))
    fetchers = fetchers_of(other, 1)

    # a third kernel takes the session over with the second one's fetchers, and is also killed
    other.run(LOADER.replace("loader", "more"))
    other.run("%%taas --session exp --cpus 1\nbatches = iter(more)\nfirst = next(batches)")
    fetchers = fetchers_of(other, 2)
    with kernel(project, TAAS_WARM="0") as third:
        third.run("%taas attach exp")
        third.run("%%taas --session exp --out got@all\ngot = 1 + len(list(batches))")
        assert value(third, "got") == [8, 8]
        assert "a terminal has taken it over" in error(other, "%%taas --session exp\npass")
        kill(third)
    processes = [*fetchers, *ranks]
    assert all(process.is_running() for process in processes)
    done = subprocess.run(TERMINAL, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and "run `%taas attach exp` there" in done.stderr
    subprocess.run([*TERMINAL[:-2], "end", "exp"], check=True, stdout=subprocess.DEVNULL)
    assert not left_of(processes)
    assert 'detached session "exp" has ended' in error(other, "%%taas --session exp\npass")


def hold_interrupts(frontend: Frontend) -> None:
    """Let the kernel wait `HUNG_S` seconds for a shutdown request after an interrupt."""
    module = "__import__('taas_magic.notebook.run', fromlist=['Run'])"
    frontend.run(f"{module}.SHUTDOWN_WAIT_S = {HUNG_S}")


def test_the_cell_of_a_detached_session_survives_a_restart_and_a_shutdown_of_its_kernel(
    kernel_of_its_own: Frontend, tmp_path: Path
) -> None:
    other, restarted, shut_down = kernel_of_its_own, tmp_path / "one", tmp_path / "two"
    with kernel(tmp_path / "project", TAAS_WARM="0") as ending:
        ending.run(START)
        hold_interrupts(ending)
        cell = ending.send(WAITS.format(go=restarted))
        ending.wait(lambda: ending.text(cell).count("begun") == 2)
        ending.manager.restart_kernel(now=False)
        restarted.touch()
        ending.client.wait_for_ready(timeout=HUNG_S)
        ending.run("%taas attach exp")
        assert value(ending, "__import__('taas').last_run.out") == {"done": 10}

        hold_interrupts(ending)
        cell = ending.send(WAITS.format(go=shut_down))
        ending.wait(lambda: ending.text(cell).count("begun") == 2)
        ending.manager.shutdown_kernel(now=False)
    shut_down.touch()
    other.run("%taas attach exp")
    assert value(other, "__import__('taas').last_run.out") == {"done": 10}
    # without a shutdown request, an interrupt still ends the cell
    cell = other.send(WAITS.format(go=tmp_path / "never"))
    other.wait(lambda: other.text(cell).count("begun") == 2)
    other.manager.interrupt_kernel()
    assert other.finish(cell)["ename"] == "KeyboardInterrupt"
    assert value(other, "__import__('taas').last_run.state.value") == "INTERRUPTED"
    other.run("%taas end exp")


def test_a_session_that_ended_with_its_kernel_is_explained_after_it(
    kernel_of_its_own: Frontend, tmp_path: Path
) -> None:
    project, other = tmp_path / "project", kernel_of_its_own
    with kernel(project, TAAS_WARM="0") as first:
        first.run("%%taas --gpus 1 --session exp --detach\nn = 0")
        first.run("%taas end exp")
        first.run("%%taas --gpus 1 --session exp\nn = 0")
        kill(first)
    why = 'UsageError: session "exp" has ended: the notebook\'s kernel has ended. Start it again: '
    eventually(lambda: f"{why}%%taas --gpus 1" in error(other, "%%taas --session exp\nprint(n)"))
    for command in ("%taas attach exp", "%taas end exp"):
        assert f"{why}%%taas --gpus 1 --session exp" in error(other, command)


@pytest.mark.nightly
def test_a_detached_session_that_runs_no_cell_ends_without_a_kernel(
    kernel_of_its_own: Frontend, tmp_path: Path
) -> None:
    project, go, other = tmp_path / "project", tmp_path / "go", kernel_of_its_own
    (project / "taas.toml").write_text("[runs]\nsession_idle_s = 3\n")
    with kernel(project, TAAS_WARM="0") as killed:
        cell = killed.send(f"{START}print('pid', pid)\n{UNTIL.format(go=go)}")
        killed.wait(lambda: killed.text(cell).count("pid") == 2)
        ranks = [psutil.Process(int(pid)) for pid in re.findall(r"pid (\d+)", killed.text(cell))]
        kill(killed)
    go.touch()
    assert not left_of(ranks)
    eventually(lambda: other.text(other.run("%taas sessions")) == "no sessions\n")
    said = error(other, "%taas attach exp")
    assert re.search(r'detached session "exp" has ended: it had no cell for \d+ s', said)
    assert "%%taas --gpus 2 --session exp --detach" in said
