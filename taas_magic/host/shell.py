"""The IPython shell of a rank. It sends displays and tracebacks to the agent as messages."""

import ast
import bdb
import builtins
import importlib
import json
import os
import sys
import threading
import types
import warnings
from asyncio import CancelledError
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec
from typing import Any

from IPython import version_info
from IPython.core.async_helpers import get_asyncio_loop
from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell
from traitlets import Any as AnyTrait

from taas_magic.capture.payload import CellSource
from taas_magic.capture.work import CellWork, FunctionWork, Work
from taas_magic.errors import TaasError
from taas_magic.host import cell_main, tracebacks
from taas_magic.host.debugger import BreakpointHook
from taas_magic.host.keyboard import Keyboard
from taas_magic.host.link import AgentLink, flush_output
from taas_magic.late_imports import when_imported
from taas_magic.messages import ClearOutput, Display, Note, RankRaised, RankShowedError

IMAGE_LIMIT_BYTES = 20_000_000

MARKUP_LIMIT_BYTES = 5_000_000
"""Maximum size of a display that is not an image, such as HTML or JSON.

An interactive plot that contains its JavaScript library has 4 to 5 MB.
"""

PLAIN_LIMIT_CHARS = 100_000

_MAIN_ORIGIN = "this cell's __main__, which has only those names of the notebook that the cell uses"
"""Text for the user that describes the rank's `__main__`: the `origin` in `__main__.__spec__`.

If a pickle needs a class that `__main__` does not define, pickle's error shows this text. A rank's
`__main__` has only the classes of the cell, and the notebook's classes that the cell uses.
"""

HIDDEN_DISPLAYS = (
    "some ranks displayed outputs that are not shown; --logs all shows the displays of all ranks"
)

_OWN_NAMES = frozenset({"exit", "quit", "_dh"})
"""Names for which `connect_to_agent` sets other values than IPython.

Names with leading double underscores are not listed.
"""


class _CellCompiler(CachingCompiler):
    """A compiler that gives the cell's code the file name that the notebook's kernel would use.

    Attributes:
        cell: The cell that runs; None before the first cell, and during a function call.
        labels: Labels of cells for tracebacks, such as `Cell In[5]`, by file name.
    """

    cell: CellWork | None = None
    labels: Mapping[str, str] = {}

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        """Return the file name for a piece of code, and store the code in linecache.

        For the cell itself, only return the file name, because `tracebacks.register_sources` has
        already stored the cell.
        """
        if self.cell is not None and raw_code == self.cell.source:
            return self.cell.filename
        name: str = super().cache(transformed_code, number, raw_code)
        return name

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        """Return the label by which tracebacks show the file `name`, as two parts.

        Returns:
            The two parts of a cell's label, such as `("Cell", "In[5]")`. None if the file is not a
            cell.
        """
        if name in self.labels:
            label, _, number = self.labels[name].partition(" ")
            return label, number
        found: tuple[str, str] | None = super().format_code_name(name)
        return found


class _LinkDisplayHook(DisplayHook):
    """A display hook that sends the value of the cell's last expression to the agent as a display.

    Also stores the value in `RankShell.last_value`.
    """

    def quiet(self) -> bool:
        """Return whether the cell ends in a semicolon, which suppresses the display of its value.

        IPython's own method cannot be used, because it reads the history, which ranks do not have.
        """
        cell = RankShell.instance().compile.cell
        return cell is not None and self.semicolon_at_end_of_expression(cell.source)

    def __call__(self, result: Any = None) -> None:
        """Store the value in `last_value`, send it as a display, and set IPython's `_` and `Out`.

        Do nothing if the value is None, or if the cell ends in a semicolon. Send no display if the
        displays of this rank are not shown, or if the value's `__repr__` raises an exception.
        """
        if result is None or self.quiet():
            return
        shell = RankShell.instance()
        shell.last_value = result
        data, metadata = self.compute_format_data(result)
        if shell.shows and data:  # without data, a `__repr__` has raised an exception
            shell.publish(data, metadata)
        self.update_user_ns(result)


