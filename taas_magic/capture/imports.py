"""Which installed modules a cell surely needs, so that a host without one is found out. Pure.

What a branch or a `try` imports may be done without, so it is not asked of a host: a cell that
falls back when a module is missing must not be refused for it.
"""

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence

_OURS = {"taas_magic", "taas", "cloudpickle", "__main__", "__mp_main__"}
_BRANCHES = (ast.If, ast.While, ast.Match)


def needed_modules(
    cell: str, referred: Iterable[str], travelling: Sequence[tuple[str, str]], texts: Iterable[str]
) -> tuple[str, ...]:
    """The top-level modules that must be installed wherever a cell runs.

    Args:
        cell: The cell as Python.
        referred: Modules that what travels refers to or imports.
        travelling: (name, source) of the project's own modules that travel.
        texts: Sources of the notebook's cells that defined what travels, as far as they are Python.
    """
    sure = set(imported(cell))
    optional = set[str]()
    for text in (cell, *texts):
        optional |= set(imported(text, branches=True)) - set(imported(text))
    for _, source in travelling:
        sure |= set(imported(source, functions=False))
    loaded = {name.partition(".")[0] for name in referred} - optional
    sure |= {name for name in loaded if _is_installed(name)}
    own = {name.partition(".")[0] for name, _ in travelling} | _OURS
    return tuple(sorted(sure - own - sys.stdlib_module_names))


def imported(source: str, functions: bool = True, branches: bool = False) -> Iterator[str]:
    """The top-level modules that a source imports.

    Args:
        source: Python; from what is none, nothing is read.
        functions: Also what functions import when they are called.
        branches: Also what only a branch, or a `try` that knows what to do instead, imports.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    yield from _in(tree.body, functions, branches)


def _in(statements: Iterable[ast.stmt], functions: bool, branches: bool) -> Iterator[str]:
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
        elif _is_entered(node, functions, branches):
            yield from _in(_inside(node), functions, branches)


def _is_entered(node: ast.stmt, functions: bool, branches: bool) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return functions
    may_be_left_out = isinstance(node, _BRANCHES) or bool(getattr(node, "handlers", None))
    return branches or not may_be_left_out


def _inside(node: ast.stmt) -> Iterator[ast.stmt]:
    """The statements directly within a statement, in any of its blocks."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from child.body


def _is_installed(name: str) -> bool:
    """Whether a loaded module can be found by others, too: some are made at run time."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
