"""Which fetchers a run has, which loaders each one runs, and on which host. Pure.

`--cpus M` asks for M hosts for each registered loader. Where the pool has fewer, they are shared:
loaders share fetchers first, then fetchers share hosts. What a rank is handed depends on none of
this (docs/data.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from taas_magic.config import Config, PoolConfig


@dataclass(frozen=True)
class FetcherPlan:
    """One fetcher.

    Attributes:
        number: Its number in the run, which its messages and files carry.
        index: Its place among the M fetchers of its loaders.
        loaders: Names of the loaders that it runs.
        host: Which of the plan's hosts it is on.
    """

    number: int
    index: int
    loaders: tuple[str, ...]
    host: int


@dataclass(frozen=True)
class DataPlan:
    """The fetchers of a run.

    Attributes:
        pool: The pool whose hosts they are on.
        hosts: How many of its hosts are theirs.
        pool_hosts: Hosts that the pool is to have before they are chosen: where it runs the ranks
            too, these then find hosts without fetchers, as far as there are any.
        fetchers: All of them, by number.
        crosses: Whether batches may go from host to host.
        cores: Processors that each may use; the same everywhere, since the lanes of a loader are
            counted by it.
        notes: What the user did not ask for.
    """

    pool: str
    hosts: int
    pool_hosts: int
    fetchers: tuple[FetcherPlan, ...]
    crosses: bool
    cores: int
    notes: tuple[str, ...] = ()

    def on(self, host: int) -> tuple[FetcherPlan, ...]:
        """The fetchers of one of the hosts."""
        return tuple(fetcher for fetcher in self.fetchers if fetcher.host == host)

    @property
    def loaders(self) -> frozenset[str]:
        """Names of the loaders that they run."""
        return frozenset(name for fetcher in self.fetchers for name in fetcher.loaders)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "DataPlan":
        """The inverse of `dataclasses.asdict`, also after a journey as JSON."""
        fetchers = tuple(
            FetcherPlan(**{**fetcher, "loaders": tuple(fetcher["loaders"])})
            for fetcher in values["fetchers"]
        )
        return cls(**{**values, "notes": tuple(values["notes"]), "fetchers": fetchers})


def choose_pool(ranks_pool: str, data_pool: str, config: Config) -> tuple[PoolConfig, str]:
    """The pool for the fetchers, and a note where the choice was open; "" where it was not.

    Args:
        ranks_pool: The pool that runs the ranks.
        data_pool: `--data-pool`; "" takes the first pool with `role = "data"`, else `ranks_pool`.
        config: The settings.

    Raises:
        UsageError: There is no such pool.
    """
    if data_pool:
        return config.pool(data_pool), ""
    for_data = [pool for pool in config.pools.values() if pool.role == "data"]
    if not for_data:
        return config.pool(ranks_pool), ""
    first, *others = for_data
    if not others:
        return first, ""
    names = ", ".join(repr(pool.name) for pool in for_data)
    note = f"pools {names} have role 'data': {first.name!r} is taken; --data-pool NAME chooses"
    return first, note


def place(
    loaders: Sequence[str],
    cpus: int,
    pool: PoolConfig,
    cores: int,
    rank_hosts: int = 0,
    note: str = "",
) -> DataPlan:
    """Puts fetchers on hosts.

    Args:
        loaders: Names of the registered loaders that the cell uses; at least one.
        cpus: `--cpus`: hosts for each of them; at least one.
        pool: The pool whose hosts are taken.
        cores: Processors of each of its hosts.
        rank_hosts: How many of its hosts run the ranks; 0: those of another pool do.
        note: Something to be said besides.
    """
    groups = max(1, min(len(loaders), pool.max_hosts // cpus))
    hosts = min(groups * cpus, pool.max_hosts)
    fetchers = tuple(
        FetcherPlan(number, index, tuple(loaders[group::groups]), number % hosts)
        for number, (group, index) in enumerate(
            (group, index) for group in range(groups) for index in range(cpus)
        )
    )
    per_host = -(-len(fetchers) // hosts)
    notes = (note, _shared(len(loaders), cpus, pool, len(fetchers)))
    return DataPlan(
        pool=pool.name,
        hosts=hosts,
        pool_hosts=min(pool.max_hosts, hosts + rank_hosts),
        fetchers=fetchers,
        crosses=not rank_hosts or pool.max_hosts > 1,
        cores=max(1, cores // per_host),
        notes=tuple(text for text in notes if text),
    )


def _shared(loaders: int, cpus: int, pool: PoolConfig, fetchers: int) -> str:
    """What the user is told where hosts are shared."""
    wanted, have = cpus * loaders, pool.max_hosts
    if wanted <= have:
        return ""
    asked = f"--cpus {cpus} for {loaders} loaders" if loaders > 1 else f"--cpus {cpus}"
    has = "1 host" if have == 1 else f"{have} hosts"
    shared = f"{fetchers} fetchers share {'it' if have == 1 else 'them'}"
    if fetchers <= have:
        shared = "the loaders share fetchers"
    return f"{asked} asks for {wanted} hosts, pool {pool.name!r} has {has}: {shared}"
