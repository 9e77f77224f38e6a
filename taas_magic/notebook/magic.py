"""`%%taas` and `%taas`: from what the user types, with what Tab offers, to `notebook.launch`.

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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from taas_magic.capture.modules import claim_taas, release_taas
from taas_magic.config import Config, load_config
from taas_magic.errors import UsageError, interrupted
from taas_magic.journal import folder as journal
from taas_magic.notebook import commands, flags
from taas_magic.notebook.flags import (
    BY_NAME,
    FLAGS,
    REPEATED,
    misplaced_pragma,
    nothing_below,
    transform_pragma,
)
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
        """Return taas.toml as it is now, so that an edit holds from the next cell on."""
        return load_config(self._folder)

    def remember(self, info: Any) -> None:
        """Keep the cell as the user sees it, head and all (IPython's `pre_run_cell` event)."""
        self._raw_cell = info.raw_cell
        for line in misplaced_pragma(info.raw_cell):
            _say(line)

    def after(self, result: Any) -> None:
        """Say what pip's package of our name changes (IPython's `post_run_cell` event)."""
        if result.info is not None and installs_taas(result.info.raw_cell):
            _say(TAAS_IS_HERE)

    def variables(self) -> list[str]:
        """Return the names that the user gave to things, for Tab."""
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
        from taas_magic.notebook import launch

        if note := settings.pool_note(asked.pool):
            _say(note)
        if asked.dry_run:
            _say(launch.tell(asked, cell, self.shell, settings))
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
        """Return the name under which the kernel compiled the cell that called the magic."""
        frame = sys._getframe()
        while frame.f_back is not None and raw == self._raw_cell:
            frame = frame.f_back
            if frame.f_globals is self.shell.user_ns:
                return frame.f_code.co_filename
        shell = self.shell
        return str(shell.compile.get_code_name(raw, shell.transform_cell(raw), 0))


@contextlib.contextmanager
def _one_line(text: str) -> Iterator[None]:
    """Have an interrupt show a line and none of the frames that it met."""
    try:
        yield
    except KeyboardInterrupt as error:
        if hasattr(error, "_render_traceback_"):
            raise
        raise interrupted(text) from None


def locate(raw_cell: str, line: str, body: str) -> tuple[str, int]:
    """Find the magic's body in the cell that the user sees.

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
    """Put the magics, the comment form and Tab completion into a shell; warm the local pool.

    Do nothing where they are there already.
    """
    if shell in _loaded:
        return
    magics = TaasMagics(shell, Path.cwd())
    tab = _matcher(magics.variables, magics.settings)

    def remove() -> None:
        shell.events.unregister("pre_run_cell", magics.remember)
        shell.events.unregister("post_run_cell", magics.after)
        release_taas()
        shell.input_transformers_cleanup.remove(transform_pragma)
        shell.Completer.custom_matchers.remove(tab)
        for kind in ("cell", "line"):
            shell.magics_manager.magics[kind].pop("taas", None)

    shell.register_magics(magics)
    shell.events.register("pre_run_cell", magics.remember)
    shell.events.register("post_run_cell", magics.after)
    shell.input_transformers_cleanup.insert(0, transform_pragma)
    shell.Completer.custom_matchers.append(tab)
    _loaded[shell] = remove
    if claim_taas():
        _say("taas: another package `taas` is imported; run `import taas` again to get taas-magic")
    if os.environ.get("TAAS_WARM") != "0":
        _warm_local(magics)


def unload(shell: "InteractiveShell") -> None:
    """Undo `load`."""
    _loaded.pop(shell, lambda: None)()


_loaded: dict["InteractiveShell", Callable[[], None]] = {}


def _warm_local(magics: TaasMagics) -> None:
    """Warm the local pool in a thread: importing Dask takes longer than `%load_ext` may."""
    try:
        settings = magics.settings()
    except UsageError as error:
        sys.stderr.write(f"taas: nothing is warmed up: {error}\n")
        return

    def warm() -> None:
        from taas_magic.notebook import pools

        pools.warm(settings)
        importlib.import_module("taas_magic.notebook.launch")  # with all that the first cell needs

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(warm,), name="taas-load", daemon=True).start()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


_HEAD = re.compile(r"\s*(?:%%taas|#\s?pragma\s+taas)\s(.*)")
_LINE = re.compile(r"\s*%taas\s(.*)")
_PRAGMA = re.compile(r"#\s?pragma\s+(t?a?a?)")
_POOL = re.compile(r"#!\s*([\w.-]*)")
_LISTED_RUNS = 20


def _candidates(
    text: str,
    variables: Callable[[], Iterable[str]],
    pools: Callable[[], Iterable[str]],
    runs: Callable[[], Iterable[str]],
) -> tuple[str, list[str]] | None:
    """Return what is already there of the word at the cursor, and the words that begin so.

    Args:
        text: The line up to the cursor; None is returned where it is not one of ours.
        variables: Gives names that the notebook has; `pools` those of pools, `runs` ids of runs.
    """
    if match := _POOL.fullmatch(text):
        return _beginning(match[1], pools())
    if match := _PRAGMA.fullmatch(text):
        return _beginning(match[1], ["taas"])
    if match := _HEAD.fullmatch(text):
        return _after_head(match[1], variables, pools)
    if match := _LINE.fullmatch(text):
        return _after_line(match[1], pools, runs)
    return None


def _after_head(
    text: str, variables: Callable[[], Iterable[str]], pools: Callable[[], Iterable[str]]
) -> tuple[str, list[str]]:
    words = text.split(" ")
    flag, equals, word = words[-1].partition("=")
    if not equals:
        flag, word = ([word for word in words[:-1] if word] or [""])[-1], words[-1]
    if flag in ("--pool", "--data-pool"):
        return _beginning(word, pools())
    if flag == "--out":
        return _beginning(word.rpartition(",")[2], variables())
    if flag in BY_NAME and BY_NAME[flag].metavar:
        return _beginning(word, BY_NAME[flag].examples)
    return _beginning(word, [f.name for f in FLAGS if f.name not in words or f.name in REPEATED])


def _after_line(
    text: str, pools: Callable[[], Iterable[str]], runs: Callable[[], Iterable[str]]
) -> tuple[str, list[str]]:
    *before, word = text.split(" ")
    before = [known for known in before if known]
    if not before:
        return _beginning(word, commands.USAGE)
    if before[-1] == "--rank":
        return word, []
    if before[0] in ("warm", "down"):
        return _beginning(word, pools())
    if before[0] == "pools":
        return _beginning(word, pools() if before[-1] == "--check" else ["--check"])
    if before[0] == "logs":
        return _beginning(word, [*runs(), "--rank"])
    return _beginning(word, runs() if before[0] in ("stop", "stacks") else ())


def _beginning(word: str, possible: Iterable[str]) -> tuple[str, list[str]]:
    return word, [name for name in possible if name.startswith(word)]


def _matcher(
    variables: Callable[[], Iterable[str]], settings: Callable[[], Config]
) -> Callable[[CompletionContext], SimpleMatcherResult]:
    """Return IPython's matcher (its API of version 2) for `shell.Completer.custom_matchers`."""

    def pools() -> list[str]:
        try:
            return sorted(settings().pools)
        except UsageError:  # of a broken taas.toml: the cell that runs says what is wrong with it
            return []

    @context_matcher(identifier="taas_magic")
    def taas(context: CompletionContext) -> SimpleMatcherResult:
        def runs() -> list[str]:
            return [record.run_id for record in journal.runs()[:_LISTED_RUNS]]

        found = _candidates(context.text_until_cursor, variables, pools, runs)
        if found is None:
            return {"completions": []}
        word, names = found
        return {
            "completions": [SimpleCompletion(name, type="taas") for name in names],
            "matched_fragment": word,
            "suppress": True,
            "ordered": True,
        }

    matching: Callable[[CompletionContext], SimpleMatcherResult] = taas
    return matching
