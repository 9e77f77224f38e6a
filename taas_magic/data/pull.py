"""A rank pulls batches from lanes: it asks ahead, takes answers in order, and asks again elsewhere.

Every question is pure, so whatever happens to a lane or a link — killed, stopped, cut in the middle
of a batch, corrupted — the remedy is one: close the link and ask another lane. An answer that comes
late comes to a closed link, so nothing is handed out twice.
"""

import json
from collections.abc import Sequence
from typing import Any

from taas_magic.data import encode, wire
from taas_magic.data.asked import Asked, Question, reply_of
from taas_magic.data.blocks import Blocks
from taas_magic.data.inbox import Silent
from taas_magic.data.orders import Orders
from taas_magic.data.outcome import Opened
from taas_magic.data.route import Route, refused
from taas_magic.data.shard import Ask
from taas_magic.data.sockets import TICK_S
from taas_magic.data.supply import Patience, Reply
from taas_magic.data.wire import Frame, Kind
from taas_magic.errors import ProtocolError, RunLost

_TRIES = 10
Answered = tuple[Frame, memoryview]


class Pull:
    """Asks the lanes of one loader, for one pass over it.

    Args:
        route: The ways to the lanes.
        blocks: Where batches are received.
        timeout_s: How long to wait for a batch; 0: as long as a lane says that it is alive.
    """

    def __init__(self, route: Route, blocks: Blocks, timeout_s: float = 0.0) -> None:
        self._route, self.blocks, self._timeout_s = route, blocks, timeout_s
        self._open: dict[int, Asked] = {}
        self._where: dict[Question, int] = {}
        self._here: dict[Question, Answered] = {}
        self._replies: dict[tuple[int, bool], Reply] = {}
        self._tries: dict[Question, int] = {}
        self._epoch = 0
        self._streams: int | None = None
        self._orders = Orders()
        self.retried = 0

    @property
    def lanes(self) -> int:
        """How many lanes share the work."""
        return self._route.lanes

    @property
    def held_bytes(self) -> int:
        """Memory that batches lie in, in use or kept for the next ones."""
        links = list(self._open.values())
        return self.blocks.held_bytes + sum(open_.link.shared_bytes for open_ in links)

    def open(self, epoch: int) -> Opened:
        """Begin an epoch, and say how long it is; the first lane that answers says it for all.

        Raises:
            RunLost: No fetcher answers.
            Exception: What the loader's sampler raised.
        """
        ask = Question(Kind.OPEN, epoch, 0)
        self._send_later(ask)
        self._flush()
        self._until(ask)
        frame, body = self._here.pop(ask)
        if frame.kind is Kind.ERROR:
            encode.from_bytes(bytes(body)).reraise()
        opened = Opened(*json.loads(bytes(body)))
        self._epoch, self._streams, self._orders.holds = epoch, opened.streams, opened.order
        return opened

    def ask(self, asks: Sequence[Ask]) -> None:
        """Send questions ahead."""
        for ask in asks:
            self._send_later(self._question(ask))
        self._flush()

    def reply(self, ask: Ask) -> Reply:
        """Return the answer to a question.

        Raises:
            RunLost: No fetcher answers.
            RuntimeError: It took longer than the loader's `timeout`.
        """
        reply = self._replies.pop(ask, None)
        if reply is not None:
            return reply
        question = self._question(ask)
        if question not in self._where:
            self._send_later(question)
            self._flush()
        self._until(question)
        return self._replies.pop(ask)

    def sample(self, index: Any) -> Any:
        """Return `dataset[index]` from a fetcher's dataset."""
        return self._value(Question(Kind.SAMPLE, 0, 0, encode.as_bytes(index)))

    def state(self, slot: int) -> tuple[int, Any] | None:
        """Where the dataset of a slot's stream stood, and after how many items."""
        found: tuple[int, Any] | None = self._value(Question(Kind.STATE, self._epoch, slot))
        return found

    def restore(self, slot: int, state: Any) -> None:
        """Have the stream of a slot begin there, in a dataset that has loaded this state."""
        self._value(Question(Kind.STATE, self._epoch, slot, encode.as_bytes(state)))

    def close(self) -> None:
        """End the pass: links with answers under way are closed, the others kept."""
        for number, open_ in self._open.items():
            if open_.asked or open_.unsent:
                open_.link.close()
            else:
                self._route.give_back(number, open_.link)
        self._open.clear()
        for book in (self._where, self._here, self._replies):
            book.clear()

    def _question(self, ask: Ask) -> Question:
        return Question(Kind.GET if ask.mine else Kind.PEEK, self._epoch, ask.slot)

    def _value(self, ask: Question) -> Any:
        self._send_later(ask)
        self._flush()
        self._until(ask)
        frame, body = self._here.pop(ask)
        value = encode.from_bytes(bytes(body))
        return value.reraise() if frame.kind is Kind.ERROR else value

    def _send_later(self, ask: Question) -> None:
        """Lay a question ready for the lane that has to answer it."""
        while True:
            of_order = ask.kind in (Kind.OPEN, Kind.ORDER)
            number = self._route.pick(0 if of_order else ask.slot, self._streams)
            try:
                if number not in self._open:
                    self._open[number] = Asked(self._route.connect(number))
            except (OSError, ProtocolError) as error:
                self._route.failed(number, refused(error))
                continue
            self._open[number].unsent.append(ask)
            self._where[ask] = number
            self._where[self._orders.first(ask)] = number
            return

    def _flush(self) -> None:
        for number, open_ in list(self._open.items()):
            try:
                if open_.unsent:
                    open_.send()
            except OSError as error:
                self._lost(number, error)

    def _until(self, ask: Question) -> None:
        """Receive until `ask` is answered."""
        silent_s = 0.0
        patience = Patience(self._timeout_s) if self._timeout_s else None
        while ask in self._where:
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

    def _receive(self, number: int) -> None:
        """Take the next frame of a lane, and all that have come with it."""
        open_ = self._open[number]
        whole: Answered | None = open_.link.receive(self.blocks)
        self._route.answered(number)
        while whole is not None and self._open.get(number) is open_:
            if whole[0].kind is not Kind.ALIVE:
                self._take(open_, *whole)
            whole = open_.link.here()

    def _take(self, open_: Asked, frame: Frame, body: memoryview) -> None:
        """Take the answer to the oldest question on a link, or to as many as it holds batches."""
        ask = open_.asked[0]
        if frame.batch != ask.slot or frame.epoch != ask.epoch or frame.batches > len(open_.asked):
            raise ProtocolError(
                f"{open_.link.address} was asked for batch {ask.slot} of epoch {ask.epoch} and "
                f"answered with {frame.batches} from batch {frame.batch} of epoch {frame.epoch} on"
            )
        # All of them before the first is dealt with: that may lose this link, and ask what is left.
        asks = [open_.asked.popleft() for _ in range(frame.batches)]
        for ask, part in zip(asks, wire.parts(frame, body), strict=True):
            self._answered(ask, frame, part)

    def _answered(self, ask: Question, frame: Frame, body: memoryview) -> None:
        del self._where[ask]
        if self._tries:
            self._tries.pop(ask, None)
        first = self._orders.first(ask)
        instead = self._orders.next(ask, frame, body)
        if instead is not None:
            self._send_later(instead)
            self._flush()
            return
        self._where.pop(first, None)
        if first.kind is Kind.GET or first.kind is Kind.PEEK:
            self._replies[first.slot, first.kind is Kind.GET] = reply_of(frame, body)
        else:
            self._here[first] = frame, body

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
