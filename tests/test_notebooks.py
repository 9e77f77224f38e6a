"""The example notebooks: as they are stored, and executed with the TaaS kernel."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "notebooks"
NAMES = ("quickstart", "pragma", "lightning")
WITH_PICTURE = ("quickstart", "pragma")
ACCURACY = re.compile(r"^accuracy (0\.\d+)", re.MULTILINE)

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leftovers: str) -> Path:
    """A copy of the notebooks, and the checkout's own kernelspec."""
    shutil.copytree(ROOT / "kernels" / "taas", tmp_path / "jupyter" / "kernels" / "taas")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    copy = tmp_path / "notebooks"
    shutil.copytree(NOTEBOOKS, copy)
    return copy


def outputs(notebook: NotebookNode) -> Iterator[NotebookNode]:
    for cell in notebook.cells:
        yield from cell.get("outputs", ())


def texts(notebook: NotebookNode) -> str:
    """All that the cells show as text."""
    shown = (o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs(notebook))
    return "\n".join(shown)


def check(notebook: NotebookNode, name: str) -> None:
    """Whether the outputs show a training that worked."""
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    text = texts(notebook)
    assert "SUCCEEDED" in text
    found = ACCURACY.search(text)
    assert found is not None and float(found[1]) > 0.95
    pictures = [o for o in outputs(notebook) if "image/png" in o.get("data", {})]
    assert len(pictures) == (name in WITH_PICTURE)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_it_trains(folder: Path, name: str) -> None:
    notebook = nbformat.read(folder / f"{name}.ipynb", as_version=4)
    down = ["%taas down g2.8", "%taas down"] if name == "pragma" else ["%taas down"]
    notebook.cells.append(nbformat.v4.new_code_cell("\n".join(down)))
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, kernel_name="taas", timeout=240, resources=resources).execute()
    check(notebook, name)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_stored_with_its_outputs(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    kernel = {"name": "taas", "display_name": "Python (TaaS)", "language": "python"}
    assert notebook.metadata.kernelspec == kernel
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert str(ROOT) not in texts(notebook)
    check(notebook, name)


@pytest.mark.timeout(300)
def test_the_store_is_rank_0s(folder: Path) -> None:
    notebook = nbformat.read(folder / "store.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("%taas down"))
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, kernel_name="taas", timeout=240, resources=resources).execute()
    check_store(notebook)
    assert not list(folder.glob("*.pt")), "an example clears away what it made"


def test_the_stores_notebook_is_stored_with_its_outputs() -> None:
    notebook = nbformat.read(NOTEBOOKS / "store.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert str(ROOT) not in texts(notebook)
    check_store(notebook)


def check_store(notebook: NotebookNode) -> None:
    """Whether the outputs show one writer, the others kept out, and a run that went on."""
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    text = texts(notebook)
    assert "kept out: weights.pt of ranks 1-3" in text and "held by:" in text
    assert "every rank reads [0.0, 0.0, 0.0]" in text
    assert "restarts 1" in text and "from step 12" in text
