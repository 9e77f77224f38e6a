"""Run one share of a run on this host, from start to cleanup. A share is ranks or fetchers.

`HostShare` is the common part: it copies files to the host, runs processes, cleans up, sends files
back, and reports the end to the pool. `HostRun` is for ranks. In `HostRun`, three threads of the
agent work together:

- The share's own thread starts, checks and ends the ranks. It sleeps until a rank ends, another
  thread sets `wakeup`, or `POLL_S` seconds have passed.
- The thread of the `PipeReader` records the ranks' messages.
- The thread of the agent's event loop calls `handle_command` for each command.

`HostFetchers` is for fetchers, which start before the ranks and may be on a host without ranks.
"""

import contextlib
import os
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

import psutil

from taas_magic import messages, probe
from taas_magic.data import service
from taas_magic.data.watchdog import STOPPED, StoppedProcessWatchdog
from taas_magic.errors import PoolError, TaasError, signal_name
from taas_magic.host import forkserver, link, rendezvous, stacks
from taas_magic.host.files import HostFiles
from taas_magic.host.output import OnMessage, PipeReader, Wakeup
from taas_magic.host.rendezvous import Rendezvous
from taas_magic.host.spec import (
    EventSink,
    FetcherSpec,
    HostAddress,
    LocalShare,
    ProcessSpec,
    ShareSpec,
    fetcher_failed,
    torchrun_variables,
)
from taas_magic.host.stacks import StackMonitor
from taas_magic.host.supervisor import create_run_folder
from taas_magic.host.system import (
    RUN_TOKEN,
    end_all,
    find_leftovers,
    is_tracker,
    kill_all,
    pids_and_names,
)
from taas_magic.host.usage import UsageReporter
from taas_magic.host.watch import (
    Deadline,
    Ranks,
    Verdict,
    decide_verdict,
    describe_failure,
    failed_ranks,
    host_failure,
)
from taas_magic.messages import (
    AnswerInput,
    DebuggerChanged,
    EndRun,
    Event,
    Failure,
    FetcherEnded,
    FetcherFailed,
    FetcherStack,
    Halt,
    HostEnded,
    Note,
    PauseClocks,
    RankBeat,
    RankEvent,
    RankFailure,
    RankMessage,
    RanksEnded,
    RanksStarted,
    RankStackSample,
    RunStacks,
    SetFetcherAddress,
    StoreMessage,
)
from taas_magic.plan import Prefill
from taas_magic.store import guard
from taas_magic.store.requests import SendRequest

POLL_S = 0.25
"""Maximum seconds between two checks of the processes of a share."""

CLEAN_UP_S = 3600.0
"""Maximum seconds that `start_next_attempt` waits for the cleanup after the current attempt.

The limit is long because the host sends rank 0's last checkpoint to the project store, from which
the other hosts copy the checkpoint.
"""

FAILED_GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL for the ranks that still run when a rank has failed."""

RANK = "taas_magic.host.rank.rank_main"

PoolCommand = Halt | EndRun | SetFetcherAddress | AnswerInput | PauseClocks
"""A command of the pool to a share.

