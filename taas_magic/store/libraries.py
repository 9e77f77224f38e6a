"""Redirect file accesses of libraries in C, C++ and Rust. Such libraries bypass Python's `open`.

`CALLS` lists functions that open files in compiled code. In a rank, `install` replaces each of
these functions by one that redirects the path, as `redirect.py` does for `open`.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from taas_magic.late_imports import when_imported
from taas_magic.store.redirect import (
    DiscardingView,
    StoreView,
    library_read_path,
    library_write_path,
    path_to_open,
)


class _Call(NamedTuple):
    """A library function or method that opens a file.

    Attributes:
        module: Name of the module that has the function or class.
        name: Name of the function, or of a method as `Class.method`.
        position: Index of the path in the positional arguments; `self` of a method has index 0.
        parameter: Name of the path's parameter.
        writes: Whether the function writes; None if this depends on its argument `mode`.
        makes_folder: Whether the function writes a folder at the path.
    """

    module: str
    name: str
    position: int
    parameter: str
    writes: bool | None
    makes_folder: bool = False


CALLS = (
    _Call("safetensors", "serialize_file", 1, "filename", writes=True),
    _Call("safetensors", "safe_open", 0, "filename", writes=False),
    _Call("tokenizers", "Tokenizer.save", 1, "path", writes=True),
    _Call("tokenizers", "Tokenizer.from_file", 0, "path", writes=False),
    _Call("tokenizers.models", "Model.save", 1, "folder", writes=True, makes_folder=True),
    _Call("torch.jit._script", "RecursiveScriptModule.save", 1, "f", writes=True),
    _Call("torch.jit._script", "ScriptModule.save", 1, "f", writes=True),
    _Call("torch.jit", "ScriptFunction.save", 1, "filename", writes=True),
    _Call("torch.jit", "load", 0, "f", writes=False),
    _Call("h5py", "File.__init__", 1, "name", writes=None),
    _Call("pyarrow", "OSFile", 0, "path", writes=None),
    _Call("pyarrow", "memory_map", 0, "path", writes=None),
    _Call("pyarrow.parquet.core", "ParquetWriter.__init__", 1, "where", writes=True),
    _Call("pyarrow.parquet.core", "ParquetFile.__init__", 1, "source", writes=False),
    _Call("pyarrow.parquet.core", "ParquetDataset.__init__", 1, "path_or_paths", writes=False),
    _Call("pyarrow.parquet.core", "read_table", 0, "source", writes=False),
    _Call("pyarrow.parquet.core", "read_metadata", 0, "where", writes=False),
    _Call("pyarrow.parquet.core", "read_schema", 0, "where", writes=False),
    _Call("pyarrow.dataset", "write_dataset", 1, "base_dir", writes=True, makes_folder=True),
    _Call("pyarrow.dataset", "dataset", 0, "source", writes=False),
    _Call("pyarrow.feather", "write_feather", 1, "dest", writes=True),
    _Call("pyarrow.feather", "read_table", 0, "source", writes=False),
    _Call("pyarrow.csv", "write_csv", 1, "output_file", writes=True),
)


def install(view: StoreView) -> None:
    """Permanently replace the functions in `CALLS` by functions that redirect their paths.

    If a module is not imported yet, replace its functions as soon as it is imported.

    Functions that read but never write are replaced only for a `DiscardingView`. Reason: only a
    rank with such a view must read files that it has written to its scratch folder instead of the
    store.

    Args:
        view: Object that decides which path a call really uses.
    """
    modules: dict[str, list[_Call]] = {}
    for call in CALLS:
        if call.writes is not False or isinstance(view, DiscardingView):
            modules.setdefault(call.module, []).append(call)
    for module, calls in modules.items():
        when_imported(module, partial(_replace_all, view, calls))


def _replace_all(view: StoreView, calls: list[_Call]) -> None:
    """Replace the functions and classes named in `calls` by ones that redirect their paths.

    A name that the library does not have is skipped. A class is replaced by a subclass if possible.
    If another module has imported the function or class under the same name, replace it there, too.

    Args:
        calls: Items of `CALLS` for one module. The module must be imported already.
    """
    for call in calls:
        holder: Any = sys.modules[call.module]
        *classes, name = call.name.split(".")
        for each in classes:
            holder = getattr(holder, each, None)
        real = getattr(holder, name, None)
        if real is None:  # this version of the library lacks the function
            continue
        replacement: Any = _redirected_class(view, call, real) if inspect.isclass(real) else None
        replacement = replacement or _redirected(view, call, real)
        is_of_class = inspect.isclass(holder)
        setattr(
            holder,
            name,
            staticmethod(replacement) if is_of_class and call.position == 0 else replacement,
        )
        if not is_of_class:
            _replace_where_imported(name, real, replacement)


def _replace_where_imported(name: str, real: object, replacement: object) -> None:
    for module in list(sys.modules.values()):
        # An entry can also be None, which blocks an import, or an object without a `__dict__`.
        if getattr(module, "__dict__", {}).get(name) is real:
            setattr(module, name, replacement)


def _redirected_class(view: StoreView, call: _Call, real: Any) -> type | None:
    """Return a subclass of the class `real` whose `__new__` gets the redirected path.

    `real` must read the path in `__new__`, as classes of C extensions do. Its `__init__` still gets
    the path of the user's call. Return None if Python does not allow subclasses of `real`.
    """

    def new(cls: type, *args: Any, **kw: Any) -> Any:
        return _redirected(view, call, partial(real.__new__, cls))(*args, **kw)

    try:
        return type(real.__name__, (real,), {"__new__": new, "__module__": real.__module__})
    except TypeError:
        return None


def _redirected(view: StoreView, call: _Call, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `real` with the path that `view` selects.

    The path is unchanged if it is a URL or an open file, or if the call has an argument
    `filesystem` (pyarrow).
    """

    @functools.wraps(real, updated=())
    def call_redirected(*args: Any, **kw: Any) -> Any:
        path = args[call.position] if len(args) > call.position else kw.get(call.parameter)
        is_path = isinstance(path, str | os.PathLike) and "://" not in os.fspath(path)
        if not is_path or kw.get("filesystem") is not None:
            return real(*args, **kw)
        others = args[call.position + 1 :]
        redirected = _redirect_argument(
            view, call, path, kw.get("mode", others[0] if others else "r")
        )
        if len(args) > call.position:
            args = (*args[: call.position], redirected, *args[call.position + 1 :])
        else:
            kw[call.parameter] = redirected
        return real(*args, **kw)

    return call_redirected


def _redirect_argument(view: StoreView, call: _Call, path: Any, mode: Any) -> Any:
    """Return the path that a library's function must use instead of the caller's `path`.

    If `view` does not redirect the path, return `path` itself. The fields of `call` say whether the
    function makes a folder, writes a file, or reads a file. If the file is written in a `mode` that
    keeps its old content, such as "a", first copy the old content to the returned path.

    Args:
        mode: The caller's `mode` argument; used only if `call.writes` is None.
    """
    if call.makes_folder:
        redirected = library_write_path(view, view.path_to_write, path)
        if redirected is not path:  # the folder may exist only in the store
            os.makedirs(redirected, exist_ok=True)
        return redirected
    if call.writes or (call.writes is None and mode not in ("r", "rb")):
        needs_content = call.writes is None and not str(mode).startswith(("w", "x"))
        return library_write_path(
            view, partial(path_to_open, view, needs_content=needs_content), path
        )
    return library_read_path(view, path)
