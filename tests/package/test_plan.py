"""Tests of `make_plan`: hosts, ranks and threads of a run, and errors for impossible requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taas_magic.errors import UsageError
from taas_magic.messages import from_json, to_json
from taas_magic.plan import (
    MAX_RANKS_PER_CPU_HOST,
    Flags,
    HostCapacity,
    HostPlan,
    Plan,
    make_plan,
    new_run_id,
)

CPU_HOST = HostCapacity(gpus=0, cores=4)
GPU_HOST = HostCapacity(gpus=8, cores=64)


def test_cpu_ranks_share_the_cores_and_a_note_says_so() -> None:
    plan = make_plan(Flags(gpus=2), CPU_HOST, "id")
    assert plan.hosts == (HostPlan(0, 0, 2, threads_per_rank=2),)
    assert plan.notes == ("No GPU found; running 2 CPU processes",)


def test_more_ranks_than_cores_have_a_thread_each() -> None:
    assert make_plan(Flags(gpus=9), CPU_HOST, "id").hosts[0].threads_per_rank == 1


def test_a_gpu_host_needs_no_note() -> None:
    plan = make_plan(Flags(gpus=8), GPU_HOST, "id")
    assert plan.notes == ()
    assert plan.hosts == (HostPlan(0, 0, 8, threads_per_rank=8),)


def test_more_ranks_than_one_host_has_gpus_are_placed_on_several_hosts() -> None:
    plan = make_plan(Flags(gpus=16), GPU_HOST, "id", max_hosts=3)
    assert [(host.first_rank, host.ranks) for host in plan.hosts] == [(0, 8), (8, 8)]


def test_a_federation_has_a_rank_on_each_host() -> None:
    plan = make_plan(Flags(gpus=3, federated=True), GPU_HOST, "id", max_hosts=3)
    assert [host.ranks for host in plan.hosts] == [1, 1, 1] and plan.federated
    assert from_json(to_json(plan), Plan) == plan


@pytest.mark.parametrize(
    ("gpus", "host", "max_hosts", "words"),
    [
        (
            MAX_RANKS_PER_CPU_HOST + 1,
            CPU_HOST,
            1,
            f"this machine allows 1 to {MAX_RANKS_PER_CPU_HOST} CPU",
        ),
        (9, GPU_HOST, 1, "has 8 GPUs, one for each rank; you requested 9"),
        (9, GPU_HOST, 2, "multiple of 2"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    gpus: int, host: HostCapacity, max_hosts: int, words: str
) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        make_plan(Flags(gpus=gpus), host, "id", max_hosts)
    assert "\n" not in str(refused.value)


def test_ranks_without_visible_gpus_do_not_need_gpus() -> None:
    plan = make_plan(Flags(gpus=9, env={"CUDA_VISIBLE_DEVICES": ""}), GPU_HOST, "id")
    assert [host.ranks for host in plan.hosts] == [9]
    assert plan.notes == ("No GPU found; running 9 CPU processes",)


@given(st.integers(1, 64), st.integers(0, 8), st.integers(1, 128), st.integers(1, 8))
def test_each_rank_is_on_exactly_one_host(
    gpus: int, host_gpus: int, cores: int, max_hosts: int
) -> None:
    try:
        plan = make_plan(Flags(gpus=gpus), HostCapacity(host_gpus, cores), "id", max_hosts)
    except UsageError:
        return
    ranks = [host.first_rank + local for host in plan.hosts for local in range(host.ranks)]
    assert ranks == list(range(gpus))
    assert len(plan.hosts) <= max_hosts
    assert all(host.threads_per_rank >= 1 for host in plan.hosts)


def test_a_plan_is_unchanged_after_encoding_and_decoding() -> None:
    flags = Flags(gpus=2, out=("a", "b"), env={"X": "1"}, timeout_s=3.0)
    plan = make_plan(flags, CPU_HOST, new_run_id())
    assert from_json(to_json(plan), Plan) == plan


def test_run_ids_differ_and_sort_by_time() -> None:
    assert new_run_id(1e9) != new_run_id(1e9)
    assert new_run_id(1e9) < new_run_id(1e9 + 0.002) < new_run_id(1e9 + 1) < new_run_id(2e9)
