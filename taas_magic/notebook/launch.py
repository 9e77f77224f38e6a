"""From a cell's head and body to a finished run."""

import linecache
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from IPython.core.inputtransformer2 import leading_empty_lines
from msgspec import structs

from taas_magic import registry
from taas_magic.capture import payload
from taas_magic.capture.names import unknown_result
from taas_magic.capture.payload import Cell, CellSource, Payload
from taas_magic.config import Config
from taas_magic.display.view import View
from taas_magic.errors import CellSyntaxError, PoolError, UsageError
from taas_magic.host.spec import HostSpec, Origin, environ_changes
from taas_magic.journal import folder as journal
from taas_magic.journal.folder import RunFolder
from taas_magic.notebook import fetching, pools
from taas_magic.notebook.interrupts import Interrupts
from taas_magic.notebook.run import Run
from taas_magic.plan import (
    NO_GPU,
    Flags,
    Plan,
    choose_data_pool,
    make_plan,
    name_of,
    new_run_id,
    place_fetchers,
)
from taas_magic.pool.client import Pool
from taas_magic.store import rule as store
from taas_magic.store.rule import Identity

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


last_run: Run | None = None
"""The newest run of this kernel."""

_told: set[str] = set()


def execute(flags: Flags, cell: Cell, shell: "InteractiveShell", config: Config) -> Run:
    """Runs a cell on the ranks of a pool; blocks until it has ended and is shown.

    Nothing is started before the cell, its flags and all that it uses are known to be fit.

    Raises:
        UsageError: The flags cannot be carried out, or `--out` names what no rank will have.
        StoreError: The project store cannot be used, or another run writes to it.
        CellSyntaxError: The cell is not Python.
        CaptureError: The cell uses something that cannot travel.
        ResultError: The run succeeded, but not all that `--out` names could come back.
        PoolError: The pool could not be started.
        RunError: The cell failed on a rank.
        KeyboardInterrupt: The user interrupted it.
    """
    pool = pools.named(flags.pool, config)
    plan = plan_of(flags, pool, config)
    rule = plan.store
    assert rule is not None
    store.prepare(rule)
    with registry.noting() as loaders:
        captured = _capture(cell, shell, config)
    if problem := out_problem(flags, captured, shell):
        raise UsageError(problem)
    plan = with_fetchers(plan, flags, tuple(loaders), config)
    plan = structs.replace(plan, notes=_news(plan.notes))
    folder = _written(plan, cell, captured, loaders, config)
    requires = None if pool.config.engine == "local" else captured.requires
    spec = HostSpec(plan, 0, str(folder.path), origin(shell, rule.path), requires=requires)
    labels = {filename: source.label for filename, source in captured.sources.items()}
    labels |= labels_of_cells(shell)
    run = Run(plan, folder, labels)
    with folder.held():
        _carry_out(run, spec, pool, config, flags.log_ranks)
    run.conclude(shell.user_ns)
    return run


def _written(
    plan: Plan, cell: Cell, captured: Payload, loaders: Mapping[str, Any], config: Config
) -> RunFolder:
    """The folder of a new run, with all that its ranks and fetchers read.

    Raises:
        PoolError: The state folder cannot be written.
    """
    folder = RunFolder.create(plan.run_id, plan, cell.raw)
    needs_tls = _needs_tls(plan, config)
    with folder.whole():
        payload.write(captured, folder.payload)
        registry.serve(loaders, folder.path, plan.cpus, plan.units, config.data, needs_tls)
    return folder


def _news(notes: Sequence[str]) -> tuple[str, ...]:
    """The notes without one that this session has shown: that there is no GPU is said once."""
    known = {note for note in notes if note.partition(";")[0] in _told}
    _told.update(note.partition(";")[0] for note in notes if note.startswith(NO_GPU))
    return tuple(note for note in notes if note not in known)


def _capture(cell: Cell, shell: "InteractiveShell", config: Config) -> Payload:
    try:
        return payload.capture(cell, shell.user_ns, **capture_settings(cell, shell, config))
    except SyntaxError as error:
        raise _cell_syntax_error(error, cell) from None


def _cell_syntax_error(error: SyntaxError, cell: Cell) -> CellSyntaxError:
    """A syntax error at its place in the notebook's cell, head included."""
    error.filename = f"Cell In[{cell.execution_count or '?'}]"
    error.lineno = (error.lineno or 1) + cell.lines_above
    error.end_lineno = error.end_lineno and error.end_lineno + cell.lines_above
    error.text = cell.raw.splitlines()[error.lineno - 1]
    return CellSyntaxError("".join(traceback.format_exception_only(error)).rstrip())


