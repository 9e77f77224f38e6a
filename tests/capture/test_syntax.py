"""Tests of `syntax.parse`, which parses a cell."""

import ast
from typing import Any

import pytest

from taas_magic.capture import syntax


@pytest.mark.parametrize(("n_errors", "is_parsed"), [(1, True), (100, False)])
def test_a_parse_that_another_thread_has_disturbed_is_repeated(
    monkeypatch: pytest.MonkeyPatch, n_errors: int, is_parsed: bool
) -> None:
    """CPython 3.11 raises this error if threads parse at the same time. The test raises it itself.

    With real threads, the error is too rare for a test.
    """
    parse, left = ast.parse, [n_errors]

    def disturbed(*args: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise SystemError("AST constructor recursion depth mismatch (before=162, after=60)")
        return parse(*args)

    monkeypatch.setattr(ast, "parse", disturbed)
    if is_parsed:
        assert ast.dump(syntax.parse("x = 1")) == ast.dump(parse("x = 1"))
    else:
        with pytest.raises(SystemError):
            syntax.parse("x = 1")
