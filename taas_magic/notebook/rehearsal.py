"""Rehearse a cell: run it here on a few batches, and report what its pool needs (`--rehearse`).

A rehearsal is a run on the local pool with three differences: each pass over a registered loader
ends after a few batches (`data/epoch.py`), no rank writes to the project store
(`store/redirect.py`), and the notebook gets no results.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import structs

from taas_magic.capture.payload import Captured, Cell, Payload
from taas_magic.config import LOCAL, Config, PoolConfig, size_text
from taas_magic.display.head import duration
from taas_magic.errors import CaptureError, PoolError, StoreError, UsageError
from taas_magic.journal.analysis import LoaderFlow
from taas_magic.messages import Event, Rehearsed, WrittenFile
from taas_magic.notebook import launch, pools
from taas_magic.plan import Flags, Plan, Prefill, split_name
from taas_magic.setup.facts import ERROR, Row
from taas_magic.store import rule as store

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from taas_magic.notebook.runs import Run

MOST_RANKS = 2
BATCHES = "TAAS_REHEARSE"
"""Environment variable of a rehearsal's ranks: the number of batches after which a pass ends."""

_LISTED = 3
_LISTED_PROBLEMS = 5
_SMALL_S = 1e-3
"""Seconds of work of a rank with a batch below which its speed says nothing about a GPU's."""


@dataclass
class Findings:
    """Everything that a rehearsal has found out, for its report.

    Attributes:
        flags: Flags of the cell.
        plan: Plan of the run on the pool; None if the pool cannot run it.
        problems: Reasons why the run would fail on the pool.
        hosts: The hosts that were asked whether they have the cell's modules.
        captured: Values that travel to the ranks.
        travels_bytes: Size of everything that travels to the ranks.
        loaders: Size of the registered loaders that travel to the fetchers, by name.
        flows: Counts of the registered loaders.
        ranks: Reports of the ranks, by rank, in the order of their arrival.
        state: State in which the rehearsed run ended; "" if it was not run.
        elapsed_s: Seconds that the rehearsed run took.
    """

    flags: Flags
    plan: Plan | None = None
    problems: list[str] = field(default_factory=list)
    hosts: Sequence[Row] = ()
    captured: Sequence[Captured] = ()
    travels_bytes: int = 0
    loaders: Mapping[str, int] = field(default_factory=dict)
    flows: Mapping[str, LoaderFlow] = field(default_factory=dict)
    ranks: dict[int, Rehearsed] = field(default_factory=dict)
    state: str = ""
    elapsed_s: float = 0.0

    @property
    def all_problems(self) -> list[str]:
        """The problems, with those of the hosts. Hosts with the same problem share a line."""
        hosts: defaultdict[str, list[str]] = defaultdict(list)
        for row in self.hosts:
            for finding in row.findings:
                if finding.level == ERROR:
                    hosts[str(finding)].append(row.host)
        of_hosts = [
            f"host{'s' * (len(names) > 1)} {_listed(names)}: {what}"
            for what, names in hosts.items()
        ]
        return [*self.problems, *of_hosts]


def rehearse(flags: Flags, cell: Cell, shell: "InteractiveShell", config: Config) -> "Run":
    """Rehearse a cell, and print the report. Block until the rehearsed run has ended.

    Raises:
        UsageError: The flags are impossible, or `--out` names a variable that no rank will have.
        CellSyntaxError: The cell is not valid Python.
        CaptureError: The cell uses an object that cannot be pickled for the ranks.
        ResultError: Not all variables of `--out` could be returned.
        PoolError: The cell ran here but would fail on its pool, or the local pool does not start.
        RunError: The cell failed on a rank.
        KeyboardInterrupt: The user interrupted the rehearsal.
    """
    found, refused = Findings(flags), list[str]()
    captured = launch.capture_cell(cell, shell, config, problems=refused)
    if problem := launch.out_problem(flags, captured, shell):
        raise UsageError(problem)
    found.captured, found.travels_bytes = captured.captured, captured.size_bytes
    found.loaders = {name: len(packed.payload) for name, packed in captured.loaders.items()}
    found.problems += refused
    _examine_pool(found, captured, config)
    if refused:
        pools.print_line(report(found))
        raise CaptureError(refused[0])
    run = _run_here(found, captured, shell, config)
    pools.print_line(report(found))
    run.raise_failure()
    if problems := found.all_problems:
        raise PoolError(
            f'the cell ran here, but would fail on pool "{flags.pool}": {problems[0]}'
            + f"\nand {len(problems) - 1} more (see the report)" * (len(problems) > 1)
        )
    return run


