"""What a rank asks on one link, and what the answers mean."""

import itertools
import operator
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from taas_magic.data import encode, wire
from taas_magic.data.link import Link
from taas_magic.data.shard import VOID
from taas_magic.data.supply import Reply
from taas_magic.data.wire import Frame, Kind
from taas_magic.errors import ProtocolError


class Question(NamedTuple):
    """What is asked of a lane."""

    kind: Kind
    epoch: int
    slot: int
    body: bytes = b""


_SHARED = operator.attrgetter("kind", "epoch", "body")


class Asked:
    """A link, and what was asked on it, in order.

    Attributes:
        link: The link.
        asked: Questions that are under way.
        unsent: Questions that are laid ready.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.asked: deque[Question] = deque()
        self.unsent: list[Question] = []

    def send(self) -> None:
        """Send what was laid ready, and with it which shared blocks are free again."""
        questions, self.unsent = self.unsent, []
        self.asked += questions
        frames = []
        if blocks := self.link.free_blocks():
            body = wire.pack_numbers(blocks)
            frames.append((Frame(Kind.FREE, body_bytes=len(body)), body))
        self.link.send([*frames, *_frames(questions)])


def _frames(questions: Iterable[Question]) -> Iterator[tuple[Frame, bytes]]:
    """Frames that ask this; questions for batches that follow each other share one."""
    for (kind, epoch, detail), group in itertools.groupby(questions, _SHARED):
        first, *others = [question.slot for question in group]
        if kind is Kind.GET or kind is Kind.PEEK:
            body = wire.pack_numbers(others)
            yield Frame(kind, epoch, first, body_bytes=len(body)), body
            continue
        for slot in (first, *others):
            yield Frame(kind, epoch, slot, body_bytes=len(detail)), detail


def reply_of(frame: Frame, body: memoryview) -> Reply:
    """The reply that a frame is to GET or PEEK."""
    if frame.kind is Kind.BATCH:
        return Reply(frame.units, encode.decode(body, frame.head_bytes), frame.body_bytes)
    if frame.kind is Kind.ERROR:
        return Reply(1, failure=encode.from_bytes(bytes(body)))
    if frame.kind is Kind.VOID:
        return Reply(VOID)
    if frame.kind is Kind.PEEKED:
        return Reply(frame.units)
    raise ProtocolError(f"a question for a batch was answered with {frame.kind.name}")
