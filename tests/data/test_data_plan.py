"""Tests of the plan of fetchers: their number, their loaders, their hosts and their pool."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taas_magic.config import Config, PoolConfig
from taas_magic.errors import UsageError
from taas_magic.messages import from_json, to_json
from taas_magic.plan import DataPlan, FetcherPlan, choose_data_pool, place_fetchers

FEW = st.integers(1, 9)


def pool(max_hosts: int, name: str = "c", role: Literal["ranks", "data"] = "data") -> PoolConfig:
    return PoolConfig(name, role=role, max_hosts=max_hosts)


def config(*pools: PoolConfig) -> Config:
    return Config(pools={**Config().pools, **{pool.name: pool for pool in pools}})


def test_each_fetcher_has_its_own_host_if_there_are_enough() -> None:
    plan, note = place_fetchers(["train"], 2, pool(4), cores=8)
    assert (plan.hosts, plan.pool_hosts) == (2, 2)
    assert plan.fetchers == (FetcherPlan(0, 0, ("train",), 0), FetcherPlan(1, 1, ("train",), 1))
    assert (plan.cores, note) == (8, "")


def test_fetchers_share_too_few_hosts_and_a_note_reports_it() -> None:
    plan, note = place_fetchers(["train"], 4, pool(2), cores=8)
    assert [fetcher.host for fetcher in plan.fetchers] == [0, 1, 0, 1]
    assert plan.cores == 4
    assert note == '--cpus 4 needs 4 hosts, but pool "c" has 2 hosts: 4 fetchers share them'


@pytest.mark.parametrize(
    ("hosts", "loaders_of", "said"),
    [
        (4, [("a",), ("a",), ("b",), ("b",)], ""),
        (
            3,
            [("a", "b"), ("a", "b")],
            '--cpus 2 for 2 loaders needs 4 hosts, but pool "c" has 3 hosts: '
            "the loaders share fetchers",
        ),
    ],
)
def test_each_loader_has_its_own_hosts_if_there_are_enough(
    hosts: int, loaders_of: list[tuple[str, ...]], said: str
) -> None:
    plan, note = place_fetchers(["a", "b"], 2, pool(hosts), cores=8)
    assert [fetcher.loaders for fetcher in plan.fetchers] == loaders_of
    assert [fetcher.index for fetcher in plan.fetchers] == [0, 1] * (len(loaders_of) // 2)
    assert note == said


@pytest.mark.parametrize(("max_hosts", "hosts", "pool_hosts"), [(4, 2, 3), (2, 2, 2), (1, 1, 1)])
def test_fetchers_in_the_ranks_pool_use_other_hosts_if_there_are_any(
    max_hosts: int, hosts: int, pool_hosts: int
) -> None:
    plan, _ = place_fetchers(["train"], 2, pool(max_hosts), cores=8, rank_hosts=1)
    assert (plan.hosts, plan.pool_hosts) == (hosts, pool_hosts)


@given(FEW, FEW, FEW, FEW, st.integers(1, 99))
def test_every_loader_has_each_of_its_fetchers_once(
    loaders: int, cpus: int, hosts: int, rank_hosts: int, cores: int
) -> None:
    names = [f"loader{number}" for number in range(loaders)]
    plan, note = place_fetchers(names, cpus, pool(hosts), cores, rank_hosts)
    for name in names:
        indices = [fetcher.index for fetcher in plan.fetchers if name in fetcher.loaders]
        assert indices == list(range(cpus))
    assert [fetcher.number for fetcher in plan.fetchers] == list(range(len(plan.fetchers)))
    assert plan.hosts <= plan.pool_hosts <= hosts
    on_hosts = [fetcher for host in range(plan.hosts) for fetcher in plan.fetchers_on(host)]
    assert sorted(on_hosts, key=lambda fetcher: fetcher.number) == list(plan.fetchers)
    assert all(plan.fetchers_on(host) for host in range(plan.hosts))
    assert bool(note) == (cpus * loaders > hosts)
    assert plan.cores >= 1
    assert from_json(to_json(plan), DataPlan) == plan


def test_the_data_pool_is_the_named_one_or_the_configured_one_or_that_of_the_ranks() -> None:
    ranks, data = pool(1, "g", "ranks"), pool(2, "c")
    assert choose_data_pool("g", "", config(ranks)) == (ranks, "")
    assert choose_data_pool("g", "", config(ranks, data)) == (data, "")
    assert choose_data_pool("g", "g", config(ranks, data)) == (ranks, "")
    with pytest.raises(UsageError, match='No pool "nowhere"'):
        choose_data_pool("g", "nowhere", config(ranks, data))


def test_of_two_data_pools_the_first_is_used_and_a_note_reports_it() -> None:
    first, second = pool(1, "c1"), pool(1, "c2")
    chosen, note = choose_data_pool("local", "", config(first, second))
    assert chosen == first
    assert note == 'pools "c1", "c2" have role "data": "c1" is used; --data-pool NAME chooses'
