"""Run a cell or a function on ranks; with `--dry-run`, describe what would run."""

import linecache
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any

import psutil
from IPython.core.inputtransformer2 import leading_empty_lines
from msgspec import structs

from taas_magic import registry
from taas_magic.capture import modules, payload, process_state
from taas_magic.capture.names import functions_of, unknown_result_message
from taas_magic.capture.payload import CellSource, Payload
from taas_magic.capture.session_variables import RankVariables
from taas_magic.capture.work import VALUE, VALUES, CellWork, FunctionWork, Work
from taas_magic.config import Config, size_text, working_folder
from taas_magic.data import service
from taas_magic.display.head import RunState
from taas_magic.display.view import SilentView, View
from taas_magic.errors import CaptureError, CellSyntaxError, PoolError, UsageError, listed
from taas_magic.host.debugger import last_exception
from taas_magic.host.spec import Origin, RunSpec, environ_changes
from taas_magic.host.variables import list_names
from taas_magic.journal import folder as journal
from taas_magic.journal.folder import RunContext, RunFolder
from taas_magic.notebook import (
    attach,
    between_cells,
    own_values,
    pools,
    replaced_values,
    runs,
    sessions,
)
from taas_magic.notebook.flags import check_ranks
from taas_magic.notebook.run import BackgroundCall, Interrupts, RunDriver, RunFetchers
from taas_magic.notebook.runs import Run
from taas_magic.notebook.sessions import Session
from taas_magic.plan import (
    NO_GPU,
    Flags,
    Plan,
    RunOptions,
    choose_data_pool,
    make_plan,
    new_run_id,
    place_fetchers,
    variable_name,
)
from taas_magic.pool.client import Pool, PoolConnection
from taas_magic.store import rule as store
from taas_magic.store.rule import FolderIdentity

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


last_run: Run | None = None
"""The run that this kernel has started or shown by `%taas attach` last; None before any run."""

NO_LOADER = (
    "no effect, because the cell or function uses no registered loader; write "
    "taas.register(loader) in an earlier cell"
)

NO_LOADER_SENT = (
    "no effect, because this cell sends no registered loader to the ranks. To send a loader again "
    "that the ranks already have, use --send NAME"
)

PRUNE_S = 60.0
"""Minimum seconds from the last removal of old run folders to a removal by a cell of a session.

A session may have many short cells. A run without a session always removes old run folders.
"""

_pruned_at = float("-inf")
"""Monotonic time at which this kernel last removed old run folders."""

_MAX_LISTED = 4
"""Maximum number of ranks that the error message of `debug` proposes instead of the given rank."""

_shown_notes: set[str] = set()
"""Keys (`_note_key`) of the notes that views of this kernel have shown."""


def execute(flags: Flags, work: Work, shell: "InteractiveShell", config: Config) -> Run:
    """Run a cell or a function on the ranks of a pool, and store the variables of `--out`.

    The steps are:

    - For a cell of a session: complete the flags by the session's flags. If this kernel has just
      taken the session over, ask the ranks for the names of their variables.
    - Make the plan.
    - Pickle the objects that the work uses, while a thread checks the project store.
    - Check `--out`, add fetchers and notes to the plan, and write the run folder.
    - Start the run, or run the cell on the ranks of its session.
    - Block until the view shows the end of the run, or until the run is detached.
    - Store the variables of `--out`, and raise the error of a failed run.

    At the end, also if the run failed, record names for later cells:

    - Without a session: the names that the work assigned on the ranks. If a later cell fails
      because the notebook lacks such a name, the user gets a hint.
    - In a session: the variables of `--out` that were returned.
    - Variables of the notebook that the cell assigned anew, but only on the ranks. If a later cell
      reads such a variable, the user gets a note.

    Returns:
        The run, also after the kernel has detached it.

    Raises:
        UsageError: The flags are impossible, or `--out` names a variable that no rank will have.
        StoreError: The project store is not usable, or another run writes to it.
        CellSyntaxError: The cell is not valid Python.
        CaptureError: The work uses an object that cannot be pickled for the ranks.
        ResultError: The run succeeded, but not all variables of `--out` could be returned.
        PoolError: The pool could not be started, or the run was lost.
        RunError: The work failed on a rank.
        KeyboardInterrupt: The user interrupted the run.
    """
    session, asked = sessions.for_cell(flags), flags
    if session is not None:
        flags = session.with_session_flags(flags)
        check_ranks(flags)
        learn_names(session, shell, config)
        sessions.check_names(flags, shell.user_ns)
    pool = pools.named(flags.pool, config)
    plan = plan_of_cell(flags, session, pool, config)
    assert plan.store is not None
    rule = plan.store
    checking = BackgroundCall(lambda show_lines: store.prepare(rule))  # may wait for the disk
    names = session.names if session is not None else None
    captured = capture_work(work, shell, config, known=names, send=flags.send)
    checking.outcome.result()
    if problem := out_problem(flags, captured, shell, names):
        raise UsageError(problem)
    if captured.choice is not None:
        plan = structs.replace(plan, notes=(*plan.notes, *captured.choice.notes))
    plan = with_fetchers(plan, flags, tuple(captured.loaders), config, asked.cpus)
    if session is not None:
        plan = structs.replace(plan, data=session.number_fetchers(plan.data))
    plan = structs.replace(plan, notes=_notes_to_show(plan.notes, _differences(captured)))
    driver, spec = prepare_run(plan, captured, pool, shell, config, session=session)
    if session is not None:
        _run_in_session(driver, spec, pool, config, session, captured)
    else:
        run_to_end(driver, spec, pool, config, flags.detach)
    returned = {*map(variable_name, plan.out)}
    old = {name: shell.user_ns[name] for name in returned if name in shell.user_ns}
    try:
        driver.store_results(shell.user_ns, session_stays=session in sessions.live())
    finally:
        sys.stdout.write(replaced_values.note_on_users(shell.user_ns, old))
        own_values.record(captured, driver.head)
        if session is not None:
            session.names.record_returned(driver.run.out)
        else:
            later = returned if driver.is_detached else ()
            between_cells.names_set_on_ranks.update(
                {name: plan.run_id if name in later else "" for name in captured.stores}
            )
    return driver.run


