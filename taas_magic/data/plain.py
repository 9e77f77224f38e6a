"""Anything that can be iterated, as an iterable-style dataset: what it yields are the batches."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset


class Plain(IterableDataset[Any]):
    """A registered iterable that is no DataLoader."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)


def as_it_is(batch: Any) -> Any:
    """The collation of what is a batch already."""
    return batch