- `Halt`: end early, because the run was stopped.
- `EndRun`: end, because the run is over on all hosts.
- `SetFetcherAddress`: write the address of a fetcher to the run folder, where ranks read it.
- `AnswerInput`: send the user's line to the rank that requested input.
- `PauseClocks`: pause or resume the clocks of `--timeout` and `--hang`.
"""


class HostShare(ABC):
    """Runner of one share on this host. Base class of the runners for ranks and for fetchers.

    Args:
        emit: Function that sends an event to the pool's process.
        is_only_share: Function that returns whether this share is the only share on this host. If
            the result is True at the end of this share, orphaned processes that the supervisor has
            adopted belong to this share, and are killed.
        send_request: Function that sends a request about files to the pool's process, and returns
            the response.

    Raises:
        PoolError: TMPDIR is not writable.
    """

    port = 0
    """Port of torch's key-value store for the first attempt, if this is the run's first host.

    0 on other hosts, and for fetchers.
    """

    def __init__(
        self,
        spec: ShareSpec,
        host_address: HostAddress,
        emit: EventSink,
        is_only_share: Callable[[], bool],
        send_request: SendRequest,
    ) -> None:
        self.spec, self.host_address, self.host = spec, host_address, host_address.host
        self.emit, self._is_only_share = emit, is_only_share
        self.folder = create_run_folder()
        self._files = HostFiles(spec, host_address, send_request, emit)
        self._local: LocalShare | None = None
        self.wakeup = Wakeup()
        self.stopped_at: float | None = None

    @property
    def local(self) -> LocalShare:
        """The share with this host's paths. Available after the share's files have been copied."""
        assert self._local is not None
        return self._local

    def run(self) -> None:
        """Run the share to its end, clean up, then send the event `HostEnded` to the pool.

        The event has the final state and the failures of the share. For fetchers, the state is
        always SUCCEEDED, because the end of each fetcher is reported separately.
        """
        try:
            self._run()
        finally:
            state, failures = self._outcome()
            self.emit(HostEnded(state=state, failures=failures))
            self.wakeup.close()

    def _run(self) -> None:
        """Copy files to this host, run the share's processes, clean up, and send files back.

        If the share must end while the run folder is copied to this host, no processes start. If an
        error occurs before the cleanup, this method passes the error to `_fail`.

        The cleanup takes the steps of `_end_steps`, kills processes that remain, and removes the
        share's private folder. If one step fails, a note tells the user, and the other steps still
        happen. If files cannot be sent back, this method passes the error to `_record_files_error`.
        """
        try:
            self._local = self._files.copy_in(self._may_continue)
            if self._local is not None:
                self._run_processes()
        except Exception as error:
            self._fail(error)
        remove_folder: Callable[[], None] = partial(shutil.rmtree, self.folder, ignore_errors=True)
        for step in (*self._end_steps(), self._end_leftovers, remove_folder):
            try:
                step()
            except Exception as error:
                text = f"part of the run could not be cleaned up: {type(error).__name__}: {error}"
                self.note(text)
        try:
            self._files.send_back()
        except Exception as error:
            self._record_files_error(error)

    def handle_command(self, command: PoolCommand) -> None:
        """If the command is `Halt`, make the share's thread end the share's processes.

        If `command.how` is "kill", the processes get no time to end. Ignore all other commands;
        `HostRun` overrides this method to carry them out. Called in the thread of the agent's event
        loop.
        """
        if isinstance(command, Halt):
            if command.how == "kill":
                self.stopped_at = float("-inf")  # no grace period is left
            elif self.stopped_at is None:
                self.stopped_at = time.monotonic()
            self.wakeup.set()

    @abstractmethod
    def stacks(self) -> RunStacks:
        """Return the stacks of the share's ranks or fetchers. Blocks for some seconds."""

    @abstractmethod
    def _run_processes(self) -> None:
        """Start the share's processes, and check them until they have ended or must end."""

    @abstractmethod
    def _fail(self, error: Exception) -> None:
        """Handle an error that stopped the share. Abstract.

        `HostRun` records the error as the result that `run` sends to the pool. `HostFetchers`
        reports the fetchers of this host as failed.
        """

    @abstractmethod
    def _end_steps(self) -> tuple[Callable[[], None], ...]:
        """Return functions without arguments that end the share's processes and release resources.

        The caller must call every function, even if an earlier function raises an exception.
        """

    @abstractmethod
    def _record_files_error(self, error: Exception) -> None:
        """Handle an error because of which files could not be sent to the notebook. Abstract.

        `HostRun` reports and records a failure of the run. `HostFetchers` only sends the user a
        note, because only logs of fetchers are missing.
        """

    def _may_continue(self) -> bool:
        return self.stopped_at is None

    def _outcome(self) -> tuple[str, list[Failure]]:
        return "SUCCEEDED", []

    def _path_prefix(self) -> Path:
        """Return the path prefix of files that only this share's processes have open.

        By this prefix, `find_leftovers` finds processes that remain after the share.
        """
        return self.folder

    def _end_leftovers(self) -> None:
        """Kill the share's processes that still run; send a note if a process cannot be killed."""
        found = find_leftovers(self.spec.share_id, self._path_prefix(), self._is_only_share())
        if left := kill_all(found):
            self.note(
                f"host {self.host}: these processes could not be ended: {pids_and_names(left)}"
            )

    def note(self, text: str) -> None:
        """Send a note to the user of the run."""
        self.emit(Note(text=text))


_A = TypeVar("_A", bound="Attempt")


