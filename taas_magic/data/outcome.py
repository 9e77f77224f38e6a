"""What asking a loader for something can come to."""

from typing import NamedTuple

from torch._utils import ExceptionWrapper


class Opened(NamedTuple):
    """What is known of an epoch before its first batch.

    Attributes:
        batches: How many there are; None where only the end will show.
        streams: How many streams the loader is cut into; None for a map-style loader.
        order: Hash of the order; 0 where there is none to compare.
        counted: Whether batches carry `hints["units"]`.
    """

    batches: int | None
    streams: int | None
    order: int
    counted: bool = False


class Ended(Exception):
    """There is no batch in this slot."""


class Failed(Exception):
    """The user's code raised; `wrapped` raises it again wherever it is sent."""

    def __init__(self, wrapped: ExceptionWrapper) -> None:
        super().__init__(wrapped.exc_msg)
        self.wrapped = wrapped


def units_of(batch: object) -> int:
    """What a batch counts in `--units`: its `hints["units"]`, or 1."""
    hints = getattr(batch, "hints", None)
    return int(hints.get("units", 1)) if isinstance(hints, dict) else 1


def is_counted(batch: object) -> bool:
    """Whether a batch says itself how many units it counts."""
    hints = getattr(batch, "hints", None)
    return isinstance(hints, dict) and "units" in hints
