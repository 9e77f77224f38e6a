"""What a rank asks on one link, and what the answers mean."""

from collections import deque
from typing import NamedTuple

from taas_magic.data import encode
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
        free, frames = self.link.free_blocks(), []
        for kind, epoch, slot, body in questions:
            block = free.pop() if free else 0
            frames.append((Frame(kind, epoch, slot, body_bytes=len(body), block=block), body))
        self.link.send(frames)


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
