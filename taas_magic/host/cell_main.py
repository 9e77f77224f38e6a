"""The main module of a child that a rank starts by spawn or forkserver; so it imports little.

Such a child imports its parent's main module again, to find the functions and classes that were
pickled by name. Of a script that is the script's file; of a cell it is this module, since the
`__spec__` of a rank's `__main__` names it, as `python -m` would. Names are looked up when they are
asked for: those of earlier cells come from the run's payload, those of the cell from its top level.
If the cell has an `if __name__ == "__main__":`, all of its top level runs, as of a script; else
only imports, functions, classes and constants, so that no child starts the training again.
"""

import ast
import os
import sys
import threading
from pathlib import Path
from typing import Any

PAYLOAD = "TAAS_PAYLOAD"
"""The environment variable that names the run's payload on this host."""

_loading = threading.RLock()
_is_loaded = False


def definitions(tree: ast.Module) -> ast.Module:
    """Return what of a cell a child runs: all of it where it tells a main program from an import.

    Else what only defines.
    """
    for statement in tree.body:
        if isinstance(statement, ast.If) and any(
            isinstance(part, ast.Name) and part.id == "__name__"
            for part in ast.walk(statement.test)
        ):
            return tree
    body = [statement for statement in tree.body if _only_defines(statement)]
    return ast.Module(body=body, type_ignores=[])


def _only_defines(statement: ast.stmt) -> bool:
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


def load(path: Path, namespace: dict[str, Any]) -> None:
    """Put a payload's names and the cell's definitions into the namespace of a child's main."""
    from taas_magic.capture import payload
    from taas_magic.host import tracebacks

    loaded = payload.read(path)
    tracebacks.know(loaded.sources)
    loaded.load_into(namespace)
    cell = loaded.cell
    tree = definitions(ast.parse(_as_python(cell.source)))
    ast.increment_lineno(tree, cell.lines_above)
    exec(compile(tree, cell.filename, "exec", cell.compiler_flags), namespace)


def _as_python(source: str) -> str:
    """Return a cell's text without IPython's syntax."""
    try:
        ast.parse(source)
    except SyntaxError:
        from IPython.core.inputtransformer2 import TransformerManager

        return str(TransformerManager().transform_cell(source))
    return source.lstrip()


def _find(name: str) -> Any:
    """Find a name of the main module (PEP 562); all is loaded when the first one is asked for."""
    global _is_loaded
    main = sys.modules["__main__"].__dict__
    with _loading:
        if not _is_loaded and not name.startswith("__"):
            _is_loaded = True
            load(Path(os.environ[PAYLOAD]), main)
    if name in main:
        return main[name]
    raise AttributeError(
        f"{name!r} is not defined in this child process: it has what earlier cells define, and of "
        "the %%taas cell its imports, functions, classes and constants (all of its top level, if "
        'the cell has an `if __name__ == "__main__":`)'
    )


def become_main(namespace: dict[str, Any]) -> None:
    """Leave a child's main module nothing but a way to find the notebook's names.

    What this module has itself would hide names that a notebook uses, `load` or `Path`. The
    project's own modules are made importable at once: arguments may be of their classes.
    """
    from taas_magic.capture import payload
    from taas_magic.capture.modules import claim_taas, install

    claim_taas()
    install(payload.read(Path(os.environ[PAYLOAD])).modules)
    for name in [name for name in namespace if not name.startswith("__")]:
        del namespace[name]
    namespace["__getattr__"] = _find


if __name__ == "__mp_main__":  # what multiprocessing calls the main module in a child
    from taas_magic.host import cell_main

    cell_main.become_main(globals())
