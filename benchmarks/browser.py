"""Measure JupyterLab while a run prints or displays a lot: stalls, CPU time and memory.

Run from the checkout, where chromium and JupyterLab are installed: `python -m benchmarks.browser`.
A stall is a time in which the page handles no events.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import nbformat
import psutil
from nbformat.v4 import new_code_cell, new_notebook

from tests.rig.browser.chromium import Page, find, open_page
from tests.rig.browser.lab import command, open_lab, open_notebook

TIMEOUT_S = 300.0
LINES = "import os\nfor i in range({lines}):\n    print(os.environ['RANK'], i, 'x' * 80)"
SLOW = (
    "import os, time\nfor i in range({lines} // 100):\n"
    "    print(os.environ['RANK'], i, 'x' * 80)\n    time.sleep(0.01)"
)
SCENES = {
    "a flood": LINES,
    "a line of each rank every 10 ms": SLOW,
    "a text display of 200 MB": "'x' * 200_000_000",
    "an HTML display of 200 MB": "from IPython.display import HTML\nHTML('<p>x</p>' * 25_000_000)",
}
WATCH = """(() => {
    let last = performance.now();
    window.longest = 0;
    clearInterval(window.watching);
    window.watching = setInterval(() => {
        const now = performance.now();
        window.longest = Math.max(window.longest, now - last);
        last = now;
    }, 10);
    return true;
})()"""
CELL = "document.querySelectorAll('.jp-CodeCell')[{}].querySelector('.jp-OutputArea')"


class Cost(NamedTuple):
    """Cost of one cell's output for JupyterLab's page.

    Attributes:
        seconds: Time until the cell shows the run's end.
        stall_s: Longest stall of the page.
        cpu_s: CPU seconds of the page's main thread. While this thread works, it handles no events.
        memory_mb: Peak growth of the memory of the page's process, in MB.
        shown_bytes: Length of the cell's output text at the end.
    """

    seconds: float
    stall_s: float
    cpu_s: float
    memory_mb: float
    shown_bytes: int


def measure(page: Page, cell: int) -> Cost:
    """Run the selected cell, and return the cost of its output for the page.

    Wait until the cell shows the run's end. Then wait one second, so that the page draws the rest.

    Args:
        cell: Index of the selected cell among the code cells.
    """
    output = f"({CELL.format(cell)}?.innerText ?? '')"
    page.evaluate(WATCH)
    start = most = _renderer_bytes()
    began, used = time.monotonic(), _cpu_s(page)
    command(page, "notebook:run-cell-and-select-next")
    while not page.evaluate(f"/SUCCEEDED|FAILED/.test({output})"):
        assert time.monotonic() - began < TIMEOUT_S, page.text()[-2000:]
        most = max(most, _renderer_bytes())
        time.sleep(0.2)
    seconds = time.monotonic() - began
    page.evaluate("new Promise(done => setTimeout(done, 1000))")  # lets the page draw the rest
    most = max(most, _renderer_bytes())
    stall_s = page.evaluate("window.longest") / 1000
    shown = page.evaluate(f"{output}.length")
    return Cost(seconds, stall_s, _cpu_s(page) - used, (most - start) / 1e6, shown)


def _cpu_s(page: Page) -> float:
    page.call("Performance.enable", timeDomain="threadTicks")
    found = page.call("Performance.getMetrics")["metrics"]
    return next(float(one["value"]) for one in found if one["name"] == "TaskDuration")


def _renderer_bytes() -> int:
    """Return the resident memory of the page's process: the largest renderer of the browser."""
    found = 0
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            if "--type=renderer" in process.cmdline():
                found = max(found, process.memory_info().rss)
        except psutil.NoSuchProcess:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=200_000, help="lines of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()
    browser = find()
    assert browser is not None, "no chromium is installed"
    cells = [
        f"%%taas --gpus {asked.ranks}\n{source.format(lines=asked.lines)}"
        for source in SCENES.values()
    ]
    metadata = {"kernelspec": {"name": "taas", "display_name": "TaaS", "language": "python"}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project = folder / "project"
        project.mkdir()
        sources = ["%%taas --gpus 1\nprint('warm')", *cells, "%taas down"]
        notebook = new_notebook(cells=[new_code_cell(one) for one in sources], metadata=metadata)
        nbformat.write(notebook, project / "flood.ipynb")
        with open_lab(folder / "jupyter", project) as lab, open_page(browser, folder / "p") as page:
            open_notebook(page, lab, "flood.ipynb")
            measure(page, 0)
            names = ("seconds", "stall s", "CPU s", "MB more", "shown kB")
            print("scene".ljust(34), *(name.rjust(8) for name in names))
            for number, scene in enumerate(SCENES, start=1):
                cost = measure(page, number)
                words = f"{cost.seconds:8.1f} {cost.stall_s:8.2f} {cost.cpu_s:8.2f}"
                sizes = f"{cost.memory_mb:8.0f} {cost.shown_bytes / 1000:8.0f}"
                print(scene.ljust(34), words, sizes, flush=True)
            command(page, "notebook:run-cell-and-select-next")
            page.wait_for("/is down/.test(document.body.innerText)")


if __name__ == "__main__":
    main()
