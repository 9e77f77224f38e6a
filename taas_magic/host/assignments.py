"""Find the names that a cell of a session has assigned or deleted on a rank."""

import math
import traceback
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.nn import Parameter

from taas_magic.capture.digest import simple_digest
from taas_magic.capture.names import assigned_names
from taas_magic.capture.syntax import parse, without_warnings
from taas_magic.capture.work import CellWork, Work
from taas_magic.messages import CellNames


class Assignments:
    """Record of a rank's variables before a cell, to find what the cell assigns and deletes.

    The record does not keep the values alive.

    Args:
        work: The cell's work; None if this rank does not take part in the cell.
        values: The user's variables before the cell, by name.

    Attributes:
        in_text: Names that the cell's text assigns. Empty if the work is a function call, or if the
            text has a syntax error.
    """

    def __init__(self, work: Work | None, values: Mapping[str, Any]) -> None:
        self._work = work
        self.in_text = _assigned_by(work)
        self._ids = {name: id(value) for name, value in values.items()}
        self._before = {
            name: _ValueBefore.of(value) for name, value in values.items() if name in self.in_text
        }

    def find(self, values: Mapping[str, Any], error: BaseException | None) -> CellNames:
        """Return the names that the cell has assigned or deleted.

        A name counts as assigned in two cases:

        - Its value has another `id` than before.
        - The cell's text assigns the name. Python may have reused the `id` of a freed value. But if
          an exception ended the cell, the statement with the exception and those below it count
          only if the value is another object.

        The result also has a digest for each assigned name with a simple value.

        Args:
            values: The user's variables after the cell, by name.
            error: The exception that ended the cell; None if there is none.
        """
        in_text = self.in_text
        if error is not None:
            completed = _assigned_by(self._work, _line_of(self._work, error))
            changed = {
                name
                for name in in_text
                if name not in values
                or name not in self._before
                or not self._before[name].is_value(values[name])
            }
            in_text = completed | changed
        assigned = [
            name
            for name, value in values.items()
            if name in in_text or self._ids.get(name) != id(value)
        ]
        digests = {name: simple_digest(values[name]) for name in assigned}
        return CellNames(
            assigned=assigned,
            deleted=[name for name in self._ids if name not in values],
            plain={name: digest for name, digest in digests.items() if digest},
        )


@dataclass(frozen=True)
class _ValueBefore:
    """Record of a variable's value before a cell. The record does not keep the value alive.

    Python may reuse the `id` of a freed value. So the record also has a weak reference, if the
    value's type allows one, and the digest of a simple value.
    """

    id: int
    reference: "weakref.ref[Any] | None"
    digest: str

    @classmethod
    def of(cls, value: Any) -> "_ValueBefore":
        reference = None
        # torch refuses to swap a parameter that has a weak reference (`torch.utils.swap_tensors`).
        if not isinstance(value, Parameter):
            with suppress(TypeError):  # a type such as int does not allow weak references
                reference = weakref.ref(value)
        return cls(id(value), reference, simple_digest(value))

    def is_value(self, value: Any) -> bool:
        """Return whether `value` is the recorded object, and has its digest."""
        if self.reference is not None:
            return self.reference() is value
        return self.id == id(value) and self.digest == simple_digest(value)


def _assigned_by(work: Work | None, end: float = math.inf) -> set[str]:
    """Return the names that a cell's text assigns.

    Args:
        end: Use only the top-level statements of `CellWork.python` that end above this line.
    """
    if isinstance(work, CellWork):
        with suppress(SyntaxError), without_warnings():  # reported when the cell runs
            module = parse(work.python)
            module.body = [one for one in module.body if (one.end_lineno or 0) < end]
            return assigned_names(module)
    return set()


def _line_of(work: Work | None, error: BaseException) -> int:
    """Return the line of `CellWork.python` where an exception ended the cell; 0 if not known."""
    if isinstance(work, CellWork):
        for frame, line in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == work.filename:
                return line - work.lines_above
    return 0
