"""Which lane a rank asks: where the lanes are, which of them answer, and when to try again.

A link that failed puts its lane aside for a moment that grows with every failure in a row; what it
was asked goes to another lane, which gives the same answer. Only when no lane has answered for a
while is the run lost, and it says so instead of waiting for ever.
"""

import ssl
import time
from collections.abc import Callable
from typing import NamedTuple

from taas_magic.data.entries import Directory, Found
from taas_magic.data.link import Link
from taas_magic.data.shard import home
from taas_magic.errors import ProtocolError, RunLost

_FIRST_LOOK_S = 0.001
_LONGEST_LOOK_S = 0.02
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class Timing(NamedTuple):
    """How long to wait for what, in seconds.

    Attributes:
        start_s: For the first fetcher to come up.
        silence_s: For a lane that says nothing, not even that it is alive.
        give_up_s: For any lane to answer after all had been lost.
    """

    start_s: float = 120.0
    silence_s: float = 5.0
    give_up_s: float = 4.0


class Route:
    """One rank's ways to the lanes of one loader; its links are used again by the next pass.

    Args:
        loader: Name of the loader.
        directory: Where the lanes are.
        key: The run's key.
        tls: Context for TCP.
        direct: Whether shared memory may be used on one host.
        timing: How long to wait for what.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        loader: str,
        directory: Directory,
        key: bytes,
        tls: ssl.SSLContext | None = None,
        direct: bool = True,
        timing: Timing = Timing(),  # noqa: B008
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loader, self._directory, self._key = loader, directory, key
        self._tls, self._direct, self.timing, self._clock = tls, direct, timing, clock
        self._found = Found(0, 1, {})
        self._idle: dict[int, list[Link]] = {}
        self._paused: dict[int, tuple[float, float]] = {}
        self._lost_at: float | None = None
        self._reasons: dict[int, str] = {}

    @property
    def lanes(self) -> int:
        """How many lanes there are; waits for the first fetcher."""
        self._await_lanes()
        return self._found.lanes

    def pick(self, slot: int, streams: int | None) -> int:
        """The lane to ask for a slot: its home, or, while that is aside, another one.

        Raises:
            RunLost: No lane has answered for `give_up_s`.
        """
        self._await_lanes()
        found = self._found
        wanted = home(slot, streams, found.lanes, found.stride)
        if not self._paused and wanted in found.addresses:
            return wanted
        up = self._up()
        if wanted in up or not up:
            return wanted
        return up[home(slot // found.lanes if streams is None else slot, streams, len(up))]

    def connect(self, number: int) -> Link:
        """A link to a lane, an idle one if there is one.

        Raises:
            OSError, ProtocolError: It does not answer; it is aside now.
        """
        if self._idle.get(number):
            return self._idle[number].pop()
        try:
            address = self._found.addresses[number]
        except KeyError:
            raise ConnectionError(f"lane {number} has not started yet") from None
        link = Link(address, self._key, self._tls, self._direct)
        self._lost_at = None
        return link

    def give_back(self, number: int, link: Link) -> None:
        """Keep a link on which nothing is under way."""
        self._idle.setdefault(number, []).append(link)

    def answered(self, number: int) -> None:
        """A lane has answered."""
        self._paused.pop(number, None)
        self._lost_at = None

    def failed(self, number: int, why: str) -> None:
        """Put a lane aside."""
        for link in self._idle.pop(number, ()):
            link.close()
        _, pause_s = self._paused.get(number, (0.0, _FIRST_PAUSE_S / 2))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._paused[number] = self._clock() + pause_s, pause_s
        self._reasons[number] = why
        self._found = self._directory(self._loader)
        if not self._up():
            self._wait_for_any()

    def close(self) -> None:
        """Close the idle links."""
        for link in (link for links in self._idle.values() for link in links):
            link.close()
        self._idle.clear()

    def _up(self) -> list[int]:
        now = self._clock()
        return [
            number
            for number in sorted(self._found.addresses)
            if self._paused.get(number, (0.0, 0.0))[0] <= now
        ]

    def _await_lanes(self) -> None:
        if self._found.addresses:
            return
        deadline, pause_s = self._clock() + self.timing.start_s, _FIRST_LOOK_S
        while not self._found.addresses:
            self._found = self._directory(self._loader)
            if self._found.addresses:
                return
            if self._found.failed:
                raise RunLost(f"no fetcher of loader {self._loader!r}: {self._found.failed}")
            if self._clock() > deadline:
                raise RunLost(
                    f"no fetcher of loader {self._loader!r} has started within "
                    f"{self.timing.start_s:g} s; the run's log says why"
                )
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, _LONGEST_LOOK_S)

    def _wait_for_any(self) -> None:
        """Every lane is aside: wait for the first to be tried again, but not for ever."""
        now = self._clock()
        self._lost_at = self._lost_at or now
        if now - self._lost_at > self.timing.give_up_s:
            reasons = "; ".join(sorted(set(self._reasons.values()))[:4])
            raise RunLost(
                f"no fetcher of loader {self._loader!r} answers any more: {reasons}. "
                "See the fetchers' log in the run folder"
            )
        first = min((until for until, _ in self._paused.values()), default=now)
        time.sleep(max(0.0, min(first - now, 0.25)))


def refused(error: Exception) -> str:
    """What an unusable link says of its lane."""
    kind = "broke the protocol" if isinstance(error, ProtocolError) else "is gone"
    return f"{kind} ({error})"
