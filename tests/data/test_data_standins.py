"""Tests that `RemoteDataset` shows the attributes of the real dataset, whatever their names."""

import warnings
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from tests.data.data_rig import Rows, service

CHANGED = "only in this rank; .* in the notebook"

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


class Flip:
    """Transform of the notebook with a probability."""

    __module__ = "__main__"  # only changes of the user's own classes are noticed
    p = 1.0

    def __init__(self) -> None:
        self.p = 1.0


class Compose:
    """Transform of a library: a list of transforms."""

    __module__ = "torchvision.transforms.transforms"

    def __init__(self, transforms: list[Flip]) -> None:
        self.transforms = transforms


class Staged(Rows):
    """Dataset whose settings, and whose cache and counter, can change in place."""

    choices: ClassVar = {"a": 1}

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.cfg, self.order, self.tf, self._tf = {"stage": 0}, [1, 2], Flip(), Flip()
        self.pipe = Compose([Flip()])
        self.weights, self.cache = torch.ones(2000), {"reads": 0}

    def __getitem__(self, index: int) -> object:
        self.cache["reads"] += 1
        return super().__getitem__(index)

    def __getattr__(self, name: str) -> object:
        if name == "delegated":
            return self.cfg
        raise AttributeError(name)

    @property
    def file(self) -> dict[str, int]:
        self._file = getattr(self, "_file", {"reads": 0})
        return self._file

    def load(self, index: int) -> int:
        self.cache["reads"] += 1
        return index

    def set_stage(self, stage: int) -> None:
        self.cfg["stage"] = stage

    def close_mosaic(self) -> "Staged":
        self._tf.p = 0.0
        return self


CHANGES: dict[str, Callable[[Any], object]] = {
    "cfg": lambda it: it.cfg.update(stage=1),
    "order": lambda it: it.order.append(3),  # a small attribute, which comes with the loader
    "tf": lambda it: setattr(it.tf, "p", 0.0),
    "pipe": lambda it: setattr(it.pipe.transforms[0], "p", 0.0),
    "weights": lambda it: it.weights.zero_(),
    "choices": lambda it: it.choices.update(a=it.choices["a"] + 1),
    "delegated": lambda it: it.delegated.update(stage=1),
}
"""Functions that change a `Staged` in place, each by the attribute that it changes."""


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_place_of_the_dataset_in_a_rank_warns_at_the_next_pass(
    tmp_path: Path, name: str, is_wrapped: bool
) -> None:
    dataset: Dataset[object] = Subset(Staged(4), range(4)) if is_wrapped else Staged(4)
    path = f"train.dataset{'.dataset' * is_wrapped}"
    with service(tmp_path, DataLoader(dataset, 2)) as running:
        remote: Any = running.loader()
        shown = attrgetter(path.removeprefix("train."))(remote)
        getattr(shown, name)
        iter(remote)  # reading is no change
        CHANGES[name](shown)
        with pytest.warns(UserWarning, match=f"the cell has changed {path}.{name} {CHANGED}"):
            iter(remote)
        CHANGES[name](shown)
        iter(remote)  # one warning for each loader


def test_a_method_that_changes_the_ranks_copy_in_place_warns(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Staged(4), 2)) as running:
        remote: Any = running.loader()
        remote.dataset.set_stage(0)  # this changes nothing
        for _ in range(2):
            cfg = remote.dataset.cfg
            with pytest.warns(
                UserWarning, match=r"set_stage\(\) changed 'cfg' only in this rank's"
            ):
                remote.dataset.set_stage(cfg["stage"] + 1)
        with pytest.warns(UserWarning, match=r"close_mosaic\(\) changed '_tf' only in this rank's"):
            remote.dataset.close_mosaic()
        iter(remote)  # the warnings of the methods suffice
        remote.dataset.tf.p = 0.5
        with pytest.warns(UserWarning, match=f"changed train.dataset.tf {CHANGED}"):
            remote.dataset.load(0)


def test_reading_a_dataset_that_counts_and_caches_causes_no_warning(tmp_path: Path) -> None:
    with service(tmp_path, DataLoader(Subset(Staged(4), range(4)), 2)) as running:
        remote: Any = running.loader()
        inner = remote.dataset.dataset
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for reads in (0, 2):
                assert inner.cache["reads"] == reads
                assert inner[3][1] == 3
                assert inner.load(2) == 2
                assert inner.file == {"reads": 0}
                iter(remote)
