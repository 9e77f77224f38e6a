"""Tests of merging equal lines of ranks: each rank's order is kept, and no line waits long."""

import math
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taas_magic.display.log import LineMerger, ShownLine, rank_ranges

MERGE_WAIT_S = 0.05
LINES = st.sampled_from(["a", "b", "epoch 1", "epoch 2", ""])


def lines_by_rank(shown: list[ShownLine]) -> dict[int, list[str]]:
    lines: defaultdict[int, list[str]] = defaultdict(list)
    for ranks, text in shown:
        for rank in ranks:
            lines[rank].append(text)
    return dict(lines)


def test_a_line_of_all_ranks_is_shown_once_as_soon_as_the_last_prints_it() -> None:
    folder = LineMerger(3, MERGE_WAIT_S)
    assert folder.push(2, ["x"], 0.0) == []
    assert folder.push(0, ["x"], 0.01) == []
    assert folder.next_due() == MERGE_WAIT_S
    assert folder.push(1, ["x"], 0.02) == [ShownLine((0, 1, 2), "x")]
    assert folder.next_due() == math.inf


def test_a_line_of_some_ranks_is_shown_once_after_its_waiting_time() -> None:
    folder = LineMerger(8, MERGE_WAIT_S)
    for rank in range(1, 8):
        assert folder.push(rank, ["warning"], 0.001 * rank) == []
    assert folder.pop_due(0.05) == []
    assert folder.pop_due(0.052) == [ShownLine((1, 2, 3, 4, 5, 6, 7), "warning")]


def test_no_line_waits_when_each_rank_has_printed_another() -> None:
    folder = LineMerger(2, MERGE_WAIT_S)
    assert folder.push(1, ["I am 1"], 0.0) == []
    assert folder.push(0, ["I am 0"], 0.001) == [ShownLine((0,), "I am 0")]
    assert folder.pop_due(MERGE_WAIT_S) == [ShownLine((1,), "I am 1")]


def test_a_line_of_one_rank_does_not_split_the_next_common_line() -> None:
    folder = LineMerger(2, MERGE_WAIT_S)
    assert folder.push(1, ["start"], 0.0) == []
    assert folder.push(0, ["config"], 0.001) == [ShownLine((0,), "config")]
    assert folder.push(0, ["start"], 0.002) == [ShownLine((0, 1), "start")]


def test_a_common_line_after_other_lines_is_merged() -> None:
    folder = LineMerger(2, MERGE_WAIT_S)
    assert folder.push(0, ["I am 0", "start"], 0.0) == []
    assert folder.push(1, ["I am 1", "start"], 0.0) == [
        ShownLine((0,), "I am 0"),
        ShownLine((1,), "I am 1"),
        ShownLine((0, 1), "start"),
    ]


def test_lines_of_a_rank_that_prints_alone_wait_only_their_time() -> None:
    folder = LineMerger(2, MERGE_WAIT_S)
    assert folder.push(0, ["loss 0.5", "loss 0.4"], 2.0) == []
    assert folder.pop_due(2.0 + MERGE_WAIT_S) == [
        ShownLine((0,), "loss 0.5"),
        ShownLine((0,), "loss 0.4"),
    ]
    assert folder.next_due() == math.inf


def test_each_line_waits_its_own_time_and_keeps_its_order() -> None:
    folder = LineMerger(2, MERGE_WAIT_S)
    for step in range(6):
        shown = folder.push(0, [f"{step}"], 0.01 * step)
    assert [line.text for line in shown] == ["0"]
    assert [line.text for line in folder.pop_due(1.0)] == ["1", "2", "3", "4", "5"]


def test_lines_merge_again_after_a_line_of_one_rank() -> None:
    folder = LineMerger(2, MERGE_WAIT_S)
    for epoch in ("epoch 1", "epoch 2"):
        assert folder.push(0, [epoch], 0.0) == []
        assert folder.push(1, [epoch], 0.01) == [ShownLine((0, 1), epoch)]
        assert folder.push(0, ["loss 0.3"], 0.02) == []
        assert folder.pop_due(1.0) == [ShownLine((0,), "loss 0.3")]


def test_one_rank_never_waits() -> None:
    assert LineMerger(1).push(0, ["a", "b"], 0.0) == [ShownLine((0,), "a"), ShownLine((0,), "b")]


def test_lines_of_8192_ranks_merge() -> None:
    world_size = 8192
    folder = LineMerger(world_size)
    shown = [line for rank in range(world_size) for line in folder.push(rank, ["a", "b"], 0.0)]
    assert shown == [ShownLine(tuple(range(world_size)), text) for text in "ab"]


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(LINES), st.sampled_from([0, 0.01, 0.06]))))
def test_nothing_is_lost_doubled_or_reordered_and_nothing_waits_too_long(
    pushes: list[tuple[int, list[str], float]],
) -> None:
    folder = LineMerger(4, MERGE_WAIT_S)
    printed: defaultdict[int, list[str]] = defaultdict(list)
    shown: list[ShownLine] = []
    now = 0.0
    for rank, lines, pause_s in pushes:
        now += pause_s
        printed[rank] += lines
        shown += folder.push(rank, lines, now)
        deadline = folder.next_due()
        assert deadline == math.inf or now < deadline <= now + MERGE_WAIT_S
    shown += folder.pop_all()
    assert folder.next_due() == math.inf
    assert lines_by_rank(shown) == {rank: lines for rank, lines in printed.items() if lines}
    assert all(list(ranks) == sorted(set(ranks)) for ranks, _ in shown)


@given(data=st.data(), lines=st.lists(LINES, max_size=10), world_size=st.integers(1, 5))
def test_equal_output_merges_whatever_the_interleaving(
    data: st.DataObject, lines: list[str], world_size: int
) -> None:
    folder = LineMerger(world_size, MERGE_WAIT_S)
    order = data.draw(st.permutations([rank for rank in range(world_size) for _ in lines]))
    left = {rank: list(lines) for rank in range(world_size)}
    shown = [line for rank in order for line in folder.push(rank, [left[rank].pop(0)], 0.0)]
    assert shown == [ShownLine(tuple(range(world_size)), line) for line in lines]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([3], "3"),
        (range(8), "0-7"),
        ([0, 1, 2, 5, 7, 8], "0-2,5,7-8"),
        (range(0, 40, 2), "0,2,4,6,8,10,…"),
    ],
)
def test_rank_ranges(ranks: list[int], text: str) -> None:
    assert rank_ranges(ranks) == text
