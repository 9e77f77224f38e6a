"""How the ranks of one run stand on this host, and what follows.

The agent observes and acts; what decides is pure, so that a test can put any situation: the time is
given. The thread that reads the ranks' pipes brings messages, the run's thread asks the system; one
lock is between them.
"""

import contextlib
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from taas_magic.errors import TaasError, signal_name
from taas_magic.host.system import status_of
from taas_magic.leases import STOPPED_S
from taas_magic.messages import (
    Event,
    Failure,
    Note,
    RankBeat,
    RankFinished,
    RankLeft,
    RankMessage,
    RankRaised,
    RankReport,
    RankReported,
    RankReturned,
    RankShowed,
    RankSight,
    RankUp,
    StackFrame,
    StoreMessage,
)

SETTLE_S = 0.5
"""After the first failure, how long the other ranks may show theirs: the cause may come second."""

LEFT_GRACE_S = 3.0
"""How long the others may go on after a rank left by `sys.exit(0)`."""

REPORT_S = 20.0
"""How long a failed rank's drawn traceback and its results may take to come."""

COLLECTIVE_S = 20.0
"""How long ranks may stand still while one of them is in a collective, before that is said."""

INTERRUPT_GRACE_S = 5.0
"""How long ranks may take to end after an interrupt, before they are killed."""

HALT_S = 30.0
"""How long a host may take to end a run that was halted; then the host is ended and replaced."""

_CONSEQUENCES = re.compile(
    r"connection (was (likely )?)?(closed|reset|refused|aborted)|broken pipe|(by|remote) peer"
    r"|socket ((unexpectedly )?closed|timeout)|remote process exited|store.*(timeout|timed out)"
    r"|nccl.*(abort|remote|unhandled system)|timed out waiting|connectfullmesh",
    re.IGNORECASE,
)
_DISTRIBUTED_TYPES = frozenset(
    {"DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "RuntimeError"}
    | {"ConnectionResetError", "ConnectionError", "BrokenPipeError", "EOFError"}
)


@dataclass
class RankState:
    """What is known of one rank of this host.

    Times are of the agent's monotonic clock, in seconds; None is "has not happened".
    """

    rank: int
    pid: int
    finished: bool = False
    """It has said that the cell ran to its end."""
    exitcode: int | None = None
    failed_at: float | None = None
    showed_at: float | None = None
    """When IPython first showed an exception after which the cell went on."""
    is_reporting: bool = False
    """It has said what it raised; IPython's drawing of it, and its results, have not come yet."""
    has_returned: bool = False
    """It has ended the cell and waits at the prompt of its session."""
    was_cut: bool = False
    """Its connections to other ranks were cut to end a collective."""
    left_at: float | None = None
    stopped_at: float | None = None
    etype: str = ""
    etype_module: str = ""
    message: str = ""
    traceback: list[str] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)
    hint: str = ""
    forward_at: float = 0.0
    """When it last wrote, was handed a batch, computed, or did a collective."""
    beat: RankBeat = field(default_factory=RankBeat)
    """Its last one."""
    beat_at: float = 0.0
    sight: RankSight | None = None
    """Where it said it stands; None while it has not answered."""
    sight_at: float = 0.0
    process: psutil.Process | None = None
    is_up: bool = False
    """Whether it would hear an interrupt; not any more once it was sent one."""
    started_at: float = 0.0
    kills: dict[str, int] = field(default_factory=dict)
    """What `oom_kills` returned when it started."""
    batches: dict[str, int] = field(default_factory=dict)
    """How many it was handed of each loader, as it last reported."""

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self.exitcode is not None

    @property
    def done(self) -> bool:
        """Whether it succeeded: the cell ran to its end, and the process ended well.

        A rank of a session returns to its prompt instead of ending.
        """
        return self.finished and (self.exitcode == 0 or (self.has_returned and not self.ended))

    @property
    def is_over(self) -> bool:
        """Whether it runs the cell no more: it has ended, or returned to its prompt."""
        return self.ended or self.has_returned


@dataclass(frozen=True)
class Verdict:
    """The run is over on this host.

    Attributes:
        state: SUCCEEDED, FAILED or INTERRUPTED.
        cause: rank, left, stopped, timeout, interrupt or host; empty on success.
    """

    state: str
    cause: str = ""


