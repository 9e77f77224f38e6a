"""Sessions of this kernel: ranks that keep their variables from cell to cell.

To the pool a session is a run that takes hosts and starts ranks, and each of its cells is a run on
these ranks. Here are the kernel's sessions by name: what the ranks have (`RankNames`), whether they
still live, and what a cell of theirs may say in its head.
"""

import re
import threading
import time
from collections.abc import Collection

from msgspec import structs

from taas_magic.capture.known import Choice, RankNames
from taas_magic.capture.payload import Payload
from taas_magic.config import closest
from taas_magic.display.failure import headline
from taas_magic.errors import PoolError, UsageError
from taas_magic.host.spec import HostSpec, Origin
from taas_magic.journal.folder import RunContext, RunFolder
from taas_magic.messages import CellNames, Event, Note, RanksKilled, RunEnded
from taas_magic.notebook.run import Interrupts
from taas_magic.plan import Flags, Plan, new_run_id
from taas_magic.pool.client import PoolConnection

END_S = 40.0
"""Seconds to wait for the end of a session that was told to end."""

DEATH_SEEN_S = 15.0
"""Seconds to wait for the end of a session after a rank has died in a cell."""

FIXED = {
    **{"gpus": "--gpus", "pool": "--pool", "env": "--env", "store": "--store"},
    **{"store_writes": "--store-writes", "shared_writes": "--shared-writes"},
    "uneven_hosts": "--uneven-hosts",
}
"""Fields of `Flags` that only the start of a session sets, with their flags."""

NOT_IN_SESSIONS = {"max_gpus": "--gpus A:B", "max_restarts": "--max-restarts", "detach": "--detach"}
"""Fields of `Flags` that a session cannot have."""

_NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}")
_LISTED = 12
_sessions: dict[str, "Session"] = {}


