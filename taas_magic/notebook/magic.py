"""`%%taas` and `%taas`: from what the user typed to a call of `taas_magic.notebook.launch`.

Runs in the notebook's kernel. Nothing that imports torch or Dask is imported before it is needed.
"""

import contextlib
import contextvars
import importlib
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from taas_magic.capture.modules import claim_taas, release_taas
from taas_magic.config import Config, load_config
from taas_magic.errors import UsageError, interrupted
from taas_magic.notebook import commands, completion, flags
from taas_magic.notebook.flags import misplaced_pragma, nothing_below, transform_pragma
from taas_magic.plan import Flags

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from taas_magic.capture.payload import Cell


@magics_class
class TaasMagics(Magics):
    """The two magics.

    Args:
        shell: The kernel's shell.
        folder: The notebook's folder; taas.toml is looked for from here.
    """

    def __init__(self, shell: "InteractiveShell", folder: Path) -> None:
        super().__init__(shell)
        self._folder = folder
        self._raw_cell = ""

    def settings(self) -> Config:
        """taas.toml as it is now, so that an edit holds from the next cell on."""
        return load_config(self._folder)

    def remember(self, info: Any) -> None:
        """IPython's `pre_run_cell` event: the cell as the user sees it, head and all."""
        self._raw_cell = info.raw_cell
        for line in misplaced_pragma(info.raw_cell):
            _say(line)

    def after(self, result: Any) -> None:
        """IPython's `post_run_cell` event: says what pip's package of our name changes."""
        if result.info is not None and installs_taas(result.info.raw_cell):
            _say(TAAS_IS_HERE)

    def variables(self) -> list[str]:
        """The names that the user gave to things, for Tab."""
        hidden = self.shell.user_ns_hidden
        return [name for name in self.shell.user_ns if name not in hidden and name[0] != "_"]

    @cell_magic("taas")
    def run_cell(self, line: str, body: str) -> None:
        settings = self.settings()
        if not body.strip():
            raise UsageError(nothing_below(self._raw_cell))
        asked = flags.parse(line, settings)
        self._run(asked, self._cell(line, body), settings)

    run_cell.__doc__ = flags.HELP

    @line_magic("taas")
    def run_line(self, line: str) -> None:
        with _one_line("Stopped by you."):
            shown = commands.run(line, self.settings())
        if isinstance(shown, str):
            _say(shown)
        else:
            bundle = {"text/plain": shown.text, "text/html": shown.html}
            self.shell.display_pub.publish(bundle)

    run_line.__doc__ = commands.HELP

    def _run(self, asked: Flags, cell: "Cell", settings: Config) -> None:
        from taas_magic.notebook import dry_run, launch

        note = settings.pool_note(asked.pool)
        if note:
            _say(note)
        if asked.dry_run:
            _say(dry_run.tell(asked, cell, self.shell, settings))
            return
        with _one_line("Stopped by you before the ranks started."):
            launch.execute(asked, cell, self.shell, settings)

    def _cell(self, line: str, body: str) -> "Cell":
        from taas_magic.capture.payload import Cell, cell_number

        raw, offset = locate(self._raw_cell, line, body)
        filename = self._compile_name(raw)
        return Cell(
            source=body,
            filename=filename,
            raw=raw,
            line_offset=offset,
            execution_count=cell_number(self.shell, filename),
        )

    def _compile_name(self, raw: str) -> str:
        """The name under which the kernel compiled the cell that called the magic."""
        frame = sys._getframe()
        while frame.f_back is not None and raw == self._raw_cell:
            frame = frame.f_back
            if frame.f_globals is self.shell.user_ns:
                return frame.f_code.co_filename
        shell = self.shell
        return str(shell.compile.get_code_name(raw, shell.transform_cell(raw), 0))


