"""Find runs and read them from their folders: `taas.runs()`, `taas.last_run`, `%taas` commands.

Any process of the user can read a run, while it is active and long after its end.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from html import escape
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

from taas_magic import messages
from taas_magic.capture.work import VALUE, VALUES
from taas_magic.display.failure import cause_of, headline, to_exception, with_labels
from taas_magic.display.head import COLOURS, RunState, duration
from taas_magic.display.replay import Replay
from taas_magic.errors import ResultError, UsageError, interrupted
from taas_magic.host import results as returned
from taas_magic.journal import folder as journal
from taas_magic.journal import metrics, timeline
from taas_magic.journal.analysis import RunCounts, advice_for_run, draw_loaders
from taas_magic.journal.folder import (
    ENDED_STATES,
    PlanHead,
    RunContext,
    RunFolder,
    RunStatus,
    RunSummary,
)
from taas_magic.journal.reader import JournalReader
from taas_magic.messages import Failure, RunEnded
from taas_magic.notebook.logs import log_text
from taas_magic.plan import Plan
from taas_magic.store.receipt import Receipt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FOR_OUR_CODE = (
    *("context", "head", "new_state", "raise_failure"),
    *("read_journal", "result_notes", "unrecorded_end"),
)
"""Attributes of `Run` that Tab completion does not offer, because only our own code uses them."""

SESSION_FILE = "session.json"
"""Name of a file with a session's flags, in the folder of the session's own run.

