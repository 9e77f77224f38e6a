"""Makes docs/running-cell.png: the quickstart's cell in JupyterLab, as a person sees it.

Run from the checkout: `python -m tests.rig.browser.picture docs/running-cell.png`.
"""

import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image

from taas_magic.journal.folder import state_dir
from tests.frontend import ROOT
from tests.rig.browser.chromium import Page, find, open_page
from tests.rig.browser.lab import command, open_lab, open_notebook, wait_until

NAME = "quickstart.ipynb"
COLOURS = 128
CELL = "[...document.querySelectorAll('.jp-CodeCell')].find(c => /%%taas/.test(c.innerText))"
OUTPUT = f"{CELL}.querySelector('.jp-OutputArea').innerText"
# From the top of the training cell to the bottom of the cell that uses its result.
CLIP = f"""(() => {{
    const cell = {CELL};
    const cells = [...document.querySelectorAll('.jp-Notebook .jp-Cell')];
    const last = cells.slice(cells.indexOf(cell)).find(c => /^accuracy/m.test(c.innerText));
    cell.scrollIntoView();
    const top = cell.getBoundingClientRect(), bottom = last.getBoundingClientRect();
    return {{x: top.x, y: top.y, width: top.width, height: bottom.bottom - top.y}};
}})()"""


def take(page: Page) -> bytes:
    """Run the notebook that the page shows; return the picture when the run has ended."""
    page.resize(960, 1500, scale=1.5)
    command(page, "application:toggle-left-area")
    command(page, "notebook:run-all-cells")
    page.wait_for(f"/SUCCEEDED/.test({OUTPUT}) && /finds/.test({OUTPUT})")
    page.wait_for("!!document.querySelector('.jp-OutputArea img')")
    page.evaluate("document.activeElement.blur()")
    return page.picture(page.evaluate(CLIP))


def main(target: Path) -> None:
    browser = find()
    assert browser is not None, "no chromium is installed"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "notebooks", folder / "notebooks")
        with (
            # The run folder that the picture names is the one that a person would see.
            open_lab(folder / "jupyter", folder / "notebooks", TAAS_STATE_DIR="") as lab,
            open_page(browser, folder / "profile") as page,
        ):
            pools = state_dir() / "pools"
            before = set(pools.glob("*/pool.json"))
            open_notebook(page, lab, NAME)
            command(page, "notebook:clear-all-cell-outputs")
            wait_until(lambda: set(pools.glob("*/pool.json")) - before, "no pool is warmed up")
            picture = take(page)
    Image.open(io.BytesIO(picture)).quantize(COLOURS).save(target, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
