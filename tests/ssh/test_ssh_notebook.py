"""Tests of the notebook for SSH hosts: its stored outputs, and its execution on three hosts."""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.eventually import HUNG_S
from tests.frontend import environment, kernel
from tests.notebook.test_attach import beside
from tests.notebook.test_detach import check_killed_kernels
from tests.rig.hosts import Hosts, hosts_up
from tests.rig.pools import PRELOAD_FOR_TRAINING

ROOT = Path(__file__).parents[2]
STORED = ROOT / "notebooks" / "ssh.ipynb"
ACCURACY = re.compile(r"^accuracy (0\.\d+)", re.MULTILINE)
NAMES = ("gpu1", "gpu2", "cpu1")

TOML = """\
[pools.lab]
engine = "ssh"
hosts = ["gpu1", "gpu2"]
gpus = 2
python = "~/venvs/train/bin/python"
options = {{ ssh_config = "{config}" }}

[pools.prepare]
engine = "ssh"
hosts = ["cpu1"]
role = "data"
python = "~/venvs/train/bin/python"
options = {{ ssh_config = "{config}" }}
"""

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture
def folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leftovers: str
) -> Iterator[tuple[Path, Hosts]]:
    """Yield a folder with a copy of the notebook and a taas.toml, and the three hosts in it.

    The hosts share no folder with the notebook. Afterwards, check that no process is left there.
    """
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TAAS_WARM", "0")  # no cell uses the local pool
    copy = tmp_path / "project"
    copy.mkdir()
    shutil.copy(STORED, copy)
    config = tmp_path / "ssh_config"
    (copy / "taas.toml").write_text(TOML.format(config=config))
    with hosts_up(len(NAMES)) as hosts:
        config.write_text(ssh_config(hosts))
        for number, name in enumerate(NAMES, 1):
            link = f"mkdir -p ~/venvs && ln -s {sys.prefix} ~/venvs/train && hostname {name}"
            hosts.exec(number, "env", "HOME=/root", "sh", "-c", link)
        yield copy, hosts
        for number in range(1, hosts.count + 1):
            assert not hosts.left(number)


def ssh_config(hosts: Hosts) -> str:
    """Return an SSH configuration in which the hosts have the names that the notebook uses."""
    named = [f"Host {name}\n  HostName {hosts.address(n)}\n" for n, name in enumerate(NAMES, 1)]
    return "".join(named) + hosts.ssh_config.read_text()


def texts(notebook: NotebookNode) -> str:
    """Return all text output of the notebook's cells. Check that no cell has an error."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "error"]
    shown = (o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs)
    return "\n".join(shown)


def check(notebook: NotebookNode) -> None:
    """Check the outputs of the notebook.

    They must show two successful trainings, a checkpoint, and batches from the data host.
    """
    text = texts(notebook)
    assert text.count("SUCCEEDED") == 2 and "rank 0 wrote: digits.pt" in text
    assert "['digits.pt'] ['gpu1', 'gpu2']" in text
    for host in ("gpu1", "gpu2"):
        assert f"batches for {host} come from cpu1" in text
    found = [float(number) for number in ACCURACY.findall(text)]
    assert len(found) == 2 and min(found) > 0.9
    assert re.search(r"prepare +ssh +ready +cpu1", text)


@pytest.mark.nightly
@pytest.mark.network
def test_the_notebook_trains_on_hosts_that_share_nothing(folder: tuple[Path, Hosts]) -> None:
    path, _ = folder
    settings = path / "taas.toml"
    text = settings.read_text()
    settings.write_text(text.replace("gpus = 2", f"gpus = 2\n{PRELOAD_FOR_TRAINING}"))
    notebook = nbformat.read(path / "ssh.ipynb", as_version=4)
    resources = {"metadata": {"path": str(path)}}
    NotebookClient(notebook, kernel_name="taas", timeout=HUNG_S, resources=resources).execute()
    check(notebook)
    assert sorted(file.name for file in path.iterdir()) == ["digits.pt", "ssh.ipynb", "taas.toml"]


@pytest.mark.nightly
@pytest.mark.fault(31)
@pytest.mark.network
def test_a_killed_kernel_leaves_clean_hosts(folder: tuple[Path, Hosts]) -> None:
    path, hosts = folder
    with kernel(path) as frontend:
        cell = (
            "%%taas --pool lab --gpus 1\nimport time\nprint('begun')\nwhile True: time.sleep(0.1)"
        )
        request = frontend.send(cell)
        frontend.wait(lambda: "begun" in frontend.text(request), HUNG_S)
        assert hosts.processes(1)
        frontend.process.kill()
        assert not hosts.left(1)


@pytest.mark.nightly
@pytest.mark.network
def test_a_detached_run_on_hosts_continues_when_its_kernel_is_killed(
    folder: tuple[Path, Hosts], tmp_path: Path
) -> None:
    path, _ = folder
    with beside(tmp_path) as other:
        check_killed_kernels(path, other, "lab", kills=3)


def test_it_is_stored_with_its_outputs() -> None:
    notebook = nbformat.read(STORED, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert str(ROOT) not in texts(notebook)
    check(notebook)