class _LinkDisplayPublisher(DisplayPublisher):
    """A display publisher that sends the outputs of IPython's `display(...)` to the agent."""

    def publish(self, data: Any, metadata: Any = None, **kwargs: Any) -> None:
        display_id = (kwargs.get("transient") or {}).get("display_id")
        RankShell.instance().publish(data, metadata or {}, display_id, bool(kwargs.get("update")))

    def clear_output(self, wait: bool = False) -> None:
        shell = RankShell.instance()
        if shell.link is not None and shell.shows:
            shell.link.send_in_order(ClearOutput(wait=wait))


class _LineShift(ast.NodeTransformer):
    """An AST transformer that gives code the line numbers of the notebook's cell.

    The rank compiles only the lines below the `%%taas` line, so their line numbers are too small.
    Code that the cell passes to IPython, by `%%capture` or `run_cell`, keeps its own line numbers.

    Args:
        shell: The shell that runs the cell.
        lines: Number of lines up to and including the `%%taas` line.
    """

    def __init__(self, shell: "RankShell", lines: int) -> None:
        self._shell, self._lines = shell, lines

    def visit(self, node: ast.AST) -> ast.AST:
        return node if self._shell.depth else ast.increment_lineno(node, self._lines)


class RankShell(InteractiveShell):
    """The IPython shell of a rank.

    The forkserver creates the shell, and each rank inherits it. This saves 30 ms at each start.

    Attributes:
        link: The rank's connection to its agent; None in the forkserver.
        keyboard: Source of the lines that the user types; None in the forkserver.
        last_value: Value of the work: of the cell's last expression, or of the function call.
        failure: First exception that IPython has shown during the work; None if there is none.
        depth: Nesting depth of the running code: 1 in the cell, 2 in a `%%capture` of the cell; 0
            if no code runs.
        breakpoints: The function that `breakpoint()` calls; None in the forkserver.
        shows: Whether displays are sent to the notebook (`Plan.shows_displays`).
    """

    link: AgentLink | None = None
    keyboard: Keyboard | None = None
    breakpoints: BreakpointHook | None = None
    shows = False
    last_value: Any = None
    failure: RankRaised | None = None
    depth = 0
    _drawn = ""
    _has_hidden = False
    _is_cancelling = False
    _at_start: Mapping[str, Any] = {}
    display_pub_class = AnyTrait(_LinkDisplayPublisher)
    displayhook_class = AnyTrait(_LinkDisplayHook)
    compiler_class = AnyTrait(_CellCompiler)

    def connect_to_agent(
        self, link: AgentLink, own_keyboard: Keyboard, shows: bool, colors: str
    ) -> dict[str, Any]:
        """Connect the shell to this rank's agent and keyboard, and create a clean `__main__`.

        `__main__.__spec__` names the module `taas_magic.host.cell_main`. So spawned children use
        `cell_main` as their main module, and find the cell's definitions there.

        After this call:

        - In `__main__`, `exit`, `quit` and `open` are Python's own functions.
        - `input`, `sys.stdin` and `breakpoint()` ask the user.
        - `sys.ps1` does not exist, so that Lightning does not assume an interactive session.
        - When the program imports tqdm.notebook or hydra, the module is adapted to ranks.
        - An interrupt also ends a cell that waits in an `await`.
        - `users_names` and `%who` leave out the names that `__main__` has now.

        Args:
            link: The rank's connection to its agent.
            own_keyboard: Source of the lines that the user types.
            shows: Whether displays of this rank are sent to the notebook.
            colors: IPython's colour scheme, for tracebacks.

        Returns:
            The cell's namespace: `sys.modules["__main__"].__dict__`, as in a kernel. So this
            process and its forks can unpickle an object that refers to a name in `__main__`.
        """
        main = types.ModuleType("__main__")
        main.__spec__ = ModuleSpec(cell_main.__name__, None, origin=_MAIN_ORIGIN)
        # Spawned children call this module `__mp_main__`, also in objects that they send back.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        self.user_module, self.user_ns = main, main.__dict__
        self.init_user_ns()
        # Restore Python's own functions. IPython's `exit` and `quit` accept no exit code, and its
        # `open` accepts no descriptor below 3.
        main.__dict__.update({name: vars(builtins)[name] for name in ("exit", "quit")})
        del main.__dict__["open"]
        main.__dict__["_dh"] = [os.getcwd()]  # hydra reads the notebook's folder here
        self.user_ns_hidden.update(main.__dict__)  # `%who` lists only the user's names
        self._at_start = dict(main.__dict__)
        self.link, self.keyboard, self.shows = link, own_keyboard, shows
        own_keyboard.install()
        self.breakpoints = BreakpointHook(
            main.__dict__, RankShell._call.__code__, _LinkDisplayHook.__call__.__code__
        )
        self.breakpoints.install()
        self.loop_runner = self._run_coroutine
        self.colors = colors
        if version_info < (9,):  # IPython 8 needs this call for tracebacks
            self.InteractiveTB.set_colors(colors)
        # If ps1 is set, Lightning assumes an interactive session and refuses DDP
        for name in ("ps1", "ps2", "ps3"):
            sys.__dict__.pop(name, None)
        when_imported("tqdm.notebook", _use_text_bars)
        when_imported("hydra._internal.utils", _make_hydra_use_notebook_folder)
        return main.__dict__

    def reset(self, new_session: bool = True, aggressive: bool = False) -> None:
        """Delete the user's variables (`%reset`); keep the names that `connect_to_agent` has set.

        IPython's method would also delete `__spec__`, which spawned children need, and would
        replace Python's `exit`, `quit` and `open`. `users_names` leaves out all names that exist
        after the reset.
        """
        super().reset(new_session, aggressive)
        start = self._at_start.items()
        own = {name: it for name, it in start if name.startswith("__") or name in _OWN_NAMES}
        self.user_ns.update(own)
        del self.user_ns["open"]
        self._at_start = dict(self.user_ns)

    def run(self, work: Work, sources: Mapping[str, CellSource]) -> ExecutionResult:
        """Run a cell or call a function. If the work raises an exception, report it to the agent.

        First register the notebook's cells for tracebacks, install hooks that print exceptions of
        threads and finalizers, disable IPython's warning about SystemExit, and set `failure` to
        None. The code of a cell gets the line numbers that it has in the notebook. At the end,
        stop the single-stepping of the rank's debugger.

        Args:
            work: The cell or function call.
            sources: The notebook's cells, by the file name under which each cell was compiled.

        Returns:
            IPython's result, with the exception that ended the work, if any.
        """
        compiler = self.compile
        assert isinstance(compiler, _CellCompiler)
        compiler.labels = tracebacks.register_sources(sources)
        threading.excepthook = tracebacks.print_thread_exception
        sys.unraisablehook = tracebacks.print_unraisable
        # IPython warns about every SystemExit. A cell may end by SystemExit, as a script may.
        warnings.filterwarnings("ignore", "To exit: use", UserWarning)
        self.failure = None
        try:
            return self._run_work(work, compiler)
        finally:
            if self.breakpoints is not None:
                self.breakpoints.end_stepping()

    def _run_work(self, work: Work, compiler: _CellCompiler) -> ExecutionResult:
        """Call a function, or run a cell by IPython, and return IPython's result.

        Before IPython runs a cell, give the compiler the cell and its flags. Also replace the last
        cell's `_LineShift`, which corrects line numbers, by a new one.
        """
        if isinstance(work, FunctionWork):
            compiler.cell = None
            return self._call(work)
        compiler.cell = work
        compiler.flags |= work.compiler_flags
        self.ast_transformers[:] = [
            *(it for it in self.ast_transformers if not isinstance(it, _LineShift)),
            _LineShift(self, work.lines_above),
        ]
        return self.run_cell(work.source, store_history=False)

    def transform_cell(self, raw_cell: str) -> str:
        """Return the Python code for a text with IPython syntax.

        For the cell itself, return the Python code that the kernel has already made.
        """
        cell: CellWork | None = self.compile.cell
        if cell is not None and raw_cell == cell.source:
            return cell.python
        python: str = super().transform_cell(raw_cell)
        return python

    def _call(self, work: FunctionWork) -> ExecutionResult:
        """Call the work's function, with the IPython events and hooks that `run_cell` also uses.

        The function's value becomes `last_value`. An exception of the function is not raised, but
        stored in the result, with a traceback that starts at the frame of the function. Unless the
        exception is `BdbQuit`, it is also sent to the agent (`showtraceback`).
        """
        info = ExecutionInfo(work.raw, False, False, True, None)
        result = ExecutionResult(info)
        self.events.trigger("pre_execute")
        self.events.trigger("pre_run_cell", info)
        self.depth += 1
        try:
            with self.builtin_trap, self.display_trap:
                self.last_value = work.function(*work.args, **work.kwargs)
        except BaseException as error:  # like `run_cell`, which catches every exception
            assert error.__traceback__ is not None
            result.error_in_exec = error.with_traceback(error.__traceback__.tb_next)
            if not isinstance(error, bdb.BdbQuit):
                self.showtraceback(tb_offset=0, running_compiled_code=True)
        finally:
            self.depth -= 1
            self.events.trigger("post_execute")
            self.events.trigger("post_run_cell", result)
        return result

    def users_names(self) -> dict[str, Any]:
        """Return the namespace without the values that `connect_to_agent` has set."""
        start = self._at_start
        return {n: v for n, v in self.user_ns.items() if n not in start or start[n] is not v}

    def atexit_operations(self) -> None:
        """Do nothing. IPython's method deletes variables, which a `__del__` may still need."""

    def enable_gui(self, gui: Any = None) -> None:
        """Do nothing, because the backend of `%matplotlib inline` is active already."""

    def publish(
        self, data: Any, metadata: Any, display_id: str | None = None, update: bool = False
    ) -> None:
        """Send a display to the agent, without representations that a browser cannot show.

        These are representations that are too large (`without_large_parts`), and those of widgets,
        because a widget's model exists only in the rank.

        If the displays of this rank are not shown (`shows`), do not send the display. Instead, send
        the user a note at the first display.

        Args:
            data: The representations of the display, by MIME type.
            metadata: Metadata of the representations, by MIME type.
            update: Whether to replace an earlier display that has the same `display_id`.
        """
        if self.link is not None and self.shows:
            shown = without_large_parts(data)
            shown.pop("application/vnd.jupyter.widget-view+json", None)
            self.link.send_in_order(
                Display(data=shown, metadata=metadata, display_id=display_id, update=update)
            )
        elif self.link is not None and not self._has_hidden:
            self._has_hidden = True
            self.link.send(Note(text=HIDDEN_DISPLAYS))

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a cell with an `await` in IPython's event loop, and return its result.

        If an interrupt ends the loop, cancel the cell, so that its `finally` blocks run. IPython's
        own function would leave the cell pending, and the next `await` would continue it.
        """
        loop = get_asyncio_loop()
        task = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(task)
        except BaseException:
            self._is_cancelling = True
            task.cancel()
            with suppress(BaseException):
                loop.run_until_complete(task)
            raise
        finally:
            self._is_cancelling = False

    async def run_code(self, *args: Any, **kwargs: Any) -> bool:
        """Run code as IPython does. While the code runs, `depth` is larger by 1."""
        self.depth += 1
        try:
            has_failed: bool = await super().run_code(*args, **kwargs)
        finally:
            self.depth -= 1
        return has_failed

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Record an exception that IPython shows, and send the agent a message about the exception.

        The first exception that IPython shows is the rank's failure, even if the cell continues.
        The message is sent before IPython formats the traceback, which takes up to 0.1 s. So the
        order of the ranks' messages shows which rank has failed first. Before the message, flush
        stdout, so that the log has the printed text above the traceback.

        - If the exception ends the cell, the message is the rank's failure, with a traceback in
          Python's format. The agent may kill the rank before IPython's traceback is ready.
        - If the cell continues, the message is a `RankShowedError`, which has no traceback.

        This package's frames are removed from the traceback. The tracebacks of SystemExit,
        SyntaxError, TaasError, RecursionError and exception groups stay in Python's format.

        In two cases, the traceback is also written to the log, as Jupyter would show it:

        - The cell continues after the exception. A SystemExit counts as the end of the cell.
        - An earlier exception is the rank's failure.

        Do nothing for `sys.exit(0)`. Also do nothing for the CancelledError by which
        `_run_coroutine` ends an interrupted cell, because the KeyboardInterrupt follows. In a child
        that the cell forked, send no message. In the forkserver, only show the exception.
        """
        value = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
        if self.link is None:  # in the forkserver (`prepare`)
            super().showtraceback(exc_tuple, *args, **kwargs)
            return
        is_exit = isinstance(value, SystemExit)
        if value is None or (isinstance(value, SystemExit) and not value.code):
            return
        if self._is_cancelling and isinstance(value, CancelledError):
            return
        cell: CellWork | None = self.compile.cell
        is_last = kwargs.get("running_compiled_code") or (cell is not None and cell.is_one_script)
        ends_cell = not self.depth or (self.depth == 1 and is_last)
        with suppress(Exception):  # the user's code may have replaced stdout
            flush_output()
        tracebacks.remove_own_frames(value)
        shown = tracebacks.describe_exception(value)
        if ends_cell and self.link.is_own:
            self.link.send(self.failure or shown)
        elif self.link.is_own:
            self.link.send(RankShowedError())
        # IPython shows the frames of an exception group but not its exceptions, and takes minutes
        # for the frames of a RecursionError. TaasErrors format themselves.
        has_own_format = isinstance(value, SyntaxError | TaasError | RecursionError)
        is_plain = has_own_format or tracebacks.is_group(value)
        if not is_plain and not is_exit and self.link.is_own:
            self._drawn = ""
            super().showtraceback((type(value), value, value.__traceback__), *args, **kwargs)
            shown = tracebacks.describe_exception(value, self._drawn) if self._drawn else shown
        # Here, `sys.exit(3)` in a `%run` of the cell looks the same as `sys.exit(3)` in the cell.
        # So every SystemExit counts as the end of the cell.
        if self.failure is not None or not (ends_cell or is_exit):
            shown.is_logged = True
            # Not `sys.stderr`, which `%%capture` may redirect: errors must not be captured.
            if sys.__stderr__ is not None:
                with suppress(ValueError):  # the cell has closed stderr
                    sys.__stderr__.write(tracebacks.as_output(shown))
        self.failure = self.failure or shown

    def showsyntaxerror(self, *args: Any, **kwargs: Any) -> None:
        """Record a syntax error, and send the agent a message about it (`showtraceback`)."""
        self.showtraceback(running_compiled_code=kwargs.get("running_compiled_code", False))

    def _showtraceback(self, etype: Any, evalue: Any, stb: Any) -> None:
        self._drawn = self.InteractiveTB.stb2text(stb) if stb else ""


