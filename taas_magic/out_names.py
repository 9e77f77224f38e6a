"""The names of `--out`: read, and checked against the cell before anything starts. Pure.

A name may say whose value comes: `losses` is rank 0's, `losses@3` rank 3's, `losses@last` that of
the rank with the highest number.
"""

import ast
import difflib
import dis
import keyword
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

LAST = -1
"""Stands for the last rank, however many there are."""

_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_SETS_ANY_NAME = {"exec", "globals", "locals", "push", "user_ns"}
_SETS_ANY_NAME |= {"run_cell_magic", "run_line_magic"}
_LISTED = 12


def split(text: str) -> tuple[str, int]:
    """The name, and the rank whose value it is.

    Raises:
        ValueError: It is not a variable's name, or what follows `@` is no rank.
    """
    name, at, rank = text.partition("@")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(text)
    if at and rank != "last" and not (rank.isascii() and rank.isdigit()):
        raise ValueError(text)
    return name, LAST if rank == "last" else int(rank or 0)


def name_of(text: str) -> str:
    """What the value is called, in the rank and in the notebook."""
    return split(text)[0]


def is_from(text: str, rank: int, world_size: int) -> bool:
    """Whether this rank sends the value."""
    wanted = split(text)[1]
    return rank == (world_size - 1 if wanted == LAST else wanted)


def unknown(
    out: Sequence[str], source: str, captured: Collection[str], namespace: Mapping[str, Any]
) -> str | None:
    """What is wrong with the names of `--out`; None if each may be there when the cell ends.

    Args:
        out: As given.
        source: The cell as Python.
        captured: Names of the notebook that travel to the ranks.
        namespace: The notebook's; its functions may set names, too.
    """
    names = [name_of(text) for text in out]
    code = compile(source, "<cell>", "exec", _FLAGS, dont_inherit=True)
    if not names or _may_set_any(source, code):
        return None
    has = {*_stored(code, "STORE_NAME", "STORE_GLOBAL"), *captured}
    missing = [name for name in names if name not in has]
    missing = [name for name in missing if name not in _set_by_functions(namespace)]
    return _refusal(missing[0], has, missing[0] in namespace) if missing else None


def _refusal(name: str, has: Collection[str], is_in_notebook: bool) -> str:
    near = difflib.get_close_matches(name, has, n=3, cutoff=0.6)
    shown = sorted(near or (each for each in has if not each.startswith("_")))
    more = f" and {len(shown) - _LISTED} more" if len(shown) > _LISTED else ""
    possible = (
        f"did you mean {' or '.join(near)}?"
        if near
        else "it has: " + (", ".join(shown[:_LISTED]) + more if shown else "none")
    )
    why = (
        "the cell neither sets nor uses it, so no rank has it"
        if is_in_notebook
        else ("the cell sets no such variable")
    )
    return f"--out {name}: {why}; {possible}"


def _may_set_any(source: str, code: CodeType) -> bool:
    """Whether only running the cell tells which names it sets: exec, a magic, a star import."""
    stars = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom))
    is_star = any(alias.name == "*" for node in stars for alias in node.names)
    return is_star or not _SETS_ANY_NAME.isdisjoint(_looked_up(code))


def _looked_up(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in _nested(code):
        yield from _looked_up(inner)


def _stored(code: CodeType, *operations: str) -> Iterator[str]:
    """Global names that code sets by these operations, and functions in it by `global`."""
    for step in dis.get_instructions(code):
        if step.opname in operations:
            yield step.argval
    for inner in _nested(code):
        yield from _stored(inner, "STORE_GLOBAL")


def _nested(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _set_by_functions(namespace: Mapping[str, Any]) -> set[str]:
    """Names that functions and methods of the notebook set by `global`."""
    classes = [vars(value) for value in namespace.values() if isinstance(value, type)]
    found = [value for names in (namespace, *classes) for value in list(names.values())]
    functions = (value for value in found if isinstance(value, FunctionType))
    return {name for each in functions for name in _stored(each.__code__, "STORE_GLOBAL")}
