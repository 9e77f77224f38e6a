"""Flags and pools in, a plan out. Pure: no process, no socket, no torch.

A plan says everything about a run before any host is taken, so that `--dry-run` can print it and a
test can compare it.
"""

import dataclasses
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from taas_magic.data_plan import DataPlan
from taas_magic.errors import UsageError
from taas_magic.store import StoreRule

MAX_RANKS_PER_CPU_HOST = 64
"""Ranks that one host without a GPU runs at most; beyond it, memory ends before patience does."""


@dataclass(frozen=True)
class Prefill:
    """How much must be prepared before ranks start.

    Attributes:
        amount: How many `unit`s; 0 for all.
        unit: "bytes", "batches" (over all fetchers and loaders), or "all" that `--units` bounds.
    """

    amount: int
    unit: str


@dataclass(frozen=True)
class Flags:
    """What the head of a cell asks for; the magic's flags, parsed.

    Attributes:
        gpus: Ranks in all (world size).
        max_gpus: Ranks that the run may grow to, once there are hosts for them; 0: it does not.
        cpus: Fetcher hosts for the registered loaders; 0 runs the loaders inside the ranks.
        units: Bound on the units that all ranks together are given; None is no bound.
        pool: Name of the pool that runs the ranks.
        data_pool: Name of the pool that runs the fetchers; "" finds one.
        prefill: What fetchers must have ready before ranks start; None starts both together.
        uneven_hosts: Whether hosts may have different numbers of ranks.
        out: Names of variables that rank 0 sends back into the notebook.
        name: What the run is called in lists and in the head.
        max_restarts: How often all ranks may start again after one died.
        timeout_s: Bound on the run's time, in seconds; None is no bound.
        env: Environment variables of the ranks, on top of the notebook's own.
        log_ranks: Ranks whose lines the notebook shows; None shows all.
        store: The project store; "" is the one of taas.toml, else the notebook's folder.
        store_writes: What becomes of writes to it by ranks that are not 0: discard or refuse.
        shared_writes: Folders in it that every rank may write.
        dry_run: Print the plan instead of carrying it out.
    """

    gpus: int
    max_gpus: int = 0
    cpus: int = 0
    units: int | None = None
    pool: str = "local"
    data_pool: str = ""
    prefill: Prefill | None = None
    uneven_hosts: bool = False
    out: tuple[str, ...] = ()
    name: str = ""
    max_restarts: int = 0
    timeout_s: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    log_ranks: frozenset[int] | None = None
    store: str = ""
    store_writes: str = "discard"
    shared_writes: tuple[str, ...] = ()
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


@dataclass(frozen=True)
class HostPlan:
    """The share of one host: `ranks` processes from global rank `first_rank` on."""

    host_rank: int
    first_rank: int
    ranks: int
    threads_per_rank: int


@dataclass(frozen=True)
class Room:
    """How far a run may grow: to `most` ranks, on hosts of `per_host` ranks and `cores` processors.

    Attributes:
        uneven: Whether its hosts may have different numbers of ranks.
    """

    most: int
    per_host: int
    cores: int
    uneven: bool = False


@dataclass(frozen=True)
class Plan:
    """One run, decided."""

    run_id: str
    name: str
    pool: str
    world_size: int
    hosts: tuple[HostPlan, ...]
    out: tuple[str, ...] = ()
    max_restarts: int = 0
    timeout_s: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cpus: int = 0
    units: int | None = None
    prefill: Prefill | None = None
    notes: tuple[str, ...] = ()
    store: StoreRule | None = None
    data: DataPlan | None = None
    room: Room | None = None

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values, for the journal and the wire."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Plan":
        """The inverse of `to_json`."""
        hosts = tuple(HostPlan(**host) for host in values["hosts"])
        rule = values.get("store")
        fill = values.get("prefill")
        parsed = {
            "hosts": hosts,
            "store": StoreRule.from_json(rule) if rule else None,
            "prefill": Prefill(**fill) if fill else None,
            "room": Room(**values["room"]) if values.get("room") else None,
            "data": DataPlan.from_json(values["data"]) if values.get("data") else None,
        }
        tuples = {key: tuple(values[key]) for key in ("out", "notes")}
        return cls(**{**values, **tuples, **parsed})