def _examine_pool(found: Findings, captured: Payload, config: Config) -> None:
    """Plan the run on its pool, and ask the pool's hosts for the modules that the cell needs.

    Allocates no host. Problems are added to `found.problems`.
    """
    flags = structs.replace(found.flags, rehearse=0)
    pool = config.pool(flags.pool)
    try:
        plan = launch.plan_of(flags, pools.named(flags.pool, config), config)
        assert plan.store is not None
        store.prepare(structs.replace(plan.store, shared=()))  # makes no folder
        found.plan = launch.with_fetchers(plan, flags, tuple(captured.loaders), config)
    except (UsageError, StoreError, PoolError) as error:
        found.problems.append(str(error))
    asked = {pool.name: pool}
    if found.plan is not None and found.plan.data is not None:
        asked |= {found.plan.data.pool: config.pool(found.plan.data.pool)}
    found.hosts = _ask_hosts(
        [each for each in asked.values() if each.engine != "local"], captured, config, found
    )


def _ask_hosts(
    asked: Sequence[PoolConfig], captured: Payload, config: Config, found: Findings
) -> list[Row]:
    if not asked:
        return []
    up = {row.name: row.status.hosts for row in pools.rows(config)}
    names = ", ".join(f'"{pool.name}"' for pool in asked)
    pools.print_line(f"asking the hosts of pool {names} …")
    try:
        return pools.ask_hosts(asked, up, config, modules=captured.requires)
    except PoolError as error:
        found.problems.append(str(error))
        return []


def _run_here(
    found: Findings, captured: Payload, shell: "InteractiveShell", config: Config
) -> "Run":
    """Run the cell on the local pool, and record in `found` what its ranks report.

    Raises:
        PoolError: The local pool could not be started.
        KeyboardInterrupt: The user interrupted the rehearsal before the ranks started.
    """
    flags, pool = flags_here(found.flags, len(captured.loaders)), pools.named(LOCAL, config)
    plan = launch.plan_of(flags, pool, config)
    plan = launch.with_fetchers(plan, flags, tuple(captured.loaders), config)
    plan = structs.replace(plan, notes=captured.notes)
    driver, spec = launch.prepare_run(plan, captured, pool, shell, config, reads_only=True)

    def listen(event: Event) -> None:
        if isinstance(event, Rehearsed):
            found.ranks[event.rank] = event

    driver.listener = listen
    launch.carry_out(driver, spec, pool, config)
    found.state, found.elapsed_s = driver.run.state, driver.run.duration_s
    found.flows = driver.head.flow.loaders
    return driver.run


def flags_here(flags: Flags, loaders: int) -> Flags:
    """Return the flags of the rehearsed run.

    One fetcher prepares the batches before the ranks start, so that both are measured alone.

    Args:
        flags: Flags of the cell.
        loaders: Number of registered loaders that the cell uses.
    """
    gpus = min(flags.gpus, MOST_RANKS)
    shown = None if flags.log_ranks is None else flags.log_ranks & frozenset(range(gpus))
    batches = Prefill(flags.rehearse * gpus * loaders, "batches")
    return structs.replace(
        flags,
        gpus=gpus,
        cpus=1 if loaders else 0,
        pool=LOCAL,
        data_pool=LOCAL,
        prefill=batches if loaders else None,
        out=tuple(name for name in flags.out if split_name(name)[1] < gpus),
        log_ranks=shown,
        name=flags.name or "rehearsal",
        env={**flags.env, "CUDA_VISIBLE_DEVICES": "", BATCHES: str(flags.rehearse)},
    )


def report(found: Findings) -> str:
    """Return the report of a rehearsal. Pure."""
    rows = [
        *_problem_rows(found),
        *_host_rows(found),
        ("travels", _travels(found)),
        *_loader_rows(found),
        *_rank_rows(found),
    ]
    if found.plan is not None:
        rows += [("note", note) for note in found.plan.notes[:_LISTED]]
    width = max(len(label) for label, _ in rows)
    return "\n".join([_title(found), *(f"  {label:<{width}}  {text}" for label, text in rows)])


def _title(found: Findings) -> str:
    flags, ranks = found.flags, min(found.flags.gpus, MOST_RANKS)
    what = f"{flags.rehearse} batch{'es' * (flags.rehearse > 1)} a pass"
    what += f" on {ranks} CPU rank{'s' * (ranks > 1)} here"
    did = f"{found.state} in {duration(found.elapsed_s, decimals=1)}" if found.state else "not run"
    would = f'rehearsed for pool "{flags.pool}"'
    if found.plan is not None:
        hosts = len(found.plan.hosts)
        would += f": {flags.gpus} rank{'s' * (flags.gpus > 1)} on {hosts} host{'s' * (hosts > 1)}"
    return f"rehearsal ({what}): {did}; {would}"


def _problem_rows(found: Findings) -> list[tuple[str, str]]:
    problems = found.all_problems
    rows = [("would fail", _one_line(problem)) for problem in problems[:_LISTED_PROBLEMS]]
    if len(problems) > _LISTED_PROBLEMS:
        rows.append(("would fail", f"{len(problems) - _LISTED_PROBLEMS} more reasons"))
    return rows


