"""Capture the work of a run and the notebook objects that it needs; write and read the payload."""

import importlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct, structs

from taas_magic.capture import process_state
from taas_magic.capture.changes import ChangeDetector
from taas_magic.capture.culprit import Destination, type_name
from taas_magic.capture.modules import (
    ModuleSource,
    edited_modules,
    find_local_modules,
    install_modules,
    needed_modules,
    notes_on_patches,
)
from taas_magic.capture.names import (
    THE_CELL,
    UsedNames,
    code_use,
    reason_used_by,
    used_names,
)
from taas_magic.capture.pickling import (
    Archive,
    Pickled,
    ValuePickler,
    load_each,
    read_archive,
    write_archive,
)
from taas_magic.capture.session_variables import RankVariables, VariablesToSend
from taas_magic.capture.work import (
    CallShape,
    CellWork,
    FunctionWork,
    Work,
    function_name,
)
from taas_magic.config import size_text
from taas_magic.errors import CaptureError
from taas_magic.messages import from_json

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
class CapturedVariable:
    """A captured variable of the notebook.

    Attributes:
        why: Reason for the variable's capture, for messages.
    """

    name: str
    size_bytes: int
    why: str
    type_name: str


class _NotebookPickler:
    """Pickler for variables of the notebook, and for the function and the arguments of a call.

    In the pickle, the variables that a value needs come before this value.

    Args:
        namespace: The notebook's namespace.
        problems: List that receives a message for each value that cannot be sent. If None, the
            first such value raises a CaptureError.
        to: Destination of the values, such as `ranks`.

    Attributes:
        captured: Records of the pickled variables.
        call: Records of the pickled function and arguments.
        modules: The modules among the pickled variables.
    """

    def __init__(
        self, namespace: dict[str, Any], problems: list[str] | None, to: Destination
    ) -> None:
        self.pickler = ValuePickler(namespace, to)
        self.captured: list[CapturedVariable] = []
        self.call: list[CapturedVariable] = []
        self.modules: list[ModuleType] = []
        self._namespace = namespace
        self._problems = problems
        self._visited: set[str] = set()
        self.only: Collection[str] | None = None
        """Names of the variables that may be pickled; None if all variables may be pickled."""

    def pickle_variables(self, names: Mapping[str, str]) -> None:
        """Pickle variables of the notebook, except those that are pickled already.

        Add each pickled variable to `captured`, and each module also to `modules`. If a value
        cannot be sent, pass the error to `report_problem`.

        Args:
            names: Reason for the capture of each variable, by name. Names that are no variables of
                the user are skipped.
        """
        for name, why in names.items():
            if name in self._visited or not self._travels(name):
                continue
            self._visited.add(name)
            self.pickler.pending_values[name] = self._namespace[name]
            try:
                self.captured.extend(self._add([(name, self._namespace[name])], why))
            except CaptureError as error:
                self.report_problem(error)
            finally:
                del self.pickler.pending_values[name]
            if isinstance(self._namespace[name], ModuleType):
                self.modules.append(self._namespace[name])

    def pickle_call(self, work: FunctionWork) -> None:
        """Pickle the function and the arguments of a call, and store their records in `call`.

        First pickle the notebook's variables that the function and the arguments need. If a value
        cannot be sent, pass the error to `report_problem`; `call` then stays as it is.
        """
        parts = [(function_name(work.function), work.function), *work.arguments()]
        try:
            self.call = self._add(parts, THE_CALL)
        except CaptureError as error:
            self.report_problem(error)

    def report_problem(self, error: CaptureError) -> None:
        """Append the message of `error` to the list `problems`; without a list, raise `error`."""
        if self._problems is None:
            raise error
        self._problems.append(str(error))

    def _add(self, values: Sequence[tuple[str, Any]], why: str) -> list[CapturedVariable]:
        """Pickle the variables that `values` need, then `values`. Return a record of each value.

        For a function of the notebook, first pickle the variables that the function's code uses.
        Then pickle the values, because only pickling shows which further variables they need. If
        the pickle lacks such a variable, remove the values, pickle the variable, and pickle the
        values again. The order matters: loading a value may run code that reads these variables
        (`__setstate__`, `__hash__`).

        Args:
            values: Pairs (name, value).
            why: Reason for the capture of the values, for messages.

        Raises:
            CaptureError: One of the values cannot be sent.
        """
        for name, value in values:
            if isinstance(value, FunctionType) and value.__globals__ is self._namespace:
                names = sorted(code_use(value.__code__).names)
                self.pickle_variables(dict.fromkeys(names, reason_used_by(name)))
        with self.pickler.rollback() as undo:
            captured, missing = self._pickle(values, why)
            if missing:
                undo()
        if missing:
            self.pickle_variables(missing)
            captured, _ = self._pickle(values, why)
        return captured

    def _pickle(
        self, values: Sequence[tuple[str, Any]], why: str
    ) -> tuple[list[CapturedVariable], dict[str, str]]:
        """Pickle values, and find the variables that the values need.

        Args:
            values: Pairs (name, value).
            why: Reason for the capture of the values, for messages.

        Returns:
            A list with a record of each value. And a dict of variables that the values need and
            that are not pickled yet: the reason for the capture of each variable, by name.

        Raises:
            CaptureError: A value cannot be sent.
        """
        captured: list[CapturedVariable] = []
        missing: dict[str, str] = {}
        note = "" if why in (THE_CELL, THE_CALL) else why
        for name, value in values:
            self.pickler.needs.clear()
            size_bytes = self.pickler.pickle_variable(name, value, note)
            captured.append(CapturedVariable(name, size_bytes, why, type_name(value)))
            needs = (
                it for it in self.pickler.needs if it not in self._visited and self._travels(it)
            )
            missing = {**dict.fromkeys(needs, reason_used_by(name)), **missing}
        return captured, missing

    def _travels(self, name: str) -> bool:
        is_chosen = self.only is None or name in self.only
        return is_chosen and is_user_variable(name, self._namespace)