No other run has this file.
"""

POLL_S = 0.2
"""Seconds between two checks of `Run.wait` whether the run has ended."""


class Run:
    """One execution of a cell or function on ranks, as users get it from `taas.runs()`.

    Any kernel of the user may have started the run. The object only reads the run's folder. Users
    cannot set its attributes.

    Args:
        path: The run's folder.
        live: State of the run, if this kernel follows it. None to read the state from the journal.
    """

    def __init__(self, path: Path, live: RunState | None = None) -> None:
        self._live = live
        self._folder = RunFolder(path)
        self._reader = JournalReader(self._folder.events)
        self._replay: Replay | None = None
        self._received: returned.ReceivedResults | None = None

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._folder.path

    @property
    def id(self) -> str:
        """The run's id."""
        return self._folder.run_id

    @property
    def name(self) -> str:
        """The run's name, from `--name`."""
        return self._plan_head.name

    @property
    def pool(self) -> str:
        """Name of the pool that runs the ranks."""
        return self._plan_head.pool

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._plan_head.world_size

    @cached_property
    def plan(self) -> Plan:
        """Plan of the run at its start: its options, its ranks, and the hosts that run them."""
        return messages.from_json((self.path / "plan.json").read_bytes(), Plan)

    @cached_property
    def context(self) -> RunContext:
        """Facts that the kernel recorded for other processes: project, pools, labels of cells."""
        return self._folder.context()

    @property
    def state(self) -> RunStatus:
        """State of the run. It can be compared with a string: `run.state == "SUCCEEDED"`."""
        return RunStatus(self._live.state if self._live else self._summary().state)

    @property
    def is_active(self) -> bool:
        """Whether the run has not ended yet; also True before its ranks have started."""
        return self.state not in ENDED_STATES

    @property
    def started_at(self) -> float:
        """Time at which the run got its hosts, in seconds since 1970."""
        return self._summary().started

    @property
    def duration_s(self) -> float:
        """Seconds from the run's start to its end, or until now if it is active."""
        if self._live and self._live.has_ended:
            return self._live.elapsed_s or 0.0
        return self._summary().elapsed_s

    @property
    def head(self) -> RunState:
        """The state of the run, computed from all its events. The status header shows this state.

        If this kernel follows the run, return the state that the view updates. Otherwise, first
        read new events from the run's journal. If the run's owner has disappeared, the state is
        LOST.
        """
        if self._live:
            return self._live
        if self._replay is None:
            self._replay = Replay(self.new_state())
        for chunk in self._reader.chunks():
            self._replay.read(chunk)
        state = self._replay.state
        if not state.has_ended and (ended := self.unrecorded_end()):
            state.apply(ended, ended.time)
        return state

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts of the newest attempt."""
        return list(self.head.hosts)

    @property
    def failures(self) -> list[Failure]:
        """Failures of ranks and hosts, earliest first; [] while the run is active.

        docs/events.md describes the fields of a failure.
        """
        head = self.head
        return list(head.failures) if head.has_ended else []

    @property
    def failed_rank(self) -> int | None:
        """Number of the rank that failed first; None if no rank failed."""
        first = self._live.first if self._live else self._summary().first
        return first.rank if first else None

    @property
    def error(self) -> str:
        """One-line description of the run's error; "" if there is none."""
        about = self._live or self._summary()
        return headline(about.first) if about.first else about.why

    @property
    def receipt(self) -> Receipt:
        """Files that rank 0 wrote to the project store, and files that other ranks tried to write.

        By default, taas-magic keeps the files of ranks other than 0 out of the project store.
        """
        return self.head.receipt or Receipt()

    @property
    def out(self) -> dict[str, Any]:
        """Values of the variables of `--out`, by name; empty while the run is active.

        A failed run may have returned some variables, too. The first access loads the values.
        """
        values = self._results().values
        return {name: values[name] for name in values if name != VALUE}

    @property
    def missing(self) -> dict[str, str]:
        """Names of `--out` that were not returned, each with the reason.

        Empty while the run is active. The first access after the run's end loads all values.
        """
        return {name: why for name, why in self._results().missing.items() if name != VALUE}

    @property
    def result(self) -> Any:
        """Value of the cell's last expression on rank 0; None while the run is active.

        Reading this property does not wait for the end of the run. The value is also None if rank 0
        sent no value, for example because the cell failed on this rank.

        In four cases, the value is None, and a warning gives the reason:

        - Rank 0 could not pickle the value.
        - The value is larger than 1 MB. (A variable of `--out` may be larger.)
        - The value is a pickle from an untrusted pool.
        - The notebook could not load the value.

        For a run of `taas.run`, the property is the value that the function returned on rank 0.
        With `gather=True`, this value is the first one in `results`, and None if `results` is
        empty. There is no warning, because `taas.run` has already raised an error.
        """
        if VALUES in self.plan.out:
            return self.results[0] if self.results else None
        found = self._results()
        if why := found.why_no_value:
            warnings.warn(f"the result of run {self.id} did not come back: {why}", stacklevel=2)
        return found.values.get(VALUE)

    @property
    def results(self) -> list[Any]:
        """Values that the function of `taas.run` returned on all ranks, in the order of the ranks.

        The list is empty in three cases:

        - The run is active.
        - `taas.run` was called without `gather=True`.
        - The value of at least one rank did not come back.
        """
        found: list[Any] = self._results().values.get(VALUE, []) if VALUES in self.plan.out else []
        return found

    @property
    def result_notes(self) -> list[str]:
        """Notes for the user about functions that the run returned.

        In the notebook, a returned function uses the notebook's variables, not the variables of the
        ranks. If such a variable has different values in the notebook and on the ranks, a note
        names the variable.
        """
        return list(self._results().notes)

    @property
    def advice(self) -> str:
        """Advice on what to change if ranks waited for data; "" if there is none."""
        return advice_for_run(self._run_counts())

    @property
    def waited(self) -> dict[str, float]:
        """Fraction of time (0 to 1) that ranks waited for a loader's data, by the loader's name."""
        return {
            loader.name: loader.mean.waited_fraction
            for loader in self._run_counts().loaders.values()
        }

    @property
    def metrics(self) -> Any:
        """Values that ranks logged by `taas.log`, one row for each step and rank.

        The value is a pandas DataFrame with the columns `step`, `rank` and `time`, and one column
        for each metric. If pandas is not installed, the value is a dict of lists, by column.
        """
        return metrics.read_metrics(self.path)

    def plot(self) -> "Figure":
        """Plot over time how long ranks waited for data and how fast the data arrived.

        Raises:
            UsageError: matplotlib is missing, or the run used no registered loader.
        """
        return draw_loaders(self._folder.read_events(), f"{self.id} {self.name}".rstrip())

    def timeline(self) -> timeline.Timeline:
        """Return how each rank spent the steps that `--profile` recorded.

        Raises:
            UsageError: The run has no profile.
        """
        return timeline.read_timeline(self.path)

    def logs(self, rank: int | None = None, tail: int | None = None, grep: str = "") -> str:
        """Return a rank's stdout and stderr, with the traceback if the rank raised.

        Args:
            rank: Number of the rank. None for the rank that failed first, or rank 0.
            tail: Maximum number of lines to return: the last lines that match `grep`. None returns
                all lines that match `grep`.
            grep: Regular expression. Only lines that contain a match are returned. "" matches all
                lines.

        Raises:
            UsageError: The run has no such rank, `tail` is negative, or `grep` is not a valid
                regular expression.
        """
        return log_text(self.log_path(rank), tail, grep)

    def log_path(self, rank: int | None = None) -> Path:
        """Return the path of a rank's log file. If the rank wrote nothing, the file does not exist.

        Args:
            rank: Number of the rank. None for the rank that failed first, or rank 0.

        Raises:
            UsageError: The run has no such rank.
        """
        rank = rank if rank is not None else self.failed_rank or 0
        if not 0 <= rank < self.world_size:
            last = self.world_size - 1
            raise UsageError(f"run {self.id} has ranks 0 to {last}; got {rank}")
        return self._folder.log(rank)

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait until the run has ended; return the variables of `--out`, or raise the run's error.

        If the user interrupts, the wait ends, and the run continues.

        Args:
            timeout: Seconds to wait. None waits until the end.

        Raises:
            TimeoutError: The run is still active after `timeout`.
            ResultError: The run succeeded, but not all variables of `--out` could be returned.
            RunError: The cell failed on a rank, or the run took longer than `--timeout`
                (`RunTimeout`).
            PoolError: The run failed before a rank started. Or the run has lost a host, or the
                process that owned the run (`RunLost`).
            StoreError: The project store could not be copied to a host.
            KeyboardInterrupt: The user interrupted the wait, or the run was stopped.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while self.is_active:
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"run {self.id} has not ended after {timeout:g} s")
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            raise interrupted(still_active_message(self.id)) from None
        self.raise_failure()
        return self.out

    def raise_failure(self, session_stays: bool = False) -> None:
        """Raise the error of a run that has ended. If the run has no error, do nothing.

        If the kernel knows the exception type of the rank that failed first, the raised error has
        an exception of this type as its `__cause__`. If the run was interrupted, or if variables of
        `--out` are missing, the error's message names the variables that were returned.

        Args:
            session_stays: Whether the run was a cell of a session that has not ended. If so, the
                message of an interrupted run says that the session keeps its variables.

        Raises:
            KeyboardInterrupt: The run was interrupted or stopped.
            ResultError: The run succeeded, but not all variables of `--out` could be returned.
            RunError: The cell failed on a rank, or the run took longer than `--timeout`
                (`RunTimeout`).
            PoolError: The run failed before a rank started. Or the run has lost a host, or the
                process that owned the run (`RunLost`).
            StoreError: The project store could not be copied to a host.
        """
        head, names = self.head, ", ".join(self.out)
        if head.state == "INTERRUPTED":
            came = f"returned: {names}" if names else "nothing was returned"
            stays = " The session keeps its variables." if session_stays else ""
            said = f"Stopped by you after {duration(self.duration_s)}; {came}.{stays} {head.why}"
            raise interrupted(said.rstrip())
        if head.state != "SUCCEEDED":
            first = with_labels(head.first, self.context.labels)
            failures = list(head.failures)
            raised = to_exception(
                RunEnded(state=head.state, first=first, failures=failures, why=head.why)
            )
            raise raised from cause_of(head.first, _names_of_notebook())
        if missing := self._results().missing:
            came = f"; these were returned: {names}" if names else ""
            what = "some names of --out could not be returned"
            if VALUE in missing:
                what = "the value of the function could not be returned"
            shown = {"run.result" if name == VALUE else name: why for name, why in missing.items()}
            lines = [f"    {name}: {why}" for name, why in shown.items()]
            raise ResultError(f"run {self.id} succeeded, but {what}{came}\n" + "\n".join(lines))

    def read_journal(self) -> None:
        """From now on, take the run's state from its journal instead of the kernel's view.

        Call this after the kernel has detached the run, because the view gets no more events.
        """
        self._live = None

    def unrecorded_end(self) -> RunEnded | None:
        """Return an end event if the run's owner is gone and has recorded no end of the run.

        Otherwise, return None.
        """
        found = self._summary()
        if found.state != "LOST":
            return None
        at = found.started + found.elapsed_s
        return RunEnded(state="LOST", elapsed_s=found.elapsed_s, why=found.why, time=at)

    def new_state(self) -> RunState:
        """Create the state that the run has before its first event.

        The caller then updates this state by the run's events.
        """
        began = (self.path / "plan.json").stat().st_mtime
        return RunState(self.plan, self.path, began=began)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(f"a Run is read-only: its attribute {name!r} cannot be set")
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        """Return the names of the attributes that users need, for Tab completion."""
        names = (name for name in vars(Run) if not name.startswith("_"))
        return sorted(name for name in names if name not in _FOR_OUR_CODE)

    def __repr__(self) -> str:
        return f"<Run {self.id} {self.name}: {self.state}, {self.path}>"

    def _repr_html_(self) -> str:
        """Return an HTML table with one row, for this run."""
        return table_of([self])

    @cached_property
    def _plan_head(self) -> PlanHead:
        return self._folder.plan()

    def _summary(self) -> RunSummary:
        return journal.summary(self._folder)

    def _results(self) -> returned.ReceivedResults:
        """Return the values that the run returned to the notebook; empty while the run is active.

        The first call after the run's end loads the values from the result files in the run
        folder. Later calls return the same object.
        """
        if self._received is None:
            if self.is_active:
                return returned.ReceivedResults()
            attempt, pool = self.head.last_attempt, self.plan.untrusted_pool
            sources = returned.ResultCriteria(attempt, self.world_size, pool, self.plan.ranks)
            self._received = returned.receive(
                self._folder.results, self.plan.out, sources, _names_of_notebook()
            )
        return self._received

    def _run_counts(self) -> RunCounts:
        run_counts = RunCounts()
        for seen in self._folder.read_events():
            run_counts.apply(seen, seen.time)
        return run_counts