class Attempt:
    """The ranks of one attempt on this host, with methods that start, check and end the ranks.

    Attributes:
        folder: Private folder of the attempt, with the pipes and files that ranks and agent share.
        reader: Reader of the pipes with the ranks' output and messages.
        processes: Processes by rank.
        monitor: Collector of the ranks' stacks, which also detects ranks that make no progress.
        usage: Reporter of the ranks' use of CPUs, GPUs and memory.
    """

    def __init__(
        self,
        share: LocalShare,
        host_address: HostAddress,
        emit: EventSink,
        *,
        folder: Path,
        reader: PipeReader,
        processes: dict[int, Any],
    ) -> None:
        self._share, self._spec = share, share.spec
        self._host_address, self._emit = host_address, emit
        self.folder, self.reader, self.processes = folder, reader, processes
        self.ranks = Ranks(self._spec.ranks)
        self.monitor = StackMonitor(share, self.ranks, reader, folder, emit)
        self.usage = UsageReporter(self._spec.attempt, self.ranks, emit)
        self.ended: tuple[str, list[Failure]] | None = None
        """State in which the attempt ended on this host, and its failures. None while ranks run."""

    @classmethod
    def create(
        cls: type[_A],
        share: LocalShare,
        host_address: HostAddress,
        folder: Path,
        emit: EventSink,
        on_message: OnMessage,
    ) -> _A:
        """Create an attempt with its pipes, but do not start ranks.

        Args:
            folder: The share's folder, in which the attempt's private folder is created.
            on_message: Function that receives the ranks' messages, in the reader's thread.
        """
        own = folder / str(share.spec.attempt)
        own.mkdir(mode=0o700)
        reader = PipeReader(own, share.folder, share.spec.ranks, emit, on_message)
        return cls(share, host_address, emit, folder=own, reader=reader, processes={})

    def start(self, port: int) -> None:
        """Start the ranks as forks of the forkserver, and report their process ids to the pool.

        Each rank gets torchrun's environment variables, such as RANK and MASTER_PORT.

        Args:
            port: Port of torch's key-value store for the ranks.
        """
        spec, environ = self._spec, self._share.rank_environ(self._host_address)
        about = ProcessSpec(self._share, self.folder, environ, guard.strongest_protection())
        for local_rank, rank in enumerate(spec.ranks):
            error_file = link.rank_file(self.folder, rank, "error.json")
            variables = torchrun_variables(spec, local_rank, port, error_file)
            self.processes[rank] = forkserver.start_process(RANK, about, variables)
        self._report_started()

    def _report_started(self) -> None:
        pids = {rank: process.pid for rank, process in self.processes.items()}
        self.ranks.record_start(pids)
        gpus = min(len(pids), probe.count_gpus())
        self._emit(RanksStarted(attempt=self._spec.attempt, pids=pids, gpus=gpus))

    @property
    def sentinels(self) -> list[int]:
        """One descriptor for each running rank; readable when the rank has ended."""
        return [process.sentinel for process in self._running().values()]

    def check(self, deadline: float | None, interrupted_at: float | None) -> None:
        """Update the ranks' states, and end the attempt on this host if the attempt is over.

        The steps are:

        1. If the user has interrupted the run, send SIGINT to the ranks (`_interrupt`).
        2. Read the last messages of ranks that have ended, and record that these ranks have ended.
        3. Call `decide_verdict`. The attempt is over after success, a failure, an interrupt by the
           user, or the time of `--timeout`. If the attempt has failed because the forkserver ended,
           replace the verdict by one with the cause "host".
        4. If the attempt is over, report the verdict, and end the ranks (`_conclude`). Otherwise,
           report the ranks' use of CPUs, GPUs and memory. Unless the user has interrupted the run,
           also check whether the ranks make progress.

        All times are in seconds of the monotonic clock.

        Args:
            deadline: Time at which `--timeout` ends the run. None without `--timeout`, or while a
                rank waits for the user's input.
            interrupted_at: Time at which the user interrupted the run. Minus infinity to kill the
                ranks at once. None if there was no interrupt.
        """
        if interrupted_at is not None:
            self._interrupt(interrupted_at)
        self._poll_ends()
        now, states = time.monotonic(), self.ranks.states()
        self.ranks.poll(now)
        verdict = decide_verdict(states, now, deadline, interrupted_at)
        failed = verdict is not None and verdict.state == "FAILED"
        if failed and forkserver.caused_ends({state.exitcode for state in states}):
            verdict = Verdict("FAILED", "host")
        if verdict is not None:
            self._conclude(verdict)
        else:
            if interrupted_at is None:  # an interrupted hang stays the last report of the run
                self.monitor.check(now)
            self.usage.check(now)

    def _poll_ends(self) -> None:
        """For each rank whose process has ended, read the last messages, then record the end."""
        for rank, process in self._running().items():
            if (code := forkserver.exitcode(process)) is not None:
                self.reader.drain(rank)
                self.ranks.record_end(rank, code, link.rank_file(self.folder, rank, "stack"))

    def close(self) -> None:
        """End the ranks that still run, and release the `Process` objects of all ranks."""
        self.usage.close()
        self._end_ranks(0.0)
        while self.processes:
            forkserver.close_process(self.processes.popitem()[1])

    def _interrupt(self, since: float) -> None:
        """Send SIGINT, once, to each rank that has reported that it accepts SIGINT.

        Args:
            since: Time of the user's interrupt, in seconds of the monotonic clock. Only
                `CellAttempt`, which overrides this method, uses the time.
        """
        self.ranks.interrupt()

    def _end_ranks(self, grace_s: float) -> None:
        """End the ranks that still run; then kill their descendants, except resource trackers.

        Args:
            grace_s: Seconds between SIGTERM and SIGKILL for the ranks. 0 to send only SIGKILL.
        """
        alive = self.ranks.alive()
        below = []
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                below += [it for it in process.children(recursive=True) if not is_tracker(it)]
        end_all(alive, grace_s=grace_s)
        end_all(below, grace_s=0.0)

    def _conclude(self, verdict: Verdict) -> None:
        """Record the verdict, and send it to the pool. Then end the ranks unless they succeeded.

        This method sends all events before it ends the ranks, so that the pool receives the
        failures at once. First, if the verdict is FAILED, it sends a `RankFailure` for each
        failure. Then it sends one `RanksEnded` with the verdict.

        How the ranks end depends on the verdict:

        - FAILED: the ranks get SIGTERM, and SIGKILL `FAILED_GRACE_S` seconds later.
        - INTERRUPTED: the ranks get SIGKILL immediately.
        """
        failures, has_failed = self.collect_failures(verdict), verdict.state == "FAILED"
        self.ended = verdict.state, failures if has_failed else []
        for failure in failures if has_failed else ():
            self._emit(RankFailure(failure=failure))
        self._emit(
            RanksEnded(
                attempt=self._spec.attempt,
                state=verdict.state,
                cause=verdict.cause,
                failures=failures,
            )
        )
        if verdict.state != "SUCCEEDED":
            self._end_ranks(FAILED_GRACE_S if has_failed else 0.0)

    def collect_failures(self, verdict: Verdict) -> list[Failure]:
        """Return the failures of this host's ranks, in the order of `failed_ranks`.

        If the verdict's cause is "host", the result is one failure of the host instead.

        A rank that left by `sys.exit(0)` counts as failed if no rank has an error that looks like
        the cause of the failure. The result has such ranks even if the attempt has succeeded on
        this host, because the attempt may have failed on another host.
        """
        if verdict.cause == "host":
            return [host_failure(self._host_address.host, PoolError(forkserver.why_ended()))]
        return [
            describe_failure(
                state,
                verdict,
                host=self._host_address.host,
                log_path=self._spec.notebook_log_path(state.rank),
                tail=self.reader.tail(state.rank),
                timeout_text=self._spec.plan.timeout_text,
            )
            for state in failed_ranks(self.ranks.states(), verdict.cause)
        ]

    def _running(self) -> dict[int, Any]:
        states = self.ranks.states()
        return {state.rank: self.processes[state.rank] for state in states if not state.ended}


