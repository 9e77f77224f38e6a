"""A run in the pool's process: its ranks (`PoolRun`) and its fetchers (`PoolFetchers`).

All times are on this process's monotonic clock, because the clocks of hosts may differ by days.
"""

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, structs

from taas_magic.errors import PoolError, ProtocolError
from taas_magic.host.spec import RunSpec, ShareSpec, StartShare, fetcher_failed, fetchers_share_id
from taas_magic.host.system import LOOPBACK
from taas_magic.host.watch import HALT_S, LEFT_GRACE_S, first_failure, host_failure
from taas_magic.journal.folder import RunFolder
from taas_magic.messages import (
    AddressesByLoader,
    AnswerInput,
    DebuggerChanged,
    Detached,
    EndRun,
    Event,
    Failure,
    FederationStarted,
    FetcherEnded,
    FetcherReport,
    FetcherStack,
    FetcherStarted,
    GetStacks,
    Halt,
    Hang,
    HostEnded,
    InputAnswered,
    InputRequested,
    Note,
    PauseClocks,
    RankEvent,
    RankFailure,
    RanksEnded,
    RankStack,
    Request,
    Restart,
    RunEnded,
    RunStacks,
    SessionState,
    SetFetcherAddress,
    StateChanged,
    UpdateStoreCopy,
    Usage,
)
from taas_magic.plan import DataPlan, Plan, ranks_with_results
from taas_magic.pool.files import FileServer, OwnedFiles
from taas_magic.pool.hosts import CALL_S, BackgroundTasks, PoolHost, PoolHosts, require_fit
from taas_magic.pool.restarts import FetcherRestarts
from taas_magic.store.requests import FileRequest

FILES_S = 4000.0
"""Maximum seconds for a host to respond if it must first copy files.

A host copies files before the next attempt of a run, and before the first cell of a session. The
limit is longer than `CLEAN_UP_S` and `START_S`, the maximum times that the agent waits for these
copies. A host with fetchers of a session also copies files before each later cell.
"""

FURTHER_REPORTS_S = 0.3
"""Seconds for which an attempt waits for further hosts' reports after a host reports a failure.

This applies to a failure that no other failure caused.
"""

LATE_REPORT_S = 2.0
"""Seconds from a rank's failure within which the rank's host normally reports the failure.

The host reports the failure only after its remaining ranks have ended. Until then, the host sends
beats.
"""

FINAL_CAUSES = frozenset({"timeout", "interrupt", "host"})
"""Values of `HostReport.cause` after which the pool does not start the ranks again."""

CLEAN_UP_SILENCE_S = 600.0
"""Maximum seconds without a message from a host that cleans up at the end of a run.

After this time, the pool drops the host. A request to write a file counts as a message, so a host
that still sends files is not dropped.
"""

FETCHERS_END_S = 10.0
"""Maximum seconds for which `PoolFetchers.halt` waits for the end of the fetchers."""

STACKS_S = 15.0
"""Maximum seconds for a host to return the stacks of its ranks or fetchers."""

RETRY_HOSTS_S = 5.0
"""Seconds between two tries to get hosts for a run's next attempt."""

POOL_ONLY_EVENTS = (StateChanged, Detached, Restart, InputAnswered, RunEnded)
"""Classes of events that only the pool's process creates.

If a host sends such an event, the pool's process ignores and counts it.
"""

TICK_S = 0.1
"""Seconds between two calls of `decide_outcome` after the first host's report."""

_WORST_LAST = ("SUCCEEDED", "INTERRUPTED", "FAILED", "LOST")
_CHECK_S = 1.0


@dataclass(frozen=True)
class HostReport:
    """One host's report of how its ranks ended.

    Attributes:
        state: SUCCEEDED, FAILED, INTERRUPTED, or LOST for a host that is gone.
        cause: Reason for the end, such as "rank" or "timeout" (a value of
            `host.watch.Verdict.cause`), or "lost" for a host that is gone; "" on success.
        at: Time at which the pool's process received the report, on its monotonic clock.
        failures: Failures of the host's ranks. A rank that ends early by `sys.exit(0)` has a
            failure here even if `state` is SUCCEEDED.
    """

    state: str
    cause: str
    at: float
    failures: tuple[Failure, ...] = ()


@dataclass
class ShareHost:
    """One host of a `Share`, with the state of the run's ranks or fetchers on this host.

    Attributes:
        host_rank: Number of the host among the hosts of the run's ranks, or of its fetchers.
        report: The host's report of how its ranks of the current attempt ended; None before the
            report.
        ended: Whether the host runs no process of the share now: it has ended its processes, never
            started them, or is gone.
        silence_counts: Whether the pool drops the host if it is silent after `halt`. False until
            the pool asks the host to start the processes. If they are a session's, False until the
            host has started them: before a cell, the host silently waits for the session's start.
        last_message_at: Monotonic time of the host's last event or request.
    """

    host: PoolHost
    host_rank: int
    report: HostReport | None = None
    ended: bool = False
    silence_counts: bool = False
    last_message_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class AttemptOutcome:
    """The result of an attempt that has ended.

    Attributes:
        state: The worst state that a host reported, in the order SUCCEEDED, INTERRUPTED, FAILED,
            LOST.
        failures: Failures in the order in which they were reported. Failures that other failures
            caused come last.
        may_retry: Whether another attempt may succeed.
    """

    state: str
    failures: tuple[Failure, ...] = ()
    may_retry: bool = False


