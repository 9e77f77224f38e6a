"""Integration of registered loaders with accelerate.

Importing accelerate is slow, and every rank imports this module. So only `patch_accelerate` imports
accelerate.
"""

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taas_magic.data.loader import RemoteLoader


class _RemoteShardMixin:
    """Mixin that makes accelerate's DataLoaderShard work with a remote loader.

    The remote loader is already sharded, so accelerate must not shard it again. DataLoaderShard
    moves batches to the accelerator's device. DataLoaderShard also tells the accelerator when an
    epoch ends; gradient accumulation and `gather_for_metrics` need this.

    Args:
        device: Device to move batches to; None to leave them on the CPU.
        skipped: Number of batches to discard at the beginning of an epoch.
    """

    reset: Callable[[], None]
    end_of_dataloader: bool
    remainder: int
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
        for batch in super().__iter__():  # type: ignore[misc]
            if self.end_of_dataloader:
                if self.base_dataloader.has_ended_early:
                    self.remainder = 0  # no sample of a complete step is repeated
                else:
                    batch = self._filled(batch)
            yield batch

    def _filled(self, batch: Any) -> Any:
        """Return the last batch; if it is short, repeat its rows, up to `batch_size` rows.

        accelerate's own sharding also fills a short batch, because `gather` needs the same number
        of rows from all ranks. `gather_for_metrics` drops the repeated rows.

        Only tensors with as many rows as the epoch's last batch are filled, so that any other batch
        stays as it is.
        """
        import torch
        from accelerate.utils import recursively_apply

        loader = self.base_dataloader
        size = loader.batch_size or 1
        rows = self.total_dataset_length % size
        if not rows or not self._fills_last_step or loader.feed.world_size == 1:
            return batch

        def is_short(value: Any) -> bool:
            is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
            return is_plain and not value.is_nested and value.shape[:1] == (rows,)

        order = torch.arange(size) % rows
        return recursively_apply(lambda tensor: tensor[order], batch, test_type=is_short)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch after the last yielded batch.

        To resume there, pass the result to the `load_state_dict` of the remote loader.
        """
        return self.base_dataloader.with_states(self.dl_state_dict)

    def _update_state_dict(self) -> None:
        self.dl_state_dict = self.base_dataloader.position()

    def begin(self) -> None:
        """Tell the accelerator that an epoch begins.

        This method replaces `DataLoaderShard.begin`, which looks up an attribute of the dataset. In
        a rank, that lookup would unpickle a copy of the dataset, which may be large. If the last
        step may repeat samples (`_fills_last_step`), this method also sets `remainder`: the number
        of samples in an incomplete last step, over all ranks (0 if all steps are complete).
        `gather_for_metrics` then drops the repeated samples.
        """
        self.reset()
        if self._fills_last_step:
            self.remainder = self.total_dataset_length % self.total_batch_size
        self.gradient_state._add_dataloader(self)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iterator."""
        self.iteration = epoch
        self.base_dataloader.set_epoch(epoch)

    @property
    def _fills_last_step(self) -> bool:
        """Whether an incomplete last step is filled with samples that ranks have seen before."""
        loader = self.base_dataloader
        is_batched_map = bool(loader.batch_size) and not loader.shape.iterable
        return is_batched_map and not loader.drop_last and loader.shape.uneven == "pad"

    @property
    def total_batch_size(self) -> int:
        """Number of samples in one step, over all ranks."""
        loader = self.base_dataloader
        return (loader.batch_size or 1) * int(loader.feed.world_size)

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in an epoch, over all ranks; 0 if it is not known."""
        shape = self.base_dataloader.shape
        return shape.drawn or shape.samples or 0


def patch_accelerate() -> None:
    """Patch accelerate, so that it works with registered loaders.

    The patched `Accelerator.prepare` wraps a registered loader; the original function would return
    the loader unchanged. The patched `skip_first_batches` receives the first batches from fetchers
    and discards them; the original function would run the loader's sampler in the rank. Both
    patched functions return a DataLoaderShard with `_RemoteShardMixin`. For any other loader, each
    patched function calls its original function.
    """
    from accelerate import accelerator, data_loader
    from accelerate.accelerator import Accelerator
    from accelerate.data_loader import DataLoaderShard

    from taas_magic.data.loader import RemoteLoader

    original = Accelerator.prepare_data_loader
    kind: Any = type("AcceleratedLoader", (_RemoteShardMixin, DataLoaderShard), {})

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
        if not isinstance(dataloader, _RemoteShardMixin):
            return skip(dataloader, num_batches)
        placed: Any = dataloader
        return kind(placed.base_dataloader, placed.device, placed.non_blocking, num_batches)

    Accelerator.prepare_data_loader = prepare_data_loader
    # This code runs during the import of accelerate. `accelerate.accelerator` has already imported
    # the original function, so patch that module, too. The package `accelerate` imports the
    # function later, and so gets the patched one.
    data_loader.skip_first_batches = accelerator.skip_first_batches = skip_first_batches
