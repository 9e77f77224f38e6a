"""`%taas debug --debugpy`: a debugger such as VS Code attaches to a rank of a session."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.dap import DapClient
from tests.eventually import eventually
from tests.frontend import Frontend, environment, kernel
from tests.harness import listening_ports
from tests.notebook.test_sessions import error, value
from tests.rig.hosts import Hosts, hosts_up
from tests.rig.pools import ssh_pool

MODULE = """\
def step(batch):
    scale = batch * 10
    return scale + 1
"""

CELL = """%%taas --session exp --out result@1
import debugged_steps
begun = rank + 5
result = debugged_steps.step(begun)
"""

WAITS = """%%taas --session exp --timeout 10 --hang 1
import time
until = time.monotonic() + 12
while time.monotonic() < until:
    time.sleep(0.1)
"""


def port_in(text: str) -> int:
    """Check the configuration in the output of `%taas debug --debugpy`; return its port."""
    settings = json.loads(text[text.index("{") :])
    assert (settings["type"], settings["request"]) == ("debugpy", "attach")
    assert f"127.0.0.1:{settings['connect']['port']}" in text
    return int(settings["connect"]["port"])


def file_of_cell(frontend: Frontend, cell: str) -> str:
    """Return the file name under which the kernel, and so each rank, compiles a cell."""
    module = "__import__('ipykernel.compiler', fromlist=['get_file_name'])"
    raw = json.dumps(cell)
    return str(value(frontend, f"{module}.get_file_name({raw})"))


def check_breakpoints(frontend: Frontend, port: int, module: Path, cell_file: str) -> None:
    """Attach to rank 1, stop in the cell and in the cell's module, read and change variables."""
    with DapClient(port, {str(module): [3], cell_file: [4]}) as client:
        request = frontend.send(CELL)
        thread, frame = client.wait_for_stop()
        assert (frame["line"], frame["source"]["path"]) == (4, cell_file)
        assert client.evaluate(frame, "begun") == "6"
        client.resume(thread)
        thread, frame = client.wait_for_stop()
        assert (frame["line"], frame["name"]) == (3, "step")
        assert client.local(frame, "scale") == "60"
        frontend.wait(lambda: "rank 1: a debugger is attached" in head_of(frontend, request))
        client.evaluate(frame, "scale = 100")
        client.resume(thread)
        assert frontend.finish(request)["status"] == "ok"
    assert value(frontend, "result") == 101


def head_of(frontend: Frontend, request: str) -> str:
    """Return the last text of a cell's status header."""
    shown = frontend.contents(request, "update_display_data")
    return str(shown[-1]["data"]["text/plain"]) if shown else ""


@pytest.mark.usefixtures("no_leftovers")
def test_a_client_attaches_to_a_rank_of_a_session(frontend_of_module: Frontend) -> None:
    frontend = frontend_of_module
    folder = Path(value(frontend, "__import__('os').getcwd()"))
    module = folder / "debugged_steps.py"
    module.write_text(MODULE)
    frontend.run("%%taas --gpus 2 --session exp\nimport os\nrank = int(os.environ['RANK'])")
    text = frontend.text(frontend.run("%taas debug exp --debugpy --rank 1"))
    assert text.startswith("debugpy in rank 1 of session exp listens") and "this machine" in text
    port = port_in(text)
    # a second request returns the same port
    assert frontend.text(frontend.run("%taas debug --debugpy --rank 1")) == text
    assert "ranks 0 to 1" in error(frontend, "%taas debug --debugpy --rank 2")
    cell_file = file_of_cell(frontend, CELL)
    Path(cell_file).parent.mkdir(exist_ok=True)
    Path(cell_file).write_text(CELL)
    check_breakpoints(frontend, port, module, cell_file)
    # Without a client, `breakpoint()` asks the user; with one, the client stops.
    stops = "%%taas --session exp --ranks 1\nhere = 1\nbreakpoint()\nhere = 2"
    request = frontend.send(stops, allows_input=True)
    frontend.asked(request)
    frontend.type_line("c")
    assert frontend.finish(request)["status"] == "ok"
    with DapClient(port, {}) as client:
        request = frontend.send(stops)
        thread, frame = client.wait_for_stop()
        assert (frame["name"], frame["line"]) == ("<module>", 4), frame
        assert client.evaluate(frame, "here") == "1"
        client.resume(thread)
        assert frontend.finish(request)["status"] == "ok"
        # while the client is attached, the clocks are paused
        request = frontend.run(WAITS)
        assert "hangs" not in head_of(frontend, request)
    frontend.run("%taas end exp")