@dataclass(frozen=True)
class _NextAttempt:
    """A command of the controller to start the next attempt of a run.

    Attributes:
        rendezvous: Rendezvous of the next attempt if this is the run's first host; else None.
    """

    spec: ShareSpec
    rendezvous: Rendezvous | None
    is_clean: threading.Event = field(default_factory=threading.Event)
    """Event that is set when this host is ready for the next attempt, or has failed to prepare."""


class HostRun(HostShare):
    """Runner of one run's ranks on this host, in all attempts of the run.

    Args:
        spec: This host's share of the first attempt.
        *about: The other arguments of `HostShare`, in the same order.

    Raises:
        OSError: This is the run's first host, but `spec.master_addr` is no address of this host.
    """

    _attempt_type: type[Attempt] = Attempt

    def __init__(self, spec: ShareSpec, *about: Any) -> None:
        # This line is the first, because it may raise an exception. Before it, there is nothing to
        # clean up.
        self._rendezvous = None if spec.run.session else _rendezvous_of(spec)
        super().__init__(spec, *about)
        self.port = self._rendezvous.port if self._rendezvous else 0
        timeout_s = spec.plan.timeout_s
        began = time.monotonic() - spec.ran_s
        self._debugged: set[int] = set()
        """Ranks of this host to which a client of debugpy is attached."""
        self._deadline = Deadline(began + timeout_s if timeout_s is not None else None)
        self._attempt: Attempt | None = None
        self._readers: list[PipeReader] = []
        self._next: _NextAttempt | None = None
        self._is_over = self._is_ending = False
        self._error_end: tuple[str, list[Failure]] | None = None
        """State and failures of the share if an error in the agent ended the share; else None."""
        self._entries = dict(spec.fetchers)
        self._addresses: Path | None = None
        self._addresses_lock = threading.Lock()

    def start_next_attempt(self, spec: ShareSpec) -> int:
        """Make the share's thread clean up the current attempt, and then start the next attempt.

        On the run's first host, this method first binds the port of a new rendezvous. On all hosts,
        it then waits at most `CLEAN_UP_S` seconds for the cleanup, but not for the ranks' start. If
        the cleanup fails or takes longer, this method returns without an exception. If the share is
        ending already, this method does not wait: `HostEnded` will tell the pool why this host
        starts no ranks.

        Do not call this method in the share's own thread, which does the cleanup.

        Returns:
            The port of the new rendezvous on the run's first host; 0 on other hosts.
        """
        own_rendezvous = _rendezvous_of(spec)
        self._next = next_attempt = _NextAttempt(spec, own_rendezvous)
        if self._is_ending:  # `_end_steps` may have missed the next attempt
            next_attempt.is_clean.set()
        self.wakeup.set()
        next_attempt.is_clean.wait(CLEAN_UP_S)
        return own_rendezvous.port if own_rendezvous else 0

    def stacks(self) -> RunStacks:
        """Return the stacks of this host's ranks; an empty list if no rank has started yet.

        Blocks for some seconds.
        """
        monitor = self._attempt.monitor if self._attempt is not None else None
        return RunStacks(monitor.rows(monitor.collect()) if monitor is not None else [])

    def _write_fetcher_addresses(self) -> None:
        """Write the fetchers' addresses to the folder where the ranks read them.

        Does nothing until `set_address_folder` has set this folder. Any thread may call this.
        """
        with self._addresses_lock:
            if self._addresses is not None:
                for number, entry in list(self._entries.items()):
                    service.write_entry(self._addresses, number, entry)

    def _may_continue(self) -> bool:
        return self.stopped_at is None and not self._is_over

    def handle_command(self, command: PoolCommand) -> None:
        """Carry out a command of the pool (`PoolCommand`).

        Called in the thread of the agent's event loop. For `Halt` and `EndRun`, this method only
        records the command and wakes the share's thread, which interrupts, kills or ends the ranks.
        The other commands write a fetcher's address to the run folder, pass the user's line to a
        rank of this host, or pause and resume the clocks of `--timeout` and `--hang`.
        """
        super().handle_command(command)
        match command:
            case EndRun():  # all hosts have reported how the attempt ended
                self._is_over = True
                self.wakeup.set()
            case SetFetcherAddress():
                self._entries[command.number] = command.entry
                self._write_fetcher_addresses()
            case AnswerInput() if self._attempt is not None and command.rank in self.spec.ranks:
                link.answer_input(self._attempt.folder, command)
            case PauseClocks():
                self._pause(command.is_paused)

    def _pause(self, is_paused: bool) -> None:
        change = self._deadline.pause if is_paused else self._deadline.resume
        change(time.monotonic())
        if self._attempt is not None:
            self._attempt.monitor.is_paused = is_paused

    def _run_processes(self) -> None:
        """Run one attempt after the other, as the controller requests, until the run is over.

        First writes the fetchers' addresses to the folder where ranks read them. When the ranks of
        an attempt have ended, waits until the controller requests the next attempt or ends the run.
        Then closes the attempt, and prepares the files for the next attempt, if any.
        """
        self.set_address_folder(self.local.folder.path)
        while not self._is_over:
            if (next_attempt := self._next) is not None:
                self._next = None
                self._prepare_attempt(next_attempt)
            attempt = self._start_ranks()
            self._follow_attempt(attempt)
            attempt.close()

    def set_address_folder(self, base: Path) -> None:
        """Set the folder where the ranks read the fetchers' addresses, and write the addresses.

        Args:
            base: The run folder; for a session, the private folder of the session's ranks. The
                addresses are in a subfolder (`service.addresses_folder`).
        """
        self._addresses = service.addresses_folder(base)
        self._write_fetcher_addresses()

    def _start_ranks(self) -> Attempt:
        """Create an attempt, start its ranks and, on the run's first host, start its rendezvous.

        On any other host, first check that this host can connect to the rendezvous.

        Raises:
            PoolError: This host cannot reach the rendezvous.
        """
        spec, own_rendezvous = self.spec, self._rendezvous
        attempt = self._attempt_type.create(
            self.local, self.host_address, self.folder, self.emit, self._on_message
        )
        self._attempt = attempt
        self._readers.append(attempt.reader)  # children that outlive the attempt may keep writing
        port = spec.master_port
        if own_rendezvous is None:
            rendezvous.check_reachable(spec.master_addr, port)
        else:
            port = own_rendezvous.port
        attempt.start(port)
        # Start the rendezvous after the ranks. If a rank connects earlier, its connection waits in
        # the backlog of the listening socket.
        if own_rendezvous is not None:
            own_rendezvous.start()
        return attempt

    def _follow_attempt(self, attempt: Attempt) -> None:
        """Check the ranks regularly, until the next attempt is requested or the run ends.

        At most `POLL_S` seconds pass between two checks. Before each check, this method kills the
        rendezvous's process if SIGSTOP has suspended the rendezvous's process for too long. It does
        not check the ranks if the attempt has ended on this host, or if `_checks_ranks` returns
        False.
        """
        while self._next is None and not self._is_over:
            connection.wait([*attempt.sentinels, self.wakeup.fileno()], POLL_S)
            self.wakeup.clear()
            if self._rendezvous is not None:
                self._rendezvous.kill_if_stopped()
            if attempt.ended is None and self._checks_ranks():
                self._check(attempt)

    def _check(self, attempt: Attempt) -> None:
        attempt.check(self._deadline.at, self.stopped_at)

    def _checks_ranks(self) -> bool:
        """Return whether this runner itself must check the ranks: always True for a run.

        `HostSession` overrides this method, because `HostCell` checks the ranks while a cell runs.
        """
        return True

    def _prepare_attempt(self, next_attempt: _NextAttempt) -> None:
        """Replace the rendezvous, and prepare this host's files for the next attempt.

        Also removes the state of the last attempt's ranks: the clocks of `--timeout` and `--hang`
        run again if they were paused, and no rank counts as attached to debugpy. At the end, even
        after an error, sets the event `is_clean`, for which `start_next_attempt` waits.
        """
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._rendezvous = next_attempt.rendezvous
        self._pause(False)  # the rank that asked the user is gone
        self._debugged.clear()
        try:
            self._local = self._files.prepare_next_attempt(next_attempt.spec)
            self.spec = next_attempt.spec
        finally:
            next_attempt.is_clean.set()

    def _on_message(self, rank: int, message: Event | RankMessage | StoreMessage) -> None:
        """Record a rank's message in the rank's state, and send it to the pool if it is an event.

        Called by the thread of the `PipeReader`. Further effects depend on the type of the message:

        - Heartbeat: if a client of debugpy was attached or detached since the last heartbeat, send
          the event `DebuggerChanged` to the pool.
        - Any other `RankMessage` except a stack report: wake the share's thread, which then checks
          the ranks.
        - `StoreMessage`, a message about the project store: record the message for the receipt.
        """
        if self._attempt is not None:
            self._attempt.ranks.record_message(rank, message)
        if isinstance(message, RankBeat) and message.is_debugged != (rank in self._debugged):
            self._debugged ^= {rank}
            self.emit(DebuggerChanged(rank=rank, is_attached=message.is_debugged))
        if isinstance(message, RankMessage):
            if not isinstance(message, RankBeat | RankStackSample):  # cannot change a verdict
                self.wakeup.set()
        elif isinstance(message, StoreMessage):
            self._files.record(rank, message)
        else:
            if isinstance(message, RankEvent):
                message.rank = rank
            self.emit(message)

    def _fail(self, error: Exception) -> None:
        self._error_end = "FAILED", [host_failure(self.host, error)]

    def _record_files_error(self, error: Exception) -> None:
        failure = host_failure(self.host, error)
        self.emit(RankFailure(failure=failure))
        self._error_end = "LOST", [failure]

    def _outcome(self) -> tuple[str, list[Failure]]:
        ended = self._attempt.ended if self._attempt is not None else None
        return self._error_end or ended or ("INTERRUPTED", [])

    def _end_steps(self) -> tuple[Callable[[], None], ...]:
        self._is_ending = True
        if self._next is not None:  # release `start_next_attempt`, which waits
            self._next.is_clean.set()
        parts = self._attempt, self._rendezvous, *self._readers
        return tuple(part.close for part in parts if part is not None)


