"""Intervals of heartbeats between processes, and the time limits for a process that is silent.

ARCHITECTURE.md lists the same times, and the consequences when a lease runs out.
"""

from typing import NamedTuple

BEATS_PER_LEASE = 4
"""Number of heartbeats per `lease_s` from a host to its pool; the pool answers each."""

SSH_BEATS_PER_LEASE = 8
"""Number of heartbeats per `lease_s` from the pool to a host's supervisor over SSH."""

LOST_AFTER_S = 1.0
"""Seconds from the end of a silent host's lease until the pool counts the host as lost.

By then, the host has ended its own processes.
"""

RANK_BEAT_S = 1.0
"""Seconds between two heartbeats of a rank. A heartbeat says where the rank's main thread is."""

START_TIMEOUT_S = 120.0
"""Seconds that a starting process may be inactive: the default of a pool's `start_timeout_s`."""

STOPPED_S = 5.0
"""Seconds for which a process may be suspended (SIGSTOP).

If a rank is suspended for longer, the run fails. Other processes are killed: a worker of a fetcher
is then replaced by a new worker, and the host of a forkserver is replaced by a new host.
"""

HOST_END_S = 10.0
"""Maximum seconds for a supervisor to end all processes of its host."""

ALIVE_S = 1.0
"""Seconds between two signs of life from a fetcher to a waiting rank.

The rank also checks every `ALIVE_S` seconds whether signs of life have arrived.
"""

PROOF_S = 5.0
"""Maximum seconds, in total, for a peer of a fetcher to prove that it belongs to the run."""

NODE_JOIN_S = 120.0
"""Maximum seconds for a node to connect to the farm, once the node is ready to run jobs."""

LEAST_FETCH_S = 4 * ALIVE_S
"""Minimum value of `fetch_s`.

A rank waits half of `fetch_s` for a sign of life. This half must be longer than `ALIVE_S`.
"""


class FetchLease(NamedTuple):
    """Time limits of a rank that waits for the fetchers of a loader.

    Attributes:
        fetch_s: Seconds without a response or a sign of life from any fetcher, after which the run
            fails.
        start_s: Seconds to wait for the first fetcher to start.
    """

    fetch_s: float = 10.0
    start_s: float = 120.0

    @property
    def silent_s(self) -> float:
        """Seconds without a response from one fetcher before the rank asks another fetcher."""
        return self.fetch_s / 2
