"""Rehearse a cell: run it here on a few batches, and report what its pool needs (`--rehearse`).

A rehearsal is a run on the local pool. Each pass over a registered loader ends after a few batches
(`data/epoch.py`). No rank writes to the project store (`store/redirect.py`). The notebook gets no
results.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import structs

from taas_magic.capture.payload import CapturedVariable, Payload
from taas_magic.capture.work import Work
from taas_magic.config import LOCAL, Config, PoolConfig, size_text
from taas_magic.display.head import duration
from taas_magic.errors import CaptureError, PoolError, StoreError, UsageError, listed
from taas_magic.journal.analysis import LoaderCounts
from taas_magic.messages import Event, Rehearsed, WrittenFile
from taas_magic.notebook import launch, pools
from taas_magic.plan import Flags, Plan, Prefill, split_name
from taas_magic.setup.facts import ERROR, HostCheck
from taas_magic.store import rule as store

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from taas_magic.notebook.runs import Run

MAX_RANKS = 2
"""Maximum number of ranks of a rehearsal; `--gpus` may be larger."""

BATCHES_VARIABLE = "TAAS_REHEARSE"
"""Name of the environment variable that tells ranks of a rehearsal to end each pass early.

The value is the number of batches after which a pass over a registered loader ends.
"""

_SEE_REPORT = 'see "would fail" in the report above'

_MAX_LISTED = 3
_MAX_PROBLEMS = 5
_MIN_STEP_S = 1e-3
"""Minimum mean seconds for which a rank must work on a batch so that `--cpus` can be estimated.

