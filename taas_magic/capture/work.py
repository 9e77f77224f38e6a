"""The work of a run: a cell of the notebook, or a call of a function.

The kernel captures the work (`capture/payload.py`), and each rank runs it (`host/rank.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

VALUE = "<value>"
"""Name of the work's own value among the results of a run; no variable can have this name.

The value is the return value of the function, or the value of the cell's last expression. If
`--out` contains this name and the value cannot be returned, the run raises `ResultError`.
"""

VALUES = f"{VALUE}@all"
"""Entry of `--out` that requires the work's own value of every rank."""


class CellWork(Struct, frozen=True, tag="cell"):
    """A notebook cell as it runs on the ranks.

    Attributes:
        raw: Whole text of the cell, as the user sees it.
        python: Python code that runs on the ranks: `source`, transformed by the kernel's IPython.
        filename: File name under which the kernel compiles this cell.
        line_offset: Number of lines of `raw` above `source`, such as the `%%taas` line.
        execution_count: Number of the cell in the notebook; None if the cell has no number yet.
        compiler_flags: Compiler flags set by `from __future__` imports of earlier cells.
        title: Name in tracebacks for a cell that is not in the notebook; "" for a notebook's cell.
    """

    raw: str
    python: str
    filename: str
    line_offset: int = 0
    execution_count: int | None = None
    compiler_flags: int = 0
    title: str = ""

    @property
    def source(self) -> str:
        """Text of the cell without the `%%taas` line; may contain IPython syntax."""
        return "".join(self.raw.splitlines(keepends=True)[self.line_offset :])

    @property
    def is_one_script(self) -> bool:
        """Whether the cell is a single line with `%run`.

        If so, an exception of the script ends the cell, because no other statement follows.
        """
        return self.source.startswith("%run ") and len(self.source.splitlines()) == 1

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


class CallShape(Struct, frozen=True, tag="function"):
    """Description of a call whose function and arguments are pickled separately.

    Attributes:
        raw: The call as the user sees it, such as "taas.run(train, ...)".
        n_args: Number of positional arguments.
        names: Names of the keyword arguments.
    """

    raw: str
    n_args: int
    names: tuple[str, ...]

    @property
    def python(self) -> str:
        """Always "", because a call has no Python code. `CellWork` has this attribute, too."""
        return ""

    def with_values(self, function: Callable[..., Any], values: Iterator[Any]) -> "FunctionWork":
        """Return a `FunctionWork` of this shape: a call of `function` with the given values.

        Args:
            values: Iterator over the values of the positional arguments, then of the keyword
                arguments in the order of `names`.
        """
        args = tuple(next(values) for _ in range(self.n_args))
        kwargs = {name: next(values) for name in self.names}
        return FunctionWork(function, args, kwargs, self.raw)


@dataclass(frozen=True)
class FunctionWork:
    """The work of a run: a call of a function, or of any other callable, with its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    raw: str = ""

    @property
    def shape(self) -> CallShape:
        """Description of this call without the function and the arguments, for the payload."""
        return CallShape(self.raw, len(self.args), tuple(self.kwargs))

    def arguments(self) -> Iterator[tuple[str, Any]]:
        """Yield (name for messages, value) for each argument, positional arguments first."""
        yield from ((f"argument {at}", value) for at, value in enumerate(self.args, 1))
        yield from self.kwargs.items()


Work = CellWork | FunctionWork


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function for messages; for another callable, the name of its class."""
    return getattr(function, "__name__", type(function).__name__)
