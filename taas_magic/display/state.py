"""What the head of a run knows: its events, folded into a state. Pure."""

import re
from dataclasses import dataclass, field

from msgspec import structs

from taas_magic.display.failure import headline
from taas_magic.journal.analysis import Flow, advice
from taas_magic.journal.folder import ENDED_STATES
from taas_magic.messages import (
    Event,
    Failure,
    Hang,
    Lines,
    Note,
    Progress,
    RankFailure,
    RanksStarted,
    RankStand,
    Restart,
    RunEnded,
    Settled,
    StateChanged,
    StoreReceipt,
)
from taas_magic.store.receipt import Receipt

TQDM = re.compile(r"(?P<label>.*?)(?P<percent>\d{1,3})%\|[^|]*\|(?P<rest>.*)", re.DOTALL)


@dataclass
class RunState:
    """What is known of a run, folded from its events in the notebook's kernel.

    Attributes:
        run_id: The run's id.
        name: What the user calls it; "" for none.
        pool: The pool that runs it.
        world_size: Ranks in all.
        n_hosts: Hosts that the plan asks for.
        run_dir: The run folder.
        gpus: GPUs that the run holds; 0 for CPU ranks.
        units: The bound of `--units` for each loader; None for none.
        began: When the run began, on the caller's clock.
    """

    run_id: str
    name: str = ""
    pool: str = "local"
    world_size: int = 1
    n_hosts: int = 1
    run_dir: str = ""
    gpus: int = 0
    units: int | None = None
    began: float = 0.0
    state: str = "STARTING"
    hosts: list[str] = field(default_factory=list)
    up: set[int] = field(default_factory=set)
    up_since: float | None = None
    ended_at: float | None = None
    elapsed_s: float | None = None
    restarts: int = 0
    restart_cause: str = ""
    progress: str = ""
    notes: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    first: Failure | None = None
    why: str = ""
    receipt: Receipt | None = None
    flow: Flow = field(default_factory=Flow)
    advice: str = ""
    hangs: dict[str, tuple[float, list[RankStand]]] = field(default_factory=dict)
    """By host, when it said that none of its ranks comes forward, and where they stand."""
    settled: set[str] = field(default_factory=set)

    def apply(self, event: Event, now: float | None = None) -> None:
        """Takes the next event; those that say nothing about the head are ignored.

        Args:
            event: An event of the run.
            now: When it arrived, on the clock of `began`; default is the event's own time. Hosts'
                clocks may be days apart, so that a live view gives its own.
        """
        now = event.time if now is None else now
        self.flow.apply(event, now)
        match event:
            case StateChanged():
                self._enter(event.state, now)
            case RanksStarted():
                self._started(event, now)
            case Progress(rank=0):
                self._progressed(event.text)
            case Lines(rank=0):
                self._finish_progress(event.lines)
            case Note():
                self._note(event.text)
            case RankFailure():
                self._failed(event.failure)
            case Restart():
                self._restarted(event)
            case Hang() if event.attempt == self.restarts:
                self.hangs[event.host] = now, event.ranks
            case Settled():
                self.settled.add(event.host)
            case StoreReceipt():
                self.receipt = (self.receipt or Receipt()).with_event(event)
            case RunEnded():
                self._ended(event, now)

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED_STATES

    @property
    def hang(self) -> list[RankStand]:
        """Where ranks stand, if none of any host comes forward; `since` is by `began`'s clock."""
        said = {host: found for host, found in self.hangs.items() if found[1]}
        if self.has_ended or not said or set(self.hosts) - self.settled - said.keys():
            return []
        return [
            structs.replace(row, host=host, since=at - row.quiet_s)
            for host, (at, rows) in said.items()
            for row in rows
        ]

    def elapsed(self, now: float) -> float:
        """Seconds since the run began; for one that ended, how long it took."""
        if self.elapsed_s is not None:
            return self.elapsed_s
        return max(0.0, (now if self.ended_at is None else self.ended_at) - self.began)

    def gpu_seconds(self, now: float) -> float:
        """GPUs held, times the seconds since their ranks started."""
        if self.up_since is None:
            return 0.0
        until = now if self.ended_at is None else self.ended_at
        return self.gpus * max(0.0, until - self.up_since)

    def _enter(self, state: str, now: float) -> None:
        self.state = state
        if self.has_ended and self.ended_at is None:
            self.ended_at = now

    def _started(self, event: RanksStarted, now: float) -> None:
        if event.host and event.host not in self.hosts:
            self.hosts.append(event.host)
        self.up.update(event.pids)
        if self.up_since is None:
            self.up_since = now

    def _progressed(self, text: str) -> None:
        """Takes the unfinished line; when there is none any more, a bar stays as it stood."""
        if text.strip() or not TQDM.match(self.progress):
            self.progress = text.strip()

    def _finish_progress(self, lines: list[str]) -> None:
        """Takes a bar's last state, which is a line; a quick loop's bar is nothing else."""
        for line in reversed(lines):
            if "%|" in line and TQDM.match(line):
                self.progress = line
                return

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _failed(self, failure: Failure) -> None:
        self.failures.append(failure)
        if failure.rank is not None:
            self.up.discard(failure.rank)
        if self.first is None and not failure.consequence:
            self.first = failure

    def _restarted(self, event: Restart) -> None:
        self.restarts = event.attempt
        self.restart_cause = headline(event.failure) if event.failure else event.cause
        self.world_size = event.world_size or self.world_size
        self.up.clear()
        self.hangs.clear()
        self.settled.clear()
        self.failures.clear()
        self.first = None

    def _ended(self, event: RunEnded, now: float) -> None:
        self._enter(event.state, now)
        self.elapsed_s, self.first, self.why = event.elapsed_s, event.first, event.why
        self.failures = event.failures
        self.advice = advice(self.flow)
