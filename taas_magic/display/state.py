"""What the head of a run knows: its events, folded into a state. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from taas_magic.advice import advice
from taas_magic.display.failure import headline
from taas_magic.flow import Flow
from taas_magic.journal import ENDED_STATES
from taas_magic.receipt import Receipt

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
    failures: list[Mapping[str, Any]] = field(default_factory=list)
    first: Mapping[str, Any] | None = None
    why: str = ""
    receipt: Receipt | None = None
    flow: Flow = field(default_factory=Flow)
    advice: str = ""

    def apply(self, event: Mapping[str, Any], now: float | None = None) -> None:
        """Takes the next event; kinds that say nothing about the head are ignored.

        Args:
            event: An event of the run.
            now: When it arrived, on the clock of `began`; default is the event's own time. Hosts'
                clocks may be days apart, so that a live view gives its own.
        """
        now = float(event.get("time", 0.0)) if now is None else now
        self.flow.apply(event, now)
        match event.get("kind"):
            case "state":
                self._enter(str(event["state"]), now)
            case "started":
                self._started(event, now)
            case "progress" if event["rank"] == 0:
                self._progressed(str(event["text"]))
            case "lines" if event["rank"] == 0 and self.progress:
                self._finish_progress(event["lines"])
            case "note":
                self._note(str(event["text"]))
            case "failure":
                self._failed(event["failure"])
            case "restart":
                self._restarted(event)
            case "receipt":
                self.receipt = (self.receipt or Receipt()).with_event(event)
            case "ended":
                self._ended(event, now)

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED_STATES

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

    def _started(self, event: Mapping[str, Any], now: float) -> None:
        host = str(event.get("host", ""))
        if host and host not in self.hosts:
            self.hosts.append(host)
        self.up.update(int(rank) for rank in event.get("pids", ()))
        if self.up_since is None:
            self.up_since = now

    def _progressed(self, text: str) -> None:
        """Takes the unfinished line; when there is none any more, a bar stays as it stood."""
        if text.strip() or not TQDM.match(self.progress):
            self.progress = text.strip()

    def _finish_progress(self, lines: list[str]) -> None:
        """A bar's last state arrives as a line, with its end."""
        for line in reversed(lines):
            if TQDM.match(line):
                self.progress = line
                return

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _failed(self, failure: Mapping[str, Any]) -> None:
        self.failures.append(failure)
        self.up.discard(failure.get("rank", -1))
        if self.first is None and not failure.get("consequence"):
            self.first = failure

    def _restarted(self, event: Mapping[str, Any]) -> None:
        self.restarts = int(event["attempt"])
        failure = event.get("failure")
        self.restart_cause = headline(failure) if failure else str(event.get("cause", ""))
        self.world_size = int(event.get("world_size", self.world_size))
        self.up.clear()
        self.failures.clear()
        self.first = None

    def _ended(self, event: Mapping[str, Any], now: float) -> None:
        self._enter(str(event["state"]), now)
        self.elapsed_s = event.get("elapsed_s")
        self.first = event.get("first")
        self.why = str(event.get("why") or "")
        self.failures = list(event.get("failures") or ())
        self.advice = advice(self.flow)