def capture_work(work: Work, shell: "InteractiveShell", config: Config, **options: Any) -> Payload:
    """Find and pickle the notebook objects that a cell or a function uses.

    Args:
        work: The cell or function.
        shell: IPython shell with the notebook's variables.
        config: Settings of taas.toml.
        options: Further keyword arguments of `payload.capture`, such as `problems`.

    Raises:
        CaptureError: An object cannot be pickled for the ranks, the objects are too large, or a
            module of the project cannot be read.
        CellSyntaxError: The cell is not valid Python.
    """
    try:
        settings = capture_settings(shell, config)
        return payload.capture(work, shell.user_ns, **settings, **options)
    except SyntaxError as error:
        if not isinstance(work, CellWork):
            raise
        raise _cell_syntax_error(error, work) from None


def prepare_run(
    plan: Plan,
    captured: Payload,
    pool: Pool,
    shell: "InteractiveShell",
    config: Config,
    *,
    session: Session | None = None,
    reads_only: bool = False,
) -> tuple[RunDriver, RunSpec]:
    """Create the folder of a new run with all its files, and the objects to start the run.

    Start no process. For a cell of a session, add 1 to the session's number of cells. Unless the
    pool is on this machine, the `RunSpec` lists the modules that the pool's hosts must have.

    Args:
        plan: Plan of the run.
        captured: The pickled objects for the ranks.
        pool: Pool that runs the ranks.
        shell: The notebook's IPython shell.
        config: Settings of taas.toml.
        session: The session whose ranks run the cell. None for a run that starts its own ranks.
        reads_only: Whether the run leaves the project store unlocked, so that at the same time a
            second run may write to the store.

    Returns:
        The `RunDriver` with which the kernel starts and follows the run. And the `RunSpec` that
        describes the run to the pools' processes.

    Raises:
        PoolError: The state folder is not writable.
    """
    folder = _write_run_folder(plan, captured, config)
    assert plan.store is not None
    spec = RunSpec.for_pool(
        pool.config.engine,
        plan,
        folder,
        origin(shell, plan.store.path),
        captured.requires,
        reads_only=reads_only,
        session=session.run_id if session is not None else "",
        cell_number=session.count_cell() if session is not None else 0,
    )
    labels = {filename: source.label for filename, source in captured.sources.items()}
    context = _context(plan, pool, config)
    context.labels = labels | labels_of_cells(shell)
    with folder.discard_on_error():
        folder.write_context(context)
    return RunDriver(RunState(plan, folder.path)), spec


def _run_in_session(
    driver: RunDriver,
    spec: RunSpec,
    pool: Pool,
    config: Config,
    session: Session,
    captured: Payload,
) -> None:
    """Run a cell on a session's ranks. If the session has no ranks yet, start them first.

    The view first shows the lines that threads of the ranks printed since the last cell. During the
    cell, pass all its events to `session`, and set `session.running_cell` to the cell's run id.

    After the cell, also after an error, record in `session` which variables the ranks have, and
    which rank failed first. If a rank lacked a variable that only other ranks have, print a hint.
    If the session has ended, print the reason.
    """
    driver.listener = session.record_event
    for event in session.pop_output():
        driver.queue_event(event)
    session.running_cell = driver.plan.run_id
    try:
        run_to_end(driver, spec, pool, config, session=session)
    finally:
        session.running_cell = ""
        session.end_cell(driver, captured)
        if hint := session.missing_name_hint(driver.run.failures):
            pools.print_line(hint)
        session.record_failure(driver.run)
        if line := session.end_message(may_have_died=driver.has_lost_rank):
            pools.print_line(line)


