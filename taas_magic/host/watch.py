"""Track the state of a run's ranks on this host, and decide when the run is over on this host.

The functions that decide have no side effects, and get the time as an argument. Two threads update
the states of the ranks (`Ranks`): one thread reads the ranks' messages, and the run's thread
queries the operating system.
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
    RankCalledExit,
    RankCreatesGroup,
    RankErrorSent,
    RankFinished,
    RankIdle,
    RankMessage,
    RankRaised,
    RankReport,
    RankShowedError,
    RankStackSample,
    RankTakesInterrupts,
    StackFrame,
    StoreMessage,
)

FURTHER_FAILURES_S = 0.5
"""Seconds to wait, after the first failure of a rank, for failures of other ranks.

A failure that another rank reports a little later may be the cause of the first failure.
"""

LEFT_GRACE_S = 3.0
"""Seconds that other ranks may continue after one rank has left by `sys.exit(0)`.

If not all ranks have succeeded by then, the run fails.
"""

TRACEBACK_WAIT_S = 20.0
"""Maximum seconds, after a failure, until the failed rank has sent its traceback and results.

Then the run ends on this host without them.
"""

COLLECTIVE_S = 20.0
"""Seconds without progress after which the agent sends a `Hang` event if a rank is in a collective.

If the time of `--hang` is shorter, or no rank is in a collective, the time of `--hang` applies.
"""

INTERRUPT_GRACE_S = 5.0
"""Seconds that ranks have to end after an interrupt by the user. Then the agent kills them."""

HALT_S = 30.0
"""Seconds that a host has to end a halted run. Then the pool ends and replaces the host."""

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
    """The state of one rank of this host, as the agent knows it.

    Attributes whose names end in `_at` are times in seconds of the agent's monotonic clock. None
    or 0 means that the event has not happened.
    """

    rank: int
    pid: int
    finished: bool = False
    """Whether the rank has reported that its work succeeded (`RankFinished`)."""
    exitcode: int | None = None
    failed_at: float | None = None
    showed_at: float | None = None
    """Time at which the rank first reported an exception after which its cell continued."""
    is_reporting: bool = False
    """Whether the rank has reported an exception, but not yet sent its full traceback and results.
    """
    has_returned: bool = False
    """Whether the rank has ended the cell and waits at the prompt of its session."""
    was_cut: bool = False
    """Whether the rank has cut its connections to other ranks, to end a collective."""
    has_new_group: bool = False
    """Whether the rank has created a new default process group in the cell."""
    left_at: float | None = None
    stopped_at: float | None = None
    etype: str = ""
    etype_module: str = ""
    message: str = ""
    traceback: list[str] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)
    hint: str = ""
    progress_at: float = 0.0
    """Time at which the rank last made progress: output, a batch, a collective, or use of a CPU."""
    beat: RankBeat = field(default_factory=RankBeat)
    """The rank's last heartbeat."""
    beat_at: float = 0.0
    n_beats: int = 0
    n_collective_beats: int = 0
    """Number of the rank's heartbeats that were sent while the rank was in a collective."""
    sample: RankStackSample | None = None
    """The rank's last stack report.

    None before the first stack report, and if the rank has not responded to the last request in
    time.
    """
    sampled_at: float = 0.0
    """Time at which the rank's last stack report (`sample`) arrived."""
    process: psutil.Process | None = None
    takes_interrupt: bool = False
    """Whether the agent may send SIGINT to the rank.

    Becomes True when the rank reports that it accepts SIGINT. Becomes False when the agent sends
    SIGINT, and when the rank is back at the prompt of its session.
    """
    started_at: float = 0.0
    kills: dict[str, int] = field(default_factory=dict)
    """Numbers of out-of-memory kills in the rank's cgroups before the rank started (`oom_kills`).

    A larger number at the end of the rank shows that Linux has killed a process of the cgroup.
    """
    batches: dict[str, int] = field(default_factory=dict)
    """Number of batches that the rank has received so far, by loader, as the rank last reported."""

    @property
    def collective_fraction(self) -> float:
        """Fraction of its time that the rank spends in collectives, from 0 to 1.

        The estimate is the fraction of heartbeats that the rank has sent while in a collective.
        """
        return self.n_collective_beats / max(1, self.n_beats)

    @property
    def ended(self) -> bool:
        """Whether the rank's process has ended."""
        return self.exitcode is not None

    @property
    def done(self) -> bool:
        """Whether the rank succeeded.

        A rank succeeded if its work succeeded, and its process then exited with code 0. A session's
        rank also succeeded if its cell succeeded, and the rank is back at its prompt.
        """
        return self.finished and (self.exitcode == 0 or (self.has_returned and not self.ended))

    @property
    def is_over(self) -> bool:
        """Whether the rank no longer runs the cell.

        True if the rank's process has ended, or if the rank is back at the prompt of its session.
        """
        return self.ended or self.has_returned


