"""Tests that `pip install .` and `pip install -e .` install the modules and the kernelspec.

Each test uses a new environment, which finds the dependencies in the tests' own environment.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import TypedDict

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("taas_magic", "taas.py", "kernels", "pyproject.toml", "README.md", "LICENSE")


pytest.importorskip("hatchling", reason="builds need hatchling, which `.[test]` installs")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the files that the build reads, so that the build leaves nothing in the repository."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Create an environment that finds the tests' dependencies; return its interpreter."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # A .pth file appends to sys.path, so packages in the environment itself come first.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def install(python: Path, *what: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"]
    subprocess.run([*pip, *offline, *what], check=True)


def said(python: Path, *words: str) -> str:
    """Run the environment's Python in a folder without our code; return what it prints."""
    elsewhere = {"PYTHONPATH", "JUPYTER_PATH"}
    environ = {name: value for name, value in os.environ.items() if name not in elsewhere}
    done = subprocess.run(
        [python, *words], cwd=python.parent, env=environ, stdout=subprocess.PIPE, check=True
    )
    return done.stdout.decode().strip()


class Kernel(TypedDict):
    """A kernel in the output of `jupyter kernelspec list --json`."""

    resource_dir: str
    spec: dict[str, object]


def kernels_of(python: Path) -> dict[str, Kernel]:
    listed = json.loads(said(python, "-m", "jupyter_client.kernelspecapp", "list", "--json"))
    kernels: dict[str, Kernel] = listed["kernelspecs"]
    return kernels


@pytest.mark.parametrize(
    "how",
    [
        pytest.param((), id="wheel"),
        pytest.param(("--editable",), id="editable", marks=pytest.mark.nightly),
    ],
)
def test_an_install_gives_both_modules_and_the_kernel(
    how: tuple[str, ...], checkout: Path, python: Path
) -> None:
    install(python, *how, str(checkout))
    home = checkout if how else python.parent.parent
    for module in ("taas", "taas_magic"):
        path = said(python, "-c", f"import {module}; print({module}.__spec__.origin)")
        assert Path(path).resolve().is_relative_to(home.resolve())
    kernel = kernels_of(python)["taas"]
    assert kernel["spec"]["display_name"] == "Python (TaaS)"
    assert kernel["resource_dir"].startswith(str(python.parent.parent))


def test_the_wheel_has_the_modules_and_the_kernelspec_and_no_other_package(
    checkout: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--no-build-isolation", "-w", tmp_path, checkout], check=True)
    (wheel,) = tmp_path.glob("taas_magic-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {"taas.py", "taas_magic"} == {top for top in tops if not top.startswith("taas_magic-")}
    assert "taas_magic/py.typed" in names
    shared = [name.split("/data/")[1] for name in names if "/data/" in name and ".data/" in name]
    assert "share/jupyter/kernels/taas/kernel.json" in shared
