"""Import modules in a thread, or use a module only if other code imports it.

Only `import_in_thread` imports modules that the process has not imported yet.
"""

import contextvars
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def import_in_thread(*names: str) -> None:
    """Import modules in a new thread, and wait for the thread.

    An interrupt of the user (SIGINT) ends only the wait, and the thread completes the imports. If
    an interrupt ended an import in the main thread, modules could stay half imported. Some modules,
    such as torch, cannot be imported again after that.

    Args:
        names: Full names of the modules.

    Raises:
        Exception: The exception of the first import that failed.
        KeyboardInterrupt: The user interrupted the wait.
    """
    outcome: Future[None] = Future()

    def import_all() -> None:
        try:
            for name in names:
                importlib.import_module(name)
            outcome.set_result(None)
        except BaseException as error:
            outcome.set_exception(error)

    context = contextvars.copy_context()
    threading.Thread(
        target=context.run, args=(import_all,), name="taas-import", daemon=True
    ).start()
    outcome.result()


def module_if_imported(name: str) -> Any:
    """Return a module if this process has imported it, else None.

    If another thread is importing the module, wait until its import is complete.
    """
    return importlib.import_module(name) if name in sys.modules else None


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call `then` as soon as other code has imported the module `name`.

    If the module is already imported, call `then` at once. Otherwise, return at once; the thread
    that later imports the module calls `then` once, when the module's code has run. This function
    itself imports nothing.
    """
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(MetaPathFinder):
    """Import finder that calls a function once, after the import of one module.

    This finder must come first in `sys.meta_path`. The later finders find the module's spec. This
    finder then changes the spec's loader, so that the loader calls the function after the import.

    This finder stays in `sys.meta_path` until the module is imported. If a library only searches
    for the module, for example to check whether the module is installed, this finder stays, too.

    Args:
        name: Name of the module.
        then: The function to call.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of this finder's module, with a loader that calls the finder's function.

        The spec and its loader come from the later finders. This method replaces the loader's
        method `exec_module`. The new method restores the old one, and executes the module. If this
        finder is still in `sys.meta_path`, the new method then removes this finder from there and
        calls the finder's function. A spec without a loader is returned unchanged.

        Return None in three cases: `fullname` is another module; this finder is no longer in
        `sys.meta_path`; or no later finder finds the module.
        """
        if fullname != self._name or self not in sys.meta_path:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                # undo the change first: the loader may also load other modules (zipimport's does)
                vars(loader).pop("exec_module", None)
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._then()

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
