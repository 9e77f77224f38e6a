"""Tests of the table of `%taas vars`: whether ranks agree, and in what they differ."""

import pytest

from taas_magic.display.variables import agreement
from taas_magic.host.variables import Variable

ONE = Variable("Tensor", "(1,)", "float32", digest="a")
TWO = Variable("Tensor", "(2,)", "float32", digest="b")
HALF = Variable("Tensor", "(2,)", "float16", digest="c")
OTHER = Variable("Tensor", "(1,)", "float32", digest="d")
LARGE = Variable("Tensor", "(1,)", "float32")
NUMBER = Variable("int", digest="e")
FURTHER = Variable("int", digest="f")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([ONE, ONE, ONE], "equal"),
        ([LARGE, ONE, ONE], "equal shapes"),
        ([ONE, TWO, ONE], "rank 1 differs: shape (2,)"),
        ([ONE, ONE, HALF], "rank 2 differs: shape (2,), dtype float16"),
        ([TWO, HALF], "dtypes differ: float32, float16"),
        ([ONE, HALF], "shapes differ: (1,), (2,); dtypes differ: float32, float16"),
        ([ONE, ONE, NUMBER], "rank 2 differs: type int"),
        ([ONE, NUMBER], "types differ: Tensor, int"),
        ([ONE, ONE, OTHER], "equal shapes, rank 2 differs: value"),
        ([ONE, OTHER], "equal shapes, values differ"),
        ([NUMBER, FURTHER, NUMBER, NUMBER], "rank 1 differs: value"),
        ([*[NUMBER] * 3, FURTHER, FURTHER], "ranks 3, 4 differ: value"),
        ([NUMBER, FURTHER], "values differ"),
    ],
)
def test_the_table_says_in_what_ranks_differ(values: list[Variable], text: str) -> None:
    assert agreement(dict(enumerate(values)), len(values)) == text


def test_the_table_says_which_ranks_have_a_variable() -> None:
    assert agreement({1: ONE}, 3) == "only on rank 1"
