"""Tests that `RemoteDataset` shows the attributes of the real dataset, whatever their names."""

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from tests.data.data_rig import Rows, service

pytestmark = pytest.mark.usefixtures("forkserver")


class Filed(Rows):
    """Dataset with private attributes that `RemoteDataset` may have under the same names."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._path, self._copy, self._remote, self._about = "a", "b", "c", "d"


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_private_attributes_of_a_dataset_are_the_datasets_own(
    tmp_path: Path, is_wrapped: bool
) -> None:
    dataset: Dataset[object] = Subset(Filed(4), range(4)) if is_wrapped else Filed(4)
    with service(tmp_path, DataLoader(dataset, 2)) as running:
        shown = attrgetter("dataset.dataset" if is_wrapped else "dataset")(running.loader())
        found = [getattr(shown, name) for name in ("_path", "_copy", "_remote", "_about")]
        assert found == ["a", "b", "c", "d"]
        with pytest.raises(AttributeError, match=r"cannot set '_path' of .* in the notebook"):
            shown._path = "e"


class Weighted(Sampler[int]):
    """Sampler whose order depends on weights, which a training may change."""

    def __init__(self, size: int) -> None:
        self.weights = torch.ones(size)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.multinomial(self.weights, len(self.weights), replacement=True).tolist())

    def __len__(self) -> int:
        return len(self.weights)

    def update(self, index: int, weight: float) -> None:
        self.weights[index] = weight


class Cut:
    """Collate function with a setting: it keeps the first `length` samples."""

    length = 3

    def __call__(self, samples: list[Any]) -> Any:
        return samples[: self.length]


def test_a_change_of_a_sampler_in_a_rank_warns_or_raises(tmp_path: Path) -> None:
    loader = DataLoader(Rows(8), 2, sampler=Weighted(8), collate_fn=Cut())
    with service(tmp_path, loader) as running:
        remote: Any = running.loader()
        with pytest.raises(AttributeError, match=r"cannot set 'weights' of .* in the notebook"):
            remote.sampler.weights = torch.zeros(8)
        with pytest.raises(AttributeError, match=r"cannot set 'epoch' of .* call set_epoch"):
            remote.batch_sampler.epoch = 2
        remote.sampler.set_epoch(1)
        assert remote.sampler.weights.sum() == 8
        iter(remote)  # reading and set_epoch are no changes
        remote.sampler.update(3, 0.0)
        with pytest.warns(UserWarning, match="changed the sampler, .* in the notebook"):
            iter(remote)
        iter(remote)  # the same change causes no second warning
        remote.collate_fn.length = 1
        with pytest.warns(UserWarning, match="collate_fn .* in the notebook"):
            iter(remote)
