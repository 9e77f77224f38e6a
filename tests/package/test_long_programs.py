"""Long programs in tests and benchmarks are files, because ruff and mypy do not read strings."""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES = 20
"""Number of lines from which a program must be a file."""


def long_programs(source: str) -> Iterator[int]:
    """Yield the lines of a module where a string with a long Python program begins."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = re.sub("^%.*", "", textwrap.dedent(node.value), flags=re.MULTILINE).strip()
            if text.count("\n") + 1 >= LINES and is_program(text):
                yield node.lineno


def is_program(text: str) -> bool:
    """Return whether a text has the syntax of a Python program."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def test_the_check_sees_a_long_cell() -> None:
    cell = "%%taas --gpus 1\n" + "x = 1\n" * LINES
    assert list(long_programs(f"short = 'x = 1'\ncell = {cell!r}")) == [2]
    assert not list(long_programs(f"text = {'a text of words' * LINES!r}"))


def test_long_programs_are_files() -> None:
    paths = [path for part in ("tests", "benchmarks") for path in (ROOT / part).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in paths
        for line in long_programs(path.read_text())
    ]
    assert not found, "move these to tests/cells or tests/children"
