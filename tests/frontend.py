"""A client of a real kernel "Python (TaaS)", in place of JupyterLab."""

import os
import queue
import shutil
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import LocalPortCache
from jupyter_client.manager import KernelManager, start_new_kernel
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from tests.eventually import HUNG_S

ROOT = Path(__file__).parent.parent
HOLD = "from tests.frontend import HeldPorts\nHeldPorts.instance()\n"
"""Text of a `jupyter_config.py` for programs that start kernels; with it, they use `HeldPorts`."""

Message = dict[str, Any]


class HeldPorts(LocalPortCache):
    """Port cache that keeps a kernel's ports bound, so that no other process gets them.

    jupyter_client only checks which ports are free; the kernel binds them about a second later.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._holders: dict[int, socket.socket] = {}

    def find_available_port(self, ip: str) -> int:
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as on the kernel's sockets
        holder.bind((ip, 0))
        port: int = holder.getsockname()[1]
        self._holders[port] = holder
        self.currently_used_ports.add(port)
        return port

    def return_port(self, port: int) -> None:
        super().return_port(port)
        if (holder := self._holders.pop(port, None)) is not None:
            holder.close()


HeldPorts.instance()


def environment(folder: Path) -> dict[str, str]:
    """Return environment variables that make Jupyter use the checkout's kernel.

    Copy the kernelspec into `folder`, and write Jupyter's settings there.

    Args:
        folder: Folder for the kernelspec, Jupyter's settings, IPython's profile, and the state
            folder.
    """
    kernels = folder / "jupyter" / "kernels"
    shutil.copytree(ROOT / "kernels" / "taas", kernels / "taas", dirs_exist_ok=True)
    (folder / "settings").mkdir(exist_ok=True)
    (folder / "settings" / "jupyter_config.py").write_text(HOLD)
    return {
        "JUPYTER_CONFIG_DIR": str(folder / "settings"),
        "JUPYTER_PATH": str(kernels.parent),
        "JUPYTER_PREFER_ENV_PATH": "0",
        "IPYTHONDIR": str(folder / "ipython"),
        "PYTHONPATH": str(ROOT),
        "TAAS_STATE_DIR": str(folder / "state"),
        "XDG_CONFIG_HOME": str(folder / "config"),
    }


class Frontend:
    """Client that sends cells to a kernel and collects the output of each cell.

    Attributes:
        outputs: The messages of the iopub channel, by the id of the request.
        replies: The content of the reply to each request that was answered.
    """

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client
        self.outputs: defaultdict[str, list[Message]] = defaultdict(list)
        self.replies: dict[str, dict[str, Any]] = {}

    def send(self, code: str, subshell_id: str | None = None, *, allows_input: bool = False) -> str:
        """Request the execution of a cell; return the request's id at once.

        Args:
            subshell_id: Subshell in which the kernel runs the cell; None for the main thread.
            allows_input: Whether this frontend offers an input box, as JupyterLab does.
        """
        content = {"code": code, "silent": False, "store_history": True, "stop_on_error": True}
        message = self.client.session.msg("execute_request", content)
        if allows_input:
            message["content"]["allow_stdin"] = True
            message["metadata"]["cellId"] = "a-cell"
        if subshell_id is not None:
            message["header"]["subshell_id"] = subshell_id
        self.client.shell_channel.send(message)
        found: str = message["header"]["msg_id"]
        return found

    def new_subshell(self) -> str:
        """Create a subshell of the kernel, which runs cells while the main thread is busy."""
        message = self.client.session.msg("create_subshell_request")
        self.client.control_channel.send(message)
        found: str = self.client.get_control_msg(timeout=HUNG_S)["content"]["subshell_id"]
        return found

    def asked(self, request: str, wait_s: float = HUNG_S) -> Message:
        """Wait until the input box opens; return its prompt, and whether it hides what is typed.

        Fail if the cell ends before that.
        """
        found: list[Message] = []

        def has_asked() -> bool:
            self._take(self.client.get_stdin_msg, 0.01, found.append)
            assert request not in self.replies, self.text(request)
            return bool(found)

        self.wait(has_asked, wait_s)
        content: Message = found[0]["content"]
        return content

    def type_line(self, line: str) -> None:
        """Type a line into the open input box."""
        self.client.input(line)

    def wait(self, condition: Callable[[], bool], wait_s: float = HUNG_S) -> None:
        """Receive messages until a condition holds."""
        deadline = time.monotonic() + wait_s
        while not condition():
            assert time.monotonic() < deadline, f"nothing came in time; seen: {dict(self.outputs)}"
            self._take(self.client.get_shell_msg, 0.01, self._replied)
            self._take(self.client.get_iopub_msg, 0.1, self._shown)

    def finish(self, request: str, wait_s: float = HUNG_S) -> dict[str, Any]:
        """Wait for a cell's reply and all its output; return the reply."""
        self.wait(lambda: request in self.replies and self._is_idle(request), wait_s)
        return self.replies[request]

    def run(self, code: str) -> str:
        """Run a cell that must succeed; return the request's id."""
        request = self.send(code)
        reply = self.finish(request)
        assert reply["status"] == "ok", reply
        return request

    def fail(self, code: str) -> dict[str, Any]:
        """Run a cell that must fail; return the reply."""
        reply = self.finish(self.send(code))
        assert reply["status"] == "error", reply
        return reply

    def be_patient(self) -> None:
        """Raise the kernel's time limit for ending an interrupted run to `HUNG_S` seconds."""
        module = "__import__('taas_magic.notebook.run', fromlist=['Run'])"
        self.run(f"{module}.KILL_WAIT_S = {HUNG_S}")

    def contents(self, request: str, kind: str) -> list[dict[str, Any]]:
        """Return the messages of one kind that belong to a request.

        The table of ranks of an active run, which is a display of its own, is left out.
        """
        found = [m["content"] for m in self.outputs[request] if m["msg_type"] == kind]
        return [it for it in found if not is_rank_table(it)]

    @property
    def process(self) -> psutil.Process:
        """The kernel's process."""
        provisioner = self.manager.provisioner
        assert isinstance(provisioner, LocalProvisioner) and provisioner.pid is not None
        return psutil.Process(provisioner.pid)

    def text(self, request: str) -> str:
        """Return what a request printed."""
        return "".join(content["text"] for content in self.contents(request, "stream"))

    def _is_idle(self, request: str) -> bool:
        states = [content["execution_state"] for content in self.contents(request, "status")]
        return "idle" in states

    def _take(
        self, get: Callable[..., Message], timeout_s: float, put: Callable[[Message], None]
    ) -> None:
        try:
            put(get(timeout=timeout_s))
        except queue.Empty:
            return

    def _replied(self, message: Message) -> None:
        self.replies[message["parent_header"]["msg_id"]] = message["content"]

    def _shown(self, message: Message) -> None:
        self.outputs[message["parent_header"].get("msg_id", "")].append(message)


