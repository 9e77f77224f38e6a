"""Tests of how capture finds the installed modules that a cell needs, and the optional ones."""

import ast
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from taas_magic.capture import payload
from taas_magic.capture.modules import ModuleSource, find_imports, needed_modules
from taas_magic.capture.work import CellWork

GUARDED = """
import os, aa.b as x
from bb.c import d
from . import relative
try:
    import maybe
except ImportError:
    import instead
if x:
    import branch
try:
    import sure
finally:
    pass
with x:
    import inside
def f():
    import lazy
class C:
    import body
"""


def test_only_unconditional_imports_are_required() -> None:
    assert set(find_imports(GUARDED)) == {"os", "aa", "bb", "sure", "inside", "lazy", "body"}
    assert "lazy" not in set(find_imports(GUARDED, functions=False))
    everything = {"maybe", "instead", "branch"}
    assert set(find_imports(GUARDED, branches=True)) - set(find_imports(GUARDED)) == everything
    assert list(find_imports("%%bash\nnot python (")) == []


def test_the_standard_library_and_the_project_are_not_required() -> None:
    cell = "import os, taas, helper, psutil\nimport no_such_module.x"
    source = "import yaml\ndef f():\n    import matplotlib\n"
    sent = {"helper": ModuleSource("helper", "helper.py", source, is_package=False)}
    assert needed_modules(cell, [], sent, []) == ("no_such_module", "psutil", "yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("try:\n    import psutil\nexcept ImportError:\n    psutil = None\n", ()),
        ("import psutil\n", ("psutil",)),
        ("not python (", ("psutil",)),
    ],
)
def test_an_optional_module_is_not_required(text: str, expected: tuple[str, ...]) -> None:
    assert needed_modules("f()", ["psutil"], {}, [text]) == expected


def test_a_module_created_at_run_time_is_not_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "made_up", types.ModuleType("made_up"))
    assert needed_modules("f()", ["made_up.x", "psutil"], {}, []) == ("psutil",)


def test_a_payload_lists_the_modules_that_it_requires(tmp_path: Path) -> None:
    namespace: dict[str, object] = {}
    exec("import yaml\ndef f():\n    import psutil\n    return yaml", namespace)
    cell = CellWork("import click\nf()", "import click\nf()", "<cell>")
    made = payload.capture(
        cell,
        namespace,
        project=tmp_path,
        limit_bytes=1 << 20,
        source_of=lambda name: None,
    )
    assert made.requires == ("click", "psutil", "yaml")


def test_one_thread_parses_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    second, parsing, most = threading.Event(), list[int](), list[int]()
    parse = ast.parse

    def watched(*args: Any) -> ast.Module:
        parsing.append(0)
        most.append(len(parsing))
        if len(parsing) > 1:
            second.set()
        second.wait(0.2)  # gives another thread the time to enter this function
        tree: ast.Module = parse(*args)
        parsing.pop()
        return tree

    monkeypatch.setattr(ast, "parse", watched)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(find_imports, ["import a", "import b"]))
    assert most == [1, 1]
