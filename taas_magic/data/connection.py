"""A lane's side of one connection: hear questions, answer them in order.

Each connection has a thread of its own, which serves it while the thread that runs the dataset is
busy there. As long as that one comes by often, with small batches, it serves the connections
itself between two batches: threads that pass the interpreter lock to and fro cost a small batch
more than all the rest.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from taas_magic.data import sockets, wire
from taas_magic.data.answer import Answer
from taas_magic.data.outbox import Outbox
from taas_magic.data.shard import VOID
from taas_magic.data.shelf import Shelf
from taas_magic.data.sockets import TICK_S, Socket
from taas_magic.data.stock import Key
from taas_magic.data.talk import Assembler, Talk
from taas_magic.data.wire import Frame, Kind
from taas_magic.errors import ProtocolError

_HEAR_BYTES = 64 << 10
_ASIDE_S = 0.008


class Connection:
    """One rank's connection.

    Args:
        sock: The socket, after the handshake.
        talk: What was said so far.
        shelf: Where the answers come from.
        outbox: Where they go.
        is_visited: Whether the thread that prepares comes by often (`visit`).
    """

    def __init__(
        self,
        sock: Socket,
        talk: Talk,
        shelf: Shelf,
        outbox: Outbox,
        is_visited: Callable[[], bool],
    ) -> None:
        self._socket, self._shelf, self.outbox, self._is_visited = sock, shelf, outbox, is_visited
        self._assembler = Assembler(talk)
        self._asked: deque[tuple[Kind, Key]] = deque()
        self._serving = threading.Lock()
        self._failure: OSError | ProtocolError | None = None
        self._answered, self._is_open = time.monotonic(), True
        self._is_waiting = False

    def run(self) -> None:
        """Hear and answer until the peer closes; the connection's own thread.

        Raises:
            OSError, ProtocolError: The connection is of no use any more.
        """
        try:
            while self._go_on():
                pass
        finally:
            with self._serving:
                # Whoever visits from here on finds nothing to do.
                self._is_open = False
                self._asked.clear()
                self._shelf.gone(self)
                self.outbox.close()

    def visit(self) -> bool | None:
        """Answer what is ready, without waiting for anything; the thread that prepares.

        Returns:
            Whether anything has gone; None while the connection's own thread is at it.
        """
        if not self._serving.acquire(blocking=False):
            return None
        try:
            may_visit = self._is_open and self._failure is None and self.outbox.is_light
            return may_visit and self._serve_what_is_ready()
        except (OSError, ProtocolError) as error:
            # The connection's own thread is the one that ends with it.
            self._failure = error
            return False
        finally:
            self._serving.release()

    @property
    def relies_on_visits(self) -> bool:
        """Whether there is more to do, and the connection's own thread does not know it."""
        return self._is_waiting and bool(self._asked or self.outbox)

    def _serve_what_is_ready(self) -> bool:
        self._hear(0.0)
        has_gone = self.outbox.send_some()
        while self._gather(0.0):
            has_gone |= self.outbox.send_some()
        if not self.outbox:
            self._shelf.sent(self)
        return has_gone

    def _go_on(self) -> bool:
        """Serve once, or leave it to the thread that prepares; returns whether there is more."""
        if self._failure is not None:
            raise self._failure
        if not self._asked and not self.outbox:
            self._is_waiting = True
            sockets.await_data(self._socket)
            self._is_waiting = False
        if self._may_stand_aside():
            time.sleep(_ASIDE_S)
            return self._is_open
        with self._serving:
            self.outbox.send()
            self._hear(0.0 if self._asked else TICK_S)
            self._gather(TICK_S)
            self.outbox.send()
            self._shelf.sent(self)
        return self._is_open

    def _may_stand_aside(self) -> bool:
        # A rank that has heard nothing for a while is told that the lane is alive: not by visits.
        is_silent = bool(self._asked) and time.monotonic() - self._answered > TICK_S
        return self.outbox.is_light and self._is_visited() and not is_silent

    def _hear(self, patience_s: float) -> None:
        """Read what has come."""
        try:
            data = sockets.receive(self._socket, _HEAR_BYTES, patience_s)
        except (BlockingIOError, TimeoutError):
            return
        self._is_open = bool(data)
        if not self._asked:
            self._answered = time.monotonic()
        for frame, body in self._assembler.feed(data):
            if frame.kind is Kind.FREE:
                self.outbox.free(wire.numbers(body))
                continue
            keys = _keys_of(frame, body)
            self._asked.extend([(frame.kind, key) for key in keys])
            self._shelf.want(self, keys, only_count=frame.kind is Kind.PEEK)

    def _gather(self, patience_s: float) -> bool:
        """Lay the first answer ready, and with it all that follow and are there.

        Returns:
            Whether there is anything more to send than before.
        """
        outbox = self.outbox
        before = len(self._asked)
        while self._asked and outbox.has_room:
            kind, key = self._asked[0]
            answer = self._look_up(kind, key, patience_s)
            if answer is None:
                break
            self._asked.popleft()
            patience_s = 0.0
            outbox.add(key, answer)
        if self._asked and patience_s:
            outbox.add_sign_of_life()
        has_more = len(self._asked) < before
        if has_more:
            self._answered = time.monotonic()
        return has_more

    def _look_up(self, kind: Kind, key: Key, patience_s: float) -> Answer | None:
        if kind is not Kind.PEEK:
            item = self._shelf.take(self, key, patience_s)
            assert item is None or isinstance(item, Answer)
            return item
        units = self._shelf.count(self, key, patience_s)
        if units is None:
            return None
        return Answer(Kind.PEEKED, units=units) if units != VOID else Answer(Kind.VOID, units=0)


def _keys_of(frame: Frame, body: bytes) -> list[Key]:
    kind, epoch, slot = frame.kind, frame.epoch, frame.batch
    if kind is Kind.GET or kind is Kind.PEEK:
        return [Key(Kind.GET, epoch, one) for one in (slot, *wire.numbers(body))]
    return [Key(Kind.GET if kind is Kind.GIVEN else kind, epoch, slot, body)]
