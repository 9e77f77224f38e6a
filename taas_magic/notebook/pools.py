"""The pools that this kernel uses: found by name, waited for, listed, checked, ended."""

import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path

from taas_magic.config import Config, PoolConfig
from taas_magic.display.head import COLOURS, FRAME, columns, table_html
from taas_magic.display.log import size_text
from taas_magic.engines.base import find_engine
from taas_magic.errors import PoolError, StoreError
from taas_magic.host.spec import share_id
from taas_magic.journal.folder import RunFolder, RunRecord
from taas_magic.messages import Facts, GetFacts, GetStacks, PoolStatus, RunStacks
from taas_magic.notebook.run import Background, Interrupts
from taas_magic.pool.client import Pool, Wait
from taas_magic.setup import facts
from taas_magic.setup.facts import ERROR, REMARK, WARNING, Finding, Kernel, Row

_pools: dict[str, Pool] = {}
_retired: list[Pool] = []
_lock = threading.Lock()


def named(name: str, config: Config) -> Pool:
    """Return this kernel's pool of that name; not opened.

    Raises:
        UsageError: There is none in taas.toml.
    """
    settings = config.pool(name)
    with _lock:
        known = _pools.get(settings.name)
        if known is None or known.config != settings:
            if known is not None:  # its settings have changed; without kernels it ends
                known.retire()
                _retired[:] = [one for one in (*_retired, known) if not one.is_over()]
            known = _pools[settings.name] = Pool(settings, Path.cwd())
        return known


def wait_for(pool: Pool, interrupts: Interrupts, hosts: int = 1) -> None:
    """Return when a pool has so many hosts; say meanwhile what it waits for.

    Raises:
        PoolError: They could not be had.
        KeyboardInterrupt: The user did not want to wait: hosts that nobody uses are given back.
    """
    if interrupts.attend(lambda: pool.has_hosts(hosts)):
        return
    for versions in pool.process.of_other_versions():
        say(f'another kernel uses pool "{pool.name}" with {versions}: it is not joined')
    say(f'waiting for pool "{pool.name}" to warm up …')
    wait = Wait()
    try:
        Background(lambda tell: pool.open(hosts, tell, wait)).wait(interrupts, say)
    except KeyboardInterrupt:
        interrupts.attend(lambda: pool.give_up(wait))
        raise


def say(line: str) -> None:
    """Print a line at once, below the cell that waits."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def warm(config: Config, name: str = "local") -> threading.Thread:
    """Open a pool in a thread; a failure shows when a cell needs the pool."""
    pool = named(name, config)
    return Background(lambda tell: pool.open(1, has_run=False)).thread


def stop(run: RunRecord, config: Config) -> None:
    """End a run that goes on, of this kernel or of another one of the user's."""
    _connected(run.pool, config).halt(run.run_id, "interrupt")


def stacks(run: RunRecord, config: Config) -> RunStacks:
    """Return where the ranks of a run stand, and its fetchers; of any kernel of the user's."""
    found = _connected(run.pool, config).call(GetStacks(run.run_id))
    if data := RunFolder(run.path).plan().data:
        of_data = _connected(data.pool, config).call(GetStacks(share_id(run.run_id)))
        found.fetchers, found.silent = of_data.fetchers, [*found.silent, *of_data.silent]
    return found


def _connected(name: str, config: Config) -> Pool:
    pool = named(name, config)
    pool.connect()
    return pool


@dataclass(frozen=True)
class PoolRow:
    """A pool of taas.toml, and what it says of itself; nothing where it does not answer."""

    name: str
    engine: str
    state: str
    status: PoolStatus


def rows(config: Config) -> list[PoolRow]:
    """Return every pool of taas.toml, and how it stands."""
    found = []
    for name, settings in config.pools.items():
        pool = named(name, config)
        alive, status = pool.is_alive(), PoolStatus()
        with suppress(PoolError):
            if pool.is_ready:
                status = pool.status()
        state = "ready" if pool.is_ready else "starting" if alive else "down"
        state = "silent" if pool.is_silent else state
        found.append(PoolRow(name, settings.engine, state, status))
    return found


def check(config: Config, names: Sequence[str] = ()) -> "CheckReport":
    """Ask the hosts of the pools of those names, or of all pools, what they are like; take none.

    Raises:
        UsageError: There is no such pool.
        StoreError: The project store cannot be written.
        PoolError: A pool that is up does not answer.
        KeyboardInterrupt: The user did not want to wait.
    """
    # Only a check needs it, 0.05 s: the first cell does not pay for it.
    from taas_magic.setup.install import packages_needed

    asked, packages = [config.pool(name) for name in names or config.pools], packages_needed()
    store = config.store.path or os.getcwd()
    try:  # who sees a file of random name in the project store shares the store
        mark = tempfile.NamedTemporaryFile(prefix=".taas-", dir=store)  # noqa: SIM115
    except OSError as error:
        raise StoreError(
            f"project store {store}: it cannot be written: {error.strerror}"
        ) from error
    with mark:
        here = facts.this_kernel(mark.name)
        up = {row.name: row.status.hosts for row in rows(config)}
        found = facts.check(asked, lambda pool, stop: find_engine(pool).ways(stop), here, packages)
        known = {row.pool for row in found}
        for pool in asked:
            if pool.name not in known and up[pool.name]:
                # its hosts are there only while they are taken: their agents say
                question = GetFacts(packages=list(packages), mark=mark.name)
                agents = named(pool.name, config).call(question)
                found += [facts.judged(pool, each, here, packages) for each in agents]
            elif pool.name not in known:
                found.append(_none_up(pool))
    means = {(name, host.host): host.means for name, hosts in up.items() for host in hosts}
    return CheckReport(found, here, means)


