"""Pickle results in a rank, and connect them to the notebook's namespace when they are loaded.

A function in a result gets the notebook's namespace as its globals. The rank sends the function
together with the cell's variables that the function uses. The kernel sets these variables in the
notebook, unless the notebook already has a variable of the same name.
"""

import builtins
import io
import mmap
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pickle import PickleBuffer
from types import FunctionType
from typing import Any, NamedTuple

from taas_magic.capture.culprit import make_capture_error
from taas_magic.capture.pickling import ValuePickler, is_importable, load_each, must_stay_shared
from taas_magic.capture.reducers import LruCache, is_same_code, notebooks_own


@dataclass(frozen=True)
class RankNamespace:
    """The namespace of a rank, and the names in it that still have the notebook's values.

    Attributes:
        names: Namespace of the rank's `__main__`: the values by name.
        kept: Names that came from the notebook and that no code of the work assigns.
    """

    names: dict[str, Any] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()

    def is_set_by_cell(self, name: str) -> bool:
        """Return whether the cell has set a variable `name`; False for names such as `__doc__`."""
        return name in self.names and name not in self.kept and not name.startswith("__")


class SentVariable(NamedTuple):
    """A variable of the cell that a rank sends to the notebook because a result needs the variable.

    Attributes:
        owner: Name of the result that needs the variable: a variable of `--out`, or
            `work.VALUE` for the value of the last expression.
    """

    name: str
    value: Any
    owner: str


@dataclass
class LoadedResults:
    """Results loaded in the notebook.

    Attributes:
        notes: Notes for the user about variables of the cell that were not set in the notebook.
    """

    values: dict[str, Any]
    notes: list[str] = field(default_factory=list)


class ResultPickler(ValuePickler):
    """Pickler for a rank's results, and for the cell's variables that the results use.

    The pickle has each variable before the results that use the variable.

    Attributes:
        scope: The namespace of the rank.
        problems: Messages about the variables that could not be pickled, by name of the variable.
    """

    def __init__(self, scope: RankNamespace) -> None:
        super().__init__(scope.names, "notebook")
        self.scope = scope
        self.problems: dict[str, str] = {}
        self._visited: set[str] = set()

    def add_results(self, values: Mapping[str, Any]) -> None:
        """Add a dict of results to the pickle, after the cell's variables that the results use.

        The order matters: loading a result may run code that reads these variables.

        Args:
            values: The results by name; must not be empty.
        """
        self._visited |= values.keys()
        self._add_after_needs(lambda: dict(values), next(iter(values)))

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an object of a result. Called by pickle.

        Some objects came from the notebook, and the cell cannot have changed them (`_kept_name`).
        An example is a function of the notebook. For such an object, the pickle contains the name
        of the notebook's variable, and a copy. The copy is loaded if the notebook lacks the
        variable, or has defined the function anew.
        """
        name = self._kept_name(obj)
        if name is None:
            return super().reducer_override(obj)
        return notebooks_own, (name, self.pickle_copy(obj))

    def shared_objects(self) -> dict[int, Any]:
        """Return the pickled objects that other results may also contain, by id.

        These are storages, objects that can change in place, closure cells, and functions that
        cannot be imported. Results that contain the same object must be in one pickle. Otherwise
        the notebook would get two copies of the object. The caller must keep the returned dict
        until it has compared the ids, because Python reuses the id of a freed object.
        """
        memo: dict[int, tuple[int, Any]] = self.memo.copy()
        shared = {key: held for key, (_, held) in memo.items() if _is_shared(held)}
        return {**super().shared_objects(), **shared, **self.pickled_cells}

    def _add_after_needs(self, value: Callable[[], Any], owner: str) -> None:
        """Add the cell's variables that a value needs, then add the value.

        Only pickling the value shows which variables the value needs. So this method first adds the
        value. If the pickle lacks some of the needed variables, this method removes the value, adds
        these variables, and adds the value again. If a variable cannot be pickled, this method
        records a message in `problems`.

        Args:
            value: Function that returns the value to add.
            owner: Name of the result that needs the variables.
        """
        with self.rollback() as undo:
            self.needs.clear()
            self.add(value())
            missing = [
                n for n in self.needs if n not in self._visited and self.scope.is_set_by_cell(n)
            ]
            if missing:
                undo()
        for name in missing:
            self._add_needed(name, owner)
        if missing:
            self.add(value())

    def _add_needed(self, name: str, owner: str) -> None:
        """Add a variable of the cell, after the variables that its value needs.

        Do nothing if the variable was added before. If the value cannot be pickled, record a
        message in `problems`.

        Args:
            owner: Name of the result that needs the variable.
        """
        if name in self._visited:
            return
        self._visited.add(name)
        value = self.pending_values[name] = self.scope.names[name]
        try:
            self._add_after_needs(lambda: SentVariable(name, value, owner), owner)
        except Exception as error:  # pickling runs the user's code: anything may be raised
            why = make_capture_error(name, value, self.probe, error, to="notebook")
            self.problems[name] = f"`{owner}` uses `{name}`, which could not be returned: {why}"
        finally:
            del self.pending_values[name]

    def _kept_name(self, obj: Any) -> str | None:
        """Return the notebook's variable name of an object that need not be sent back, else None.

        An object need not be sent back if two conditions hold:

        - The object is the value of a variable in `scope.kept`, so the notebook still has the same
          object. For a function, only the variable with the function's own name counts.
        - The cell cannot have changed the object: it is a sentinel (an instance of `object`
          itself), a function without state, or a function with `functools.lru_cache`.
        """
        kind, scope = type(obj), self.scope
        if kind is object:  # a sentinel: code compares it by identity
            return next((n for n in scope.kept if scope.names.get(n) is obj), None)
        if kind is not LruCache and not (kind is FunctionType and _is_stateless(obj)):
            return None
        name = str(obj.__name__)
        return name if name in scope.kept and scope.names.get(name) is obj else None


def _is_stateless(function: FunctionType) -> bool:
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    plain = (type(None), bool, int, float, str, bytes, object, type, FunctionType)
    is_plain = all(type(each) in plain for each in defaults)
    return not function.__closure__ and not vars(function) and is_plain


def _is_shared(value: Any) -> bool:
    """Return whether the notebook must get only one copy of `value`, if several results contain it.

    True for objects that can change in place, and for functions that cannot be imported.
    """
    if isinstance(value, FunctionType | LruCache):
        return not is_importable(value)
    return must_stay_shared(value)


class _SetVariable(NamedTuple):
    """A variable of the notebook that a reader of results has set."""

    value: Any
    reader: "ResultsReader"


_set_with_results: dict[str, _SetVariable] = {}
"""The notebook's variables that readers of results have set, by name.

