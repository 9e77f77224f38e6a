"""Make the plan of a run from a cell's flags and the capacity of hosts, in pure functions.

A plan decides everything about a run before any host is allocated. If the pool has too few hosts
for `--cpus`, the loaders of the run share fetchers. If the hosts are still too few, several
fetchers run on one host. The batches that a rank gets do not depend on the number of fetchers and
hosts (docs/data.md).
"""

import itertools
import keyword
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import Struct

from taas_magic.capture.work import VALUE
from taas_magic.config import LOCAL, Config, PoolConfig
from taas_magic.errors import UsageError
from taas_magic.store.rule import StoreRule


class FetcherPlan(Struct, frozen=True):
    """Plan of one fetcher.

    Attributes:
        number: Number of the fetcher in the run, from 0.
        index: Index of the fetcher among the fetchers that run the same loaders, from 0.
        host: Index of the fetcher's host among the hosts for fetchers.
    """

    number: int
    index: int
    loaders: tuple[str, ...]
    host: int


class DataPlan(Struct, frozen=True):
    """Plan of all fetchers of a run.

    Attributes:
        pool: Name of the pool that runs the fetchers.
        hosts: Number of hosts that run fetchers.
        pool_hosts: Number of hosts of the pool to wait for before the hosts of the fetchers are
            chosen. If the pool also runs the ranks, this number includes the hosts of the ranks.
            So ranks and fetchers get different hosts if the pool has enough hosts.
        crosses: Whether batches may be sent from host to host. If so, fetchers listen on the
            network, not only on their own host.
        cores: Number of processors that each fetcher may use. A loader's number of workers depends
            on this value, so the value is the same for all fetchers.
    """

    pool: str
    hosts: int
    pool_hosts: int
    fetchers: tuple[FetcherPlan, ...]
    crosses: bool
    cores: int

    def fetchers_on(self, host: int) -> tuple[FetcherPlan, ...]:
        """Return the fetchers on host number `host`."""
        return tuple(fetcher for fetcher in self.fetchers if fetcher.host == host)

    @property
    def loaders(self) -> frozenset[str]:
        """Names of the loaders that the fetchers run."""
        return frozenset(name for fetcher in self.fetchers for name in fetcher.loaders)


def choose_data_pool(ranks_pool: str, data_pool: str, config: Config) -> tuple[PoolConfig, str]:
    """Choose the pool for the fetchers: `data_pool`, else a pool for data, else the ranks' pool.

    A pool for data is a pool with `role = "data"` in taas.toml. If there are several such pools,
    choose the first one of `config.pools`.

    Args:
        data_pool: Value of `--data-pool`: name of a pool; "" without this flag.

    Returns:
        The pool, and a note for the user if several pools have `role = "data"`, else "".

    Raises:
        UsageError: There is no pool with the name `data_pool`.
    """
    if data_pool:
        return config.pool(data_pool), ""
    for_data = [pool for pool in config.pools.values() if pool.role == "data"]
    first = for_data[0] if for_data else config.pool(ranks_pool)
    if len(for_data) < 2:
        return first, ""
    names = ", ".join(f'"{pool.name}"' for pool in for_data)
    note = f'pools {names} have role "data": "{first.name}" is used; --data-pool NAME chooses'
    return first, note


