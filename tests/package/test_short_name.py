"""Tests that `import taas` imports this package, even after `%pip install taas` from PyPI."""

import json
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from taas_magic.notebook.magic import INSTALLS_TAAS, TAAS_IS_HERE
from tests.frontend import ROOT, Frontend, environment, kernel

pytest.importorskip("hatchling", reason="builds need hatchling, which `.[test]` installs")

OFFLINE = ("--no-deps", "--no-build-isolation", "--no-index")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """Build a wheel with the name and version of PyPI's taas 0.9.2; its import fails."""
    path = tmp_path / "taas-0.9.2-py3-none-any.whl"
    files = {
        "taas/__init__.py": "raise ImportError('this is the other taas')",
        "taas/config.py": "",
        "taas-0.9.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: taas\nVersion: 0.9.2\n",
        "taas-0.9.2.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        record = "".join(f"{name},,\n" for name in files)
        archive.writestr("taas-0.9.2.dist-info/RECORD", record + "taas-0.9.2.dist-info/RECORD,,\n")
    return path


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install taas-magic into a new environment, as a user would; return its interpreter.

    pip and the dependencies come from the tests' own environment. The last test that uses this
    environment uninstalls taas-magic.
    """
    folder = tmp_path_factory.mktemp("python") / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # A .pth file appends to sys.path, so packages in the environment itself come first.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    subprocess.run([*pip, *OFFLINE, "--ignore-installed", ROOT], check=True)
    return python


@pytest.fixture
def front(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Frontend]:
    """Yield a kernel "Python (TaaS)" of that environment."""
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONPATH")
    spec = tmp_path / "jupyter" / "kernels" / "taas" / "kernel.json"
    told = json.loads(spec.read_text())
    told["argv"][0] = str(python)
    spec.write_text(json.dumps(told))
    with kernel(tmp_path / "project") as front:
        # else `%pip install` would install into the tests' own environment
        front.run(f"import sys\nassert sys.executable == {str(python)!r}, sys.executable")
        yield front


def test_a_separate_program_can_import_taas(python: Path) -> None:
    code = "import taas, taas_magic.api as api; print(taas is api)"
    done = subprocess.run(
        [python, "-E", "-c", code], cwd=python.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


@pytest.mark.nightly
def test_pip_install_taas_changes_nothing(front: Frontend, wheel: Path) -> None:
    said = front.text(front.run(f"%pip install {' '.join(OFFLINE)} {wheel}"))
    assert said.count(TAAS_IS_HERE) == 1
    other = "import importlib.machinery as m\nprint(m.PathFinder.find_spec('taas').origin)"
    assert front.text(front.run(other)).endswith("site-packages/taas/__init__.py\n")
    front.run("import taas\nassert taas.runs() == [] and taas.device_type == 'cpu'")
    front.run(
        "import torch\nclass Data:\n    def __len__(self): return 4\n"
        "    def __getitem__(self, i):\n"
        "        import taas\n        return torch.tensor([taas.is_registered(i), i])\n"
        "loader = taas.register(torch.utils.data.DataLoader(Data()))"
    )
    cell = "%%taas --gpus 2 --cpus 1 --out seen\nimport taas\nprint(taas.register.__module__)\n"
    request = front.run(cell + "seen = [batch.tolist() for batch in loader]")
    assert "taas_magic.registry" in front.text(request)
    front.run("assert seen == [[[0, 0]], [[0, 2]]], seen")


def test_neither_package_owns_a_file_of_the_other(python: Path, wheel: Path) -> None:
    def pip(*words: str | Path) -> None:
        subprocess.run([sys.executable, "-m", "pip", "-q", "--python", python, *words], check=True)

    site = Path(sysconfig.get_path("purelib", vars={"base": str(python.parent.parent)}))
    pip("install", *OFFLINE, wheel)
    pip("uninstall", "-y", "taas")
    assert (site / "taas.py").read_text() == (ROOT / "taas.py").read_text()
    pip("install", *OFFLINE, wheel)
    pip("uninstall", "-y", "taas-magic")
    assert (site / "taas" / "__init__.py").exists() and not (site / "taas.py").exists()


@pytest.mark.parametrize(
    "cell",
    [
        "%pip install taas",
        "!pip install taas",
        "pip install taas",
        "import os\n  !{sys.executable} -m pip install -U taas",
        "%pip install -q 'taas==0.9.2' numpy  # the client",
        "%pip3 install torch taas>=0.9",
        "!uv pip install taas[all]",
        "%pip install ./wheels/taas-0.9.2-py3-none-any.whl",
        "%%bash\npip install taas",
    ],
)
def test_a_cell_that_installs_the_other_taas_is_recognized(cell: str) -> None:
    assert INSTALLS_TAAS.search(cell)


@pytest.mark.parametrize(
    "cell",
    [
        "%pip install taas-magic",
        "%pip install 'taas_magic[test]'",
        "%pip uninstall taas",
        "%pip show taas",
        "# %pip install taas",
        "%pip install numpy  # not taas",
        "import taas",
        "%pip install betaas",
        # hours, if the pattern's parts could share the line breaks or spaces in many ways
        "\n" * 20_000 + "import taas",
        " " * 500_000 + "x",
    ],
    ids=range(10),
)
def test_a_cell_that_does_not_install_the_other_taas_is_not_recognized(cell: str) -> None:
    assert not INSTALLS_TAAS.search(cell)