def compare(*runs: Run, metric: str | None = None) -> "Figure":
    """Plot one metric of several runs over the steps, with one line for rank 0 of each run.

    Args:
        *runs: The runs, such as `*taas.runs()[:2]`.
        metric: Name of the metric. None for the first metric that all runs have.

    Raises:
        UsageError: No run is given, an argument is not a run, matplotlib is missing, or not all
            runs have the metric.
    """
    wrong = [run for run in runs if not isinstance(run, Run)]
    if wrong or not runs:
        got = f"; got a {type(wrong[0]).__name__}" if wrong else ""
        raise UsageError(f"taas.compare needs runs, such as taas.compare(*taas.runs()[:2]){got}")
    return metrics.draw_metric(
        {f"{run.id} {run.name}".rstrip(): run.metrics for run in runs}, metric
    )


def _names_of_notebook() -> dict[str, Any]:
    """Return the variables of this kernel's notebook; empty outside of IPython."""
    shell = get_ipython()
    return {} if shell is None else shell.user_ns


def still_active_message(run_id: str) -> str:
    """Return a message that a run continues, with the commands that show the run and end it."""
    return (
        f"Run {run_id} continues: `%taas attach {run_id}` shows it again, "
        f"`%taas stop {run_id}` ends it."
    )


class RunList(list[Run]):
    """A list of runs, newest first. A notebook shows it as a table."""

    def _repr_html_(self) -> str:
        return table_of(self)


