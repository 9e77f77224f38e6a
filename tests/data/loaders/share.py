"""Computes the batches that one rank should receive, by the rules of docs/data.md.

The batches are those of a local DataLoader.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from taas_magic.data.sharding import seed_of

SEED = 7
MOST_ERRORS = 8
"""Number of exceptions in an epoch after which a loader with workers is not read further."""


class Epoch:
    """One epoch of a local DataLoader, whose batches are read on demand with the epoch's seed.

    Attributes:
        seen: Batches read so far. If reading a batch raised an exception, the list has the
            exception in place of the batch.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self.seen: list[Any] = []
        self._is_over = False
        self._random = torch.Generator().manual_seed(seed).get_state()
        with self._own_random():
            self._batches: Iterator[Any] = iter(loader)
        if loader.num_workers or has_generator(loader):
            self._take_all()

    def reaches(self, position: int) -> bool:
        """Read all batches up to a position; return whether the epoch has this position."""
        while len(self.seen) <= position and not self._is_over:
            with self._own_random():
                self._take()
        return len(self.seen) > position

    def close(self) -> None:
        """Drop the reference to the loader's iterator, so that its workers end.

        This is necessary, because an exception may still refer to the frames of the iteration.
        """
        self._is_over, self._batches = True, iter(())

    def _take_all(self) -> None:
        """Read all batches, so that workers end and the generator advances by a whole epoch.

        Stop after `MOST_ERRORS` exceptions.
        """
        while self.reaches(len(self.seen)) and self._errors() < MOST_ERRORS:
            continue
        self.close()

    def _errors(self) -> int:
        return sum(isinstance(event, Exception) for event in self.seen)

    def _take(self) -> None:
        try:
            self.seen.append(next(self._batches))
        except (StopIteration, UnboundLocalError):
            # After worker_init_fn failed, the next batch of torch's worker is an UnboundLocalError.
            self.close()
        except Exception as error:
            self.seen.append(error)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.set_rng_state(self._random)
            yield
            self._random = torch.get_rng_state()


def has_generator(loader: DataLoader[Any]) -> bool:
    """Return whether the loader or its sampler has its own random generator.

    If so, the next epoch depends on how many batches of this epoch were read.
    """
    return loader.generator is not None or getattr(loader.sampler, "generator", None) is not None


class Local:
    """Epochs of a local DataLoader. Each epoch begins after `torch.manual_seed(seed_of(…))`."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self._epochs: dict[int, Epoch] = {}

    def epoch(self, number: int) -> Epoch:
        """Return an epoch by its number. The first call with a number begins the epoch."""
        if number not in self._epochs:
            self._set_epoch(number)
            self._epochs[number] = Epoch(self.loader, seed_of(SEED, number))
        return self._epochs[number]

    def close(self) -> None:
        """Close all epochs, so that their workers end."""
        for epoch in self._epochs.values():
            epoch.close()

    def _set_epoch(self, number: int) -> None:
        for one in (self.loader.batch_sampler, self.loader.sampler, self.loader.dataset):
            if one is not None and hasattr(one, "set_epoch"):
                one.set_epoch(number)


class Share:
    """Iterable of one rank's share of a local DataLoader, in the place of a remote loader.

    Batch i of an epoch goes to rank i mod world size. `uneven` decides whether the last step is
    padded with the first batches, dropped or kept.
    """

    def __init__(self, local: Local, rank: int, world_size: int, uneven: str = "pad") -> None:
        self.local, self.rank, self.world_size, self.uneven = local, rank, world_size, uneven
        self.next_epoch, self.first_step = 0, 0
        self.current: Pass | None = None

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.local.loader, name)
        return Told(self, value) if hasattr(value, "set_epoch") else value

    def __len__(self) -> int:
        return self.steps(len(self.local.loader))

    def __iter__(self) -> "Pass":
        epoch, step = self.next_epoch, self.first_step
        self.next_epoch, self.first_step = epoch + 1, 0
        self.current = Pass(self, epoch, step)
        return self.current

    def steps(self, batches: int) -> int:
        """Return how many batches the rank receives in an epoch that has `batches` batches."""
        if self.uneven == "pad":
            return -(-batches // self.world_size)
        rest = batches % self.world_size
        return batches // self.world_size + (self.uneven == "keep" and self.rank < rest)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.next_epoch:
            self.next_epoch, self.first_step = epoch, 0

    def state_dict(self) -> dict[str, int]:
        if self.current is None or self.current.ended:
            return {"epoch": self.next_epoch, "step": self.first_step}
        return {"epoch": self.current.epoch, "step": self.current.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next_epoch, self.first_step = state["epoch"], state["step"]
        self.current = None


class Told:
    """Proxy of a sampler or dataset whose `set_epoch` sets the share's next epoch."""

    def __init__(self, share: Share, value: Any) -> None:
        self._share, self._value = share, value

    def set_epoch(self, epoch: int) -> None:
        self._share.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name)


class Pass(Iterator[Any]):
    """Iterator over one epoch of a share."""

    def __init__(self, share: Share, epoch: int, step: int) -> None:
        self.share, self.epoch, self.step, self.ended = share, epoch, step, False
        self._events: Epoch | None = None

    def __len__(self) -> int:
        return len(self.share)

    def __next__(self) -> Any:
        if self._events is None:
            self._events = self.share.local.epoch(self.epoch)
        position = self._position(self._events)
        if position is None:
            self.ended = True
            raise StopIteration
        self.step += 1
        event = self._events.seen[position]
        if isinstance(event, Exception):
            raise event
        return event

    def _position(self, events: Epoch) -> int | None:
        """Return the position of this step's batch in the epoch, or None after the last step.

        The position of a padding batch is that of the batch that it repeats.
        """
        share, first = self.share, self.step * self.share.world_size
        position, last = first + share.rank, first + share.world_size - 1
        if not self.ended and events.reaches(last if share.uneven == "drop" else position):
            return position
        count = len(events.seen)
        is_padded = share.uneven == "pad" and first < count and not self.ended
        return position % count if is_padded else None