def is_rank_table(content: dict[str, Any]) -> bool:
    """Return whether a message shows or removes the table of ranks of an active run."""
    return str(content.get("transient", {}).get("display_id")).endswith(":ranks")


def before_start(frontend: Frontend, request: str) -> str:
    """Return the output of a cell, followed by its status headers in state STARTING."""
    heads = [it["data"]["text/plain"] for it in frontend.contents(request, "update_display_data")]
    return frontend.text(request) + "".join(head for head in heads if head.startswith("STARTING"))


@contextmanager
def kernel(project: Path, **environ: str) -> Iterator[Frontend]:
    """Run a kernel in a folder until the block ends; then end its pool `local` and the kernel."""
    project.mkdir(exist_ok=True)
    manager, client = start_new_kernel(
        startup_timeout=HUNG_S,
        kernel_name="taas",
        cwd=str(project),
        env={**os.environ, **environ},
    )
    frontend = Frontend(manager, client)
    try:
        yield frontend
        if manager.is_alive():
            frontend.run("%taas down")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


class Scene:
    """The folders of a kernel: the notebook's folder, a state folder and a TMPDIR.

    Attributes:
        folder: Parent of all folders except TMPDIR.
        project: The notebook's folder.
        state: The state folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.project, self.state = folder, folder / "project", folder / "state"
        # a short path: it holds Unix sockets, whose paths have at most 107 bytes
        self.tmp = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
        for path in (self.project, self.state):
            path.mkdir(exist_ok=True)

    def environ(self) -> dict[str, str]:
        """Return the environment variables of a kernel in these folders."""
        return {**environment(self.folder), "TMPDIR": str(self.tmp)}

    @contextmanager
    def kernel(self, **environ: str) -> Iterator[Frontend]:
        """Run a kernel until the block ends."""
        with kernel(self.project, **{**self.environ(), **environ}) as started:
            yield started

    def close(self) -> None:
        """Remove TMPDIR. Retry, because a process that is ending may remove its files there too."""
        deadline = time.monotonic() + HUNG_S
        while self.tmp.exists():
            assert time.monotonic() < deadline, f"left: {list(self.tmp.iterdir())}"
            shutil.rmtree(self.tmp, ignore_errors=True)
