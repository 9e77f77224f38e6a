"""What a lane prepares when nobody waits: an epoch and a little, or as much as is to be ready."""

from itertools import islice

from taas_magic.data.lane_spec import LaneSpec
from taas_magic.data.outcome import Opened
from taas_magic.data.share import Share
from taas_magic.data.wire import Kind


def share(batches=4, enough=lambda: True, lanes=1, number=0, units=None, streams=None):
    spec = LaneSpec(b"", "train", 0, b"", lanes=lanes, number=number, units=units)
    opened = Opened(None if streams else batches, streams, 0)
    return Share(spec, lambda epoch: opened, enough)


def slots(keys):
    return [(key.epoch, key.slot) for key in keys if key.kind is Kind.GET]


def test_one_epoch_and_two_batches_of_the_next():
    assert slots(share()) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


def test_before_any_rank_asks_it_goes_on_until_there_is_enough():
    prepared = []
    keys = share(enough=lambda: len(prepared) >= 11)
    for key in keys:
        prepared += slots([key])
    assert prepared == [(epoch, slot) for epoch in range(3) for slot in range(4)][:11]


def test_once_a_rank_asks_it_is_as_ever():
    keys = share(enough=lambda: False)
    list(islice(keys, 20))
    keys.reached(2, 2)
    assert slots(keys) == [(2, 3), (3, 0), (3, 1)]


def test_units_bound_all_epochs_together():
    assert slots(share(enough=lambda: False, units=10)) == [
        *((0, slot) for slot in range(4)),
        *((1, slot) for slot in range(4)),
        *((2, slot) for slot in range(2)),
    ]


def test_a_lane_without_a_part_of_the_data_ends():
    assert slots(share(enough=lambda: False, lanes=3, number=2, streams=2)) == []
    assert slots(share(enough=lambda: False, batches=0)) == []
