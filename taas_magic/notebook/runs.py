"""Runs as their folders tell of them: `taas.runs()`, `taas.last_run`, and what the commands find.

Any process of the user can read a run, while it is active and long after its end.
"""

import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from html import escape
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython
from msgspec import structs

from taas_magic import messages
from taas_magic.display.failure import cause_of, headline, to_exception, with_labels
from taas_magic.display.head import COLOURS, RunState, duration
from taas_magic.display.replay import Replay
from taas_magic.errors import ResultError, UsageError, interrupted
from taas_magic.host import results
from taas_magic.host.spec import VALUE
from taas_magic.journal import folder as journal
from taas_magic.journal import metrics
from taas_magic.journal.analysis import Flow, advice, draw
from taas_magic.journal.folder import ENDED_STATES, PlanHead, RunContext, RunFolder, RunSummary
from taas_magic.journal.reader import JournalReader
from taas_magic.messages import RunEnded
from taas_magic.notebook.logs import log_text
from taas_magic.plan import Plan
from taas_magic.store.receipt import Receipt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FOR_USERS = (
    *("advice", "elapsed_s", "error", "failed_rank", "failures", "hosts", "is_active", "log_path"),
    *(
        "logs",
        "metrics",
        "missing",
        "name",
        "out",
        "path",
        "plan",
        "plot",
        "pool",
        "receipt",
        "result",
    ),
    *("run_id", "started", "state", "wait", "waited", "world_size"),
)

POLL_S = 0.2
"""How often a journal is looked at for what was added."""


