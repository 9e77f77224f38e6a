"""Run a session on this host: ranks that stay after a cell, and the cells that they run.

Runs in the agent. A session is a run whose ranks wait for cells at a prompt (`host/prompt.py`).
Each cell is a run, too: `HostCell` starts no processes, but sends the cell to the session's ranks.
The run of a cell is over when all ranks are back at their prompt.

While a cell runs, `HostCell` checks the ranks. Between cells, `HostSession` checks the ranks.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any

from msgspec import structs

from taas_magic.errors import PoolError
from taas_magic.host import link
from taas_magic.host.files import HostFiles
from taas_magic.host.host_run import Attempt, HostRun
from taas_magic.host.spec import ShareSpec
from taas_magic.host.system import end_all
from taas_magic.host.watch import TRACEBACK_WAIT_S, RankState, Verdict
from taas_magic.messages import (
    AnswerInput,
    CellOrder,
    Failure,
    InputRequested,
    Note,
    RanksKilled,
)

CUT_AFTER_S = 1.0
"""Seconds from an interrupt until the agent asks ranks to cut their connections to other ranks.

The agent repeats the request every `CUT_AFTER_S` seconds. Without the request, a collective of gloo
would continue to wait, because it waits in C++ code, which SIGINT does not interrupt. Without
connections, the collective raises an exception.
"""

RETURN_S = 10.0
"""Maximum seconds from an interrupt until a rank is back at its prompt. A slower rank is killed.

If all ranks that still run the cell have raised an exception, the maximum is `TRACEBACK_WAIT_S`
instead.
"""

CELL_END_S = 20.0
"""Maximum seconds that an ending session waits for the end of its current cell."""

START_S = 3600.0
"""Maximum seconds that a cell waits until its session has started the ranks.

The limit is long because a session first copies the project store to a host that does not share it.
"""

_CHECK_S = 0.02


class _AttemptOfSession(Attempt):
    """Base class of `SessionAttempt` and `CellAttempt`.

    Attributes:
        killed: By rank, the reason why taas-magic killed the rank. The session and its cells share
            this dict.
        cut: Ranks whose process group was broken by an interrupt in an earlier cell, and that have
            created no new process group since. The session and its cells share this set.
    """

    def __init__(
        self,
        *args: Any,
        killed: dict[int, str] | None = None,
        cut: set[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.killed = {} if killed is None else killed
        self.cut = set() if cut is None else cut

    def collect_failures(self, verdict: Verdict) -> list[Failure]:
        """Return the failures of this host's ranks, as `Attempt.collect_failures` does.

        If taas-magic itself killed a rank, the field `advice` of the rank's failure says why. If a
        collective failed because its process group was broken in an earlier cell, `advice` says so.
        """
        new = {state.rank for state in self.ranks.states() if state.has_new_group}
        has_broken_group = bool(self.cut - new)
        return [
            structs.replace(failure, advice=self._advice(failure, has_broken_group))
            for failure in super().collect_failures(verdict)
        ]

    def _advice(self, failure: Failure, has_broken_group: bool) -> str:
        if failure.rank in self.killed:
            return self.killed[failure.rank]
        if failure.consequence and has_broken_group:
            return (
                "the process group was interrupted in a collective of an earlier cell: "
                f"{self._repair_text()}"
            )
        return failure.advice

    def _repair_text(self) -> str:
        """Return a sentence that says how the user can repair a broken process group."""
        return (
            "call dist.destroy_process_group() and dist.init_process_group() on all ranks before "
            f"the next collective, or `%taas restart {self._spec.plan.session}`"
        )


class SessionAttempt(_AttemptOfSession):
    """The ranks of a session on this host, from the session's start to its end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.usage.close()  # the cells report what the ranks use
        self._was_told_to_end = False
        # Keep the pipes open: a pipe that no process has open loses its content.
        files = [link.rank_file(self.folder, rank, "cells") for rank in self._spec.ranks]
        self._pipes = [os.open(file, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC) for file in files]

    def close(self) -> None:
        """End the remaining ranks, and close the pipes by which the ranks receive cells."""
        super().close()
        while self._pipes:
            os.close(self._pipes.pop())

    def _interrupt(self, since: float) -> None:
        """Send each rank the order to end, at the first call. Later calls do nothing.

        A rank reads the order, and ends, when the rank is back at its prompt. `since` is not used.
        """
        if not self._was_told_to_end:
            self._was_told_to_end = True
            for rank in self._spec.ranks:
                link.send_cell_order(self.folder, rank, CellOrder(number=0))