@pytest.mark.usefixtures("no_leftovers")
def test_without_debugpy_the_message_says_what_to_install(frontend_of_module: Frontend) -> None:
    frontend = frontend_of_module
    lacks = "import sys\nsys.modules['debugpy'] = None"
    frontend.run(f"%%taas --gpus 1 --session exp\n{lacks}")
    shown = error(frontend, "%taas debug --debugpy").splitlines()[-1]
    assert re.search(r"UsageError: rank 0 on host \S+ cannot import debugpy", shown)
    assert shown.endswith("bin/python -m pip install debugpy")
    taken = "del sys.modules['debugpy']\nimport debugpy\ndebugpy.listen(('127.0.0.1', 0))"
    frontend.run(f"%%taas --session exp\n{taken}")
    shown = error(frontend, "%taas debug --debugpy").splitlines()[-1]
    assert "listen() has already been called" in shown
    frontend.run("%taas end exp")


@pytest.fixture
def far_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leftovers: str
) -> Iterator[tuple[Frontend, Hosts]]:
    """Yield a kernel with the pool `far`: a host that shares no folder with the notebook."""
    for name, setting in environment(tmp_path).items():
        monkeypatch.setenv(name, setting)
    monkeypatch.setenv("TAAS_WARM", "0")  # the local pool would start for nothing
    project = tmp_path / "project"
    project.mkdir()
    with hosts_up(2) as hosts:
        (project / "taas.toml").write_text(ssh_pool("far", hosts))
        with kernel(project) as frontend:
            yield frontend, hosts
            frontend.run("%taas down far")
        for number in (1, 2):
            assert not hosts.left(number)


@pytest.mark.network
def test_a_client_attaches_to_a_rank_on_an_ssh_host(far_kernel: tuple[Frontend, Hosts]) -> None:
    frontend, hosts = far_kernel
    module = Path(value(frontend, "__import__('os').getcwd()")) / "debugged_steps.py"
    module.write_text(MODULE)
    start = "%%taas --gpus 2 --session exp --pool far\nimport os\nrank = int(os.environ['RANK'])"
    frontend.run(start)
    text = frontend.text(frontend.run("%taas debug --debugpy --rank 1"))
    port = port_in(text)
    [number] = [number for number in (1, 2) if f"of host {hosts.name(number)}." in text]
    [command] = [line.strip() for line in text.splitlines() if line.startswith("    ssh ")]
    wanted = f"ssh -N -L {port}:127.0.0.1:{port} -F {hosts.ssh_config} {hosts.name(number)}"
    assert command == wanted
    forward = subprocess.Popen(shlex.split(command))
    try:
        eventually(lambda: port in listening_ports([psutil.Process(forward.pid)]))
        cell_file = file_of_cell(frontend, CELL)
        folder = str(Path(cell_file).parent)
        write = f"mkdir -p {folder}; printf %s {shlex.quote(CELL)} > {cell_file}"
        hosts.exec(number, "sh", "-c", write)
        with DapClient(port, {cell_file: [4]}) as client:
            request = frontend.send(CELL)
            thread, frame = client.wait_for_stop()
            assert (frame["line"], frame["source"]["path"]) == (4, cell_file)
            assert client.evaluate(frame, "begun") == "6"
            client.resume(thread)
            assert frontend.finish(request)["status"] == "ok"
        hosts.exec(number, "rm", "-r", folder)
        with DapClient(port, {}, "step") as client:  # the host has no file at the module's path
            request = frontend.send(CELL)
            thread, frame = client.wait_for_stop()
            assert frame["name"] == "step" and client.local(frame, "batch") == "6"
            assert frame["source"]["path"] == str(module)
            shown = client.request("source", sourceReference=frame["source"]["sourceReference"])
            assert shown["content"] == MODULE
            client.resume(thread)
            assert frontend.finish(request)["status"] == "ok"
    finally:
        forward.terminate()
        forward.wait()
    frontend.run("%taas end exp")
