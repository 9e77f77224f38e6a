"""The IPython shell in which a rank runs the cell.

It is made once in the forkserver, before any run (30 ms that no launch pays), and each rank, a
fork, binds it to a namespace of its own. Displays go to the agent as messages; a traceback shows
the notebook's own cells and lines (`tracebacks`).
"""

import ast
import builtins
import importlib
import io
import json
import sys
import threading
import types
import warnings
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from traitlets import Any as AnyTrait
from traitlets.config import Config

from taas_magic.capture.payload import Cell, CellSource
from taas_magic.data.accelerated import when_imported
from taas_magic.errors import TaasError
from taas_magic.host import tracebacks
from taas_magic.host.link import Link
from taas_magic.messages import ClearOutput, Display

_ADVICE = "a rank has no keyboard: set a variable in an earlier cell and use it here"


class NoKeyboard(io.TextIOBase):
    """A standard input whose every read says why it cannot be one."""

    def readline(self, *args: Any) -> NoReturn:
        """Raise; what `input()` calls."""
        raise EOFError(f"input(): {_ADVICE}")

    def read(self, *args: Any) -> NoReturn:
        """Raise."""
        raise EOFError(f"sys.stdin: {_ADVICE}")

    def fileno(self) -> int:
        """The descriptor, of /dev/null, that children inherit."""
        return 0


def refuse_questions() -> None:
    """Have `input()` and `breakpoint()` raise an error that says what to do."""
    sys.stdin = NoKeyboard()
    sys.breakpointhook = _refuse_breakpoint


def _refuse_breakpoint(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "breakpoint(): a rank has no keyboard; print what you want to see, or run the cell "
        "without %%taas to debug it in the notebook"
    )


CELL_MAIN = "taas_magic.host.cell_main"
"""What a child that a rank starts by spawn or forkserver imports as its main module."""


IMAGE_LIMIT_BYTES = 20_000_000
MARKUP_LIMIT_BYTES = 5_000_000
"""Of HTML, JSON and the like; a plot with its library in it has 4 to 5 MB."""

PLAIN_LIMIT_CHARS = 100_000


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
            shell.link.send(ClearOutput(wait=wait))


def bounded(data: Mapping[str, Any]) -> dict[str, Any]:
    """A display without the forms that are too large for a browser, and what to do about them.

    Args:
        data: By MIME type; text, bytes, or what becomes JSON.
    """
    sizes = {form: _size_bytes(value) for form, value in data.items() if form != "text/plain"}
    large = {form: size for form, size in sizes.items() if size > _limit_bytes(form)}
    kept = {form: value for form, value in data.items() if form not in large}
    plain = tracebacks.cut(str(kept.get("text/plain", "")), PLAIN_LIMIT_CHARS)
    notes = [
        f"[{form} of {size / 1e6:,.0f} MB is not shown, as it has more than "
        f"{_limit_bytes(form) / 1e6:.0f} MB: save it to a file]"
        for form, size in large.items()
    ]
    if plain or notes:
        kept["text/plain"] = "\n".join([*notes, *filter(None, [plain])])
    return kept


def _limit_bytes(form: str) -> int:
    is_image = form.startswith("image/") and form != "image/svg+xml"
    return IMAGE_LIMIT_BYTES if is_image else MARKUP_LIMIT_BYTES


