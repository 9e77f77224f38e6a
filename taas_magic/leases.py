"""Intervals of heartbeats between processes, and the time limits for a process that is silent.

ARCHITECTURE.md lists the same times, and the consequences when a lease runs out.
"""

from typing import NamedTuple

BEATS_PER_LEASE = 4
"""Number of heartbeats that a host sends to its pool's process in `lease_s` seconds.

The pool's process answers each heartbeat.
"""

SSH_BEATS_PER_LEASE = 8
"""Number of heartbeats that a pool's process sends to a supervisor by SSH in `lease_s` seconds."""

LOST_AFTER_S = 1.0
"""Seconds from the end of a silent host's lease until the pool counts the host as lost.

By then, the host has ended its own processes.
"""

RANK_BEAT_S = 1.0
"""Seconds between two heartbeats of a rank. A heartbeat says where the rank's main thread is."""

START_TIMEOUT_S = 120.0
"""Default of a pool's `start_timeout_s`: seconds without activity after which a start fails."""

STOPPED_S = 5.0
"""Maximum seconds for which a process may be suspended (SIGSTOP).

If a rank is suspended for longer, the run fails. A worker of a fetcher is killed and replaced by a
new worker. A forkserver is killed, and its host is replaced by a new host.
"""

HOST_END_S = 10.0
"""Maximum seconds for a supervisor to end all processes of its host."""

ALIVE_S = 1.0
"""Seconds between two signs of life that a fetcher sends to a rank that waits for batches.

The rank also checks every `ALIVE_S` seconds whether signs of life have arrived.
"""

PROOF_S = 5.0
"""Seconds after which a fetcher closes a connection whose peer has not shown the run's key."""

NODE_JOIN_S = 120.0
"""Maximum seconds for a node that is ready for jobs to connect to the farm."""

LEAST_FETCH_S = 4 * ALIVE_S
"""Minimum value of the setting `fetch_s` in seconds.

A rank waits half of `fetch_s` for a sign of life. This half must be longer than `ALIVE_S`.
"""


class FetchLease(NamedTuple):
    """Time limits of a rank that waits for the fetchers of a loader.

    Attributes:
        fetch_s: Seconds after which the run fails if no fetcher gives a response or a sign of life.
        start_s: Seconds to wait for the first fetcher to start.
    """

    fetch_s: float = 10.0
    start_s: float = 120.0

    @property
    def silent_s(self) -> float:
        """Seconds without a response from one fetcher before the rank asks another fetcher."""
        return self.fetch_s / 2