@contextlib.contextmanager
def _one_line(text: str) -> Iterator[None]:
    """Has an interrupt show a line and none of the frames that it met."""
    try:
        yield
    except KeyboardInterrupt as error:
        if hasattr(error, "_render_traceback_"):
            raise
        raise interrupted(text) from None


def locate(raw_cell: str, line: str, body: str) -> tuple[str, int]:
    """Where the magic's body lies in the cell that the user sees.

    Returns:
        The whole cell, and how many of its lines come before the body. A magic that code called
        (`get_ipython().run_cell_magic`) has no such cell: its own head and body are taken.
    """
    seen, lines = raw_cell.splitlines(), body.splitlines()
    offset = len(seen) - len(lines)
    # IPython removes a common indentation, hence the comparison without it.
    if offset > 0 and [*map(str.strip, seen[offset:])] == [*map(str.strip, lines)]:
        return raw_cell, offset
    return f"%%taas {line}\n{body}", 1


TAAS_IS_HERE = (
    "taas: `import taas` gives taas-magic, which is here already, and not pip's package of that "
    "name. No restart is needed."
)
# Also without its percent sign, as IPython's automagic takes it, and in a %%bash cell.
_INSTALL = re.compile(r"\s*[!%]{0,2}\s*(?:\S+\s+-m\s+|uv\s+)?pip[\d.]*\s+install\s(.+)")
_REQUIREMENT = re.compile(r"(?:.*/)?taas(?:$|\s*[=<>~!;\[@]|-\d)")


def installs_taas(raw_cell: str) -> bool:
    """Return whether a cell asks pip for PyPI's package `taas`, DataSphere's old client.

    The DataSphere guide begins with `%pip install taas`.
    """
    words: list[str] = []
    for found in map(_INSTALL.fullmatch, raw_cell.splitlines()):
        if found is not None:
            try:
                words += shlex.split(found[1], comments=True)
            except ValueError:
                words += found[1].split()
    return any(_REQUIREMENT.match(word) for word in words)


def load(shell: "InteractiveShell") -> None:
    """Puts the magics, the comment form and Tab completion into a shell; warms the local pool.

    Does nothing where they are there already.
    """
    if shell in _loaded:
        return
    magics = TaasMagics(shell, Path.cwd())
    shell.register_magics(magics)
    shell.events.register("pre_run_cell", magics.remember)
    shell.events.register("post_run_cell", magics.after)
    shell.input_transformers_cleanup.insert(0, transform_pragma)
    matcher = completion.matcher(magics.variables, magics.settings)
    shell.Completer.custom_matchers.append(matcher)
    _loaded[shell] = lambda: _remove(shell, magics, matcher)
    if claim_taas():
        _say("taas: another package `taas` is imported; run `import taas` again to get taas-magic")
    if os.environ.get("TAAS_WARM") != "0":
        _warm_local(magics)


def unload(shell: "InteractiveShell") -> None:
    """Undoes `load`."""
    _loaded.pop(shell, lambda: None)()


_loaded: dict["InteractiveShell", Callable[[], None]] = {}


def _remove(shell: "InteractiveShell", magics: TaasMagics, matcher: Any) -> None:
    shell.events.unregister("pre_run_cell", magics.remember)
    shell.events.unregister("post_run_cell", magics.after)
    release_taas()
    shell.input_transformers_cleanup.remove(transform_pragma)
    shell.Completer.custom_matchers.remove(matcher)
    for kind in ("cell", "line"):
        shell.magics_manager.magics[kind].pop("taas", None)


def _warm_local(magics: TaasMagics) -> None:
    """Importing Dask takes longer than `%load_ext` may: a thread does it."""
    try:
        settings = magics.settings()
    except UsageError as error:
        sys.stderr.write(f"taas: nothing is warmed up: {error}\n")
        return

    def warm() -> None:
        from taas_magic.notebook import pools

        pools.warm(settings)
        importlib.import_module("taas_magic.notebook.dry_run")  # with all that the first cell needs

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(warm,), name="taas-load", daemon=True).start()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