def _context(plan: Plan, pool: Pool, config: Config) -> RunContext:
    """Return the facts that other processes read in a run's file `run.json`.

    These facts are the folders of the project, of the ranks' pool and of the fetchers' pool, and
    the setting `notify`. The labels of the notebook's cells are missing; the caller may add them.
    """
    data_pool = pools.named(plan.data.pool, config) if plan.data else None
    return RunContext(
        project=str(working_folder()),
        pool_folder=str(pool.folder.path),
        data_folder=str(data_pool.folder.path) if data_pool else "",
        notify=config.runs.notify or "",
    )


def _write_run_folder(plan: Plan, captured: Payload, config: Config) -> RunFolder:
    """Create the folder of a new run, and write all files that its ranks and fetchers read.

    The files are the payload, the registered loaders and, if the run has fetchers, the fetchers'
    settings. If a file cannot be written, or the user interrupts, remove the folder.

    If batches may travel between hosts, and the network of the ranks' or the fetchers' pool is not
    private, one of the files requires TLS for batches.
    """
    folder = RunFolder.create(plan.run_id, plan, captured.work.raw)
    # Batches need TLS if they cross between hosts on a network that is not private.
    needs_tls = plan.data is not None and plan.data.crosses
    if plan.data is not None and needs_tls:
        used = (config.pool(plan.pool), config.pool(plan.data.pool))
        needs_tls = any(pool.network != "private" for pool in used)
    with folder.discard_on_error():
        payload.write(captured, folder.payload)
        registry.write_files(captured.loaders, folder.path, plan, config.data, needs_tls)
        if plan.data is not None:
            payload.write_settings(captured, service.settings_file(folder.path))
    return folder


def _differences(captured: Payload) -> tuple[str, ...]:
    """Return notes on constants, functions and log handlers that the ranks do not get."""
    constants = modules.notes_on_constants(captured.modules, captured.work.python)
    return (*constants, *captured.notes)


def _notes_to_show(notes: Sequence[str], differences: Sequence[str]) -> tuple[str, ...]:
    """Return the notes for the status header of a run; leave out repeated notes.

    Two kinds of notes would be repeated in many runs: notes on a missing GPU, and `differences`.
    Leave these notes out if a view of this kernel has shown them. Always return all other notes.

    Args:
        notes: Notes of the plan.
        differences: The notes that `_differences` returns.
    """
    lasting = {*differences, *(note for note in notes if note.startswith(NO_GPU))}
    repeated = {note for note in lasting if _note_key(note) in _shown_notes}
    return tuple(note for note in (*notes, *differences) if note not in repeated)


def _note_key(note: str) -> str:
    """Return the text that `_shown_notes` has for a note, without the number of CPU processes."""
    return note.partition(";")[0] if note.startswith(NO_GPU) else note


def _cell_syntax_error(error: SyntaxError, cell: CellWork) -> CellSyntaxError:
    """Convert a SyntaxError of the compiled code to a CellSyntaxError of the notebook's cell.

    In the new error, all line numbers count from the top of the cell, also in the message. So the
    `%%taas` line or the taas comments count, too. The new error's text shows the label of the cell
    and the line with the error.
    """
    # Examples: "expected an indented block after 'if' statement on line 1", "(detected at line 1)"
    error.msg = re.sub(
        r"(?<= at line | on line )\d+",
        lambda found: str(int(found[0]) + cell.lines_above),
        error.msg,
    )
    error.filename = cell.label
    error.lineno = (error.lineno or 1) + cell.lines_above
    error.end_lineno = error.end_lineno and error.end_lineno + cell.lines_above
    error.text = cell.raw.splitlines()[error.lineno - 1]
    return CellSyntaxError("".join(traceback.format_exception_only(error)).rstrip())


