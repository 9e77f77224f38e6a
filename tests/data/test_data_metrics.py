"""The proof over what ranks were handed."""

from taas_magic.data import metrics


def line(
    rank: int = 0,
    turn: int = 0,
    epoch: int = 0,
    generation: int = 0,
    first_step: int = 0,
    batches: int = 3,
) -> metrics.Handed:
    return metrics.Handed(generation, "train", turn, epoch, rank, 2, first_step, batches)


def test_the_ledger_proves_that_nothing_was_handed_out_twice() -> None:
    assert metrics.audit([line(), line(rank=1)]) == []
    assert metrics.audit([line(), line(rank=1), line(turn=1)]) == []
    assert metrics.audit([line(), line(generation=1)]) == []


def test_the_ledger_names_what_was_handed_out_twice() -> None:
    assert "positions [2, 4] were" in metrics.audit([line(), line(first_step=1, batches=2)])[0]
    assert "different epochs" in metrics.audit([line(), line(rank=1, epoch=1)])[0]


def test_the_ledger_knows_what_is_missing() -> None:
    assert metrics.missing([line(), line(rank=1, batches=2)], 6) == [5]
