"""Send the project's modules as source, list the required packages, and provide `taas`.

The source of local modules (`is_local`) is read from disk when the cell starts. Every host must
have the standard library and the installed packages. `import taas` gives `taas_magic.api`, even
if the unrelated package `taas` of PyPI is installed.
"""

import ast
import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import linecache
import re
import reprlib
import sys
import sysconfig
import tokenize
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path, PurePath
from types import FunctionType, ModuleType
from typing import Any

from taas_magic.capture.syntax import parse
from taas_magic.errors import CaptureError

_OURS = {"taas_magic", "taas"}
_INSTALLED = {"site-packages", "dist-packages"}
"""Names of the folders into which pip and the system install packages."""

_MOST_DIFFERENCES = 3
"""Maximum number of notes on single constants, and of notes on replaced functions."""

_SYSTEM = tuple(
    Path(p).resolve()
    for p in {sys.prefix, sys.base_prefix, sys.exec_prefix, sysconfig.get_path("stdlib")}
)
"""Folders of the Python installation."""


@dataclass(frozen=True)
class ModuleSource:
    """The source of a module.

    Attributes:
        path: Path of the file on the notebook's machine; tracebacks show this path.
        source: Text of the file; "" for a folder without `__init__.py`.
    """

    name: str
    path: str
    source: str
    is_package: bool


def find_local_modules(names: Iterable[str], project: Path) -> dict[str, ModuleSource]:
    """Find the project's modules among `names`, and all project modules that these modules import.

    `is_local` decides which modules belong to the project.

    Args:
        names: Dotted names. Names that are no module (`x.y` of `from x import y`) are skipped.
        project: The project folder.

    Returns:
        The sources by name of the module, including parent packages.

    Raises:
        CaptureError: The file of a local module is not Python text.
    """
    found: dict[str, ModuleSource] = {}
    met: set[str] = set()
    waiting = deque(part for name in names for part in _with_parents(name))
    folders = local_folders(project) if waiting else ()
    while waiting:
        name = waiting.popleft()
        if name in met:
            continue
        met.add(name)
        module = _find(name, folders, found)
        if module is not None:
            found[name] = module
            waiting.extend(
                part for used in _parse_module(module).imports for part in _with_parents(used)
            )
    return found


def local_folders(project: Path) -> tuple[Path, ...]:
    """Return the project folder and the entries of `sys.path` outside Python installations."""
    entries = (Path(entry).resolve() for entry in sys.path)
    others = (
        e for e in entries if _INSTALLED.isdisjoint(e.parts) and not _is_below_any(e, _SYSTEM)
    )
    return tuple(dict.fromkeys([project.resolve(), *others]))


def is_local(path: Path, folders: Sequence[Path]) -> bool:
    """Return whether a file belongs to the user's project.

    The file must be in one of the folders. Files of the Python installation, and files that pip
    installed (also by `--target`), do not belong to the project.

    Args:
        path: Resolved path of the file.
        folders: The folders that `local_folders` returns.
    """
    if not _INSTALLED.isdisjoint(path.parts):
        return False
    homes = [folder for folder in folders if path.is_relative_to(folder)]
    inside = [system for system in _SYSTEM if any(system.is_relative_to(h) for h in homes)]
    if not homes or _is_below_any(path, inside):
        return False
    return not any(_top_level(path.relative_to(home)) in _libraries(home) for home in homes)


def _top_level(path: PurePath) -> str:
    return path.parts[0].removesuffix(".py") if path.parts else ""


def _libraries(folder: Path) -> frozenset[str]:
    """Return the names of the top-level modules that `pip install --target` put into a folder."""
    try:
        changed_ns = folder.stat().st_mtime_ns
    except OSError:
        return frozenset()
    return _recorded_modules(folder, changed_ns)


@cache
def _recorded_modules(folder: Path, changed_ns: int) -> frozenset[str]:
    """Return the top-level modules in pip's lists of installed files (RECORD) in a folder.

    Args:
        changed_ns: The folder's modification time, as part of the cache key.
    """
    found = importlib.metadata.distributions(path=[str(folder)])
    records = (distribution.read_text("RECORD") or "" for distribution in found)
    paths = {line.partition(",")[0] for record in records for line in record.splitlines()}
    return frozenset(_top_level(PurePath(path)) for path in paths)


def install_modules(modules: Mapping[str, ModuleSource]) -> None:
    """Make this process (a rank) import these modules from the source that the notebook sent.

    These modules replace those of an earlier call, and take precedence over everything else on the
    import path. A module that is already imported stays as it is. Tracebacks show the lines of the
    sent source.
    """
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _ShippedFinder)]
    sys.meta_path.insert(0, _ShippedFinder(dict(modules)))
    for module in modules.values():
        lines = module.source.splitlines(keepends=True)
        linecache.cache[module.path] = (len(module.source), None, lines, module.path)


