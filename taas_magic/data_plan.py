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
        hosts: For each host of theirs, its place among the pool's hosts.
        fetchers: All of them, by number.
        cores: Processors that each may use; the same everywhere, since the lanes of a loader are
            counted by it.
        notes: What the user did not ask for.
    """

    pool: str
    hosts: tuple[int, ...]
    fetchers: tuple[FetcherPlan, ...]
    cores: int
    notes: tuple[str, ...] = ()

    def on(self, host: int) -> tuple[FetcherPlan, ...]:
        """The fetchers of one of the hosts."""
        return tuple(fetcher for fetcher in self.fetchers if fetcher.host == host)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "DataPlan":
        """The inverse of `dataclasses.asdict`, also after a journey as JSON."""
        fetchers = tuple(
            FetcherPlan(**{**fetcher, "loaders": tuple(fetcher["loaders"])})
            for fetcher in values["fetchers"]
        )
        tuples = {key: tuple(values[key]) for key in ("hosts", "notes")}
        return cls(**{**values, **tuples, "fetchers": fetchers})


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
) -> DataPlan | None:
    """Puts fetchers on hosts.

    Args:
        loaders: Names of the registered loaders that the cell uses.
        cpus: `--cpus`: hosts for each of them.
        pool: The pool whose hosts are taken.
        cores: Processors of each of its hosts.
        rank_hosts: How many of its hosts, the first ones, run the ranks; those come last.
        note: Something to be said besides.

    Returns:
        The plan; None where there is nothing to fetch.
    """
    if not loaders or not cpus:
        return None
    wanted = cpus * len(loaders)
    hosts = _hosts(wanted, pool.max_hosts, rank_hosts)
    groups = max(1, min(len(loaders), len(hosts) // cpus))
    fetchers = tuple(
        FetcherPlan(number, index, tuple(loaders[group::groups]), number % len(hosts))
        for number, (group, index) in enumerate(
            (group, index) for group in range(groups) for index in range(cpus)
        )
    )
    hosts = hosts[: len(fetchers)]
    per_host = -(-len(fetchers) // len(hosts))
    notes = [note, _shared(len(loaders), cpus, pool, len(fetchers))]
    said = tuple(text for text in notes if text)
    return DataPlan(pool.name, hosts, fetchers, max(1, cores // per_host), said)


def _hosts(wanted: int, have: int, rank_hosts: int) -> tuple[int, ...]:
    """Places of up to `wanted` hosts, those without ranks first."""
    first = min(rank_hosts, have)
    return (*range(first, have), *range(first))[:wanted]


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