class Run:
    """One execution of a cell on N ranks, of any kernel; read from its folder, never written.

    Args:
        path: The run's folder.
        live: The state of a run that this kernel follows; None reads the journal.
    """

    def __init__(self, path: Path, live: RunState | None = None) -> None:
        self.path = path
        self.live = live
        self._folder = RunFolder(path)
        self._reader = JournalReader(self._folder.events)
        self._replay: Replay | None = None
        self._received: results.Received | None = None

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._folder.run_id

    @property
    def name(self) -> str:
        """The name that `--name` gave it."""
        return self._about.name

    @property
    def pool(self) -> str:
        """The pool that has its ranks."""
        return self._about.pool

    @property
    def world_size(self) -> int:
        """Ranks in all, as planned: a run may have grown since."""
        return self._about.world_size

    @cached_property
    def plan(self) -> Plan:
        """What was decided before it started."""
        return messages.unpack((self.path / "plan.json").read_bytes(), Plan)

    @cached_property
    def context(self) -> RunContext:
        """What its notebook recorded for other processes."""
        return self._folder.context()

    @property
    def state(self) -> str:
        """STARTING, RUNNING, SUCCEEDED, FAILED, INTERRUPTED or LOST."""
        return self.live.state if self.live else self._summary().state

    @property
    def is_active(self) -> bool:
        """Whether it has not ended."""
        return self.state not in ENDED_STATES

    @property
    def started(self) -> float:
        """When its hosts were there, in seconds since 1970."""
        return self._summary().started

    @property
    def elapsed_s(self) -> float:
        """Seconds from its start to its end, or until now."""
        if self.live and self.live.has_ended:
            return self.live.elapsed_s or 0.0
        return self._summary().elapsed_s

    @property
    def head(self) -> RunState:
        """All that its events came to; the head above its log shows this."""
        if self.live:
            return self.live
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
        """Names of the hosts of its newest attempt."""
        return list(self.head.hosts)

    @property
    def failures(self) -> list[dict[str, Any]]:
        """What went wrong on which rank, the first failure first; docs/events.md has the keys."""
        head = self.head
        return [structs.asdict(failure) for failure in head.failures] if head.has_ended else []

    @property
    def failed_rank(self) -> int | None:
        """The rank that failed first."""
        first = self.live.first if self.live else self._summary().first
        return first.rank if first else None

    @property
    def error(self) -> str:
        """What went wrong, in one line; "" where nothing did."""
        about = self.live or self._summary()
        return headline(about.first) if about.first else about.why

    @property
    def receipt(self) -> Receipt:
        """What rank 0 wrote to the project store, and what was kept out of it."""
        return self.head.receipt or Receipt()

    @property
    def out(self) -> dict[str, Any]:
        """The variables that `--out` brought back, also from a run that failed; loaded once."""
        return {name: value for name, value in self._results().values.items() if name != VALUE}

    @property
    def missing(self) -> dict[str, str]:
        """Names of `--out` that did not come, each with the reason."""
        return self._results().missing

    @property
    def result(self) -> Any:
        """The value of the cell's last expression on rank 0, if it could travel."""
        return self._results().values.get(VALUE)

    @property
    def result_notes(self) -> list[str]:
        """What the user should know about how results were loaded."""
        return list(self._results().notes)

    @property
    def advice(self) -> str:
        """What to change when ranks waited for data; "" where there is nothing to say."""
        return advice(self._flow())

    @property
    def waited(self) -> dict[str, float]:
        """The share of their time with each loader that ranks waited for it, from 0 to 1."""
        return {loader.name: loader.mean.share for loader in self._flow().loaders.values()}

    @property
    def metrics(self) -> Any:
        """What ranks logged by `taas.log`: one row for each step and rank, a column each metric.

        A pandas DataFrame with the columns `step`, `rank`, `time` and the metrics; a dict of lists
        if pandas is not installed.
        """
        return metrics.read(self.path)

    def plot(self) -> "Figure":
        """Draw how long ranks waited for data, and how fast it came, over time.

        Raises:
            UsageError: matplotlib is missing, or the run used no registered loader.
        """
        return draw(self._folder.read_events(), f"{self.run_id} {self.name}".rstrip())

    def logs(self, rank: int | None = None, tail: int | None = None, grep: str = "") -> str:
        """Return what a rank wrote to its output and error, and the traceback if it raised.

        Args:
            rank: None is the rank that failed first, or 0.
            tail: How many of the last lines; None returns all.
            grep: A regular expression; lines without it are left out.

        Raises:
            UsageError: The run has no such rank, or `grep` is no regular expression.
        """
        return log_text(self.log_path(rank), tail, grep)

    def log_path(self, rank: int | None = None) -> Path:
        """Return the file of that; where the rank wrote nothing, there is none.

        Raises:
            UsageError: The run has no such rank.
        """
        rank = rank if rank is not None else self.failed_rank or 0
        path, most = self._folder.log(rank), self.world_size
        if not 0 <= rank < most and not path.exists():  # a run that has grown has more
            raise UsageError(f"run {self.run_id} has ranks 0 to {most - 1}; got {rank}")
        return path

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Return what `--out` brought when the run has ended; raise what went wrong.

        An interrupt ends the waiting, not the run.

        Args:
            timeout_s: How long to wait; None waits until the end.

        Raises:
            TimeoutError: The run goes on.
            ResultError: The run succeeded, but not all that `--out` names came.
            RunError: The cell failed on a rank.
            RunLost: The hosts, or the process that owned the run, are gone.
            StoreError: The project store could not get to a host.
            KeyboardInterrupt: The user interrupted the waiting, or the run was stopped.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while self.is_active:
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"run {self.run_id} goes on after {timeout_s:g} s")
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            raise interrupted(goes_on(self.run_id)) from None
        self.raise_failure()
        return self.out

    def raise_failure(self) -> None:
        """Raise what went wrong in a run that has ended.

        Raises:
            KeyboardInterrupt: The run was interrupted or stopped.
            ResultError: It succeeded, but not all that `--out` names came.
            RunError: The cell failed on a rank.
            RunLost: The hosts, or the process that owned the run, are gone.
            StoreError: The project store could not get to a host.
        """
        head, names = self.head, ", ".join(self.out)
        if head.state == "INTERRUPTED":
            came = f"returned: {names}" if names else "nothing was returned"
            said = f"Stopped by you after {duration(self.elapsed_s)}; {came}. {head.why}"
            raise interrupted(said.rstrip())
        if head.state != "SUCCEEDED":
            first = with_labels(head.first, self.context.labels)
            failures = list(head.failures)
            raised = to_exception(
                RunEnded(state=head.state, first=first, failures=failures, why=head.why)
            )
            raise raised from cause_of(head.first, _names_of_notebook())
        if self.missing:
            came = f"; these were returned: {names}" if names else ""
            raise ResultError(
                f"run {self.run_id} succeeded, but not all of --out could be returned{came}\n"
                + "\n".join(f"    {name}: {why}" for name, why in self.missing.items())
            )

    def unrecorded_end(self) -> RunEnded | None:
        """Return the end of a run whose owner has gone without recording it, else None."""
        found = self._summary()
        if found.state != "LOST":
            return None
        at = found.started + found.elapsed_s
        return RunEnded(state="LOST", elapsed_s=found.elapsed_s, why=found.why, time=at)

    def new_state(self) -> RunState:
        """Return the state that the run had before its first event."""
        began = (self.path / "plan.json").stat().st_mtime
        return RunState(self.plan, self.path, began=began)

    def __dir__(self) -> list[str]:
        """Return the names for users."""
        return sorted(_FOR_USERS)

    def __repr__(self) -> str:
        return f"<Run {self.run_id} {self.name}: {self.state}, {self.path}>"

    def _repr_html_(self) -> str:
        """Return a table with this run."""
        return table_of([self])

    @cached_property
    def _about(self) -> PlanHead:
        return self._folder.plan()

    def _summary(self) -> RunSummary:
        return journal.summary(self._folder)

    def _results(self) -> results.Received:
        if self._received is None:
            if self.is_active:
                return results.Received()
            head, pool = self.head, self.plan.untrusted_pool
            sources = results.Sources(head.last_attempt, head.world_size, pool)
            self._received = results.receive(
                self._folder.results, self.plan.out, sources, _names_of_notebook()
            )
        return self._received

    def _flow(self) -> Flow:
        flow = Flow()
        for seen in self._folder.read_events():
            flow.apply(seen, seen.time)
        return flow


