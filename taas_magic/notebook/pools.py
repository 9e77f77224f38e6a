"""Find, open, list, check and end the pools that this kernel uses."""

import platform
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from taas_magic.config import Config, PoolConfig, size_text, working_folder
from taas_magic.display.head import as_html, columns
from taas_magic.engines.base import make_engine
from taas_magic.errors import PoolError, StoreError
from taas_magic.host.spec import fetchers_share_id
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import (
    Detach,
    GetHostFacts,
    GetStacks,
    Halt,
    HostFacts,
    HostStatus,
    PoolStatus,
    Request,
    RunStacks,
)
from taas_magic.notebook.run import BackgroundCall, Interrupts
from taas_magic.notebook.runs import Run
from taas_magic.pool.address import read_address
from taas_magic.pool.client import Pool, PoolConnection, PoolWait, ask_pool
from taas_magic.setup import facts
from taas_magic.setup.facts import (
    ERROR,
    REMARK,
    WARNING,
    HostCheck,
    HostProblem,
    KernelVersions,
    RequiredPackage,
)

_T = TypeVar("_T")

_pools: dict[str, Pool] = {}
_replaced: list[Pool] = []
_lock = threading.Lock()


def named(name: str, config: Config) -> Pool:
    """Return this kernel's pool with the given name, without opening it.

    Create the `Pool` object on the first call for this name, and keep it for later calls. If the
    pool's settings in taas.toml have changed since then, replace the object by a new one. The old
    pool's process ends when no kernel uses it.

    Raises:
        UsageError: taas.toml has no such pool.
    """
    settings = config.pool(name)
    with _lock:
        known = _pools.get(settings.name)
        if known is None or known.config != settings:
            if known is not None:  # the old pool ends when no kernel uses it
                known.close_when_unused()
                _replaced[:] = [one for one in (*_replaced, known) if not one.is_unused()]
            known = _pools[settings.name] = Pool(settings, working_folder())
        return known


def wait_for_pool(pool: Pool, interrupts: Interrupts, hosts: int = 1) -> PoolConnection:
    """Wait until a pool has `hosts` hosts, and return the connection to the pool.

    If the hosts are available, return at once and print nothing. Otherwise, first print a line for
    each running process of the pool that uses other versions of Python, torch or taas-magic. Then
    start the pool's process if needed, request the hosts, and print the progress below the cell.

    Raises:
        ConnectionEnded: The pool's process ended before it got the hosts.
        PoolError: The pool could not get the hosts.
        KeyboardInterrupt: The user interrupted the wait. The pool later releases its unused hosts.
    """
    wait = PoolWait(pool)
    if ready := interrupts.wait_for(lambda: pool.connection_with(hosts)):
        return ready
    for versions in pool.folder.find_other_versions():
        print_line(
            f'another kernel uses pool "{pool.name}" with {versions}; this kernel starts its own'
        )
    print_line(f'waiting for pool "{pool.name}" to warm up …')
    try:
        return BackgroundCall(lambda show_lines: pool.open(hosts, show_lines, wait)).wait(
            interrupts, print_line
        )
    except KeyboardInterrupt:
        wait.cancel()
        raise


