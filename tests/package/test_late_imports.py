"""Tests of `when_imported`, which calls a function after the first import of a module."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from taas_magic.late_imports import when_imported


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Create an importable module in a package; return its full name."""
    (tmp_path / "hooked").mkdir()
    (tmp_path / "hooked" / "__init__.py").write_text("")
    (tmp_path / "hooked" / "inner.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("hooked", "hooked.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "hooked.inner"


def test_it_is_done_after_the_import_and_once(module: str) -> None:
    seen: list[int] = []
    when_imported(module, lambda: seen.append(sys.modules[module].value))
    importlib.import_module("hooked")
    assert seen == []
    found = importlib.import_module(module)
    assert seen == [7]
    assert found.__spec__ is not None and found.__file__ is not None
    importlib.reload(found)
    assert seen == [7]


def test_who_asks_whether_a_module_is_there_does_not_take_the_hook_away(module: str) -> None:
    """transformers calls `find_spec` for accelerate and other modules before it imports them."""
    seen: list[str] = []
    before = list(sys.meta_path)  # earlier tests may have left a finder
    when_imported(module, lambda: seen.append("first"))
    when_imported(module, lambda: seen.append("second"))
    for _ in range(2):
        assert importlib.util.find_spec(module) is not None
    importlib.import_module(module)
    assert sorted(seen) == ["first", "second"]
    assert sys.meta_path == before


def test_it_is_done_at_once_for_what_was_imported_before(module: str) -> None:
    importlib.import_module(module)
    seen: list[str] = []
    when_imported(module, lambda: seen.append("now"))
    assert seen == ["now"]


def test_a_module_that_is_not_there_is_not_there(module: str) -> None:
    when_imported("hooked.missing", lambda: pytest.fail("there is no such module"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hooked.missing")
    importlib.import_module(module)
