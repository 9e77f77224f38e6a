"""Capture a cell with everything that it needs from the notebook; write and read the payload."""

import importlib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct, structs

from taas_magic.capture import process_state
from taas_magic.capture.changes import Watch
from taas_magic.capture.culprit import Destination, type_name
from taas_magic.capture.known import RankNames, VariablesToSend
from taas_magic.capture.modules import (
    ModuleSource,
    collect,
    install,
    needed_modules,
    patches,
)
from taas_magic.capture.names import (
    THE_CELL,
    code_use,
    used_names,
    why_used_by,
)
from taas_magic.capture.pickling import (
    Archive,
    Pickled,
    ValuePickler,
    load_each,
    read_archive,
    write_archive,
)
from taas_magic.config import size_text
from taas_magic.errors import CaptureError
from taas_magic.messages import unpack

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


_MODULE_NAMES = {"__name__", "__doc__", "__package__", "__loader__", "__spec__"}
_MODULE_NAMES |= {"__builtin__", "__builtins__", "__annotations__"}
_HISTORY = {"_ih", "_oh", "_dh"}
_SHELL_NAMES = {"get_ipython", "exit", "quit", "open", "display"}
_INPUT = re.compile(r"_i{1,3}|_i\d+")
"""Names of IPython's variables for earlier inputs."""

_OUTPUT = re.compile(r"_{1,3}|_\d+")
"""Names of IPython's variables for earlier outputs."""


@dataclass(frozen=True)
class Captured:
    """A captured variable of the notebook.

    Attributes:
        size_bytes: Bytes that it adds to the payload.
        why: Reason for its capture, for messages.
        type_name: Name of its class.
    """

    name: str
    size_bytes: int
    why: str
    type_name: str


class _Gathering:
    """Pickler that puts each variable of the notebook after the variables that it needs.

    Args:
        namespace: Namespace of the notebook.
        problems: List that receives the messages of refused values. If None, a refusal is raised.
        to: Destination of the values.
    """

    def __init__(
        self, namespace: dict[str, Any], problems: list[str] | None, to: Destination
    ) -> None:
        self.pickler = ValuePickler(namespace, to)
        self.captured: list[Captured] = []
        self.modules: list[ModuleType] = []
        self._namespace = namespace
        self._problems = problems
        self._met: set[str] = set()
        self.only: Collection[str] | None = None
        """Names of the only variables that are pickled; None for no restriction."""

    def pickle_variables(self, names: Mapping[str, str]) -> None:
        """Pickle variables, given as name -> reason, that were not pickled before."""
        for name, why in names.items():
            if name in self._met or not self._travels(name):
                continue
            self._met.add(name)
            self.pickler.coming[name] = self._namespace[name]
            try:
                self._add(name, why)
            except CaptureError as error:
                self.refuse(error)
            finally:
                del self.pickler.coming[name]

    def refuse(self, error: CaptureError) -> None:
        """Raise `error`, or append its message to `problems` if that list was given."""
        if self._problems is None:
            raise error
        self._problems.append(str(error))

    def _add(self, name: str, why: str) -> None:
        """Pickle a variable after the variables that pickling it shows to be needed.

        The order matters: code that runs while a value is loaded (`__setstate__`, `__hash__`)
        needs its globals.
        """
        value = self._namespace[name]
        if isinstance(value, FunctionType) and value.__globals__ is self._namespace:
            self.pickle_variables(
                dict.fromkeys(sorted(code_use(value.__code__).names), why_used_by(name))
            )
        with self.pickler.undoing() as undo:
            size_bytes, needs = self._pickle(name, value, why)
            missing = [need for need in needs if need not in self._met and self._travels(need)]
            if missing:
                undo()
        if missing:
            self.pickle_variables(dict.fromkeys(missing, why_used_by(name)))
            size_bytes, _ = self._pickle(name, value, why)
        self.captured.append(Captured(name, size_bytes, why, type_name(value)))
        if isinstance(value, ModuleType):
            self.modules.append(value)

    def _pickle(self, name: str, value: Any, why: str) -> tuple[int, list[str]]:
        self.pickler.needs.clear()
        size_bytes = self.pickler.pickle_variable(name, value, note="" if why == THE_CELL else why)
        return size_bytes, list(self.pickler.needs)

    def _travels(self, name: str) -> bool:
        is_chosen = self.only is None or name in self.only
        return is_chosen and is_users(name, self._namespace)