def new_run_id(now: float | None = None) -> str:
    """A name that sorts by time and that two kernels cannot both choose.

    For example `20260131-142501-3f9a1c`.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return f"{stamp}-{secrets.token_hex(3)}"


def make_plan(
    flags: Flags,
    host: HostCapacity,
    run_id: str,
    max_hosts: int = 1,
    store: StoreRule | None = None,
) -> Plan:
    """Decides how the ranks lie on hosts like `host`.

    Args:
        flags: What the cell asks for.
        host: What each host of the pool offers.
        run_id: From `new_run_id`.
        max_hosts: Hosts that the pool may have.
        store: The project store, and who may write to it; None holds no rank to anything.

    Raises:
        UsageError: The pool cannot hold so many ranks, or not evenly.
    """
    per_host = host.gpus or MAX_RANKS_PER_CPU_HOST
    n_hosts = -(-flags.gpus // per_host)
    if n_hosts > max_hosts:
        kind = "GPUs" if host.gpus else "CPU ranks"
        raise UsageError(
            f"--gpus {flags.gpus}: pool {flags.pool!r} has {per_host * max_hosts} {kind} "
            f"({max_hosts} host{'s' * (max_hosts > 1)} with {per_host} each); "
            f"possible is 1 to {per_host * max_hosts}"
        )
    room = Room(flags.max_gpus, per_host, host.cores, flags.uneven_hosts)
    if flags.max_gpus > per_host * max_hosts:
        raise UsageError(
            f"--gpus {flags.gpus}:{flags.max_gpus}: pool {flags.pool!r} cannot grow beyond "
            f"{per_host * max_hosts}"
        )
    if flags.gpus % n_hosts and not flags.uneven_hosts:
        raise UsageError(
            f"--gpus {flags.gpus} does not divide evenly over {n_hosts} hosts of {per_host}; "
            f"possible is a multiple of {n_hosts}, or --uneven-hosts"
        )
    return Plan(
        run_id=run_id,
        name=flags.name,
        pool=flags.pool,
        world_size=max(flags.gpus, _most_on(room, n_hosts)),
        hosts=_host_plans(max(flags.gpus, _most_on(room, n_hosts)), n_hosts, host.cores),
        out=flags.out,
        max_restarts=flags.max_restarts,
        timeout_s=flags.timeout_s,
        env=dict(flags.env),
        cpus=flags.cpus,
        units=flags.units,
        prefill=flags.prefill,
        notes=_notes(flags, host),
        store=store,
        room=room if flags.max_gpus else None,
    )


def next_size(plan: Plan) -> Plan | None:
    """The same run on as few more hosts as give it more ranks; None where it may not grow."""
    room = plan.room
    if room is None or plan.world_size >= room.most:
        return None
    for n_hosts in range(len(plan.hosts) + 1, -(-room.most // room.per_host) + 1):
        ranks = _most_on(room, n_hosts)
        if ranks > plan.world_size:
            hosts = _host_plans(ranks, n_hosts, room.cores)
            return dataclasses.replace(plan, world_size=ranks, hosts=hosts)
    return None


def _most_on(room: Room, n_hosts: int) -> int:
    ranks = min(room.most, room.per_host * n_hosts)
    return ranks if room.uneven else ranks - ranks % n_hosts


def _host_plans(world_size: int, n_hosts: int, cores: int) -> tuple[HostPlan, ...]:
    """Shares that differ by one rank at most, the larger ones first."""
    base, larger = divmod(world_size, n_hosts)
    plans: list[HostPlan] = []
    for number in range(n_hosts):
        ranks = base + (number < larger)
        first = plans[-1].first_rank + plans[-1].ranks if plans else 0
        plans.append(HostPlan(number, first, ranks, max(1, cores // ranks)))
    return tuple(plans)


def _notes(flags: Flags, host: HostCapacity) -> tuple[str, ...]:
    if host.gpus:
        return ()
    ranks = f"{flags.gpus} CPU rank{'s' * (flags.gpus > 1)}"
    return (f"no GPU in pool {flags.pool!r}: --gpus {flags.gpus} runs {ranks}",)
