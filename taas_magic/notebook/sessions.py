"""The sessions of this kernel. The ranks of a session keep their variables from cell to cell.

For the pool, a session is a run that allocates hosts and starts ranks: the session's own run. Each
cell of the session is a further run on these ranks. This module keeps the kernel's sessions by
name. It records which variables the ranks have (`RankVariables`), notices when the ranks have
ended, and checks the flags of the session's cells.
"""

import re
import shlex
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec import structs

from taas_magic.capture.payload import Payload
from taas_magic.capture.session_variables import RankVariables, VariablesToSend
from taas_magic.config import did_you_mean, working_folder
from taas_magic.display.failure import headline
from taas_magic.display.log import rank_ranges
from taas_magic.errors import PoolError, UsageError, interrupted, listed
from taas_magic.host.spec import Origin, RunSpec
from taas_magic.journal.folder import RunContext, RunFolder, state_dir
from taas_magic.messages import (
    CellNames,
    Detach,
    Detached,
    Event,
    Failure,
    ForwardEvents,
    Lines,
    LinesDropped,
    Note,
    PrepareFetchers,
    RanksKilled,
    Request,
    RunEnded,
    from_json,
    to_json,
)
from taas_magic.notebook import pools, runs
from taas_magic.notebook.run import BackgroundCall, Interrupts, RunDriver, RunFetchers
from taas_magic.notebook.runs import Run
from taas_magic.plan import DataPlan, Flags, Plan, new_run_id
from taas_magic.pool.client import PoolConnection
from taas_magic.shared_files import replace_atomically

END_S = 40.0
"""Maximum seconds to wait for the end of a session's ranks after the user ended the session."""

DEATH_SEEN_S = 15.0
"""Maximum seconds to wait, after a rank's death, for the report that its session has ended."""

ENDED_BY_COMMAND = "a command such as `%taas end` or `%taas down` ended it"
"""Reason that `Session.why_ended` returns for the session's end if it knows no other reason."""

FIXED = (
    "gpus",
    "pool",
    "env",
    "store",
    "store_writes",
    "shared_writes",
    "uneven_hosts",
    "detach",
)
"""Fields of `Flags` whose values in a session's first cell hold for all its cells."""

NOT_IN_SESSIONS = ("max_restarts", "profile", "units", "prefill")
"""Fields of `Flags` that cells of a session must not set."""

_T = TypeVar("_T")
_NO_NAME = re.compile(r"name '(\w+)' is not defined")
_MAX_LISTED = 12
_KEPT_OUTPUT = 1_000
_END_POLL_S = 0.2
_sessions: dict[str, "Session"] = {}


