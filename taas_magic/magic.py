"""`%%taas` and `%taas`: from what the user typed to a call of `taas_magic.launch`.

Runs in the notebook's kernel. Nothing that imports torch or Dask is imported before it is needed.
"""

import contextvars
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from taas_magic import completion, config, flags, journal, pragma
from taas_magic.config import Config, closest
from taas_magic.errors import UsageError
from taas_magic.journal import ENDED_STATES, RunRecord

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from taas_magic.capture.payload import Cell

_PREFIX = "%taas"
COMMANDS = {
    "status": ("status", "the newest runs of yours, from any kernel"),
    "logs": ("logs [RUN] [--rank R]", "all that a rank of a run wrote; the newest run's rank 0"),
    "stop": ("stop [RUN]", "ends a run; without RUN the newest that runs"),
    "pools": ("pools", "the pools, and the hosts that they have"),
    "warm": ("warm [POOL]", "makes a pool ready, so that the next cell starts at once"),
    "down": ("down [POOL]", "ends a pool: its runs, its hosts, its process"),
}
_SHOWN_RUNS = 10


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
        return config.load(self._folder)

    def remember(self, info: Any) -> None:
        """IPython's `pre_run_cell` event: the cell as the user sees it, head and all."""
        self._raw_cell = info.raw_cell

    def variables(self) -> list[str]:
        """The names that the user gave to things, for Tab."""
        hidden = self.shell.user_ns_hidden
        return [name for name in self.shell.user_ns if name not in hidden and name[0] != "_"]

    @cell_magic("taas")
    def run_cell(self, line: str, body: str) -> None:
        from taas_magic import launch

        settings = self.settings()
        asked = flags.parse(line, settings)
        cell = self._cell(line, body)
        if not any(text.strip() for text in body.splitlines()):
            raise UsageError("the cell has no lines below its head; nothing to run")
        if asked.dry_run:
            _say(launch.dry_run(asked, cell, self.shell, settings))
        else:
            launch.execute(asked, cell, self.shell, settings)

    run_cell.__doc__ = flags.HELP

    @line_magic("taas")
    def run_line(self, line: str) -> None:
        try:
            command, *words = shlex.split(line) or ["status"]
        except ValueError:
            raise UsageError(f"{_PREFIX} {line}: a quote is left open") from None
        if command not in COMMANDS:
            raise UsageError(_no_command(command))
        getattr(self, f"_{command}")(words)

    run_line.__doc__ = "Runs and pools.\n\n" + "\n".join(
        f"    %taas {usage:22} {text}" for usage, text in COMMANDS.values()
    )

    def _status(self, words: Sequence[str]) -> None:
        _take("status", words, 0)
        known = journal.runs()[:_SHOWN_RUNS]
        rows = [
            (r.run_id, r.state, r.world_size, r.pool, _clock(r.elapsed_s), r.name) for r in known
        ]
        _say(table(("run", "state", "ranks", "pool", "elapsed", "name"), rows) or "no runs yet")

    def _logs(self, words: Sequence[str]) -> None:
        words, rank = _take_rank(words)
        record = journal.find(_take("logs", words, 1))
        _say(record.logs(rank).rstrip("\n") or f"rank {rank} of {record.run_id} wrote nothing")

    def _stop(self, words: Sequence[str]) -> None:
        from taas_magic import launch

        record = _to_stop(_take("stop", words, 1))
        _say(f"stopping run {launch.stop(record.run_id, self.settings())}")

    def _pools(self, words: Sequence[str]) -> None:
        from taas_magic import launch

        _take("pools", words, 0)
        settings = self.settings()
        rows = [
            (row["pool"], row["engine"], row["state"], ", ".join(map(str, row.get("hosts") or [])))
            for row in launch.pools(settings)
        ]
        _say(table(("pool", "engine", "state", "hosts"), rows))
        _say(f"from {settings.source or 'no taas.toml: everything runs on this machine'}")

    def _warm(self, words: Sequence[str]) -> None:
        from taas_magic import launch

        settings = self.settings()
        pool = settings.pool(_take("warm", words, 1) or config.LOCAL)
        launch.warm_in_background(settings, pool.name)
        _say(f"pool {pool.name!r} warms up in the background; %taas pools tells when it is ready")

    def _down(self, words: Sequence[str]) -> None:
        from taas_magic import launch

        settings = self.settings()
        pool = settings.pool(_take("down", words, 1) or config.LOCAL)
        launch.down(pool.name, settings)
        _say(f"pool {pool.name!r} is down")

    def _cell(self, line: str, body: str) -> "Cell":
        from taas_magic.capture.payload import Cell

        raw, offset = locate(self._raw_cell, line, body)
        filename = self._compile_name(raw)
        return Cell(
            source=body,
            filename=filename,
            raw=raw,
            line_offset=offset,
            execution_count=self.shell.compile._filename_map.get(filename),
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


def locate(raw_cell: str, line: str, body: str) -> tuple[str, int]:
    """Where the magic's body lies in the cell that the user sees.

    Returns:
        The whole cell, and how many of its lines come before the body. A magic that code called
        (`get_ipython().run_cell_magic`) has no such cell: its own head and body are taken.
    """
    seen, lines = raw_cell.splitlines(), body.splitlines()
    offset = len(seen) - len(lines)
    # The head that `pragma` shortens is followed by blank lines that the cell does not have.
    blank = next((i for i, text in enumerate(lines) if text.strip()), len(lines))
    tail = [text.strip() for text in lines[blank:]]
    if offset > 0 and [text.strip() for text in seen[offset + blank :]] == tail:
        return raw_cell, offset
    return f"%%taas {line}\n{body}", 1


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns of equal width; nothing where there are no rows."""
    if not rows:
        return ""
    texts = [[str(value) for value in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in texts)


def load(shell: "InteractiveShell") -> None:
    """Puts the magics, the comment form and Tab completion into a shell; warms the local pool."""
    magics = TaasMagics(shell, Path.cwd())
    shell.register_magics(magics)
    shell.events.register("pre_run_cell", magics.remember)
    shell.input_transformers_cleanup.insert(0, pragma.transform)
    matcher = completion.matcher(magics.variables, magics.settings)
    shell.Completer.custom_matchers.append(matcher)
    _loaded[shell] = lambda: _remove(shell, magics, matcher)
    if os.environ.get("TAAS_WARM") != "0":
        _warm_local(magics)


def unload(shell: "InteractiveShell") -> None:
    """Undoes `load`."""
    _loaded.pop(shell, lambda: None)()


_loaded: dict["InteractiveShell", Callable[[], None]] = {}


def _remove(shell: "InteractiveShell", magics: TaasMagics, matcher: Any) -> None:
    shell.events.unregister("pre_run_cell", magics.remember)
    shell.input_transformers_cleanup.remove(pragma.transform)
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
        from taas_magic import launch

        launch.warm_in_background(settings)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(warm,), name="taas-load", daemon=True).start()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _take(command: str, words: Sequence[str], most: int) -> str | None:
    """The word after a command, if there is one.

    Raises:
        UsageError: There are more than the command takes.
    """
    if len(words) > most:
        raise UsageError(
            f"{_PREFIX} {command}: {words[most]!r} is too much; possible is "
            f"{_PREFIX} {COMMANDS[command][0]}"
        )
    return words[0] if words else None


def _take_rank(words: Sequence[str]) -> tuple[list[str], int]:
    rest = list(words)
    given = [i for i, word in enumerate(rest) if re.match(r"--rank(=|$)", word)]
    if not given:
        return rest, 0
    _, equals, text = rest.pop(given[0]).partition("=")
    if not equals:
        text = rest.pop(given[0]) if given[0] < len(rest) else ""
    try:
        return rest, flags.whole(0)(text)
    except ValueError:
        raise UsageError(f"--rank {text or 'R'}: possible is a whole number from 0") from None


def _to_stop(run_id: str | None) -> RunRecord:
    if run_id is not None:
        return journal.find(run_id)
    running = [record for record in journal.runs() if record.state not in ENDED_STATES]
    if not running:
        raise UsageError("no run is running; %taas status lists the newest")
    return running[0]


def _no_command(word: str) -> str:
    if word.startswith("-"):
        return f"{_PREFIX} {word}: to run a cell, begin it with %%taas (two percent signs)"
    return f"{_PREFIX} has no {word!r}{closest(word, COMMANDS)}; possible: {', '.join(COMMANDS)}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