def decide(
    ranks: Collection[RankState],
    now: float,
    deadline: float | None = None,
    interrupted_at: float | None = None,
) -> Verdict | None:
    """Say how the run stands; None while it goes on.

    Args:
        now: The agent's monotonic clock, as all times.
        deadline: When `--timeout` ends the run.
        interrupted_at: When the user interrupted it.
    """
    gone = all(rank.is_over for rank in ranks)
    if all(rank.done for rank in ranks):
        return Verdict("SUCCEEDED")
    if interrupted_at is not None:
        over = gone or now - interrupted_at >= INTERRUPT_GRACE_S
        return Verdict("INTERRUPTED", "interrupt") if over else None
    failed = [rank.failed_at for rank in ranks if rank.failed_at is not None]
    if failed:
        reporting = any(rank.is_reporting and not rank.is_over for rank in ranks)
        settled = now - min(failed) >= (REPORT_S if reporting else SETTLE_S)
        return Verdict("FAILED", "rank") if gone or settled else None
    if deadline is not None and now >= deadline:
        return Verdict("FAILED", "timeout")
    if _since(ranks, "left_at", now) >= LEFT_GRACE_S:
        return Verdict("FAILED", "left")
    if _since(ranks, "stopped_at", now) >= STOPPED_S:
        return Verdict("FAILED", "stopped")
    return None


def still_since(ranks: Collection[RankState], now: float) -> float:
    """Return since when no rank that is left has come forward; `now` where none is left."""
    return max((rank.forward_at for rank in ranks if not rank.is_over), default=now)


def _since(ranks: Collection[RankState], what: str, now: float) -> float:
    times = [getattr(rank, what) for rank in ranks if getattr(rank, what) is not None]
    return now - min(times) if times else 0.0


def is_consequence(etype: str, message: str) -> bool:
    """Return whether an error reads like what a rank sees when another one is gone."""
    return etype in _DISTRIBUTED_TYPES and _CONSEQUENCES.search(message) is not None


def guilty(ranks: Collection[RankState], cause: str) -> list[RankState]:
    """Return the ranks that failed, the first one first.

    A rank that died or raised an error of its own comes before one whose error only says that a
    peer is gone, and a rank that left early comes before both kinds of its consequences.
    """
    if cause == "timeout":
        return sorted((rank for rank in ranks if not rank.done), key=lambda rank: rank.rank)
    failed = [rank for rank in ranks if rank.failed_at is not None]
    if cause == "stopped":
        failed += [rank for rank in ranks if rank.stopped_at is not None]
    own = [rank for rank in failed if not is_consequence(rank.etype, rank.message)]
    if not own:
        failed += [rank for rank in ranks if rank.left_at is not None and rank not in failed]

    def order(rank: RankState) -> tuple[bool, float, int]:
        known = (rank.showed_at, rank.failed_at, rank.left_at, rank.stopped_at)
        times = [at for at in known if at is not None]
        return is_consequence(rank.etype, rank.message), min(times), rank.rank

    return sorted(failed, key=order)


def first_failure(failures: Sequence[Failure]) -> Failure | None:
    """Return the failure to show, of those of all hosts in the order they were reported."""
    own = [failure for failure in failures if not failure.consequence]
    return next(iter(own or failures), None)


_CGROUPS, _KERNEL_LOG = Path("/sys/fs/cgroup"), Path("/dev/kmsg")
_OOM_RECORD = re.compile(
    rb"\d+,\d+,(?P<us>\d+),[^;]*;(?P<of_cgroup>Memory cgroup o|O)ut of memory.*: "
    rb"Killed process (?P<pid>\d+)"
)
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
_RECORD_BYTES = 8192
_LOG_SLACK_S = 1.0
"""How far the clock of the kernel's log may be from the monotonic one."""


def oom_kills(pid: int) -> dict[str, int]:
    """Return how often the system has killed for want of memory in a process's cgroup, by file.

    The system counts a kill in the cgroup of the process that it killed, whatever had run out of
    memory. Empty where it tells nothing.
    """
    counts = {str(file): _count(file) for file in _cgroup_files(pid)}
    return {name: count for name, count in counts.items() if count is not None}


