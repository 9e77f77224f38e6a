"""Every example notebook runs from its first cell to its last."""

import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ("store.ipynb",)

pytestmark = [
    pytest.mark.usefixtures("no_leftovers"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "kernels" / "taas", tmp_path / "jupyter" / "kernels" / "taas")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    project = tmp_path / "project"
    project.mkdir()
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("%taas down"))
    settings = {"metadata": {"path": str(project)}}
    NotebookClient(notebook, kernel_name="taas", timeout=100, resources=settings).execute()
    assert list(project.iterdir()) == [], "an example clears away what it made"
