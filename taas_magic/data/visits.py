"""When the thread that prepares serves a lane's connections itself: often, as long as it can.

That is between two small batches, and for a moment after the last. Large ones, and whatever takes
its time, are left to the connections' own threads.
"""

import threading
import time

from taas_magic.data.connection import Connection

_EVERY_S = 0.002
"""How long small answers gather before the next are sent: each call costs the lane more."""

_AT_REST_S = 0.001
"""The same while there is nothing to prepare."""

_OFTEN_S = 5 * _EVERY_S
"""So long after a visit a connection relies on the next one."""

_MOST_CONNECTIONS = 32
"""More of them would take the preparing thread's time by their number alone."""

_GIVE_WAY_S = 0.0001
"""A thread that comes back from a system call hardly gets the interpreter from one that is never
long without such a call, as the preparing one; so much of a rest lets it through."""


class Visits:
    """The connections of a lane, and the visits that they are paid; all in the preparing thread.

    Args:
        is_allowed: Whether there are any at all. After a death each batch waits until the ones
            before it have gone, which another thread has to see to.

    Attributes:
        sums: Whether any connection wants checksums of batches.
        cpu_s: What the visits have computed.
    """

    def __init__(self, is_allowed: bool) -> None:
        self._is_allowed = is_allowed
        self._changing = threading.Lock()
        self._connections: tuple[Connection, ...] = ()
        self._looked = self._latest = self._busy = 0.0
        self.sums, self.cpu_s = False, 0.0

    def add(self, connection: Connection) -> None:
        """One more is to be visited. Any thread."""
        with self._changing:
            self._connections += (connection,)
            self.sums |= connection.outbox.sums

    def remove(self, connection: Connection) -> None:
        """One is gone. Any thread."""
        with self._changing:
            self._connections = tuple(one for one in self._connections if one != connection)

    def are_frequent(self) -> bool:
        """Whether a connection may rely on being visited soon. Any thread."""
        return time.monotonic() - self._latest < _OFTEN_S

    def look_in(self, now: float) -> None:
        """Visit all of them if it is time for that; called between two batches."""
        self._busy = now
        if now - self._looked > _EVERY_S:
            self._looked = now
            if self._are_welcome:
                self._visit(now)
            elif self._connections:
                time.sleep(_GIVE_WAY_S)

    def rest(self, now: float) -> float | None:
        """Visit all of them while there is nothing to prepare, or no room for it.

        Returns:
            For how many seconds to rest before the next visit; None: no more are needed, as a
            connection's own thread waits for questions and for the network better than this one.
        """
        if self._are_welcome:
            self._visit(now)
            is_light = any([connection.outbox.is_light for connection in self._connections])
            is_needed = any([connection.relies_on_visits for connection in self._connections])
            if is_needed or (is_light and now - self._busy < _OFTEN_S):
                return _AT_REST_S
        self._latest = 0.0
        return None

    @property
    def _are_welcome(self) -> bool:
        return self._is_allowed and len(self._connections) <= _MOST_CONNECTIONS

    def _visit(self, now: float) -> None:
        self._latest = now
        began = time.thread_time()
        visits = [connection.visit() for connection in self._connections]
        if any(visits):
            self._busy = now
        if None in visits:
            time.sleep(_GIVE_WAY_S)
        self.cpu_s += time.thread_time() - began