The results of a later run may replace these variables, but no other variables of the notebook.
"""


def came_with_result(name: str, value: Any) -> bool:
    """Return whether a reader of results has set the notebook's variable `name` to `value`.

    False for variables of `--out`.
    """
    known = _set_with_results.get(name)
    return known is not None and known.value is value


class ResultsReader:
    """Reader of the results of one run, which connects them to the notebook's namespace.

    To read the results of the same run again, create another reader.

    Args:
        run_id: Id of the run; the ids of later runs are greater.
        namespace: Namespace of the notebook.
    """

    def __init__(self, run_id: str, namespace: dict[str, Any]) -> None:
        self._run_id, self._namespace = run_id, namespace

    def load(
        self,
        stream: io.BytesIO | mmap.mmap,
        buffers: Sequence[PickleBuffer | memoryview],
        out: Collection[str] = (),
    ) -> LoadedResults:
        """Load the results of one `ResultPickler`.

        The rank sends the results together with variables of the cell that the results use. This
        method sets these variables in the namespace, except in two cases:

        - The notebook has a variable of this name, and its value does not come from this reader or
          from the results of an earlier run.
        - The name is the name of a builtin, and the notebook has no variable of this name.

        In these cases, the namespace stays as it is. If the rank's value differs from the
        notebook's value, the result of this method contains a note about the variable. There is no
        note in two cases:

        - The rank sent the variable because the value of the cell's last expression, or of the
          call, uses the variable.
        - The notebook's value comes from another reader of the same run.

        Args:
            buffers: Out-of-band buffers of the pickle: the memory of arrays and tensors.
            out: Names in `--out`. The caller sets these variables after this call, so there are no
                notes about them.

        Raises:
            EOFError: The pickle ends before the results.
        """
        notes: list[str] = []
        namespace = self._namespace
        for loaded in load_each(stream, buffers, namespace):
            if not isinstance(loaded, SentVariable):
                return LoadedResults(loaded, notes)
            name, value, owner = loaded
            is_free = name not in namespace and not hasattr(builtins, name)
            known = _set_with_results.get(name)
            if known is not None and namespace.get(name, known) is known.value:
                is_free = known.reader is self or known.reader._run_id < self._run_id
                if not is_free and known.reader._run_id == self._run_id:
                    continue
            if is_free:
                namespace[name] = value
                _set_with_results[name] = _SetVariable(value, self)
            elif owner.isidentifier() and name not in out:
                here = namespace.get(name)
                if not _is_same(here, value):
                    notes.append(
                        f"{owner} uses {name}, which the cell changed; the notebook keeps its own "
                        f"value ({reprlib.repr(here)}): --out {owner},{name} returns the cell's"
                    )
        raise EOFError("the results file is incomplete")


def _is_same(here: Any, there: Any) -> bool:
    """Return whether a value of the notebook equals a value of a rank.

    - Values of different types count as different, even `1` and `1.0`.
    - Two functions are equal if their code is equal (`is_same_code`). Defaults and closures are
      not compared.
    - Other values are compared by `==`. If this comparison raises an error, or has no single truth
      value (as for tensors), the values count as different.

    Args:
        here: Value of the notebook's variable.
        there: Value of the same variable in a rank.
    """
    if here is there:
        return True
    if type(here) is not type(there):
        return False
    if isinstance(here, FunctionType):
        return is_same_code(here.__code__, there.__code__)
    try:
        return bool(here == there)
    except Exception:  # raised for tensors, arrays and data frames, or by the user's `__eq__`
        return False