TABLE_HEAD = ("id", "name", "state", "started", "duration", "ranks", "pool", "error")
_ERROR_CHARS = 160


def row_of(run: Run) -> tuple[str, ...]:
    """Return the texts of a run's row in the table of runs, in the order of `TABLE_HEAD`.

    The start is in local time. The error is one line of at most `_ERROR_CHARS` characters.
    """
    state, is_active = run.state, run.is_active
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started_at))
    took = duration(run.duration_s, decimals=int(not is_active))
    error = " ".join(run.error.split())[:_ERROR_CHARS]
    ranks = f"{run.world_size:,}"
    return (run.id, run.name, state, started, took, ranks, run.pool, error)


def table_of(runs: Sequence[Run]) -> str:
    """Return an HTML table with one row for each run, with coloured states and escaped texts."""
    cell = "text-align:left;padding:2px 12px 2px 0px;white-space:nowrap"
    head = "".join(f"<th style='{cell};opacity:0.6'>{escape(name)}</th>" for name in TABLE_HEAD)
    rows = []
    for run in runs:
        row = row_of(run)
        colour = COLOURS.get(row[2], COLOURS["STARTING"])
        styles = [f"{cell};color:{colour}" if value is row[2] else cell for value in row]
        cells = zip(styles, row, strict=True)
        rows.append("".join(f"<td style='{style}'>{escape(value)}</td>" for style, value in cells))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def runs() -> RunList:
    """Return all runs that still have a readable folder, newest first.

    Each cell of a session is a run in the list. A session's own run, which started the ranks, is
    not in the list; `%taas sessions` lists the sessions.
    """
    return RunList(run for run in newest_first() if not (run.path / SESSION_FILE).exists())


