"""Decides which tests start processes, and keeps the other tests from doing so.

`make unit` runs the tests without the mark `process`. A test gets this mark if its code, the code
of its fixtures, or a function of the tests that these call, names something that starts processes
(`STARTERS`), or if it uses the fixture `no_leftovers`. Where a function of the package starts a
process, the test's author sets the mark.
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
        *("ensure_running", "KernelManager", "start_new_kernel", "pools", "find_engine"),
    }
)
"""Names whose use in a test means that the test starts processes."""


def mark_process_tests(items: list[pytest.Item]) -> None:
    """Give the mark `process` to the tests that start processes."""
    for item in items:
        assert isinstance(item, pytest.Function)
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        functions = [item.function, *(fixture.func for each in fixtures for fixture in each)]
        if "no_leftovers" in item.fixturenames or _start_processes(functions):
            item.add_marker("process")


def _start_processes(functions: list[Callable[..., Any]]) -> bool:
    """Return whether functions, or functions of the tests that they call, name a starter."""
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
    """Yield the names that code uses, also those in functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _functions(function: types.FunctionType, names: set[str]) -> Iterator[Callable[..., Any]]:
    """Yield the functions, and methods of classes, among the global names of a function."""
    for value in [function.__globals__.get(name) for name in names]:
        is_module = isinstance(value, types.ModuleType) and _is_here(
            str(getattr(value, "__file__", ""))
        )
        for each in [getattr(value, name, None) for name in names] if is_module else [value]:
            members = vars(each).values() if inspect.isclass(each) else [each]
            yield from filter(callable, members)


def _is_here(file: str) -> bool:
    """Return whether a file is one of the tests."""
    return file.startswith(TESTS)


@contextmanager
def no_process_starts() -> Iterator[None]:
    """Let each attempt to start a process raise an error, and raise it again after the block."""
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
