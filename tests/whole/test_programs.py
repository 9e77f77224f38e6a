"""Tests that the programs in tests/programs have the same results in cells and under torchrun.

A program is a plain Python file that `# %%` lines divide into cells. A cell that begins with `# %%
taas` runs on two ranks, with the flags in that line; other cells run in the notebook. Some programs
also run with each `taas` cell as the body of a function that `taas.run` calls.
"""

import json
import os
import re
import shutil
import sys
import textwrap
import venv
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from tests.eventually import HUNG_S
from tests.frontend import ROOT, Frontend, environment, kernel
from tests.nightly import all_nightly_but
from tests.rig.torchrun import (
    ARGUMENTS,
    BESIDE,
    GUIDE,
    NAMES,
    PROGRAMS,
    SCRIPT,
    recorded,
    results,
    torchrun,
)

SPAWNING = ("process_pools",)
PASTED = ("process_pools", "rpc")
CALLED = ("ddp_checkpoint", "process_pools", "rpc", "stateful_loader", "tensor_parallel")
SIMILAR = {
    "compile": "ddp_checkpoint",
    "hogwild": "process_pools",
    "huggingface_trainer": "huggingface_accelerate",
    "imagenet": "ddp_checkpoint",
    "lightning_digits": "tests/data/test_data_parties.py",
    "loader_workers": "process_pools",
    "sklearn_search": "process_pools",
}
"""Programs that only `make nightly` runs, by name.

The value is a program, or a file of tests, that `make test` runs instead.
"""

NEEDS_TORCH = {"fsdp_dcp": "2.7", "pipeline_parallel": "2.6"}
"""Minimum version of torch for programs that use new features of torch."""

IS_LIVE = "TAAS_TEST_TORCHRUN" in os.environ
"""Whether to run every program by torchrun too, even if its recorded results match."""

HEAD = f"%%taas --gpus 2 --timeout {HUNG_S:.0f}s --env OMP_NUM_THREADS=1"
GUARD = 'if __name__ == "__main__":\n'
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

SCRIPT_CELLS = {
    "import": f"import {SCRIPT.stem}\n{SCRIPT.stem}.main({ARGUMENTS})\n",
    "%run": f"%run {SCRIPT.name} {' '.join(ARGUMENTS)}\n",
    "runpy": f"""
import runpy
import sys

sys.argv = ["{SCRIPT.name}", *{ARGUMENTS}]
runpy.run_path("{SCRIPT.name}", run_name="__main__")
""",
}

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@dataclass(frozen=True)
class Cell:
    """A cell of a program.

    Attributes:
        marker: Text after `# %%`: "", or "taas" and flags.
        source: The cell's text.
    """

    marker: str
    source: str

    @property
    def code(self) -> str:
        """The cell's text in a notebook."""
        if not self.marker:
            return self.source
        return f"{HEAD} {self.marker.removeprefix('taas').strip()}\n{self.source}"

    def unguarded(self) -> "Cell":
        """Return the cell without `if __name__ == "__main__":`, as users write it in notebooks."""
        before, guard, after = self.source.partition(GUARD)
        return Cell(self.marker, before + textwrap.dedent(after)) if guard else self

    def called(self) -> "Cell":
        """Return a cell that runs this cell as a function by `taas.run`, if it runs on ranks."""
        if not self.marker:
            return self
        options = f"gpus=2, timeout={HUNG_S}, env={{'OMP_NUM_THREADS': '1'}}"
        body = textwrap.indent(self.source, "    ")
        call = f"import taas\nrun = taas.run(program, {options})"
        return Cell("", f"def program():\n{body}\n{call}")


def cells_of(name: str) -> list[Cell]:
    text = (PROGRAMS / f"{name}.py").read_text()
    _, *parts = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)
    return [Cell(*map(str.strip, pair)) for pair in zip(parts[::2], parts[1::2], strict=True)]


def check(found: list[str], script: Path, *arguments: str) -> None:
    """Check that cells gave torchrun's results; run torchrun if the record differs from them."""
    assert found
    if IS_LIVE or found != recorded(script, *arguments):
        assert found == torchrun(script, *arguments)


@pytest.mark.parametrize("name", NAMES)
def test_the_record_is_of_the_programs_text(name: str) -> None:
    """If this test fails, run `python -m tests.rig.torchrun`. Other tests would run torchrun."""
    assert recorded(PROGRAMS / f"{name}.py") is not None


@pytest.fixture
def frontend(frontend_of_module: Frontend) -> Frontend:
    """Return the module's kernel with an empty namespace and the scripts in its folder."""
    # With imported modules, each garbage collection takes 0.5 s. `gc.freeze` leaves them out.
    frontend_of_module.run("%reset -f\nimport gc; gc.freeze(); del gc")
    frontend_of_module.run(
        f"import shutil; shutil.copytree({str(BESIDE)!r}, '.', dirs_exist_ok=True)"
    )
    return frontend_of_module