def decide_outcome(hosts: Collection[ShareHost], now: float) -> AttemptOutcome | None:
    """Return the outcome of an attempt; None while the attempt continues.

    If all hosts report success, the attempt has succeeded. If a rank exits early by `sys.exit(0)`
    and other hosts' ranks still run `LEFT_GRACE_S` later, the attempt has failed.

    If hosts have reported only interrupts, the attempt waits for all hosts: each of them was
    interrupted and will report.

    After any other failure, the attempt ends at the latest when all hosts have reported. It ends
    earlier in two cases:

    - A host has reported an original failure, that is, a failure that no other failure caused. The
      attempt ends `FURTHER_REPORTS_S` after this report.
    - Hosts have reported failures, but none of these is an original failure. The attempt ends when
      each host without a report has sent a beat at least `LATE_REPORT_S` after the first report of
      a failure.

    The second case is safe. A host reports its original failure earlier than `LATE_REPORT_S` after
    the failures that it causes on other hosts, and its messages arrive in order. So a host that has
    sent this beat and no report has no original failure. The pool soon drops a host without beats,
    and the loss counts as the host's report.

    Args:
        hosts: State of the attempt's ranks on each host.
        now: Monotonic time.
    """
    reports = [share_host.report for share_host in hosts if share_host.report is not None]
    bad = [report for report in reports if report.state != "SUCCEEDED"]
    if not bad:
        return _outcome_so_far(hosts, reports, now)
    since = min(report.at for report in bad)
    own = [report.at for report in bad if _has_own_failure(report)]
    if len(reports) < len(hosts):
        if all(report.state == "INTERRUPTED" for report in bad):
            return None  # the other hosts were interrupted too and will report it
        if own and now < min(own) + FURTHER_REPORTS_S:
            return None
        if not own and any(
            each.host.last_message_at < since + LATE_REPORT_S for each in hosts if not each.report
        ):
            return None
    state = worst_state(report.state for report in bad)
    if state == "INTERRUPTED":
        return AttemptOutcome(state)
    may_retry = not any(report.cause in FINAL_CAUSES for report in bad)
    return AttemptOutcome(state, _failures(bad if own else reports), may_retry)


def _outcome_so_far(
    hosts: Collection[ShareHost], reports: list[HostReport], now: float
) -> AttemptOutcome | None:
    if len(reports) == len(hosts):
        return AttemptOutcome("SUCCEEDED")
    left = [report for report in reports if report.failures]
    if left and now >= min(report.at for report in left) + LEFT_GRACE_S:
        return AttemptOutcome("FAILED", _failures(left), may_retry=True)
    return None


def _failures(reports: Collection[HostReport]) -> tuple[Failure, ...]:
    ordered = sorted(reports, key=lambda report: report.at)
    found = [failure for report in ordered for failure in report.failures]
    return tuple(sorted(found, key=lambda failure: failure.consequence))


def _has_own_failure(report: HostReport) -> bool:
    return any(not failure.consequence for failure in report.failures)


def worst_state(states: Iterable[str]) -> str:
    """Return the worst state in `states`; the order is SUCCEEDED, INTERRUPTED, FAILED, LOST."""
    return max(states, key=_WORST_LAST.index)