def is_user_variable(name: str, namespace: Mapping[str, Any]) -> bool:
    """Return whether a name is a variable that the user set in the notebook."""
    return name in namespace and not belongs_to_ipython(name, namespace)


def belongs_to_ipython(name: str, namespace: Mapping[str, Any]) -> bool:
    """Return whether IPython or Python has set a variable of the notebook, such as `Out`.

    A user may give a name of IPython another value; the variable then belongs to the user. The
    result is True in these cases:

    - The name is a name such as `__name__` or `_ih`.
    - The name is a name such as `exit`, and the value comes from a module of IPython.
    - The name is `In` or `Out`, and the value is IPython's history.
    - The name is a name such as `_i1` or `_1`, and the value is in IPython's history, or is "".
    """
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


_MAX_LISTED = 3

THE_CALL = "the call uses it"


class CellSource(NamedTuple):
    """The text of a cell, and the cell's label in tracebacks, such as `Cell In[5]`."""

    text: str
    label: str


class PayloadDescription(Struct, frozen=True, kw_only=True):
    """The part of a payload that a process can read without unpickling any value.

    Attributes:
        captured: Captured variables, each after the variables that it needs.
        definitions: Texts of the cells that defined captured functions, by filename.
        submodules: Installed modules that the cell uses as attributes of a package, such as
            `xml.dom`.
        stores: Names that the work, or a captured function, sets or deletes.
        updates: Those names in `stores` that a captured function sets, or whose new value the cell
            computes from the old value (`total += 1`).
        parts: Name of the registered loader for each captured variable whose value is a part of the
            loader, such as the loader's dataset.
    """

    work: CellWork | CallShape
    captured: tuple[CapturedVariable, ...]
    stores: frozenset[str]
    updates: frozenset[str]
    modules: dict[str, ModuleSource]
    definitions: dict[str, CellSource]
    submodules: tuple[str, ...]
    parts: dict[str, str] = {}

    @property
    def sources(self) -> dict[str, CellSource]:
        """Texts of the run's cell and of the cells that defined captured functions, by filename."""
        if not isinstance(self.work, CellWork):
            return self.definitions
        return self.definitions | {self.work.filename: CellSource(self.work.raw, self.work.label)}

    @property
    def kept(self) -> frozenset[str]:
        """Names of the captured variables that the work does not set: they keep their values."""
        return frozenset(captured.name for captured in self.captured) - self.stores