def print_line(line: str) -> None:
    """Print a line below the running cell, and flush stdout, so that the user sees it at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def warm(config: Config, name: str = "local") -> threading.Thread:
    """Start a pool's process and one host in a background thread, and return the thread.

    If this fails, show nothing. The next cell that needs the pool reports the failure.
    """
    pool = named(name, config)
    wait = PoolWait(pool)  # created before the thread starts, so that `down` can cancel it
    return BackgroundCall(lambda show_lines: pool.open(1, wait=wait, has_run=False)).thread


def stop(run: Run, config: Config) -> None:
    """Ask the pool's process to end an active run, which any kernel of the user may have started.

    Return before the run has ended.

    Raises:
        PoolError: The pool's process has ended, or does not answer.
    """
    _send_request(run.context.pool_folder, run.pool, config, Halt(run.id, "interrupt"))


def detach(run: Run, config: Config) -> None:
    """Make the pool's process the owner of an active run, in place of the run's kernel.

    Afterwards, the run continues when the kernel ends.

    Raises:
        PoolError: The pool's process has ended, does not answer, or cannot take the run over.
    """
    if why := _send_request(run.context.pool_folder, run.pool, config, Detach(run.id)):
        raise PoolError(f"run {run.id} cannot be detached: {why}")


def stacks(run: Run, config: Config) -> RunStacks:
    """Ask the pools of a run for the stacks of its ranks and fetchers, and return the stacks.

    Any kernel of the user may have started the run.

    Raises:
        PoolError: The pool's process has ended, or does not answer.
    """
    found = _send_request(run.context.pool_folder, run.pool, config, GetStacks(run.id))
    if data := RunFolder(run.path).plan().data:
        request = GetStacks(fetchers_share_id(run.id))
        of_data = _send_request(run.context.data_folder, data.pool, config, request)
        found.fetchers, found.silent = of_data.fetchers, [*found.silent, *of_data.silent]
    return found


def _send_request(folder: str, name: str, config: Config, request: Request[_T]) -> _T:
    """Send a request to the process of a run's pool, and return the answer.

    Never start a process. If this kernel has a ready connection to the pool, use this connection;
    else open a connection for this request.

    Args:
        folder: Folder of the pool. If the folder is "" (a run of an older taas-magic), the pool
            with the name `name` is used.

    Raises:
        PoolError: The process has ended, or does not answer.
    """
    if not folder:
        return _process_of(named(name, config)).call(request)
    with _lock:
        own = [pool.connection for pool in _pools.values() if str(pool.folder.path) == folder]
    for connection in own:
        if connection is not None and connection.is_ready:
            return connection.call(request)
    return ask_pool(Path(folder), request)


def _process_of(pool: Pool) -> PoolConnection:
    """Return a connection to the running process of a pool, or raise PoolError if there is none."""
    found = pool.connect_if_running()
    if found is None:
        raise PoolError(f'pool "{pool.name}" has no process, so its runs have ended')
    return found


@dataclass(frozen=True)
class PoolRow:
    """State and status of one pool of taas.toml, for `%taas pools`.

    Attributes:
        state: "ready", "silent", "starting", "running" or "down"; `rows` explains these words.
        status: The hosts of the pool and their GPU hours. Empty if this kernel has no ready
            connection to the pool's process, or if the process does not answer.
    """

    name: str
    engine: str
    state: str
    status: PoolStatus


def pool_of_session(run: Run, config: Config) -> PoolConnection:
    """Return a connection to the pool's process that runs a session; never start a process.

    If the session was started in another notebook's folder, look for the pool of that folder.

    Args:
        run: The session's own run, which started the ranks.

    Raises:
        UsageError: taas.toml has no such pool any more.
        PoolError: The pool's process has ended or does not respond, or the pool's settings have
            changed. Or the session belongs to another machine, which shares this machine's state
            folder.
    """
    pool, folder = named(run.pool, config), run.context.pool_folder
    if str(pool.folder.path) != folder:  # the session was started in another notebook's folder
        pool = Pool(config.pool(run.pool), Path(run.context.project))
    if str(pool.folder.path) != folder:
        pool_address = read_address(Path(folder))
        if pool_address is not None and pool_address.machine != platform.node():
            raise PoolError(
                f"the session belongs to machine {pool_address.machine}: use the session in a "
                f"notebook on that machine"
            )
        raise PoolError(
            f'the settings of pool "{run.pool}" or the versions of this kernel are not those with '
            f"which the session was started ({folder})"
        )
    return _process_of(pool)


def rows(config: Config) -> list[PoolRow]:
    """Return the state and status of each pool of taas.toml.

    Request the status only from pools to which this kernel has a ready connection. The state is:

    - "ready": this kernel is connected, and the pool's process sends beats.
    - "silent": this kernel is connected, but the process sends no beats.
    - "starting": a process of the pool is being started.
    - "running": a process runs, but this kernel is not connected to it.
    - "down": no process of the pool runs.
    """
    found = []
    for name, settings in config.pools.items():
        pool = named(name, config)
        connection, status = pool.connection, PoolStatus()
        with suppress(PoolError):
            if connection is not None and connection.is_ready:
                status = connection.status()
        state = "down"
        if pool.folder.is_locked:
            state = "running" if read_address(pool.folder.path) else "starting"
        if connection is not None and not connection.has_ended:
            state = "ready" if connection.is_ready else "silent"
        found.append(PoolRow(name, settings.engine, state, status))
    return found


def check(config: Config, names: Sequence[str] = ()) -> "CheckReport":
    """Check whether the hosts of pools can run cells; allocate no host.

    During the check, the project store contains a temporary file. A host that sees this file shares
    the store with the notebook. The report also says how allocated hosts protect the project store.

    Args:
        config: Settings of taas.toml.
        names: Names of the pools to check; without names, check all pools.

    Returns:
        The report of `%taas pools --check`, a text with a table.

    Raises:
        UsageError: taas.toml has no such pool.
        StoreError: The project store is not writable.
        PoolError: A running pool does not answer.
        KeyboardInterrupt: The user interrupted the check.
    """
    # This import takes 0.05 s, and only a check needs it: the first cell should not pay for it.
    from taas_magic.setup.install import packages_needed

    asked, packages = [config.pool(name) for name in names or config.pools], packages_needed()
    store = config.store.path or str(working_folder())
    try:  # the file has a random name; a host that sees it shares the store
        mark = tempfile.NamedTemporaryFile(prefix=".taas-", dir=store)  # noqa: SIM115
    except OSError as error:
        raise StoreError(
            f"project store {store}: it cannot be written: {error.strerror}"
        ) from error
    with mark:
        up = {row.name: row.status.hosts for row in rows(config)}
        found = ask_hosts(asked, up, config, packages, mark=mark.name)
    protection = {
        (name, host.host): host.protection for name, hosts in up.items() for host in hosts
    }
    return check_report(found, facts.this_kernel(), protection)


def ask_hosts(
    asked: Sequence[PoolConfig],
    up: Mapping[str, Sequence[HostStatus]],
    config: Config,
    packages: Mapping[str, RequiredPackage] = MappingProxyType({}),
    modules: Sequence[str] = (),
    mark: str = "",
) -> list[HostCheck]:
    """Ask the hosts of pools whether they can run cells; allocate no host.

    Reach the hosts in parallel and in the same way as the pool's engine, for example by ssh.
    If the engine can reach only allocated hosts, ask the agents of these hosts through the pool's
    process.

    Args:
        asked: The pools.
        up: The allocated hosts of each pool, by the name of the pool.
        config: Settings of taas.toml.
        packages: Packages that taas-magic needs on a host.
        modules: Top-level modules that a host must have.
        mark: Path of a file in the project store. A host that sees this file shares the store. If
            "", do not check whether hosts share the store.

    Returns:
        The result of each host. For a pool without a host to ask, one result with an empty host
        name.

    Raises:
        PoolError: A pool that is up does not answer.
        KeyboardInterrupt: The user interrupted the check.
    """
    here = facts.this_kernel()
    found = facts.check_hosts(
        asked, lambda pool, stop: make_engine(pool).shells(stop), here, packages, mark, modules
    )
    known = {row.pool for row in found}
    for pool in asked:
        if pool.name not in known and up[pool.name]:
            # The engine of such a pool can reach only allocated hosts, so ask their agents.
            question = GetHostFacts(packages=list(packages), modules=list(modules), mark=mark)
            agents = _process_of(named(pool.name, config)).call(question)
            found += [facts.check_host_facts(pool, each, here, packages) for each in agents]
        elif pool.name not in known:
            todo = f"%taas warm {pool.name} requests one now"
            todo = f"Hosts are checked when a run requests them; {todo}"
            none_up = HostProblem(REMARK, "no host is up", todo)
            found.append(HostCheck(pool.name, "", None, (none_up,)))
    return found


_HEAD = ("pool", "host", "python", "torch", "taas", "GPUs", "disk", "clock", "interface", "store")
_MARKS = {ERROR: "✗", WARNING: "!", REMARK: "·"}


class CheckReport(str):
    """Text of `%taas pools --check`: a table of hosts, with findings and advice on each problem.

    A notebook shows the text with aligned columns.
    """

    __repr__ = str.__str__

    def _repr_html_(self) -> str:
        return as_html(self)


def check_report(
    rows: Sequence[HostCheck], here: KernelVersions, protection: Mapping[tuple[str, str], str]
) -> CheckReport:
    """Return the report of `%taas pools --check`.

    Below the table row of each host are the findings about this host, with advice. The last line
    counts the hosts that can run cells, and names the other hosts.

    Args:
        rows: Results of the check, one for each host.
        here: Versions of the kernel that made the check.
        protection: By pool name and host name: the mechanism by which an allocated host protects
            the project store.
    """
    cells = (_cells(row, here, protection.get((row.pool, row.host), "")) for row in rows)
    head, *lines = columns([_HEAD, *cells])
    shown = [head]
    for row, line in zip(rows, lines, strict=True):
        shown.append(line)
        for problem in row.problems:
            shown.append(f"    {_MARKS[problem.level]} {problem.what}")
            shown += [f"      {problem.todo}"] * bool(problem.todo)
    hosts = [row for row in rows if row.host]
    several = len({row.pool for row in hosts}) > 1
    unfit = [f"{row.pool}: {row.host}" if several else row.host for row in hosts if not row.is_fit]
    without = f"; not {', '.join(unfit)}" if unfit else ""
    fit = f"fit for runs: {len(hosts) - len(unfit)} of {len(hosts)} hosts{without}"
    return CheckReport("\n".join([*shown, fit]))


def _cells(row: HostCheck, here: KernelVersions, protection: str) -> tuple[str, ...]:
    """Return the texts of a host's row in the table of hosts, in the order of `_HEAD`.

    "?" stands for each fact that is unknown because the host did not answer. If the pool has no
    host to ask, the row says "none is up".

    Args:
        row: Result of the host's check.
        here: Versions of this kernel.
        protection: Mechanism that protects the project store; "" if the host is not allocated.
    """
    seen = row.facts
    if seen is None or not seen.system:
        python = seen.python if seen else "?"
        return (row.pool, row.host or "none is up", python, *["?"] * (len(_HEAD) - 3))
    reached = seen.interface_of(seen.reached_at)
    store = "shared" if seen.sees_store else "travels"
    return (
        row.pool,
        row.host,
        seen.python,
        seen.torch or "none",
        _taas_source(seen, here),
        f"{seen.gpus} {', '.join(dict.fromkeys(seen.gpu_names))}".rstrip(),
        f"{size_text(seen.free_bytes)} free",
        f"{seen.ahead_s:+.1f} s",
        # Ranks will use the network interface at which the host was reached.
        f"{reached} {seen.reached_at}" if reached else ", ".join(seen.interfaces),
        f"{store}, protected by {protection}" if protection else store,
    )


def _taas_source(seen: HostFacts, here: KernelVersions) -> str:
    """Return the source of a host's taas-magic, as text for the table of hosts.

    - "installed": the host's Python has taas-magic.
    - "in its cache": the host has a copy of taas-magic from an earlier use.
    - "sent on first use": the notebook will send taas-magic to the host.
    """
    from taas_magic.setup.install import needed_package_folders

    package_folders = [package_folder.name for package_folder in needed_package_folders(seen, here)]
    if not package_folders:
        return "installed"
    there = all(name in seen.sites for name in package_folders)
    return "in its cache" if there else "sent on first use"


def down(name: str, config: Config) -> None:
    """End a pool: its runs, its hosts and its process."""
    named(name, config).down()
