"""The table of leases: who says how often that it lives, and how long another one waits for it.

ARCHITECTURE.md has it with what follows when a lease runs out. `lease_s` is a setting of a pool,
`fetch_s` one of the data service (docs/config.md).
"""

from typing import NamedTuple

BEATS_PER_LEASE = 4
"""Of a host to its pool, each answered."""

SSH_BEATS_PER_LEASE = 8
"""Of the pool to a host's supervisor over SSH."""

LOST_AFTER_S = 1.0
"""How much longer than its lease a host may be silent: it has ended itself by then."""

RANK_BEAT_S = 1.0
"""How often a rank says that it lives and where its main thread stands."""

START_TIMEOUT_S = 120.0
"""How long a process that starts may do nothing at all (`host/activity.py`): the default of a
pool's `start_timeout_s`."""

STOPPED_S = 5.0
"""How long a process may be stopped (SIGSTOP): a rank, before the run fails; a worker of a fetcher
and a forkserver, before they are ended, and the worker or the host is replaced."""

HOST_END_S = 10.0
"""How long a supervisor may take to end all of its host."""

ALIVE_S = 1.0
"""How often a rank that waits is told that its fetcher lives, and looks up."""

PROOF_S = 5.0
"""How long a peer of a fetcher may take, in all, to show that it belongs to the run."""

NODE_JOIN_S = 120.0
"""How long a farm's node may try to reach the farm, once it can run jobs."""

LEAST_FETCH_S = 4 * ALIVE_S
"""The shortest `fetch_s`: half of it has to be longer than a sign of life may take."""


class FetchLease(NamedTuple):
    """How long a rank waits for the fetchers of a loader, in seconds.

    Attributes:
        fetch_s: For any of them to answer, or to say that it lives, before the run fails.
        start_s: For the first one to come up.
    """

    fetch_s: float = 10.0
    start_s: float = 120.0

    @property
    def silent_s(self) -> float:
        """For one of them, before another is asked."""
        return self.fetch_s / 2
