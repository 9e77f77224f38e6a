"""The main module of a child process that a rank starts by spawn or forkserver.

Such a child imports the main module of its parent again, to find functions and classes that were
pickled by name. Python takes the name of the main module from the parent's `__main__.__spec__`. A
rank sets the name of this module there, so that its children import this module.

When the child first looks up a name in its main module, this module loads the names of the work:

- If the run's work is a function, all names come from the run's payload.
- If the work is a `%%taas` cell, the names of earlier cells come from the payload. For the cell's
  own names, the child runs the cell's imports, definitions and constants again. If the cell has an
  `if __name__ == "__main__":`, the child runs all statements of the cell, as for a script, except
  statements with magics, shell commands or a top-level `await`.

This module imports little at its top, because each such child imports it.
"""

import ast
import os
import sys
import threading
from inspect import CO_COROUTINE
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taas_magic.capture.work import Work

PAYLOAD = "TAAS_PAYLOAD"
"""Environment variable, in a rank and its children, with the path of the run's payload file."""

_loading = threading.RLock()
_is_loaded = False


def definitions(tree: ast.Module) -> ast.Module:
    """Return the statements of a cell that a child process must run to have the cell's names.

    If the cell's top level has an `if` that tests `__name__`, return all statements that need no
    IPython. Otherwise, return only the imports, functions, classes and constants at the cell's top
    level.
    """
    has_guard = any(
        isinstance(part, ast.Name) and part.id == "__name__"
        for statement in tree.body
        if isinstance(statement, ast.If)
        for part in ast.walk(statement.test)
    )
    body = [it for it in tree.body if _only_defines(it) or (has_guard and not _needs_ipython(it))]
    return ast.Module(body=body, type_ignores=[])


def _only_defines(statement: ast.stmt) -> bool:
    """Return whether a statement is an import, a function, a class or a constant.

    A constant is an assignment of a literal, such as `sizes = [1, 2]`.
    """
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    if isinstance(statement, functions | ast.ClassDef | ast.Import | ast.ImportFrom):
        return True
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return False
    try:
        ast.literal_eval(statement.value)
    except (ValueError, TypeError, SyntaxError):
        return False
    return True


def _needs_ipython(statement: ast.stmt) -> bool:
    """Return whether only IPython can run a statement of a cell.

    True for a statement with a magic, a shell command (`!ls`) or a top-level `await`.
    """
    module = ast.Module(body=[statement], type_ignores=[])
    code = compile(module, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return bool(code.co_flags & CO_COROUTINE) or "get_ipython" in code.co_names


def load(path: Path, namespace: dict[str, Any]) -> "Work":
    """Load the names of a run's payload into a child's main namespace.

    First registers the notebook's source code, which tracebacks show. If the work of the run is a
    cell, also runs the cell's `definitions` after the names are loaded. If the work is a function,
    does not call the function. Exceptions of the cell's code reach the caller.

    Args:
        path: Path of the payload.

    Returns:
        The work of the run.
    """
    from taas_magic.capture import payload
    from taas_magic.capture.work import CellWork
    from taas_magic.host import tracebacks

    loaded = payload.read(path)
    tracebacks.register_sources(loaded.sources)
    work = loaded.load_into(namespace)
    if isinstance(work, CellWork):
        tree = definitions(ast.parse(work.python))
        ast.increment_lineno(tree, work.lines_above)
        exec(compile(tree, work.filename, "exec", work.compiler_flags), namespace)
    return work


def _find(name: str) -> Any:
    """Return the object with this name in a child's main module.

    The first call for a name that does not begin with `__` loads all names from the run's payload.
    If the loading raises an exception, so does this call. Then the next call loads the names again.

    `become_main` makes this function the main module's `__getattr__` (PEP 562). So Python calls
    this function for each name that the main module does not have.

    Raises:
        AttributeError: The child does not have this name. The message says which names a child has.
    """
    global _is_loaded
    main = sys.modules["__main__"].__dict__
    with _loading:
        if not _is_loaded and not name.startswith("__"):
            _is_loaded = True  # `load` itself may look up names
            try:
                load(Path(os.environ[PAYLOAD]), main)
            except BaseException:
                _is_loaded = False  # the next lookup shall raise the same error
                raise
    if name in main:
        return main[name]
    raise AttributeError(
        f"{name!r} is not defined in this child process. A child process has the names of earlier "
        "cells, and from the %%taas cell only imports, functions, classes and constants (or all "
        "statements without magics and top-level `await`, if the cell has an "
        '`if __name__ == "__main__":`)'
    )


def become_main(namespace: dict[str, Any]) -> None:
    """Turn a child's main module into a module that has the notebook's names.

    First, this function makes the project's modules importable. The child needs these modules
    immediately, because it may unpickle their objects before it looks up any name.

    The child's main module begins as a copy of this module. So this function then deletes all names
    from `namespace` except those that begin with `__`. Last, it sets `__getattr__` to `_find`. At
    the first lookup of a name, `_find` loads the notebook's names.

    Args:
        namespace: Global variables of the child's main module.
    """
    from taas_magic.capture import payload
    from taas_magic.capture.modules import claim_taas, install_modules

    claim_taas()
    install_modules(payload.read(Path(os.environ[PAYLOAD])).modules)
    for name in [name for name in namespace if not name.startswith("__")]:
        del namespace[name]
    namespace["__getattr__"] = _find


if __name__ == "__mp_main__":  # multiprocessing's name of the main module in a child
    from taas_magic.host import cell_main

    cell_main.become_main(globals())