def is_users(name: str, namespace: Mapping[str, Any]) -> bool:
    """Return whether a name is a variable that the user set in the notebook."""
    return name in namespace and not belongs_to_ipython(name, namespace)


def belongs_to_ipython(name: str, namespace: Mapping[str, Any]) -> bool:
    """Return whether a variable is IPython's or Python's own, and not set by the user."""
    value = namespace[name]
    if name in _MODULE_NAMES or name in _HISTORY:
        return True
    if name in _SHELL_NAMES:  # the `__module__` of IPython's `open` is `io`
        scope = getattr(value, "__globals__", {})
        owners = (getattr(value, "__module__", ""), type(value).__module__, scope.get("__name__"))
        return any(str(it).partition(".")[0] in ("IPython", "ipykernel") for it in owners)
    if name in ("In", "Out"):
        return value is namespace.get("_ih" if name == "In" else "_oh")
    if _INPUT.fullmatch(name):
        return isinstance(value, str) and (not value or value in namespace.get("_ih", ()))
    if _OUTPUT.fullmatch(name):
        shown = namespace.get("_oh", {}).values()
        return any(value is item for item in shown) or (isinstance(value, str) and not value)
    return False


_LISTED = 3


@dataclass(frozen=True)
class Cell:
    """A notebook cell as it runs on the ranks.

    Attributes:
        source: Text that runs, without the `%%taas` line; may contain IPython syntax.
        filename: File name under which the kernel compiles this cell.
        raw: Whole text of the cell, as the user sees it.
        line_offset: Number of lines of `raw` above `source`, such as the `%%taas` line.
        execution_count: Number of the cell in the notebook; None if it has none yet.
        compiler_flags: Compiler flags set by `from __future__` imports of earlier cells.
        title: Name in tracebacks of a cell that is not in the notebook; "" for a notebook's cell.
    """

    source: str
    filename: str
    raw: str
    line_offset: int = 0
    execution_count: int | None = None
    compiler_flags: int = 0
    title: str = ""

    @property
    def label(self) -> str:
        """Name of the cell in tracebacks, such as `Cell In[5]`."""
        return self.title or f"Cell In[{self.execution_count or '?'}]"

    @property
    def lines_above(self) -> int:
        """Number of lines of `raw` above the first line of code.

        IPython drops empty lines at the start of `source`.
        """
        dropped = self.source[: len(self.source) - len(self.source.lstrip())]
        return self.line_offset + dropped.count("\n")


class CellSource(NamedTuple):
    """Text of a cell, and its name in tracebacks (`Cell In[5]`)."""

    text: str
    label: str


class Contents(Struct, frozen=True, kw_only=True):
    """Description of a payload that can be read without unpickling any value.

    Attributes:
        captured: Captured variables, each after the variables that it needs.
        modules: The project's own modules, by name.
        sources: Texts of this cell and of the cells that defined captured functions, by filename.
        submodules: Installed modules that the cell uses only as attributes of a package, such as
            `xml.dom` after `import xml.dom` in the notebook.
        stores: Names that the cell, or a captured function, sets or deletes.
        updates: Subset of `stores`: names that the cell sets from their own value (`total += 1`),
            or that a captured function sets.
    """

    cell: Cell
    captured: tuple[Captured, ...]
    stores: frozenset[str]
    updates: frozenset[str]
    modules: dict[str, ModuleSource]
    sources: dict[str, CellSource]
    submodules: tuple[str, ...]

    @property
    def kept(self) -> frozenset[str]:
        """Captured names that nothing in a rank assigns, so that they keep the notebook's value."""
        return frozenset(captured.name for captured in self.captured) - self.stores


