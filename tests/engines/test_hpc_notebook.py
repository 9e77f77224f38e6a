"""The notebook for batch clusters: its stored form, and its execution on a private Slurm."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.eventually import HUNG_S
from tests.rig.pools import PRELOAD_FOR_TRAINING
from tests.rig.slurm import CORES, PATH, Slurm, slurm_up

ROOT = Path(__file__).parents[2]
STORED = ROOT / "notebooks" / "hpc.ipynb"
NEEDS_NONE_OF = ("MASTER_ADDR", "MASTER_PORT", "sleep", "Client(", "log_path", "init_method")
ACCURACY = re.compile(r"^accuracy (0\.\d+|1\.0+)", re.MULTILINE)

TOML = """
[pools.hpc]
engine = "dask_jobqueue.SLURMCluster"
gpus = 2
cores = 2
max_hosts = 2
{preload}

[pools.hpc.options]
queue = "debug"
cores = {cores}
memory = "1GB"
walltime = "00:10:00"
interface = "eth0"
scheduler_options = {{ host = "{head}" }}
"""

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture
def folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leftovers: str
) -> Iterator[tuple[Path, Slurm]]:
    """Yield the folder of a copy of the notebook and its taas.toml, and the Slurm named there."""
    shutil.copytree(ROOT / "kernels" / "taas", tmp_path / "jupyter" / "kernels" / "taas")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TAAS_WARM", "0")  # no cell uses the local pool
    monkeypatch.setenv("PATH", PATH)
    copy = tmp_path / "notebooks"
    copy.mkdir()
    shutil.copy(STORED, copy)
    with slurm_up(2, share=(tmp_path,)) as slurm:
        assert slurm.hosts is not None
        monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
        head = slurm.hosts.caller
        settings = TOML.format(cores=CORES, head=head, preload=PRELOAD_FOR_TRAINING)
        (copy / "taas.toml").write_text(settings)
        yield copy, slurm
        slurm.wait_until_empty()


def texts(notebook: NotebookNode) -> str:
    """Return all text that the cells show."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "error"]
    shown = (o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs)
    return "\n".join(shown)


def check(notebook: NotebookNode) -> None:
    """Check that the notebook shows a wait, two hosts, and a successful training."""
    text = texts(notebook)
    assert "Slurm job" in text and "hosts 2" in text and "SUCCEEDED" in text
    found = ACCURACY.search(text)
    assert found is not None and float(found[1]) > 0.9
    assert "not saved (only rank 0 writes): landuse.pt" in text


@pytest.mark.nightly
@pytest.mark.network
def test_it_trains_on_two_hosts(folder: tuple[Path, Slurm]) -> None:
    path, _ = folder
    notebook = nbformat.read(path / "hpc.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("%taas down hpc\n%taas down"))
    resources = {"metadata": {"path": str(path)}}
    NotebookClient(notebook, kernel_name="taas", timeout=HUNG_S, resources=resources).execute()
    check(notebook)
    assert {file.name for file in path.iterdir()} <= {"hpc.ipynb", "taas.toml"}


def test_it_is_stored_with_its_outputs() -> None:
    notebook = nbformat.read(STORED, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert str(ROOT) not in texts(notebook)
    check(notebook)


def test_the_cells_lack_the_setup_that_guides_require() -> None:
    notebook = nbformat.read(STORED, as_version=4)
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert not [word for word in NEEDS_NONE_OF if word in source]
