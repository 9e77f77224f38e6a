"""What compiled code may read from the notebook: its global names, imports and attributes.

The compiler has already resolved every scope (comprehensions, class bodies, `match`, f-strings),
so its instructions answer what a walk over the syntax tree would have to work out again.
"""

import ast
import dis
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from inspect import CO_OPTIMIZED
from types import CodeType

_READS = {
    "LOAD_NAME",
    "LOAD_GLOBAL",
    "DELETE_NAME",
    "DELETE_GLOBAL",
    "LOAD_FROM_DICT_OR_GLOBALS",
}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_CODE_MAGICS = {"time", "timeit", "prun", "capture", "memit", "mprun", "lprun", "debug"}
_DOLLAR = re.compile(r"(?<!\$)\$([A-Za-z_]\w*)")


@dataclass(frozen=True)
class CodeUse:
    """What one code object and the code nested in it use.

    Attributes:
        now: Global names read when the code itself runs.
        later: Global names read only when a function that it defines is called.
        imports: Modules it imports; `from x import y` gives both `x` and `x.y`.
        attributes: Attribute names it looks up on anything.
    """

    now: frozenset[str]
    later: frozenset[str]
    imports: frozenset[str]
    attributes: frozenset[str]

    @property
    def names(self) -> frozenset[str]:
        return self.now | self.later


@lru_cache(maxsize=1024)
def code_use(code: CodeType) -> CodeUse:
    """Reads `code` without running it."""
    now: set[str] = set()
    later: set[str] = set()
    imports: set[str] = set()
    attributes: set[str] = set()
    stored: set[str] = set()
    is_class_body = not code.co_flags & CO_OPTIMIZED and code.co_name != "<module>"
    before: object = None
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        value = instruction.argval
        if name in _READS:
            if not (is_class_body and value in stored):
                now.add(value)
        elif name == "STORE_NAME":
            stored.add(value)
        elif name in _ATTRIBUTES:
            attributes.add(value)
        elif name == "IMPORT_NAME":
            imports.update(_imported(value, before))
        before = value
    for nested in nested_codes(code):
        use = code_use(nested)
        later |= use.later
        runs_at_once = not nested.co_flags & CO_OPTIMIZED or nested.co_name.startswith("<")
        (now if runs_at_once else later).update(use.now)
        imports |= use.imports
        attributes |= use.attributes
    if "get_ipython" in code.co_names:
        now |= _shell_names([c for c in code.co_consts if isinstance(c, str)])
    return CodeUse(frozenset(now), frozenset(later), frozenset(imports), frozenset(attributes))


def nested_codes(code: CodeType) -> Iterator[CodeType]:
    """The functions, classes, lambdas and comprehensions written directly inside `code`."""
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


def _imported(module: str, from_names: object) -> Iterator[str]:
    yield module
    if isinstance(from_names, tuple):
        yield from (f"{module}.{name}" for name in from_names if name != "*")


def _shell_names(texts: list[str]) -> set[str]:
    """Names that IPython reads from the strings of `!command {x} $y` and `%time f(x)`."""
    runs_code = not _CODE_MAGICS.isdisjoint(texts)
    found: set[str] = set()
    for text in texts:
        found.update(_DOLLAR.findall(text))
        for expression in _braced(text):
            found |= _expression_names(expression)
        if runs_code and text not in _CODE_MAGICS:
            found |= _expression_names(re.sub(r"^(\s*-\w+(\s*\d+)?)+\s", "", text))
    return found


def _braced(text: str) -> list[str]:
    try:
        return [field for _, field, _, _ in string.Formatter().parse(text) if field]
    except ValueError:  # IPython leaves a string with unbalanced braces as it is
        return []


def _expression_names(source: str) -> set[str]:
    try:
        tree = ast.parse(source.strip())
    except (SyntaxError, ValueError):
        return set()
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