class Payload(PayloadDescription, frozen=True, kw_only=True):
    """Everything that the ranks of a run get from the notebook.

    Attributes:
        requires: Top-level modules that must be installed on every host that runs the work.
        loaders: `PackedLoader` of each registered loader that the work uses, by name.
        call: Names and sizes of the function and the arguments of a call; empty for a cell.
        sets_any: Whether a captured function may set variables that its code does not name.
        data: A pickle of several values: the process state, the values in the order of `captured`,
            then a call's function and arguments.
        choice: Variables that are sent to the ranks of a session; None outside of sessions.
        state: The notebook's process state. In a session, `data` has only the settings that the
            ranks do not have yet.
        replaced: Variables of the notebook to which the cell assigns new values. Each name has the
            id of the notebook's value. Outside of sessions, values that the cell computes from the
            old value are left out, because `ChangeDetector` reports them.
    """

    requires: tuple[str, ...]
    loaders: dict[str, Any]
    notes: tuple[str, ...]
    data: Pickled
    call: tuple[CapturedVariable, ...] = ()
    sets_any: bool = False
    choice: VariablesToSend | None = None
    state: process_state.State
    replaced: dict[str, int] = {}

    @property
    def size_bytes(self) -> int:
        """Size of the payload in bytes; the setting `[capture] limit` limits this size."""
        return self.data.size_bytes + sum(len(m.source) for m in self.modules.values())


@dataclass(frozen=True)
class FetcherSettings:
    """The project's modules and the process state, which a process needs to run registered loaders.

    Attributes:
        modules: Sources of the project's modules, by name.
        state: The notebook's process state. In a session, only the settings that have changed since
            the last cell.
    """

    modules: Mapping[str, ModuleSource]
    state: process_state.State

    def apply(self) -> None:
        """Make the project's modules importable in this process, and apply the process state.

        Call this method in a fetcher or a data server. The method does not apply torch's default
        device. With this device, the dataset would create tensors on the GPU, which fails in forked
        processes.
        """
        install_modules(self.modules)
        process_state.apply_filters(self.state)
        process_state.apply(process_state.without_device(self.state))


class LoadedPayload(PayloadDescription, frozen=True, kw_only=True):
    """A payload that a rank has read from a file; `load_into` unpickles the user's values."""

    archive: Archive

    def load_settings(self) -> FetcherSettings:
        """Make the project's modules importable; return the modules and the process state."""
        install_modules(self.modules)
        state = next(load_each(self.archive.stream(), self.archive.buffers, {}))
        return FetcherSettings(self.modules, state)

    def load_into(self, namespace: dict[str, Any]) -> Work:
        """Set the captured variables in `namespace`, apply the process state, and return the work.

        Do these steps in this order:

        - Make the project's modules importable, and apply the warning filters.
        - Import the submodules that the cell uses.
        - Load the variables, then the function and arguments of a call.
        - Apply the rest of the process state.

        Call this method once per payload, immediately before the work runs, because the process
        state may seed torch. The rank may change the values in place: the payload's file stays the
        same.

        Args:
            namespace: The rank's namespace; must be `sys.modules["__main__"].__dict__`.

        Raises:
            ImportError: A module that a value needs is not installed on this host.
            Exception: The code of a variable's class failed while the variable was loaded. A note
                of the exception names the variable.
        """
        install_modules(self.modules)
        values = load_each(self.archive.stream(), self.archive.buffers, namespace)
        state = next(values)
        process_state.apply_filters(state)
        for name in self.submodules:
            importlib.import_module(name)
        for captured in self.captured:
            try:
                namespace[captured.name] = next(values)
            except Exception as error:
                if hasattr(error, "add_note"):  # from Python 3.11 on
                    error.add_note(f"while loading the notebook's variable `{captured.name}`")
                raise
        shape = self.work
        work = shape if isinstance(shape, CellWork) else shape.with_values(next(values), values)
        process_state.apply(state)
        return work

    def change_detector(
        self, namespace: Mapping[str, Any], out: Mapping[str, str]
    ) -> ChangeDetector:
        """Return an object that finds the captured values that the cell changes.

        Call this method after `load_into`, and before the cell runs.

        Args:
            namespace: The namespace into which `load_into` has loaded the values.
            out: Values of `--out`, by the variable's name. Of these variables, only classes are
                compared, because the other values return to the notebook.
        """
        by_size = sorted(self.captured, key=lambda captured: captured.size_bytes)
        values = {captured.name: namespace[captured.name] for captured in by_size}
        is_call = not isinstance(self.work, CellWork)
        return ChangeDetector(values, out, self.stores, self.updates, self.parts, is_call)