If ranks need less time for a batch, the report has no estimate of `--cpus`.
"""


@dataclass
class RehearsalFindings:
    """The results of a rehearsal, for its report.

    Attributes:
        plan: Plan of the run on the pool; None if the pool cannot run it.
        problems: Reasons why the run would fail on the pool.
        host_rows: Results of the check of the hosts. A pool without a running host has one result,
            with an empty host name.
        travels_bytes: Size of the pickled objects that a run sends to each host of the ranks.
        loader_bytes: Size of each registered loader's pickle, by the name of the loader. Each
            fetcher of the loader gets this pickle.
        reports: The report of each rank, by number of the rank, in the order of arrival.
        state: State in which the rehearsed run ended; "" if the cell was not run.
    """

    flags: Flags
    plan: Plan | None = None
    problems: list[str] = field(default_factory=list)
    host_rows: Sequence[HostCheck] = ()
    captured: Sequence[CapturedVariable] = ()
    travels_bytes: int = 0
    loader_bytes: Mapping[str, int] = field(default_factory=dict)
    counts_by_loader: Mapping[str, LoaderCounts] = field(default_factory=dict)
    reports: dict[int, Rehearsed] = field(default_factory=dict)
    state: str = ""
    elapsed_s: float = 0.0

    @property
    def all_problems(self) -> list[str]:
        """All reasons why the run would fail on the pool, including errors of the hosts.

        Warnings about hosts are not included. Hosts with the same error share one entry.
        """
        hosts: defaultdict[str, list[str]] = defaultdict(list)
        for row in self.host_rows:
            for problem in row.problems:
                if problem.level == ERROR:
                    hosts[str(problem)].append(row.host)
        of_hosts = [
            f"host{'s' * (len(names) > 1)} {listed(names, _MAX_LISTED)}: {what}"
            for what, names in hosts.items()
        ]
        return [*self.problems, *of_hosts]


def rehearse(flags: Flags, work: Work, shell: "InteractiveShell", config: Config) -> "Run":
    """Rehearse a cell: check its pool, run the cell on the local pool, and print the report.

    First pickle the objects that the cell uses, check `--out`, and then check the pool. If an
    object cannot be pickled, print the report without running the cell. Block until the rehearsed
    run has ended. If the run failed, print the report before raising the run's error.

    Raises:
        UsageError: The flags are impossible, or `--out` names a variable that no rank will have.
        CellSyntaxError: The cell is not valid Python.
        CaptureError: The cell uses an object that cannot be pickled for the ranks.
        ResultError: Not all variables of `--out` could be returned.
        PoolError: The cell ran here but would fail on its pool, or the local pool does not start.
        StoreError: The project store is not usable.
        RunError: The cell failed on a rank.
        KeyboardInterrupt: The user interrupted the rehearsal.
    """
    found, refused = RehearsalFindings(flags), list[str]()
    captured = launch.capture_work(work, shell, config, problems=refused)
    if problem := launch.out_problem(flags, captured, shell):
        raise UsageError(problem)
    found.captured, found.travels_bytes = captured.captured, captured.size_bytes
    found.loader_bytes = {name: len(packed.payload) for name, packed in captured.loaders.items()}
    found.problems += refused
    _examine_pool(found, captured, config)
    if refused:
        pools.print_line(report_text(found))
        objects = "an object" if len(refused) == 1 else f"{len(refused)} objects"
        raise CaptureError(
            f"the cell was not run, because {objects} cannot be sent to the ranks: {_SEE_REPORT}"
        )
    try:
        run = _run_here(found, captured, shell, config)
    finally:
        pools.print_line(report_text(found))
    run.raise_failure()
    if problems := found.all_problems:
        reasons = "a reason" if len(problems) == 1 else f"{len(problems)} reasons"
        raise PoolError(
            f'the cell ran here, but would fail on pool "{flags.pool}" for {reasons}: {_SEE_REPORT}'
        )
    return run


def _examine_pool(found: RehearsalFindings, captured: Payload, config: Config) -> None:
    """Plan the run on its pool, check hosts and project store, and record the results in `found`.

    Check whether the hosts of the ranks' pool and of the fetchers' pool can run cells, and have the
    modules that this cell uses. Print a line before the check of the hosts. Do not check the hosts
    of pools with the engine `local`. Allocate no host.

    If the plan cannot be made, or the store or a pool cannot be used, add the reason to
    `found.problems`.
    """
    flags = structs.replace(found.flags, rehearse=0)
    pool = config.pool(flags.pool)
    try:
        plan = launch.plan_of(flags, pools.named(flags.pool, config), config)
        assert plan.store is not None
        store.prepare(structs.replace(plan.store, shared=()))  # makes no shared folder
        found.plan = launch.with_fetchers(plan, flags, tuple(captured.loaders), config)
    except (UsageError, StoreError, PoolError) as error:
        found.problems.append(str(error))
    asked = {pool.name: pool}
    if found.plan is not None and found.plan.data is not None:
        asked |= {found.plan.data.pool: config.pool(found.plan.data.pool)}
    found.host_rows = _ask_hosts(
        [each for each in asked.values() if each.engine != "local"], captured, config, found
    )


def _ask_hosts(
    asked: Sequence[PoolConfig], captured: Payload, config: Config, found: RehearsalFindings
) -> list[HostCheck]:
    """Check whether the hosts of pools can run cells, and have the modules that the cell uses.

    Print a line before the check, because the user must wait. If a pool does not answer, add the
    error to `found.problems`, and return no results.
    """
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
    found: RehearsalFindings, captured: Payload, shell: "InteractiveShell", config: Config
) -> "Run":
    """Run the cell on the local pool with few ranks and batches, and wait until the run has ended.

    The run does not lock the project store. Record in `found` the ranks' reports when they arrive,
    and at the end the run's state and duration, and the counts of its loaders.

    Returns:
        The run, also if it failed.
    """
    flags, pool = flags_here(found.flags, len(captured.loaders)), pools.named(LOCAL, config)
    plan = launch.plan_of(flags, pool, config)
    plan = launch.with_fetchers(plan, flags, tuple(captured.loaders), config)
    plan = structs.replace(plan, notes=captured.notes)
    driver, spec = launch.prepare_run(plan, captured, pool, shell, config, reads_only=True)

    def listen(event: Event) -> None:
        if isinstance(event, Rehearsed):
            found.reports[event.rank] = event

    driver.listener = listen
    launch.run_to_end(driver, spec, pool, config)
    found.state, found.elapsed_s = driver.run.state, driver.run.duration_s
    found.counts_by_loader = driver.head.run_counts.loaders
    return driver.run


def flags_here(flags: Flags, loaders: int) -> Flags:
    """Return the flags of the rehearsed run: the cell's flags, changed for the local pool.

    The run has at most `MAX_RANKS` ranks, without GPUs. If `--out` requests a variable from a rank
    that this run lacks, leave the variable out. Leave such ranks out of `--logs`, too. An
    environment variable tells the ranks how many batches they get.

    If the cell uses registered loaders, one fetcher prepares all batches before the ranks start,
    because a fetcher and ranks that work at the same time would slow each other down.

    Args:
        flags: Flags of the cell.
        loaders: Number of registered loaders that the cell uses.
    """
    gpus = min(flags.gpus, MAX_RANKS)
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
        env={**flags.env, "CUDA_VISIBLE_DEVICES": "", BATCHES_VARIABLE: str(flags.rehearse)},
    )


def report_text(found: RehearsalFindings) -> str:
    """Return the report of a rehearsal as text: a title, and one labelled line for each finding.

    The lines are, in this order: problems, hosts, the size of sent objects, loaders, memory and
    files of ranks, and at most `_MAX_LISTED` notes of the plan.
    """
    rows = [
        *_problem_rows(found),
        *_host_rows(found),
        ("sent", _captured_text(found)),
        *_loader_rows(found),
        *_rank_rows(found),
    ]
    if found.plan is not None:
        rows += [("note", note) for note in found.plan.notes[:_MAX_LISTED]]
    width = max(len(label) for label, _ in rows)
    return "\n".join([_title(found), *(f"  {label:<{width}}  {text}" for label, text in rows)])


def _title(found: RehearsalFindings) -> str:
    """Return the report's title: what ran here and how it ended, and the pool and its ranks."""
    flags, ranks = found.flags, min(found.flags.gpus, MAX_RANKS)
    what = f"{flags.rehearse} batch{'es' * (flags.rehearse > 1)} a pass"
    what += f" on {ranks} CPU rank{'s' * (ranks > 1)} here"
    did = f"{found.state} in {duration(found.elapsed_s, decimals=1)}" if found.state else "not run"
    planned = f'for pool "{flags.pool}"'
    if found.plan is not None:
        hosts = len(found.plan.hosts)
        planned += f": {flags.gpus} rank{'s' * (flags.gpus > 1)} on {hosts} host{'s' * (hosts > 1)}"
    return f"rehearsal ({what}): {did}; {planned}"