class Deadline:
    """The time at which `--timeout` ends a run. Time in which a rank waits for input is added.

    The agent calls `pause` when a rank begins to wait for the user's input, and `resume` at the end
    of the wait. `resume` moves the deadline by the length of the pause.

    Args:
        at: The time, in seconds of the monotonic clock; None without `--timeout`.
    """

    def __init__(self, at: float | None) -> None:
        self._at = at
        self._paused_at: float | None = None

    @property
    def at(self) -> float | None:
        """The time at which the run ends, in seconds of the monotonic clock.

        None without `--timeout`, and during a pause.
        """
        return self._at if self._paused_at is None else None

    def pause(self, now: float) -> None:
        """Begin a pause: `at` is None until `resume` is called. Does nothing in a pause."""
        if self._paused_at is None:
            self._paused_at = now

    def resume(self, now: float) -> None:
        """End the pause, and move the deadline by the length of the pause.

        If there is no pause, do nothing.
        """
        if self._paused_at is not None:
            if self._at is not None:
                self._at += now - self._paused_at
            self._paused_at = None  # last, because another thread may read `at`


@dataclass(frozen=True)
class Verdict:
    """The decision that the run is over on this host.

    Attributes:
        state: SUCCEEDED, FAILED or INTERRUPTED.
        cause: Reason for the end; "" on success. "rank": a rank raised an exception or died.
            "left": a rank left by `sys.exit(0)`, and other ranks did not. "stopped": SIGSTOP
            suspended a rank for too long. "timeout": the time of `--timeout` is over. "interrupt":
            the user interrupted the run. "host": the forkserver has ended, and so all ranks have
            ended.
    """

    state: str
    cause: str = ""


def decide_verdict(
    ranks: Collection[RankState],
    now: float,
    deadline: float | None = None,
    interrupted_at: float | None = None,
) -> Verdict | None:
    """Decide whether the run is over on this host; return None while it continues.

    The first rule that applies decides. After an interrupt, rules 3 to 6 are not checked; after a
    failure, rules 4 to 6 are not checked.

    1. If all ranks have succeeded, the run has succeeded.
    2. If the user has interrupted the run, the run ends when no rank runs the cell any more, or
       `INTERRUPT_GRACE_S` seconds after the interrupt.
    3. If a rank has failed, the run fails when no rank runs the cell any more, or
       `FURTHER_FAILURES_S` seconds after the first failure. While a failed rank still sends its
       traceback or results, the limit is `TRACEBACK_WAIT_S` instead of `FURTHER_FAILURES_S`.
    4. When `deadline` has passed, the run fails.
    5. When a rank left by `sys.exit(0)` more than `LEFT_GRACE_S` seconds ago, the run fails.
    6. When SIGSTOP has suspended a rank for `STOPPED_S` seconds, the run fails.

    All times are in seconds of the agent's monotonic clock.

    Args:
        deadline: Time at which `--timeout` ends the run; None without `--timeout`, or while a rank
            waits for the user's input.
        interrupted_at: Time at which the user interrupted the run; minus infinity to end the run
            at once. None if there was no interrupt.
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
        settled = now - min(failed) >= (TRACEBACK_WAIT_S if reporting else FURTHER_FAILURES_S)
        return Verdict("FAILED", "rank") if gone or settled else None
    if deadline is not None and now >= deadline:
        return Verdict("FAILED", "timeout")
    if _since(ranks, "left_at", now) >= LEFT_GRACE_S:
        return Verdict("FAILED", "left")
    if _since(ranks, "stopped_at", now) >= STOPPED_S:
        return Verdict("FAILED", "stopped")
    return None


def last_progress_at(ranks: Collection[RankState], now: float) -> float:
    """Return the time at which any rank that still runs the cell last made progress.

    If no rank runs the cell any more, return `now`.
    """
    return max((rank.progress_at for rank in ranks if not rank.is_over), default=now)


def _since(ranks: Collection[RankState], what: str, now: float) -> float:
    """Return the seconds since an event first happened to a rank; 0 if it happened to no rank.

    Args:
        what: Name of the attribute of `RankState` with the time of the event, such as "left_at".
    """
    times = [getattr(rank, what) for rank in ranks if getattr(rank, what) is not None]
    return now - min(times) if times else 0.0


def is_consequence(etype: str, message: str) -> bool:
    """Return whether an exception looks like a consequence of another rank's end.

    An example is the error of a collective that has lost its connection to the other rank.

    Args:
        etype: Name of the exception's type.
        message: Text of the exception.
    """
    return etype in _DISTRIBUTED_TYPES and _CONSEQUENCES.search(message) is not None


def failed_ranks(ranks: Collection[RankState], cause: str) -> list[RankState]:
    """Return the failed ranks. The rank that most probably caused the failure comes first.

    If the cause is "timeout", return all ranks that have not succeeded, by rank number. For any
    other cause, these rules apply:

    - If the cause is "stopped", suspended ranks count as failed.
    - The ranks are in the order of time in which they failed or were suspended. But ranks whose
      error looks like a consequence of another rank's end come after all other ranks.
    - If no rank has failed, or all errors look like such consequences, the result begins with the
      ranks that left by `sys.exit(0)`.

    Args:
        cause: Why the run has ended on this host (`Verdict.cause`).
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
    """Return the first failure that is not a consequence of another rank's end.

    If all failures are consequences, return the first failure. Return None if there is no failure.

    Args:
        failures: Failures of all hosts, in the order of their reports.
    """
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
"""Seconds by which the clock of the Linux kernel's log may differ from the monotonic clock."""


