"""What a cell asks for, what hosts offer, and the plan that follows from both. Pure.

A plan says everything about a run before any host is taken, so that `--dry-run` can print it and a
test can compare it. `--cpus M` asks for M hosts for each registered loader. Where the pool has
fewer, they are shared: loaders share fetchers first, then fetchers share hosts. What a rank is
handed depends on none of this (docs/data.md).
"""

import itertools
import keyword
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct, structs

from taas_magic.config import LOCAL, Config, PoolConfig
from taas_magic.errors import UsageError
from taas_magic.store.rule import StoreRule


class FetcherPlan(Struct, frozen=True):
    """One fetcher.

    Attributes:
        number: Its number in the run, which its messages and files carry.
        index: Its place among the M fetchers of its loaders.
        host: Which of the plan's hosts it is on.
    """

    number: int
    index: int
    loaders: tuple[str, ...]
    host: int


class DataPlan(Struct, frozen=True):
    """The fetchers of a run.

    Attributes:
        hosts: How many of the pool's hosts are theirs.
        pool_hosts: Hosts that the pool is to have before they are chosen: where it runs the ranks
            too, these then find hosts without fetchers, as far as there are any.
        crosses: Whether batches may go from host to host.
        cores: Processors that each may use; the same everywhere, since the workers of a loader are
            counted by it.
    """

    pool: str
    hosts: int
    pool_hosts: int
    fetchers: tuple[FetcherPlan, ...]
    crosses: bool
    cores: int

    def on(self, host: int) -> tuple[FetcherPlan, ...]:
        """Return the fetchers of one of the hosts."""
        return tuple(fetcher for fetcher in self.fetchers if fetcher.host == host)

    @property
    def loaders(self) -> frozenset[str]:
        """Names of the loaders that they run."""
        return frozenset(name for fetcher in self.fetchers for name in fetcher.loaders)


def choose_data_pool(ranks_pool: str, data_pool: str, config: Config) -> tuple[PoolConfig, str]:
    """Return the pool for the fetchers, and a note where the choice was open; "" where it was not.

    Without `--data-pool` it is the first pool with `role = "data"`, else the one of the ranks.

    Raises:
        UsageError: There is no such pool.
    """
    if data_pool:
        return config.pool(data_pool), ""
    for_data = [pool for pool in config.pools.values() if pool.role == "data"]
    first = for_data[0] if for_data else config.pool(ranks_pool)
    if len(for_data) < 2:
        return first, ""
    names = ", ".join(f'"{pool.name}"' for pool in for_data)
    note = f'pools {names} have role "data": "{first.name}" is taken; --data-pool NAME chooses'
    return first, note