def run_to_end(
    driver: RunDriver,
    spec: RunSpec,
    pool: Pool,
    config: Config,
    detaches: bool = False,
    session: Session | None = None,
    *,
    is_shown: bool = True,
) -> None:
    """Start the fetchers and ranks of a run, show the run until it has ended, and end the fetchers.

    The steps are:

    - Start the fetchers. Unless the run has `--prefill`, request the ranks' hosts. Wait for the
      fetchers and the requested hosts. If this fails, remove the run's folder.
    - Open the view, which shows the plan's notes. Record these notes in `_shown_notes`.
    - If the run has `--prefill`, wait until the fetchers have prepared the data. Then request the
      ranks' hosts, and wait for them.
    - If a session has no ranks yet, start them. (If it has ranks, no step requests hosts for them.)
      Wait until the fetchers of the session's earlier cells have the changed files.
    - Start the run, and follow it until it has ended or is detached.

    Do not end the fetchers of a detached run. If a cell of a session has started, do not end its
    fetchers either, because the session ends them later.

    While the ranks start, remove the folders of the oldest runs if all run folders together exceed
    a limit in `[runs]` of taas.toml. After cells of a session, do this at most every `PRUNE_S`
    seconds.

    Args:
        driver: The kernel's side of the run.
        spec: Description of the run for its pools.
        pool: Pool that runs the ranks.
        config: Settings of taas.toml.
        detaches: Whether to detach the run as soon as all ranks have started.
        session: The session whose ranks run the cell. None for a run that starts its own ranks.
        is_shown: Whether the notebook shows the run, and keeps it as `last_run`.
    """
    global last_run
    plan = driver.plan
    data_pool = pools.named(plan.data.pool, config) if plan.data else None
    fetchers = None
    with RunFolder(driver.path).lock_for_launch(), Interrupts() as interrupts, ExitStack() as stack:
        if data_pool is not None:
            fetchers = RunFetchers(data_pool, spec, driver.queue_event, waits=data_pool is not pool)
            closing = fetchers
            stack.callback(lambda: closing.close(interrupts, driver.is_detached))
        try:  # if the run gets no hosts, remove its folder
            if session is not None and session.is_started:
                connection = session.connection
            elif not plan.prefill:
                connection = pools.wait_for_pool(pool, interrupts, len(plan.hosts))
            if fetchers:
                fetchers.wait_for_start(interrupts, pools.print_line)
        except (PoolError, KeyboardInterrupt):
            driver.discard()
            raise
        view: View | SilentView = SilentView(driver.head)
        if is_shown:
            last_run, view = driver.run, View(driver.head)
            _shown_notes.update(map(_note_key, plan.notes))
        with driver.ending_on_error(view):
            if fetchers and plan.prefill:
                driver.wait_for_prefill(fetchers, view, interrupts)
            if plan.prefill:
                connection = pools.wait_for_pool(pool, interrupts, len(plan.hosts))
            if session is not None:
                start_session(
                    session, connection, spec.origin, driver.cell_text(), config, interrupts
                )
                session.wait_for_fetchers(interrupts)
                connection, spec = session.connection, spec.for_session()
            driver.start(
                connection, spec, fetchers.pop_events() if fetchers else [], view, interrupts
            )
        if fetchers and session is not None:
            session.keep_fetchers(fetchers)
            stack.pop_all()
        elif fetchers:
            fetchers.forward_events(connection)
        if is_shown and session is None:
            _prune_runs(config)  # now, while the ranks start
        driver.follow(
            connection,
            view,
            interrupts,
            detaches,
            outlives_kernel=lambda: session is not None and session.is_detached,
        )
        if is_shown and session is not None and time.monotonic() - _pruned_at > PRUNE_S:
            _prune_runs(config)


def _prune_runs(config: Config) -> None:
    """Remove folders of the oldest ended runs if the folders of all runs together exceed a limit.

    The limits are in the table `[runs]` of taas.toml: a number of folders and a total size. Record
    the time of the removal in `_pruned_at`.
    """
    global _pruned_at
    _pruned_at = time.monotonic()
    journal.prune(config.runs.keep, config.runs.keep_bytes)


def start_session(
    session: Session,
    connection: PoolConnection,
    origin: Origin,
    cell: str,
    config: Config,
    interrupts: Interrupts,
) -> None:
    """Start the ranks of a session, and wait for the start; do nothing if they were started before.

    Args:
        session: The session, which has a plan.
        connection: Connection to the pool that runs the ranks.
        origin: The notebook's settings that the ranks inherit.
        cell: Text of the cell, or of the command, that starts the session.
        config: Settings of taas.toml.
        interrupts: The user's interrupts.

    Raises:
        PoolError: The pool has no hosts for the ranks.
        KeyboardInterrupt: The user interrupted the wait twice.
    """
    if session.is_started:
        return
    assert session.plan is not None
    context = _context(session.plan, pools.named(session.plan.pool, config), config)
    idle_s = config.runs.session_idle_s
    session.start(connection, origin, cell, context, idle_s, interrupts)