def _host_rows(found: Findings) -> list[tuple[str, str]]:
    rows = []
    fit = [row for row in found.hosts if row.is_fit and row.host]
    if fit:
        hosts = [row for row in found.hosts if row.host]
        what = "have a fit Python, torch, and all modules that the cell imports"
        rows.append(("hosts", f"{len(fit)} of {len(hosts)} hosts {what}"))
    for row in found.hosts:
        if not row.host:
            what = f'the modules of pool "{row.pool}": no host is up, and a queue is not asked'
            rows.append(("not checked", f"{what} (%taas warm {row.pool} starts one)"))
    return rows


def _travels(found: Findings) -> str:
    largest = sorted(found.captured, key=lambda value: value.size_bytes, reverse=True)
    named = [
        f"{value.name} {size_text(value.size_bytes, 1024)} ({value.type_name.rpartition('.')[2]})"
        for value in largest[:_LISTED]
    ]
    more = len(largest) - len(named)
    whole = size_text(found.travels_bytes, 1024)
    return f"{whole} to each host: {', '.join(named) or 'no variable'}" + f", {more} more" * bool(
        more
    )


def _loader_rows(found: Findings) -> Iterable[tuple[str, str]]:
    for name, size in found.loaders.items():
        flow = found.flows.get(name)
        speed = estimate(flow, found.flags.gpus) if flow is not None else "no batch was prepared"
        yield f"loader {name}", f"{size_text(size, 1024)} to each fetcher; {speed}"
    plain = [
        value.name
        for value in found.captured
        if value.type_name.endswith(".DataLoader") and value.name not in found.loaders
    ]
    if plain:
        which = f"{_listed(plain)}, which taas.register has not registered"
    elif not found.loaders:
        which = "loops of the cell, as it uses no registered loader"
    else:
        return
    yield "not cut short", f"{which}; {BATCHES} in os.environ tells the cell to stop early"


def estimate(flow: LoaderFlow, ranks: int) -> str:
    """Return how fast a loader and a rank are here, and the `--cpus` that follows from it.

    Args:
        flow: Counts of the rehearsed run.
        ranks: Number of ranks on the pool.
    """
    work_s, prepared = flow.stock("fetch_s"), flow.stock("prepared")
    received, busy_s = flow.total("batches"), flow.total("span_s") - flow.total("waited_s")
    if not prepared or not work_s:
        return "no batch was prepared"
    unit = flow.stock("workers") * prepared / work_s
    said = f"one CPU unit prepares {_rate(unit)} batches/s here"
    if not received:
        return f"{said}; no rank took one"
    if busy_s / received < _SMALL_S:
        return f"{said}; a rank does too little with a batch to estimate --cpus"
    speed = received / busy_s
    units = max(1, math.ceil(ranks * speed / unit))
    many = f"{ranks} such rank{'s need' if ranks > 1 else ' needs'}"
    return f"{said}, a CPU rank takes {_rate(speed)}: {many} --cpus {units}"


def _rate(per_s: float) -> str:
    return f"{per_s:.3g}" if per_s < 1000 else f"{per_s:,.0f}"


def _rank_rows(found: Findings) -> Iterable[tuple[str, str]]:
    if not found.state:
        return
    if found.ranks:
        most = max(found.ranks, key=lambda rank: found.ranks[rank].peak_bytes)
        peak = size_text(found.ranks[most].peak_bytes, 1024)
        yield "memory", f"a rank used {peak} at most (rank {most}, without its child processes)"
    silent = sorted(set(range(min(found.flags.gpus, MOST_RANKS))) - found.ranks.keys())
    if silent:
        which = ", ".join(map(str, silent))
        yield "not known", f"memory and files of rank {which}: it ended before it could report"
    last = [report.written for report in found.ranks.values()][-1:]  # has all ranks' files
    if written := _merged(last):
        yield "would write", f"{_files(written)}; nothing was written to the project store"
    if outside := _merged(report.outside for report in found.ranks.values()):
        yield (
            "outside",
            f"{_files(outside)}: not in the project store, so on other hosts the file stays there",
        )


def _merged(reports: Iterable[Iterable[WrittenFile]]) -> dict[str, int]:
    """Return the files of several ranks: the largest size by path."""
    sizes: dict[str, int] = {}
    for files in reports:
        for file in files:
            sizes[file.path] = max(file.bytes, sizes.get(file.path, 0))
    return sizes


def _files(sizes: Mapping[str, int]) -> str:
    listed = _listed([f"{path} ({size_text(size, 1024)})" for path, size in sizes.items()])
    whole = f"{len(sizes):,} files, {size_text(sum(sizes.values()), 1024)}: "
    return whole * (len(sizes) > _LISTED) + listed


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + f" and {more} more" * (more > 0)


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
