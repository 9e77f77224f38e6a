"""When ranks may start: `--prefill` against what fetchers say."""

import pytest

from taas_magic.plan import Prefill
from taas_magic.remote.filling import Filling, lanes_fill

BATCHES = Prefill(100, "batches")
BYTES = Prefill(1000, "bytes")
ALL = Prefill(0, "all")


def fetched(number=0, ready=0, ready_bytes=0, spilled_bytes=0, idle=0, lanes=2):
    stats = {"ready": ready, "ready_bytes": ready_bytes, "spilled_bytes": spilled_bytes}
    loaders = {"train": stats | {"idle": idle, "lanes": lanes}}
    return {"kind": "fetched", "number": number, "loaders": loaders}


def filling(prefill, *events, fetchers=1, loaders=1, units=None):
    found = Filling(prefill, fetchers, loaders, units)
    for event in events:
        found.take(event)
    return found


@pytest.mark.parametrize(
    ("prefill", "events", "is_enough"),
    [
        (BATCHES, [], False),
        (BATCHES, [fetched(ready=99)], False),
        (BATCHES, [fetched(ready=100)], True),
        (BATCHES, [fetched(0, ready=50), fetched(1, ready=50)], True),
        (BATCHES, [fetched(0, ready=60), fetched(0, ready=70)], False),
        (BYTES, [fetched(ready_bytes=600)], False),
        (BYTES, [fetched(ready_bytes=600, spilled_bytes=400)], True),
        (ALL, [fetched(ready=30, idle=1)], False),
    ],
)
def test_enough_is_what_was_asked_for(prefill, events, is_enough):
    assert filling(prefill, *events, fetchers=2, units=40).is_enough is is_enough


def test_lanes_that_can_prepare_no_more_are_enough():
    full = fetched(0, ready=3, idle=2)
    assert filling(BATCHES, full).is_enough
    assert not filling(BATCHES, full, fetchers=2).is_enough, "the other has said nothing yet"
    assert not filling(BATCHES, full, fetched(1, idle=1), fetchers=2).is_enough
    assert filling(BATCHES, full, fetched(1, idle=2), fetchers=2).is_enough


def test_ranks_start_when_all_fetchers_have_ended():
    ended = [{"kind": "fetcher_ended", "number": number} for number in (0, 1)]
    assert not filling(BATCHES, ended[0], fetchers=2).is_enough
    assert filling(BATCHES, *ended, fetchers=2).is_enough
    assert filling(BATCHES, ended[0], fetched(1, ready=9, idle=2), fetchers=2).is_enough


def test_what_the_head_is_told():
    assert filling(BYTES, fetched(ready_bytes=600)).fields == {
        "done": 600,
        "wanted": 1000,
        "unit": "bytes",
    }
    assert filling(ALL, loaders=2, units=40).fields == {"done": 0, "wanted": 80, "unit": "batches"}


def test_what_lanes_prepare_for_it():
    assert lanes_fill(None) == (0, 0)
    assert lanes_fill(BATCHES) == (100, 0)
    assert lanes_fill(BYTES) == (0, 1000)
    assert lanes_fill(ALL)[0] > 1e15
