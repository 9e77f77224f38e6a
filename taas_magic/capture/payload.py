"""A cell and all that it needs from the notebook, ready to travel to the ranks."""

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from taas_magic.capture import archive
from taas_magic.capture.archive import Archive, Pickled
from taas_magic.capture.gather import Captured, Gathering
from taas_magic.capture.imports import needed_modules
from taas_magic.capture.modules import ModuleSource, collect, install
from taas_magic.capture.names import UsedNames, used_names
from taas_magic.capture.pickling import load_each
from taas_magic.errors import CaptureError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_LISTED = 3


@dataclass(frozen=True)
class Cell:
    """A notebook cell as it runs on the ranks.

    Attributes:
        source: The body that runs, IPython syntax allowed, head removed.
        filename: The kernel's own compile name for this cell.
        raw: The whole cell as the user sees it.
        line_offset: Lines of the head that were removed above `source`.
        execution_count: Its number in the notebook, once it has one.
    """

    source: str
    filename: str
    raw: str
    line_offset: int = 0
    execution_count: int | None = None


class CellSource(NamedTuple):
    """The text of a cell that defined something, and what tracebacks call it: `Cell In[5]`."""

    text: str
    label: str


@dataclass(frozen=True)
class Payload:
    """What a run's ranks get.

    Attributes:
        cell: The cell.
        captured: The names that travel, each after what it needs.
        modules: The project's own modules, by name.
        sources: Texts of this cell and of the cells that defined captured functions, by filename.
        submodules: Installed modules that the cell reaches through a package's attributes.
        requires: Top-level modules that must be installed wherever the cell runs.
        data: The pickled values in the order of `captured`, with their buffers.
    """

    cell: Cell
    captured: tuple[Captured, ...]
    modules: dict[str, ModuleSource]
    sources: dict[str, CellSource]
    submodules: tuple[str, ...]
    requires: tuple[str, ...]
    data: Pickled

    @property
    def size_bytes(self) -> int:
        return self.data.size_bytes + sum(len(m.source) for m in self.modules.values())


@dataclass(frozen=True)
class LoadedPayload:
    """A payload as a rank reads it; the user's values are not unpickled yet."""

    cell: Cell
    captured: tuple[Captured, ...]
    modules: dict[str, ModuleSource]
    sources: dict[str, CellSource]
    submodules: tuple[str, ...]
    archive: Archive = field(repr=False)

    def load_into(self, namespace: dict[str, Any]) -> None:
        """Puts the captured values into a rank's namespace; once per payload.

        `sys.modules["__main__"].__dict__` must be this namespace. Values are writable, and share
        the file's pages with the other ranks of the host until written to.

        Raises:
            ImportError: A module that a value needs is not installed on this host.
        """
        install(self.modules)
        for name in self.submodules:
            importlib.import_module(name)
        values = load_each(self.archive.stream(), self.archive.buffers, namespace)
        for captured, value in zip(self.captured, values, strict=False):
            namespace[captured.name] = value


def capture(
    cell: Cell,
    namespace: dict[str, Any],
    *,
    transform: Callable[[str], str],
    project: Path,
    limit_bytes: int,
    source_of: Callable[[str], CellSource | None],
) -> Payload:
    """Finds and pickles what a cell uses (kernel). Nothing else of the notebook is touched.

    Args:
        cell: The cell.
        namespace: The notebook's own dict, not a copy: functions are recognised by it.
        transform: IPython syntax to Python (`InteractiveShell.transform_cell`).
        project: The notebook's folder.
        limit_bytes: How large a payload may be.
        source_of: The text of the cell that the kernel compiled under a filename, if it was one.

    Raises:
        CaptureError: A value cannot travel (with the path to what cannot), or all are too large.
        SyntaxError: The cell is not Python.
    """
    gathering = Gathering(namespace)
    python = transform(cell.source)
    used = used_names(python, cell.filename)
    gathering.take(used.why)
    payload = _assemble(cell, python, used, gathering, project, source_of)
    too_large = _over_limit(payload, limit_bytes)
    if too_large is not None:
        raise too_large
    return payload


