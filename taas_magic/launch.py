"""From a cell's head and body to a finished run; and the pools that this kernel uses."""

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taas_magic import data_plan, environ, fetching, journal, registry, store
from taas_magic.capture import payload
from taas_magic.capture.payload import Cell, CellSource
from taas_magic.config import Config
from taas_magic.display.view import View
from taas_magic.errors import PoolError, UsageError
from taas_magic.interrupts import Background, Interrupts
from taas_magic.journal import RunFolder
from taas_magic.plan import Flags, Plan, make_plan, new_run_id
from taas_magic.pool import Pool
from taas_magic.remote.spec import HostSpec, Origin
from taas_magic.run import Run
from taas_magic.travel.same import Identity

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

last_run: Run | None = None
"""The newest run of this kernel."""

_pools: dict[str, Pool] = {}
_lock = threading.Lock()


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
    global last_run
    pool = pool_named(flags.pool, config)
    plan = plan_of(flags, pool, config)
    rule = plan.store
    assert rule is not None
    store.prepare(rule)
    with registry.noting() as loaders:
        captured = payload.capture(cell, shell.user_ns, **capture_settings(cell, shell, config))
    plan = with_fetchers(plan, flags, tuple(loaders), config)
    folder = RunFolder.create(plan.run_id, plan.to_json(), cell.raw)
    payload.write(captured, folder.payload)
    registry.serve(
        loaders, folder.path, plan.cpus, plan.units, config.data, _needs_tls(plan, config)
    )
    origin = _origin(shell, rule.path)
    requires = None if pool.config.engine == "local" else captured.requires
    spec = HostSpec(plan, 0, str(folder.path), origin, requires=requires).to_json()
    run = Run(plan, folder)
    data_pool = pool_named(plan.data.pool, config) if plan.data else None
    coming = fetching.fetchers(data_pool, spec, run.put, waits=data_pool is not pool)
    with Interrupts() as interrupts, coming as fetchers:
        try:
            if not plan.prefill:
                open_pool(pool, interrupts, len(plan.hosts))
            if fetchers:
                fetchers.wait(interrupts, _say)
        except (PoolError, KeyboardInterrupt):
            folder.discard()
            raise
        last_run = run
        gpus = plan.world_size if pool.capacity().gpus else 0
        view = View(plan, folder.path, log_ranks=flags.log_ranks, gpus=gpus)
        if fetchers and plan.prefill:
            run.fill(fetchers, view, interrupts)
            with run.giving_up(view):
                open_pool(pool, interrupts, len(plan.hosts))
        run.start(pool, spec, fetchers.said() if fetchers else [])
        if fetchers:
            fetchers.pass_on(pool)
        journal.prune(config.keep_runs, config.keep_bytes)  # while the ranks start
        run.follow(pool, view, interrupts)
    run.conclude(shell.user_ns)
    return run


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
    pool = pool_named(settings.name, config)
    own = pool is pool_named(plan.pool, config)
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


def pool_named(name: str, config: Config) -> Pool:
    """This kernel's pool of that name; not opened.

    Raises:
        UsageError: There is none in taas.toml.
    """
    settings = config.pool(name)
    with _lock:
        known = _pools.get(settings.name)
        if known is None or known.config != settings:
            known = _pools[settings.name] = Pool(settings, Path.cwd())
        return known


def open_pool(pool: Pool, interrupts: Interrupts, hosts: int = 1) -> None:
    """Returns when a pool has so many hosts; says meanwhile what it waits for.

    Raises:
        PoolError: They could not be had.
        KeyboardInterrupt: The user did not want to wait: hosts that nobody uses are given back.
    """
    if pool.has_hosts(hosts):
        return
    _say(f"waiting for pool {pool.name!r} to warm up …")
    try:
        Background(lambda tell: pool.open(hosts, tell)).wait(interrupts, _say)
    except KeyboardInterrupt:
        pool.give_up()
        raise


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def warm_in_background(config: Config, name: str = "local") -> threading.Thread:
    """Opens a pool in a thread; a failure shows when a cell needs the pool."""
    pool = pool_named(name, config)
    return Background(lambda tell: pool.open(1, tell)).thread


def stop(run_id: str | None, config: Config) -> str:
    """Ends a run, of this kernel or of another one of the user's; says which.

    Raises:
        UsageError: It is not running.
    """
    record = journal.find(run_id)
    if record.state in journal.ENDED_STATES:
        raise UsageError(f"run {record.run_id} is not running: {record.state}")
    pool = pool_named(record.pool, config)
    pool.connect()
    pool.halt(record.run_id, "interrupt")
    return record.run_id


def pools(config: Config) -> list[dict[str, Any]]:
    """Every pool of taas.toml: name, engine, state, and the hosts that it has."""
    rows = []
    for name, settings in config.pools.items():
        pool = pool_named(name, config)
        alive = pool.is_alive()
        status = pool.status() if pool.is_ready else {"hosts": []}
        state = "ready" if pool.is_ready else "starting" if alive else "down"
        rows.append({"pool": name, "engine": settings.engine, "state": state, **status})
    return rows


def down(name: str, config: Config) -> None:
    """Ends a pool: its runs, its hosts, its process."""
    pool_named(name, config).down()


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
