"""The magics `%%taas` and `%taas` and their Tab completion; `notebook.launch` runs the cells.

To keep `%load_ext` fast, import modules that need torch or Dask inside functions.
"""

import __future__

import contextlib
import contextvars
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)
from IPython.core.display_functions import display
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from taas_magic.capture.modules import claim_taas, release_taas
from taas_magic.config import LOCAL, Config, did_you_mean, load_config, size_text, working_folder
from taas_magic.display.head import columns, duration
from taas_magic.errors import PoolError, RunError, UsageError, interrupted
from taas_magic.journal import folder as journal
from taas_magic.late_imports import import_in_thread
from taas_magic.notebook import between_cells, flags
from taas_magic.notebook.flags import (
    BY_NAME,
    FLAGS,
    REPEATED,
    Flag,
    FlagParser,
    empty_cell_message,
    misplaced_pragma_warnings,
    transform_pragma,
    whole_number_parser,
)

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from taas_magic.capture.work import CellWork
    from taas_magic.notebook.runs import Run


_MODULES = (
    "taas_magic.notebook.functions",
    "taas_magic.notebook.report",
    "taas_magic.display.variables",
)
"""Modules of cells and commands. They import most of the other modules that a cell needs."""


@magics_class
class TaasMagics(Magics):
    """The magics `%%taas` and `%taas`.

    Args:
        folder: Folder of the notebook. The search for taas.toml starts here.
    """

    def __init__(self, shell: "InteractiveShell", folder: Path) -> None:
        super().__init__(shell)
        self._folder = folder
        self._raw_cell = ""
        self._last_settings: Config | None = None

    def settings(self) -> Config:
        """Read taas.toml and return its settings.

        The magics call this for each cell. So an edit of the file takes effect with the next cell.

        Raises:
            UsageError: The file has a mistake.
        """
        self._last_settings = load_config(self._folder)
        return self._last_settings

    def _settings_of_command(self) -> Config:
        """Return the settings for a command of `%taas`.

        If taas.toml now has a mistake, print a note, and return the last settings without one. So
        the user can still stop runs and end pools.

        Raises:
            UsageError: The file has had this mistake since the extension was loaded.
        """
        try:
            return self.settings()
        except UsageError as error:
            if self._last_settings is None:
                raise
            _print_line(f"note: {error}. This command uses the settings from before this mistake")
            return self._last_settings

    def on_cell_start(self, info: Any) -> None:
        """Store the cell's text, call the registered functions, and warn of misplaced pragmas.

        Other modules register their functions in `between_cells.before_cell`.

        IPython calls this method for its event `pre_run_cell`.
        """
        self._raw_cell = info.raw_cell
        for call in between_cells.before_cell:
            call(info.raw_cell)
        for line in misplaced_pragma_warnings(info.raw_cell):
            _print_line(line)

    def on_cell_end(self, result: Any) -> None:
        """Print a hint after a cell that installs PyPI's `taas` or lacks a variable of the ranks.

        A cell lacks a variable of the ranks if the cell raises NameError for a name that an earlier
        `%%taas` cell assigned only on its ranks. If a detached run returns this variable, the hint
        says how to get it from the run. Otherwise, the hint advises `--out`. If no such cell
        assigned the name, the hint names a session whose cells assigned it. The session of the
        failed cell does not count.

        IPython calls this method for its event `post_run_cell`.
        """
        if result.info is not None and INSTALLS_TAAS.search(result.info.raw_cell):
            _print_line(TAAS_IS_HERE)
        name = _missing_name(result.error_in_exec)
        run_id = between_cells.names_set_on_ranks.get(name or "")
        if run_id:
            _print_line(
                f"`{name}` comes from a detached run, which sets no variables of the notebook. "
                f'Run `%taas attach {run_id}`, then `import taas; taas.last_run.out["{name}"]`'
            )
        elif run_id is not None:
            _print_line(
                f"`{name}` was set in an earlier %%taas cell, but is not in the notebook: "
                f"run that cell again with --out {name}"
            )
        elif name and (session := _session_with(name, result.error_in_exec)):
            _print_line(
                f"`{name}` is a variable of session {session}: run the cell with --session "
                f"{session}, or return the variable to the notebook: %%taas --session {session} "
                f"--out {name}"
            )

    def variable_names(self) -> list[str]:
        """Return the names of the user's variables, for Tab completion."""
        hidden = self.shell.user_ns_hidden
        return [name for name in self.shell.user_ns if name not in hidden and name[0] != "_"]

    def pool_names(self) -> list[str]:
        """Return the names of all pools, for Tab completion."""
        try:
            return sorted(self.settings().pools)
        except UsageError:  # taas.toml is invalid; the next cell reports the error
            return []

    def session_names(self) -> list[str]:
        """Return the names of this kernel's sessions with running ranks, for Tab completion."""
        # If the module was not imported, there is no session.
        found = sys.modules.get("taas_magic.notebook.sessions")
        return [session.name for session in found.live()] if found is not None else []

    def detached_session_names(self) -> list[str]:
        """Return the names of detached sessions that this kernel can take over, for completion."""
        from taas_magic.notebook import sessions

        return [flags.session for _, flags in sessions.detached_sessions()]

    def names_in_session(self, head: str) -> list[str]:
        """Return the variables of the session that a `%%taas` line names, for Tab completion.

        The names come from the kernel's record. So completion works while the ranks are busy. If
        the line names no running session of this kernel, return an empty list.
        """
        asked = re.findall(r"--session[ =]+(\S+)", head)
        # If the module was not imported, there is no session.
        found = sys.modules.get("taas_magic.notebook.sessions")
        live = found.live() if found is not None else []
        return sorted(name for one in live if one.name in asked for name in one.names.all)

    def run_names(self) -> list[str]:
        """Return the names and the ids of the newest runs, for Tab completion."""
        plans = list(islice(journal.plans(), _LISTED_RUNS))
        names = dict.fromkeys(shlex.quote(plan.name) for plan in plans if plan.name)
        return [*names, *(plan.run_id for plan in plans)]

    @cell_magic("taas")
    def run_cell(self, line: str, body: str) -> None:
        """Run a cell, rehearse it (`--rehearse`), or print what would run (`--dry-run`).

        Without a taas.toml, a pool name such as `g2.8` stands for this machine; first print a note
        about this. If the user interrupts before the ranks start, the notebook shows one line
        instead of a traceback. For users, the help text `flags.HELP` replaces this docstring.

        Raises:
            UsageError: The cell is empty, or its flags are wrong.
            CaptureError: The cell uses an object that cannot be pickled for the ranks.
            PoolError: The pool could not be started, or the run was lost.
            RunError: The cell failed on a rank.
            KeyboardInterrupt: The user interrupted the run.
        """
        settings = self.settings()
        if not body.strip():
            raise UsageError(empty_cell_message(self._raw_cell))
        asked = flags.parse(line, settings)
        with _show_interrupt_as("Stopped by you before the ranks started."):
            import_in_thread(*_MODULES)
            from taas_magic.notebook import launch

            cell = self._make_work(line, body)
            if note := settings.pool_note(asked.pool):
                _print_line(note)
            if asked.dry_run:
                _print_line(launch.dry_run_text(asked, cell, self.shell, settings))
            elif asked.rehearse:
                from taas_magic.notebook.rehearsal import rehearse

                rehearse(asked, cell, self.shell, settings)
            else:
                launch.execute(asked, cell, self.shell, settings)

    run_cell.__doc__ = flags.HELP

    @line_magic("taas")
    def run_line(self, line: str) -> None:
        """Run the command of the line magic `%taas`, and show its result.

        If the user interrupts, the notebook shows one line instead of a traceback. Print a plain
        text, and display any other result as rich output.

        For users, the list of all commands replaces this docstring.

        Raises:
            UsageError: The command does not exist, or does not accept these words.
            PoolError: The pool is not reachable.
        """
        with _show_interrupt_as("Stopped by you."):
            import_in_thread(*_MODULES)
            shown = run_command(line, self._settings_of_command())
        if type(shown) is not str:
            display(shown)
        elif shown:
            _print_line(shown)

    def _make_work(self, line: str, body: str) -> "CellWork":
        """Return a `%%taas` cell as work for ranks: its text, its Python code, and its file name.

        If the notebook uses the future import `annotations`, the work uses it, too.
        """
        from taas_magic.capture.payload import cell_number
        from taas_magic.capture.work import CellWork

        raw, offset = locate_body(self._raw_cell, line, body)
        filename = self._compile_name(raw)
        return CellWork(
            raw=raw,
            python=self.shell.transform_cell(body),
            filename=filename,
            line_offset=offset,
            execution_count=cell_number(self.shell, filename),
            compiler_flags=self.shell.compile.flags & __future__.annotations.compiler_flag,
        )

    def _compile_name(self, raw: str) -> str:
        """Return the file name under which the kernel compiled the cell that called the magic.

        If `raw` is the cell that the user sees, the cell's stack frame has the name. Frames of
        other code in the notebook's namespace, such as code that `%%time` runs, do not count.
        Otherwise, code called the magic by `run_cell_magic`; compute the name from the text `raw`.
        """
        from taas_magic.capture.payload import cell_number

        frame = sys._getframe()
        while frame.f_back is not None and raw == self._raw_cell:
            frame = frame.f_back
            name = frame.f_code.co_filename
            if frame.f_globals is self.shell.user_ns and cell_number(self.shell, name) is not None:
                return name
        shell = self.shell
        return str(shell.compile.get_code_name(raw, shell.transform_cell(raw), 0))