class Payload(Contents, frozen=True, kw_only=True):
    """Everything that the ranks of a run get from the notebook.

    Attributes:
        requires: Top-level modules that must be installed on every host that runs the cell.
        loaders: The registered loaders that the cell uses, packed, by name.
        notes: Notes for the user about objects that are not sent to the ranks.
        data: The pickled process state of the notebook, then the values in the order of
            `captured`, with their buffers.
        choice: Variables that are sent to the ranks of a session; None outside of sessions.
        state: Process state of the notebook, also if the ranks of a session have it already.
    """

    requires: tuple[str, ...]
    loaders: dict[str, Any]
    notes: tuple[str, ...]
    data: Pickled
    choice: VariablesToSend | None = None
    state: process_state.State

    @property
    def size_bytes(self) -> int:
        """Size of the values, process state and modules; must not exceed `[capture] limit`."""
        return self.data.size_bytes + sum(len(m.source) for m in self.modules.values())


@dataclass(frozen=True)
class Settings:
    """The project's modules and the notebook's process state, without the notebook's variables.

    Attributes:
        modules: Modules of the project, by name.
        state: The notebook's process state; empty if a session's ranks have it already.
    """

    modules: Mapping[str, ModuleSource]
    state: process_state.State

    def apply(self) -> None:
        """Apply the settings to this process, which runs registered loaders but no cell."""
        install(self.modules)
        process_state.apply_filters(self.state)
        process_state.apply(process_state.without_device(self.state))


class LoadedPayload(Contents, frozen=True, kw_only=True):
    """A payload that a rank has read; the user's values are not unpickled yet."""

    archive: Archive

    def load_settings(self) -> Settings:
        """Install the project's modules, and return them with the notebook's process state."""
        install(self.modules)
        state = next(load_each(self.archive.stream(), self.archive.buffers, {}))
        return Settings(self.modules, state)

    def load_into(self, namespace: dict[str, Any]) -> None:
        """Apply the notebook's process state and load the captured values into `namespace`.

        Call it once per payload, immediately before the cell, as it may seed torch. Values are
        writable. They share the file's pages with the other ranks of the host until written to.

        Args:
            namespace: The rank's namespace; must be `sys.modules["__main__"].__dict__`.

        Raises:
            ImportError: A module that a value needs is not installed on this host.
        """
        install(self.modules)
        values = load_each(self.archive.stream(), self.archive.buffers, namespace)
        state = next(values)
        process_state.apply_filters(state)
        for name in self.submodules:
            importlib.import_module(name)
        for captured, value in zip(self.captured, values, strict=False):
            namespace[captured.name] = value
        process_state.apply(state)

    def watch(self, namespace: Mapping[str, Any], out: Collection[str]) -> Watch:
        """Return a `Watch` that finds the captured values that the cell changes.

        Call it after `load_into`.

        Args:
            namespace: The rank's namespace.
            out: Names in `--out`, which come back anyway.
        """
        by_size = sorted(self.captured, key=lambda captured: captured.size_bytes)
        values = {captured.name: namespace[captured.name] for captured in by_size}
        return Watch(values, out, self.stores, self.updates)


def cell_number(shell: "InteractiveShell", filename: str) -> int | None:
    """Return the number of the cell that the kernel compiled as `filename`; None for other code."""
    label = shell.compile.format_code_name(filename)
    found = re.fullmatch(r"In\[(\d+)\]", label[1]) if label else None
    return int(found[1]) if found else None