def newest_first() -> Iterator[Run]:
    """Yield all runs with a readable folder, newest first.

    The runs include each session's own run, which started the session's ranks. Read the folder of a
    run only when the caller asks for this run, so that a caller of a few runs need not wait long.
    """
    return journal.read_each_run(_open_run)


def sessions_last() -> Iterator[Run]:
    """Yield all runs, newest first, but sessions' own runs after all other runs.

    A session's own run started the session's ranks. This run is newer than the run of the session's
    first cell. But a user who asks for the newest run means the run of the cell.
    """
    own = []
    for run in newest_first():
        if (run.path / SESSION_FILE).exists():
            own.append(run)
        else:
            yield run
    yield from own


def find(asked: str | None, kinds: str = "run") -> Run:
    """Find the newest run that matches `asked`.

    Return a session's own run, which started the session's ranks, only if no other run matches.

    Args:
        asked: Id, beginning of an id, or name of the run. None for the newest run.
        kinds: Words for the error message, such as "run or session" in `No run or session "x"`.

    Raises:
        UsageError: There is no such run. The message lists the newest runs.
    """
    for run in sessions_last():
        if asked is None or _matches(run, asked):
            return run
    listed = ", ".join(run.id for run in islice(sessions_last(), 5))
    if not listed:
        raise UsageError("There is no run yet.")
    raise UsageError(f'No {kinds} "{asked}". The newest runs are: {listed}')


def _matches(run: Run, asked: str) -> bool:
    """Return whether `asked` is the id, the beginning of the id, or the name of a run."""
    return run.id.startswith(asked) or run.name == asked


def _find_preferring_active(asked: str, kinds: str = "run") -> Run:
    """Find the newest active run that matches `asked`; if none is active, do the same as `find`.

    Do not prefer an active session's own run to an ended cell. Otherwise, `stop` could end the
    session although the user means the cell.
    """
    newest = find(asked, kinds)
    if newest.is_active or newest.id == asked:
        return newest
    return next((run for run in runs() if _matches(run, asked) and run.is_active), newest)


def find_active(asked: str | None, *, chooses_sessions: bool = True) -> Run:
    """Find an active run: the newest active run that matches `asked`.

    Return a session's own run, which started the session's ranks, only if no other run matches.

    Args:
        asked: Id, beginning of an id, or name. None for the newest active run.
        chooses_sessions: Whether to return a session's own run if `asked` is None and no other run
            is active. False for a command that ends or detaches the run.

    Raises:
        UsageError: There is no such run, the run is not active, or no run is active.
    """
    if asked is not None:
        run = _find_preferring_active(asked)
        if not run.is_active:
            raise UsageError(f"run {run.id} is not running: {run.state}")
        return run
    for run in sessions_last():
        may_choose = chooses_sessions or not (run.path / SESSION_FILE).exists()
        if may_choose and run.is_active:
            return run
    raise UsageError("No run is running. %taas status lists the newest.")


def find_to_attach(
    asked: str | None, project: Path, is_hidden: Callable[[Run], bool] = lambda run: False
) -> Run:
    """Find the run that `%taas attach` shows.

    If several runs match a name, choose the newest active run, or the newest run if none is active.
    Without a name, choose the newest active run of the project, or the newest run of the project if
    no run of the project is active. If the project has no runs, choose among all runs in this way.

    Args:
        asked: Id, beginning of an id, or name of the run; None for a choice without a name.
        project: Folder of the project.
        is_hidden: Function that returns whether a run must not be chosen without a name, such as a
            session that this kernel cannot take over.

    Raises:
        UsageError: There is no such run. The message also speaks of sessions, because the user can
            attach sessions, too.
    """
    if asked is not None:
        return _find_preferring_active(asked, "run or session")
    found = [run for run in newest_first() if not is_hidden(run)]
    among = [run for run in found if run.context.project == str(project)] or found
    are_active = [run for run in among if run.is_active]
    return next(iter([*are_active, *among]), None) or find(None)


def _open_run(folder: RunFolder) -> Run:
    folder.plan()  # raises if the folder is broken
    return Run(folder.path)
