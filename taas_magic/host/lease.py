"""The agent's lease: a host that does not hear its pool ends itself, whatever hangs.

The agent sends beats and the controller answers each. A thread watches, because an event loop that
hangs must not keep a host alive. Only monotonic clocks are read: those of hosts may be days apart.
"""

import os
import sys
import threading
import time
from collections.abc import Callable

from taas_magic.leases import BEATS_PER_LEASE

EXPIRED = 75
"""Exit code of an agent whose lease has expired (EX_TEMPFAIL)."""


class Lease:
    """Counts from the sending of the last beat that was answered.

    The controller counts from its arrival and allows a second more: when it takes a host for
    lost, the host has ended itself.

    Args:
        lease_s: How long it lasts.
        expire: Called in the watching thread when it has run out; does not return.
    """

    def __init__(self, lease_s: float, expire: Callable[[], None]) -> None:
        self.lease_s, self._expire = lease_s, expire
        self._lock = threading.Lock()
        self._sent: dict[int, float] = {}
        self._next = 0
        self._good_until = time.monotonic() + lease_s
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._watch_out, name="taas-lease", daemon=True)

    @property
    def beat_s(self) -> float:
        """Seconds from beat to beat."""
        return self.lease_s / BEATS_PER_LEASE

    def start(self) -> None:
        """Counts from now on."""
        self._good_until = time.monotonic() + self.lease_s
        self._watch.start()

    def beat(self) -> int:
        """The number of a beat that is about to be sent."""
        with self._lock:
            self._next += 1
            self._sent[self._next] = time.monotonic()
            return self._next

    def heard(self, beat: int) -> None:
        """A beat was answered; one that was not sent, or is old, counts for nothing."""
        with self._lock:
            sent = self._sent.get(beat)
            if sent is not None:
                self._sent = {number: at for number, at in self._sent.items() if number > beat}
                self._good_until = max(self._good_until, sent + self.lease_s)

    def close(self) -> None:
        """Ends the watch."""
        self._ended.set()

    def _watch_out(self) -> None:
        while not self._ended.wait(max(0.0, self._good_until - time.monotonic())):
            if time.monotonic() >= self._good_until:
                self._expire()
                return


def end_agent(lease_s: float) -> None:
    """Ends this agent at once; its supervisor ends all that it leaves."""
    sys.stderr.write(f"taas-magic: heard nothing of the pool for {lease_s:g} s: the host ends\n")
    sys.stderr.flush()
    os._exit(EXPIRED)
