"""accelerate and registered loaders.

Light, as every rank imports it: neither accelerate nor torch before `teach_accelerate`.
"""

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taas_magic.data.loader import RemoteLoader


class _Placed:
    """Mixed into accelerate's DataLoaderShard: one over a loader that deals its batches itself.

    Batches come on the accelerator's device; the accelerator knows when an epoch ends, which
    gradient accumulation and `gather_for_metrics` need.

    Args:
        device: Where batches are moved; None leaves them.
        non_blocking: Whether moving them may overlap with what the rank computes.
        skipped: So many batches at the beginning of an epoch are fetched and not handed out.
    """

    reset: Callable[[], None]
    gradient_state: Any
    skip_batches: int

    def __init__(
        self, loader: "RemoteLoader", device: Any, non_blocking: bool, skipped: int = 0
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            loader.dataset, device=device, skip_batches=skipped, _non_blocking=non_blocking
        )
        self.base_dataloader, self.non_blocking = loader, non_blocking
        self.dl_state_dict = loader.position()

    def __len__(self) -> int:
        return len(self.base_dataloader) - self.skip_batches

    def __iter__(self) -> Iterator[Any]:
        self.iteration = self.base_dataloader.next_epoch
        yield from super().__iter__()  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands after the last batch handed out."""
        return self.base_dataloader.with_states(self.dl_state_dict)

    def _update_state_dict(self) -> None:
        self.dl_state_dict = self.base_dataloader.position()

    def begin(self) -> None:
        """Begin an epoch; ask nothing of the dataset, which is with the fetchers."""
        self.reset()
        loader = self.base_dataloader
        if loader.batch_size and not loader.drop_last and not loader.shape.iterable:
            self.remainder = self.total_dataset_length % self.total_batch_size
        self.gradient_state._add_dataloader(self)

    def set_epoch(self, epoch: int) -> None:
        """Set which epoch the next iterator gives."""
        self.iteration = epoch
        self.base_dataloader.set_epoch(epoch)

    @property
    def total_batch_size(self) -> int:
        """Samples of one step, over all ranks."""
        loader = self.base_dataloader
        return (loader.batch_size or 1) * int(loader.feed.world_size)

    @property
    def total_dataset_length(self) -> int:
        """Samples of an epoch, over all ranks."""
        return self.base_dataloader.shape.samples or 0


def teach_accelerate() -> None:
    """Have `Accelerator.prepare` wrap a registered loader instead of giving it back as it is.

    And have `skip_first_batches` skip what the fetchers give: it would run the loader's sampler.
    """
    from accelerate import accelerator, data_loader
    from accelerate.accelerator import Accelerator
    from accelerate.data_loader import DataLoaderShard

    from taas_magic.data.loader import RemoteLoader

    original = Accelerator.prepare_data_loader
    kind: Any = type("AcceleratedLoader", (_Placed, DataLoaderShard), {})

    @functools.wraps(original)
    def prepare_data_loader(
        self: Any, data_loader: Any, device_placement: bool | None = None, *rest: Any, **named: Any
    ) -> Any:
        if type(data_loader) is not RemoteLoader:
            return original(self, data_loader, device_placement, *rest, **named)
        places = self.device_placement if device_placement is None else device_placement
        prepared = kind(data_loader, self.device if places else None, self.non_blocking)
        self._dataloaders.append(prepared)
        return prepared

    skip = data_loader.skip_first_batches

    @functools.wraps(skip)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, RemoteLoader):
            return kind(dataloader, None, False, num_batches)
        if not isinstance(dataloader, _Placed):
            return skip(dataloader, num_batches)
        placed: Any = dataloader
        return kind(placed.base_dataloader, placed.device, placed.non_blocking, num_batches)

    Accelerator.prepare_data_loader = prepare_data_loader
    # accelerate itself takes it from there when it has imported this module
    data_loader.skip_first_batches = accelerator.skip_first_batches = skip_first_batches