def compare(*runs: Run, metric: str | None = None) -> "Figure":
    """Draw the same metric of several runs over the steps, one line for each run's rank 0.

    Args:
        *runs: The runs, such as `*taas.runs()[:2]`.
        metric: Which metric; None draws the first one that all runs have.

    Raises:
        UsageError: No run is given, matplotlib is missing, or not all runs have the metric.
    """
    if not runs:
        raise UsageError("taas.compare needs runs: taas.compare(*taas.runs()[:2])")
    return metrics.draw({f"{run.run_id} {run.name}".rstrip(): run.metrics for run in runs}, metric)


def _names_of_notebook() -> dict[str, Any]:
    """Return the variables of the notebook whose kernel this is; none in a terminal."""
    shell = get_ipython()
    return {} if shell is None else shell.user_ns


def goes_on(run_id: str) -> str:
    """Return what a user is told who stops looking at a run."""
    return (
        f"Run {run_id} goes on: `%taas attach {run_id}` shows it again, "
        f"`%taas stop {run_id}` ends it."
    )


class RunList(list[Run]):
    """Runs, newest first; a notebook shows them as a table."""

    def _repr_html_(self) -> str:
        return table_of(self)


TABLE_HEAD = ("id", "name", "state", "started", "duration", "ranks", "pool", "error")
_ERROR_CHARS = 160


def row_of(run: Run) -> tuple[str, ...]:
    """Return what tables show of a run, below TABLE_HEAD."""
    state, is_active = run.state, run.is_active
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started))
    took = duration(run.elapsed_s, decimals=int(not is_active))
    error = " ".join(run.error.split())[:_ERROR_CHARS]
    ranks = f"{run.world_size:,}"
    return (run.run_id, run.name, state, started, took, ranks, run.pool, error)


def table_of(runs: Sequence[Run]) -> str:
    """Return a table of runs as HTML; all that comes from outside is escaped."""
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
    """Return the runs whose folders are kept and can be read, newest first."""
    return RunList(newest())


def newest() -> Iterator[Run]:
    """Yield the same one by one; nothing is read of a run that is not asked for."""
    return journal.readable(_run_of)


def find(asked: str | None) -> Run:
    """Return the run of that id, of an id that begins so, or of that name; None is the newest.

    Raises:
        UsageError: There is none.
    """
    for run in newest():
        if asked is None or run.run_id.startswith(asked) or run.name == asked:
            return run
    listed = ", ".join(islice(journal.ids(), 5))
    if not listed:
        raise UsageError("There is no run yet.")
    raise UsageError(f'No run "{asked}". The newest are: {listed}')


def active(asked: str | None) -> Run:
    """Return the run that is meant, or the newest one that is active.

    Raises:
        UsageError: It is not active, or none is.
    """
    for run in newest() if asked is None else [find(asked)]:
        if run.is_active:
            return run
        if asked is not None:
            raise UsageError(f"run {run.run_id} is not running: {run.state}")
    raise UsageError("No run is running. %taas status lists the newest.")


def to_attach(asked: str | None, project: Path) -> Run:
    """Return the run that is meant, or the newest active one of a project, else its newest.

    In a folder that has no runs, the runs of all projects count.

    Raises:
        UsageError: There is none.
    """
    if asked is not None:
        return find(asked)
    own = [run for run in newest() if run.context.project == str(project)]
    among = own or runs()
    are_active = [run for run in among if run.is_active]
    return next(iter([*are_active, *among]), None) or find(None)


def _run_of(folder: RunFolder) -> Run:
    folder.plan()  # raises where the folder is broken
    return Run(folder.path)
