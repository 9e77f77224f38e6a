"""The comment form (`#!POOL`, `#pragma taas`): which cells have it, and the magics they become."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager

from taas_magic.notebook.flags import (
    empty_cell_message,
    misplaced_pragma_warnings,
    transform_pragma,
)


def changed(cell: str) -> str:
    return "".join(transform_pragma(cell.splitlines(keepends=True)))


@pytest.mark.parametrize(
    ("cell", "head"),
    [
        ("#!g2.8\n#pragma taas --gpus 8\nx = 1\n", "%%taas --pool g2.8 --gpus 8\n"),
        ("#pragma taas --gpus 8\nx = 1\n", "%%taas --gpus 8\n"),
        ("# pragma taas --gpus 8\nx = 1\n", "%%taas --gpus 8\n"),
        ("#!g2.8\nx = 1\n", "%%taas --pool g2.8\n"),
        ("#! my-pool\nx = 1\n", "%%taas --pool my-pool\n"),
        ("\n\n#!g2.8\n\n#pragma taas --gpus 8\nx = 1\n", "%%taas --pool g2.8 --gpus 8\n"),
        ("# Trains it.\n#!g2.8\n#pragma taas --gpus 8\nx = 1\n", "%%taas --pool g2.8 --gpus 8\n"),
        ("#pragma taas --gpus 8\n#pragma taas --units 5\nx = 1\n", "%%taas --gpus 8 --units 5\n"),
        (
            "#pragma taas --gpus 8 # all\n#pragma taas --cpus 1\nx = 1\n",
            "%%taas --gpus 8 --cpus 1\n",
        ),
        ("#pragma taas --gpus 8\n#!g2.8\nx = 1\n", "%%taas --pool g2.8 --gpus 8\n"),
    ],
)
def test_a_pragma_becomes_a_cell_magic(cell: str, head: str) -> None:
    assert changed(cell) == head + "x = 1\n"


@pytest.mark.parametrize(
    "cell",
    [
        "x = 1\n",
        "",
        "#!/usr/bin/env python\nx = 1\n",
        "#!python3\nx = 1\n",
        "#!bash\nx = 1\n",
        "# to do\n#!important\nx = 1\n",
        "x = 1\n#!g2.8\n#pragma taas --gpus 8\n",
        "#pragma once\nx = 1\n",
        "#pragma taaset --gpus 2\nx = 1\n",
        "#!two words\nx = 1\n",
        "%%taas --gpus 2\nx = 1\n",
    ],
)
def test_other_cells_stay_as_they_are(cell: str) -> None:
    assert changed(cell) == cell


def test_a_pragma_without_code_below_it_still_becomes_a_magic() -> None:
    assert changed("#!g2.8") == "%%taas --pool g2.8\n\n"


def test_the_cell_is_plain_python() -> None:
    ast.parse("#!g2.8\n#pragma taas --gpus 8\nx = 1\n")


@given(st.text(alphabet="#! pragmtsg2.8-\nx=1", max_size=80))
def test_lines_below_a_pragma_stay_unchanged(cell: str) -> None:
    lines = cell.splitlines(keepends=True)
    new = transform_pragma(list(lines))
    if new != lines:
        assert new[0].startswith("%%taas ")
        assert new[1:] == ["\n"] or lines[-len(new[1:]) :] == new[1:]


def test_checking_whether_a_cell_is_complete_neither_warns_nor_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    manager = TransformerManager()
    manager.cleanup_transforms.insert(0, transform_pragma)
    assert manager.check_complete("#!nowhere\n#pragma taas --gpus NaN\nfor i in x:")[0] != "invalid"
    assert manager.check_complete("#!g2.8\n#pragma taas --gpus 2\nx = 1\n\n")[0] == "complete"
    assert capsys.readouterr() == ("", "")


def test_a_pool_comment_without_code_below_it_is_explained() -> None:
    assert '"#!g2.8" applies only to its own cell' in empty_cell_message("#!g2.8\n\n")
    assert "#!" not in empty_cell_message("%%taas --pool g2.8 --gpus 2\n")


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("x = 1\n#pragma taas --gpus 8\ny = 2", "in line 2 is below code"),
        ("x = 1\n  # pragma taas --gpus 8", "runs in the notebook itself"),
        ("#!g2.8\nx = 1\n#pragma taas --gpus 8", "in line 3 is below code"),
        ("#!g2.8\nx = 1\n#pragma taas --gpus 8", "uses only its first lines"),
        ("!ls\n#pragma taas --gpus 8", "in line 2"),
    ],
)
def test_a_pragma_below_code_is_explained(cell: str, said: str) -> None:
    [line] = misplaced_pragma_warnings(cell)
    assert said in line


@pytest.mark.parametrize(
    "cell",
    [
        "#!g2.8\n#pragma taas --gpus 8\nx = 1",
        "%%writefile train.py\nx = 1\n#pragma taas --gpus 8",
        "text = '''\n#pragma taas --gpus 8\n'''",
        "x = 1  #pragma taas is for cells",
        "x = 1\n#pragma once",
    ],
)
def test_no_warning_about_pragmas_for_other_cells(cell: str) -> None:
    assert not list(misplaced_pragma_warnings(cell))