class Share(ABC):
    """All ranks of a run, or all fetchers of a run, on their hosts.

    A share accepts events and requests only from the hosts on which its processes run.

    Args:
        owner: Dask client id of the kernel that receives the events; "" for a detached run.
        publish: Function that receives each event of the share.

    Attributes:
        run_id: Id of the share: for ranks, the id of the run; for fetchers, this id and ".data".
        attempt: Number of the run's current attempt, from 0.
    """

    is_fetchers: bool
    """Whether the share consists of fetchers instead of ranks."""

    def __init__(
        self, run: RunSpec, owner: str, pool_hosts: PoolHosts, publish: Callable[[Event], None]
    ) -> None:
        self._run, self.owner = run, owner
        self._pool_hosts, self.publish = pool_hosts, publish
        self.run_id = fetchers_share_id(run.plan.run_id) if self.is_fetchers else run.plan.run_id
        self.attempt = 0
        self._files = FileServer(run, self.is_fetchers)
        self._for_hosts = run.for_hosts(pool_hosts.are_local)
        self._share_hosts: dict[str, ShareHost] = {}
        self._changed = asyncio.Event()
        self._halted, self._how_halted = asyncio.Event(), ""
        self._tasks = BackgroundTasks()

    @abstractmethod
    async def start(self) -> list[str]:
        """Get hosts from the pool, and start the ranks or fetchers on them.

        Raises:
            PoolError: Too few hosts are available, a host lacks a module or version that the run
                needs, or the run was halted.
        """

    @abstractmethod
    def _process_numbers(self, share_host: ShareHost) -> Collection[int]:
        """Return the numbers of a host's ranks or fetchers."""

    def _owned_files(self, share_host: ShareHost) -> OwnedFiles:
        return OwnedFiles(self._process_numbers(share_host), self.attempt, frozenset())

    @abstractmethod
    def _may_send(self, share_host: ShareHost, event: Event) -> bool:
        """Return whether a host may send `event`.

        False if the event is about a process of another host, or if hosts never send such events.
        """

    @abstractmethod
    def _on_host_event(self, share_host: ShareHost, event: Event) -> None:
        """Publish an event that a host has sent, and record its effect on this share."""

    @abstractmethod
    def _publish_loss(self, share_host: ShareHost, why: str) -> None:
        """Publish that a host was lost, together with its ranks or fetchers.

        Args:
            why: Reason of the loss.
        """

    @property
    def session_id(self) -> str:
        """Run id of the session to which the ranks or fetchers belong; "" without a session."""
        return self.run_id if self._run.is_session else self._run.session

    @property
    def cell_number(self) -> int:
        """Number of the cell in its session; 0 if the run is no cell of a session."""
        return self._run.cell_number

    @property
    def folder(self) -> RunFolder:
        """The run folder on the notebook's machine."""
        return self._run.folder

    @property
    def plan(self) -> Plan:
        """The plan of the run."""
        return self._run.plan

    @property
    def is_halted(self) -> bool:
        """Whether `halt` was called to interrupt or kill the ranks or fetchers."""
        return self._halted.is_set()

    def on_event(self, address: str, event: Event) -> bool:
        """Accept and publish an event from a host; return False if the host may not send the event.

        Before publishing, set the event's time and host name. Also record the time of the host's
        last message. If the host may not send the event, change nothing.

        Args:
            address: Dask's address of the host's agent.
        """
        share_host = self._active_host(address)
        if share_host is None or not self._may_send(share_host, event):
            return False
        share_host.last_message_at = time.monotonic()
        event.time = time.time()  # not the host's clock, which may differ by days
        event.host = share_host.host.name
        self._on_host_event(share_host, event)
        return True

    async def answer_file_request(self, address: str, request: FileRequest[Any]) -> object:
        """Handle a host's request for files of the run folder or the project store.

        Args:
            address: Dask's address of the host's agent.

        Returns:
            The response, whose type depends on the request.

        Raises:
            ProtocolError: The ranks or fetchers on the host have ended, or the host may not send
                the request.
        """
        share_host = self._active_host(address)
        if share_host is None:
            raise ProtocolError(f"run {self.run_id} has ended on the host at {address}")
        share_host.last_message_at = time.monotonic()
        return await self._files.answer(
            share_host.host_rank, self._owned_files(share_host), request
        )

    def record_lost_host(self, host: PoolHost, why: str) -> None:
        """Record and publish that a host is gone. Ignore a host on which this share does not run.

        Args:
            why: The reason, for the user.
        """
        share_host = self._active_host(host.address)
        if share_host is not None:
            self._publish_loss(share_host, why)
            self._record_host_ended(share_host)

    async def halt(self, how: str) -> None:
        """Interrupt or kill the ranks or fetchers on all hosts. They are not started again.

        This method does not wait until they have ended. The pool drops each host that has not ended
        them within `HALT_S`.

        Args:
            how: "interrupt" or "kill".
        """
        self._how_halted = how
        self._halted.set()
        await self._send_halt(how)

    async def _send_halt(self, how: str) -> None:
        """Tell all hosts to interrupt or kill the ranks or fetchers.

        A background task drops each host that has not ended them within `HALT_S`.
        """
        self._tasks.start(self._drop_late_hosts(HALT_S))
        await self._send_to_all(Halt(self.run_id, how))

    async def stacks(self) -> RunStacks:
        """Request the Python stacks of all ranks or fetchers from their hosts; return the stacks.

        The result also names each host that has not responded within `STACKS_S`, or that failed to
        respond.
        """
        hosts = [each.host for each in self._share_hosts.values() if not each.ended]
        found = await asyncio.gather(*map(self._stacks_on, hosts))
        return RunStacks(
            [row for host in found for row in host.ranks],
            [row for host in found for row in host.fetchers],
            [line for host in found for line in host.silent],
        )

    async def _stacks_on(self, host: PoolHost) -> RunStacks:
        """Request the stack reports of one host's processes; set the host's name in each report.

        If the host reports an error, or does not respond within `STACKS_S`, the result has only a
        line about this in `silent`.
        """
        asking = self._pool_hosts.call(host.address, GetStacks(self.run_id))
        try:
            stacks = await asyncio.wait_for(asking, STACKS_S)
        except asyncio.TimeoutError:
            return RunStacks(silent=[f"host {host.name} did not answer within {STACKS_S:.0f} s"])
        except PoolError as error:
            return RunStacks(silent=[f"host {host.name} did not answer: {error}"])
        rows: list[RankStack | FetcherStack] = [*stacks.ranks, *stacks.fetchers]
        for row in rows:
            row.host = host.name
        return stacks

    def _active_host(self, address: str) -> ShareHost | None:
        share_host = self._share_hosts.get(address)
        return None if share_host is None or share_host.ended else share_host

    def _running_addresses(self) -> list[str]:
        return [address for address, each in self._share_hosts.items() if not each.ended]

    async def _acquire_hosts(
        self, count: int, preferred: Collection[str] = (), retry_s: float = 0.0
    ) -> list[PoolHost]:
        """Wait until the pool has `count` hosts, check their modules and versions, and return them.

        If the pool returns a host to the engine during the check, wait and check again. The pool
        does so if another run's wait for hosts fails. During the wait, publish a note with each new
        line about the hosts, such as the state of a batch job.

        Args:
            preferred: Addresses of hosts that are chosen first.
            retry_s: Seconds for which this call tries again, every `RETRY_HOSTS_S`, if hosts are
                not available. The user gets a note with each new reason.

        Raises:
            PoolError: The hosts are not available, a host lacks a module or version that the run
                needs, or `halt` was called.
        """
        until, noted = time.monotonic() + retry_s, set[str]()

        def note(line: str) -> None:
            if line not in noted:
                noted.add(line)
                self.publish(Note(text=line))

        while True:
            try:
                hosts = await self._acquire_hosts_once(count, preferred, note)
            except PoolError as error:
                if self.is_halted or time.monotonic() >= until:
                    raise
                note(f"waiting up to {retry_s:g} s for another host: {error}")
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._halted.wait(), RETRY_HOSTS_S)
                continue
            [unfit] = await asyncio.gather(self._require_fit(hosts), return_exceptions=True)
            if any(host.is_returned for host in hosts):
                continue
            if unfit is not None:
                raise unfit
            return hosts

    async def _acquire_hosts_once(
        self, count: int, preferred: Collection[str], on_wait: Callable[[str], None]
    ) -> list[PoolHost]:
        """Wait until the pool has `count` hosts, or until `halt` is called; return the hosts.

        Args:
            preferred: Addresses of hosts that are chosen first.
            on_wait: Called with each line for the user about the hosts, perhaps several times.

        Raises:
            PoolError: The hosts are not available, or `halt` was called.
        """
        acquiring = asyncio.ensure_future(self._pool_hosts.acquire(count, preferred, on_wait))
        halted = asyncio.ensure_future(self._halted.wait())
        await asyncio.wait({acquiring, halted}, return_when=asyncio.FIRST_COMPLETED)
        halted.cancel()
        if self.is_halted:
            acquiring.cancel()
            raise PoolError("the wait for its hosts was cancelled")
        return acquiring.result()

    async def _require_fit(self, hosts: Collection[PoolHost]) -> None:
        if self._run.requires is not None:
            await require_fit(self._pool_hosts, hosts, self._run.requires)

    def _set_hosts(self, share_hosts: list[ShareHost]) -> None:
        """Make `share_hosts` the hosts of this share, in place of the hosts before.

        From now on, they count as busy, so that the pool does not give them back before they start.
        """
        self._share_hosts = {share_host.host.address: share_host for share_host in share_hosts}
        for share_host in share_hosts:
            share_host.host.runs.add(self.run_id)

    async def _start_one(
        self, share_host: ShareHost, is_next_attempt: bool = False, **facts: Any
    ) -> int:
        """Start the ranks or fetchers on one host.

        If `halt` is called during the start, its message has no effect on this host. So after the
        start, send `Halt` to this host again. Only interrupt a cell, because it has just begun, and
        its session's ranks stay after an interrupt.

        Args:
            is_next_attempt: Whether the host also ran the previous attempt. If True, the host first
                cleans up after the previous attempt.
            facts: Fields of the host's `ShareSpec` that only a share of ranks has.

        Returns:
            The port of the ranks' rendezvous if this host runs the rendezvous, else 0.

        Raises:
            PoolError: The host did not start the processes. They count as ended on this host.
        """
        address = share_host.host.address
        spec = ShareSpec(self._for_hosts, share_host.host_rank, **facts)
        is_of_session = bool(self._run.session)
        limit_s = FILES_S if is_next_attempt or is_of_session else CALL_S
        share_host.silence_counts = not is_of_session
        try:
            start = StartShare(spec, is_next_attempt)
            port = await self._pool_hosts.call(address, start, limit_s)
            share_host.silence_counts, share_host.last_message_at = True, time.monotonic()
            if self.is_halted:  # an earlier `Halt` had no effect while the host was starting
                how = "interrupt" if is_of_session else self._how_halted
                await self._pool_hosts.call(address, Halt(self.run_id, how))
        except PoolError:
            self._record_host_ended(share_host)
            raise
        return port

    async def _send_to_all(self, request: Request[None]) -> None:
        """Send a request to all hosts that still run ranks or fetchers; wait for the responses.

        Ignore errors: if a host is lost, `PoolHosts` notices this and `record_lost_host` is called.
        """
        calls = (self._pool_hosts.call(address, request) for address in self._running_addresses())
        await asyncio.gather(*calls, return_exceptions=True)

    def _record_host_ended(self, share_host: ShareHost) -> None:
        share_host.ended = True
        share_host.host.runs.discard(self.run_id)
        self._changed.set()

    async def wait_until_ended(self) -> None:
        """Wait until all hosts have ended their ranks or fetchers, or are gone."""
        while self._running_addresses():
            self._changed.clear()
            await self._changed.wait()

    async def _drop_late_hosts(self, limit_s: float) -> None:
        """Drop each host that does not end its ranks or fetchers within `limit_s`.

        Ignore a host whose silence does not count yet (`ShareHost.silence_counts`). Return when no
        host runs any of them.

        Args:
            limit_s: Seconds that a host may take. They count from this call, and start again at
                each event or request of the host. So a host that still sends files is not dropped.
        """
        share_hosts, began = list(self._share_hosts.values()), time.monotonic()
        while left := [share_host for share_host in share_hosts if not share_host.ended]:
            now = time.monotonic()
            late = [
                each
                for each in left
                if each.silence_counts and now - max(each.last_message_at, began) >= limit_s
            ]
            for share_host in late:
                why = f"it did not end run {self.run_id} within {limit_s:.0f} s; it is replaced"
                await self._pool_hosts.drop(share_host.host.address, why)
            await asyncio.sleep(_CHECK_S)