def out_of_memory(pid: int, started_at: float, before: dict[str, int]) -> str:
    """Return which memory ran out if a process was killed for that; "" if it was not.

    The kernel's log names the process. Where the log cannot be read, a kill in the process's
    cgroup counts.

    Args:
        started_at: When the process started, by the monotonic clock.
        before: What `oom_kills` returned then.
    """
    grown = [name for name, count in before.items() if (_count(Path(name)) or 0) > count]
    cgroup = f"the memory limit of its cgroup ({Path(grown[0]).parent})" if grown else ""
    if (logged := _logged_kill(pid, started_at)) is None:
        return f"probably killed by {cgroup}" if cgroup else ""
    return {
        "": "",
        "cgroup": f"killed by {cgroup or 'the memory limit of its cgroup'}",
        "machine": "killed by the kernel's out-of-memory killer: the host had no memory left",
    }[logged]


def _logged_kill(pid: int, started_at: float, log: Path = _KERNEL_LOG) -> str | None:
    """Return whose memory ran out when the kernel killed a process: "cgroup", "machine", or "".

    None where the log says nothing of this: nobody may read it, or it has other process numbers.
    """
    try:
        if os.readlink("/proc/self/ns/pid") != _FIRST_PID_NAMESPACE:
            return None
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    found = ""
    with open(descriptor, "rb", buffering=0) as file:
        while record := _record(file):
            match = _OOM_RECORD.match(record)
            since = (started_at - _LOG_SLACK_S) * 1e6
            if match is not None and int(match["pid"]) == pid and int(match["us"]) >= since:
                found = "machine" if match["of_cgroup"] == b"O" else "cgroup"
    return found


def _record(file: IO[bytes]) -> bytes:
    """Return the next record of the kernel's log; b"" after the last one."""
    while True:
        try:
            return file.read(_RECORD_BYTES) or b""
        except BrokenPipeError:  # the record was overwritten; the next read has the one after it
            continue


