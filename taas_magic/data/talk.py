"""What a rank and a lane may say to each other, and when; no sockets and no torch.

The protocol is a transition table, and a frame that the table does not list is a `ProtocolError`
(the idea is h11's).

    lane                               rank
    CHALLENGE nonce            ─────►
                               ◄─────  PROOF nonce + MAC        (the run's key; HMAC-SHA256)
    WELCOME MAC + about        ─────►                           (now both know: same run)
                               ◄─────  OPEN epoch               how long is it, in which order
    OPENED                     ─────►
                               ◄─────  GET epoch, batches       a pure question, may be repeated
    ALIVE … BATCH | VOID | ERROR ───►
                               ◄─────  PEEK epoch, batches      what do they count, are they there
    PEEKED | VOID | ERROR      ─────►
                               ◄─────  FREE blocks              of shared memory, not read any more
"""

import enum
import hashlib
import hmac
from collections.abc import Iterable

from taas_magic.data.wire import HEADER_BYTES, Frame, Kind, unpack
from taas_magic.errors import ProtocolError


class State(enum.Enum):
    """Where one side of a connection stands."""

    GREETING = "greeting"
    PROVING = "proving"
    READY = "ready"


class Role(enum.Enum):
    """Who listens."""

    LANE = "lane"
    RANK = "rank"


_ASKED = (
    *(Kind.OPEN, Kind.GET, Kind.PEEK, Kind.SAMPLE),
    *(Kind.ORDER, Kind.STATE, Kind.GIVEN, Kind.FREE),
)
_ANSWERED = (
    *(Kind.OPENED, Kind.BATCH, Kind.PEEKED, Kind.VOID),
    *(Kind.ERROR, Kind.ALIVE, Kind.VALUE),
)
_MAY_HEAR: dict[Role, dict[State, dict[Kind, State]]] = {
    Role.LANE: {
        State.PROVING: {Kind.PROOF: State.READY},
        State.READY: dict.fromkeys(_ASKED, State.READY),
    },
    Role.RANK: {
        State.GREETING: {Kind.CHALLENGE: State.PROVING},
        State.PROVING: {Kind.WELCOME: State.READY, Kind.REFUSED: State.GREETING},
        State.READY: dict.fromkeys(_ANSWERED, State.READY),
    },
}


class Talk:
    """One side's view of a connection: raises when it hears what may not be said now."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._go_to(State.PROVING if role is Role.LANE else State.GREETING)

    def hear(self, kind: Kind) -> None:
        """Take note of a frame that came in.

        Raises:
            ProtocolError: The table does not allow it in this state.
        """
        state = self._may_hear.get(kind)
        if state is None:
            raise ProtocolError(
                f"a {self._role.value} that is {self.state.value} may not hear {kind.name}"
            )
        if state is not self.state:
            self._go_to(state)

    def _go_to(self, state: State) -> None:
        # Every frame comes by here, so what may be heard now is at hand.
        self.state, self._may_hear = state, _MAY_HEAR[self._role][state]


class Assembler:
    """Turns a stream of bytes, cut anywhere, into whole frames (what a lane hears: small ones)."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._bytes = bytearray()
        self._frame: Frame | None = None

    def feed(self, data: bytes) -> Iterable[tuple[Frame, bytes]]:
        """Yield every frame that `data` completes, with its body.

        Raises:
            ProtocolError: Something that may not be said; the connection is of no use any more.
        """
        self._bytes += data
        while True:
            if self._frame is None:
                if len(self._bytes) < HEADER_BYTES:
                    return
                self._frame = unpack(self._bytes[:HEADER_BYTES])
                self._talk.hear(self._frame.kind)
                del self._bytes[:HEADER_BYTES]
            if len(self._bytes) < self._frame.body_bytes:
                return
            frame, self._frame = self._frame, None
            body = bytes(self._bytes[: frame.body_bytes])
            del self._bytes[: frame.body_bytes]
            yield frame, body


def prove(key: bytes, role: Role, nonce: bytes) -> bytes:
    """Return the MAC by which `role` shows that it knows the run's key, for the peer's nonce."""
    return hmac.new(key, role.value.encode() + b"\0" + nonce, hashlib.sha256).digest()


def proven(key: bytes, role: Role, nonce: bytes, mac: bytes) -> bool:
    """Whether `mac` is what `role` would have answered (compared in constant time)."""
    return hmac.compare_digest(prove(key, role, nonce), mac)