def place_fetchers(
    loaders: Sequence[str], cpus: int, pool: PoolConfig, cores: int, rank_hosts: int = 0
) -> tuple[DataPlan, str]:
    """Put fetchers on hosts; returns also what the user is told of that, "" for nothing.

    Args:
        loaders: Names of the registered loaders that the cell uses; at least one.
        cpus: Hosts for each of them; at least one.
        cores: Processors of each of the pool's hosts.
        rank_hosts: How many of its hosts run the ranks; 0: those of another pool do.
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
    return plan, _shared(len(loaders), cpus, pool, len(fetchers))


def _shared(loaders: int, cpus: int, pool: PoolConfig, fetchers: int) -> str:
    """Return what the user is told where hosts are shared."""
    wanted, have = cpus * loaders, pool.max_hosts
    if wanted <= have:
        return ""
    asked = f"--cpus {cpus}" + f" for {loaders} loaders" * (loaders > 1)
    has, them = ("1 host", "it") if have == 1 else (f"{have} hosts", "them")
    shared = f"{fetchers} fetchers share {them}"
    if fetchers <= have:
        shared = "the loaders share fetchers"
    return f'{asked} asks for {wanted} hosts, pool "{pool.name}" has {has}: {shared}'


class Prefill(Struct, frozen=True):
    """How much must be prepared before ranks start.

    Attributes:
        amount: How many `unit`s; 0 for all.
        unit: "bytes", "batches" (over all fetchers and loaders), or "all" that `--units` bounds.
    """

    amount: int
    unit: str


class RunOptions(Struct, frozen=True, kw_only=True):
    """What the head of a cell asks for and its plan has as it is.

    Attributes:
        cpus: Fetcher hosts for the registered loaders; 0 runs the loaders inside the ranks.
        units: Bound on the units that all ranks together are given; None is no bound.
        prefill: What fetchers must have ready before ranks start; None starts both together.
        out: Variables that come back into the notebook, as `split_name` reads them.
        max_restarts: How often all ranks may start again after one died.
        timeout_s: Bound on the run's time, in seconds; None is no bound.
        env: Environment variables of the ranks, on top of the notebook's own.
        log_ranks: Ranks whose lines and displays the notebook shows; empty shows all. None shows
            the lines of all ranks and the displays of rank 0.
        federated: One rank a host, and the run goes on when a host that is not the first fails or
            is lost.
        session: Name of the session that the cell runs in; "" is none.
        ranks: The ranks of the session that run the cell; empty is all.
    """

    name: str = ""
    pool: str = LOCAL
    cpus: int = 0
    units: int | None = None
    prefill: Prefill | None = None
    out: tuple[str, ...] = ()
    max_restarts: int = 0
    timeout_s: float | None = None
    env: Mapping[str, str] = {}
    log_ranks: frozenset[int] | None = None
    federated: bool = False
    session: str = ""
    ranks: tuple[int, ...] = ()


class Flags(RunOptions, frozen=True, kw_only=True):
    """All that the head of a cell asks for; the magic's flags, parsed.

    Attributes:
        gpus: Ranks in all (world size); 0: as many as the session has.
        max_gpus: Ranks that the run may grow to, once there are hosts for them; 0: it does not.
        data_pool: Name of the pool that runs the fetchers; "" finds one.
        uneven_hosts: Whether hosts may have different numbers of ranks.
        hang_s: After how long without a sign of progress it is said where ranks stand; 0: never;
            None: as taas.toml says.
        store: The project store; "" is the one of taas.toml, else the notebook's folder.
        store_writes: What becomes of writes to it by ranks that are not 0: discard or refuse.
        shared_writes: Folders in it that every rank may write.
        detach: Whether the run goes on without its kernel as soon as its ranks have started.
        send: Names whose values a session's ranks get from the notebook, though theirs differ.
    """

    gpus: int
    max_gpus: int = 0
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
    """What one host of a pool offers.

    Attributes:
        gpus: CUDA devices; 0 is a CPU host, whose ranks run on the CPU.
        cores: Logical processors that its processes may use.
    """

    gpus: int
    cores: int


class HostPlan(Struct, frozen=True):
    """The share of one host: `ranks` processes from global rank `first_rank` on."""

    host_rank: int
    first_rank: int
    ranks: int
    threads_per_rank: int


class Room(Struct, frozen=True):
    """How far a run may grow: to `most` ranks, on hosts of `per_host` ranks and `cores` processors.

    Attributes:
        uneven: Whether its hosts may have different numbers of ranks.
    """

    most: int
    per_host: int
    cores: int
    uneven: bool = False


class Plan(RunOptions, frozen=True, kw_only=True):
    """One run, decided.

    Attributes:
        trusted: Whether the pool is; see `PoolConfig`.
    """

    run_id: str
    world_size: int
    hosts: tuple[HostPlan, ...]
    hang_s: float = 60.0
    notes: tuple[str, ...] = ()
    store: StoreRule | None = None
    data: DataPlan | None = None
    room: Room | None = None
    trusted: bool = True

    @property
    def untrusted_pool(self) -> str:
        """The pool, if it is not trusted; else ""."""
        return "" if self.trusted else self.pool

    def shows_lines(self, rank: int) -> bool:
        """Return whether the notebook shows a rank's lines."""
        return not self.log_ranks or rank in self.log_ranks

    def shows_displays(self, rank: int) -> bool:
        """Return whether the notebook shows a rank's displays."""
        return (
            rank == min(self.ranks, default=0) if self.log_ranks is None else self.shows_lines(rank)
        )


LAST = -1
"""Stands for the last rank in a name of `--out`, however many there are."""

ALL = -2
"""Stands for all ranks in a name of `--out`."""


def split_name(text: str) -> tuple[str, int]:
    """Return a name of `--out`, and the rank whose value it is.

    `losses` is rank 0's, `losses@3` rank 3's, `losses@last` that of the rank with the highest
    number, `losses@all` a list of those of all ranks.

    Raises:
        ValueError: It is not a variable's name, or what follows `@` is no rank.
    """
    name, at, rank = text.partition("@")
    special = {"last": LAST, "all": ALL}
    is_rank = not at or rank in special or (rank.isascii() and rank.isdigit())
    if not name.isidentifier() or keyword.iskeyword(name) or not is_rank:
        raise ValueError(text)
    return name, special[rank] if rank in special else int(rank or 0)


def name_of(text: str) -> str:
    """Return what the value of a name of `--out` is called, in the rank and in the notebook."""
    return split_name(text)[0]