class CellAttempt(_AttemptOfSession):
    """The execution of one cell on a session's ranks of this host.

    A rank has ended the cell when the rank is back at its prompt. The rank's process does not end.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._interrupted_at: float | None = None
        self._cut_at = 0.0
        self._drained: set[int] = set()

    def start(self, port: int) -> None:
        """Report the process ids of this host's ranks to the pool, then send each rank the cell.

        The order to a rank says whether the rank takes part in the cell, and whether its displays
        are shown.

        Args:
            port: Not used, because the ranks of a session are running already.
        """
        spec = self._spec
        self._report_started()
        for rank in spec.ranks:
            cell = CellOrder(
                number=spec.run.cell_number,
                run_dir=self._share.run_dir,
                takes_part=rank in spec.plan.working_ranks,
                shows=spec.plan.shows_displays(rank),
                out=list(spec.plan.out),
                ranks=list(spec.plan.ranks),
                colors=spec.run.origin.colors,
            )
            link.send_cell_order(self.folder, rank, cell)

    def check(self, deadline: float | None, interrupted_at: float | None) -> None:
        """Read the remaining output of ranks that are back at their prompt; then check all ranks.

        The output is read first, because the cell's log must be complete when the cell ends. The
        cell ends on this host if all ranks are back at their prompt. The cell also ends after a
        failure, an interrupt, or the time of `--timeout`.

        Args:
            deadline: Time at which `--timeout` ends the cell. None without `--timeout`, or while a
                rank waits for the user's input.
            interrupted_at: Time at which the user interrupted the cell. Minus infinity to kill the
                ranks at once. None if there was no interrupt.
        """
        for state in self.ranks.states():
            if state.has_returned and state.rank not in self._drained:
                self._drained.add(state.rank)
                self.reader.drain(state.rank)
        super().check(deadline, interrupted_at)

    def close(self) -> None:
        """Interrupt the ranks that still run the cell; wait until all are back at their prompt.

        Ranks that do not end the cell in time are killed.
        """
        self.usage.close()
        self._end_ranks(0.0)

    @property
    def is_interrupted(self) -> bool:
        """Whether the agent has interrupted the ranks in this cell."""
        return self._interrupted_at is not None

    def record_cut_groups(self) -> None:
        """Update `cut` after the cell. If ranks have cut their connections, send the user a note.

        Ranks cut their connections when an interrupt must end a collective. The note says that the
        user must create a new process group or restart the session.
        """
        states = self.ranks.states()
        self.cut -= {state.rank for state in states if state.has_new_group}
        if cut := [state.rank for state in states if state.was_cut]:
            self.cut |= {*cut}
            ranks = f"rank{'s' * (len(cut) > 1)} {', '.join(map(str, cut))}"
            why = f"the process group was interrupted in a collective ({ranks})"
            self._emit(Note(text=f"{why}: {self._repair_text()}"))

    def _interrupt(self, since: float) -> None:
        """Send SIGINT, once, to the ranks that run the cell. Store the time of the first interrupt.

        If `CUT_AFTER_S` seconds have passed since the interrupt, also ask the ranks that still run
        the cell to cut their connections to other ranks (`CUT_CONNECTIONS`). Ask at most once every
        `CUT_AFTER_S` seconds, even if this method is called more often.

        Args:
            since: Time of the interrupt, in seconds of the monotonic clock.
        """
        self.ranks.interrupt()
        now = time.monotonic()
        self._interrupted_at = since if self._interrupted_at is None else self._interrupted_at
        if now - since >= CUT_AFTER_S and now - self._cut_at >= CUT_AFTER_S:
            self._cut_at = now
            for state in self._ranks_in_cell():
                link.request_connection_cut(self.folder, state.rank, self._spec.run.cell_number)

    def _end_ranks(self, grace_s: float) -> None:
        """Interrupt the ranks that still run the cell. Kill ranks that do not end the cell in time.

        The wait ends when no rank runs the cell any more, or `_return_limit_s()` seconds after the
        first interrupt. If the ranks were not interrupted before, this call is the first interrupt.
        During the wait, this method repeats `_interrupt`, and records which ranks' processes have
        ended. Ranks that taas-magic has killed before (`killed`) are not killed again.

        Args:
            grace_s: Not used.
        """
        if self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
        while (
            self._ranks_in_cell()
            and time.monotonic() < self._interrupted_at + self._return_limit_s()
        ):
            self._interrupt(self._interrupted_at)
            connection.wait(self.sentinels, _CHECK_S)
            self._poll_ends()
        if lost := [state for state in self._ranks_in_cell() if state.rank not in self.killed]:
            self._kill(lost)

    def _return_limit_s(self) -> float:
        """Return the maximum seconds from an interrupt until the ranks are back at their prompt.

        The limit is `RETURN_S`. If all ranks that still run the cell have raised an exception, the
        limit is `TRACEBACK_WAIT_S`, because these ranks need more time to format their tracebacks.
        """
        has_heard = all(state.failed_at is not None for state in self._ranks_in_cell())
        return TRACEBACK_WAIT_S if has_heard else RETURN_S

    def _kill(self, lost: list[RankState]) -> None:
        """Kill the ranks that did not end the cell in time; tell the pool, and tell the user why.

        The reason is stored in `killed`, from which `collect_failures` takes it. The event
        `RanksKilled` tells the pool. A note tells the user the reason, and that the session ends.

        Args:
            lost: States of the ranks to kill.
        """
        limit_s = self._return_limit_s()
        end_all([state.process for state in lost if state.process is not None], grace_s=0)
        why = f"taas-magic killed it: a cell did not end within {limit_s:.0f} s of the interrupt"
        self.killed.update({state.rank: why for state in lost})
        self._emit(RanksKilled(ranks=[state.rank for state in lost]))
        ranks = ", ".join(str(state.rank) for state in lost)
        killed = f"ranks {ranks} were killed" if len(lost) > 1 else f"rank {ranks} was killed"
        text = (
            f"host {self._host_address.host}: {killed}, because the cell did not end within "
            f"{limit_s:.0f} s of the interrupt. The session ends"
        )
        self._emit(Note(text=text))

    def _ranks_in_cell(self) -> list[RankState]:
        return [state for state in self.ranks.states() if not state.is_over]


class HostSession(HostRun):
    """Runner of a session's ranks on this host. At most one cell uses the ranks at a time."""

    _attempt_type = SessionAttempt

    def __init__(self, spec: ShareSpec, *about: Any) -> None:
        self._cell: ShareSpec | None = None
        self._cell_over = threading.Event()
        self._cell_over.set()
        self._cell_lock = threading.Lock()
        self._started = threading.Event()
        super().__init__(spec, *about)

    @property
    def files(self) -> HostFiles:
        """The object that copies the session's files to and from this host.

        If this host does not share the project store, the session's cells use this object's mirror.
        """
        return self._files

    def begin_cell(self, cell: ShareSpec) -> None:
        """Wait up to `START_S` seconds until the ranks have started, then reserve them for a cell.

        Until `end_cell`, the cell's `HostCell` checks the ranks, and the session does not.

        Raises:
            PoolError: The ranks have not started in time, the session has ended or is ending, or
                another cell uses the ranks.
        """
        if not self._started.wait(START_S):
            raise PoolError(
                f"session {self.spec.plan.session} is still starting on host {self.host}; run the "
                "cell again later"
            )
        with self._cell_lock:
            if self._attempt is None or self._attempt.ended is not None or self._is_over:
                raise PoolError(f"session {self.spec.plan.session} has ended on host {self.host}")
            if self._cell is not None:
                other = self._cell.plan.run_id
                raise PoolError(f"session {self.spec.plan.session} still runs cell {other}")
            self._cell = cell
            self._cell_over.clear()

    def end_cell(self) -> None:
        """End a cell's reservation of the ranks.

        Until the next cell, the ranks' output and messages go to the session's own run, unless the
        session is over. Also wake the session's thread, and end the wait of `_await_cell`.
        """
        with self._cell_lock:
            self._cell = None
            if self._attempt is not None and not self._is_over:
                self._attempt.reader.redirect_to(self.local.folder, self.emit, self._on_message)
        self._cell_over.set()
        self.wakeup.set()

    def attempt_of(self, cell: "HostCell") -> CellAttempt:
        """Return a new attempt that can run `cell` on the session's ranks.

        First directs all further output and messages of the ranks to the cell's run. The attempt
        uses the session's pipes, processes and records of killed and cut ranks.
        """
        ours = self._attempt
        assert isinstance(ours, SessionAttempt)
        ours.reader.redirect_to(cell.local.folder, cell.emit, cell.handle_message)
        return CellAttempt(
            cell.local,
            self.host_address,
            cell.emit,
            folder=ours.folder,
            reader=ours.reader,
            processes=ours.processes,
            killed=ours.killed,
            cut=ours.cut,
        )

    def _start_ranks(self) -> Attempt:
        attempt = super()._start_ranks()
        # Each cell may have fetchers. The ranks read the addresses of all fetchers in one folder.
        self.set_address_folder(attempt.folder)
        self._started.set()
        return attempt

    def _checks_ranks(self) -> bool:
        """Return whether this session must check the ranks itself.

        True if no cell is running, if the session is being ended, or if the ranks' key-value store
        has ended. In the last case, the session must fail at once, because `init_process_group` in
        a running cell would wait until torch's timeout.
        """
        return self._cell is None or self.stopped_at is not None or bool(self._why_store_ended())

    def _why_store_ended(self) -> str:
        return self._rendezvous.why_ended() if self._rendezvous is not None else ""

    def _check(self, attempt: Attempt) -> None:
        """Check the ranks, and the process that serves their key-value store.

        Raises:
            PoolError: The process of the key-value store has ended, although no `Halt` has arrived
                for the session.
        """
        why = self._why_store_ended()
        if why and self.stopped_at is None:
            raise PoolError(f"{why}, so the ranks cannot form another process group")
        super()._check(attempt)

    def _end_steps(self) -> tuple[Callable[[], None], ...]:
        self._started.set()
        first, *others = super()._end_steps() or (lambda: None,)
        return (first, self._await_cell, *others)

    def _await_cell(self) -> None:
        """Refuse further cells, and wait up to `CELL_END_S` for the end of the current cell.

        The cell uses the session's pipes, so the pipes must stay open until the cell has ended.
        """
        with self._cell_lock:
            self._is_over = True
        self._cell_over.wait(CELL_END_S)


