"""Tests of imports: no module imports from a higher floor, and light modules import no torch.

The floors are the rows of the table of folders in ARCHITECTURE.md (`FLOORS`).
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "taas_magic"

# The floors, from top to bottom. A module may import from its own floor and from lower floors. The
# name of a folder means all modules in the folder. The test does not check who imports
# `taas_magic/__init__.py`, because every import of a module of the package runs this file.
FLOORS = (
    ("kernel", "__init__", "__main__", "api"),
    ("farms", "federation"),
    ("notebook",),
    ("display", "pool"),
    ("engines", "setup", "ssh", "registry"),
    ("host",),
    ("plan",),
    ("data", "store"),
    ("capture", "journal"),
    (
        "config",
        "messages",
        "shared_files",
        "certificate",
        "leases",
        "probe",
        "errors",
        "late_imports",
    ),
)

IMPORTED_BY_TEXT_FROM_ABOVE = {
    # `claim_taas` binds the name `taas` to the public API in the processes that run user code. Only
    # that code uses it.
    ("capture.modules", "api"),
    # The forkserver preloads the public API, so that `import taas` in a rank costs nothing.
    ("host.forkserver", "api"),
}
"""Pairs of modules. The first may import the second, by its name in a string, from above."""

LIGHT = ["", ".messages", ".plan", ".config", ".errors", ".journal", ".api", ".host.supervisor"]
LIGHT += [f".notebook.{it}" for it in ("flags", "magic", "launch", "pools", "run", "functions")]
LIGHT += [".notebook.report", ".display.variables", ".host.variables"]
"""Modules that a kernel loads for its first cell. They must not import torch, which takes 2 s."""

HEAVY = {"torch", "distributed", "dask", "numpy", "paramiko"}


def modules() -> list[str]:
    """Return the names of all modules in the package, such as `plan` and `messages.__init__`."""
    files = PACKAGE.rglob("*.py")
    return sorted(".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in files)


def type_checker_only(tree: ast.AST) -> set[ast.AST]:
    """Return all nodes below `if TYPE_CHECKING:`."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    return {
        inner
        for node in found
        if "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }


def tree_of(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text())


def imported_by(module: str) -> Iterator[str]:
    """Yield the package's modules that a module imports, including imports inside functions.

    Imports below `if TYPE_CHECKING:` do not count.
    """
    tree = tree_of(module)
    for node in set(ast.walk(tree)) - type_checker_only(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{module} has a relative import"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == "taas":  # another name of `taas_magic.api`
                yield "api"
            elif top == "taas_magic" and rest:
                yield rest


def imported_by_text(module: str) -> Iterator[str]:
    """Yield the package's modules that a module imports by `import_module` or `import_in_thread`.

    The names are strings in the call, or in a module-level constant if the call is in a loop.
    """
    yield from imported_by_text_in(tree_of(module))


def imported_by_text_in(tree: ast.Module) -> Iterator[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = ("import_module", "import_in_thread")
    calls = [node for node in calls if ast.unparse(node.func).endswith(names)]
    kinds = ast.Assign | ast.AnnAssign
    constants = [node for node in tree.body if calls and isinstance(node, kinds)]
    for node in [*calls, *constants]:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                _, ours, name = inner.value.partition("taas_magic.")
                if ours and all(map(str.isidentifier, name.split("."))):
                    yield name


def floor(module: str) -> int | None:
    room = module.partition(".")[0]
    return next((number for number, rooms in enumerate(FLOORS) if room in rooms), None)


def above(module: str, names: Iterable[str]) -> set[str]:
    """Return the modules in `names` that are on a higher floor than `module`."""
    own = floor(module)
    assert own is not None, f"{module} has no floor: give it one in FLOORS"
    return {name for name in names if (other := floor(name)) is not None and other < own}


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_nothing_from_above(module: str) -> None:
    assert not above(module, imported_by(module))


def test_a_module_imports_nothing_from_above_by_text() -> None:
    found = {
        (module, name) for module in modules() for name in above(module, imported_by_text(module))
    }
    assert found == IMPORTED_BY_TEXT_FROM_ABOVE


@pytest.mark.parametrize("constant", ["NAMES =", "NAMES: tuple[str, ...] ="])
def test_a_constant_with_the_name_of_a_module_counts(constant: str) -> None:
    source = f"{constant} ('taas_magic.api',)\nfor name in NAMES: importlib.import_module(name)"
    assert [*imported_by_text_in(ast.parse(source))] == ["api"]


def test_the_top_floor_counts() -> None:
    assert above("host.rank", ["api", "kernel", "host.watch", "errors"]) == {"api", "kernel"}


def test_imports_form_no_cycle() -> None:
    # The name of a folder stands for its `__init__`.
    files = {module.removesuffix(".__init__"): module for module in modules()}
    graph = {name: files.keys() & imported_by(module) for name, module in files.items()}
    while graph:
        free = {module for module, needs in graph.items() if not needs & graph.keys() - {module}}
        assert free, f"these import each other: {sorted(graph)}"
        graph = {module: needs for module, needs in graph.items() if module not in free}


def imports_of(statement: str) -> set[str]:
    """Return the top-level names of the modules that a fresh interpreter loads for a statement."""
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
