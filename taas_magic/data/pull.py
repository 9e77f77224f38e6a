"""A rank pulls batches from lanes: it asks ahead, takes answers in order, and asks again elsewhere.

Every question is pure, so whatever happens to a lane or a link — killed, stopped, cut in the middle
of a batch, corrupted — the remedy is one: close the link and ask another lane. An answer that comes
late comes to a closed link, so nothing is handed out twice.
"""

import json
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from taas_magic.data import encode
from taas_magic.data.blocks import Blocks
from taas_magic.data.link import TICK_S, Link, Silent
from taas_magic.data.outcome import Opened
from taas_magic.data.route import Route, refused
from taas_magic.data.shard import VOID, Ask
from taas_magic.data.supply import Patience, Reply
from taas_magic.data.wire import Frame, Kind
from taas_magic.errors import ProtocolError, RunLost

_TRIES = 10
_ORDER_LOST = (
    "epoch {epoch}: the loader's sampler gives another order each time it is asked, and the "
    "fetcher that had drawn this epoch's is gone. A sampler that draws from the generator of "
    "torch, numpy or random survives that"
)
Answered = tuple[Frame, memoryview]


class Question(NamedTuple):
    """What is asked of a lane."""

    kind: Kind
    epoch: int
    slot: int
    body: bytes = b""