def _problem_rows(found: RehearsalFindings) -> list[tuple[str, str]]:
    problems = found.all_problems
    rows = [("would fail", _one_line(problem)) for problem in problems[:_MAX_PROBLEMS]]
    if len(problems) > _MAX_PROBLEMS:
        rows.append(("would fail", f"{len(problems) - _MAX_PROBLEMS} more reasons"))
    return rows


def _host_rows(found: RehearsalFindings) -> list[tuple[str, str]]:
    """Return the report's rows about hosts.

    If at least one of the checked hosts can run the cell, the first row has the number of hosts
    that can. For each pool without a running host, a row says that the pool's modules were not
    checked. Hosts that cannot run the cell have no rows here.
    """
    rows = []
    fit = [row for row in found.host_rows if row.is_fit and row.host]
    if fit:
        hosts = [row for row in found.host_rows if row.host]
        have = f"host{'s have' if len(hosts) > 1 else ' has'}"
        what = "a suitable Python, torch, and all modules that the cell needs"
        rows.append(("hosts", f"{len(fit)} of {len(hosts)} {have} {what}"))
    for row in found.host_rows:
        if not row.host:
            what = f'the modules of pool "{row.pool}", which has no running host'
            rows.append(("not checked", f"{what} (%taas warm {row.pool} starts one)"))
    return rows


def _captured_text(found: RehearsalFindings) -> str:
    """Return text with the size of all sent objects, and the `_MAX_LISTED` largest variables."""
    largest = sorted(found.captured, key=lambda value: value.size_bytes, reverse=True)
    named = [
        f"{value.name} {size_text(value.size_bytes, 1024)} ({value.type_name.rpartition('.')[2]})"
        for value in largest[:_MAX_LISTED]
    ]
    more = len(largest) - len(named)
    whole = size_text(found.travels_bytes, 1024)
    return f"{whole} to each host: {', '.join(named) or 'no variable'}" + f", {more} more" * bool(
        more
    )


def _loader_rows(found: RehearsalFindings) -> Iterable[tuple[str, str]]:
    """Yield the rows of the report about data loaders, each as a label and a text.

    Each registered loader has a row with the size of its pickle, the measured speeds, and the
    estimated `--cpus`.

    A rehearsal shortens only loops over registered loaders. So if the cell uses other DataLoaders,
    a last row names these DataLoaders. If the cell uses no DataLoader at all, the last row says
    that the rehearsal does not shorten the cell's loops.
    """
    for name, size in found.loader_bytes.items():
        loader_counts = found.counts_by_loader.get(name)
        speed = "no batch was prepared"
        if loader_counts is not None:
            speed = estimate(loader_counts, found.flags.gpus)
        yield f"loader {name}", f"{size_text(size, 1024)} to each fetcher; {speed}"
    plain = [
        value.name
        for value in found.captured
        if value.type_name.endswith(".DataLoader") and value.name not in found.loader_bytes
    ]
    if plain:
        are = "they are" if len(plain) > 1 else "it is"
        which = f"loops over {listed(plain, _MAX_LISTED)}, because {are} not registered"
    elif not found.loader_bytes:
        which = "loops of the cell, because the cell uses no registered loader"
    else:
        return
    how = f"register its loader, or stop after os.environ['{BATCHES_VARIABLE}'] batches"
    yield "not cut short", f"{which}; to shorten a loop, {how}"


