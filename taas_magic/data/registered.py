"""A registered loader: what the ranks get in its place, and what the fetchers get of it.

In the kernel; `registry` says which loaders are registered.
"""

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from taas_magic.config import DataConfig
from taas_magic.data import service
from taas_magic.data.shard import Uneven

if TYPE_CHECKING:
    from taas_magic.data.feed import LoaderShape

_SMALL_ATTRIBUTE_BYTES = 64 << 10


@dataclass(frozen=True)
class Registered:
    """A registered loader.

    Attributes:
        name: Its name in runs.
        loader: The loader itself.
        seed: The seed of its randomness; None: the run's.
        uneven: What happens when its batches do not divide by the ranks: `pad`, `drop`, `keep`.
        is_named: Whether the user named it; else it goes by its variable, once it has one.
    """

    name: str
    loader: Any
    seed: int | None = None
    uneven: Uneven = "pad"
    is_named: bool = True

    def payload(self) -> bytes:
        """The loader, pickled for the fetchers."""
        return cloudpickle.dumps(_as_data_loader(self.loader), protocol=5)  # type: ignore[no-any-return]

    def shape(self) -> "LoaderShape":
        """What travels to the ranks in its place; none of its data."""
        from torch.utils.data import IterableDataset

        from taas_magic.data.feed import LoaderShape

        loader = _as_data_loader(self.loader)
        iterable = isinstance(loader.dataset, IterableDataset)
        return LoaderShape(
            name=self.name,
            batches=None if iterable else _length(loader.batch_sampler or loader.sampler),
            samples=_length(loader.dataset),
            iterable=iterable,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            timeout_s=loader.timeout,
            uneven=self.uneven,
            seed=self.seed,
            attributes=_small_attributes(loader.dataset),
            has_state=iterable and _has_state(loader.dataset),
        )


def serve(
    loaders: Mapping[str, Registered],
    run_dir: Path,
    fetchers: int,
    units: int | None,
    memory: DataConfig,
    tls: bool = False,
) -> None:
    """Write what a run's ranks and fetchers need of the loaders that its cell uses.

    Args:
        loaders: Those loaders, by name.
        run_dir: The run's folder.
        fetchers: How many fetchers run them; 0: the ranks do it themselves.
        units: The bound of `--units`.
        memory: What fetchers and ranks may hold.
        tls: Whether batches go from host to host over a network that is not the user's alone.
    """
    if not loaders:
        return
    import torch

    seed = torch.initial_seed() & (1 << 63) - 1
    served = tuple(
        service.Served(
            entry.name,
            getattr(entry.loader, "num_workers", 0),
            _start_method(entry.loader),
            seed if entry.seed is None else entry.seed,
        )
        for entry in loaders.values()
    )
    certificate = service.new_certificate() if tls else None
    key = service.new_key()
    described = service.Service(key, seed, fetchers, units, served, memory, certificate)
    payloads = {name: entry.payload() for name, entry in loaders.items()}
    service.write(run_dir, described, payloads)


def _start_method(loader: Any) -> str:
    """The start method that the loader asks for its processes, "" for none."""
    context = getattr(loader, "multiprocessing_context", None)
    return context.get_start_method() if context is not None else ""


def _as_data_loader(loader: Any) -> Any:
    from torch.utils.data import DataLoader

    if isinstance(loader, DataLoader):
        return loader
    from taas_magic.data.plain import Plain, as_it_is

    return DataLoader(Plain(loader), batch_size=None, collate_fn=as_it_is)


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def _has_state(dataset: Any) -> bool:
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


def _small_attributes(dataset: Any) -> dict[str, Any]:
    """The dataset's attributes that cost nothing to send, like its classes."""
    small: dict[str, Any] = {}
    for name, value in _plain_attributes(dataset):
        if len(pickle.dumps(value)) <= _SMALL_ATTRIBUTE_BYTES:
            small[name] = value
    return small


def _plain_attributes(dataset: Any) -> Iterable[tuple[str, Any]]:
    for name, value in getattr(dataset, "__dict__", {}).items():
        elements = value if isinstance(value, (list, tuple)) else [value]
        if len(elements) <= 1000 and all(
            isinstance(element, (str, int, float, bool, type(None))) for element in elements
        ):
            yield name, value
