"""What stands in a rank for a loader's dataset and samplers, which are with the fetchers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, DistributedSampler, IterableDataset

from taas_magic.data.feed import Feed, LoaderShape

if TYPE_CHECKING:
    from taas_magic.data.loader import RemoteLoader


class RemoteSampler(DistributedSampler[Any]):
    """Stands for the sampler, whose order the fetchers know; `set_epoch` chooses the epoch.

    A DistributedSampler, so that Lightning sees that the loader is sharded already.
    """

    def __init__(self, loader: "RemoteLoader", dataset: "RemoteDataset", feed: Feed) -> None:
        super().__init__(dataset, feed.world_size, feed.rank, shuffle=False)
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the loader's next iterator gives."""
        super().set_epoch(epoch)
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a registered loader's order is with its fetchers; iterate the loader")


class RemoteBatchSampler:
    """Stands for a batch sampler of the user's own."""

    def __init__(self, loader: "RemoteLoader", sampler: RemoteSampler) -> None:
        self._loader, self.sampler = loader, sampler

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a registered loader's order is with its fetchers; iterate the loader")

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the loader's next iterator gives."""
        self.sampler.set_epoch(epoch)


class RemoteDataset(Dataset[Any]):
    """Stands for a dataset that is with the fetchers: knows its length and small attributes."""

    def __init__(self, loader: "RemoteLoader", shape: LoaderShape) -> None:
        self._remote, self._about = loader, shape

    def __len__(self) -> int:
        if self._about.samples is None:
            raise TypeError(f"the dataset of loader {self._about.name!r} has no length")
        return self._about.samples

    def __getitem__(self, index: Any) -> Any:
        return self._remote.sample(index)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_remote", "_about"):
            raise AttributeError(name)
        if name in self._about.attributes:
            return self._about.attributes[name]
        return getattr(self._remote.original().dataset, name)


class RemoteStream(RemoteDataset, IterableDataset[Any]):
    """Stands for an iterable-style dataset."""

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("an iterable-style dataset is with its fetchers; iterate the loader")


def arguments(loader: "RemoteLoader", shape: LoaderShape) -> dict[str, Any]:
    """What makes DataLoader's own attributes say the truth."""
    if shape.iterable:
        stream = RemoteStream(loader, shape)
        return {"dataset": stream, "batch_size": shape.batch_size, "drop_last": shape.drop_last}
    dataset = RemoteDataset(loader, replace(shape, samples=shape.samples or 0))
    sampler = RemoteSampler(loader, dataset, loader.feed)
    return {
        "dataset": dataset,
        "batch_size": shape.batch_size,
        "sampler": sampler,
        "drop_last": shape.drop_last if shape.batch_size is not None else False,
    }