def _cgroup_files(pid: int) -> list[Path]:
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files.append(_CGROUPS / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(_CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
    return files


def _count(file: Path) -> int | None:
    try:
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found is not None else None


_SHELL, _OURS = "/IPython/core/", "/taas_magic/"

_ADVICE = {
    "SIGKILL": "something on the host killed it; the system's log (dmesg) may say why",
    "SIGSEGV": "native code crashed; the Python stack above is where it was called",
    "SIGBUS": "often shared memory is full: `df -h /dev/shm` on that host",
    "SIGABRT": "native code called abort(); its last output is above",
    "left": "end a rank by letting the cell end; all ranks must take the same number of steps",
    "exit": "os._exit ends a rank before the cell's end; raise an exception instead",
    "end": "it failed after the cell's last line: in atexit, a thread, or native code",
    "stopped": "it was stopped from outside (SIGSTOP); nothing that it did can have caused that",
    "timeout": "raise --timeout, or look at the lines above, where the ranks were",
}


def failure_of(
    state: RankState,
    verdict: Verdict,
    host: str,
    log_path: str,
    tail: list[str],
    timeout_s: float | None = None,
) -> Failure:
    """Return why a rank failed; docs/events.md says what each field means."""
    kind, by_signal = _kind(state, verdict), signal_name(state.exitcode or 0)
    said = state.message or state.hint
    return Failure(
        rank=state.rank,
        host=host,
        pid=state.pid,
        how=kind,
        etype=state.etype if kind == "raised" else "",
        etype_module=state.etype_module if kind == "raised" else "",
        message=f"exceeded --timeout {timeout_s:g}s" if kind == "timeout" else said,
        traceback=state.traceback,
        stack=[] if state.traceback else state.stack or _lines_of(state.beat.stack),
        signal=by_signal,
        exitcode=state.exitcode,
        consequence=kind == "raised" and is_consequence(state.etype, state.message),
        log_path=log_path,
        advice=_ADVICE.get(by_signal or kind, ""),
        tail=[] if kind == "raised" else tail,
    )


def _lines_of(frames: list[StackFrame]) -> list[str]:
    return "".join(traceback.format_list(frames)).splitlines()


def users_frames(text: str) -> list[str]:
    """Return the user's part of each thread of a stack that faulthandler wrote: above IPython's.

    Frames are innermost first, threads are set apart by empty lines; our own have no such part.
    """
    found: list[str] = []
    for block in text.split("\n\n"):
        lines = block.strip("\n").splitlines()
        at = next((i for i, line in enumerate(lines) if _SHELL in line), None)
        is_ours = at is None and any(_OURS in line for line in lines)
        if not is_ours and not block.lstrip().startswith("Extension modules:"):
            found += lines[:at]
    return found


def _kind(state: RankState, verdict: Verdict) -> str:
    if state.etype:
        return "raised"
    if state.left_at is not None and not state.exitcode:
        return "left"
    if state.ended:
        if state.finished:
            return "end"
        return "signal" if (state.exitcode or 0) < 0 else "exit"
    return verdict.cause if verdict.cause in ("stopped", "timeout", "left") else "left"


def host_failure(host: str, error: BaseException) -> Failure:
    """Return the failure of a host where something other than a rank went wrong.

    An error of ours says by itself what the user can do; of another the traceback may tell.
    """
    lines = [] if isinstance(error, TaasError) else traceback.format_exception(error)
    return Failure(
        host=host, how="host", etype=type(error).__name__, message=str(error), traceback=lines
    )


class Ranks:
    """The ranks of one attempt.

    Args:
        ranks: Their global ranks; known before the processes are, since a fast rank speaks first.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._lock = threading.Lock()
        self._states = {rank: RankState(rank, pid=0) for rank in ranks}

    def started(self, pids: dict[int, int]) -> None:
        """Take down the process of each rank; one may have ended already."""
        with self._lock:
            for rank, pid in pids.items():
                state = self._states[rank]
                state.pid, state.kills = pid, oom_kills(pid)
                state.started_at = state.forward_at = time.monotonic()
                with contextlib.suppress(psutil.NoSuchProcess):
                    state.process = psutil.Process(pid)

    def states(self) -> list[RankState]:
        """Return what is known of each rank."""
        with self._lock:
            return list(self._states.values())

    def hear(self, rank: int, message: Event | RankMessage | StoreMessage) -> None:
        """Take down what a rank says; it comes forward, unless it only says where it stands."""
        now = time.monotonic()
        with self._lock:
            state = self._states[rank]
            match message:
                case RankUp():
                    state.is_up = True
                case RankRaised():
                    state.failed_at = state.failed_at or now
                    state.is_reporting = True
                    state.etype, state.message = message.etype, message.message
                    state.etype_module = message.etype_module
                    state.traceback = message.traceback
                case RankShowed():
                    state.showed_at = state.showed_at or now
                case RankLeft():
                    state.left_at, state.stack = now, message.stack
                case RankReported():
                    state.is_reporting = False
                case RankFinished():
                    state.finished = True
                case RankReturned():
                    state.has_returned, state.is_up = True, False
                    state.was_cut = message.was_cut
                case RankSight():
                    state.sight, state.sight_at = message, now
                case RankBeat():
                    if message.collectives != state.beat.collectives:
                        state.forward_at = now
                    state.beat, state.beat_at = message, now
                case RankReport():
                    batches = {name: counts.batches for name, counts in message.loaders.items()}
                    if batches == state.batches:
                        return  # nothing new
                    state.batches = batches
            if not isinstance(message, RankBeat | RankSight | Note):
                state.forward_at = now

    def ended(self, rank: int, exitcode: int, stack: Path) -> None:
        """Take down that a rank is gone, and why, if it should not have ended.

        Args:
            stack: The file in which a rank that a signal killed left its Python stack.
        """
        with self._lock:
            state = self._states[rank]
            state.exitcode = exitcode
            if state.done:
                return
            state.failed_at = state.failed_at or time.monotonic()
            if stack.exists():
                state.stack = users_frames(stack.read_text(errors="replace")) or state.stack
            if exitcode == -signal.SIGKILL:
                state.hint = out_of_memory(state.pid, state.started_at, state.kills)

    def poll(self, now: float) -> None:
        """Ask the system which ranks are stopped."""
        with self._lock:
            for state in [state for state in self._states.values() if not state.ended]:
                status = status_of(state.process)
                if status == psutil.STATUS_STOPPED:
                    state.stopped_at = state.stopped_at or now
                elif status:
                    state.stopped_at = None

    def interrupt(self) -> None:
        """Send SIGINT, once, to every rank that has said that it would hear it."""
        with self._lock:
            for state in self._states.values():
                if state.is_up and not state.ended:
                    state.is_up = False
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(state.pid, signal.SIGINT)

    def alive(self) -> list[psutil.Process]:
        """Return the ranks' processes that are still there."""
        with self._lock:
            processes = [state.process for state in self._states.values()]
        return [process for process in processes if process is not None and status_of(process)]
