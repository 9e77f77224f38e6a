"""Tests of a run's output in JupyterLab, in a real browser."""

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook

pytest.importorskip("websocket", reason="websocket-client is missing")
from tests.eventually import HUNG_S, eventually
from tests.frontend import environment
from tests.rig.browser.chromium import Page, find, open_page
from tests.rig.browser.lab import (
    Lab,
    command,
    open_busy_notebook,
    open_lab,
    open_notebook,
    run_cell,
    show_notebook,
)

BROWSER = find() or ""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not BROWSER, reason="no chromium is installed"),
    pytest.mark.skipif(find_spec("jupyterlab") is None, reason="jupyterlab is missing"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

SHOWN = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell"
OUTPUT = f"document.querySelectorAll('{SHOWN}')[{{}}].querySelector('.jp-OutputArea').innerText"
STEP = re.compile(r"step (\d+)")
FLOOD = "%%taas --gpus 2\nfor i in range(50_000):\n    print(i, 'x' * 90)"
WAITS = (
    "%%taas --gpus 1\nfrom pathlib import Path\nimport time\n"
    "while not Path('end').exists():\n    time.sleep(0.05)"
)
STEPS = (
    "%%taas --gpus 1 --detach --name back\nfrom pathlib import Path\nimport time\nimport taas\n"
    "for step in range(6):\n    while not Path(f'step-{step}').exists():\n"
    "        time.sleep(0.05)\n    taas.log(step=step, loss=1 / (step + 1))\n"
    "    print('step', step)"
)
"""A run that waits for a file before each step."""

RANKS = (
    "%%taas --gpus 2 --name rows\nfrom pathlib import Path\nimport time\nimport taas\n"
    "step = 0\nwhile not Path('enough').exists():\n    time.sleep(0.05)\n"
    "    taas.log(step=step, at=step, all_ranks=True)\n    step += 1"
)
"""A run whose table of ranks changes once a second."""

TABLE = "document.querySelector('details:has(pre[class^=taas-ranks])')"
ROWS = f"getComputedStyle({TABLE}.querySelector('pre'), '::before').content"
LAST = "[...document.querySelectorAll('details')].find(it => /last report/.test(it.innerText))"

COMPARE = "import taas\ntaas.compare(taas.last_run)"

CELLS = (
    "from pathlib import Path\ngo = Path('go')",
    "%%taas --gpus 2 --out total --name seen\n"
    "import os, time\n"
    "from tqdm import trange\n"
    "rank = int(os.environ['RANK'])\n"
    "print(f'rank {rank} waits')\n"
    "if rank == 0:\n"
    "    bar = trange(2, desc='steps')\n"
    "    bar.update(1)\n"
    "    bar.refresh()\n"
    "while not go.exists():\n"
    "    time.sleep(0.05)\n"
    "if rank == 0:\n"
    "    bar.close()\n"
    "print(f'rank {rank} goes on')\n"
    "total = 42\n",
    "print('total', total)",
    "%taas down",
    "",
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("lab") / "project"
    folder.mkdir()
    kernel = {"name": "taas", "display_name": "Python (TaaS)", "language": "python"}
    notebook = new_notebook(
        cells=[new_code_cell(cell) for cell in CELLS], metadata={"kernelspec": kernel}
    )
    nbformat.write(notebook, folder / "seen.ipynb")
    answer = "print('an', 'answer')"
    others = {
        "flood": (FLOOD, answer),
        "waits": (WAITS,),
        "ranks": (RANKS, "%taas attach rows"),
        "back": (STEPS, "%taas attach back", COMPARE),
    }
    for name, cells in others.items():
        other = new_notebook(
            cells=[new_code_cell(cell) for cell in cells], metadata={"kernelspec": kernel}
        )
        nbformat.write(other, folder / f"{name}.ipynb")
    yield folder
    take_steps(folder, 6)  # lets the detached run end, also if its test has failed


@pytest.fixture(scope="module")
def lab(project: Path) -> Iterator[Lab]:
    with open_lab(project.parent / "jupyter", project) as running:
        yield running


@pytest.fixture(scope="module")
def page(project: Path) -> Iterator[Page]:
    with open_page(BROWSER, project.parent / "profile") as opened:
        yield opened


def output(number: int) -> str:
    """Return a JavaScript expression for the output text of the cell with this index."""
    return OUTPUT.format(number)


@pytest.mark.nightly
def test_the_page_still_reacts_during_a_flood_of_lines(page: Page, lab: Lab) -> None:
    open_notebook(page, lab, "flood.ipynb")
    command(page, "notebook:run-all-cells")
    page.wait_for(f"/SUCCEEDED/.test({output(0)}) && /an answer/.test({output(1)})")
    page.wait_for(f"/lines more .*: %taas logs/.test({output(0)})")
    assert page.evaluate(f"{output(0)}.length") < 700_000


@pytest.mark.nightly
def test_a_header_that_gets_no_more_updates_does_not_say_running(
    page: Page, lab: Lab, project: Path, tmp_path: Path
) -> None:
    open_notebook(page, lab, "waits.ipynb")
    command(page, "notebook:run-cell")
    page.wait_for(f"/RUNNING/.test({output(0)})")
    command(page, "docmanager:save-all")
    eventually(lambda: "RUNNING" in (project / "waits.ipynb").read_text(), "it is not saved")
    with open_page(BROWSER, tmp_path / "again") as again:
        show_notebook(again, lab, "waits.ipynb")
        again.wait_for(f"/RUNNING/.test({output(0)})")
        again.call("Animation.enable")
        again.call("Animation.setPlaybackRate", playbackRate=1000)
        again.wait_for(f"!/RUNNING/.test({output(0)}) && /%taas attach/.test({output(0)})")
        assert "RUNNING" in page.evaluate(output(0)), "this page is brought up to date"
        (project / "end").touch()
        page.wait_for(f"/SUCCEEDED/.test({output(0)})")


@pytest.mark.nightly
def test_a_detached_run_is_seen_again_after_a_reload_in_a_new_tab_and_in_a_terminal(
    page: Page, lab: Lab, project: Path, tmp_path: Path
) -> None:
    notebook, printed = project / "back.ipynb", tmp_path / "terminal.txt"
    open_notebook(page, lab, "back.ipynb")
    command(page, "notebook:run-cell")
    page.wait_for(f"/DETACHED back/.test({output(0)})")
    take_steps(project, 2)
    command(page, "docmanager:save-all")
    eventually(lambda: "DETACHED" in notebook.read_text(), "it is not saved")

    open_notebook(page, lab, "back.ipynb")
    run_cell(page, 1)
    sees_steps(page, 2)
    terminal = attach_in_a_terminal(project, printed)
    try:
        eventually(lambda: "step 1" in printed.read_text(), "the terminal shows no log")
        take_steps(project, 4)
        sees_steps(page, 4)
        eventually(lambda: "step 3" in printed.read_text(), "the terminal shows no news")

        page.go("about:blank")
        open_busy_notebook(page, lab, "back.ipynb")
        command(page, "notebook:interrupt-kernel")
        eventually(lambda: lab.is_ready("back.ipynb"), "the attached view does not end")
        take_steps(project, 5)
        run_cell(page, 1)
        sees_steps(page, 5)
        take_steps(project, 6)
        page.wait_for(f"/SUCCEEDED back/.test({output(1)})")
        sees_steps(page, 6)
        run_cell(page, 2)
        page.wait_for(f"!!document.querySelectorAll('{SHOWN}')[2].querySelector('img')")
        assert terminal.wait(HUNG_S) == 0
        assert STEP.findall(printed.read_text()) == STEP.findall(page.evaluate(output(1)))
    finally:
        terminal.kill()
        terminal.wait(HUNG_S)


def test_the_table_of_ranks_stays_open_and_scrolled_also_after_the_end(
    page: Page, lab: Lab, project: Path
) -> None:
    notebook = project / "ranks.ipynb"
    open_notebook(page, lab, "ranks.ipynb")
    run_cell(page, 0)
    # A report of a slow machine may have the line of code of one rank only.
    page.wait_for(f"!!{TABLE} && ({ROWS}.match(/Cell In/g) ?? []).length === 2")
    page.evaluate(f"{TABLE}.querySelector('pre').style.maxHeight = '20px'")
    page.evaluate(f"{TABLE}.querySelector('summary').click()")
    page.wait_for(f"({TABLE}.querySelector('pre').scrollTop = 9) && {TABLE}.open")
    steps = [page.evaluate(ROWS)]
    while len(steps) < 4:
        page.wait_for(f"{ROWS} !== {json.dumps(steps[-1])}")
        steps.append(page.evaluate(ROWS))
    assert page.evaluate(f"{TABLE}.open && {TABLE}.querySelector('pre').scrollTop") == 9
    assert all(re.search(r" 0  +\S+ +\d+ +\d+ % .* Cell In", rows) for rows in steps)
    (project / "enough").touch()
    page.wait_for(f"/SUCCEEDED rows/.test({output(0)}) && !{TABLE} && !!{LAST}")
    page.evaluate(f"{LAST}.querySelector('summary').click()")
    rows = page.evaluate(f"{LAST}.innerText")
    assert re.search(r"\n1 .* Cell In\[1\], line \d", rows), rows
    run_cell(page, 1)
    page.wait_for(f"/SUCCEEDED rows/.test({output(1)}) && /last report/.test({output(1)})")
    command(page, "docmanager:save-all")
    eventually(lambda: notebook.read_text().count("last report") == 2, "it is not saved")

    foreign = nbformat.read(notebook, 4)
    foreign.cells[0].source += "\n# changed by somebody else, so that the notebook is not trusted"
    nbformat.write(foreign, project / "foreign.ipynb")
    show_notebook(page, lab, "foreign.ipynb")
    page.wait_for(f"/SUCCEEDED rows/.test({output(0)}) && !!{LAST}")
    assert page.evaluate(f"{LAST}.open || !!{TABLE}") is False
    page.evaluate(f"{LAST}.querySelector('summary').click()")
    assert page.evaluate(f"{LAST}.innerText").strip() == rows.strip()
    html, _ = HTMLExporter().from_notebook_node(foreign)  # type: ignore[no-untyped-call]
    page.evaluate(f"document.documentElement.innerHTML = {json.dumps(html)}")
    page.wait_for(f"!!{LAST} && !{TABLE}")
    page.evaluate(f"{LAST}.querySelector('summary').click()")
    assert page.evaluate(f"{LAST}.innerText").strip() == rows.strip()


def take_steps(project: Path, number: int) -> None:
    """Create files that let the run of the cell `STEPS` take its first `number` steps."""
    for step in range(number):
        (project / f"step-{step}").touch()


def sees_steps(page: Page, number: int) -> None:
    """Wait until the second cell shows the log of `number` steps; check its loss curve and log."""
    cell = f"document.querySelectorAll('{SHOWN}')[1]"
    page.wait_for(f"!!{cell}?.querySelector('.jp-OutputArea')")
    page.wait_for(f"/loss.*{number} values/.test({output(1)})")
    page.wait_for(f"/step {number - 1}/.test({output(1)})")
    source = page.evaluate(f"{cell}.querySelector('.jp-OutputArea img[alt=loss]').src")
    svg = base64.b64decode(source.partition(",")[2]).decode()
    assert len(re.findall(r"[\d.]+,[\d.]+", svg)) == number, "points of the curve"
    assert STEP.findall(page.evaluate(output(1))) == [str(step) for step in range(number)]


def attach_in_a_terminal(project: Path, printed: Path) -> "subprocess.Popen[bytes]":
    """Start `python -m taas_magic attach back`, which writes its output to the file `printed`."""
    environ = {**os.environ, **environment(project.parent / "jupyter")}
    command = [sys.executable, "-m", "taas_magic", "attach", "back"]
    with printed.open("wb") as out:
        return subprocess.Popen(command, cwd=project, env=environ, stdout=out, stderr=out)


def test_a_run_shows_its_head_its_log_and_its_result(
    page: Page, lab: Lab, project: Path, tmp_path: Path
) -> None:
    """This test must run after the other tests with runs: its notebook ends their shared pool."""
    open_notebook(page, lab, "seen.ipynb")
    command(page, "notebook:run-all-cells")
    page.wait_for(f"/rank 0 waits/.test({output(1)}) && /rank 1 waits/.test({output(1)})")
    page.wait_for(f"/RUNNING/.test({output(1)}) && /steps: 50%/.test({output(1)})")
    assert page.evaluate("!!document.querySelector('.jp-OutputArea progress')")
    (tmp_path / "running.png").write_bytes(page.picture())
    (project / "go").touch()
    page.wait_for(f"/total 42/.test({output(2)})")
    page.wait_for(f"/SUCCEEDED/.test({output(1)})")
    shown = page.evaluate(output(1))
    assert "RUNNING" not in shown
    assert shown.count("seen") == 1
    assert shown.count("waits") == shown.count("goes on") == 2
    assert (tmp_path / "running.png").read_bytes().startswith(b"\x89PNG")
    page.wait_for(f"/is down/.test({output(3)})")


def test_tab_completes_a_flag(page: Page) -> None:
    last = "[...document.querySelectorAll('.jp-CodeCell .cm-content')].at(-1)"
    page.wait_for(f"({last}.focus(), document.activeElement === {last})")
    page.type("%%taas --g")
    page.press("Tab")
    offered = "document.querySelector('.jp-Completer:not(.lm-mod-hidden)')?.innerText"
    page.wait_for(f"/--gpus/.test({offered})")
    assert "--max-restarts" not in page.evaluate(offered)
    page.press("Enter")
    page.wait_for(f"{last}.innerText.trim() === '%%taas --gpus'")