def _missing_name(error: BaseException | None) -> str | None:
    """Return the undefined name that a NameError of a cell or of a rank reports.

    Return None for any other error, and for None.
    """
    if error is None or "NameError" not in (type(error).__name__, getattr(error, "etype", "")):
        return None
    found = re.search(r"name '(\w+)' is not defined", str(error))
    return found[1] if found else None


def _session_with(name: str, error: BaseException | None) -> str:
    """Return the name of a session whose cells assigned the variable `name`; "" for none.

    Args:
        error: Error of the cell that lacks the variable. The session of this cell does not count.
    """
    # If the module was not imported, there is no session.
    if (sessions := sys.modules.get("taas_magic.notebook.sessions")) is None:
        return ""
    from taas_magic.notebook import launch

    run = launch.last_run
    own = run.plan.session if run is not None and isinstance(error, RunError) else ""
    found = (one.name for one in sessions.live() if name in one.names.owned and one.name != own)
    return next(found, "")


@contextlib.contextmanager
def _show_interrupt_as(text: str) -> Iterator[None]:
    """If the block raises KeyboardInterrupt, make IPython show `text` instead of a traceback.

    If the exception already has a text that replaces its traceback, keep this text.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if hasattr(error, "_render_traceback_"):
            raise
        raise interrupted(text) from None


def locate_body(raw_cell: str, line: str, body: str) -> tuple[str, int]:
    """Find the body of a `%%taas` magic in the cell that the user sees.

    Args:
        raw_cell: The cell that the user sees.
        line: The flags after `%%taas`.
        body: The lines below the `%%taas` line, as IPython passes them to the magic.

    Returns:
        The whole cell, and the number of its lines before the body. If code called the magic by
        `get_ipython().run_cell_magic`, the body is not the end of a visible cell. In this case, the
        returned cell is made of `line` and `body`.
    """
    seen, lines = raw_cell.splitlines(), body.splitlines()
    offset = len(seen) - len(lines)
    # Compare without indentation, because IPython removes a common indentation.
    if offset > 0 and [*map(str.strip, seen[offset:])] == [*map(str.strip, lines)]:
        return raw_cell, offset
    return f"%%taas {line}\n{body}", 1


TAAS_IS_HERE = (
    "taas: `import taas` imports taas-magic, not pip's package of that name. No restart is needed."
)
INSTALLS_TAAS = re.compile(
    r"^[ \t]*(?:[!%]{1,2}[ \t]*)?(?:\S+\s+-m\s+|uv\s+)?pip[\d.]*\s+install\s"
    r"(?:[^#\n]*[\s'\"/])?taas(?:$|[\s'\"=<>~!;\[@]|-\d)",
    re.MULTILINE,
)
"""Pattern of a command that installs PyPI's `taas` with pip, as the guide of DataSphere does.

