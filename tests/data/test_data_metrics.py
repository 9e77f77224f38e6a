"""The proof over what ranks were handed."""

from taas_magic.data import metrics


def line(**changes):
    fields = {"generation": 0, "loader": "train", "turn": 0, "epoch": 0, "rank": 0}
    return metrics.Handed(**fields | {"world_size": 2, "first_step": 0, "batches": 3} | changes)


def test_the_ledger_proves_that_nothing_was_handed_out_twice():
    assert metrics.audit([line(), line(rank=1)]) == []
    assert metrics.audit([line(), line(rank=1), line(turn=1)]) == []
    assert metrics.audit([line(), line(generation=1)]) == []


def test_the_ledger_names_what_was_handed_out_twice():
    assert "positions [2, 4] were" in metrics.audit([line(), line(first_step=1, batches=2)])[0]
    assert "different epochs" in metrics.audit([line(), line(rank=1, epoch=1)])[0]


def test_the_ledger_knows_what_is_missing():
    assert metrics.missing([line(), line(rank=1, batches=2)], 6) == [5]
