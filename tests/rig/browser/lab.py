"""A JupyterLab server, and functions that open and run notebooks in a browser's page."""

import json
import os
import secrets
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.eventually import HUNG_S, eventually
from tests.frontend import HOLD, environment
from tests.rig.browser.chromium import Page

SETTINGS = {
    "labconfig/page_config.json": {
        "disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}
    },
    # a kernel on a busy machine may take longer than a second to answer
    "lab/user-settings/@jupyterlab/completer-extension/manager.jupyterlab-settings": {
        "providerTimeout": 60_000
    },
}
"""Contents of JupyterLab's configuration files, by path."""

PANEL = "[...window.jupyterapp.shell.widgets('main')].find(it => it.isVisible)"
"""JavaScript expression for the notebook that a page shows."""

CONNECTION = f"{PANEL}?.sessionContext?.session?.kernel?.connectionStatus"
"""JavaScript expression for the state of the page's connection to its notebook's kernel."""


@dataclass
class Lab:
    """A running JupyterLab server.

    Attributes:
        url: URL of the server.
        token: Token for requests to the server.
        process: Process of the server.
    """

    url: str
    token: str
    process: "subprocess.Popen[bytes]"

    def get(self, path: str) -> Any:
        """Return the JSON answer of the server's API for a path."""
        request = urllib.request.Request(
            f"{self.url}{path}", headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=HUNG_S) as answer:
            return json.load(answer)

    def is_up(self) -> bool:
        try:
            return bool(self.get("/api/status"))
        except (urllib.error.URLError, ConnectionError):
            return False

    def is_ready(self, notebook: str) -> bool:
        """Return whether a notebook's kernel is idle and a page is connected to the kernel."""
        kernels = [s["kernel"] for s in self.get("/api/sessions") if s["path"] == notebook]
        return any(k["execution_state"] == "idle" and k["connections"] for k in kernels)


@contextmanager
def open_lab(folder: Path, root: Path, **environ: str) -> Iterator[Lab]:
    """Start a JupyterLab with the checkout's kernel and yield it; end it after the block.

    Args:
        folder: Folder for all files of JupyterLab except notebooks.
        root: Folder of the notebooks.
        environ: Further environment variables, in addition to those of `environment`.
    """
    for name, values in SETTINGS.items():
        settings = folder / "config" / name
        settings.parent.mkdir(parents=True)
        settings.write_text(json.dumps(values))
    (folder / "config" / "jupyter_config.py").write_text(HOLD)
    environ = {
        **os.environ,
        **environment(folder),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        **environ,
    }
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--expose-app-in-browser"]
    command += ["--ServerApp.port_retries=0", "--allow-root"]
    command += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}"]
    with reserved_port() as port, (folder / "lab.log").open("wb") as log:
        command += [f"--port={port}"]
        process = subprocess.Popen(command, env=environ, cwd=root, stdout=log, stderr=log)
        lab = Lab(f"http://127.0.0.1:{port}", token, process)
        try:
            eventually(lab.is_up, "JupyterLab does not answer")
            yield lab
        finally:
            process.terminate()
            try:
                process.wait(timeout=HUNG_S / 3)
            except subprocess.TimeoutExpired:
                # After its kernels have ended, the server sometimes waits forever for an idle
                # worker thread of anyio.
                process.kill()
                process.wait(timeout=HUNG_S)


def show_notebook(page: Page, lab: Lab, name: str) -> None:
    """Show a notebook in a page; do not wait for its kernel."""
    # JupyterLab opens the tabs of a workspace again, and commands apply to the last that it opened.
    workspace = name.removesuffix(".ipynb")
    page.go(f"{lab.url}/lab/workspaces/{workspace}/tree/{name}?token={lab.token}")
    page.wait_for("!!document.querySelector('.jp-Notebook .jp-Cell') && !!window.jupyterapp")


def open_busy_notebook(page: Page, lab: Lab, name: str) -> None:
    """Show a notebook in a page, and wait until the page is connected to the kernel."""
    show_notebook(page, lab, name)
    page.wait_for(f"{CONNECTION} === 'connected'")


def open_notebook(page: Page, lab: Lab, name: str) -> None:
    """Show a notebook in a page, and wait until the page is connected to an idle kernel."""
    open_busy_notebook(page, lab, name)
    # Ask the server: the page says "idle" before it is connected.
    eventually(lambda: lab.is_ready(name), "the notebook gets no kernel")


def command(page: Page, name: str, **values: str) -> None:
    """Execute a command of JupyterLab, as its menus do; do not wait for its end."""
    page.evaluate(
        f"void window.jupyterapp.commands.execute({json.dumps(name)}, {json.dumps(values)})"
    )


def run_cell(page: Page, number: int) -> None:
    """Run a cell of the notebook that a page shows; do not wait for its end."""
    page.wait_for(f"{PANEL}.content.widgets.length > {number}")
    page.evaluate(f"void ({PANEL}.content.activeCellIndex = {number})")
    command(page, "notebook:run-cell")


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port that the system assigns to no other program during the block.

    A program that requests this port by its number can bind it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