The percent sign is optional, because of IPython's automagic and `%%bash` cells.
"""


def load(shell: "InteractiveShell") -> None:
    """Register the magics, `#pragma taas` and Tab completion in a shell; warm the local pool.

    If the shell has the extension already, do nothing. Make `import taas` import taas-magic, and
    print a message if a different package named `taas` was imported before. Store a function by
    which `unload` undoes all this. Then warm the pool in a thread, unless the environment has
    `TAAS_WARM=0`; `unload` does not undo the warm-up.
    """
    if shell in _loaded:
        return
    magics = TaasMagics(shell, Path.cwd())
    tab = _matcher(magics)

    def remove() -> None:
        shell.events.unregister("pre_run_cell", magics.on_cell_start)
        shell.events.unregister("post_run_cell", magics.on_cell_end)
        release_taas()
        shell.input_transformers_cleanup.remove(transform_pragma)
        shell.Completer.custom_matchers.remove(tab)
        for kind in ("cell", "line"):
            shell.magics_manager.magics[kind].pop("taas", None)

    shell.register_magics(magics)
    shell.events.register("pre_run_cell", magics.on_cell_start)
    shell.events.register("post_run_cell", magics.on_cell_end)
    shell.input_transformers_cleanup.insert(0, transform_pragma)
    shell.Completer.custom_matchers.append(tab)
    _loaded[shell] = remove
    if claim_taas():
        _print_line(
            "taas: another package named `taas` is imported; run `import taas` again for taas-magic"
        )
    if os.environ.get("TAAS_WARM") != "0":
        _warm_local(magics)


def unload(shell: "InteractiveShell") -> None:
    """Remove from a shell what `load` has registered."""
    _loaded.pop(shell, lambda: None)()


_loaded: dict["InteractiveShell", Callable[[], None]] = {}


def _warm_local(magics: TaasMagics) -> None:
    """Start a thread that warms the local pool. Print a message if taas.toml is invalid."""
    try:
        settings = magics.settings()
    except UsageError as error:
        sys.stderr.write(f"taas: cannot warm up a pool: {error}\n")
        return
    _pending_warm_ups.append(settings)
    context = contextvars.copy_context()
    threading.Thread(
        target=context.run, args=(_warm_up, settings), name="taas-load", daemon=True
    ).start()


_pending_warm_ups: list[Config] = []
"""Settings of each warm-up of the local pool that has not begun. `%taas down` clears the list."""

_warm_up_lock = threading.Lock()


def _warm_up(settings: Config) -> None:
    """Warm the local pool unless the warm-up was cancelled, then import modules for the first cell.

    Runs in a thread of its own, because the imports would delay `%load_ext`.
    """
    from taas_magic.notebook import pools

    with _warm_up_lock:
        if settings in _pending_warm_ups:
            _pending_warm_ups.remove(settings)
            pools.warm(settings)
    import_in_thread(*_MODULES)  # now, so that the first cell starts sooner


def _print_line(text: str) -> None:
    sys.stdout.write(text + "\n")


_SHOWN_RUNS = 10


def run_command(line: str, settings: Config) -> str:
    """Run a command of `%taas`, and return the text to show.

    Args:
        line: The command and its words, such as "logs --rank 3". An empty line means "status".
        settings: Settings of taas.toml.

    Raises:
        UsageError: A quote is not closed, the command does not exist, or it does not accept these
            words. If the line begins with a flag, the message explains `%%taas`.
        PoolError: The pool is not reachable.
    """
    try:
        name, *words = shlex.split(line) or ["status"]
    except ValueError:
        raise UsageError(f"%taas {line}: a quote is not closed") from None
    if name.startswith("-"):
        raise UsageError(
            f"{name} is not a command. To run a cell, begin it with %%taas (two percent signs); to "
            "run a script, write python -m taas_magic run --gpus 2 script.py"
        )
    if name not in _COMMANDS:
        has = ", ".join(_COMMANDS)
        hint = did_you_mean(name, _COMMANDS)
        raise UsageError(f'There is no command "{name}"{hint}. The commands are: {has}')
    return _COMMANDS[name][2](words, settings)


def _status(words: Sequence[str], settings: Config) -> str:
    """Return a table of the `_SHOWN_RUNS` newest runs, for `%taas status`; "no runs" without runs.

    Raises:
        UsageError: The command has further words.
    """
    from taas_magic.notebook import runs

    _optional_word("status", words, most=0)
    rows = [("run", "state", "ranks", "pool", "elapsed", "name")]
    for run in islice(runs.newest_first(), _SHOWN_RUNS):
        # Use the same format as the run's status header.
        elapsed = duration(run.duration_s, decimals=int(not run.is_active))
        rows.append((run.id, run.state, str(run.world_size), run.pool, elapsed, run.name))
    return "\n".join(columns(rows)) if rows[1:] else "no runs"


_LOGS_FLAGS = FlagParser(
    [
        Flag("--rank", "R", whole_number_parser(0), "a rank's number, such as 3"),
        Flag("--tail", "N", whole_number_parser(1), "a number of lines, such as 50"),
        Flag("--grep", "PATTERN", str, "a regular expression such as 'loss nan'"),
    ]
)


def _logs(words: Sequence[str], settings: Config) -> str:
    """Return lines of a rank's log for `%taas logs`: its end, or what `--tail` and `--grep` select.

    Without `--rank`, choose the rank that failed first, or rank 0. If a failed rank other than 0
    was chosen, a line above the log names this rank. If there are no lines, say so.
    """
    from taas_magic.notebook import runs
    from taas_magic.notebook.logs import end_of_log, end_of_text

    given, words = _LOGS_FLAGS.parse_known_args(words)
    run, asked = runs.find(_optional_word("logs", words)), given.rank
    rank = asked if asked is not None else run.failed_rank or 0
    if given.tail is None and given.grep is None:
        shown = end_of_log(run.log_path(rank))
    else:
        shown = end_of_text(run.logs(rank, given.tail, given.grep or ""), run.log_path(rank))
    if not shown:
        found = "wrote nothing" if given.grep is None else f'wrote no line with "{given.grep}"'
        return f"rank {rank} of run {run.id} {found}"
    return shown if asked is not None or not rank else f"rank {rank}, which failed first:\n{shown}"


def _attach(words: Sequence[str], settings: Config) -> str:
    """Show a run for `%taas attach`, or take over a running session.

    With a name, first look for a running session of another kernel, then for a run. Without a name,
    choose the newest active run or detached session of this project, or else the project's newest
    run. If the project has no runs, choose among the runs of all projects in the same way.

    In a notebook, take over a chosen session that is running. In a terminal, show the session's
    running cell instead. The shown run becomes `last_run`.

    Returns:
        "" after the run has ended. After a takeover, a text with the session's ranks and variables.

    Raises:
        UsageError: The session is in this kernel already or has ended; there is no such run; or, in
            a terminal, the session runs no cell.
        RunError: In a terminal, the run did not succeed.
        KeyboardInterrupt: The user interrupted the view. The run continues.
    """
    from IPython.core.getipython import get_ipython

    from taas_magic.notebook import attach, launch, runs, sessions

    name, shell = _optional_word("attach", words), get_ipython()
    for session in sessions.live():
        if session.name == name:
            raise UsageError(f"session {name} is in this kernel. Use it: %%taas --session {name}")
    run = sessions.find_of_other_kernel(name) if name is not None else None
    try:
        run = run or runs.find_to_attach(name, working_folder(), sessions.is_hidden_from_attach)
    except UsageError:
        if name is not None and (ended := sessions.ended_text(name)):
            raise UsageError(ended) from None
        raise
    if run.is_active and sessions.flags_of(run) is not None:
        if shell is not None:
            return _take_over_session(run, shell, settings)
        run = _cell_to_watch(run)
    launch.last_run = run
    attach.attach(run)
    if shell is None and run.state != "SUCCEEDED":
        raise RunError(f"run {run.id} ended as {run.state}")
    return ""


def _take_over_session(run: "Run", shell: "InteractiveShell", settings: Config) -> str:
    """Take over a detached session, and return a text with its ranks and their variables."""
    from taas_magic.notebook import launch

    session = launch.take_over_session(run, shell, settings)
    assert session.plan is not None
    names = sorted(name for name in session.names.owned if not name.startswith("_"))
    n_ranks = session.plan.world_size
    ranks = f"{n_ranks} rank{'s' * (n_ranks > 1)}"
    return (
        f"Session {session.name} is in this kernel now: {ranks} with "
        f"{', '.join(names) or 'no variables'}. Use it: %%taas --session {session.name}"
    )


def _cell_to_watch(session: "Run") -> "Run":
    """Return the run of the cell that a session runs, so that `attach` in a terminal shows it.

    Also print how the user can take over or end the session.

    Args:
        session: The session's own run, which started the ranks.

    Raises:
        UsageError: The session runs no cell.
    """
    from taas_magic.notebook import sessions

    name = session.plan.session
    todo = (
        f"Only the kernel of a notebook can take over session {name}: run `%taas attach {name}` "
        f"there. In a terminal, `python -m taas_magic end {name}` ends it"
    )
    if (cell := sessions.running_cell(session)) is None:
        raise UsageError(f"session {name} runs no cell, so there is nothing to show. {todo}")
    _print_line(f"This is the cell that session {name} runs. {todo}.")
    return cell


def _detach(words: Sequence[str], settings: Config) -> str:
    """Detach a session of this kernel, or an active run.

    The argument is the name of a session, the id of the run that started a session, or the name or
    id of any other active run. Without an argument, detach the newest active run that is not a
    session.

    Returns:
        A text that says how to take the session over again, or how to show the run again.

    Raises:
        UsageError: There is no such active run, or the name or id belongs to a session of another
            kernel.
        PoolError: The pool's process does not respond, or cannot detach the run or session.
    """
    from taas_magic.notebook import pools, runs, sessions

    name = _optional_word("detach", words)
    own = {session.name: session for session in sessions.live()}
    if name not in own:
        run = sessions.find_of_other_kernel(name) if name is not None else None
        run = run or runs.find_active(name, chooses_sessions=False)
        flags = sessions.flags_of(run)
        if flags is None:
            pools.detach(run, settings)
            return f"Run {run.id} continues without its kernel: `%taas attach {run.id}` shows it."
        name = flags.session
        if run.id not in [session.run_id for session in own.values()]:
            state = f"belongs to another kernel. To detach it, run `%taas detach {name}` there"
            if flags.detach:
                state = f"is detached already: `%taas attach {name}` takes it over"
            raise UsageError(f"session {name} {state}")
    own[name].detach()
    return f"Session {name} stays when its kernel ends: `%taas attach {name}` takes it over."


def _stop(words: Sequence[str], settings: Config) -> str:
    from taas_magic.notebook import pools, runs

    run = runs.find_active(_optional_word("stop", words), chooses_sessions=False)
    pools.stop(run, settings)
    return f"stopping run {run.id}"


def _stacks(words: Sequence[str], settings: Config) -> str:
    """Return the stacks of an active run's processes, with the labels of the notebook's cells.

    In a terminal, use the labels that the run's kernel has recorded.
    """
    from IPython.core.getipython import get_ipython

    from taas_magic.display.head import stacks_text
    from taas_magic.notebook import launch, pools, runs

    run, shell = runs.find_active(_optional_word("stacks", words)), get_ipython()
    labels = run.context.labels if shell is None else launch.labels_of_cells(shell)
    return stacks_text(pools.stacks(run, settings), labels)


def _ranks(words: Sequence[str], settings: Config) -> str:
    from taas_magic.display.head import ranks_text
    from taas_magic.notebook import pools, runs

    run = runs.find_active(_optional_word("ranks", words))
    return ranks_text(pools.stacks(run, settings), run.head)


def _pools(words: Sequence[str], settings: Config) -> str:
    """Return the text of `%taas pools`: a table of all pools and their hosts.

    The row of a host has its runs or sessions, or how long it has been idle. Hosts that start have
    rows, too. Lines below the table show the pools' GPU-hours, refused connections, and the path of
    taas.toml. With `--check`, return a different text: a report on which hosts can run cells.
    """
    from taas_magic.notebook import pools, sessions

    checks = words[:1] == ["--check"]
    name = _optional_word("pools", words[int(checks) :], most=int(checks))
    if checks:
        return pools.check(settings, [name] if name else [])
    found = pools.rows(settings)
    names_of = {one.run_id: f"session {one.name}" for one in sessions.live()}
    rows = [("pool", "engine", "state", "host", "does", "since", "GPU-hours")]
    for pool in found:
        names = (pool.name, pool.engine, pool.state)
        for host in pool.status.hosts:
            does = (
                ", ".join(names_of.get(run, run) for run in host.runs)
                or f"idle {duration(host.idle_s or 0)}"
            )
            gpu_hours = f"{host.gpu_hours:.2f}"
            rows.append((*names, host.host, does, duration(host.allocated_s), gpu_hours))
            names = ("", "", "")  # only the pool's first row shows them
        for coming in pool.status.starting:
            does = f"imports {coming.imports}, {coming.for_s:.0f} s" if coming.imports else "starts"
            rows.append((*names, coming.host, does, "", ""))
            names = ("", "", "")
        if names[0]:
            rows.append((*names, "", "", "", ""))
    source = settings.source or "there is no taas.toml: all runs on this machine"
    # The costs count from the pool's start, and include hosts that the pool has released.
    costs = [
        f'pool "{pool.name}": {pool.status.gpu_hours:.2f} GPU-hours, '
        f"{pool.status.used_gpu_hours / pool.status.gpu_hours:.0%} of them in runs"
        for pool in found
        if pool.status.gpu_hours
    ]
    refused = [
        f'pool "{pool.name}": refused {pool.status.refused:,} connections or messages that were '
        "not authenticated, invalid, forbidden or too late"
        for pool in found
        if pool.status.refused
    ]
    return "\n".join([*columns(rows), *costs, *refused, f"({source})"])


def _warm(words: Sequence[str], settings: Config) -> str:
    from taas_magic.notebook import pools

    pool = settings.pool(_optional_word("warm", words) or LOCAL)
    pools.warm(settings, pool.name)
    return f'Pool "{pool.name}" warms up in the background; %taas pools shows when it is ready.'


def _sessions(words: Sequence[str], settings: Config) -> str:
    """Return a table of sessions for `%taas sessions`, with the memory that their ranks use.

    Ask the ranks of this kernel's sessions for their memory. If the ranks cannot answer, because
    the session runs a cell or ends, the table has "?" instead.

    The last rows are the detached sessions of other kernels, with the command that takes each one
    over. Their memory is also "?", because this kernel cannot ask their ranks.
    """
    from msgspec import convert

    from taas_magic.host.variables import RankMemory, measure_memory
    from taas_magic.notebook import launch, sessions

    _optional_word("sessions", words, most=0)
    rows = [("session", "pool", "ranks", "hosts", "memory", "GPU memory", "idle")]
    for session in sessions.live():
        assert session.plan is not None
        hosts, rss, gpu = "?", "?", "?"
        # A session that runs a cell, or whose ranks end at this moment, cannot be asked.
        with contextlib.suppress(PoolError, RunError):
            asked = launch.call_on_ranks(session, measure_memory, _shell(), settings)
            ranks = [convert(each, RankMemory) for each in asked]
            hosts = ", ".join(dict.fromkeys(rank.host for rank in ranks))
            rss = size_text(sum(rank.rss_bytes for rank in ranks))
            of_gpus = [rank.gpu_bytes for rank in ranks if rank.gpu_bytes is not None]
            gpu = size_text(sum(of_gpus)) if of_gpus else "none"
        about = (session.plan.pool, str(session.plan.world_size), hosts, rss, gpu)
        rows.append((session.name, *about, duration(session.idle_s)))
    for run, first in sessions.detached_sessions():
        about = (run.pool, str(run.world_size), ", ".join(run.hosts), "?", "?")
        rows.append((first.session, *about, f"%taas attach {first.session} takes it over"))
    return "\n".join(columns(rows)) if rows[1:] else "no sessions"


def _vars(words: Sequence[str], settings: Config) -> str:
    """Ask the ranks of a session for their variables, and return a table of the variables.

    Without a name, choose the only running session. If the ranks have no variables, say so.
    """
    from msgspec import convert

    from taas_magic.display.variables import variable_rows
    from taas_magic.host.variables import Variable, describe_variables
    from taas_magic.notebook import launch, sessions

    session = sessions.named(_optional_word("vars", words))
    asked = launch.call_on_ranks(session, describe_variables, _shell(), settings)
    rows = variable_rows([convert(each, dict[str, Variable]) for each in asked])
    return "\n".join(columns(rows)) if rows[1:] else f"session {session.name} has no variables"


def _end(words: Sequence[str], settings: Config) -> str:
    """End a session for `%taas end`, and wait until its ranks have ended.

    Without a name, end the only session of this kernel. If the session is a detached session of
    another kernel, take it over first.
    """
    from taas_magic.notebook import pools, sessions
    from taas_magic.notebook.run import Interrupts

    name = _optional_word("end", words)
    own = [session.name for session in sessions.live()]
    left = sessions.detached_session(name) if name is not None and name not in own else None
    if left is not None:
        session, _ = sessions.take_over(left, pools.pool_of_session(left, settings))
    else:
        session = sessions.named(name)
    with Interrupts() as interrupts:
        session.end(interrupts)
    return f"Session {session.name} has ended, and so have its ranks."


_DEBUG_FLAGS = FlagParser(
    [
        Flag("--rank", "R", whole_number_parser(0), "a rank's number, such as 3"),
        Flag("--debugpy"),
    ]
)


def _debug(words: Sequence[str], settings: Config) -> str:
    """Open IPython's debugger on a rank of a session, and return "" after the user has left it.

    With `--debugpy`, make debugpy listen in the rank, by default rank 0, and return how to attach.
    """
    from taas_magic.notebook import launch, sessions

    given, words = _DEBUG_FLAGS.parse_known_args(words)
    session = sessions.named(_optional_word("debug", words))
    if given.debugpy:
        import_in_thread("taas_magic.notebook.vscode")
        from taas_magic.notebook.vscode import attach_debugpy

        return attach_debugpy(session, given.rank or 0, _shell(), settings)
    launch.debug(session, given.rank, _shell(), settings)
    return ""


def _restart(words: Sequence[str], settings: Config) -> str:
    from taas_magic.notebook import launch, sessions

    name = _optional_word("restart", words) or sessions.named(None).name
    session = launch.restart(name, _shell(), settings)
    assert session.plan is not None
    count = session.plan.world_size
    return f"Session {name} has {count} new rank{'s' if count > 1 else ''}, without variables."


def _shell() -> "InteractiveShell":
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    assert shell is not None
    return shell


def _down(words: Sequence[str], settings: Config) -> str:
    """End a pool, by default the local pool, for `%taas down`.

    Before the end of the local pool, cancel its warm-ups that have not begun.
    """
    from taas_magic.notebook import pools

    pool = settings.pool(_optional_word("down", words) or LOCAL)
    if pool.name == LOCAL:
        with _warm_up_lock:
            _pending_warm_ups.clear()
    pools.down(pool.name, settings)
    return f'Pool "{pool.name}" is down.'


def _report(words: Sequence[str], settings: Config) -> str:
    """Write a report about a run, by default the newest, to a file in the current folder.

    If there is no run, write a report without one. Return a text that names the file.
    """
    from taas_magic.notebook import runs
    from taas_magic.notebook.report import write_report

    run_id = _optional_word("report", words)
    run = runs.find(run_id) if run_id else next(runs.sessions_last(), None)
    name = f"taas-report-{run.id}.txt" if run else "taas-report.txt"
    path = write_report(settings, run.path if run else None, Path(name))
    return (
        f"Wrote {path.resolve()}. It holds neither the cell nor variables, but error messages and "
        "tracebacks quote some of both. Read the file before you send it."
    )


_COMMANDS: dict[str, tuple[str, str, Callable[[Sequence[str], Config], str]]] = {
    "status": ("status", "list your newest runs, of any kernel", _status),
    "logs": (
        "logs [RUN] [--rank R] [--tail N] [--grep PATTERN]",
        "show what a rank wrote; default: of the newest run, the rank that failed first, else 0",
        _logs,
    ),
    "attach": (
        "attach [RUN]",
        "show a run again, live or ended, or take over a detached session; default: the newest "
        "run of this project",
        _attach,
    ),
    "detach": (
        "detach [RUN]",
        "let a run or a session continue without its kernel; the cell ends; default: the newest "
        "active run",
        _detach,
    ),
    "stacks": (
        "stacks [RUN]",
        "show the stacks of ranks, their children and fetchers",
        _stacks,
    ),
    "ranks": ("ranks [RUN]", "show CPU, memory, batches and line of each rank", _ranks),
    "stop": ("stop [RUN]", "end a run; default: the newest active run", _stop),
    "pools": (
        "pools [--check [POOL]]",
        "list the pools; --check shows which hosts cannot run cells, and why",
        _pools,
    ),
    "warm": ("warm [POOL]", "make a pool ready, so that the next cell starts at once", _warm),
    "sessions": (
        "sessions",
        "list the sessions of this kernel, and detached ones: ranks, hosts, memory",
        _sessions,
    ),
    "vars": ("vars [SESSION]", "list a session's variables, and whether its ranks agree", _vars),
    "debug": (
        "debug [SESSION] [--rank R] [--debugpy]",
        "open the debugger at the exception that a session's rank raised; --debugpy lets VS Code "
        "attach to the rank, by default rank 0",
        _debug,
    ),
    "end": ("end [SESSION]", "end a session: its ranks and their variables", _end),
    "restart": ("restart [SESSION]", "give a session new ranks on the same hosts", _restart),
    "down": ("down [POOL]", "end a pool: its runs, its hosts, its process", _down),
    "report": ("report [RUN]", "write a file for a bug report: versions, settings, logs", _report),
}
TaasMagics.run_line.__doc__ = "\n".join(
    [
        "Runs and pools; RUN is a run's id, its beginning, or the run's name.\n",
        *(f"    %taas {usage:22} {text}" for usage, text, _ in _COMMANDS.values()),
    ]
)


def _optional_word(name: str, words: Sequence[str], most: int = 1) -> str | None:
    """Return the only word after a command of `%taas`; None if there is no word.

    Args:
        name: Name of the command, for the error message.
        words: The words to check.
        most: Number of words that the command accepts, 0 or 1.

    Raises:
        UsageError: There are too many words.
    """
    if len(words) > most:
        raise UsageError(
            f'{name} does not take "{words[most]}". The command is used as: {_COMMANDS[name][0]}'
        )
    return words[0] if words else None


_HEAD = re.compile(r"\s*(?:%%taas|#\s?pragma\s+taas)\s(.*)")
_LINE = re.compile(r"\s*%taas\s(.*)")
_PRAGMA = re.compile(r"#\s?pragma\s+(t?a?a?)")
_POOL = re.compile(r"#!\s*([\w.-]*)")
_LISTED_RUNS = 20
_LOGS_VALUES = ("--rank", "--tail", "--grep")
"""Flags of `%taas logs` with values that Tab completion cannot suggest."""

_OF_A_RUN = ("stop", "stacks", "ranks", "report")
_OF_A_SESSION = ("vars", "debug", "restart", "end")


def _candidates(text: str, magics: TaasMagics) -> tuple[str, list[str]] | None:
    """Return the word at the cursor and its completions; None without a taas magic or comment.

    The completions depend on the text before the word:

    - after `#!`: names of pools
    - after `#pragma`: the word `taas`
    - after `%%taas` and `#pragma taas`: flags and their values
    - after `%taas`: commands and their words

    Args:
        text: The line up to the cursor.
        magics: Source of the names of pools, sessions, variables and runs.
    """
    if match := _POOL.fullmatch(text):
        return _completions(match[1], magics.pool_names())
    if match := _PRAGMA.fullmatch(text):
        return _completions(match[1], ["taas"])
    if match := _HEAD.fullmatch(text):
        return _complete_head(match[1], magics)
    if match := _LINE.fullmatch(text):
        return _complete_line(match[1], magics)
    return None


def _complete_head(text: str, magics: TaasMagics) -> tuple[str, list[str]]:
    """Return the word at the cursor and its completions, after `%%taas` or `#pragma taas`.

    After a flag with a value, complete the value: names of pools, sessions or variables, or the
    flag's examples. If the value may be missing, also complete flags. In any other place, complete
    only flags. Leave out the flags that the line has already, except flags that may be repeated.
    """
    words = text.split(" ")
    flag, equals, word = words[-1].partition("=")
    if not equals:
        flag, word = ([word for word in words[:-1] if word] or [""])[-1], words[-1]
    if flag in ("--pool", "--data-pool"):
        return _completions(word, magics.pool_names())
    if flag == "--session":
        return _completions(word, magics.session_names())
    if flag in ("--out", "--send"):
        at_ranks = magics.names_in_session(text) if flag == "--out" else []
        names = dict.fromkeys([*at_ranks, *magics.variable_names()])
        return _completions(word.rpartition(",")[2], names)
    others = [f.name for f in FLAGS if f.name not in words or f.name in REPEATED]
    if flag in BY_NAME and BY_NAME[flag].metavar:
        may_be_alone = BY_NAME[flag].if_alone is not None and not equals
        return _completions(word, [*BY_NAME[flag].examples, *(others if may_be_alone else ())])
    return _completions(word, others)


def _complete_line(text: str, magics: TaasMagics) -> tuple[str, list[str]]:
    """Return the word at the cursor and its completions, after `%taas`.

    Complete the command first, and then what this command accepts: names of pools, sessions or
    runs, and flags.
    """
    *before, word = text.split(" ")
    before = [each for each in before if each]
    if not before:
        return _completions(word, _COMMANDS)
    if before[-1] in _LOGS_VALUES:
        return word, []
    if before[0] in ("warm", "down"):
        return _completions(word, magics.pool_names())
    if before[0] in _OF_A_SESSION:
        names = [*magics.session_names(), *magics.detached_session_names()]
        return _completions(
            word, [*names, "--rank", "--debugpy"] if before[0] == "debug" else names
        )
    if before[0] == "attach":
        return _completions(word, [*magics.detached_session_names(), *magics.run_names()])
    if before[0] == "detach":
        return _completions(word, [*magics.session_names(), *magics.run_names()])
    if before[0] == "pools":
        return _completions(word, magics.pool_names() if before[-1] == "--check" else ["--check"])
    if before[0] == "logs":
        return _completions(word, [*magics.run_names(), *_LOGS_VALUES])
    return _completions(word, magics.run_names() if before[0] in _OF_A_RUN else ())


def _completions(word: str, possible: Iterable[str]) -> tuple[str, list[str]]:
    return word, [name for name in possible if name.startswith(word)]


def _matcher(magics: TaasMagics) -> Callable[[CompletionContext], SimpleMatcherResult]:
    """Return a matcher for `shell.Completer.custom_matchers` (version 2 of IPython's API).

    In a taas magic or comment, the matcher's completions replace IPython's own completions. In a
    cell of a session, the matcher adds the names that the ranks have. In any other text, the
    matcher returns no completions.
    """

    @context_matcher(identifier="taas_magic")
    def taas(context: CompletionContext) -> SimpleMatcherResult:
        found = _candidates(context.text_until_cursor, magics)
        if found is None:
            head = transform_pragma(context.full_text.splitlines() or [""])[0]
            in_cell = context.token and _HEAD.match(head)
            names = magics.names_in_session(head) if in_cell else []
            names = _completions(context.token, names)[1]
            return {"completions": [SimpleCompletion(name, type="taas") for name in names]}
        word, names = found
        return {
            "completions": [SimpleCompletion(name, type="taas") for name in names],
            "matched_fragment": word,
            "suppress": True,
            "ordered": True,
        }

    matching: Callable[[CompletionContext], SimpleMatcherResult] = taas
    return matching