def survey(
    cell: Cell,
    namespace: dict[str, Any],
    *,
    transform: Callable[[str], str],
    project: Path,
    limit_bytes: int,
    source_of: Callable[[str], CellSource | None],
) -> tuple[Payload | None, list[str]]:
    """As `capture`, for --dry-run: goes on after a refusal.

    Returns:
        The payload of all that can travel (None where a module cannot be read), and one message
        for each thing that would fail.

    Raises:
        SyntaxError: The cell is not Python.
    """
    problems: list[str] = []
    gathering = Gathering(namespace, problems)
    python = transform(cell.source)
    used = used_names(python, cell.filename)
    gathering.take(used.why)
    try:
        payload = _assemble(cell, python, used, gathering, project, source_of)
    except CaptureError as error:
        return None, [*problems, str(error)]
    too_large = _over_limit(payload, limit_bytes)
    return payload, [*problems, *([str(too_large)] if too_large else [])]


def write(payload: Payload, path: Path) -> None:
    """Writes a payload for the ranks of a run; the file appears whole, for its owner only."""
    meta = {
        "cell": asdict(payload.cell),
        "captured": [asdict(captured) for captured in payload.captured],
        "modules": [asdict(module) for module in payload.modules.values()],
        "sources": payload.sources,
        "submodules": payload.submodules,
    }
    archive.write(path, payload.data, meta)


def read(path: Path) -> LoadedPayload:
    """Reads a payload without unpickling the user's values; the file may be removed afterwards.

    Raises:
        CaptureError: The file is no payload.
    """
    mapped = archive.read(path)
    meta = mapped.meta
    return LoadedPayload(
        Cell(**meta["cell"]),
        tuple(Captured(**captured) for captured in meta["captured"]),
        {module["name"]: ModuleSource(**module) for module in meta["modules"]},
        {filename: CellSource(*source) for filename, source in meta["sources"].items()},
        tuple(meta["submodules"]),
        mapped,
    )


def _assemble(
    cell: Cell,
    python: str,
    used: UsedNames,
    gathering: Gathering,
    project: Path,
    source_of: Callable[[str], CellSource | None],
) -> Payload:
    modules = collect([*used.imports, *gathering.pickler.modules], project)
    filenames = sorted(gathering.pickler.filenames)
    sources = {name: source for name in filenames if (source := source_of(name)) is not None}
    sources[cell.filename] = source_of(cell.filename) or _own_source(cell)
    submodules = _submodules(gathering.modules, used.attributes)
    captured = tuple(gathering.captured)
    texts = [source.text for source in sources.values()]
    travelling = [(module.name, module.source) for module in modules.values()]
    requires = needed_modules(python, gathering.pickler.modules, travelling, texts)
    data = gathering.pickler.pickled()
    return Payload(cell, captured, modules, sources, submodules, requires, data)


def _own_source(cell: Cell) -> CellSource:
    number = " " if cell.execution_count is None else cell.execution_count
    return CellSource(cell.raw, f"Cell In[{number}]")


def _submodules(modules: Iterable[ModuleType], attributes: frozenset[str]) -> tuple[str, ...]:
    """`import xml.dom` binds `xml`; a rank that imports only `xml` would lack `xml.dom`."""
    packages = [module.__name__ for module in modules if hasattr(module, "__path__")]
    return tuple(
        name
        for package in packages
        for name in list(sys.modules)
        if name.startswith(f"{package}.")
        and attributes.issuperset(name[len(package) + 1 :].split("."))
    )


def _over_limit(payload: Payload, limit_bytes: int) -> CaptureError | None:
    if payload.size_bytes <= limit_bytes:
        return None
    biggest = sorted(payload.captured, key=lambda c: c.size_bytes, reverse=True)[:_LISTED]
    listed = ", ".join(f"`{c.name}` {size_text(c.size_bytes)}" for c in biggest)
    return CaptureError(
        f"the cell uses {size_text(payload.size_bytes)} of the notebook's values, more than "
        f"{size_text(limit_bytes)}: {listed}; load large data inside the cell, or raise "
        "`[capture] limit` in taas.toml"
    )


def size_text(size_bytes: int) -> str:
    """A size as people read it: `1.5 GiB`."""
    size = float(size_bytes)
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
