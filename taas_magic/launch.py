"""From a cell's head and body to a finished run; and the pools that this kernel uses."""

import os
import queue
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taas_magic import environ, journal, registry, store
from taas_magic.capture import payload
from taas_magic.capture.payload import Cell, CellSource, Payload
from taas_magic.config import Config
from taas_magic.display.view import View
from taas_magic.errors import PoolError, UsageError
from taas_magic.interrupts import Interrupts
from taas_magic.journal import RunFolder
from taas_magic.plan import Flags, Plan, make_plan, new_run_id
from taas_magic.pool import Pool
from taas_magic.remote.spec import HostSpec, Origin
from taas_magic.run import Run
from taas_magic.store import StoreRule
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
    assert plan.store is not None
    store.prepare(plan.store)
    with registry.noting() as loaders:
        captured = payload.capture(cell, shell.user_ns, **_capture_settings(cell, shell, config))
    with Interrupts() as interrupts:
        open_pool(pool, interrupts, len(plan.hosts))
        folder = RunFolder.create(plan.run_id, plan.to_json(), cell.raw)
        payload.write(captured, folder.payload)
        registry.serve(loaders, folder.path, plan.cpus, plan.units)
        run = last_run = Run(plan, folder)
        gpus = plan.world_size if pool.capacity().gpus else 0
        view = View(plan, folder.path, log_ranks=flags.log_ranks, gpus=gpus)
        origin = _origin(shell, plan.store.path)
        requires = None if pool.config.engine == "local" else captured.requires
        spec = HostSpec(plan, 0, str(folder.path), origin, requires=requires)
        run.start(pool, spec.to_json())
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


def dry_run(flags: Flags, cell: Cell, shell: "InteractiveShell", config: Config) -> str:
    """What `execute` would do: the plan, what travels and why, and what would fail."""
    plan = plan_of(flags, pool_named(flags.pool, config), config)
    settings = _capture_settings(cell, shell, config)
    captured, problems = payload.survey(cell, shell.user_ns, **settings)
    return "\n".join([*_plan_lines(plan), *_payload_lines(captured), *_problem_lines(problems)])


def _plan_lines(plan: Plan) -> list[str]:
    hosts = [
        f"  host {host.host_rank}: ranks {host.first_rank} to {host.first_rank + host.ranks - 1}, "
        f"OMP_NUM_THREADS={host.threads_per_rank}"
        for host in plan.hosts
    ]
    head = f"pool {plan.pool}: {plan.world_size} ranks on {len(plan.hosts)} host(s); none is taken"
    return [head, *hosts, *(f"  {note}" for note in plan.notes), *_store_lines(plan.store)]


def _store_lines(rule: StoreRule | None) -> list[str]:
    if rule is None:
        return []
    shared = [f"  open to all ranks: {folder}" for folder in rule.shared]
    return [f"project store: {rule.path} (other ranks' writes: {rule.writes})", *shared]


def _payload_lines(captured: Payload | None) -> list[str]:
    if captured is None:
        return []
    values = [
        f"  {value.name}: {value.type_name}, {payload.size_text(value.size_bytes)} ({value.why})"
        for value in captured.captured
    ]
    modules = [f"  {name}: {module.path}" for name, module in captured.modules.items()]
    return [
        f"travels, {payload.size_text(captured.size_bytes)} in all:",
        *(values or ["  nothing"]),
        *(["the project's modules that travel:", *modules] if modules else []),
    ]


def _problem_lines(problems: list[str]) -> list[str]:
    return ["would fail:", *(f"  {problem}" for problem in problems)] if problems else []


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
    heard: queue.SimpleQueue[list[str] | PoolError | None] = queue.SimpleQueue()
    interrupts.wake = lambda: heard.put(None)
    threading.Thread(target=_try_open, args=(pool, hosts, heard), daemon=True).start()
    said: set[str] = set()
    while isinstance(news := heard.get(), list):
        for line in news:
            if line not in said:
                said.add(line)
                _say(line)
    if interrupts.count:
        pool.give_up()
    interrupts.check()
    if news is not None:
        raise news


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _try_open(
    pool: Pool, hosts: int, heard: "queue.SimpleQueue[list[str] | PoolError | None]"
) -> None:
    try:
        pool.open(hosts, heard.put)
    except PoolError as error:
        heard.put(error)
    else:
        heard.put(None)


def warm_in_background(config: Config, name: str = "local") -> threading.Thread:
    """Opens a pool in a thread; a failure shows when a cell needs the pool."""
    pool = pool_named(name, config)
    thread = threading.Thread(
        target=_try_open, args=(pool, 1, queue.SimpleQueue()), name="taas-warm", daemon=True
    )
    thread.start()
    return thread


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


def _capture_settings(cell: Cell, shell: "InteractiveShell", config: Config) -> dict[str, Any]:
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