def is_from(text: str, rank: int, world_size: int) -> bool:
    """Return whether this rank sends the value of a name of `--out`."""
    wanted = split_name(text)[1]
    return wanted == ALL or rank == (world_size - 1 if wanted == LAST else wanted)


def senders(out: Sequence[str], world_size: int) -> frozenset[int]:
    """Return the ranks that may send results: rank 0, and those that `--out` names."""
    return frozenset(
        rank
        for rank in range(world_size)
        if rank == 0 or any(is_from(text, rank, world_size) for text in out)
    )


NO_GPU = "No GPU found"
MAX_RANKS_PER_CPU_HOST = 64
"""Ranks that one host without a GPU runs at most; beyond it, memory ends before patience does."""


def new_run_id(now: float | None = None) -> str:
    """Return a name that sorts by time and that two kernels cannot both choose.

    For example `20260131-142501-0423f9a1`: the day, the time to the millisecond, and four digits
    of chance.
    """
    now = time.time() if now is None else now
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return f"{stamp}-{int(now % 1 * 1000):03}{secrets.token_hex(2)}"


def make_plan(
    flags: Flags,
    host: HostCapacity,
    run_id: str,
    max_hosts: int = 1,
    store: StoreRule | None = None,
) -> Plan:
    """Decide how the ranks lie on hosts like `host`.

    Args:
        max_hosts: Hosts that the pool may have.
        store: None holds no rank to anything.

    Raises:
        UsageError: The pool cannot hold so many ranks, or not evenly.
    """
    per_host = 1 if flags.federated else host.gpus or MAX_RANKS_PER_CPU_HOST
    n_hosts = -(-flags.gpus // per_host)
    _check_fits(flags, host, per_host, n_hosts, max_hosts)
    room = Room(flags.max_gpus, per_host, host.cores, flags.uneven_hosts)
    hosts = _host_plans(max(flags.gpus, _most_on(room, n_hosts)), n_hosts, host.cores)
    where = "" if flags.pool == LOCAL else f' in pool "{flags.pool}"'
    no_gpu = f"{NO_GPU}{where}; running {flags.gpus} CPU process{'es' * (flags.gpus > 1)}"
    return Plan(
        **{name: getattr(flags, name) for name in RunOptions.__struct_fields__},
        run_id=run_id,
        world_size=sum(share.ranks for share in hosts),
        hosts=hosts,
        notes=() if host.gpus else (no_gpu,),
        store=store,
        room=room if flags.max_gpus else None,
    )


def next_size(plan: Plan) -> Plan | None:
    """Return the run on as few more hosts as give it more ranks; None where it may not grow."""
    room = plan.room
    if room is None or plan.world_size >= room.most:
        return None
    for n_hosts in range(len(plan.hosts) + 1, -(-room.most // room.per_host) + 1):
        ranks = _most_on(room, n_hosts)
        if ranks > plan.world_size:
            hosts = _host_plans(ranks, n_hosts, room.cores)
            return structs.replace(plan, world_size=ranks, hosts=hosts)
    return None


def _check_fits(
    flags: Flags, host: HostCapacity, per_host: int, n_hosts: int, max_hosts: int
) -> None:
    most = per_host * max_hosts
    asked = max(flags.gpus, flags.max_gpus)
    if asked > most:
        where = "this machine" if flags.pool == LOCAL else f'pool "{flags.pool}"'
        each = f" ({max_hosts} hosts with {per_host} each)" if max_hosts > 1 else ""
        kind = "GPUs" if host.gpus else "CPU processes"
        raise UsageError(f"{where} allows 1 to {most} {kind}{each}; you asked for {asked}")
    if flags.gpus % n_hosts and not flags.uneven_hosts:
        raise UsageError(
            f"{flags.gpus} ranks do not divide evenly over {n_hosts} hosts with {per_host} "
            f"{'GPUs' if host.gpus else 'CPU processes'} each: ask for a multiple of {n_hosts}, or "
            "add --uneven-hosts"
        )


def _most_on(room: Room, n_hosts: int) -> int:
    ranks = min(room.most, room.per_host * n_hosts)
    return ranks if room.uneven else ranks - ranks % n_hosts


def _host_plans(world_size: int, n_hosts: int, cores: int) -> tuple[HostPlan, ...]:
    """Return shares that differ by one rank at most, the larger ones first."""
    base, larger = divmod(world_size, n_hosts)
    plans: list[HostPlan] = []
    for number in range(n_hosts):
        ranks = base + (number < larger)
        first = plans[-1].first_rank + plans[-1].ranks if plans else 0
        plans.append(HostPlan(number, first, ranks, max(1, cores // ranks)))
    return tuple(plans)
