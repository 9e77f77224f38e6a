"""Tests that `RemoteDataset` shows the attributes of the real dataset, whatever their names."""

from operator import attrgetter
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, Dataset, Subset

from tests.data.data_rig import Rows, service

pytestmark = pytest.mark.usefixtures("forkserver")


class Filed(Rows):
    """A dataset with private attributes whose names `RemoteDataset` could use for its own."""

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