class Session:
    """One session of this kernel: its flags, its ranks, and the variables of the ranks.

    Attributes:
        flags: Flags of the session's first cell. `%taas detach` later sets `detach`.
        names: Record of the variables that the session's ranks have.
        failed_rank: Number of the rank that failed first in the last failed cell; None if no cell
            has failed.
        plan: Plan of the session's own run, which starts the ranks; None before the first cell.
        hosts: Names of the hosts that run the ranks. In a session that replaces an ended session,
            before the new ranks start: the hosts of the old ranks, which the pool prefers.
        running_cell: Run id of the cell that this kernel runs in the session now; "" for none.
        has_unknown_names: Whether this kernel has taken the session over and does not know yet
            which variables the ranks have.
    """

    def __init__(self, flags: Flags) -> None:
        self.name, self.flags, self.names = flags.session, flags, RankVariables()
        self.plan: Plan | None = None
        self.failed_rank: int | None = None
        self.hosts: tuple[str, ...] = ()
        self.running_cell = ""
        self.has_unknown_names = False
        self._connection: PoolConnection | None = None
        self._cells = self._n_fetchers = 0
        self._loaded: set[int] = set()
        self._changes: list[CellNames] = []
        self._ranks_of: dict[str, set[int]] = {}
        """Ranks that have a variable, by the variable's name.

        If cells of this kernel have neither assigned nor deleted a variable since its value was
        sent, all ranks have it, and this dict lacks its name.
        """

        self._left_cell: tuple[RunDriver, VariablesToSend] | None = None
        """The cell that the user has left by interrupts, until its names are recorded."""

        self._notes: list[str] = []
        self._output: deque[Lines | LinesDropped] = deque(maxlen=_KEPT_OUTPUT)
        """Lines that threads of the ranks printed since the last cell."""

        self._ended: RunEnded | None = None
        self._end_event = threading.Event()
        self._is_wanted, self._was_taken_over = True, False
        self._has_lost_ranks = False
        self._cell_error = self._why_died = ""
        """Error of the last cell, and error of the cell in which ranks of the session ended."""

        self._last_used_at = time.monotonic()
        self._fetchers: dict[int, RunFetchers] = {}
        """Fetchers of the session's loaders, by the number of the cell that sent the loaders."""

        self._preparing: list[BackgroundCall[str | None]] = []
        self._closing: list[threading.Thread] = []

    @property
    def idle_s(self) -> float:
        """Seconds since the session's last cell ended, or since this kernel got the session."""
        return time.monotonic() - self._last_used_at

    @property
    def run_id(self) -> str:
        """Id of the session's own run, which started the ranks."""
        assert self.plan is not None
        return self.plan.run_id

    @property
    def connection(self) -> PoolConnection:
        """Connection to the process of the ranks' pool. It exists after `start` or `take_over`."""
        assert self._connection is not None
        return self._connection

    @property
    def is_detached(self) -> bool:
        """Whether the ranks stay if this kernel ends."""
        return self.flags.detach

    @property
    def is_started(self) -> bool:
        """Whether the session's ranks were started."""
        return self._connection is not None

    @property
    def has_ended(self) -> bool:
        """Whether the session has ended in this kernel: its ranks were started and are gone.

        Also True if another kernel has taken the session over. If the connection to the pool's
        process has ended, this kernel counts the ranks as gone. In this case, reading this property
        also records the session's end, and starts a thread that ends the session's fetchers.
        """
        connection = self._connection
        if self._ended is None and connection is not None and connection.has_ended:
            self._ended = RunEnded(state="LOST", why=connection.why)
            self._close_fetchers(())
        return self._ended is not None

    def why_ended(self) -> str:
        """Return one line with the reason why the session has ended.

        The line comes from the first item of this list that applies:

        - If the processes of ranks ended in a failed cell, the line is the cell's error.
        - If a rank or a host failed, the line describes the failure that came first.
        - If another kernel or a terminal has taken the session over, the line says so.
        - If the pool's process gave a reason, or the connection to this process ended, the line is
          this reason.
        - If the session has notes for the user, the line is the newest note.
        - Otherwise, the line is `ENDED_BY_COMMAND`.
        """
        ended = self._ended
        if ended is not None and ended.first is not None:
            # The session's own run checks the ranks only after the cell. So this run does not know
            # which rank ended first.
            is_end_of_rank = ended.first.how in ("signal", "exit", "end")
            return (self._why_died if is_end_of_rank else "") or headline(ended.first)
        if self._was_taken_over:
            return "another kernel or a terminal has taken it over"
        if ended is not None and ended.why:
            return ended.why
        return self._notes[-1] if self._notes else ENDED_BY_COMMAND

    def lost_names(self) -> str:
        """Return the names of the variables that are lost with the ended ranks, as text.

        Leave out names that begin with `_`. If too many names are left, list only some. Return
        "none" if no name is left.
        """
        names = sorted(name for name in self.names.owned if not name.startswith("_"))
        return listed(names, _MAX_LISTED) or "none"

    def with_session_flags(self, flags: Flags) -> Flags:
        """Complete a cell's flags by the flags of the session's first cell, and return the result.

        The flags in `FIXED`, such as `--gpus`, always have the values of the first cell. `--cpus`
        and `--data-pool` have the first cell's values by default. A cell may give these two flags
        new values, which apply to the loaders that this cell sends.

        Raises:
            UsageError: The cell gives a flag in `FIXED` a value that differs from the first cell's.
        """
        mine, nothing = self.flags, Flags(gpus=0)
        for name in FIXED:
            asked, flag = getattr(flags, name), _flag(name)
            if asked not in (getattr(nothing, name), getattr(mine, name)):
                words = shlex.join(_flag_words(mine, name))
                has = f"with {words}" if words else f"without {flag}"
                if name == "gpus":
                    has = f"with {mine.gpus} rank{'s' * (mine.gpus > 1)}"
                change = f"end the session first (%taas end {self.name})"
                if name == "detach":
                    change = f"detach the session: %taas detach {self.name}"
                raise UsageError(
                    f'{flag}: session "{self.name}" was started {has}. Leave {flag} out, or '
                    f"{change}"
                )
        same = {name: getattr(mine, name) for name in FIXED}
        cpus, data_pool = flags.cpus or mine.cpus, flags.data_pool or mine.data_pool
        return structs.replace(flags, **same, cpus=cpus, data_pool=data_pool)

    def begin_cell(self, plan: Plan) -> Plan:
        """Prepare the session for a new cell, and return the cell's plan on the session's ranks.

        The returned plan has the session's ranks, hosts, project store and environment variables.
        The preparation has three parts:

        - For the session's first cell, make the plan of the session's own run, which starts the
          ranks: the cell's plan with a new run id, and without options that concern only the cell.
        - Discard the ranks' reports on the last cell.
        - Begin to prepare the fetchers of earlier cells; `wait_for_fetchers` waits for the end.

        Raises:
            PoolError: The session is running a cell, which another thread of the kernel started.
        """
        if self.running_cell:
            raise PoolError(
                f'session "{self.name}" is running a cell. Wait until the cell has ended, or end '
                f"it: %taas stop {self.running_cell}"
            )
        self._loaded, self._changes = set(), []
        self._prepare_fetchers()
        if self.plan is None:
            self.plan = structs.replace(
                plan,
                run_id=new_run_id(),
                name=f"session {self.name}",
                hang_s=0.0,
                timeout_s=None,
                out=(),
                ranks=(),
                cpus=0,
                units=None,
                prefill=None,
                notes=(),
            )
        mine = self.plan
        return structs.replace(
            plan, world_size=mine.world_size, hosts=mine.hosts, store=mine.store, env=mine.env
        )

    def start(
        self,
        connection: PoolConnection,
        origin: Origin,
        cell: str,
        context: RunContext,
        idle_s: float,
        interrupts: Interrupts,
    ) -> None:
        """Start the session's ranks, wait for their start, and keep the connection to their pool.

        The session's own run starts the ranks. Before the start, create this run's folder, and
        write the run's plan, `context` and the session's flags to it. Hold the folder's lock during
        the start. If the session has the flag `--detach`, detach the run when the ranks have
        started. If the user ends the wait by two interrupts, kill ranks that start later. If the
        pool refuses the start, remove the folder.

        Args:
            connection: Connection to the process of the ranks' pool.
            origin: The notebook's settings that the ranks inherit.
            cell: Text of the cell, or of the command, that starts the session.
            context: Facts about the session's run that other processes need.
            idle_s: Seconds after which the session ends if it runs no cell.
            interrupts: The user's interrupts.

        Raises:
            PoolError: The pool has no hosts for the ranks. Or another thread of the kernel has
                replaced this session by a new one with the same name.
            KeyboardInterrupt: The user interrupted the wait twice.
        """
        assert self.plan is not None
        if _sessions[self.name] is not self:  # no command could find or end these ranks
            raise PoolError(f'another cell has started session "{self.name}"; run this cell again')
        folder = RunFolder.create(self.run_id, self.plan, cell)
        with folder.discard_on_error():
            folder.write_context(context)
            _write_flags(folder, self.flags)
        engine = connection.config.engine
        spec = RunSpec.for_pool(
            engine,
            self.plan,
            folder,
            origin,
            idle_s=idle_s,
            preferred_hosts=self.hosts,
        )

        def launch() -> None:
            try:
                self.hosts = tuple(connection.launch(spec, self._on_run_event))
            except PoolError:
                # If the pool has refused the start, no rank can start later. If the pool does not
                # respond, ranks may start later, and need the folder.
                if connection.is_ready:
                    folder.discard()
                raise
            if self.is_detached:
                connection.call(Detach(self.run_id))
            if not self._is_wanted:
                connection.halt(self.run_id, "kill")

        try:
            with folder.lock_for_launch():
                interrupts.wait_for(launch, max_interrupts=2)
        except BaseException:
            self._is_wanted = False
            raise
        self._connection = connection

    def detach(self) -> None:
        """Detach the session: its ranks outlive this kernel, and other kernels can take it over.

        Ask the pool's process to continue the session without this kernel. Then write the flag
        `--detach` to the folder of the session's own run, where other kernels read it.

        Raises:
            UsageError: The session has fetchers in another pool. Such fetchers would end with this
                kernel.
            PoolError: The pool's process does not respond, or the session has ended.
        """
        for fetchers in self._fetchers.values():
            if fetchers.pool != self.flags.pool:
                raise UsageError(self._needs_own_pool(fetchers.pool))
        if why := self.connection.call(Detach(self.run_id)):
            raise PoolError(why)
        self.flags = structs.replace(self.flags, detach=True)
        _write_flags(RunFolder(state_dir() / "runs" / self.run_id), self.flags)

    def _needs_own_pool(self, pool: str) -> str:
        return (
            f'fetchers in pool "{pool}" end with this kernel. The fetchers of a detached session '
            f"must run in the session's own pool: --data-pool {self.flags.pool}"
        )

    def take_over(self, run: Run, connection: PoolConnection) -> str:
        """Take over the ranks of a detached session into this new, empty session object.

        Store the session's plan, the number of its cells, and the number of its fetchers. From now
        on, this object receives the events of the session's own run. The names of the ranks'
        variables stay unknown until the caller asks the ranks for the names.

        Args:
            run: The session's own run, which started the ranks.
            connection: Connection to the process of the ranks' pool.

        Returns:
            Run id of the running cell. If no cell is running, run id of the newest cell that
            continued after its kernel was gone. "" if there is no such cell either, or if a kernel
            has taken the session over since then.

        Raises:
            PoolError: The session has ended or is not detached, or the pool does not respond.
        """
        state = connection.take_over_session(run.id, self._on_run_event)
        self.plan, self._connection, self.has_unknown_names = run.plan, connection, True
        self._cells, self._n_fetchers, self.hosts = state.cells, state.fetchers, tuple(run.hosts)
        return state.cell

    def pop_output(self) -> Iterator[Lines | LinesDropped]:
        """Remove and yield the output that threads of the ranks printed since the last cell.

        The session keeps only the newest `_KEPT_OUTPUT` events with output, so older ones are lost.
        """
        while self._output:
            yield self._output.popleft()

    def number_fetchers(self, data: DataPlan | None) -> DataPlan | None:
        """Renumber the fetchers in a cell's plan, so that each number is unique in the session.

        Return the changed `data`. Return None for a cell without fetchers (`data` is None).

        Raises:
            UsageError: The session is detached, and the fetchers' pool is not the session's pool.
                Such fetchers would end with this kernel.
        """
        if data is None:
            return None
        if self.is_detached and data.pool != self.flags.pool:
            raise UsageError(self._needs_own_pool(data.pool))
        first = self._n_fetchers
        self._n_fetchers += len(data.fetchers)
        fetchers = (structs.replace(it, number=first + it.number) for it in data.fetchers)
        return structs.replace(data, fetchers=tuple(fetchers))

    def keep_fetchers(self, fetchers: RunFetchers) -> None:
        """Keep the running cell's fetchers after the cell, until no rank needs their data.

        From now on, send events of the fetchers to the journal of the session's own run.
        """
        self._fetchers[self._cells] = fetchers
        fetchers.forward_events(self.connection, self.run_id)

    def _prepare_fetchers(self) -> None:
        """Begin to prepare the fetchers of earlier cells for the cell that begins now.

        Send a `PrepareFetchers` request to the process of each pool that runs ranks or fetchers of
        the session. Background threads send the requests; `wait_for_fetchers` waits for responses.
        """
        self._preparing = []
        if not self._n_fetchers:
            return
        of_fetchers = {fetchers.connection for fetchers in self._fetchers.values()}
        for connection in {self._connection, *of_fetchers} - {None}:
            assert connection is not None
            self._preparing.append(BackgroundCall(partial(self._prepare_in_pool, connection)))

    def _prepare_in_pool(self, connection: PoolConnection, show_lines: object) -> str | None:
        return _call_if_alive(connection, PrepareFetchers(self.run_id))

    def wait_for_fetchers(self, interrupts: Interrupts) -> None:
        """Wait until the fetchers of earlier cells can read the files that the cell's ranks read.

        Raises:
            PoolError: A host could not copy the changed files of the project store.
            KeyboardInterrupt: The user interrupted the wait.
        """
        for call in self._preparing:
            if why := call.wait(interrupts):
                raise PoolError(why)

    def count_cell(self) -> int:
        """Add 1 to the number of the session's cells, and return the number of the new cell."""
        self._cells += 1
        return self._cells

    def record_event(self, event: Event) -> None:
        """Record an event of a cell if the session needs the event.

        The caller passes every event of a cell. Record only events of two types: `CellNames`, with
        the names that the cell changed on a rank; and `RanksKilled`, by which an agent reports that
        it has killed ranks.
        """
        if isinstance(event, CellNames):
            self._loaded.add(event.rank)
            self._changes.append(event)
        elif isinstance(event, RanksKilled):
            self._has_lost_ranks = True

    def record_failure(self, cell: Run) -> None:
        """Record the error of a cell that has ended, and which rank failed first, if any."""
        has_failed = cell.failed_rank is not None
        self._cell_error = cell.error if has_failed else ""
        if has_failed:
            self.failed_rank = cell.failed_rank

    def end_cell(self, driver: RunDriver, captured: Payload, *, counts: bool = True) -> None:
        """Record which names the ranks have after a cell; end fetchers that no rank needs any more.

        If the user has left the cell by interrupts before the cell has ended, only keep the cell
        for `finish_left_cell`. Otherwise, the steps are:

        - If all ranks have loaded the variables that the kernel sent for the cell, record the names
          of these variables.
        - Record the names that the cell changed on the ranks. If ranks report different changes of
          a name, the report of the rank with the lowest number counts.
        - If all ranks have reported which fetchers they need, end the other fetchers.

        Args:
            driver: The kernel's side of the cell.
            captured: The objects that the cell sent to the ranks.
            counts: Whether the cell resets the session's idle time. False for a cell of taas-magic
                itself, such as the cell that `%taas vars` runs.
        """
        if counts:
            self._last_used_at = time.monotonic()
        choice = captured.choice
        assert choice is not None
        if driver.has_left:
            self._left_cell = driver, choice
        else:
            self._record_names(choice)

    def finish_left_cell(self) -> None:
        """Wait for the end of a cell that the user has left by interrupts, and record its names.

        If there is no such cell, do nothing.

        Raises:
            PoolError: The pool's process is silent.
            KeyboardInterrupt: The user interrupted the wait.
        """
        if self._left_cell is None:
            return
        driver, choice = self._left_cell
        with Interrupts() as interrupts:
            driver.follow_left(
                self.connection, interrupts, pools.print_line, lambda: self.has_ended
            )
        self._left_cell = None
        self._record_names(choice)

    def _record_names(self, choice: VariablesToSend) -> None:
        assert self.plan is not None
        if len(self._loaded) == self.plan.world_size:
            self.names.record_sent(choice)
            for name in choice.why:
                self._ranks_of.pop(name, None)
        self._record_changes(choice)
        if len(self._changes) == self.plan.world_size:
            self._close_fetchers({at for change in self._changes for at in change.fetched})

    def _close_fetchers(self, needed: Collection[int]) -> None:
        """End the fetchers that no rank needs any more, in a background thread.

        If another kernel has taken the session over, leave these fetchers running for that kernel.

        Args:
            needed: Numbers of the cells whose loaders the ranks still use. Their fetchers stay.
        """
        ended = [self._fetchers.pop(at) for at in list(self._fetchers) if at not in needed]
        if ended:
            thread = threading.Thread(
                target=self._end_or_detach_fetchers, args=(ended,), name="taas-fetchers"
            )
            thread.start()
            self._closing = [*(one for one in self._closing if one.is_alive()), thread]

    def _end_or_detach_fetchers(self, fetchers: list[RunFetchers]) -> None:
        if self._was_taken_over:  # the other kernel's cells use these fetchers
            for each in fetchers:
                each.detach()
            return
        events = [event for each in fetchers for event in each.end()]
        if not self.has_ended:
            _call_if_alive(self.connection, ForwardEvents(self.run_id, events))

    def _record_changes(self, choice: VariablesToSend) -> None:
        """Record the variables that a cell assigned and deleted on the ranks.

        A deleted variable stays in the record as long as one rank has it. Otherwise, the kernel
        would send the notebook's value, which would replace the value of that rank.
        """
        assert self.plan is not None
        known, ranks = self.names.all, range(self.plan.world_size)
        for said in self._changes:
            for name in {*said.assigned, *said.deleted}:
                self._ranks_of.setdefault(name, set(ranks if name in known else ()))
            for name in said.assigned:
                self._ranks_of[name].add(said.rank)
            for name in said.deleted:
                self._ranks_of[name].discard(said.rank)
        # Rank 0 comes last, so that its report on a name replaces the reports of other ranks.
        for said in sorted(self._changes, key=lambda said: -said.rank):
            deleted = [name for name in said.deleted if not self._ranks_of[name]]
            self.names.record_changes(choice, said.assigned, deleted, said.plain)

    def missing_name_hint(self, failures: Iterable[Failure]) -> str:
        """Return a hint if a rank lacked a variable that other ranks have.

        For example, a cell with `--ranks 0` assigns and deletes variables on rank 0 only. Code
        below `if rank == 0:` does so, too.

        Args:
            failures: The failures of the session's last cell.

        Returns:
            The hint, with the ranks that have the variable; "" if no rank lacked such a variable.
        """
        for failure in failures:
            missing = _NO_NAME.match(failure.message) if failure.etype == "NameError" else None
            ranks = self._ranks_of.get(missing[1]) if missing else None
            if missing and ranks and failure.rank not in ranks:
                numbers = rank_ranges(sorted(ranks))
                return (
                    f"`{missing[1]}` exists only on rank{'s' * (len(ranks) > 1)} {numbers} "
                    f"of this session. Assign it on all ranks, or run the cell with --ranks "
                    f"{numbers}"
                )
        return ""

    def end_message(self, may_have_died: bool) -> str:
        """Return a message that the session has ended; "" if it has not ended.

        The message says why, which variables are lost, and how to start the session again. If
        another kernel has taken the session over, the message says how to take it back, or that the
        session has ended there.

        Args:
            may_have_died: Whether a rank may have died in the last cell. If True, or if taas-magic
                has killed ranks of the session, wait up to `DEATH_SEEN_S` seconds for the report
                that the session has ended.
        """
        until = time.monotonic() + DEATH_SEEN_S * (may_have_died or self._has_lost_ranks)
        while not self.has_ended and time.monotonic() < until:
            self._end_event.wait(_END_POLL_S)
        if not self.has_ended:
            return ""
        if may_have_died or self._has_lost_ranks:
            self._why_died = self._cell_error
        if self._was_taken_over:
            return ended_text(self.name) or (
                f'session "{self.name}": {self.why_ended()}; `%taas attach {self.name}` takes it '
                "back"
            )
        return (
            f'session "{self.name}" has ended: {self.why_ended()}. Lost with its ranks: '
            f"{self.lost_names()}. Start it again: {_start_line(self.flags)}"
        )

    def end(self, interrupts: Interrupts) -> None:
        """End the session's ranks, and wait until they and the fetchers have ended.

        Do nothing if the ranks were not started or have ended. Before the wait, store "you ended
        it" as a reason for the session's end, which `why_ended` may return.

        Raises:
            PoolError: The pool does not respond, or the ranks did not end within `END_S` seconds.
            KeyboardInterrupt: The user interrupted the wait. The session still ends.
        """
        connection = self._connection
        if connection is None or self.has_ended:
            return
        self._notes.append("you ended it")
        try:
            interrupts.wait_for(lambda: connection.halt(self.run_id, "interrupt"))
            interrupts.wait_for(lambda: self._end_event.wait(END_S))
            for thread in self._closing:
                interrupts.wait_for(partial(thread.join, END_S))
        except KeyboardInterrupt:
            raise interrupted(f"Stopped by you; session {self.name} is still ending.") from None
        if not self._end_event.is_set():
            raise PoolError(
                f'session "{self.name}" did not end within {END_S:.0f} s; the pool ends its hosts'
            )

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for the session's end; return whether it has ended.

        The session has ended if its ranks have ended, or if another kernel has taken it over.
        """
        return self._end_event.wait(timeout_s)

    def _on_run_event(self, event: Event) -> None:
        """Record output, notes and the end of the session's own run.

        The thread of the connection to the pool's process calls this method. Two events end the
        session in this kernel:

        - `RunEnded`: the session's own run has ended. In this case, end the session's fetchers.
        - `Detached`: another kernel or a terminal has taken the session over. In this case, leave
          the fetchers running for the new owner.

        After either event, wake the threads that wait for the session's end, and stop receiving
        events of the session's own run and of a cell that the user has left.
        """
        if isinstance(event, Note):
            self._notes.append(event.text)
        elif isinstance(event, Lines | LinesDropped):
            self._output.append(event)
        elif isinstance(event, RunEnded | Detached):
            self._was_taken_over = isinstance(event, Detached)
            self._ended = RunEnded(state="LOST") if isinstance(event, Detached) else event
            self._close_fetchers(())
            self._end_event.set()
            if self._connection is not None:
                self._connection.stop_events(self.run_id)
                if self._left_cell is not None:
                    self._connection.stop_events(self._left_cell[0].run.id)


def _call_if_alive(connection: PoolConnection, request: Request[_T]) -> _T | None:
    """Send a request to a pool's process, and return the response.

    If the process has ended or does not respond, return None. The caller needs no error: if the
    process has ended, its sessions have also ended, and the next cell of the session reports this.
    """
    with suppress(PoolError):
        return connection.call(request)
    return None


def for_cell(flags: Flags, *, registers: bool = True) -> Session | None:
    """Return the session that a cell runs in; None if the cell has no `--session`.

    If no session with this name is running or starting, return a new session, whose ranks are not
    started yet.

    Args:
        flags: Flags of the cell.
        registers: Whether to keep a new session under its name for later cells.

    Raises:
        UsageError: A flag cannot be combined with `--session`, or needs `--session`. Or a new
            session has no `--gpus`. Or a new session has the name of a running detached session of
            this project.
    """
    if not flags.session:
        if given := [name for name in ("ranks", "send") if getattr(flags, name)]:
            raise UsageError(
                f"{_flag(given[0])} works only with --session NAME, whose ranks stay between cells"
            )
        return None
    for name in NOT_IN_SESSIONS:
        if getattr(flags, name):
            raise UsageError(f"{_flag(name)} cannot be combined with --session")
    known = _sessions.get(flags.session)
    if known is not None and (known.is_started or known.running_cell) and not known.has_ended:
        return known
    if not flags.gpus:
        raise UsageError(_no_session_message(flags.session, known))
    if detached_session(flags.session, working_folder()) is not None:
        raise UsageError(
            f'a detached session "{flags.session}" of this notebook\'s folder is running: `%taas '
            f"attach {flags.session}` takes it over, `%taas end {flags.session}` ends it"
        )
    new = Session(flags)
    if registers:
        _sessions[flags.session] = new
    return new


def _no_session_message(name: str, known: Session | None) -> str:
    """Return the error message for the name of a session that this kernel cannot use now.

    The message says which of these cases applies:

    - This kernel had the session, and the session has ended or another kernel has taken it over.
    - A detached session with this name is running, but not in this kernel.
    - A detached session with this name, or a session of this project, has ended.
    - There was no such session. The message proposes a similar name, if this kernel has one.

    Args:
        name: Name of the session.
        known: This kernel's last session with this name; None if this kernel had no such session.
    """
    if known is not None and known.is_started:
        return known.end_message(may_have_died=False)
    if detached_session(name) is not None:
        return f'A detached session "{name}" is running: `%taas attach {name}` takes it over'
    if said := ended_text(name):
        return said
    hint = did_you_mean(name, [each.name for each in live()])
    start = _start_line(known.flags if known else Flags(gpus=2, session=name))
    return f'There is no session "{name}"{hint}. Start it: {start}'


def _start_line(flags: Flags) -> str:
    """Return the `%%taas` line that starts a session with the flags of its first cell.

    The line has only the flags that concern the whole session.
    """
    words = ["--gpus", str(flags.gpus), "--session", flags.session]
    for name in ("cpus", "data_pool", *FIXED):
        if name != "gpus":
            words += _flag_words(flags, name)
    return f"%%taas {shlex.join(words)}"


def _flag(name: str) -> str:
    """Return the flag that sets a field of `Flags`, such as "--data-pool" for `data_pool`."""
    return "--" + name.replace("_", "-")


def _flag_words(flags: Flags, name: str) -> list[str]:
    """Return the words of the `%%taas` line that give a flag its value; [] for the default value.

    Args:
        name: Field of `Flags` that the flag sets.
    """
    value = getattr(flags, name)
    if value == getattr(Flags(gpus=0), name):
        return []
    if value is True:
        return [_flag(name)]
    values = value if isinstance(value, tuple) else (value,)
    if name == "env":
        values = tuple(f"{key}={text}" for key, text in value.items())
    return [word for each in values for word in (_flag(name), str(each))]


def replace(name: str, interrupts: Interrupts) -> Session:
    """End a session, and return a new session with the same name, without starting its ranks.

    The new session prefers the hosts of the old one.

    Raises:
        UsageError: There is no such session.
        PoolError: The pool does not respond, or the old ranks did not end in time.
        KeyboardInterrupt: The user interrupted the wait.
    """
    known = _sessions.get(name)
    if known is None or not known.is_started:
        raise UsageError(_no_session_message(name, known))
    known.end(interrupts)
    _sessions[name] = new = Session(known.flags)
    new.hosts = known.hosts
    return new


def live() -> list[Session]:
    """Return the sessions whose ranks were started and have not ended."""
    return [one for one in _sessions.values() if one.is_started and not one.has_ended]


def flags_of(run: Run) -> Flags | None:
    """Return the flags of a session, given the session's own run; None for any other run.

    The folder of the session's own run, which started the ranks, has a file with the flags. If the
    file is damaged, return None.
    """
    with suppress(FileNotFoundError, ValueError):
        return from_json((run.path / runs.SESSION_FILE).read_bytes(), Flags)
    return None


def _write_flags(folder: RunFolder, flags: Flags) -> None:
    with replace_atomically(folder.path / runs.SESSION_FILE) as file:
        file.write(to_json(flags))


def _sessions_of_others() -> Iterator[tuple[Run, Flags]]:
    """Yield each running session that does not belong to this kernel, the newest session first.

    Yields:
        The session's own run, which started the ranks; and the flags of the session's first cell.
    """
    own = {session.run_id for session in live()}
    for run in runs.newest_first():
        flags = flags_of(run)
        if flags is not None and run.id not in own and run.is_active:
            yield run, flags


def detached_sessions() -> Iterator[tuple[Run, Flags]]:
    """Yield each running detached session that does not belong to this kernel, the newest first.

    Yields:
        The session's own run, which started the ranks; and the flags of the session's first cell.
    """
    return (found for found in _sessions_of_others() if found[1].detach)


def detached_session(name: str, project: Path | None = None) -> Run | None:
    """Find the newest running session named `name` that is detached and not in this kernel.

    Args:
        name: Name of the session.
        project: Search only sessions of notebooks in this folder. None to search all folders.

    Returns:
        The session's own run, which started the ranks; None if there is no such session.
    """
    for run, flags in detached_sessions():
        if flags.session == name and project in (None, Path(run.context.project)):
            return run
    return None


def find_of_other_kernel(name: str) -> Run | None:
    """Find a running session with the name `name` that does not belong to this kernel.

    If there are several such sessions, prefer a detached session, because this kernel can take over
    only detached sessions.

    Returns:
        The session's own run, which started the ranks; None if there is no such session.
    """
    if (left := detached_session(name)) is not None:
        return left
    return next((run for run, flags in _sessions_of_others() if flags.session == name), None)


def ended_text(name: str) -> str:
    """Return a message for an ended session of another kernel: why it ended, how to start it again.

    The message is about the newest session named `name` that was detached or belongs to this
    project.

    Return "" if there was no such session, or if the session is still running.
    """
    for run in runs.newest_first():
        flags = flags_of(run)
        if flags is None or flags.session != name:
            continue
        if flags.detach or run.context.project == str(working_folder()):
            if run.is_active:
                return ""
            kind = "detached session" if flags.detach else "session"
            why = run.error or ENDED_BY_COMMAND
            return f'{kind} "{name}" has ended: {why}. Start it again: {_start_line(flags)}'
    return ""


def running_cell(session: Run) -> Run | None:
    """Return the run of the cell that a session executes now; None if it executes no cell.

    Args:
        session: The session's own run, which started the ranks.
    """
    name, pool_folder = session.plan.session, session.context.pool_folder
    for run in runs.newest_first():
        is_other = run.is_active and run.id != session.id
        if is_other and run.plan.session == name and run.context.pool_folder == pool_folder:
            return run
    return None


def is_hidden_from_attach(run: Run) -> bool:
    """Return whether a run is a session that `%taas attach` without a name must not select.

    True for the own run of a session that this kernel cannot take over, because it is not detached.
    Also true for the own run of a session that is in this kernel already. False for all other runs.
    """
    flags = flags_of(run)
    if flags is None:
        return False
    return not flags.detach or any(session.run_id == run.id for session in live())


def take_over(run: Run, connection: PoolConnection) -> tuple[Session, str]:
    """Take over a detached session of another kernel, and keep it under its name for later cells.

    The other kernel may be gone already.

    Args:
        run: The session's own run, which started the ranks.
        connection: Connection to the process of the ranks' pool.

    Returns:
        The session, and the run id of the cell to show (see `Session.take_over`); "" for none.

    Raises:
        PoolError: The session has ended or is not detached, or the pool does not respond.
    """
    flags = flags_of(run)
    assert flags is not None
    session = Session(flags)
    try:
        cell = session.take_over(run, connection)
    except PoolError as error:
        raise PoolError(f'session "{session.name}" cannot be taken over: {error}') from None
    _sessions[session.name] = session
    return session, cell


def named(name: str | None) -> Session:
    """Find a session of this kernel whose ranks are running.

    Args:
        name: Name of the session. None for the only running session.

    Raises:
        UsageError: There is no such session, or `name` is None and there are several.
    """
    found = live()
    if name is None:
        if len(found) == 1:
            return found[0]
        if not found:
            raise UsageError("There is no session. Start one: %%taas --gpus 2 --session NAME")
        listed = ", ".join(one.name for one in found)
        raise UsageError(f"Several sessions are running; name one: {listed}")
    for one in found:
        if one.name == name:
            return one
    raise UsageError(_no_session_message(name, _sessions.get(name)))


def check_names(flags: Flags, namespace: Collection[str]) -> None:
    """Check that the notebook has all variables that `--send` names.

    Args:
        flags: Flags of the cell.
        namespace: Names of the notebook's variables.

    Raises:
        UsageError: The notebook does not have such a variable.
    """
    for name in flags.send:
        if name not in namespace:
            raise UsageError(f"--send {name}: the notebook has no such variable")