def cell_number(shell: "InteractiveShell", filename: str) -> int | None:
    """Return the number of the cell that the kernel compiled as `filename`; None for other code."""
    label = shell.compile.format_code_name(filename)
    found = re.fullmatch(r"In\[(\d+)\]", label[1]) if label else None
    return int(found[1]) if found else None


def capture(
    work: Work,
    namespace: dict[str, Any],
    *,
    project: Path,
    limit_bytes: int,
    source_of: Callable[[str], CellSource | None],
    problems: list[str] | None = None,
    to: Destination = "ranks",
    known: RankVariables | None = None,
    send: Collection[str] = (),
    needs: Collection[str] = (),
    imports: Collection[str] = (),
) -> Payload:
    """Find and pickle the notebook objects that a cell or a function uses. Runs in the kernel.

    The payload also contains the notebook's process state, and the source of each project module
    that the work uses. In a session, `RankVariables.choose` selects the variables to send, and the
    modules include those that were edited since the ranks got them. The payload lists the packages
    that hosts need, and has notes for the user.

    Args:
        namespace: The notebook's own dict, not a copy. A function whose globals are this dict
            counts as a function of the notebook.
        source_of: Function that returns the cell that the kernel compiled under a filename; None if
            there is no such cell.
        problems: List that receives the messages of refused values, so that `--dry-run` can report
            all of them. If None, the first refused value raises CaptureError.
        to: Destination of the values. `ranks` get a remote loader in place of a registered loader;
            `jobs` get the loader itself.
        known: Record of the variables that the session's ranks have; None if the ranks are new.
        send: Names in `--send`. They are sent to the ranks of a session, even if cells of the
            session have assigned them.
        needs: Names of variables to capture in addition to those that the work uses.
        imports: Names of modules in addition to those that the work imports. If such a module
            belongs to the project, its source is captured.

    Raises:
        CaptureError: A value cannot be sent (the message has the path to it), the payload has more
            than `limit_bytes` bytes, or a module cannot be read. If `problems` is given, only a
            module that cannot be read raises the error.
        SyntaxError: The cell is not Python.
    """
    gathering = _NotebookPickler(namespace, problems, to)
    pickler, used = gathering.pickler, _used_by(work)
    shape = work if isinstance(work, CellWork) else work.shape
    state, why, choice = process_state.collect(), used.why, None
    if known is not None:
        choice = known.choose(
            used,
            namespace,
            state,
            send=send,
            to=to,
            is_user_variable=lambda name: is_user_variable(name, namespace),
            refuse=gathering.report_problem,
        )
        gathering.only, why = choice.why, choice.why
        pickler.at_receiver, pickler.updated = choice.at_ranks, choice.updated
    pickler.add(state if choice is None else choice.changed_state)
    gathering.pickle_variables({**why, **dict.fromkeys(needs, THE_CALL)})
    if isinstance(work, FunctionWork):
        gathering.pickle_call(work)
    edited = edited_modules(known.modules) if known is not None else ()
    modules = find_local_modules([*used.imports, *imports, *edited, *pickler.modules], project)
    if choice is not None:
        choice.modules = modules
    definitions = _definitions(pickler.filenames, source_of)
    texts = [work.raw, *(source.text for source in definitions.values())]
    reported = used.updates if choice is None else set()
    payload = Payload(
        work=shape,
        captured=tuple(gathering.captured),
        stores=used.stores | pickler.stores,
        updates=frozenset(used.updates | pickler.stores),
        modules=modules,
        definitions=definitions,
        submodules=_submodules(gathering.modules, used.attributes),
        parts=_parts_of_loaders(gathering.captured, pickler.replaced, namespace),
        requires=needed_modules(shape.python, pickler.modules, modules, texts),
        loaders=pickler.replaced,
        notes=_notes(work, gathering, used, namespace, state),
        data=pickler.pickled(),
        call=tuple(gathering.call),
        sets_any=pickler.sets_any,
        choice=choice,
        state=state,
        replaced={
            name: id(namespace[name])
            for name in used.assigned.keys() - reported
            if is_user_variable(name, namespace) and used.assigns_new_value(name, namespace[name])
        },
    )
    if payload.size_bytes > limit_bytes:
        gathering.report_problem(_too_large(payload, limit_bytes))
    return payload


