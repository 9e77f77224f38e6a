"""Tests that find code which fails in Python 3.10, also if they run in a newer Python."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "taas_magic"


def fields_with_a_name_in_quotes(source: str) -> Iterator[int]:
    """Yield the lines of class fields with a quoted name inside an annotation: `list["Name"]`.

    `typing.get_type_hints` of 3.10 leaves the quoted name a string, and msgspec refuses the struct.
    An annotation that is quoted as a whole, such as `"list[Name]"`, works in all versions.
    """
    for node in ast.walk(ast.parse(source)):
        fields = node.body if isinstance(node, ast.ClassDef) else []
        for field in fields:
            if isinstance(field, ast.AnnAssign) and isinstance(field.annotation, ast.Subscript):
                parts = ast.walk(field.annotation.slice)
                if any(isinstance(p, ast.Constant) and isinstance(p.value, str) for p in parts):
                    yield field.lineno


def test_the_check_sees_a_name_in_quotes() -> None:
    assert list(fields_with_a_name_in_quotes('class A:\n    children: list["A"] = []')) == [2]
    assert not list(fields_with_a_name_in_quotes('class A:\n    children: "list[A]" = []'))


def test_structs_are_read_by_python_310() -> None:
    sources = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    structs = {path: text for path, text in sources.items() if "Struct" in text}
    assert structs
    found = {str(path): list(fields_with_a_name_in_quotes(text)) for path, text in structs.items()}
    assert not {path: lines for path, lines in found.items() if lines}