def _rendezvous_of(spec: ShareSpec) -> Rendezvous | None:
    """Return a new rendezvous for an attempt's ranks if this is the run's first host; else None."""
    return None if spec.host_rank else Rendezvous(spec.master_addr)


FETCHER = "taas_magic.host.fetcher.fetcher_main"
_EXIT_S = 0.5
_END_S = 5.0
"""Seconds that fetchers may take to end after the agent's request to end. Then they are killed."""

_ENDLESS = 1 << 62


def prefill_minimums(prefill: Prefill | None) -> tuple[int, int]:
    """Convert `--prefill` to the minimum amount of data that fetchers prepare before ranks start.

    Returns:
        A minimum number of batches, and a minimum number of bytes; 0 means no minimum. At least one
        number is 0. Without `--prefill`, both are 0. For `--prefill all`, the number of batches is
        larger than in any dataset.
    """
    if prefill is None:
        return 0, 0
    if prefill.unit == "bytes":
        return 0, prefill.amount
    return (prefill.amount if prefill.unit == "batches" else _ENDLESS), 0


@dataclass
class _RunningFetcher:
    """A fetcher that was started and may still run.

    Attributes:
        why: Reason of the fetcher's failure; "" if there is no failure, or no known reason.
        has_noted_writes: Whether a note has told the user that the fetcher's writes to the project
            store are not saved.
    """

    spec: FetcherSpec
    process: Any
    why: str = ""
    has_noted_writes: bool = False


