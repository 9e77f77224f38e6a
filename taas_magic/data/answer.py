"""What a lane sends for a question."""

from collections.abc import MutableSequence

from taas_magic.data import encode
from taas_magic.data.wire import Kind


class Answer:
    """What is sent for a question: a header's fields and a body (see `wire.Frame`)."""

    __slots__ = ("_sum", "body", "kind", "order", "size", "units")

    def __init__(
        self, kind: Kind, body: encode.Encoded | bytes = b"", units: int = 1, order: int = 0
    ) -> None:
        self.kind, self.body, self.units, self.order = kind, body, units, order
        self.size = body.body_bytes if isinstance(body, encode.Encoded) else len(body)
        self._sum: int | None = None

    def checksum(self) -> int:
        """The body's checksum, taken once."""
        if self._sum is None:
            assert isinstance(self.body, encode.Encoded)
            self._sum = self.body.checksum()
        return self._sum


class Sent:
    """What a lane has sent, counted by its connections."""

    def __init__(self, stats: MutableSequence[float], batches_at: int, bytes_at: int) -> None:
        self._stats, self._batches_at, self._bytes_at = stats, batches_at, bytes_at

    def add(self, size: int) -> None:
        """One batch of `size` bytes more."""
        self._stats[self._batches_at] += 1
        self._stats[self._bytes_at] += size