def notes_on_constants(modules: Mapping[str, ModuleSource], cell: str) -> tuple[str, ...]:
    """Return notes on constants whose value differs between a module's file and the notebook.

    Ranks import the file. The notebook has another value if a cell has set the constant, or if the
    file was edited after the notebook imported the module. Only the first `_MOST_DIFFERENCES`
    constants get their own note; one more note has the number of further constants.

    Args:
        cell: Text of the cell. There is no note on a constant that the cell sets.
    """
    found = []
    for name, module in modules.items():
        live = vars(sys.modules[name]) if name in sys.modules else {}
        for constant, value in _parse_module(module).constants.items():
            here = live.get(constant, value)
            is_same = type(here) is type(value) and here == value
            if not is_same and not re.search(rf"\b{constant}\s*=(?!=)", cell):
                found.append(
                    f"{name}.{constant} is {reprlib.repr(here)} in the notebook, but "
                    f"{reprlib.repr(value)} in the file that the ranks import: set it in the "
                    "%%taas cell as well, or reload the module"
                )
    more = len(found) - _MOST_DIFFERENCES
    rest = [f"{more} more constants of the project's modules differ"] if more > 0 else []
    return (*found[:_MOST_DIFFERENCES], *rest)


def notes_on_patches(
    modules: Iterable[ModuleType | None],
    classes: Iterable[type],
    attributes: Collection[str],
    namespace: Mapping[str, Any],
    cell: str,
) -> Iterator[str]:
    """Yield notes on functions that the notebook has replaced in a module or class.

    Ranks have the original functions, so the user needs to know.

    Check all members of a class, but skip classes of the notebook itself. Check only those members
    of a module that have a name in `attributes`. If such a member is itself a module or a class,
    check its members, too. Yield notes only for the first `_MOST_DIFFERENCES` functions, sorted by
    name.

    Args:
        modules: Modules that the cell uses.
        classes: Library classes that the captured values use.
        attributes: Attribute names that the cell, or a captured function, looks up.
        cell: Text of the cell. There is no note on a function that the cell replaces.
    """

    def is_notebooks(value: Any) -> bool:
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, staticmethod | classmethod):
            value = value.__func__
        return isinstance(value, FunctionType) and value.__globals__ is namespace

    found: list[str] = []
    seen: set[int] = set()
    waiting: list[Any] = [*(it for it in modules if isinstance(it, ModuleType)), *classes]
    for owner in waiting:
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        is_class = isinstance(owner, type)
        if is_class and owner.__module__ == "__main__":
            continue
        prefix = f"{owner.__module__}.{owner.__qualname__}" if is_class else owner.__name__
        members = vars(owner)
        for name in list(members) if is_class else [name for name in attributes if name in members]:
            value = members[name]
            if is_notebooks(value) and not re.search(rf"\.{name}\s*=(?!=)", cell):
                found.append(f"{prefix}.{name}")
            elif isinstance(value, ModuleType | type) and not is_class:
                waiting.append(value)
    for name in sorted(found)[:_MOST_DIFFERENCES]:
        yield (
            f"{name} is a function of the notebook here, but the original in the ranks: replace it "
            "in the %%taas cell as well"
        )


def is_shipped(name: str) -> bool:
    """Return whether this process (a rank) imported a module from source that the notebook sent."""
    return _shipped_loader(name) is not None


def find_outdated(modules: Mapping[str, ModuleSource]) -> list[str]:
    """Return the names of the modules whose imported source differs from the newest source.

    Call this function in a rank. Only modules that the rank imported from source that the notebook
    sent are checked.

    Args:
        modules: The newest sources of the project's modules, by name.
    """
    loaders = {name: _shipped_loader(name) for name in modules}
    return [
        name
        for name, loader in loaders.items()
        if loader is not None and loader.get_source(name) != modules[name].source
    ]


def edited_modules(modules: Mapping[str, ModuleSource]) -> list[str]:
    """Return the names of the modules whose file no longer equals the source in `modules`.

    Call this function in the kernel, which has the files. A module whose file is missing or is not
    Python text is left out.

    Args:
        modules: The modules as the ranks got them, by name.
    """
    found = []
    for name, module in modules.items():
        with suppress(OSError, SyntaxError, UnicodeDecodeError), tokenize.open(module.path) as file:
            if file.read() != module.source:
                found.append(name)
    return found


def _shipped_loader(name: str) -> "_Loader | None":
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec.loader if spec is not None and isinstance(spec.loader, _Loader) else None


