"""What a cell asks for, what hosts offer, and the plan that follows from both: plain values.

A plan says everything about a run before any host is taken, so that `--dry-run` can print it and a
test can compare it; `planning` makes it.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from taas_magic.data_plan import DataPlan
from taas_magic.store import StoreRule


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