def _size_bytes(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return len(json.dumps(value, default=repr))


def _draw_bars_as_text() -> None:
    """Have tqdm.notebook draw text, which the head of the run shows: a rank has no widgets."""
    module, text = sys.modules["tqdm.notebook"], importlib.import_module("tqdm.std")
    for name in ("tqdm", "tqdm_notebook"):
        setattr(module, name, text.tqdm)
    for name in ("trange", "tnrange"):
        setattr(module, name, text.trange)


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
    _at_start: Mapping[str, Any] = {}
    display_pub_class = AnyTrait(LinkDisplayPublisher)
    displayhook_class = AnyTrait(LinkDisplayHook)
    compiler_class = AnyTrait(CellCompiler)

    @classmethod
    def prepare(cls) -> "RankShell":
        """Make the shell, in the forkserver: no history file, no thread.

        It runs a cell that raises, so that no rank waits for the imports of what draws a traceback
        while the other ranks are already being ended.
        """
        config = Config()
        config.HistoryManager.enabled = False
        config.HistoryManager.hist_file = ":memory:"
        shell: RankShell = cls.instance(config=config)
        shell.autoawait = True
        shell.run_cell("raise ValueError", store_history=False)
        return shell

    def bind(self, link: Link, shows: bool, colors: str) -> dict[str, Any]:
        """Give this rank its link and a clean `__main__`; returns the namespace.

        The namespace is `sys.modules["__main__"].__dict__`, as in a kernel: what a fork of the rank
        pickles by reference to `__main__` is found again. Its `__spec__` is that of a program
        started by `python -m`, so that spawned children find what the cell defines (`cell_main`).
        """
        main = types.ModuleType("__main__")
        main.__spec__ = ModuleSpec(CELL_MAIN, None)
        # multiprocessing's second name of it, by which children send objects back
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        self.user_module, self.user_ns = main, main.__dict__
        self.init_user_ns()
        # Python's own, which take an exit code; IPython's ask a terminal to close
        main.__dict__.update({name: vars(builtins)[name] for name in ("exit", "quit")})
        self._at_start = dict(main.__dict__)
        self.link, self.shows = link, shows
        self.colors = colors
        # Lightning takes a set ps1 for an interactive session, in which it refuses to use DDP
        for name in ("ps1", "ps2", "ps3"):
            sys.__dict__.pop(name, None)
        refuse_questions()
        when_imported("tqdm.notebook", _draw_bars_as_text)
        return main.__dict__

    def run(self, cell: Cell, sources: Mapping[str, CellSource]) -> ExecutionResult:
        """Run the cell; its failure, if any, has been sent when this returns."""
        compiler = self.compile
        assert isinstance(compiler, CellCompiler)
        compiler.cell = cell
        compiler.labels = tracebacks.know(sources)
        threading.excepthook = tracebacks.print_of_thread
        sys.unraisablehook = tracebacks.print_unraisable
        # what IPython says of every SystemExit; a cell may end by one as a script may
        warnings.filterwarnings("ignore", "To exit: use", UserWarning)
        self.ast_transformers.append(LineShift(cell.lines_above))
        return self.run_cell(cell.source, store_history=False)

    def users_names(self) -> dict[str, Any]:
        """The namespace without what IPython put there."""
        start = self._at_start
        return {n: v for n, v in self.user_ns.items() if n not in start or start[n] is not v}

    def enable_gui(self, gui: Any = None) -> None:
        """Do nothing: what `%matplotlib inline` asks for is there already."""

    def publish(
        self, data: Any, metadata: Any, display_id: str | None = None, update: bool = False
    ) -> None:
        """Send a display, if this rank's are shown."""
        if self.link is not None and self.shows:
            shown = bounded(data)
            self.link.send(
                Display(data=shown, metadata=metadata, display_id=display_id, update=update)
            )

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Send the plain traceback at once, then IPython's.

        The first message leaves before IPython draws (which takes up to 0.1 s), because the order
        in which ranks fail decides which failure is the first. It is whole: the rank may be ended
        before the second.
        """
        value = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
        if self.link is None or value is None or isinstance(value, SystemExit):
            return
        tracebacks.leave_out_ours(value)
        tracebacks.send(self.link, value)
        # of a group, IPython draws its own frames and not the parts; an error of ours draws itself
        is_plain = isinstance(value, SyntaxError | TaasError) or tracebacks.is_group(value)
        if not is_plain and self.link.is_own:
            super().showtraceback((type(value), value, value.__traceback__), *args, **kwargs)

    def showsyntaxerror(self, *args: Any, **kwargs: Any) -> None:
        """Send a syntax error as any other failure."""
        self.showtraceback()

    def _showtraceback(self, etype: Any, evalue: Any, stb: Any) -> None:
        text = self.InteractiveTB.stb2text(stb) if stb else ""
        if self.link is not None and etype is not SystemExit:
            tracebacks.send(self.link, evalue, text)