def _carry_out(
    run: Run, spec: HostSpec, pool: Pool, config: Config, log_ranks: frozenset[int] | None
) -> None:
    """Gets fetchers and hosts, starts the ranks, and shows the run until it has ended."""
    global last_run
    plan = run.plan
    data_pool = pools.named(plan.data.pool, config) if plan.data else None
    waits = data_pool is not pool
    with (
        Interrupts() as interrupts,
        fetching.fetchers(data_pool, spec, run.put, waits, interrupts) as fetchers,
    ):
        _wait_for_hosts(run, pool, fetchers, interrupts)
        last_run = run
        gpus = plan.world_size if pool.capacity().gpus else 0
        view = View(plan, run.path, log_ranks=log_ranks, gpus=gpus)
        if fetchers and plan.prefill:
            run.fill(fetchers, view, interrupts)
            with run.giving_up(view):
                pools.wait_for(pool, interrupts, len(plan.hosts))
        with run.giving_up(view):
            run.start(pool, spec, fetchers.said() if fetchers else [], view, interrupts)
        if fetchers:
            fetchers.pass_on(pool)
        journal.prune(config.runs.keep, config.runs.keep_bytes)  # while the ranks start
        run.follow(pool, view, interrupts)


def _wait_for_hosts(
    run: Run, pool: Pool, fetchers: fetching.Fetching | None, interrupts: Interrupts
) -> None:
    """Returns when the hosts are there that the run begins with; else it leaves no trace."""
    try:
        if not run.plan.prefill:
            pools.wait_for(pool, interrupts, len(run.plan.hosts))
        if fetchers:
            fetchers.wait(interrupts, pools.say)
    except (PoolError, KeyboardInterrupt):
        run.discard()
        raise


def plan_of(flags: Flags, pool: Pool, config: Config) -> Plan:
    """Decides how the ranks lie on the pool's hosts, and where they write; takes none.

    Raises:
        UsageError: The pool cannot hold so many ranks.
        StoreError: The project store cannot be used as asked.
    """
    path = flags.store or config.store.path or ""
    limit = config.store.limit_bytes
    rule = store.choose(os.getcwd(), path, flags.store_writes, flags.shared_writes, limit)
    plan = make_plan(flags, pool.capacity(), new_run_id(), pool.config.max_hosts, rule)
    notes = (*plan.notes, *store.warnings(rule, plan.world_size))
    hang_s = config.runs.hang_s if flags.hang_s is None else flags.hang_s
    return structs.replace(plan, notes=notes, hang_s=hang_s)


def with_fetchers(plan: Plan, flags: Flags, loaders: Sequence[str], config: Config) -> Plan:
    """Decides on which hosts of which pool the cell's registered loaders are run; takes none.

    Raises:
        UsageError: There is no such pool.
    """
    if not loaders or not plan.cpus:
        return structs.replace(plan, prefill=None)
    settings, note = choose_data_pool(plan.pool, flags.data_pool, config)
    pool = pools.named(settings.name, config)
    own = pool is pools.named(plan.pool, config)
    data = place_fetchers(
        loaders,
        plan.cpus,
        settings,
        pool.capacity().cores,
        rank_hosts=len(plan.hosts) if own else 0,
        note=note,
    )
    return structs.replace(plan, data=data, notes=(*plan.notes, *data.notes))


def _needs_tls(plan: Plan, config: Config) -> bool:
    """Whether batches go from host to host over a network that is not the user's alone."""
    if plan.data is None or not plan.data.crosses:
        return False
    pools = (config.pool(plan.pool), config.pool(plan.data.pool))
    return any(pool.network != "private" for pool in pools)


def out_problem(flags: Flags, captured: Payload, shell: "InteractiveShell") -> str | None:
    """What is wrong with the names of `--out`, as far as it can be known before the cell runs."""
    python = shell.transform_cell(captured.cell.source)
    names = {value.name for value in captured.captured}
    return unknown_result([name_of(text) for text in flags.out], python, names, shell.user_ns)


def capture_settings(cell: Cell, shell: "InteractiveShell", config: Config) -> dict[str, Any]:
    return {
        "transform": shell.transform_cell,
        "project": Path.cwd(),
        "limit_bytes": config.capture.limit_bytes,
        "source_of": lambda filename: _source_of(cell, shell, filename),
    }


def _source_of(cell: Cell, shell: "InteractiveShell", filename: str) -> CellSource | None:
    """The cell that the kernel compiled under a name; None for files and other code."""
    if filename == cell.filename:
        return CellSource(cell.raw, f"Cell In[{cell.execution_count or '?'}]")
    number = payload.cell_number(shell, filename)
    cells = shell.history_manager.input_hist_raw
    if number is None or not 0 < number < len(cells):
        return None
    # a kernel compiles a cell without the empty lines that it begins with
    lines = leading_empty_lines(cells[number].splitlines(keepends=True))
    return CellSource("".join(lines), f"Cell In[{number}]")


def labels_of_cells(shell: "InteractiveShell") -> dict[str, str]:
    """What tracebacks call each cell that the kernel has compiled, by its file name."""
    numbers = {name: payload.cell_number(shell, name) for name in list(linecache.cache)}
    return {name: f"Cell In[{number}]" for name, number in numbers.items() if number is not None}


def origin(shell: "InteractiveShell", folder: str) -> Origin:
    """What ranks, and jobs, take over from the notebook."""
    return Origin(
        cwd=folder,
        environ=dict(os.environ),
        sys_path=tuple(os.path.abspath(path) for path in sys.path),
        colors=shell.colors,
        changed=environ_changes(psutil.Process().environ(), os.environ),
        store=Identity.of(folder),
    )