def _none_up(pool: PoolConfig) -> Row:
    todo = f"They are checked when a run takes them; %taas warm {pool.name} takes one now"
    return Row(pool.name, "", None, (Finding(REMARK, "no host is up", todo),))


_HEAD = ("pool", "host", "python", "torch", "taas", "GPUs", "disk", "clock", "interface", "store")
_MARKS = {ERROR: "✗", WARNING: "!", REMARK: "·"}
_COLOUR_OF = {ERROR: COLOURS["FAILED"], WARNING: COLOURS["INTERRUPTED"], REMARK: "inherit"}


class CheckReport:
    """The hosts of pools as one table, with all findings and what to do.

    Args:
        here: What they were asked by.
        means: What holds a host's ranks off the project store, by pool and host, where it is up.
    """

    def __init__(
        self, rows: Sequence[Row], here: Kernel, means: Mapping[tuple[str, str], str]
    ) -> None:
        self._rows, self._here, self._means = rows, here, means

    def __repr__(self) -> str:
        """Return it as plain text; a host's findings stand below it."""
        head, *lines = columns([_HEAD, *map(self._cells, self._rows)])
        shown = [head]
        for row, line in zip(self._rows, lines, strict=True):
            shown.append(line)
            for finding in row.findings:
                shown.append(f"    {_MARKS[finding.level]} {finding.what}")
                shown += [f"      {finding.todo}"] * bool(finding.todo)
        return "\n".join([*shown, self._summary()])

    def _repr_html_(self) -> str:
        """Return it as HTML; all that comes from hosts is escaped."""
        rows = [
            [*map(escape, self._cells(row)), "".join(map(_finding_html, row.findings)) or "none"]
            for row in self._rows
        ]
        summary = f"<div style='margin:4px 0px 0px 0px'>{escape(self._summary())}</div>"
        return f"<div style='{FRAME}'>{table_html([*_HEAD, 'findings'], rows)}{summary}</div>"

    def _summary(self) -> str:
        """Say how many hosts can be used."""
        hosts = [row for row in self._rows if row.host]
        unfit = [row.host for row in hosts if not row.is_fit]
        without = f"; not {', '.join(unfit)}" if unfit else ""
        return f"fit for runs: {len(hosts) - len(unfit)} of {len(hosts)} hosts{without}"

    def _cells(self, row: Row) -> tuple[str, ...]:
        """Return what stands in a host's row, but for the findings."""
        seen = row.facts
        if seen is None or not seen.system:
            python = seen.python if seen else "?"
            return (row.pool, row.host or "none is up", python, *["?"] * (len(_HEAD) - 3))
        reached = seen.interface_of(seen.reached_at)
        store = "shared" if seen.sees_store else "travels"
        means = self._means.get((row.pool, row.host))
        return (
            row.pool,
            row.host,
            seen.python,
            seen.torch or "none",
            _ours(seen, self._here),
            f"{seen.gpus} {', '.join(dict.fromkeys(seen.gpu_names))}".rstrip(),
            f"{size_text(seen.free_bytes)} free",
            f"{seen.ahead_s:+.1f} s",
            # the one at which the host was reached is the one that ranks will use
            f"{reached} {seen.reached_at}" if reached else ", ".join(seen.interfaces),
            f"{store}, held by {means}" if means else store,
        )


def _ours(seen: Facts, here: Kernel) -> str:
    from taas_magic.setup.install import what_to_bring

    parcels = [parcel.name for parcel in what_to_bring(seen, here)]
    if not parcels:
        return "installed"
    there = all(name in seen.sites for name in parcels)
    return "in its cache" if there else "comes on first use"


def _finding_html(finding: Finding) -> str:
    mark = f"<b style='color:{_COLOUR_OF[finding.level]}'>{_MARKS[finding.level]}</b>"
    todo = f"<div style='opacity:0.75'>{escape(finding.todo)}</div>" if finding.todo else ""
    return f"<div style='white-space:pre-wrap'>{mark} {escape(finding.what)}{todo}</div>"


def down(name: str, config: Config) -> None:
    """End a pool: its runs, its hosts, its process."""
    named(name, config).down()