def claim_taas() -> bool:
    """Make `import taas` give `taas_magic.api` in this process and its forks.

    Ranks, fetchers and the kernel call this function before any of the user's code runs.

    Returns:
        Whether another package had been imported as `taas` before. After this call, `import taas`
        no longer gives that package.
    """
    api = importlib.import_module("taas_magic.api")
    before = sys.modules.get("taas", api)
    sys.modules["taas"] = api
    return before is not api and hasattr(before, "__path__")


def release_taas() -> None:
    """Undo `claim_taas`: the next `import taas` finds the installed package."""
    if sys.modules.get("taas") is sys.modules.get("taas_magic.api"):
        sys.modules.pop("taas", None)


class _ShippedFinder(importlib.abc.MetaPathFinder):
    """Import finder of a rank for the project's modules, whose source the notebook has sent."""

    def __init__(self, modules: Mapping[str, ModuleSource]) -> None:
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = self._modules.get(fullname)
        if module is None:
            return None
        loader = _Loader(module)
        return importlib.util.spec_from_file_location(fullname, module.path, loader=loader)


class _Loader(importlib.abc.FileLoader):
    """Import loader for a module whose source the notebook sent; does not use bytecode files."""

    def __init__(self, module: ModuleSource) -> None:
        super().__init__(module.name, module.path)
        self._module = module

    def get_source(self, fullname: str) -> str:
        return self._module.source

    def is_package(self, fullname: str) -> bool:
        return self._module.is_package


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _is_below_any(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _find(
    name: str, folders: Sequence[Path], found: Mapping[str, ModuleSource]
) -> ModuleSource | None:
    """Return the source of a module if it is local, else None.

    A submodule is searched only in the folder of its package, which must be in `found`. A top-level
    module is searched on `sys.path` and in the project folder. The result is None for modules of
    taas-magic, for built-in modules, and for a module that this process has imported from outside
    `folders`.

    Args:
        folders: The folders that `local_folders` returns.
        found: Local modules that were found before. If a parent package of `name` is local, it must
            be in `found`.
    """
    parent = name.rpartition(".")[0]
    if parent:
        package = found.get(parent)
        if package is None or not package.is_package:
            return None
        # Search by the last part of the name only. With the full name, the spec of a folder without
        # `__init__.py` looks up the parent package in sys.modules. This fails if the notebook has
        # not imported the parent.
        tail = name.rpartition(".")[2]
        return _source(name, PathFinder.find_spec(tail, [str(Path(package.path).parent)]))
    if name in _OURS or name in sys.builtin_module_names:
        return None
    loaded = getattr(sys.modules.get(name), "__spec__", None)
    if loaded is not None and not _is_local_spec(loaded, folders):
        return None
    spec = PathFinder.find_spec(name, [*sys.path, str(folders[0])]) or loaded
    return _source(name, spec) if _is_local_spec(spec, folders) else None


def _is_local_spec(spec: ModuleSpec | None, folders: Sequence[Path]) -> bool:
    if spec is None:
        return False
    places = [spec.origin] if spec.has_location else spec.submodule_search_locations
    return any(is_local(Path(place).resolve(), folders) for place in places or () if place)


def _source(name: str, spec: ModuleSpec | None) -> ModuleSource | None:
    """Read the source of a module; None if the module has no Python source.

    A folder without `__init__.py` gets an empty source.

    Raises:
        CaptureError: The file is not Python text.
    """
    if spec is None:
        return None
    is_package = spec.submodule_search_locations is not None
    if not spec.has_location or spec.origin is None:
        folder = next(iter(spec.submodule_search_locations or ()), None)
        return ModuleSource(name, f"{folder}/__init__.py", "", True) if folder else None
    if not spec.origin.endswith(".py"):
        return None
    try:
        with tokenize.open(spec.origin) as file:
            return ModuleSource(name, str(Path(spec.origin).resolve()), file.read(), is_package)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise CaptureError(f"module `{name}` ({spec.origin}) cannot be read: {error}") from error


def _tree(source: str) -> ast.Module:
    """Parse the source of a module. If the source is not Python, return an empty tree.

    The user sees the SyntaxError later: a rank raises it when the rank imports the module.
    """
    try:
        return parse(source)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


@dataclass(frozen=True)
class _ParsedModule:
    """Results of parsing a module's source.

    Attributes:
        imports: Modules that are imported anywhere in the source, also in functions and branches.
        needs: Top-level modules that are imported each time that the parsed module is imported.
        constants: Plain values that the source assigns at the top level, by name. A name that the
            source assigns more than once is left out.
    """

    source: str
    imports: frozenset[str]
    needs: frozenset[str]
    constants: Mapping[str, Any]


_parsed_modules: dict[tuple[str, str], _ParsedModule] = {}
"""Cache of parsed modules, by the name and the path of the module.

Without this cache, a project with a thousand modules would delay each cell by about a minute.
"""


def _parse_module(module: ModuleSource) -> _ParsedModule:
    """Return the imports and constants of a module, found by parsing its source.

    The result is cached until the source of the module changes. A source that is not Python counts
    as empty.
    """
    text = _parsed_modules.get((module.name, module.path))
    if text is None or text.source != module.source:
        tree = _tree(module.source)
        package = module.name if module.is_package else module.name.rpartition(".")[0]
        imports = (name for node in ast.walk(tree) for name in _imported_by(node, package))
        needs = frozenset(_imports_of(tree, functions=False))
        text = _ParsedModule(module.source, frozenset(imports), needs, _constants(tree))
        _parsed_modules[module.name, module.path] = text
    return text


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return the plain values that a module's source assigns at the top level, by name.

    Leave out a name that the source assigns more than once. Also leave out a value that is not a
    literal, or that can be changed in place.
    """
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    times = Counter(node.id for node in names if not isinstance(node.ctx, ast.Load))
    found = {}
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name(name)], ast.expr() as value) | ast.AnnAssign(
                ast.Name(name), _, ast.expr() as value
            ) if times[name] == 1:
                with suppress(ValueError, TypeError):
                    plain = ast.literal_eval(value)
                    hash(plain)  # leaves out values that can be changed in place
                    found[name] = plain
    return found


def _imported_by(node: ast.AST, package: str = "") -> Iterator[str]:
    """Yield the names of the modules that an import statement may load; none for other nodes.

    For `import x.y`, yield `x.y`. For `from x import y`, yield `x` and `x.y`, because `y` may be a
    module. For `from x import *`, yield only `x`.

    Args:
        package: Package from which relative imports start; if "", skip relative imports. Also skip
            a relative import that leads out of the top-level package.
    """
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        name = "." * node.level + (node.module or "")
        with suppress(ImportError):  # a relative import beyond the top also fails in the rank
            base = importlib.util.resolve_name(name, package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


_NOT_NEEDED = {"taas_magic", "taas", "cloudpickle", "__main__", "__mp_main__"}
"""Modules that `needed_modules` leaves out, because every rank has them."""

_BRANCHES = (ast.If, ast.While, ast.Match)
_BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)


def needed_modules(
    cell: str, referred: Iterable[str], sent: Mapping[str, ModuleSource], texts: Iterable[str]
) -> tuple[str, ...]:
    """Return the top-level modules that must be installed on every host that runs a cell.

    The result has the imports of the cell, the imports of the `sent` modules outside functions, and
    the modules in `referred`. Leave out the project's own modules, the standard library, and
    modules that every rank has.

    An import is optional if it is in `if`, `while` or `match`, or in a `try` with handlers. The
    result does not contain a module only because of an optional import. This has an effect on
    `referred`: if the cell or a text in `texts` has only optional imports of a module, the module
    in `referred` is left out.

    Args:
        cell: Python source of the cell.
        referred: Modules that the captured values refer to, or that captured functions import.
            Modules that are not installed on this machine do not count.
        sent: The project's own modules that the kernel sends to the ranks, by name.
        texts: Sources of the cells that defined captured functions.
    """
    sure = set(find_imports(cell))
    optional = set[str]()
    for text in (cell, *texts):
        optional |= find_imports(text, branches=True) - find_imports(text)
    for module in sent.values():
        sure |= _parse_module(module).needs
    loaded = {name.partition(".")[0] for name in referred} - optional
    sure |= {name for name in loaded if _is_installed(name)}
    own = {name.partition(".")[0] for name in sent} | _NOT_NEEDED
    return tuple(sorted(sure - own - sys.stdlib_module_names))


@lru_cache(maxsize=256)
def find_imports(source: str, functions: bool = True, branches: bool = False) -> frozenset[str]:
    """Return the names of the top-level modules that Python source imports.

    Args:
        functions: Whether to include imports inside functions.
        branches: Whether to include imports that may be skipped: inside `if`, `while`, `match`, or
            a `try` with handlers.
    """
    return frozenset(_imports_of(_tree(source), functions, branches))


def _imports_of(tree: ast.AST, functions: bool = True, branches: bool = False) -> Iterator[str]:
    waiting = [tree]
    for node in waiting:
        yield from (name.partition(".")[0] for name in _imported_by(node))
        if _is_entered(node, functions, branches):
            waiting += (it for it in ast.iter_child_nodes(node) if isinstance(it, _BLOCKS))


def _is_entered(node: ast.AST, functions: bool, branches: bool) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return functions
    may_be_left_out = isinstance(node, _BRANCHES) or bool(getattr(node, "handlers", None))
    return branches or not may_be_left_out


def _is_installed(name: str) -> bool:
    """Return whether the import system finds a module on this machine.

    A module that a program made exists only in `sys.modules`. For such a module, return False.
    """
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