def place_fetchers(
    loaders: Sequence[str], cpus: int, pool: PoolConfig, cores: int, rank_hosts: int = 0
) -> tuple[DataPlan, str]:
    """Choose the number of fetchers for the loaders, and assign the fetchers to hosts.

    Each loader gets a group of `cpus` fetchers, on hosts that no other loader uses. If the pool has
    too few hosts for this, there are only as many groups as fit, but at least one, and the loaders
    are divided evenly among the groups. If the pool has fewer than `cpus` hosts, fetchers share
    hosts. Fetchers on the same host share the host's cores equally.

    Args:
        loaders: Names of the registered loaders that the cell uses; at least one.
        cpus: Number of hosts for each loader; at least one.
        cores: Processors of each host of the pool.
        rank_hosts: Number of the pool's hosts that run ranks; 0 if another pool runs the ranks.
            This number does not reduce the hosts for fetchers, because a host may run both. The
            run waits for this number of hosts in addition.

    Returns:
        The plan, and a note for the user if loaders share fetchers or fetchers share hosts, else
        "". Hosts that fetchers share with ranks give no note.
    """
    groups = max(1, min(len(loaders), pool.max_hosts // cpus))
    hosts = min(groups * cpus, pool.max_hosts)
    places = enumerate(itertools.product(range(groups), range(cpus)))
    fetchers = tuple(
        FetcherPlan(number, index, tuple(loaders[group::groups]), number % hosts)
        for number, (group, index) in places
    )
    per_host = -(-len(fetchers) // hosts)
    plan = DataPlan(
        pool=pool.name,
        hosts=hosts,
        pool_hosts=min(pool.max_hosts, hosts + rank_hosts),
        fetchers=fetchers,
        crosses=not rank_hosts or pool.max_hosts > 1,
        cores=max(1, cores // per_host),
    )
    return plan, _sharing_note(len(loaders), cpus, pool, len(fetchers))


def _sharing_note(loaders: int, cpus: int, pool: PoolConfig, fetchers: int) -> str:
    """Return a note for the user if the pool has too few hosts for `--cpus`, else "".

    `--cpus` is the number of hosts for each loader. The note says whether fetchers share hosts or
    loaders share fetchers.
    """
    wanted, have = cpus * loaders, pool.max_hosts
    if wanted <= have:
        return ""
    asked = f"--cpus {cpus}" + f" for {loaders} loaders" * (loaders > 1)
    has, them = ("1 host", "it") if have == 1 else (f"{have} hosts", "them")
    shared = f"{fetchers} fetchers share {them}"
    if fetchers <= have:
        shared = "the loaders share fetchers"
    return f'{asked} needs {wanted} hosts, but pool "{pool.name}" has {has}: {shared}'


class Prefill(Struct, frozen=True):
    """Amount of data that fetchers must prepare before ranks start.

    Attributes:
        amount: Number of bytes or batches, over all fetchers and loaders; 0 if `unit` is "all".
        unit: Unit of `amount`, "bytes" or "batches"; or "all" for all data up to the limit that
            `--units` sets.
    """

    amount: int
    unit: str


class RunOptions(Struct, frozen=True, kw_only=True):
    """Options of the `%%taas` line that the plan of the run contains unchanged.

    docs/magic.md describes the flags.

    Attributes:
        cpus: Number of fetcher hosts for each registered loader; 0 runs the loaders in child
            processes of the ranks.
        prefill: Amount of data that fetchers must prepare before ranks start; None starts ranks and
            fetchers together.
        out: Variables to return to the notebook, such as `losses` (of rank 0) or `losses@3`.
        rehearse: In a rehearsal, the number of batches after which each pass over a registered
            loader ends; 0 if the run is no rehearsal.
        log_ranks: Ranks whose lines and displays the notebook shows; empty for all ranks. None
            shows the lines of all ranks and the displays of the first rank that runs the cell.
        federated: Whether the run is a federation. Then each host runs one rank. As soon as all
            hosts take part, the run continues even if a host other than the first one fails or is
            lost.
        ranks: Numbers of the session's ranks that run the cell; empty for all.
    """

    name: str = ""
    pool: str = LOCAL
    cpus: int = 0
    units: int | None = None
    prefill: Prefill | None = None
    out: tuple[str, ...] = ()
    max_restarts: int = 0
    timeout_s: float | None = None
    profile: int = 0
    rehearse: int = 0
    env: Mapping[str, str] = {}
    log_ranks: frozenset[int] | None = None
    federated: bool = False
    session: str = ""
    ranks: tuple[int, ...] = ()


class Flags(RunOptions, frozen=True, kw_only=True):
    """All options of the `%%taas` line, parsed. docs/magic.md describes the flags.

    Attributes:
        gpus: Number of ranks (world size); 0 for the session's number.
        data_pool: Name of the pool that runs the fetchers; "" for the first pool with
            `role = "data"` or, if there is none, the pool of the ranks.
        hang_s: Seconds without progress after which the status header shows where the ranks are; 0
            for never; None for the value in taas.toml.
        store: Folder of the project store; "" for the folder in taas.toml or, if taas.toml names
            none, the notebook's folder.
        send: Variables whose values the notebook sends to a session's ranks even if a cell of the
            session has assigned other values to the variables.
    """

    gpus: int
    data_pool: str = ""
    uneven_hosts: bool = False
    hang_s: float | None = None
    store: str = ""
    store_writes: str = "discard"
    shared_writes: tuple[str, ...] = ()
    detach: bool = False
    send: tuple[str, ...] = ()
    dry_run: bool = False


@dataclass(frozen=True)
class HostCapacity:
    """Capacity of one host of a pool.

    Attributes:
        gpus: Number of CUDA devices; 0 for a CPU host, whose ranks run on the CPU.
    """

    gpus: int
    cores: int


class HostPlan(Struct, frozen=True):
    """Plan of the ranks on one host of a run.

    Attributes:
        host_rank: Number of the host among the hosts that run ranks.
        first_rank: Lowest rank on the host.
        ranks: Number of ranks on the host.
        threads_per_rank: Value of `OMP_NUM_THREADS` for these ranks.
    """

    host_rank: int
    first_rank: int
    ranks: int
    threads_per_rank: int


class Plan(RunOptions, frozen=True, kw_only=True):
    """Plan of a run.

    Attributes:
        hosts: Plan of the ranks on each host, in the order of `host_rank`. Hosts that run only
            fetchers are not in this list, but in `data`.
        hang_s: Seconds without progress after which the status header shows where the ranks are; 0
            for never.
        store: Rule for access to the project store; None for no restrictions.
        data: Plan of the fetchers; None if the run has none.
    """

    run_id: str
    world_size: int
    hosts: tuple[HostPlan, ...]
    hang_s: float = 60.0
    notes: tuple[str, ...] = ()
    store: StoreRule | None = None
    data: DataPlan | None = None
    trusted: bool = True

    @property
    def untrusted_pool(self) -> str:
        """Name of the run's pool if taas.toml says that the pool is not trusted, else ""."""
        return "" if self.trusted else self.pool

    @property
    def timeout_text(self) -> str:
        """Message that the run exceeded its time limit; "" if the run has no time limit."""
        if self.timeout_s is None:
            return ""
        named = f'run "{self.name}" ({self.run_id})' if self.name else f"run {self.run_id}"
        return f'{named} on pool "{self.pool}" exceeded the timeout of {self.timeout_s:g} s'

    @property
    def clearing_rank(self) -> int:
        """Number of the lowest shown rank, whose `clear_output` clears the output of all ranks."""
        return min(self.log_ranks or self.ranks or {0})

    @property
    def working_ranks(self) -> Sequence[int]:
        """Ranks that run the work, in ascending order: the ranks of `--ranks`, or all ranks."""
        return self.ranks or range(self.world_size)

    def shows_lines(self, rank: int) -> bool:
        """Return whether the notebook shows the lines that a rank prints."""
        return not self.log_ranks or rank in self.log_ranks

    def shows_displays(self, rank: int) -> bool:
        """Return whether the notebook shows a rank's displays, such as pictures and tables."""
        if self.log_ranks is None:
            return rank == min(self.ranks, default=0)
        return self.shows_lines(rank)


LAST = -1
"""Value that `split_name` returns for `@last`, the working rank with the highest number."""

ALL = -2
"""Value that `split_name` returns for `@all`, all working ranks."""

FIRST = -3
"""Value that `split_name` returns for a name without `@`: the working rank with the lowest number.

The working ranks are the ranks that run the work (`Plan.working_ranks`).
"""


def split_name(text: str) -> tuple[str, int]:
    """Parse an item of `--out` into a variable, and the rank that returns the variable's value.

    `losses` means the first working rank, `losses@3` rank 3, `losses@last` the last working rank,
    and `losses@all` a list of the values of all working ranks. The working ranks are those of
    `--ranks`, or all ranks. Instead of a variable, `VALUE` means the value of the cell's last
    expression, or the function's return value.

    Returns:
        The variable, and a rank number, `FIRST`, `LAST` or `ALL`.

    Raises:
        ValueError: `text` is not the name of a variable, or no rank follows the `@`.
    """
    name, at, rank = text.partition("@")
    special = {"last": LAST, "all": ALL}
    is_rank = not at or rank in special or (rank.isascii() and rank.isdigit())
    is_name = name == VALUE or (name.isidentifier() and not keyword.iskeyword(name))
    if not is_name or not is_rank:
        raise ValueError(text)
    if not at:
        return name, FIRST
    return name, special[rank] if rank in special else int(rank)


def variable_name(text: str) -> str:
    """Return the variable in an item of `--out`, without the rank: `losses` for `losses@3`."""
    return split_name(text)[0]


def requests_value_of(text: str, rank: int, working_ranks: Sequence[int]) -> bool:
    """Return whether an item of `--out`, such as `losses@3`, requests the value of `rank`.

    Args:
        working_ranks: Ranks that run the work, in ascending order.
    """
    wanted = split_name(text)[1]
    if wanted == ALL:
        return rank in working_ranks
    return rank == {FIRST: working_ranks[0], LAST: working_ranks[-1]}.get(wanted, wanted)


def ranks_with_results(plan: Plan) -> frozenset[int]:
    """Return the ranks that may send results: rank 0, and the ranks that `--out` requests."""
    return frozenset(
        rank
        for rank in range(plan.world_size)
        if rank == 0 or any(requests_value_of(it, rank, plan.working_ranks) for it in plan.out)
    )


NO_GPU = "No GPU found"
"""Beginning of the note about a run whose hosts have no GPU."""

MAX_RANKS_PER_CPU_HOST = 64
"""Maximum number of ranks on a host without a GPU. More ranks would fill the host's memory."""


def new_run_id(now: float | None = None) -> str:
    """Return a new run id, such as `20260131-142501-0423f9a1`. The ids sort by time.

    The parts are the day, the time in milliseconds, and four random hexadecimal digits. Day and
    time are in UTC: with local time, the ids would not sort by time after a change of the zone.

    Args:
        now: Time in seconds since 1970; None for the current time.
    """
    now = time.time() if now is None else now
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return f"{stamp}-{int(now % 1 * 1000):03}{secrets.token_hex(2)}"


def make_plan(
    flags: Flags,
    host: HostCapacity,
    run_id: str,
    max_hosts: int = 1,
    store: StoreRule | None = None,
) -> Plan:
    """Make the plan of a run's ranks, for a pool whose hosts all have the same capacity.

    The caller adds the fetchers to the plan later. Use as few hosts as possible: a host with GPUs
    runs one rank for each GPU; a host without GPUs runs up to `MAX_RANKS_PER_CPU_HOST` ranks. But a
    federation has one rank on each host. The ranks of a host share the host's cores equally.

    If `--env` sets CUDA_VISIBLE_DEVICES to an empty value, the hosts count as hosts without GPUs.
    If the hosts have no GPUs, the plan has a note for the user, except in a rehearsal.

    Args:
        host: Capacity of each host of the pool.
        max_hosts: Maximum number of hosts of the pool.
        store: Rule for access to the project store; None for no restrictions.

    Raises:
        UsageError: The pool has too few hosts for the ranks. Or the ranks do not divide evenly over
            the hosts, and `--uneven-hosts` is not given.
    """
    if flags.env.get("CUDA_VISIBLE_DEVICES") == "":  # as in a rehearsal
        host = replace(host, gpus=0)
    per_host = 1 if flags.federated else host.gpus or MAX_RANKS_PER_CPU_HOST
    n_hosts = -(-flags.gpus // per_host)
    _check_fits(flags, host, per_host, n_hosts, max_hosts)
    where = "" if flags.pool == LOCAL else f' in pool "{flags.pool}"'
    no_gpu = f"{NO_GPU}{where}; running {flags.gpus} CPU process{'es' * (flags.gpus > 1)}"
    return Plan(
        **{name: getattr(flags, name) for name in RunOptions.__struct_fields__},
        run_id=run_id,
        world_size=flags.gpus,
        hosts=_host_plans(flags.gpus, n_hosts, host.cores),
        notes=() if host.gpus or flags.rehearse else (no_gpu,),
        store=store,
    )


def _check_fits(
    flags: Flags, host: HostCapacity, per_host: int, n_hosts: int, max_hosts: int
) -> None:
    """Raise a UsageError if the ranks do not fit on the hosts, or do not divide evenly over them.

    With `--uneven-hosts`, the ranks need not divide evenly. If there are too few GPUs, the message
    says how to run the ranks on CPUs.

    Args:
        per_host: Maximum number of ranks on a host.
        n_hosts: Number of hosts that the ranks need.
        max_hosts: Maximum number of hosts of the pool.
    """
    most = per_host * max_hosts
    if flags.gpus > most:
        where = "this machine" if flags.pool == LOCAL else f'pool "{flags.pool}"'
        each = f" ({max_hosts} hosts with {per_host} each)" if max_hosts > 1 else ""
        if not host.gpus:
            raise UsageError(
                f"{where} allows 1 to {most} CPU processes{each}; you requested {flags.gpus}"
            )
        raise UsageError(
            f"{where} has {most} GPU{'s' * (most > 1)}{each}, one for each rank; you requested "
            f"{flags.gpus}. To run the ranks on CPUs, set CUDA_VISIBLE_DEVICES to an empty value: "
            "--env CUDA_VISIBLE_DEVICES="
        )
    if flags.gpus % n_hosts and not flags.uneven_hosts:
        raise UsageError(
            f"{flags.gpus} ranks do not divide evenly over {n_hosts} hosts with {per_host} "
            f"{'GPUs' if host.gpus else 'CPU processes'} each: ask for a multiple of {n_hosts}, or "
            "add --uneven-hosts"
        )


def _host_plans(world_size: int, n_hosts: int, cores: int) -> tuple[HostPlan, ...]:
    """Divide ranks over hosts; the first hosts may have one rank more than the others.

    The threads of a rank are the host's cores divided by the ranks on the host, but at least one.

    Args:
        cores: Number of cores of each host.
    """
    base, larger = divmod(world_size, n_hosts)
    plans: list[HostPlan] = []
    for number in range(n_hosts):
        ranks = base + (number < larger)
        first = plans[-1].first_rank + plans[-1].ranks if plans else 0
        plans.append(HostPlan(number, first, ranks, max(1, cores // ranks)))
    return tuple(plans)