def capture(
    cell: Cell,
    namespace: dict[str, Any],
    *,
    transform: Callable[[str], str],
    project: Path,
    limit_bytes: int,
    source_of: Callable[[str], CellSource | None],
    problems: list[str] | None = None,
    to: Destination = "ranks",
    known: RankNames | None = None,
    send: Collection[str] = (),
) -> Payload:
    """Find and pickle the notebook objects that a cell uses; runs in the kernel.

    Args:
        cell: The cell.
        namespace: The notebook's own dict, not a copy: functions of the notebook are recognised
            by having it as their globals.
        transform: Function that converts IPython syntax to Python
            (`InteractiveShell.transform_cell`).
        project: The notebook's folder.
        limit_bytes: Limit on the payload's size.
        source_of: Function that returns the text of the cell that the kernel compiled under a
            filename, or None if the file is no cell.
        problems: List that receives the messages of refused values instead of an exception, so
            that --dry-run can report all of them.
        to: Destination of the values. Registered loaders are sent to `jobs` unchanged.
        known: Record of the variables that the session's ranks have; None if the ranks are new.
        send: Names whose values are sent to a session's ranks although its cells have assigned
            them.

    Raises:
        CaptureError: A value cannot travel (the message has the path to it), the values are too
            large, or a module cannot be read. With `problems`, only the last is raised.
        SyntaxError: The cell is not Python.
    """
    gathering = _Gathering(namespace, problems, to)
    pickler, python = gathering.pickler, transform(cell.source)
    used = used_names(python, cell.filename)
    state, why, choice = process_state.collect(), used.why, None
    if known is not None:
        choice = known.choose(
            used,
            namespace,
            state,
            send=send,
            to=to,
            travels=lambda name: is_users(name, namespace),
            refuse=gathering.refuse,
        )
        gathering.only, why = choice.why, choice.why
    pickler.add(state if choice is None else choice.state)
    gathering.pickle_variables(why)
    modules = collect([*used.imports, *pickler.modules], project)
    found = {name: source_of(name) for name in sorted(pickler.filenames)}
    sources = {name: source for name, source in found.items() if source is not None}
    sources[cell.filename] = CellSource(cell.raw, cell.label)
    texts = [source.text for source in sources.values()]
    payload = Payload(
        cell=cell,
        captured=tuple(gathering.captured),
        stores=used.stores | pickler.stores,
        updates=frozenset(used.updates | pickler.stores),
        modules=modules,
        sources=sources,
        submodules=_submodules(gathering.modules, used.attributes),
        requires=needed_modules(python, pickler.modules, modules, texts),
        loaders=pickler.replaced,
        notes=(
            *patches(
                [*gathering.modules, *(sys.modules.get(name) for name in used.imports)],
                pickler.classes.values(),
                used.attributes | pickler.attributes,
                namespace,
                cell.source,
            ),
            *process_state.lost_loggers(),
        ),
        data=pickler.pickled(),
        choice=choice,
        state=state,
    )
    if payload.size_bytes > limit_bytes:
        gathering.refuse(_too_large(payload, limit_bytes))
    return payload


def write(payload: Payload, path: Path) -> None:
    """Write a payload atomically to a file that only its owner can read."""
    about = Contents(**{name: getattr(payload, name) for name in Contents.__struct_fields__})
    write_archive(path, payload.data, about)


def write_settings(payload: Payload, path: Path) -> None:
    """Write a payload's modules and the process state to a file, as a payload without variables."""
    pickler = ValuePickler({})
    pickler.add(payload.state)
    write(structs.replace(payload, captured=(), sources={}, data=pickler.pickled()), path)


def read(path: Path) -> LoadedPayload:
    """Read a payload without unpickling the user's values; the file may be removed afterwards.

    Raises:
        CaptureError: The file is no payload.
    """
    mapped = read_archive(path)
    about = unpack(mapped.meta, Contents)
    return LoadedPayload(**structs.asdict(about), archive=mapped)


def _submodules(modules: Iterable[ModuleType], attributes: set[str]) -> tuple[str, ...]:
    """Return the submodules that the cell uses only as attributes of a package.

    For example, the notebook ran `import xml.dom` and the cell uses `xml.dom`. The cell's variable
    is `xml`, and a rank that imports only `xml` would lack `xml.dom`.
    """
    packages = [module.__name__ for module in modules if hasattr(module, "__path__")]
    return tuple(
        name
        for package in packages
        for name in list(sys.modules)
        if name.startswith(f"{package}.")
        and attributes.issuperset(name[len(package) + 1 :].split("."))
    )


def _too_large(payload: Payload, limit_bytes: int) -> CaptureError:
    sizes = {f"`{captured.name}`": captured.size_bytes for captured in payload.captured}
    sizes |= {f"module {name}": len(it.source) for name, it in payload.modules.items()}
    sizes["the notebook's settings"] = payload.size_bytes - sum(sizes.values())
    biggest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:_LISTED]
    listed = ", ".join(f"{name} {size_text(sizes[name], 1024)}" for name in biggest)
    return CaptureError(
        f"the cell needs {size_text(payload.size_bytes, 1024)} of the notebook, more than "
        f"{size_text(limit_bytes, 1024)}: {listed}; load large data inside the cell, or raise "
        "`[capture] limit` in taas.toml"
    )
