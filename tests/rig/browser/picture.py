"""Script that takes the pictures in docs/: notebooks in JupyterLab in a real browser.

Run it from the checkout: `python -m tests.rig.browser.picture FOLDER [NAME ...]`. Without names, it
takes all pictures. A picture has the name of the function that takes it.
"""

import io
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image

from tests.cellfiles import cells_of
from tests.eventually import eventually
from tests.rig.browser.chromium import Page, find, open_page
from tests.rig.browser.lab import Lab, command, open_lab, open_notebook, run_cell

NAME = "picture.ipynb"
COLOURS = 64
WIDTH, HEIGHT, SCALE = 840, 2000, 1.5
CELLS = "[...document.querySelectorAll('.jp-Notebook .jp-Cell')]"
KERNEL = {"name": "taas", "display_name": "Python (TaaS)", "language": "python"}
TAAS_TOML = """
[pools.many]
engine = "local"
max_hosts = 3
cores = 2
"""
WARM_UP = "%%taas --gpus 2\npass"
DIGITS, TRAINING = cells_of("digits_training")

READ = """
def read(index):
    if index >= len(train_set):
        raise IndexError(f"no picture {index} in a set of {len(train_set)}")
    return train_set[index]
"""
FAILS = """
%%taas --gpus 2
import torch.distributed as dist

dist.init_process_group()
rank = dist.get_rank()
total = torch.zeros(64)
for index in range(701 * rank, 701 * (rank + 1)):
    total += read(index)[0]
dist.all_reduce(total)
"""
STYLE = "<style>.jp-cell-toolbar, .jp-Collapser {visibility: hidden}</style>"


@dataclass
class Session:
    """A page of a browser, and the JupyterLab that it shows.

    Attributes:
        folder: The folder with the server's notebooks.
    """

    page: Page
    lab: Lab
    folder: Path

    def open(self, *cells: str, width: int = WIDTH) -> None:
        """Write a notebook, and open it in a page that is `width` CSS pixels wide."""
        notebook = new_notebook(
            cells=[new_code_cell(cell.strip()) for cell in cells], metadata={"kernelspec": KERNEL}
        )
        nbformat.write(notebook, self.folder / NAME)
        self.page.resize(width, HEIGHT, SCALE)
        self.show()

    def show(self) -> None:
        """Load the page of the notebook, or load it again."""
        open_notebook(self.page, self.lab, NAME)
        self.page.evaluate("window.jupyterapp.shell.collapseLeft()")

    def run(self, *numbers: int) -> None:
        """Run cells; do not wait for their end."""
        for number in numbers:
            run_cell(self.page, number)

    def wait_for_end(self, number: int) -> None:
        """Wait until a cell has ended."""
        prompt = f"{CELLS}.at({number}).querySelector('.jp-InputPrompt').innerText"
        self.page.wait_for(f"/\\d/.test({prompt})")

    def wait_for(self, number: int, pattern: str) -> None:
        """Wait until the output of a cell matches a regular expression of JavaScript."""
        output = f"{CELLS}.at({number})?.querySelector('.jp-OutputArea')?.innerText"
        self.page.wait_for(f"/{pattern}/.test({output})")

    def picture(self, first: int, last: int) -> bytes:
        """Return a PNG from the top of cell `first` to the bottom of cell `last`."""
        self.page.evaluate(
            f"document.head.insertAdjacentHTML('beforeend', {json.dumps(STYLE)}),"
            f"document.activeElement.blur(), {CELLS}.at({first}).scrollIntoView()"
        )
        clip = f"""(() => {{
            const top = {CELLS}.at({first}).getBoundingClientRect();
            const bottom = {CELLS}.at({last}).getBoundingClientRect();
            return {{x: top.x, y: top.y, width: top.width, height: bottom.bottom - top.y}};
        }})()"""
        return self.page.picture(self.page.evaluate(clip))


def running_cell(session: Session) -> bytes:
    """Show a cell that trains on two ranks: a progress bar, two live curves, its log."""
    session.open(DIGITS, WARM_UP, f"%%taas --gpus 2 --name digits\n{TRAINING}")
    session.run(0, 1, 2)
    session.wait_for(2, "epoch 10:")
    return session.picture(2, 2)


