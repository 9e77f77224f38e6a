"""The IPython shell in which a rank runs the cell.

It is made once in the forkserver, before any run (30 ms that no launch pays), and each rank, a
fork, binds it to a namespace of its own. Displays go to the agent as messages; a traceback shows
the notebook's own cells and lines.
"""

import ast
import errno
import linecache
import os
import shutil
import sys
import types
from collections.abc import Mapping
from typing import Any

from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from traitlets import Any as AnyTrait
from traitlets.config import Config

from taas_magic.capture.payload import Cell, CellSource
from taas_magic.remote.link import Link

_MESSAGE_LIMIT = 4096
_TRACEBACK_LIMIT = 65536


class CellCompiler(CachingCompiler):
    """Compiles the cell under the name that the notebook's kernel gave it."""

    cell: Cell | None = None
    labels: Mapping[str, str] = {}

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        """The file name for a piece of code; the cell's own is already in linecache."""
        if self.cell is not None and raw_code == self.cell.source:
            return self.cell.filename
        name: str = super().cache(transformed_code, number, raw_code)
        return name

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        """How a traceback calls a file: `Cell In[5]` for the notebook's cells."""
        if name in self.labels:
            label, _, number = self.labels[name].partition(" ")
            return label, number
        found: tuple[str, str] | None = super().format_code_name(name)
        return found

    def know(self, sources: Mapping[str, CellSource]) -> None:
        """Gives linecache the notebook's cells, so that tracebacks show their lines."""
        self.labels = {name: source.label for name, source in sources.items()}
        for name, source in sources.items():
            lines = source.text.splitlines(keepends=True)
            linecache.cache[name] = (len(source.text), None, lines, name)


class LinkDisplayHook(DisplayHook):
    """Sends the value of the cell's last expression."""

    def quiet(self) -> bool:
        """Whether the cell ends in a semicolon; IPython would ask its history, which is off."""
        shell = self.shell
        assert isinstance(shell, RankShell)
        cell = shell.compile.cell
        return cell is not None and self.semicolon_at_end_of_expression(cell.source)

    def __call__(self, result: Any = None) -> None:
        shell = self.shell
        assert isinstance(shell, RankShell)
        if result is None or self.quiet():
            return
        shell.last_value = result
        data, metadata = self.compute_format_data(result)
        shell.publish(data, metadata)
        self.update_user_ns(result)


class LinkDisplayPublisher(DisplayPublisher):
    """Sends what `display(...)` shows."""

    def publish(self, data: Any, metadata: Any = None, **kwargs: Any) -> None:
        shell = self.shell
        assert isinstance(shell, RankShell)
        display_id = (kwargs.get("transient") or {}).get("display_id")
        shell.publish(data, metadata or {}, display_id, bool(kwargs.get("update")))

    def clear_output(self, wait: bool = False) -> None:
        shell = self.shell
        assert isinstance(shell, RankShell)
        if shell.link is not None and shell.shows:
            shell.link.send("clear", wait=wait)


class LineShift(ast.NodeTransformer):
    """Moves a cell down by the lines of its head, so that line numbers are the notebook's."""

    def __init__(self, lines: int) -> None:
        self._lines = lines

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.increment_lineno(node, self._lines)


class RankShell(InteractiveShell):
    """One rank's shell.

    Attributes:
        last_value: The value of the cell's last expression.
        shows: Whether displays of this rank reach the notebook (rank 0's do).
    """

    link: Link | None = None
    shows = False
    last_value: Any = None
    display_pub_class = AnyTrait(LinkDisplayPublisher)
    displayhook_class = AnyTrait(LinkDisplayHook)
    compiler_class = AnyTrait(CellCompiler)

    @classmethod
    def prepare(cls) -> "RankShell":
        """Makes the shell, in the forkserver: no history file, no thread."""
        config = Config()
        config.HistoryManager.enabled = False
        config.HistoryManager.hist_file = ":memory:"
        shell: RankShell = cls.instance(config=config)
        shell.autoawait = True
        shell.run_cell("None", store_history=False)
        return shell

    def bind(self, link: Link, shows: bool, colors: str) -> dict[str, Any]:
        """Gives this rank its link and a clean `__main__`; returns the namespace.

        The namespace is `sys.modules["__main__"].__dict__`, as in a kernel: what a fork of the rank
        pickles by reference to `__main__` is found again.
        """
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        self.user_module, self.user_ns = main, main.__dict__
        self.init_user_ns()
        self.link, self.shows = link, shows
        self.colors = colors
        # Lightning takes a set ps1 for an interactive session, in which it refuses to use DDP
        for name in ("ps1", "ps2", "ps3"):
            sys.__dict__.pop(name, None)
        return main.__dict__

    def run(self, cell: Cell, sources: Mapping[str, CellSource]) -> ExecutionResult:
        """Runs the cell; its failure, if any, has been sent when this returns."""
        compiler = self.compile
        assert isinstance(compiler, CellCompiler)
        compiler.cell = cell
        compiler.know(sources)
        # IPython drops the empty lines that a cell begins with
        empty_lines = cell.source[: len(cell.source) - len(cell.source.lstrip())].count("\n")
        self.ast_transformers.append(LineShift(cell.line_offset + empty_lines))
        return self.run_cell(cell.source, store_history=False)

    def publish(
        self, data: Any, metadata: Any, display_id: str | None = None, update: bool = False
    ) -> None:
        """Sends a display, if this rank's are shown."""
        if self.link is not None and self.shows:
            self.link.send(
                "display", data=data, metadata=metadata, display_id=display_id, update=update
            )

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Says at once that the rank failed, then how.

        The first message leaves before the traceback is drawn (which takes up to 0.1 s), because
        the order in which ranks fail decides which failure is the first.
        """
        etype, value, _ = self._get_exc_info(exc_tuple)
        if self.link is not None and not isinstance(value, SystemExit):
            self.link.send("raising", etype=etype.__name__, message=message_of(value))
        super().showtraceback(exc_tuple, *args, **kwargs)

    def _showtraceback(self, etype: Any, evalue: Any, stb: Any) -> None:
        text = self.InteractiveTB.stb2text(stb) if stb else ""
        if self.link is not None and etype is not SystemExit:
            self.link.send(
                "failure",
                etype=etype.__name__,
                message=message_of(evalue),
                traceback=cut(text, _TRACEBACK_LIMIT).splitlines(),
            )


def message_of(error: BaseException) -> str:
    """An exception's text, bounded; an exception whose `__str__` fails has one too."""
    try:
        return cut(str(error), _MESSAGE_LIMIT) + _room_left(error)
    except Exception as broken:
        return f"<the exception's __str__ raised {type(broken).__name__}>"


def _room_left(error: BaseException) -> str:
    """What Python leaves out when a write finds the disk full: which one, and how full."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    store = os.getcwd()
    return f" (the disk of {store} has {shutil.disk_usage(store).free} bytes free)"


def cut(text: str, limit: int) -> str:
    """The first and last half of a text that is too long, with a mark between."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… [{len(text) - limit} characters cut] …\n{text[-half:]}"