def oom_kills(pid: int) -> dict[str, int]:
    """Return how often Linux has killed processes in a process's cgroups because memory ran out.

    Linux counts a kill in the cgroup of the killed process, even if the whole machine has run out
    of memory.

    Returns:
        The number of kills in each cgroup, by path of the file with the number.
    """
    counts = {str(file): _count(file) for file in _cgroup_files(pid)}
    return {name: count for name, count in counts.items() if count is not None}


def out_of_memory_text(pid: int, started_at: float, before: dict[str, int]) -> str:
    """If Linux killed a process because memory ran out, return text that says so; otherwise "".

    Searches the Linux kernel's log. If the log is not usable, compares the numbers of kills in the
    process's cgroups with `before`. The text says whether a cgroup or the machine ran out of
    memory.

    Args:
        started_at: Time at which the process started, in seconds of the monotonic clock.
        before: Result of `oom_kills` when the process started.
    """
    grown = [name for name, count in before.items() if (_count(Path(name)) or 0) > count]
    cgroup = f"the memory limit of its cgroup ({Path(grown[0]).parent})" if grown else ""
    if (logged := _logged_kill(pid, started_at)) is None:
        return f"probably killed by {cgroup}" if cgroup else ""
    return {
        "": "",
        "cgroup": f"killed by {cgroup or 'the memory limit of its cgroup'}",
        "machine": "killed by Linux's out-of-memory killer: the host had no memory left",
    }[logged]


def _logged_kill(pid: int, started_at: float, log: Path = _KERNEL_LOG) -> str | None:
    """Search the Linux kernel's log for the last record that `pid` was killed to free memory.

    Args:
        pid: Id of the process, which may have ended.
        started_at: Time at which the process started, in seconds of the monotonic clock. Older
            records are ignored, because another process may have had the same pid.

    Returns:
        "cgroup" if the process's cgroup ran out of memory, "machine" if the machine did. "" if the
        log has no such record. None if the log is not readable. Also None if this process is not in
        the machine's first PID namespace, because the log then has other process ids.
    """
    try:
        if os.readlink("/proc/self/ns/pid") != _FIRST_PID_NAMESPACE:
            return None
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    found = ""
    with open(descriptor, "rb", buffering=0) as file:
        while record := _read_record(file):
            match = _OOM_RECORD.match(record)
            since = (started_at - _LOG_SLACK_S) * 1e6
            if match is not None and int(match["pid"]) == pid and int(match["us"]) >= since:
                found = "machine" if match["of_cgroup"] == b"O" else "cgroup"
    return found