def run_cells(frontend: Frontend, cells: list[Cell]) -> list[str]:
    """Run cells one after another; return the RESULT lines of all cells."""
    texts = []
    for cell in cells:
        request = frontend.send(cell.code)
        reply = frontend.finish(request, HUNG_S + 60)
        text = ANSI.sub("", frontend.text(request))
        assert reply["status"] == "ok", text + ANSI.sub("", "\n".join(reply["traceback"]))
        texts.append(text)
    return results("".join(texts))


@pytest.mark.fault(59)
@pytest.mark.parametrize("name", all_nightly_but({*NAMES} - {*SIMILAR}, NAMES))
def test_a_program_gives_in_cells_what_torchrun_gives(name: str, frontend: Frontend) -> None:
    needs = NEEDS_TORCH.get(name, "0")
    if Version(version("torch")) < Version(needs):
        pytest.skip(f"{name} needs torch {needs}")
    check(run_cells(frontend, cells_of(name)), PROGRAMS / f"{name}.py")


@pytest.mark.parametrize("name", SPAWNING)
def test_a_cell_spawns_processes_without_a_guard(name: str, frontend: Frontend) -> None:
    cells = cells_of(name)
    assert any(GUARD in cell.source for cell in cells)
    unguarded = [cell.unguarded() for cell in cells]
    check(run_cells(frontend, unguarded), PROGRAMS / f"{name}.py")


@pytest.mark.parametrize("name", all_nightly_but({"ddp_checkpoint"}, CALLED))
def test_a_program_gives_in_functions_what_torchrun_gives(name: str, frontend: Frontend) -> None:
    called = [cell.called() for cell in cells_of(name)]
    frontend.run("import pathlib\nfor path in pathlib.Path().glob('*.pt'): path.unlink()")
    check(run_cells(frontend, called), PROGRAMS / f"{name}.py")


@pytest.mark.parametrize("name", all_nightly_but({"process_pools"}, PASTED))
def test_a_program_gives_in_one_cell_what_torchrun_gives(name: str, frontend: Frontend) -> None:
    pasted = Cell("taas", "\n".join(cell.source for cell in cells_of(name)))
    check(run_cells(frontend, [pasted]), PROGRAMS / f"{name}.py")


@pytest.mark.parametrize("way", SCRIPT_CELLS)
def test_a_script_gives_in_a_cell_what_torchrun_gives(way: str, frontend: Frontend) -> None:
    found = run_cells(frontend, [Cell("taas", SCRIPT_CELLS[way])])
    assert len(found) == 2
    check(found, SCRIPT, *ARGUMENTS)


def check_guide(found: list[str]) -> None:
    """Check that the guide's example learned the digits, and that the notebook got its model."""
    *_, last = [line for line in found if "epoch 9 rank 0" in line]
    accuracy = last.split()[-1]
    assert float(accuracy) > 0.8
    assert f"RESULT in the notebook {float(accuracy)}" in found
    assert f"RESULT epoch 9 rank 1 accuracy {accuracy}" in found


def test_the_guides_example(frontend: Frontend) -> None:
    check_guide(run_cells(frontend, cells_of(GUIDE)))
    frontend.run("%taas down g2.8")


@pytest.mark.skipif(
    "TAAS_TEST_PIP_INSTALL" not in os.environ,
    reason="asks the package index; TAAS_TEST_PIP_INSTALL=1 runs it",
)
def test_the_guides_example_after_its_pip_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leftovers: str
) -> None:
    """Use a separate environment, because PyPI's `taas` replaces our module `taas` there."""
    python = copied_environment(tmp_path / "venv")
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONPATH")
    use_python(tmp_path / "jupyter" / "kernels" / "taas" / "kernel.json", python)
    cells = [Cell("", cell.source.replace("# %pip", "%pip")) for cell in cells_of(GUIDE)]
    with kernel(tmp_path / "project") as frontend:
        check_guide(run_cells(frontend, cells))
        frontend.run("%taas down g2.8")
    assert list((tmp_path / "venv").glob("lib/python*/site-packages/taas/taas_data_server.py"))


def copied_environment(folder: Path) -> Path:
    """Create an environment with this checkout, and with the other packages of the tests.

    Returns:
        The path of the environment's interpreter.
    """
    venv.create(folder, with_pip=True)
    [packages] = folder.glob("lib/python*/site-packages")
    [shared] = Path(sys.prefix).glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text(f"{shared}\n")
    shutil.copytree(ROOT / "taas_magic", packages / "taas_magic")
    shutil.copy(ROOT / "taas.py", packages)
    return folder / "bin" / "python"


def use_python(kernelspec: Path, python: Path) -> None:
    """Change the interpreter in a kernelspec."""
    content = json.loads(kernelspec.read_text())
    content["argv"][0] = str(python)
    kernelspec.write_text(json.dumps(content))