class HostFetchers(HostShare):
    """Runner of one run's fetchers on this host. Reports the end of each fetcher to the pool."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._running: dict[connection.Connection, _RunningFetcher] = {}
        self._watchdog = StoppedProcessWatchdog()

    def stacks(self) -> RunStacks:
        """Return the stacks of the fetchers and their workers. Blocks for some seconds."""
        found = []
        for one in list(self._running.values()):
            assert one.spec.stacks is not None
            sample = stacks.sample_fetcher(one.process.pid, one.spec.stacks)
            found.append(sample.report(FetcherStack, fetcher=one.spec.plan.number))
        return RunStacks(fetchers=found)

    def update_store_copy(self) -> str:
        """Copy changed files of the project store to this host before a cell of a session.

        Returns:
            "", or the reason why the files could not be copied. If the fetchers have ended, or have
            been asked to end, always "".
        """
        try:
            self._files.update_store_copy()
        except (TaasError, OSError) as error:
            if self.stopped_at is None and self._running:
                return f"the fetchers on host {self.host} cannot read changed files: {error}"
        return ""

    def _run_processes(self) -> None:
        """Start the fetchers, and forward their messages to the pool until all fetchers have ended.

        While fetchers run, this method reports each fetcher that has ended to the pool, and kills
        fetchers that SIGSTOP has suspended for too long. If a fetcher writes to the project store,
        a note tells the user that the file is not saved; a fetcher causes at most one such note.

        If the share must end, this method asks all fetchers to end, and waits at most `_END_S`
        seconds. The caller kills fetchers that still run (`_end_steps`).
        """
        for spec in self._specs():
            control, theirs = connection.Pipe()
            process = forkserver.start_process(FETCHER, spec, theirs)
            theirs.close()
            self._running[control] = _RunningFetcher(spec, process)
        until: float | None = None
        while self._running and (until is None or time.monotonic() < until):
            if self.stopped_at is not None and until is None:
                until = time.monotonic() + _END_S
                for control in self._running:
                    with contextlib.suppress(OSError):  # the fetcher has ended
                        control.send("end")
            for control in self._forward_messages():
                self._end_fetcher(control)
            for one in self._running.values():
                self._check_for_writes(one)
            self._watchdog.kill_stopped(one.process.pid for one in self._running.values())

    def _specs(self) -> Iterator[FetcherSpec]:
        """Yield the description of each fetcher that the run's plan has on this host.

        Fetchers that serve the same loaders are a group. The amount of `--prefill` is divided
        equally among the groups. A fetcher gets an address for TCP connections only if batches
        travel between hosts.
        """
        share, folder = self.local, self.folder
        served = service.read_settings(share.folder.path)
        data = share.plan.data
        assert data is not None and served is not None
        groups = len(data.fetchers) // served.fetchers
        fill_batches, fill_bytes = (-(-it // groups) for it in prefill_minimums(share.plan.prefill))
        environ = {**share.environ, RUN_TOKEN: self.spec.share_id}
        for plan in data.fetchers_on(self.spec.host_rank):
            yield FetcherSpec(
                plan,
                served,
                share.folder.path,
                data.cores,
                host=self.host,
                # "" opens no port. Ranks on the same host need none: they connect by Unix sockets.
                listen=self.host_address.address if data.crosses else "",
                fill_batches=fill_batches,
                fill_bytes=fill_bytes,
                setting=ProcessSpec(share, folder, environ, guard.strongest_protection()),
                stacks=folder / f"{plan.number}.stacks",
            )

    def _fail(self, error: Exception) -> None:
        """Report all fetchers of this host as failed, so that no rank waits for them.

        Sends a note to the user, and one event for each planned fetcher.
        """
        said = error if isinstance(error, TaasError) else f"{type(error).__name__}: {error}"
        why = f"host {self.host} has no fetchers: {said}"
        self.note(why)
        data = self.spec.plan.data
        assert data is not None
        for plan in data.fetchers_on(self.spec.host_rank):
            self.emit(fetcher_failed(self.spec.plan, plan, why))

    def _record_files_error(self, error: Exception) -> None:
        self.note(f"the fetchers' logs stay on host {self.host}: {error}")

    def _path_prefix(self) -> Path:
        return (
            self.local.folder.path / "logs" / "fetcher-" if self._local else super()._path_prefix()
        )

    def _end_steps(self) -> tuple[Callable[[], None], ...]:
        return tuple(partial(self._end_fetcher, control) for control in self._running)

    def _forward_messages(self) -> list[connection.Connection]:
        """Wait up to `POLL_S` seconds for messages of fetchers, and forward them to the pool.

        The wait also ends when another thread sets `wakeup`, which this method clears. Forwards at
        most one message of each fetcher. A `FetcherFailed` is not forwarded, but its reason is
        stored for the report of the fetcher's end.

        Returns:
            The agent's connections to the fetchers that have ended.
        """
        ended = []
        ready = connection.wait([*self._running, self.wakeup.fileno()], POLL_S)
        self.wakeup.clear()
        for control in ready:
            if not isinstance(control, connection.Connection):
                continue
            try:
                said = messages.decode_fetcher_message(control.recv_bytes())
            except (EOFError, OSError):
                ended.append(control)
                continue
            if isinstance(said, FetcherFailed):
                self._running[control].why = said.why
            else:
                self.emit(said)
        return ended

    def _check_for_writes(self, one: _RunningFetcher) -> None:
        kept_out = self.folder / str(one.spec.plan.number) / "store"
        if one.has_noted_writes or not kept_out.exists():
            return
        if names := sorted(os.listdir(kept_out)):
            one.has_noted_writes = True
            self.note(f"not saved (fetchers do not write the project store): {names[0]}")

    def _end_fetcher(self, control: connection.Connection) -> None:
        """Wait up to `_EXIT_S` seconds for a fetcher to exit, else kill it; then report its end.

        The report to the pool is the event `FetcherEnded`. Unless the share is being stopped, this
        event describes a failure, and a note tells the user how the fetcher ended.

        Args:
            control: The agent's connection to the fetcher.
        """
        one = self._running.pop(control)
        control.close()
        one.process.join(_EXIT_S)
        one.process.kill()
        one.process.join()
        ended = FetcherEnded(number=one.spec.plan.number)
        if self.stopped_at is None:
            text = self._how_one_ended(one)
            self.note(text)
            ended = fetcher_failed(self.spec.plan, one.spec.plan, text)
        forkserver.close_process(one.process)
        self.emit(ended)

    def _how_one_ended(self, one: _RunningFetcher) -> str:
        code = one.process.exitcode
        why = f"it {STOPPED}" if one.process.pid in self._watchdog.killed else one.why
        how = why or (f"killed by {signal_name(code)}" if code < 0 else f"exit code {code}")
        log = f"logs/fetcher-{one.spec.plan.number}.log"
        return f"{one.spec.who} ended: {how} (see {log} of the run)"