def call_on_ranks(
    session: Session,
    function: Callable[..., Any],
    shell: "InteractiveShell",
    config: Config,
    *args: Any,
) -> list[Any]:
    """Call `function(*args)` on each rank of a session, and return the results by rank.

    The call is a run of its own, like a cell of the session. But the notebook does not show this
    run, and the run does not lock the project store or report hangs. At the end, also after an
    error, record which names the ranks have, and remove the run's folder.

    Raises:
        PoolError: The session has ended, or is running a cell.
        RunError: The call failed.
        KeyboardInterrupt: The user interrupted the call.
    """
    work = FunctionWork(function, args, raw=f"{function.__name__}()")
    flags = session.with_session_flags(structs.replace(session.flags, out=(VALUES,)))
    pool = pools.named(flags.pool, config)
    plan = plan_of_cell(flags, session, pool, config)
    plan = structs.replace(plan, hang_s=0.0, out=flags.out, ranks=())
    settings = capture_settings(shell, config)
    captured = payload.capture(work, {}, known=session.names, **settings)
    driver, spec = prepare_run(
        plan, captured, pool, shell, config, session=session, reads_only=True
    )
    driver.listener = session.record_event
    try:
        run_to_end(driver, spec, pool, config, session=session, is_shown=False)
        driver.store_results({})
        return driver.run.results
    finally:
        session.end_cell(driver, captured, counts=False)
        spec.folder.discard()


def debug(session: Session, rank: int | None, shell: "InteractiveShell", config: Config) -> None:
    """Open IPython's debugger on a rank of a session, at the last exception of that rank.

    First ask all ranks for their last exceptions. Then run `%debug` as a cell of the session on
    this rank only. The call blocks until the user leaves the debugger.

    Args:
        rank: Number of the rank; None for the rank that failed first in the last failed cell.

    Raises:
        UsageError: No cell of the session has failed, the session has no such rank, or the rank has
            raised no exception. In the last two cases, the message names ranks that have raised an
            exception, and the command to debug one of them.
        PoolError: The session has ended, or is running a cell.
        RunError: The debugger failed.
        KeyboardInterrupt: The user interrupted the debugger.
    """
    chosen = session.failed_rank if rank is None else rank
    if chosen is None:
        raise UsageError(
            f'no cell of session "{session.name}" has failed, so there is nothing to debug; use '
            "`breakpoint()` in a cell to stop there"
        )
    raised = call_on_ranks(session, last_exception, shell, config)
    last = len(raised) - 1
    if chosen > last:
        ranks = f"ranks 0 to {last}" if last else "only rank 0"
        raise UsageError(
            f'--rank {chosen}: session "{session.name}" has {ranks}. '
            f"{_debug_advice(session, raised)}"
        )
    if not raised[chosen]:
        raise UsageError(
            f'rank {chosen} of session "{session.name}" has raised no exception, so there is '
            f"nothing to debug. {_debug_advice(session, raised)}"
        )
    flags = structs.replace(session.flags, ranks=(chosen,), out=(), send=(), cpus=0, hang_s=0.0)
    flags = structs.replace(flags, timeout_s=None, log_ranks=None)
    title = f"%taas debug {session.name} --rank {chosen}"
    execute(
        flags,
        CellWork("%debug", shell.transform_cell("%debug"), f"<{title}>", title=title),
        shell,
        config,
    )


def _debug_advice(session: Session, raised: Sequence[str]) -> str:
    """Return which ranks have raised an exception, and the command to debug one of them.

    Args:
        raised: Type and text of each rank's last exception, by rank; "" for none.
    """
    ranks = [rank for rank, text in enumerate(raised) if text]
    if not ranks:
        return "No rank has raised an exception. Use `breakpoint()` in a cell to stop there"
    shown = listed([f"rank {rank} ({raised[rank]})" for rank in ranks], _MAX_LISTED)
    first = session.failed_rank if session.failed_rank in ranks else ranks[0]
    return (
        f"Ranks that have raised an exception: {shown}. Run: %taas debug {session.name} --rank "
        f"{first}"
    )


def learn_names(session: Session, shell: "InteractiveShell", config: Config) -> None:
    """Ask the ranks of a session for the names of their variables, and record these names.

    This is necessary after this kernel has taken a session over, because `session` then lacks the
    names. If `session` has the names already, do nothing.

    For a variable with a simple value, also record the digest of the value. If ranks have different
    values, record the digest of rank 0's value.

    Also record the kernel's present process state as the process state of the ranks. So later cells
    send this state only after it has changed.

    Raises:
        PoolError: The session has ended, or is running a cell.
        RunError: The call failed on a rank.
        KeyboardInterrupt: The user interrupted the call.
    """
    if not session.has_unknown_names:
        return
    session.names.assume_state(process_state.collect())
    variables: dict[str, str] = {}
    code: set[str] = set()
    for digests, others in reversed(call_on_ranks(session, list_names, shell, config)):
        variables |= digests  # ranks are in reverse order, so rank 0's digests win
        code |= {*others}
    session.names.take_over(variables, code)
    session.has_unknown_names = False


