"""Where a rank's batches come from: the questions it asks, and the answers.

A `Supply` answers questions about one loader, and, once it is opened, about one epoch. There are
two: `Pull`, which asks the lanes of fetchers, and `LocalSupply` here, which prepares in the rank
itself. The stream of batches is the same, because both answer from a `Source` and a `Course`
decides what to ask.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from taas_magic.data import randomness
from taas_magic.data.outcome import Ended, Failed, Opened, is_counted, units_of
from taas_magic.data.shard import VOID, Ask
from taas_magic.data.source import Source


class Reply(NamedTuple):
    """What a rank gets for an `Ask`.

    Attributes:
        units: What the batch counts; VOID: there is none.
        batch: The batch; None where only the count was asked for.
        size: Its bytes on the wire, 0 if it was on none.
        failure: What the user's code raised instead; `reraise()` raises it here.
    """

    units: int
    batch: Any = None
    size: int = 0
    failure: Any = None


class Supply(Protocol):
    """Answers a rank's questions about one loader."""

    @property
    def lanes(self) -> int:
        """How many processes share the work."""

    def open(self, epoch: int) -> Opened:
        """Begin an epoch, and say how long it is; blocks until that is known."""

    def ask(self, asks: Sequence[Ask]) -> None:
        """Send questions ahead; does not wait for answers."""

    def reply(self, ask: Ask) -> Reply:
        """Return the answer to a question that was asked; blocks until it is there."""

    def state(self, slot: int) -> tuple[int, Any] | None:
        """Where the dataset of a slot's stream stood, and after how many items."""

    def restore(self, slot: int, state: Any) -> None:
        """Have the stream of a slot begin there, in a dataset that has loaded this state."""

    def close(self) -> None:
        """The pass is over; questions without an answer are forgotten."""


class LocalSupply:
    """Prepares batches in the rank, when they are wanted."""

    lanes = 1

    def __init__(self, source: Source, bounded: bool) -> None:
        self._source, self._bounded, self._epoch = source, bounded, 0

    def open(self, epoch: int) -> Opened:
        """Begin an epoch, and say how long it is."""
        self._epoch = epoch
        self._source.forget_before(epoch - 1)
        with randomness.kept(), reraised():
            opened = self._source.open(epoch)
            if self._bounded:
                opened = opened._replace(counted=self._is_counted(epoch))
            return opened

    def ask(self, asks: Sequence[Ask]) -> None:
        """Nothing is prepared ahead here."""

    def reply(self, ask: Ask) -> Reply:
        """Prepare a batch."""
        with randomness.kept():
            reply = self._prepare(ask.slot)
        return reply if ask.mine else reply._replace(batch=None)

    def state(self, slot: int) -> tuple[int, Any] | None:
        """Where the dataset of a slot's stream stood, and after how many items."""
        return self._source.state(self._epoch, slot)

    def restore(self, slot: int, state: Any) -> None:
        """Have the stream of a slot begin there, in a dataset that has loaded this state."""
        self._source.restore(self._epoch, slot, state)

    def close(self) -> None:
        """Nothing is under way."""

    def _prepare(self, slot: int) -> Reply:
        try:
            batch = self._source.prepare(self._epoch, slot)
        except Ended:
            return Reply(VOID)
        except Failed as failure:
            return Reply(1, failure=failure.wrapped)
        return Reply(units_of(batch), batch)

    def _is_counted(self, epoch: int) -> bool:
        try:
            return is_counted(self._source.prepare(epoch, 0))
        except (Ended, Failed):
            return False


@contextmanager
def reraised() -> Iterator[None]:
    """Raise what the user's code raised as what it was."""
    try:
        yield
    except Failed as failure:
        failure.wrapped.reraise()  # type: ignore[no-untyped-call]


class Patience:
    """`DataLoader(timeout=…)`: how long a rank waits for a batch."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._since = timeout_s, time.monotonic()

    def check(self) -> None:
        """Raise RuntimeError, as a local DataLoader does, once the time is over."""
        if time.monotonic() - self._since > self._timeout_s:
            raise RuntimeError(f"DataLoader timed out after {self._timeout_s:g} seconds")