def without_large_parts(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a display without the representations that are too large for a browser.

    Images, except SVG, may have up to `IMAGE_LIMIT_BYTES`, and other representations up to
    `MARKUP_LIMIT_BYTES`. Plain text longer than `PLAIN_LIMIT_CHARS` is cut. For each omitted
    representation, the plain text gets a line that says so.

    Args:
        data: The representations of the display, by MIME type.
    """
    kept, notes = {}, []
    for form, value in data.items():
        is_image = form.startswith("image/") and form != "image/svg+xml"
        limit = IMAGE_LIMIT_BYTES if is_image else MARKUP_LIMIT_BYTES
        is_text = isinstance(value, str | bytes)
        size = len(value if is_text else json.dumps(value, default=repr))
        if form == "text/plain" or size <= limit:
            kept[form] = value
        else:
            notes.append(
                f"[{form} of {size / 1e6:,.0f} MB is not shown: the limit is "
                f"{limit / 1e6:.0f} MB; save it to a file]"
            )
    plain = tracebacks.shorten(str(kept.get("text/plain", "")), PLAIN_LIMIT_CHARS)
    if plain or notes:
        kept["text/plain"] = "\n".join([*notes, *filter(None, [plain])])
    return kept


def _use_text_bars() -> None:
    """Make tqdm.notebook draw progress bars as text, because ranks have no widgets.

    The status header shows the text.
    """
    module, text = sys.modules["tqdm.notebook"], importlib.import_module("tqdm.std")
    for name in ("tqdm", "tqdm_notebook"):
        setattr(module, name, text.tqdm)
    for name in ("trange", "tnrange"):
        setattr(module, name, text.trange)


def _make_hydra_use_notebook_folder() -> None:
    """Make hydra's `initialize(config_path=…)` search the notebook's folder.

    hydra searches this folder only in a Jupyter kernel. It recognizes a kernel by the name of the
    shell's class, and a rank's shell has another class.
    """
    vars(sys.modules["hydra._internal.utils"])["is_notebook"] = lambda: True