class _Open:
    """A link, what was asked on it, in order, and which of its shared blocks are free again."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.asked: deque[Question] = deque()
        self.unsent: list[Question] = []
        self._free: list[int] = []

    def send(self) -> None:
        """Send what was laid ready."""
        asks, self.unsent = self.unsent, []
        self.asked += asks
        self._free += self.link.freed()
        frames = []
        for kind, epoch, slot, body in asks:
            block = self._free.pop() if self._free else 0
            frames.append((Frame(kind, epoch, slot, body_bytes=len(body), block=block), body))
        self.link.send(frames)


class Pull:
    """Asks the lanes of one loader, for one pass over it.

    Args:
        route: The ways to the lanes.
        blocks: Where batches are received.
        timeout_s: How long to wait for a batch; 0: as long as a lane says that it is alive.
    """

    def __init__(self, route: Route, blocks: Blocks, timeout_s: float = 0.0) -> None:
        self._route, self.blocks, self._timeout_s = route, blocks, timeout_s
        self._open: dict[int, _Open] = {}
        self._where: dict[Question, int] = {}
        self._here: dict[Question, Answered] = {}
        self._tries: dict[Question, int] = {}
        self._streams: int | None = None
        self._orders: dict[int, int] = {}
        self._instead: dict[Question, Question] = {}
        self.retried = 0

    @property
    def lanes(self) -> int:
        """How many lanes share the work."""
        return self._route.lanes

    def open(self, epoch: int) -> Opened:
        """Say how long an epoch is; the first lane that answers says it for all.

        Raises:
            RunLost: No fetcher answers.
            Exception: What the loader's sampler raised.
        """
        ask = Question(Kind.OPEN, epoch, 0)
        self._send_later(ask)
        self._flush()
        frame, body = self._until(ask)
        if frame.kind is Kind.ERROR:
            encode.from_bytes(bytes(body)).reraise()
        opened = Opened(*json.loads(bytes(body)))
        self._streams, self._orders[epoch] = opened.streams, opened.order
        return opened

    def ask(self, epoch: int, asks: Sequence[Ask]) -> None:
        """Send questions ahead."""
        for ask in asks:
            self._send_later(_question(epoch, ask))
        self._flush()

    def reply(self, epoch: int, ask: Ask) -> Reply:
        """Return the answer to a question.

        Raises:
            RunLost: No fetcher answers.
            RuntimeError: It took longer than the loader's `timeout`.
        """
        question = _question(epoch, ask)
        if question not in self._where and question not in self._here:
            self._send_later(question)
            self._flush()
        return _reply_of(*self._until(question))

    def sample(self, index: Any) -> Any:
        """Return `dataset[index]` from a fetcher's dataset."""
        ask = Question(Kind.SAMPLE, 0, 0, encode.as_bytes(index))
        self._send_later(ask)
        self._flush()
        frame, body = self._until(ask)
        value = encode.from_bytes(bytes(body))
        return value.reraise() if frame.kind is Kind.ERROR else value

    def close(self) -> None:
        """End the pass: links with answers under way are closed, the others kept."""
        for number, open_ in self._open.items():
            if open_.asked or open_.unsent:
                open_.link.close()
            else:
                self._route.give_back(number, open_.link)
        self._open.clear()
        self._where.clear()
        self._here.clear()

    def _send_later(self, ask: Question) -> None:
        """Lay a question ready for the lane that has to answer it."""
        while True:
            of_order = ask.kind in (Kind.OPEN, Kind.ORDER)
            number = self._route.pick(0 if of_order else ask.slot, self._streams)
            try:
                if number not in self._open:
                    self._open[number] = _Open(self._route.connect(number))
            except (OSError, ProtocolError) as error:
                self._route.failed(number, refused(error))
                continue
            self._open[number].unsent.append(ask)
            self._where[ask] = number
            if ask in self._instead:
                self._where[self._instead[ask]] = number
            return

    def _flush(self) -> None:
        for number, open_ in list(self._open.items()):
            try:
                if open_.unsent:
                    open_.send()
            except OSError as error:
                self._lost(number, error)

    def _until(self, ask: Question) -> Answered:
        """Receive until the answer to `ask` is here."""
        silent_s = 0.0
        patience = Patience(self._timeout_s) if self._timeout_s else None
        while ask not in self._here:
            if patience is not None:
                patience.check()
            number = self._where[ask]
            try:
                self._receive(number)
                silent_s = 0.0
                continue
            except Silent as silence:
                silent_s += TICK_S
                if silent_s < self._route.timing.silence_s:
                    continue
                self._lost(number, silence)
            except (OSError, ProtocolError) as error:
                self._lost(number, error)
            silent_s = 0.0
        return self._here.pop(ask)

    def _receive(self, number: int) -> None:
        open_ = self._open[number]
        frame, body = open_.link.receive(self.blocks)
        self._route.answered(number)
        if frame.kind is Kind.ALIVE:
            return
        ask = open_.asked.popleft()
        if (frame.epoch, frame.batch) != (ask.epoch, ask.slot):
            raise ProtocolError(
                f"{open_.link.address} was asked for batch {ask.slot} of epoch {ask.epoch} and "
                f"answered with batch {frame.batch} of epoch {frame.epoch}"
            )
        del self._where[ask]
        self._tries.pop(ask, None)
        first = self._instead.pop(ask, None)
        if first is None and self._is_other_order(ask, frame):
            self._ask_instead(Question(Kind.ORDER, ask.epoch, ask.slot), ask)
        elif first is not None and ask.kind is Kind.ORDER and frame.kind is Kind.VALUE:
            if self._is_other_order(ask, frame):
                raise RunLost(_ORDER_LOST.format(epoch=ask.epoch))
            self._ask_instead(first._replace(body=bytes(body)), first)
        else:
            self._here[first or ask] = frame, body

    def _is_other_order(self, ask: Question, frame: Frame) -> bool:
        """Whether the lane's order of the epoch is not the one that all ranks follow."""
        return frame.order not in (0, self._orders.get(ask.epoch, frame.order))

    def _ask_instead(self, question: Question, ask: Question) -> None:
        """Let the lane that opened the epoch say the batch's indices, and ask by those.

        A sampler that draws from something else than the seeded generators gives every lane another
        order; then the one of that lane, enumerated once, holds for all ranks.
        """
        self._instead[question] = ask
        self._send_later(question)
        self._flush()

    def _lost(self, number: int, error: Exception) -> None:
        """A link is of no use any more: ask everything that it still owes elsewhere."""
        open_ = self._open.pop(number)
        open_.link.close()
        owed = [*open_.asked, *open_.unsent]
        if open_.asked:
            self._count_try(open_.asked[0], error)
        self._route.failed(number, f"{open_.link.address} {refused(error)}")
        self.retried += len(owed)
        for ask in owed:
            self._send_later(ask)
        self._flush()

    def _count_try(self, ask: Question, error: Exception) -> None:
        self._tries[ask] = self._tries.get(ask, 0) + 1
        if self._tries[ask] >= _TRIES:
            raise RunLost(
                f"batch {ask.slot} of epoch {ask.epoch} was asked for {_TRIES} times, and every "
                f"time the lane that prepared it was lost, at last with: {error}. Its data may "
                "crash the process that reads it, or need more memory than the fetcher's host has"
            )


def _question(epoch: int, ask: Ask) -> Question:
    return Question(Kind.GET if ask.mine else Kind.PEEK, epoch, ask.slot)


def _reply_of(frame: Frame, body: memoryview) -> Reply:
    if frame.kind is Kind.ERROR:
        return Reply(1, failure=encode.from_bytes(bytes(body)))
    if frame.kind is Kind.VOID:
        return Reply(VOID)
    if frame.kind is Kind.PEEKED:
        return Reply(frame.units)
    if frame.kind is not Kind.BATCH:
        raise ProtocolError(f"a question for a batch was answered with {frame.kind.name}")
    return Reply(frame.units, encode.decode(body, frame.head_bytes), frame.body_bytes)
