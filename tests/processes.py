"""The mark `process` for tests that start processes, and a check that other tests start none.

`make unit` runs the tests without this mark. A test gets the mark if it uses the fixture
`no_leftovers`. It also gets the mark if its code uses a name in `STARTERS`, directly or through
fixtures and helpers in tests/. If only taas_magic's code starts the process, the test's author sets
the mark.
"""

import inspect
import multiprocessing.process
import os
import subprocess
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import pytest

TESTS = os.path.dirname(os.path.abspath(__file__)) + os.sep

STARTERS = frozenset(
    {
        *("subprocess", "Popen", "fork", "spawn", "multiprocessing", "get_context", "Process"),
        *("ensure_running", "KernelManager", "start_new_kernel", "pools", "make_engine"),
    }
)
"""Names that only code which starts processes uses."""


def mark_process_tests(items: list[pytest.Item]) -> None:
    """Add the mark `process` to tests that start processes."""
    for item in items:
        assert isinstance(item, pytest.Function)
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        functions = [item.function, *(fixture.func for each in fixtures for fixture in each)]
        if "no_leftovers" in item.fixturenames or _start_processes(functions):
            item.add_marker("process")


def _start_processes(functions: list[Callable[..., Any]]) -> bool:
    """Return whether functions, or functions in tests/ that they call, use a name in `STARTERS`."""
    ahead, seen = [*functions], set()
    while ahead:
        function = inspect.unwrap(ahead.pop())
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or function.__code__ in seen:
            continue
        if not _is_here(function.__code__.co_filename) or function.__module__ == __name__:
            continue
        seen.add(function.__code__)
        names = set(_names(function.__code__))
        if names & STARTERS:
            return True
        ahead += _functions(function, names)
    return False


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that code uses, including those in its nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _functions(function: types.FunctionType, names: set[str]) -> Iterator[Callable[..., Any]]:
    """Yield the functions, and the methods of classes, that a function's global names refer to.

    Args:
        names: All names in the function's code.
    """
    for value in [function.__globals__.get(name) for name in names]:
        is_module = isinstance(value, types.ModuleType) and _is_here(
            str(getattr(value, "__file__", ""))
        )
        for each in [getattr(value, name, None) for name in names] if is_module else [value]:
            members = vars(each).values() if inspect.isclass(each) else [each]
            yield from filter(callable, members)


def _is_here(file: str) -> bool:
    """Return whether a file is in tests/."""
    return file.startswith(TESTS)


@contextmanager
def no_process_starts() -> Iterator[None]:
    """Make each start of a process in the block raise an AssertionError.

    The end of the block raises the first error again, because the block's code may catch it.
    """
    attempts: list[str] = []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        attempts.append(f"this test starts a process ({args[1:] or 'fork'}): mark it as `process`")
        raise AssertionError(attempts[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", refuse)
        patch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
        patch.setattr(os, "fork", refuse)
        yield
    assert not attempts, attempts[0]
