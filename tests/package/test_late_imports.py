"""Tests of functions about modules that other code imports."""

import importlib
import importlib.util
import sys
import threading
from pathlib import Path

import pytest

from taas_magic.late_imports import module_if_imported, when_imported


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


def test_the_function_is_called_once_after_the_import(module: str) -> None:
    seen: list[int] = []
    when_imported(module, lambda: seen.append(sys.modules[module].value))
    importlib.import_module("hooked")
    assert seen == []
    found = importlib.import_module(module)
    assert seen == [7]
    assert found.__spec__ is not None and found.__file__ is not None
    importlib.reload(found)
    assert seen == [7]


def test_find_spec_does_not_remove_the_hook(module: str) -> None:
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


def test_the_function_is_called_at_once_if_the_module_is_imported_already(module: str) -> None:
    importlib.import_module(module)
    seen: list[str] = []
    when_imported(module, lambda: seen.append("now"))
    assert seen == ["now"]


def test_the_hook_leaves_a_missing_module_missing(module: str) -> None:
    when_imported("hooked.missing", lambda: pytest.fail("there is no such module"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hooked.missing")
    importlib.import_module(module)


def test_an_imported_module_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module is in `sys.modules` while another thread still imports it."""
    code = "import threading\nbegun = threading.Event()\nwait = threading.Event()\n"
    (tmp_path / "with_events.py").write_text(code)
    (tmp_path / "slow_module.py").write_text(
        "import with_events\nwith_events.begun.set()\nwith_events.wait.wait(60)\nvalue = 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    events = importlib.import_module("with_events")
    assert module_if_imported("slow_module") is None
    importing = threading.Thread(target=importlib.import_module, args=["slow_module"])
    importing.start()
    assert events.begun.wait(60)
    threading.Timer(0.2, events.wait.set).start()
    assert module_if_imported("slow_module").value == 7
    importing.join()
    del sys.modules["slow_module"], sys.modules["with_events"]