def take_over_session(run: Run, shell: "InteractiveShell", config: Config) -> Session:
    """Take over a detached session, show a cell of the session, and ask for its ranks' variables.

    Show the running cell, and block until this cell has ended. If no cell is running, show the
    newest cell that continued after its kernel was gone, unless an earlier takeover has shown this
    cell. The run of the shown cell becomes `last_run`. If there is no cell to show, show nothing.

    Args:
        run: The session's own run, which started the ranks.
        shell: The notebook's IPython shell.
        config: Settings of taas.toml.

    Returns:
        The session, which now belongs to this kernel.

    Raises:
        UsageError: taas.toml does not have the session's pool any more.
        PoolError: The session has ended or is not detached, or the pool does not respond.
        RunError: A rank failed when it was asked for its variables.
        KeyboardInterrupt: The user interrupted the view, and the cell continues. Or the user
            interrupted the request for the variables. In both cases, the session now belongs to
            this kernel, and the next cell of the session asks for the variables.
    """
    global last_run
    session, cell = sessions.take_over(run, pools.pool_of_session(run, config))
    if cell:
        last_run = runs.find(cell)
        attach.attach(last_run)
    learn_names(session, shell, config)
    return session


def restart(name: str, shell: "InteractiveShell", config: Config) -> Session:
    """End a session's ranks, and start new ranks in the same pool with the session's flags.

    The new session has no variables, and replaces the old session under the same name. While the
    pool gets hosts for the new ranks, print its progress.

    Raises:
        UsageError: There is no such session.
        PoolError: The old ranks did not end in time, or the pool cannot start new ranks.
        KeyboardInterrupt: The user interrupted the wait.
    """
    with Interrupts() as interrupts:
        new = sessions.replace(name, interrupts)
        pool = pools.named(new.flags.pool, config)
        plan_of_cell(new.flags, new, pool, config)
        assert new.plan is not None and new.plan.store is not None
        connection = pools.wait_for_pool(pool, interrupts, len(new.plan.hosts))
        started = origin(shell, new.plan.store.path)
        start_session(new, connection, started, f"%taas restart {name}", config, interrupts)
    return new


def plan_of(flags: Flags, pool: Pool, config: Config) -> Plan:
    """Plan a run: assign its ranks to the pool's hosts, and choose the project store.

    Allocate no hosts, and start nothing.

    Raises:
        UsageError: The pool has no room for so many ranks.
        StoreError: The project store, or a folder of `--shared-writes`, is not usable.
    """
    settings = config.store
    rule = store.choose(
        str(working_folder()),
        flags.store or settings.path or "",
        flags.store_writes,
        flags.shared_writes,
        settings.limit_bytes,
        settings.overwrite,
    )
    plan = make_plan(flags, pool.capacity(), new_run_id(), pool.config.max_hosts, rule)
    notes = (*plan.notes, *pool.notes(), *store.warnings(rule, plan.world_size))
    hang_s = _hang_s(flags, config)
    return structs.replace(plan, notes=notes, hang_s=hang_s, trusted=pool.config.trusted)


def plan_of_cell(flags: Flags, session: Session | None, pool: Pool, config: Config) -> Plan:
    """Return the plan of a cell. If the cell runs in a session, prepare the session for the cell.

    If the user has left an earlier cell of the session by interrupts, first wait for its end.

    The plan of a session's first cell also becomes the plan of the session. The plan of a later
    cell combines the ranks and hosts of the first cell, the options of the later cell, and a new
    run id.

    Raises:
        UsageError: The pool has no room for so many ranks.
        StoreError: The project store, or a folder of `--shared-writes`, is not usable.
        PoolError: The session is running a cell, or the pool's process is silent.
        KeyboardInterrupt: The user interrupted the wait.
    """
    if session is None:
        return plan_of(flags, pool, config)
    session.finish_left_cell()
    if session.plan is None:
        return session.begin_cell(plan_of(flags, pool, config))
    options = {name: getattr(flags, name) for name in RunOptions.__struct_fields__}
    plan = structs.replace(session.plan, **options, run_id=new_run_id(), notes=pool.notes())
    return session.begin_cell(structs.replace(plan, hang_s=_hang_s(flags, config)))


def _hang_s(flags: Flags, config: Config) -> float:
    return config.runs.hang_s if flags.hang_s is None else flags.hang_s