class Session:
    """One session of this kernel.

    Attributes:
        flags: Those of the cell that started it.
        names: What its ranks have.
        plan: Its own run's; None before it has started.
    """

    def __init__(self, flags: Flags) -> None:
        self.name, self.flags, self.names = flags.session, flags, RankNames()
        self.plan: Plan | None = None
        self._connection: PoolConnection | None = None
        self._cells = 0
        self._loaded: set[int] = set()
        self._changes: list[CellNames] = []
        self._notes: list[str] = []
        self._ended: RunEnded | None = None
        self._over = threading.Event()
        self._is_wanted = True
        self._has_lost_ranks = False
        self._used_at = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since its last cell ended."""
        return time.monotonic() - self._used_at

    @property
    def run_id(self) -> str:
        """The id of its own run."""
        assert self.plan is not None
        return self.plan.run_id

    @property
    def connection(self) -> PoolConnection:
        """The connection to the pool's process that has its ranks; once it has started."""
        assert self._connection is not None
        return self._connection

    @property
    def is_started(self) -> bool:
        """Whether its ranks were started."""
        return self._connection is not None

    @property
    def has_ended(self) -> bool:
        """Whether its ranks were started, and are gone."""
        connection = self._connection
        if self._ended is None and connection is not None and connection.is_over:
            self._ended = RunEnded(state="LOST", why=connection.why)
        return self._ended is not None

    def why_ended(self) -> str:
        """Return why it has ended, in one line."""
        ended = self._ended
        if ended is not None and ended.first is not None:
            return headline(ended.first)
        if self._notes:
            return self._notes[-1]
        return (ended.why if ended is not None else "") or "it was ended"

    def lost_names(self) -> str:
        """Return which variables its ranks had."""
        names = sorted(name for name in self.names.owned if not name.startswith("_"))
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        return f"{', '.join(names[:_LISTED])}{more}" if names else "none"

    def complete(self, flags: Flags) -> Flags:
        """Return the flags of a cell with what the session's start has set.

        Raises:
            UsageError: They do not go together.
        """
        mine, nothing = self.flags, Flags(gpus=0)
        for name, flag in FIXED.items():
            asked = getattr(flags, name)
            if asked not in (getattr(nothing, name), getattr(mine, name)):
                has = f"{mine.gpus} ranks" if name == "gpus" else "another value, or none"
                raise UsageError(
                    f'{flag}: session "{self.name}" was started with {has}, which it keeps. Leave '
                    f"{flag} out, or end the session first (%taas end {self.name})"
                )
        same = {name: getattr(mine, name) for name in FIXED}
        return structs.replace(flags, **same)

    def begin_cell(self, plan: Plan) -> Plan:
        """Return a cell's plan on the session's ranks; the first cell's decides where these are."""
        self._loaded, self._changes = set(), []
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
        """Start the ranks, if that has not been done.

        Raises:
            PoolError: The pool has no hosts for them.
            KeyboardInterrupt: The user did not want to wait.
        """
        if self.is_started:
            return
        assert self.plan is not None
        folder = RunFolder.create(self.run_id, self.plan, cell)
        with folder.whole():
            folder.write_context(context)
        requires = None if connection.config.engine == "local" else ()
        spec = HostSpec(self.plan, 0, str(folder.path), origin, requires=requires, idle_s=idle_s)

        def launch() -> None:
            connection.launch(spec, self._take)
            if not self._is_wanted:
                connection.halt(self.run_id, "kill")

        try:
            with folder.held():
                interrupts.attend(launch, patience=2)
        except BaseException:
            self._is_wanted = False
            raise
        self._connection = connection

    def cell_spec(self, spec: HostSpec) -> HostSpec:
        """Return what the hosts are told of the next cell."""
        self._cells += 1
        return structs.replace(spec, session=self.run_id, cell_number=self._cells)

    def take_event(self, event: Event) -> None:
        """Take what the ranks say of their names at a cell's end."""
        if isinstance(event, CellNames):
            self._loaded.add(event.rank)
            self._changes.append(event)
        elif isinstance(event, RanksKilled):
            self._has_lost_ranks = True

    def end_cell(self, captured: Payload, *, counts: bool = True) -> None:
        """Record which names the ranks have after a cell.

        Args:
            counts: Whether the cell was the user's, after which the session is idle anew.
        """
        if counts:
            self._used_at = time.monotonic()
        choice = captured.choice
        assert choice is not None and self.plan is not None
        if len(self._loaded) == self.plan.world_size:
            self.names.take_sent(choice)
        self._take_changes(choice)

    def _take_changes(self, choice: Choice) -> None:
        # what rank 0 has of a name counts
        for said in sorted(self._changes, key=lambda said: -said.rank):
            self.names.take_changes(choice, said.assigned, said.deleted, said.plain)

    def death(self, may_have_died: bool) -> str:
        """Return a line for the user if the session has ended; "" while it lives.

        Args:
            may_have_died: Whether a rank died in a cell, so that the session's end is awaited.
        """
        if may_have_died or self._has_lost_ranks:
            self._over.wait(DEATH_SEEN_S)
        if not self.has_ended:
            return ""
        return (
            f'session "{self.name}" has ended: {self.why_ended()}. Lost with its ranks: '
            f"{self.lost_names()}. Start it again: %%taas --gpus {self.flags.gpus} "
            f"--session {self.name}"
        )

    def end(self, interrupts: Interrupts) -> None:
        """End the ranks.

        Raises:
            PoolError: The pool does not answer.
            KeyboardInterrupt: The user did not want to wait.
        """
        connection = self._connection
        if connection is None or self.has_ended:
            return
        self._notes.append("you ended it")
        interrupts.attend(lambda: connection.halt(self.run_id, "interrupt"))
        interrupts.attend(lambda: self._over.wait(END_S))
        if not self._over.is_set():
            raise PoolError(
                f'session "{self.name}" did not end within {END_S:.0f} s; the pool ends its hosts'
            )

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait until its ranks are gone; return whether they are."""
        return self._over.wait(timeout_s)

    def _take(self, event: Event) -> None:
        """Take an event of the session's own run; called in the Dask client's thread."""
        if isinstance(event, Note):
            self._notes.append(event.text)
        elif isinstance(event, RunEnded):
            self._ended = event
            self._over.set()
            if self._connection is not None:
                self._connection.forget(self.run_id)


def for_cell(flags: Flags, *, registers: bool = True) -> Session | None:
    """Return the session that a cell runs in, perhaps a new one; None for a cell without one.

    Args:
        registers: Whether a new one is kept under its name.

    Raises:
        UsageError: There is no such session and none can be started.
    """
    if not flags.session:
        misplaced = {"ranks": "--ranks", "send": "--send"}
        if given := [flag for name, flag in misplaced.items() if getattr(flags, name)]:
            raise UsageError(f"{given[0]} needs --session NAME: it is about ranks that stay")
        return None
    if not _NAME.fullmatch(flags.session):
        raise UsageError(f'--session needs a name (--session exp); got "{flags.session}"')
    for name, flag in NOT_IN_SESSIONS.items():
        if getattr(flags, name):
            raise UsageError(f"{flag} does not go with --session")
    known = _sessions.get(flags.session)
    if known is not None and known.is_started and not known.has_ended:
        return known
    if not flags.gpus:
        raise UsageError(_why_none(flags.session, known))
    new = Session(flags)
    if registers:
        _sessions[flags.session] = new
    return new


def _why_none(name: str, known: Session | None) -> str:
    if known is not None and known.is_started:
        return known.death(may_have_died=False)
    hint = closest(name, [each.name for each in live()])
    return f'There is no session "{name}"{hint}. Start it: %%taas --gpus 2 --session {name}'


def restarted(name: str, interrupts: Interrupts) -> Session:
    """End a session; return a new one of its name, which has not started.

    Raises:
        UsageError: There is no such session.
        PoolError: The pool does not answer.
        KeyboardInterrupt: The user did not want to wait.
    """
    known = _sessions.get(name)
    if known is None or not known.is_started:
        raise UsageError(_why_none(name, known))
    known.end(interrupts)
    _sessions[name] = new = Session(known.flags)
    return new


def live() -> list[Session]:
    """Return the sessions whose ranks live."""
    return [one for one in _sessions.values() if one.is_started and not one.has_ended]


def named(name: str | None) -> Session:
    """Return the live session of that name, or the only one.

    Raises:
        UsageError: There is none, or there are several.
    """
    found = live()
    if name is None:
        if len(found) == 1:
            return found[0]
        listed = ", ".join(one.name for one in found)
        raise UsageError(f"Say which session: {listed}" if found else "There is no session.")
    for one in found:
        if one.name == name:
            return one
    raise UsageError(_why_none(name, _sessions.get(name)))


def check_names(flags: Flags, namespace: Collection[str]) -> None:
    """Check that the notebook has what `--send` names.

    Raises:
        UsageError: It has not.
    """
    for name in flags.send:
        if name not in namespace:
            raise UsageError(f"--send {name}: the notebook has no such variable")
