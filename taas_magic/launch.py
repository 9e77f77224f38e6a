"""From a cell's head and body to a finished run."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taas_magic import data_plan, environ, fetching, journal, pools, registry, store
from taas_magic.capture import payload
from taas_magic.capture.payload import Cell, CellSource
from taas_magic.config import Config
from taas_magic.data import registered
from taas_magic.display.view import View
from taas_magic.errors import PoolError
from taas_magic.interrupts import Interrupts
from taas_magic.journal import RunFolder
from taas_magic.plan import Flags, Plan
from taas_magic.planning import make_plan, new_run_id
from taas_magic.pool import Pool
from taas_magic.remote.spec import HostSpec, Origin
from taas_magic.run import Run
from taas_magic.travel.same import Identity

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

last_run: Run | None = None
"""The newest run of this kernel."""


def execute(flags: Flags, cell: Cell, shell: "InteractiveShell", config: Config) -> Run:
    """Runs a cell on the ranks of a pool; blocks until it has ended and is shown.

    Nothing is started before the cell, its flags and all that it uses are known to be fit.

    Raises:
        UsageError: The flags cannot be carried out.
        StoreError: The project store cannot be used, or another run writes to it.
        CaptureError: The cell uses something that cannot travel.
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
        captured = payload.capture(cell, shell.user_ns, **capture_settings(cell, shell, config))
    plan = with_fetchers(plan, flags, tuple(loaders), config)
    folder = RunFolder.create(plan.run_id, plan.to_json(), cell.raw)
    payload.write(captured, folder.payload)
    needs_tls = _needs_tls(plan, config)
    registered.serve(loaders, folder.path, plan.cpus, plan.units, config.data, needs_tls)
    requires = None if pool.config.engine == "local" else captured.requires
    origin = _origin(shell, rule.path)
    spec = HostSpec(plan, 0, str(folder.path), origin, requires=requires)
    run = Run(plan, folder)
    _carry_out(run, spec.to_json(), pool, config, flags.log_ranks)
    run.conclude(shell.user_ns)
    return run


def _carry_out(
    run: Run, spec: dict[str, Any], pool: Pool, config: Config, log_ranks: frozenset[int] | None
) -> None:
    """Gets fetchers and hosts, starts the ranks, and shows the run until it has ended."""
    global last_run
    plan = run.plan
    data_pool = pools.named(plan.data.pool, config) if plan.data else None
    coming = fetching.fetchers(data_pool, spec, run.put, waits=data_pool is not pool)
    with Interrupts() as interrupts, coming as fetchers:
        _wait_for_hosts(run, pool, fetchers, interrupts)
        last_run = run
        gpus = plan.world_size if pool.capacity().gpus else 0
        view = View(plan, run.path, log_ranks=log_ranks, gpus=gpus)
        if fetchers and plan.prefill:
            run.fill(fetchers, view, interrupts)
            with run.giving_up(view):
                pools.wait_for(pool, interrupts, len(plan.hosts))
        run.start(pool, spec, fetchers.said() if fetchers else [])
        if fetchers:
            fetchers.pass_on(pool)
        journal.prune(config.keep_runs, config.keep_bytes)  # while the ranks start
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
    path = flags.store or str(config.store_path or "")
    limit = config.store_limit_bytes
    rule = store.choose(os.getcwd(), path, flags.store_writes, flags.shared_writes, limit)
    return make_plan(flags, pool.capacity(), new_run_id(), pool.config.max_hosts, rule)


def with_fetchers(plan: Plan, flags: Flags, loaders: Sequence[str], config: Config) -> Plan:
    """Decides on which hosts of which pool the cell's registered loaders are run; takes none.

    Raises:
        UsageError: There is no such pool.
    """
    if not loaders or not plan.cpus:
        return replace(plan, prefill=None)
    settings, note = data_plan.choose_pool(plan.pool, flags.data_pool, config)
    pool = pools.named(settings.name, config)
    own = pool is pools.named(plan.pool, config)
    data = data_plan.place(
        loaders,
        plan.cpus,
        settings,
        pool.capacity().cores,
        rank_hosts=len(plan.hosts) if own else 0,
        note=note,
    )
    return replace(plan, data=data, notes=(*plan.notes, *data.notes))


def _needs_tls(plan: Plan, config: Config) -> bool:
    """Whether batches go from host to host over a network that is not the user's alone."""
    if plan.data is None or not plan.data.crosses:
        return False
    pools = (config.pool(plan.pool), config.pool(plan.data.pool))
    return any(pool.network != "private" for pool in pools)


def capture_settings(cell: Cell, shell: "InteractiveShell", config: Config) -> dict[str, Any]:
    return {
        "transform": shell.transform_cell,
        "project": Path.cwd(),
        "limit_bytes": config.capture_limit_bytes,
        "source_of": lambda filename: _source_of(cell, shell, filename),
    }


def _source_of(cell: Cell, shell: "InteractiveShell", filename: str) -> CellSource | None:
    """The cell that the kernel compiled under a name; None for files and other code."""
    if filename == cell.filename:
        return CellSource(cell.raw, f"Cell In[{cell.execution_count or '?'}]")
    number = shell.compile._filename_map.get(filename)
    cells = shell.history_manager.input_hist_raw
    if number is None or not 0 < number < len(cells):
        return None
    return CellSource(cells[number], f"Cell In[{number}]")


def _origin(shell: "InteractiveShell", folder: str) -> Origin:
    return Origin(
        cwd=folder,
        environ=dict(os.environ),
        sys_path=tuple(os.path.abspath(path) for path in sys.path),
        colors=shell.colors,
        changed=environ.of_this_process(),
        store=Identity.of(folder),
    )