def with_fetchers(
    plan: Plan,
    flags: Flags,
    loaders: Sequence[str],
    config: Config,
    cpus: int | None = None,
) -> Plan:
    """Add to a run's plan the fetchers of its registered loaders, and the fetchers' pool and hosts.

    Allocate no hosts. The result depends on the loaders and on the plan's `--cpus`:

    - If the cell sends no registered loader, add no fetchers, and remove `prefill`. Add a note that
      lists the given flags without effect, such as `--units`.
    - If the plan has no `--cpus`, add no fetchers, and remove `prefill`.
    - Otherwise, add the fetchers. If several pools are possible for the fetchers, a note says which
      one is used. If the pool has too few hosts for separate fetchers, a note says this, too.

    Args:
        flags: Flags of the cell, completed by `Session.with_session_flags` for a session.
        loaders: Names of the registered loaders that the cell sends to the ranks.
        config: Settings of taas.toml.
        cpus: Value of `--cpus` in the cell itself, or 0. It only decides whether the note lists
            `--cpus`. In a session, it can differ from `flags.cpus`, which may come from the first
            cell. By default (None), use `flags.cpus`.

    Raises:
        UsageError: taas.toml has no such pool.
    """
    if not loaders:
        own = flags if cpus is None else structs.replace(flags, cpus=cpus)
        idle = [f"--{name}" for name in ("cpus", "units", "prefill") if getattr(own, name)]
        why = NO_LOADER_SENT if plan.session else NO_LOADER
        said = [f"{', '.join(idle)}: {why}"] if idle else []
        return structs.replace(plan, prefill=None, notes=(*plan.notes, *said))
    if not plan.cpus:
        return structs.replace(plan, prefill=None)
    settings, chosen = choose_data_pool(plan.pool, flags.data_pool, config)
    pool = pools.named(settings.name, config)
    rank_hosts = len(plan.hosts) if pool is pools.named(plan.pool, config) else 0
    cores = pool.capacity().cores
    data, shared = place_fetchers(loaders, plan.cpus, settings, cores, rank_hosts)
    notes = (*plan.notes, *filter(None, (chosen, shared)))
    return structs.replace(plan, data=data, notes=notes)


def out_problem(
    flags: Flags,
    captured: Payload,
    shell: "InteractiveShell",
    known: RankVariables | None = None,
) -> str | None:
    """Return an error message if `--out` names a variable that no rank will have, else None.

    When the work ends, the ranks will have these variables:

    - the variables that the kernel sends, and the variables that the work assigns
    - in a session: the variables in `known`
    - in a session: the global variables that functions of the notebook assign, because the ranks
      may have these functions from earlier cells

    In two cases, the variables cannot be predicted, and the result is None: the work may assign any
    variable, for example by `exec`; or the session's ranks have functions or classes that earlier
    cells defined.

    Args:
        flags: Flags of the cell or function.
        captured: The objects that the cell or function uses, and the cell's text.
        shell: The notebook's IPython shell.
        known: Variables that the ranks of the cell's session already have. None without a session.
    """
    if not flags.out or captured.sets_any or (known is not None and known.has_functions):
        return None
    asked = [name for name in map(variable_name, flags.out) if name != VALUE]
    names = {value.name for value in captured.captured} | captured.stores
    functions = functions_of(shell.user_ns) if known else []
    names |= known.all if known else set()
    return unknown_result_message(asked, captured.work.python, names, shell.user_ns, functions)


def capture_settings(shell: "InteractiveShell", config: Config) -> dict[str, Any]:
    """Return the keyword arguments of `payload.capture` that are the same for all cells and jobs.

    They are: the project folder, the size limit, and a function that finds the text of a cell.
    """
    return {
        "project": working_folder(),
        "limit_bytes": config.capture.limit_bytes,
        "source_of": lambda filename: _source_of(shell, filename),
    }


def _source_of(shell: "InteractiveShell", filename: str) -> CellSource | None:
    """Return text and label of the cell that the kernel compiled under the file name `filename`.

    The text has no empty lines at its top. Return None if `filename` is not the file name of a
    cell.
    """
    number = payload.cell_number(shell, filename)
    cells = shell.history_manager.input_hist_raw
    if number is None or not 0 < number < len(cells):
        return None
    # The kernel removes a cell's leading empty lines before it compiles the cell.
    lines = leading_empty_lines(cells[number].splitlines(keepends=True))
    return CellSource("".join(lines), f"Cell In[{number}]")