def _read_record(file: IO[bytes]) -> bytes:
    """Return the next record of the Linux kernel's log; b"" after the last record."""
    while True:
        try:
            return file.read(_RECORD_BYTES) or b""
        except BrokenPipeError:  # the record was overwritten; the next read returns a later one
            continue


def _cgroup_files(pid: int) -> list[Path]:
    """Return the files in which Linux counts the out-of-memory kills in a process's cgroups.

    The result has one path for each of the process's own cgroups that counts memory (version 1 or
    2), but none for parent cgroups. A file may be missing. If the process has ended, the result is
    an empty list.
    """
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
    "SIGBUS": "shared memory may be full: check `df -h /dev/shm` on that host",
    "SIGABRT": "native code called abort(); its last output is above",
    "left": "end a rank by letting the cell end; all ranks must take the same number of steps",
    "exit": "os._exit ends a rank before the cell's end; raise an exception instead",
    "end": "it failed after the cell's last line: in an atexit function, a thread, or native code",
    "stopped": "another program stopped it (SIGSTOP); the cell itself did not cause this",
    "timeout": "raise the timeout, or look at the lines above: they show where the ranks were",
}


def describe_failure(
    state: RankState,
    verdict: Verdict,
    host: str,
    log_path: str,
    tail: list[str],
    timeout_text: str = "",
) -> Failure:
    """Return the description of a rank's failure for the journal and the user (docs/events.md).

    If the rank sent no traceback, the description has the rank's last known stack. The advice
    depends on the signal that ended the rank, or on the kind of the failure (`_failure_kind`).

    Args:
        verdict: Why the run has ended on this host.
        host: Name of the rank's host.
        log_path: Path of the rank's log on the notebook's machine.
        tail: Last lines of the rank's output. Used only if the rank raised no exception.
        timeout_text: Message of the failure if the run exceeded its time limit
            (`Plan.timeout_text`).
    """
    kind, by_signal = _failure_kind(state, verdict), signal_name(state.exitcode or 0)
    said = state.message or state.hint
    return Failure(
        rank=state.rank,
        host=host,
        pid=state.pid,
        how=kind,
        etype=state.etype if kind == "raised" else "",
        etype_module=state.etype_module if kind == "raised" else "",
        message=timeout_text if kind == "timeout" else said,
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
    """Return the user's frames of each thread in a text that faulthandler wrote, innermost first.

    In each thread, the innermost frame of IPython and the frames outside it are left out. Threads
    of this package are left out, too.
    """
    found: list[str] = []
    for block in text.split("\n\n"):
        lines = block.strip("\n").splitlines()
        at = next((i for i, line in enumerate(lines) if _SHELL in line), None)
        is_ours = at is None and any(_OURS in line for line in lines)
        if not is_ours and not block.lstrip().startswith("Extension modules:"):
            found += lines[:at]
    return found


def _failure_kind(state: RankState, verdict: Verdict) -> str:
    """Return the kind of a rank's failure (`Failure.how`).

    The function returns the first of these kinds that applies:

    - "raised": the rank raised an exception.
    - "left": the rank left by `sys.exit(0)`, and did not end in another way afterwards.
    - "end": the rank's work succeeded, but the process then ended in another way than by exit code
      0.
    - "signal": a signal ended the process during the work.
    - "exit": the process exited during the work.
    - "stopped" or "timeout": the process still runs, and the verdict has this cause.
    - "left": all other cases.
    """
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
    """Return the description of a failure of a host itself, rather than of a rank, for the user.

    If `error` is a `TaasError`, the description has no traceback, because the message of a
    `TaasError` says what the user can do.
    """
    lines = [] if isinstance(error, TaasError) else traceback.format_exception(error)
    return Failure(
        host=host, how="host", etype=type(error).__name__, message=str(error), traceback=lines
    )


class Ranks:
    """The states of the ranks of one attempt on this host. Thread-safe.

    The constructor creates the states, because a fast rank may send its first message before
    `record_start` records the rank's process.

    Args:
        ranks: The global rank numbers.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._lock = threading.Lock()
        self._states = {rank: RankState(rank, pid=0) for rank in ranks}

    def record_start(self, pids: dict[int, int]) -> None:
        """Record the process of each rank, and the current time as the time of its start.

        The start counts as the rank's first progress. Also records how many out-of-memory kills
        Linux has counted so far in the rank's cgroups. A process may have ended already.

        Args:
            pids: Process id of each rank, by rank.
        """
        with self._lock:
            for rank, pid in pids.items():
                state = self._states[rank]
                state.pid, state.kills = pid, oom_kills(pid)
                state.started_at = state.progress_at = time.monotonic()
                with contextlib.suppress(psutil.NoSuchProcess):
                    state.process = psutil.Process(pid)

    def states(self) -> list[RankState]:
        """Return a list of the ranks' states. The list is new, but its items are not copies."""
        with self._lock:
            return list(self._states.values())

    def record_message(self, rank: int, message: Event | RankMessage | StoreMessage) -> None:
        """Record a message from a rank in the rank's state. Most messages count as progress.

        For example, the state then has:

        - the last heartbeat, the last stack report and the numbers of received batches
        - whether the rank accepts SIGINT, or is back at its session's prompt
        - whether the rank's work succeeded or failed, or the rank left by `sys.exit(0)`

        If a rank reports several failures, the state keeps the time of the first failure, and the
        exception and traceback of the last failure.

        Stack reports, notes, and batch counts that have not changed do not count as progress. A
        heartbeat counts only if a collective has begun or ended since the last heartbeat.
        """
        now = time.monotonic()
        with self._lock:
            state = self._states[rank]
            match message:
                case RankTakesInterrupts():
                    state.takes_interrupt = True
                case RankRaised():
                    state.failed_at = state.failed_at or now
                    state.is_reporting = True
                    state.etype, state.message = message.etype, message.message
                    state.etype_module = message.etype_module
                    state.traceback = message.traceback
                case RankShowedError():
                    state.showed_at = state.showed_at or now
                case RankCalledExit():
                    state.left_at, state.stack = now, message.stack
                case RankErrorSent():
                    state.is_reporting = False
                case RankFinished():
                    state.finished = True
                case RankCreatesGroup():
                    state.has_new_group = True
                case RankIdle():
                    state.has_returned, state.takes_interrupt = True, False
                    state.was_cut = message.was_cut
                case RankStackSample():
                    state.sample, state.sampled_at = message, now
                case RankBeat():
                    if message.collectives != state.beat.collectives:
                        state.progress_at = now
                    state.beat, state.beat_at = message, now
                    state.n_beats += 1
                    state.n_collective_beats += any(
                        begun > ended for begun, ended in message.collectives
                    )
                case RankReport():
                    batches = {name: counts.batches for name, counts in message.loaders.items()}
                    if batches == state.batches:
                        return  # nothing new
                    state.batches = batches
            if not isinstance(message, RankBeat | RankStackSample | Note):
                state.progress_at = now

    def record_end(self, rank: int, exitcode: int, stack: Path) -> None:
        """Record the end of a rank's process. Unless the rank has succeeded, record a failure.

        The failure has the stack that faulthandler has written. After SIGKILL, the failure says
        whether memory ran out. If the rank had already reported a failure, the time of that failure
        stays.

        Args:
            exitcode: Exit code of the process; negative for a signal.
            stack: File to which faulthandler wrote the Python stack if a signal killed the rank.
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
                state.hint = out_of_memory_text(state.pid, state.started_at, state.kills)

    def poll(self, now: float) -> None:
        """Query the state of each rank's process. Record since when SIGSTOP has suspended a rank.

        Args:
            now: The agent's monotonic clock, in seconds.
        """
        with self._lock:
            for state in [state for state in self._states.values() if not state.ended]:
                status = status_of(state.process)
                if status == psutil.STATUS_STOPPED:
                    state.stopped_at = state.stopped_at or now
                elif status:
                    state.stopped_at = None

    def interrupt(self) -> None:
        """Send SIGINT to each rank that has reported that it accepts SIGINT.

        A rank gets only one SIGINT for each such report, also if this method is called again.
        """
        with self._lock:
            for state in self._states.values():
                if state.takes_interrupt and not state.ended:
                    state.takes_interrupt = False
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(state.pid, signal.SIGINT)

    def alive(self) -> list[psutil.Process]:
        """Return the ranks' processes that have not ended yet."""
        with self._lock:
            processes = [state.process for state in self._states.values()]
        return [process for process in processes if process is not None and status_of(process)]
