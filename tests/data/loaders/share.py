"""What one rank is to see of a loader, from a local DataLoader, by the rules of docs/data.md."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from taas_magic.data.sharding import seed_of

SEED = 7
MOST_ERRORS = 8
"""After so many in one epoch a loader with workers is not asked for more."""


class Epoch:
    """What a local DataLoader gives in one epoch, taken as far as asked, under its own seed.

    Attributes:
        seen: Batches, and exceptions in the place of those that cannot be had.
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
        """Take batches up to a position; say whether there are so many."""
        while len(self.seen) <= position and not self._is_over:
            with self._own_random():
                self._take()
        return len(self.seen) > position

    def close(self) -> None:
        """Let go of the iterator, whose frames exceptions would keep, and so of its workers."""
        self._is_over, self._batches = True, iter(())

    def _take_all(self) -> None:
        """Take what the workers send, so that they end, and what a generator draws."""
        while self.reaches(len(self.seen)) and self._errors() < MOST_ERRORS:
            continue
        self.close()

    def _errors(self) -> int:
        return sum(isinstance(event, Exception) for event in self.seen)

    def _take(self) -> None:
        try:
            self.seen.append(next(self._batches))
        except (StopIteration, UnboundLocalError):
            # The latter is what torch's worker says of its next batch after worker_init_fn failed.
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
    """Whether the next epoch depends on how much was taken of this one."""
    return loader.generator is not None or getattr(loader.sampler, "generator", None) is not None


class Local:
    """A local DataLoader's epochs, each begun under `torch.manual_seed(seed_of(seed, epoch))`."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self._epochs: dict[int, Epoch] = {}

    def epoch(self, number: int) -> Epoch:
        """Return an epoch; begin it when it is asked for first."""
        if number not in self._epochs:
            self._set_epoch(number)
            self._epochs[number] = Epoch(self.loader, seed_of(SEED, number))
        return self._epochs[number]

    def close(self) -> None:
        """End the workers of all epochs."""
        for epoch in self._epochs.values():
            epoch.close()

    def _set_epoch(self, number: int) -> None:
        for one in (self.loader.batch_sampler, self.loader.sampler, self.loader.dataset):
            if one is not None and hasattr(one, "set_epoch"):
                one.set_epoch(number)


class Share:
    """One rank's share of a local DataLoader.

    Batch i of an epoch is for rank i mod world size, and the last step is padded with the first
    batches, dropped, or kept.
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
        """How many batches the rank gets of so many."""
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
    """A sampler or dataset whose `set_epoch` says which epoch the loader gives."""

    def __init__(self, share: Share, value: Any) -> None:
        self._share, self._value = share, value

    def set_epoch(self, epoch: int) -> None:
        self._share.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name)


class Pass(Iterator[Any]):
    """One iterator of a share."""

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
        """Position of the batch of this step; None at the end."""
        share, first = self.share, self.step * self.share.world_size
        position, last = first + share.rank, first + share.world_size - 1
        if not self.ended and events.reaches(last if share.uneven == "drop" else position):
            return position
        count = len(events.seen)
        is_padded = share.uneven == "pad" and first < count and not self.ended
        return position % count if is_padded else None