def labels_of_cells(shell: "InteractiveShell") -> dict[str, str]:
    """Return the labels of the notebook's cells for tracebacks, such as `Cell In[3]`.

    The keys are the file names under which the kernel compiled the cells.
    """
    numbers = {name: payload.cell_number(shell, name) for name in list(linecache.cache)}
    return {name: f"Cell In[{number}]" for name, number in numbers.items() if number is not None}


def origin(shell: "InteractiveShell", folder: str) -> Origin:
    """Return the notebook's settings that ranks and jobs inherit, such as environment variables.

    Args:
        shell: The notebook's IPython shell.
        folder: Path of the project store, which is the working directory of the ranks.
    """
    environ = dict(os.environ)
    return Origin(
        cwd=folder,
        environ=environ,
        sys_path=tuple(os.path.abspath(path) for path in sys.path),
        colors=shell.colors,
        changed=environ_changes(_environ_at_start(), environ),
        store=FolderIdentity.of(folder),
    )


@cache
def _environ_at_start() -> dict[str, str]:
    """Return the environment variables with which this kernel's process was started.

    The notebook may have changed `os.environ` since then.
    """
    return psutil.Process().environ()


def dry_run_text(flags: Flags, work: Work, shell: "InteractiveShell", config: Config) -> str:
    """Return the text of `--dry-run`: the plan, the values that would be sent, and the problems.

    The plan has the notes of the status header. Start nothing, and register no new session. Four
    errors of a real run are problems in the text:

    - An object cannot be pickled.
    - The objects are too large.
    - No rank will have a variable of `--out`.
    - A module of the project cannot be read. Then the text has no values and no fetchers, and
      `--out` is not checked.

    Raises:
        UsageError: The flags are impossible.
        StoreError: The project store is not usable.
        CellSyntaxError: The cell is not valid Python.
    """
    session, asked = sessions.for_cell(flags, registers=False), flags
    if session is not None:
        flags = session.with_session_flags(flags)
    known = session.names if session is not None else None
    plan = plan_of(flags, pools.named(flags.pool, config), config)
    problems: list[str] = []
    travels: list[str] = []
    try:
        captured = capture_work(
            work, shell, config, known=known, send=flags.send, problems=problems
        )
    except CaptureError as error:  # for example, a module of the project cannot be read
        problems.append(str(error))
    else:
        travels = _payload_lines(captured)
        notes = captured.choice.notes if captured.choice else ()
        notes = (*plan.notes, *notes, *_differences(captured))
        plan = structs.replace(plan, notes=notes)
        plan = with_fetchers(plan, flags, tuple(captured.loaders), config, asked.cpus)
        if problem := out_problem(flags, captured, shell, known):
            problems.append(problem)
    failing = ["would fail:", *(f"  {problem}" for problem in problems)] if problems else []
    return "\n".join([*_plan_lines(plan), *travels, *failing])


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _plan_lines(plan: Plan) -> list[str]:
    """Return the lines of `--dry-run` about a plan: ranks and hosts, notes, fetchers and store."""
    ranks, n_hosts = _count(plan.world_size, "rank"), _count(len(plan.hosts), "host")
    lines = [f"pool {plan.pool}: {ranks} on {n_hosts}; nothing is started"]
    for host in plan.hosts:
        last = host.first_rank + host.ranks - 1
        lines.append(
            f"  host {host.host_rank}: ranks {host.first_rank} to {last}, "
            f"OMP_NUM_THREADS={host.threads_per_rank}"
        )
    lines += [f"  {note}" for note in plan.notes]
    if data := plan.data:
        n_fetchers, n_hosts = _count(len(data.fetchers), "fetcher"), _count(data.hosts, "host")
        lines.append(f"data pool {data.pool}: {n_fetchers} on {n_hosts}")
        for fetcher in data.fetchers:
            loaders = ", ".join(fetcher.loaders)
            lines.append(
                f"  host {fetcher.host}: fetcher {fetcher.number} for {loaders}, "
                f"{_count(data.cores, 'core')}"
            )
    if rule := plan.store:
        lines.append(f"project store: {rule.path} (other ranks' writes: {rule.writes})")
        lines += [f"  open to all ranks: {folder}" for folder in rule.shared]
    return lines


def _payload_lines(captured: Payload) -> list[str]:
    """Return the lines of `--dry-run` about the variables and modules that would be sent."""
    lines = [f"sent to each host, {size_text(captured.size_bytes, 1024)} in total:"]
    for value in captured.captured:
        size = size_text(value.size_bytes, 1024)
        lines.append(f"  {value.name}: {value.type_name}, {size} ({value.why})")
    if not captured.captured:
        lines.append("  nothing")
    if captured.modules:
        lines.append("modules of the project that are sent:")
        lines += [f"  {name}: {module.path}" for name, module in captured.modules.items()]
    return lines
