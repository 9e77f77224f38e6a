"""Imports point one way, floor by floor, and the light modules stay light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "taas_magic"

# Top to bottom; a module imports from its own floor and those below it. A folder stands for all
# that is in it. The package's own __init__ is left out: every import of a module runs it.
FLOORS = (
    ("kernel", "__init__", "api"),
    ("farms", "federation"),
    ("notebook",),
    ("display", "pool"),
    ("engines", "setup", "ssh", "registry"),
    ("host",),
    ("plan",),
    ("data", "store"),
    ("capture", "journal"),
    ("config", "messages", "shared_files", "certificate", "leases", "probe", "errors"),
)

LIGHT = ["", ".messages", ".plan", ".config", ".errors", ".journal", ".api", ".host.supervisor"]
LIGHT += [f".notebook.{it}" for it in ("flags", "magic", "launch", "pools", "run")]
"""What a kernel loads before and with its first cell: torch would take it 2 s."""

HEAVY = {"torch", "distributed", "dask", "numpy", "paramiko"}


def modules() -> list[str]:
    """Names of all modules below the package: `plan`, `capture.names`, ... ."""
    files = PACKAGE.rglob("*.py")
    parts = [file.relative_to(PACKAGE).with_suffix("").parts for file in files]
    return sorted(".".join(part) for part in parts if part[-1] != "__init__" or len(part) == 1)


def within(tree: ast.AST, kind: type[ast.AST], having: str = "") -> set[ast.AST]:
    """All nodes in the nodes of a kind."""
    found = [node for node in ast.walk(tree) if isinstance(node, kind)]
    return {i for node in found if having in ast.unparse(node) for i in ast.walk(node)}


def imported_by(module: str, late: bool = True) -> Iterator[str]:
    """Yield the package's modules that a module imports, but for the type checker alone.

    Args:
        module: Its name.
        late: Also what its functions import when they are called.
    """
    tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text())
    left_out = within(tree, ast.If, "if TYPE_CHECKING:")
    if not late:
        left_out |= within(tree, ast.FunctionDef)
    for node in set(ast.walk(tree)) - left_out:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            if name.startswith("taas_magic."):
                yield name.removeprefix("taas_magic.")


def floor(module: str) -> int | None:
    room = module.partition(".")[0]
    return next((number for number, rooms in enumerate(FLOORS) if room in rooms), None)


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_nothing_from_above(module: str) -> None:
    own = floor(module)
    assert own is not None, f"{module} has no floor: give it one in FLOORS"
    above = {name for name in imported_by(module) if (other := floor(name)) and other < own}
    assert not above


def test_no_circle_between_modules() -> None:
    known = set(modules())
    graph = {module: known.intersection(imported_by(module, late=False)) for module in known}
    while graph:
        free = {module for module, needs in graph.items() if not needs & graph.keys() - {module}}
        assert free, f"these import each other: {sorted(graph)}"
        graph = {module: needs for module, needs in graph.items() if module not in free}


def imports_of(statement: str) -> set[str]:
    """Top-level names of what a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_neither_torch_nor_dask(module: str) -> None:
    assert not imports_of(f"import taas_magic{module}") & HEAVY


@pytest.mark.parametrize("name", ["taas_magic", "taas"])
def test_the_package_itself_does_not_import_ipython(name: str) -> None:
    assert "IPython" not in imports_of(f"import {name}")


@pytest.mark.parametrize("name", ["data.protocol", "data.memory", "data.sharding", "capture.names"])
def test_the_data_formats_need_no_torch(name: str) -> None:
    assert "torch" not in imports_of(f"import taas_magic.{name}")