class PoolFetchers(Share):
    """All fetchers of a run in the pool's process; they run on hosts of one pool.

    If all of them have ended unexpectedly, they start again, up to `--max-restarts` times. A
    session's fetchers run until `halt` is called. They start again at most once for each cell of
    the session (`allow_restart`).
    """

    is_fetchers = True

    def __init__(
        self, run: RunSpec, owner: str, pool_hosts: PoolHosts, publish: Callable[[Event], None]
    ) -> None:
        super().__init__(run, owner, pool_hosts, publish)
        self.lifecycle_events: list[Event] = []
        """All start and end events of the fetchers until now.

        If the run is detached, the new owner of the fetchers receives these events.
        """

        self._restarts = FetcherRestarts(run.plan, 1 if run.session else run.plan.max_restarts)
        self._update_lock = asyncio.Lock()
        self._pending_restarts = 0
        """Number of restarts that have begun and not ended."""

        self._folder_lock = contextlib.ExitStack()

    async def start(self) -> list[str]:
        """Get hosts from the pool, and start the fetchers on them; return the hosts' names.

        For a session's fetchers, first lock the run folder, so that no kernel removes it before the
        fetchers have ended. If the start fails on one host, fetchers may already run on other
        hosts, so the caller must call `halt`.

        Raises:
            PoolError: Too few hosts are available, a host lacks a module or version that the run
                needs, or the run was halted.
            OSError: The run folder cannot be read.
        """
        if self._run.session:  # the fetchers may start again long after their cell has ended
            await asyncio.to_thread(
                self._folder_lock.enter_context, self.folder.lock_against_pruning()
            )
        return await self._start_all()

    async def _start_all(self) -> list[str]:
        """Get hosts from the pool, start all fetchers on them, and return the hosts' names.

        If the start fails on any host, raise the first error when all hosts have responded.
        """
        chosen = (await self._acquire_hosts(self._data.pool_hosts))[: self._data.hosts]
        share_hosts = [ShareHost(host, number) for number, host in enumerate(chosen)]
        self._set_hosts(share_hosts)
        starting = map(self._start_one, share_hosts)
        for error in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(error, BaseException):
                raise error
        return [host.name for host in chosen]

    async def run_to_end(self) -> None:
        """Wait until all fetchers have ended and cannot start again.

        Then release the lock on the run folder, and refuse further requests of their hosts about
        the project store.
        """
        while self._running_addresses() or self._may_start_again():
            self._changed.clear()
            await self._changed.wait()
        self._folder_lock.close()
        await self._files.close()

    def _may_start_again(self) -> bool:
        return self._pending_restarts > 0 or (bool(self._run.session) and not self.is_halted)

    def allow_restart(self) -> None:
        """Allow one restart for the next cell of the session.

        If all fetchers have ended unexpectedly before, a background task starts them again now. If
        `halt` was called, do nothing.
        """
        if not self.is_halted:
            self._publish_all(*self._restarts.allow_one_restart())

    async def update_store_copies(self) -> str:
        """Let all hosts of the fetchers copy the changed files of the project store.

        If an earlier call still waits for the hosts, first wait for its end. Ignore hosts that are
        lost, because other fetchers provide their batches.

        Returns:
            "", or the reason why a host could not copy the files.
        """
        async with self._update_lock:
            updates = map(self._update_store_copy, self._running_addresses())
            problems = await asyncio.gather(*updates)
        return next(filter(None, problems), "")

    async def _update_store_copy(self, address: str) -> str:
        """Let one host copy the changed files; return "", or the reason why it could not.

        Returns "" for a host that is lost.
        """
        try:
            request = UpdateStoreCopy(self.run_id)
            return await self._pool_hosts.call(address, request, FILES_S)
        except PoolError as error:
            is_lost = all(host.address != address for host in self._pool_hosts.all())
            return "" if is_lost else str(error)

    async def _start_again(self) -> None:
        """Start all fetchers again, after their hosts have cleaned up after the ended fetchers.

        If the start fails, kill the fetchers that have started, allow no further restart, and
        publish the failure of each fetcher. At the end, record that this restart is no longer
        pending, because `run_to_end` waits for pending restarts.
        """
        try:
            await self.wait_until_ended()
            await self._start_all()
        except PoolError as error:
            await self._send_halt("kill")
            self._restarts.forbid_restarts()
            for fetcher in self._data.fetchers:
                self._publish_event(
                    fetcher_failed(self.plan, fetcher, f"not started again: {error}")
                )
        finally:
            self._pending_restarts -= 1
            self._changed.set()

    async def halt(self, how: str) -> None:
        """Kill the fetchers on all hosts, and wait up to `FETCHERS_END_S` until they have ended.

        The fetchers do not start again.

        Args:
            how: Ignored. Both "interrupt" and "kill" kill the fetchers.
        """
        self._restarts.forbid_restarts()
        await super().halt("kill")
        self._changed.set()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.wait_until_ended(), FETCHERS_END_S)

    @property
    def _data(self) -> DataPlan:
        assert self.plan.data is not None
        return self.plan.data

    def _process_numbers(self, share_host: ShareHost) -> list[int]:
        return [fetcher.number for fetcher in self._data.fetchers_on(share_host.host_rank)]

    def _may_send(self, share_host: ShareHost, event: Event) -> bool:
        if isinstance(event, FetcherStarted | FetcherReport | FetcherEnded):
            return event.number in self._process_numbers(share_host)
        return isinstance(event, Note | HostEnded)

    def _on_host_event(self, share_host: ShareHost, event: Event) -> None:
        if isinstance(event, HostEnded):
            self._record_host_ended(share_host)
            return
        self._publish_event(event)

    def _publish_event(self, event: Event) -> None:
        self._publish_all(*self._restarts.record_event(event))

    def _publish_all(self, events: Iterable[Event], starts_again: bool) -> None:
        for event in events:
            if isinstance(event, FetcherStarted | FetcherEnded):
                self.lifecycle_events.append(event)
            self.publish(event)
        if starts_again:
            self._pending_restarts += 1
            self._tasks.start(self._start_again())

    def _publish_loss(self, share_host: ShareHost, why: str) -> None:
        """Publish a note that a host with fetchers is gone, and then the failure of each fetcher.

        The note says whether other fetchers remain.
        """
        numbers, host = self._process_numbers(share_host), share_host.host.name
        fetchers = f"fetcher{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
        are_others = len(self._running_addresses()) > 1
        others = "other fetchers provide their batches" if are_others else "no fetcher is left"
        self.publish(Note(host=host, text=f"host {host} with {fetchers} is gone ({why}); {others}"))
        for fetcher in self._data.fetchers_on(share_host.host_rank):
            ended = fetcher_failed(self.plan, fetcher, f"host {host} is gone: {why}")
            ended.host = host
            self._publish_event(ended)