def estimate(loader_counts: LoaderCounts, ranks: int) -> str:
    """Return text with the speeds of a fetcher and a rank, and the estimated value of `--cpus`.

    The speeds are in batches per second, as measured in the rehearsed run. If there is too little
    data for a speed, or if the ranks worked less than `_MIN_STEP_S` on a batch, the text says so
    and has no estimate.

    Args:
        loader_counts: Counts of the loader in the rehearsed run.
        ranks: Number of ranks of the real run, for which `--cpus` is estimated.
    """
    work_s, prepared = (
        loader_counts.fetcher_total("fetch_s"),
        loader_counts.fetcher_total("prepared"),
    )
    received, busy_s = (
        loader_counts.rank_total("batches"),
        loader_counts.rank_total("span_s") - loader_counts.rank_total("waited_s"),
    )
    if not prepared or not work_s:
        return "no batch was prepared"
    prepared_per_s = loader_counts.fetcher_total("workers") * prepared / work_s
    said = f"one fetcher prepares {_rate_text(prepared_per_s)} batches/s here"
    if not received:
        return f"{said}; no rank used a batch"
    if busy_s / received < _MIN_STEP_S:
        return f"{said}; a rank does too little with a batch to estimate --cpus"
    speed = received / busy_s
    fetchers = max(1, math.ceil(ranks * speed / prepared_per_s))
    many = f"{ranks} such rank{'s need' if ranks > 1 else ' needs'}"
    return f"{said}, a CPU rank uses {_rate_text(speed)}; {many} --cpus {fetchers}"


def _rate_text(per_s: float) -> str:
    return f"{per_s:.3g}" if per_s < 1000 else f"{per_s:,.0f}"


def _rank_rows(found: RehearsalFindings) -> Iterable[tuple[str, str]]:
    """Yield the rows about ranks; none if the cell was not run.

    The rows have the largest memory of a rank, the ranks that ended without a report, the files
    that the cell would write to the project store, and the files outside it.
    """
    if not found.state:
        return
    if found.reports:
        most = max(found.reports, key=lambda rank: found.reports[rank].peak_bytes)
        peak = size_text(found.reports[most].peak_bytes, 1024)
        yield "memory", f"at most {peak} for a rank (rank {most}, without its child processes)"
    unreported = sorted(set(range(min(found.flags.gpus, MAX_RANKS))) - found.reports.keys())
    if unreported:
        which = f"rank{'s' * (len(unreported) > 1)} {', '.join(map(str, unreported))}"
        ended = "they ended before they" if len(unreported) > 1 else "it ended before it"
        yield "not known", f"memory and files of {which}, because {ended} could report"
    # Every report lists the files of all ranks, so only the last report is used.
    last = [report.written for report in found.reports.values()][-1:]
    if written := _largest_sizes(last):
        yield "would write", f"{_files(written)}; the project store has not changed"
    if outside := _largest_sizes(report.outside for report in found.reports.values()):
        yield (
            "outside",
            f"{_files(outside)}; not in the project store, so a file stays on the host of its rank",
        )


def _largest_sizes(reports: Iterable[Iterable[WrittenFile]]) -> dict[str, int]:
    """Merge reports about written files: return the largest reported size in bytes, by path."""
    sizes: dict[str, int] = {}
    for files in reports:
        for file in files:
            sizes[file.path] = max(file.bytes, sizes.get(file.path, 0))
    return sizes


def _files(sizes: Mapping[str, int]) -> str:
    named = [f"{path} ({size_text(size, 1024)})" for path, size in sizes.items()]
    whole = f"{len(sizes):,} files, {size_text(sum(sizes.values()), 1024)}: "
    return whole * (len(sizes) > _MAX_LISTED) + listed(named, _MAX_LISTED)


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