class HostCell(HostRun):
    """Runner of one cell on this host. The cell runs on the ranks of its session.

    Args:
        session: The session on this host. The constructor reserves the session's ranks.
        *about: The other arguments of `HostShare`, in the same order.

    Raises:
        PoolError: The session's ranks have not started in time, the session has ended or is ending,
            or it runs another cell.
    """

    def __init__(self, spec: ShareSpec, session: HostSession, *about: Any) -> None:
        self._session = session
        session.begin_cell(spec)  # first, because it may raise an exception
        try:
            super().__init__(spec, *about)
        except BaseException:
            session.end_cell()
            raise
        self._files.share_mirror(session.files)
        self.port = session.port or 1  # not used, because the ranks need no new rendezvous

    def handle_message(self, rank: int, message: Any) -> None:
        """Record or forward a rank's message. Called by the thread of the `PipeReader`.

        If an interrupted rank requests input, this method answers at once with the end of the
        input, and does not forward the request. Otherwise, an interrupted `pdb` would ask the user
        for the next line instead of ending.
        """
        attempt = self._attempt
        if (
            isinstance(message, InputRequested)
            and isinstance(attempt, CellAttempt)
            and attempt.is_interrupted
        ):
            answer = AnswerInput(self.spec.plan.run_id, rank, message.number)
            link.answer_input(attempt.folder, answer)
        else:
            self._on_message(rank, message)

    def _start_ranks(self) -> Attempt:
        self._attempt = attempt = self._session.attempt_of(self)
        attempt.start(0)
        return attempt

    def _end_leftovers(self) -> None:
        """Do nothing. Processes that the cell has started belong to the session and end with it."""

    def _end_steps(self) -> tuple[Callable[[], None], ...]:
        return (*self._rank_end_steps(), self._session.end_cell)

    def _rank_end_steps(self) -> Iterator[Callable[[], None]]:
        if isinstance(self._attempt, CellAttempt):
            yield self._attempt.close
            yield self._attempt.record_cut_groups
