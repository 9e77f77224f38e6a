"""Decide whether a run's fetchers start again after all of them have ended."""

import time

from msgspec import structs

from taas_magic.messages import Event, FetcherEnded, FetcherStarted, LoaderAddresses, Note
from taas_magic.plan import Plan


class FetcherRestarts:
    """Counter that decides whether a run's fetchers start again.

    The fetchers start again when all of them have ended unexpectedly, at most `max_restarts`
    times. The caller passes the fetchers' events to `record_event`, whose result says whether the
    caller must start all fetchers again.

    Args:
        max_restarts: Maximum number of restarts.
    """

    def __init__(self, plan: Plan, max_restarts: int) -> None:
        self._plan, self._max_restarts, self._n_restarts = plan, max_restarts, 0
        self._ended: set[int] = set()
        self._last: FetcherEnded | None = None

    def allow_one_restart(self) -> tuple[list[Event], bool]:
        """Allow one restart of the fetchers from now on, even after earlier restarts.

        If all fetchers have already ended unexpectedly, this restart begins now. Then the caller
        must publish two events: a note, and a copy of the last `FetcherEnded` without the addresses
        of fetchers. The copy makes ranks wait for the new fetchers.

        Returns:
            The events that the caller must publish ([] if no restart begins now), and whether the
            caller must start all fetchers now.
        """
        self._n_restarts, self._max_restarts = 0, 1
        if self._last is None or not self._may_start_again():
            return [], False
        return self._count_restart(structs.replace(self._last, time=time.time()))

    def forbid_restarts(self) -> None:
        """Allow no further restart of the fetchers, unless `allow_one_restart` is called later."""
        self._max_restarts = self._n_restarts

    def record_event(self, event: Event) -> tuple[list[Event], bool]:
        """Record an event of a fetcher; decide whether all fetchers start again.

        A `FetcherStarted` means that this fetcher runs again. A `FetcherEnded` counts as an
        unexpected end only if its field `entry` is set. If `entry` is unset, the pool's process
        itself has ended the fetcher.

        All fetchers start again if `event` reports the unexpected end of the last running fetcher,
        and a restart is allowed. Then the caller must publish two events: a note, and a copy of
        `event` without addresses and failures. The copy makes ranks wait for the new fetchers. In
        all other cases, the caller must publish `event` itself.

        Returns:
            The events that the caller must publish, and whether the caller must start all fetchers
            again.
        """
        if isinstance(event, FetcherStarted):
            self._ended.discard(event.number)
        if not isinstance(event, FetcherEnded) or not event.entry:
            return [event], False
        self._ended.add(event.number)
        self._last = event
        return self._count_restart(event) if self._may_start_again() else ([event], False)

    def _may_start_again(self) -> bool:
        data = self._plan.data
        have_all_ended = data is not None and len(self._ended) == len(data.fetchers)
        return have_all_ended and self._n_restarts < self._max_restarts

    def _count_restart(self, last: FetcherEnded) -> tuple[list[Event], bool]:
        """Count a restart of all fetchers; return the events to publish, and True.

        The events are a note with the number of the restart, and a copy of `last` without the
        addresses of the fetchers.
        """
        assert last.entry
        self._n_restarts += 1
        self._ended.clear()
        count = f"{self._n_restarts} of {self._max_restarts}"
        note = Note(text=f"all fetchers have ended and start again (restart {count})")
        # An entry without addresses tells the ranks to wait for the new fetchers.
        soon = {name: LoaderAddresses(fetchers=self._plan.cpus) for name in last.entry}
        return [note, structs.replace(last, entry=soon)], True
