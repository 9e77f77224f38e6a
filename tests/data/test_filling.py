"""When ranks may start: `--prefill` against what fetchers say."""

import pytest

from taas_magic.host.fetchers import workers_fill
from taas_magic.notebook.run import Filling
from taas_magic.plan import Prefill
from tests.events import event

BATCHES = Prefill(100, "batches")
BYTES = Prefill(1000, "bytes")
ALL = Prefill(0, "all")


def fetched(number=0, ready=0, ready_bytes=0, spilled_bytes=0, idle=0, workers=2):
    stats = {"ready": ready, "ready_bytes": ready_bytes, "spilled_bytes": spilled_bytes}
    loaders = {"train": stats | {"idle": idle, "workers": workers}}
    return event("fetched", number=number, loaders=loaders)


def filling(prefill, *events, fetchers=1, loaders=1, units=None):
    found = Filling(prefill, fetchers, loaders, units)
    for seen in events:
        found.take(seen)
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


def test_workers_that_can_prepare_no_more_are_enough():
    full = fetched(0, ready=3, idle=2)
    assert filling(BATCHES, full).is_enough
    assert not filling(BATCHES, full, fetchers=2).is_enough, "the other has said nothing yet"
    assert not filling(BATCHES, full, fetched(1, idle=1), fetchers=2).is_enough
    assert filling(BATCHES, full, fetched(1, idle=2), fetchers=2).is_enough


def test_ranks_start_when_all_fetchers_have_ended():
    ended = [event("fetcher_ended", number=number) for number in (0, 1)]
    assert not filling(BATCHES, ended[0], fetchers=2).is_enough
    assert filling(BATCHES, *ended, fetchers=2).is_enough
    assert filling(BATCHES, ended[0], fetched(1, ready=9, idle=2), fetchers=2).is_enough


def test_what_the_head_is_told():
    said = filling(BYTES, fetched(ready_bytes=600)).event("cpu1")
    assert (said.host, said.done, said.wanted, said.unit) == ("cpu1", 600, 1000, "bytes")
    said = filling(ALL, loaders=2, units=40).event("")
    assert (said.done, said.wanted, said.unit) == (0, 80, "batches")


def test_what_workers_prepare_for_it():
    assert workers_fill(None) == (0, 0)
    assert workers_fill(BATCHES) == (100, 0)
    assert workers_fill(BYTES) == (0, 1000)
    assert workers_fill(ALL)[0] > 1e15