class RunClock:
    """Clock that measures the time of a run for `--timeout`, summed over the run's attempts.

    The clock is paused until the first attempt starts, and while a rank waits for the user.
    """

    def __init__(self) -> None:
        self._ran_s = 0.0
        self._since: float | None = None

    def set_paused(self, is_paused: bool, now: float) -> None:
        """Pause the clock or let it run. If the clock is already in this state, change nothing.

        Args:
            now: Monotonic time.
        """
        self._ran_s = self.ran_s(now)
        self._since = None if is_paused else now

    def ran_s(self, now: float) -> float:
        """Return the seconds for which the clock has run until the monotonic time `now`."""
        return self._ran_s + (now - self._since if self._since is not None else 0.0)


class PoolRun(Share):
    """A run in the pool's process: its ranks on all hosts, in all its attempts.

    A session is a `PoolRun` whose ranks wait for cells. Each cell of the session is a `PoolRun` of
    its own, which uses the ranks of the session.

    Args:
        cleaned_up: Event that the caller sets when the run has ended on all hosts, its journal is
            closed, and the project store is free.
        session: For a cell in a session: the session, whose hosts and ranks the cell uses. None for
            any other run.
    """

    is_fetchers = False

    def __init__(
        self,
        run: RunSpec,
        owner: str,
        pool_hosts: PoolHosts,
        publish: Callable[[Event], None],
        cleaned_up: asyncio.Event,
        session: "PoolRun | None" = None,
    ) -> None:
        super().__init__(run, owner, pool_hosts, publish)
        self.cleaned_up, self._session = cleaned_up, session
        self.send_event: Callable[[bytes], None] = lambda encoded: None
        """Function that sends an encoded event to the kernel that owns the run."""

        self.is_detached_session = False
        """Whether this run is a detached session, which continues when its kernel ends."""

        self.why_halted = ""
        """The reason, for the user, why the pool's process halted the run; "" if it did not."""

        self.orphaned_cell = ""
        """Run id of the session's newest cell that continued after its kernel was gone.

        "" if there is no such cell, or if a kernel has taken the session over since then.
        """

        self._cells: list[PoolRun] = []
        self._n_cells = self._n_fetchers = 0
        self._last_used_at = time.monotonic()
        self._fetcher_addresses: dict[int, AddressesByLoader] = {}
        self._published_fetcher_events: set[tuple[type[Event], int, float]] = set()
        self._running_fetchers: dict[int, FetcherStarted] = {}
        """The start event of each fetcher that runs, by its number."""

        self._open_requests: dict[int, int] = {}
        """By rank: the field `number` of the rank's `InputRequested` that no user has answered."""

        self._debugged: set[int] = set()
        """Ranks to which a client of debugpy is attached."""

        self._has_federation = False
        """Whether this is a federation, and all hosts have taken part in the current attempt."""

        self._tunnels = contextlib.AsyncExitStack()
        self._started = time.monotonic()
        self._clock = RunClock()

    async def start(self) -> list[str]:
        """Get hosts from the pool, start the first attempt on them, and return the hosts' names.

        Raises:
            PoolError: Too few hosts are available, a host lacks a module or version that the run
                needs, the run was halted, or the cell's session has ended.
        """
        wanted = self._run.preferred_hosts
        preferred = [host.address for host in self._pool_hosts.all() if host.name in wanted]
        hosts = await self._acquire_hosts(len(self.plan.hosts), preferred)
        self.publish(StateChanged(state="RUNNING"))
        await self._start_attempt(hosts)
        return [host.name for host in hosts]

    @property
    def is_idle(self) -> bool:
        """Whether this run is a session in which no cell has run for `session_idle_s`."""
        limit_s = self._run.idle_s
        return limit_s is not None and not self._cells and self.idle_for_s >= limit_s

    @property
    def idle_for_s(self) -> float:
        """Seconds since the session's last cell ended; 0 while a cell runs."""
        return 0.0 if self._cells else time.monotonic() - self._last_used_at

    @contextlib.contextmanager
    def mark_in_use(self, cell: "PoolRun") -> Iterator[None]:
        """Count a cell as running in this session until the `with` block ends.

        At the start of the block, record the cell's number, and publish the start events of the
        session's running fetchers also as events of the cell. At the end of the block, the
        session's idle time begins.
        """
        self._cells.append(cell)
        self._n_cells = max(self._n_cells, cell.cell_number)
        for started in self._running_fetchers.values():
            cell.publish(started)
        try:
            yield
        finally:
            self._cells.remove(cell)
            self._last_used_at = time.monotonic()

    def session_state(self) -> SessionState:
        """Return this session's state for a kernel that takes the session over.

        The state has the number of the session's cells, the number of fetchers that the cells have
        started, and the run id of the running cell. If no cell is running, the state has the run id
        of the newest cell that has lost its kernel since the last takeover (`orphaned_cell`).
        """
        cell = self._cells[-1].run_id if self._cells else self.orphaned_cell
        return SessionState(cells=self._n_cells, fetchers=self._n_fetchers, cell=cell)

    def count_fetchers(self, fetchers: PoolFetchers) -> None:
        """Record which fetcher numbers a cell uses, so that later cells use other numbers."""
        data = fetchers.plan.data
        numbers = (fetcher.number + 1 for fetcher in (data.fetchers if data else ()))
        self._n_fetchers = max(self._n_fetchers, *numbers, 0)

    def session_hosts(self) -> list[PoolHost]:
        """Return this session's hosts in the order of their ranks.

        Raises:
            PoolError: The session has ended or is ending.
        """
        share_hosts = sorted(self._share_hosts.values(), key=lambda each: each.host_rank)
        has_ended = any(each.ended or each.report for each in share_hosts)
        if self.is_halted or has_ended or not share_hosts:
            raise PoolError(f"session {self.plan.session} has ended")
        return [share_host.host for share_host in share_hosts]

    async def _acquire_hosts(
        self, count: int, preferred: Collection[str] = (), retry_s: float = 0.0
    ) -> list[PoolHost]:
        """Return hosts for the run; for a cell in a session, the hosts of the session.

        For any other run, wait until the pool has `count` hosts, and return them in the order of
        taas.toml. In both cases, check that the hosts have the modules and versions that the run
        needs.

        Raises:
            PoolError: The hosts are not available, a host lacks something, `halt` was called, or
                the session has ended.
        """
        if self._session is None:
            acquired = await super()._acquire_hosts(count, preferred, retry_s)
            return self._pool_hosts.in_configured_order(acquired)
        hosts = self._session.session_hosts()
        await self._require_fit(hosts)
        return hosts

    async def run_to_end(self) -> RunEnded:
        """Wait until the started run has ended on all hosts; return the run's last event.

        If an attempt fails and a further attempt may succeed, start all ranks again, up to
        `max_restarts` times. A run that is halted during a restart counts as INTERRUPTED. After the
        last attempt, let all hosts clean up, then refuse their requests about the project store. If
        a host is lost during the cleanup, the run counts as LOST.

        The event lists these failures:

        - The failures of the last attempt.
        - If each of these was caused by another failure: the original failures that hosts reported
          during the cleanup. A slow host may report the original failure only then.
        - A failure for each host that was lost during the cleanup.

        The field `first` of the event has the first original failure. If there is no original
        failure, `first` has the first failure.
        """
        outcome = await self._wait_for_outcome()
        most = self.plan.max_restarts
        while outcome.may_retry and self.attempt < most and not self.is_halted:
            if await self._start_again(outcome):
                outcome = await self._wait_for_outcome()
            elif self.is_halted:  # halted during the restart: the earlier failure does not count
                outcome = AttemptOutcome("INTERRUPTED")
            else:
                break
        lost, late = await self._end_ranks()
        await self._files.close()
        # On a slow host, the cause of all other failures may be reported after `LATE_REPORT_S`.
        has_cause = any(not failure.consequence for failure in outcome.failures)
        failures = [*outcome.failures, *([] if has_cause else late), *lost]
        return RunEnded(
            state=worst_state([outcome.state, "LOST"] if lost else [outcome.state]),
            failures=failures,
            first=first_failure(failures),
            elapsed_s=time.monotonic() - self._started,
            why=self.why_halted,
            attempt=self.attempt,
        )

    async def publish_fetcher_events(self, events: Sequence[Event]) -> None:
        """Publish events of the run's fetchers, and send new fetchers' addresses to all hosts.

        Also record which fetchers run, and their addresses. Remove the addresses from the published
        start and end events. Ignore a start or end event that arrives a second time. Publish all
        other events unchanged.

        The fetchers of a session's cell remain for later cells. So a cell in a session only passes
        `events` to the session's `publish_fetcher_events`, which publishes them as events of the
        newest cell.
        """
        if self._session is not None:
            await self._session.publish_fetcher_events(events)
            return
        publish = self._cells[-1].publish if self._cells else self.publish
        for event in events:
            if isinstance(event, FetcherStarted | FetcherEnded):
                key = (type(event), event.number, event.time)
                if key in self._published_fetcher_events:
                    continue  # sent again because the fetchers' owner has changed
                self._published_fetcher_events.add(key)
                shown = structs.replace(event, entry=UNSET)
                self._running_fetchers.pop(event.number, None)
                if isinstance(shown, FetcherStarted):
                    self._running_fetchers[event.number] = shown
                publish(shown)
                if event.entry:
                    self._fetcher_addresses[event.number] = event.entry
                    await self._send_to_all(
                        SetFetcherAddress(self.run_id, event.number, event.entry)
                    )
            else:
                publish(event)

    async def answer_input(self, answer: AnswerInput) -> None:
        """Publish `InputAnswered`, and send the user's line to the rank that requested input.

        Do nothing if the rank no longer waits for this line.
        """
        if self._open_requests.get(answer.rank) != answer.number:
            return  # the rank was interrupted meanwhile, or has ended
        await self._close_requests([answer.rank])
        await self._send_to_all(answer)

    async def refuse_input(self) -> None:
        """Refuse all open requests of ranks for the user's input, because no user can answer."""
        for rank, number in list(self._open_requests.items()):
            await self.answer_input(AnswerInput(self.run_id, rank, number, is_refused=True))

    async def _on_input_requested(self) -> None:
        await self._pause_clocks()
        if not self.owner:  # a detached run
            await self.refuse_input()

    async def _close_requests(self, ranks: Iterable[int]) -> None:
        """Record that `ranks` no longer wait for the user's input.

        Publish `InputAnswered` for each rank that has waited. If none waits any more, let the
        clocks of `--timeout` and `--hang` run again.
        """
        closed = [rank for rank in ranks if self._open_requests.pop(rank, None) is not None]
        for rank in closed:
            self.publish(InputAnswered(rank=rank))
        if closed:
            await self._pause_clocks()

    async def _set_debugged(self, ranks: Iterable[int], is_attached: bool) -> None:
        """Record whether a client of debugpy is attached to `ranks`.

        While a client is attached to any rank, the clocks of `--timeout` and `--hang` are paused.
        """
        before = set(self._debugged)
        change = self._debugged.update if is_attached else self._debugged.difference_update
        change(ranks)
        if self._debugged != before:
            await self._pause_clocks()

    async def _forget_ranks(self, ranks: Collection[int]) -> None:
        """Record that `ranks` have ended, so that they wait neither for input nor in debugpy."""
        await self._close_requests(ranks)
        await self._set_debugged(ranks, is_attached=False)

    async def _pause_clocks(self) -> None:
        """Pause the clocks of `--timeout` and `--hang` if a rank waits for the user; else resume.

        A rank waits for the user if it has requested input, or if a client of debugpy is attached
        to it. Also send the hosts a request to pause or resume their clocks.
        """
        is_paused = bool(self._open_requests or self._debugged)
        self._clock.set_paused(is_paused, time.monotonic())
        await self._send_to_all(PauseClocks(self.run_id, is_paused=is_paused))

    def _process_numbers(self, share_host: ShareHost) -> range:
        mine = self.plan.hosts[share_host.host_rank]
        return range(mine.first_rank, mine.first_rank + mine.ranks)

    def _owned_files(self, share_host: ShareHost) -> OwnedFiles:
        may_send = ranks_with_results(self.plan)
        return OwnedFiles(self._process_numbers(share_host), self.attempt, may_send)

    def _may_send(self, share_host: ShareHost, event: Event) -> bool:
        is_of_pool = isinstance(event, POOL_ONLY_EVENTS)
        return not is_of_pool and _ranks_of(event) <= set(self._process_numbers(share_host))

    def _on_host_event(self, share_host: ShareHost, event: Event) -> None:
        """Publish an event that a host has sent, and record what the event says about the run.

        The recorded facts are:

        - how the host's ranks of the current attempt ended, but not how ranks of an earlier attempt
          ended
        - whether the host has cleaned up
        - whether a rank waits for the user's input (a detached run refuses the request)
        - whether a client of debugpy is attached to a rank
        - whether a rank has failed, so that it no longer waits for the user
        - whether a federation has started

        If the event says that the host can run no ranks, drop the host.
        """
        self.publish(event)
        if isinstance(event, RanksEnded) and event.cause == "host":
            first = first_failure(event.failures)
            why = first.message if first else "it cannot run anything"
            self._tasks.start(self._pool_hosts.drop(share_host.host.address, why))
        elif isinstance(event, RanksEnded) and event.attempt == self.attempt:
            self._record_report(share_host, event.state, event.cause, event.failures)
        elif isinstance(event, HostEnded):
            self._record_report(share_host, event.state, "host", event.failures)
            self._record_host_ended(share_host)
            self._tasks.start(self._forget_ranks(self._process_numbers(share_host)))
        elif isinstance(event, FederationStarted):
            self._has_federation = self.plan.federated and share_host.host_rank == 0
        elif isinstance(event, InputRequested):
            self._open_requests[event.rank] = event.number
            self._tasks.start(self._on_input_requested())
        elif isinstance(event, DebuggerChanged):
            self._tasks.start(self._set_debugged([event.rank], event.is_attached))
        elif isinstance(event, RankFailure) and event.failure.rank is not None:
            self._tasks.start(self._forget_ranks([event.failure.rank]))

    def _publish_loss(self, share_host: ShareHost, why: str) -> None:
        failure = host_failure(share_host.host.name, PoolError(why))
        self.publish(RankFailure(host=share_host.host.name, failure=failure))
        share_host.report = None
        self._record_report(share_host, "LOST", "lost", [failure])
        self._tasks.start(self._forget_ranks(self._process_numbers(share_host)))

    def _record_report(
        self, share_host: ShareHost, state: str, cause: str, failures: list[Failure]
    ) -> None:
        """Record how a host's ranks ended. If the host has reported before, do nothing.

        In a federation in which all hosts have taken part, only the failure or loss of host number
        0 ends the run. If any other host fails or is lost, publish a note and record that this host
        succeeded.

        Args:
            state: SUCCEEDED, FAILED, INTERRUPTED or LOST.
            cause: Reason for the end; "" on success.
        """
        if share_host.report is not None:
            return
        if self._has_federation and share_host.host_rank and state in ("FAILED", "LOST"):
            why = "; ".join(failure.message for failure in failures)
            text = f"host {share_host.host.name} no longer takes part: {why}"
            self.publish(Note(host=share_host.host.name, text=text))
            state, failures = "SUCCEEDED", []
        share_host.report = HostReport(state, cause, time.monotonic(), tuple(failures))
        self._changed.set()

    async def _wait_for_outcome(self) -> AttemptOutcome:
        """Wait until the current attempt has ended; return its outcome (`decide_outcome`).

        Call `decide_outcome` after each change. After the first host's report, also call it every
        `TICK_S` seconds.
        """
        while True:
            share_hosts = self._share_hosts.values()
            if (outcome := decide_outcome(share_hosts, time.monotonic())) is not None:
                return outcome
            settling = any(share_host.report for share_host in share_hosts)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), TICK_S if settling else None)
            self._changed.clear()

    async def _start_again(self, outcome: AttemptOutcome) -> bool:
        """Publish `Restart`, and start all ranks again, with new hosts in place of lost ones.

        Wait up to the pool's `start_timeout_s` for new hosts. If too few hosts are available, start
        nothing, and publish a note, unless the run was halted. A host that is not lost keeps its
        number.

        Args:
            outcome: Outcome of the attempt that has failed. `Restart` contains its first failure.

        Returns:
            Whether the next attempt was started.
        """
        first = first_failure(outcome.failures)
        self.publish(Restart(attempt=self.attempt + 1, failure=first))
        try:
            retry_s = self._pool_hosts.start_timeout_s
            hosts = await self._acquire_hosts(
                len(self.plan.hosts), self._running_addresses(), retry_s
            )
        except PoolError as error:
            if not self.is_halted:
                self.publish(Note(text=f"not started again: {error}"))
            return False
        self.attempt += 1
        await self._start_attempt(self._in_host_order(hosts))
        return True

    def _in_host_order(self, hosts: list[PoolHost]) -> list[PoolHost]:
        """Return `hosts` in the order of their host numbers in the next attempt.

        A host of the previous attempt keeps its number. New hosts get the numbers of lost hosts.
        """
        old = {each.host_rank: each.host for each in self._share_hosts.values()}
        stay = {rank: host for rank, host in old.items() if host in hosts}
        new = (host for host in hosts if host not in stay.values())
        return [stay[rank] if rank in stay else next(new) for rank in range(len(hosts))]

    async def _start_attempt(self, hosts: list[PoolHost]) -> None:
        """Start an attempt's ranks on `hosts`, given in the order of their ranks.

        Forget requests for input, attached debuggers and a federation of the previous attempt. Let
        the clock of `--timeout` run. `hosts` replace the hosts of the previous attempt.

        The first host starts its ranks before all other hosts, because it creates the ranks'
        rendezvous. If this start fails, the other hosts start no ranks. Of these other hosts, those
        that ran the previous attempt must still clean up. All others count as ended.
        """
        self._open_requests.clear()
        self._debugged.clear()
        self._has_federation = False
        running = set(self._running_addresses())
        first, *others = share_hosts = [
            ShareHost(host, number, silence_counts=host.address in running)
            for number, host in enumerate(hosts)
        ]
        self._set_hosts(share_hosts)
        self._clock.set_paused(False, time.monotonic())
        address = hosts[0].peer_address if others else LOOPBACK
        port = await self._start_ranks(first, running, address)
        if port:
            await asyncio.gather(
                *(self._start_ranks(share_host, running, address, port) for share_host in others)
            )
        else:
            for share_host in others:
                if share_host.host.address not in running:
                    self._record_host_ended(share_host)

    async def _start_ranks(
        self,
        share_host: ShareHost,
        running: Collection[str],
        master_addr: str,
        master_port: int = 0,
    ) -> int:
        """Start an attempt's ranks on one host.

        If the run needs a tunnel to the notebook's machine, open it first. If the tunnel or the
        start fails, record this failure as if the host had reported it. Also record that the host
        has ended its ranks.

        Args:
            running: Addresses of the hosts that ran the previous attempt.
            master_addr: Address of the first host, which creates the rendezvous of the ranks.
            master_port: Port of the rendezvous; 0 for the first host, which chooses the port.

        Returns:
            The port of the rendezvous if this is the first host; 0 for any other host, and after a
            failure.
        """
        try:
            reach = ""
            if self._run.reach:
                tunnel = self._pool_hosts.tunnel(share_host.host, self._run.reach)
                reach = await self._tunnels.enter_async_context(tunnel)
            return await self._start_one(
                share_host,
                share_host.host.address in running,
                host_plan=self.plan.hosts[share_host.host_rank],
                n_hosts=len(self._share_hosts),
                master_addr=master_addr,
                master_port=master_port,
                attempt=self.attempt,
                ran_s=self._clock.ran_s(time.monotonic()),
                fetchers=self._fetcher_addresses,
                reach=reach,
            )
        except PoolError as error:
            self._record_report(
                share_host, "FAILED", "host", [host_failure(share_host.host.name, error)]
            )
            self._record_host_ended(share_host)
            return 0

    async def _end_ranks(self) -> tuple[list[Failure], list[Failure]]:
        """Tell all hosts to end their ranks and clean up, and wait for them.

        Drop a host that sends no message for `CLEAN_UP_SILENCE_S`. At the end, close the hosts'
        tunnels.

        Returns:
            Two lists of failures. The first list has one failure for each host that was lost during
            this call. The second list has the failures of ranks that hosts reported late, that is,
            during this call. It omits failures that other failures caused.
        """
        active = [each for each in self._share_hosts.values() if not each.ended]
        silent = [each for each in active if each.report is None]
        for share_host in active:
            share_host.report = None
        self._tasks.start(self._drop_late_hosts(CLEAN_UP_SILENCE_S))
        await self._send_to_all(EndRun(self.run_id))
        await self.wait_until_ended()
        await self._tunnels.aclose()
        reports = [each.report for each in active if each.report is not None]
        lost = [f for report in reports if report.state == "LOST" for f in report.failures]
        late = [each.report for each in silent if each.report and each.report.state == "FAILED"]
        return lost, [f for report in late for f in report.failures if not f.consequence]


def _ranks_of(event: Event) -> set[int]:
    """Return the ranks that an event is about; an empty set if it is about none."""
    match event:
        case RankEvent():
            return {event.rank}
        case Hang() | Usage():
            return {row.rank for row in event.ranks}
        case RankFailure():
            failures = [event.failure]
        case RanksEnded() | HostEnded():
            failures = event.failures
        case _:
            return set()
    return {failure.rank for failure in failures if failure.rank is not None}