def _used_by(work: Work) -> UsedNames:
    """Return the notebook names that the text of a cell uses; no names for a call.

    For a call, the pickler finds the names later, when it pickles the function.
    """
    if not isinstance(work, CellWork):
        return UsedNames(frozenset())
    return used_names(work.python, work.filename)


def _parts_of_loaders(
    captured: Iterable[CapturedVariable], loaders: Mapping[str, Any], namespace: Mapping[str, Any]
) -> dict[str, str]:
    """Return the loader's name for each captured variable that is a part of a registered loader.

    Args:
        loaders: `PackedLoader` of each registered loader that the work uses, by name.
    """
    return {
        variable.name: loader
        for variable in captured
        for loader, packed in loaders.items()
        if any(namespace[variable.name] is part for part in packed.parts)
    }


def _definitions(
    filenames: Iterable[str], source_of: Callable[[str], CellSource | None]
) -> dict[str, CellSource]:
    """Return the text and label of each file that is a cell, by filename; skip other files."""
    found = {name: source_of(name) for name in sorted(filenames)}
    return {name: source for name, source in found.items() if source is not None}


def _notes(
    work: Work,
    gathering: _NotebookPickler,
    used: UsedNames,
    namespace: Mapping[str, Any],
    state: process_state.State,
) -> tuple[str, ...]:
    """Return notes for the user about functions and log handlers that the ranks do not get.

    These are functions that the notebook has put into modules or classes (`notes_on_patches`), and
    log handlers that cannot be copied (`lost_loggers`).
    """
    pickler = gathering.pickler
    replaced = notes_on_patches(
        [*gathering.modules, *(sys.modules.get(name) for name in used.imports)],
        pickler.classes.values(),
        used.attributes | pickler.attributes,
        namespace,
        work.source if isinstance(work, CellWork) else "",
    )
    return (*replaced, *process_state.lost_loggers(state))


def write(payload: Payload, path: Path) -> None:
    """Write a payload atomically to a file that only its owner can read."""
    about = PayloadDescription(
        **{name: getattr(payload, name) for name in PayloadDescription.__struct_fields__}
    )
    write_archive(path, payload.data, about)


def write_settings(payload: Payload, path: Path) -> None:
    """Write a payload file for fetchers.

    The file has the project's modules and the process state. It has no values of captured
    variables, and no texts of cells that defined captured functions.
    """
    pickler = ValuePickler({})
    pickler.add(payload.state)
    write(structs.replace(payload, captured=(), definitions={}, data=pickler.pickled()), path)


def read(path: Path) -> LoadedPayload:
    """Map a payload file into memory, and decode its description, but no value of the user.

    The payload stays readable if the file is removed.

    Raises:
        CaptureError: The file is no payload.
    """
    mapped = read_archive(path)
    about = from_json(mapped.meta, PayloadDescription)
    return LoadedPayload(**structs.asdict(about), archive=mapped)


def _submodules(modules: Iterable[ModuleType], attributes: set[str]) -> tuple[str, ...]:
    """Return the names of imported submodules that the work may use as attributes of a package.

    For example, the notebook ran `import xml.dom`, which sets the variable `xml`. A rank that loads
    this variable imports only `xml`. So the rank must import `xml.dom`, too.

    Args:
        modules: The modules among the captured variables.
        attributes: Attribute names that the work looks up.
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
    """Return the error for a payload above the limit, with advice for the user.

    The message names the `_MAX_LISTED` largest parts. Parts are captured variables, a call's
    function and arguments, project modules, and the notebook's settings.
    """
    sizes = Counter[str]()
    for part in (*payload.captured, *payload.call):
        sizes[f"`{part.name}`"] += part.size_bytes
    sizes.update({f"module {name}": len(it.source) for name, it in payload.modules.items()})
    sizes["the notebook's settings"] = payload.size_bytes - sum(sizes.values())
    listed = ", ".join(
        f"{name} {size_text(size_bytes, 1024)}"
        for name, size_bytes in sizes.most_common(_MAX_LISTED)
    )
    what = "cell" if isinstance(payload.work, CellWork) else "function"
    return CaptureError(
        f"the {what} needs {size_text(payload.size_bytes, 1024)} of the notebook, more than "
        f"{size_text(limit_bytes, 1024)}: {listed}; load large data inside the {what}, or raise "
        "`[capture] limit` in taas.toml"
    )