def narrow(session: Session) -> bytes:
    """Show the cell of `running_cell` in a page that is 480 pixels wide."""
    session.open(DIGITS, WARM_UP, f"%%taas --gpus 2 --name digits\n{TRAINING}", width=480)
    session.run(0, 1, 2)
    session.wait_for(2, "epoch 10:")
    return session.picture(2, 2)


def dark(session: Session) -> bytes:
    """Show the cell of `running_cell` and a failure in JupyterLab's dark theme."""
    session.open(DIGITS, WARM_UP, f"%%taas --gpus 2 --name digits\n{TRAINING}", READ, FAILS)
    session.run(0, 1, 2)
    command(session.page, "apputils:change-theme", theme="JupyterLab Dark")
    session.wait_for(2, "epoch 10:")
    command(session.page, "notebook:interrupt-kernel")
    session.wait_for_end(2)
    session.run(3, 4)
    session.wait_for_end(4)
    return session.picture(2, 4)


def failure(session: Session) -> bytes:
    """Show the failure of one rank: the cell's exception."""
    session.open(DIGITS, WARM_UP, READ, FAILS)
    session.run(0, 1, 2, 3)
    session.wait_for_end(3)
    return session.picture(2, 3)


def data_advice(session: Session) -> bytes:
    """Show the end of a run that waited for its data: the status header says what to change."""
    dataset = """
import time

class SlowPictures(torch.utils.data.Dataset):
    def __len__(self):
        return 1400

    def __getitem__(self, index):
        time.sleep(0.001)                  # slow storage
        return train_set[index]

train = taas.register(DataLoader(SlowPictures(), batch_size=32, num_workers=1))
"""
    cell = """
%%taas --gpus 2 --cpus 1
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x, y in train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""
    session.open(DIGITS, WARM_UP, dataset, cell)
    session.run(0, 1, 2, 3)
    session.wait_for_end(3)
    return session.picture(2, 3)


def farm_table(session: Session) -> bytes:
    """Show the table of a farm while its jobs run."""
    function = """
def train(shard, epochs=60):
    model, (x, y) = make_model(), train_set[shard::8]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
        time.sleep(0.05)
    return loss.item()
"""
    cell = """
farm = taas.farm(pool="many", cpus=1, nodes=2)
jobs = farm.map(train, range(12))
"""
    session.open(f"{DIGITS}import time\n", function, cell)
    session.run(0, 1, 2)
    session.wait_for(2, "[3-9] done")
    return session.picture(1, 2)


def attach(session: Session) -> bytes:
    """Show a detached run, attached again after a reload of the page."""
    cell = f"%%taas --gpus 2 --name digits --detach\n{TRAINING}"
    session.open(DIGITS, WARM_UP, cell, "%taas attach digits")
    session.run(0, 1, 2)
    session.wait_for(2, "DETACHED")
    command(session.page, "docmanager:save-all")
    file = session.folder / NAME
    eventually(lambda: "DETACHED" in file.read_text(), "the notebook is not saved")
    session.show()
    session.run(3)
    session.wait_for(3, "RUNNING[^]*epoch 10:")
    return session.picture(2, 3)


PICTURES: tuple[Callable[[Session], bytes], ...] = (
    running_cell,
    failure,
    data_advice,
    farm_table,
    attach,
)
"""The pictures of docs/."""

CHECKS: tuple[Callable[[Session], bytes], ...] = (narrow, dark)
"""Pictures for manual checks, which docs/ does not have."""


def main(target: Path, names: list[str]) -> None:
    """Take the pictures with these names, or all pictures.

    Args:
        target: The folder for the pictures.
        names: The names of the functions that take them.
    """
    browser = find()
    assert browser is not None, "no chromium is installed"
    target.mkdir(exist_ok=True)
    for take in [it for it in PICTURES + CHECKS if it.__name__ in names] or PICTURES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            notebooks = folder / "notebooks"
            notebooks.mkdir()
            (notebooks / "taas.toml").write_text(TAAS_TOML)
            with (
                # With the default state folder, the pictures show the paths that users see.
                open_lab(folder / "jupyter", notebooks, TAAS_STATE_DIR="") as lab,
                open_page(browser, folder / "profile") as page,
            ):
                picture = Image.open(io.BytesIO(take(Session(page, lab, notebooks))))
        path = target / f"{take.__name__.replace('_', '-')}.png"
        picture.convert("RGB").quantize(COLOURS).save(path, optimize=True)
        print(path, f"{path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
