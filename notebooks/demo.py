"""Run quickstart.ipynb in the TaaS kernel, without a browser (`make demo`)."""

import os
import re
import sys
import time
from pathlib import Path

import ipykernel
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

from taas_magic import probe
from taas_magic.kernel import ENCRYPTS_FROM

FOLDER = Path(__file__).parent
NOTEBOOK = FOLDER / "quickstart.ipynb"
EXECUTED = FOLDER.parent / "build" / "quickstart.executed.ipynb"
ENCRYPTION = "auto" if ipykernel.version_info >= ENCRYPTS_FROM else "disabled"
ACCURACY = re.compile(r"accuracy\D*\d[\d.]*%?", re.IGNORECASE)


class Demo(NotebookClient):
    """Notebook client that prints the output of the cells as it arrives."""

    def process_message(self, msg, cell, cell_index):
        if msg["msg_type"] == "stream":
            sys.stdout.write(msg["content"]["text"])
            sys.stdout.flush()
        return super().process_message(msg, cell, cell_index)


def texts(notebook):
    """Yield the text of each output of the cells."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            yield output.get("text") or output.get("data", {}).get("text/plain") or ""


def main() -> int:
    started = time.monotonic()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    if probe.count_gpus() == 1:  # the notebook has two ranks, and each rank needs a GPU
        print("This machine has one GPU, so the two ranks use the CPU.")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    print(f"running {NOTEBOOK} …", flush=True)
    client = Demo(
        notebook,
        kernel_name="taas",
        timeout=600,
        config=Config({"KernelManager": {"transport_encryption": ENCRYPTION}}),
        resources={"metadata": {"path": str(FOLDER)}},
    )
    failure = None
    try:
        client.execute()
    except CellExecutionError as error:
        failure = error
    EXECUTED.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, EXECUTED)
    if failure is not None:
        print(failure, file=sys.stderr)
    else:
        found = [hit for text in texts(notebook) for hit in ACCURACY.findall(text)]
        print(f"result: {found[-1]}" if found else "the notebook printed no accuracy")
    print(f"executed notebook: {EXECUTED} ({time.monotonic() - started:.0f} s)")
    return failure is not None


if __name__ == "__main__":
    sys.exit(main())
