"""Where the ranks and fetchers of a host stand: which code, waiting for what, and since when.

Lives in the agent; imports neither torch nor IPython. A rank is asked first: its heartbeat's thread
answers with the stacks of all its threads and with what torch's flight recorder knows. A rank that
cannot answer (its main thread holds the interpreter's lock in a C call), and children that it
forked, are sent SIGNAL instead: faulthandler then writes their stacks, which takes no lock. So are
fetchers and their workers. Of programs that a rank started only /proc tells.
"""

import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
from msgspec import structs

from taas_magic.host import link
from taas_magic.host.output import Pump
from taas_magic.host.spec import Emit
from taas_magic.host.watch import COLLECTIVE_S, Ranks, RankState, still_since
from taas_magic.messages import Hang, ProcessStand, RankStand, StackFrame

SIGNAL = signal.SIGRTMAX - 3
"""What makes a rank, or a child that it forked, write its stacks; programs use SIGUSR1 and 2."""

ANSWER_S = 3.0
"""How long a rank may take to answer; its heartbeat's thread needs the interpreter's lock."""

WRITE_S = 2.0
"""How long faulthandler may take to write; a process in an uninterruptible call never does."""

SAMPLE_S = 3.0
"""How often the CPU time of ranks and of what they started is looked at, at most."""

COMPUTES_SHARE = 0.02
"""A rank that uses this share of one core comes forward; to wait takes it a tenth of that."""

_BEATS_S = 5.0  # who has beaten so lately can answer, if not at once
_GONE = "gone"
_COMPUTES_LEAST_S = 0.02  # two ticks of the system's clock of CPU time
_WAIT_S = 0.01
_FRAME = re.compile(r'\s*File "(.*)", line (\d+),? in (.+)')
_C10D = re.compile(r"torch/distributed/(distributed_c10d|_functional_collectives)\.py$")
_DATALOADER = "torch/utils/data/dataloader.py"
_OURS = "/taas_magic/"
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_WAITING = {
    "queue.py": "a queue",
    "queues.py": "a queue of multiprocessing",
    "_base.py": "a future",
    "threading.py": "a lock, an event or a thread",
    "subprocess.py": "a child process",
    "popen_fork.py": "a child process",
    "selectors.py": "a connection",
    "socket.py": "a connection",
    "ssl.py": "a connection",
    "connection.py": "a connection of multiprocessing",
    "synchronize.py": "a lock of multiprocessing",
}
"""What waits in a file of the standard library waits for."""

_POLL = "a connection, in a C call"
if sys.version_info < (3, 11):  # whose sleep is select(2)
    _POLL = "a connection or a sleep, in a C call"

_WCHAN = (
    (re.compile(r"futex"), "a lock, in a C call"),
    (re.compile(r"nanosleep"), "a sleep"),
    (re.compile(r"poll|select|sk_wait|inet_|unix_stream|tcp_"), _POLL),
    (re.compile(r"pipe"), "a pipe"),
    (re.compile(r"do_wait|waitid"), "a child process, in a C call"),
)


_Stand = TypeVar("_Stand", bound=ProcessStand)


@dataclass
class Sight:
    """What is known of one process; what `ProcessStand` has, too, means the same.

    Attributes:
        state: As psutil says it; "gone" for one that has ended.
        wchan: Where in the system's kernel it waits; "" where that is not known.
        answers: Whether it gives its stacks itself, which takes the interpreter's lock.
        has_finished: Whether it is a rank that has run the cell to its end.
    """

    pid: int
    command: str = ""
    state: str = ""
    wchan: str = ""
    threads: dict[str, list[StackFrame]] = field(default_factory=dict)
    pending: list[str] = field(default_factory=list)
    answers: bool = False
    has_finished: bool = False
    children: list["Sight"] = field(default_factory=list)

    @property
    def main(self) -> list[StackFrame]:
        """The frames of its main thread."""
        return next(iter(self.threads.values()), [])

    def stand(self, kind: type[_Stand], **more: Any) -> _Stand:
        """Return what is known, in words, and `more` that its kind has."""
        return kind(
            pid=self.pid,
            command=self.command,
            place=place(self.main),
            waits_for=waits_for(self),
            system=" in ".join(filter(None, (self.state, self.wchan))),
            threads={n: [str(frame) for frame in t] for n, t in self.threads.items()},
            pending=self.pending,
            children=[child.stand(ProcessStand) for child in self.children],
            **more,
        )


def listen(path: Path) -> None:
    """Have this process, and what it forks, write their stacks to a file on SIGNAL."""
    faulthandler.register(SIGNAL, file=path.open("a"), all_threads=True, chain=False)


def place(frames: Sequence[StackFrame]) -> str:
    """Return the notebook's line where a thread stands; else the innermost one that is known."""
    cells = [frame for frame in frames if frame.file.startswith("Cell In[")]
    users = [frame for frame in frames if _OURS not in frame.file]
    return str(cells[-1]) if cells else str(users[-1]) if users else ""


def waits_for(sight: Sight) -> str:
    """Return what a process's main thread waits for, in words."""
    if sight.state == _GONE:
        return "nothing: it has ended"
    if sight.state == psutil.STATUS_STOPPED:
        return "SIGCONT: it was stopped from outside"
    if sight.state == psutil.STATUS_DISK_SLEEP:
        return f"an uninterruptible system call {sight.wchan}".rstrip()
    if sight.has_finished:
        return "the end of its process: its threads, or what atexit calls"
    called = next((frame for frame in sight.main if _C10D.search(frame.file)), None)
    if called is not None:
        return _named_collective(called.function, sight.pending)
    who, waiting = _who_waits(sight.main)
    if who.endswith(_DATALOADER):
        return "a DataLoader's worker" + _busy_child(sight)
    if f"{_OURS}data/" in who:
        return "batches of a registered loader"
    if waiting in _WAITING:
        return _WAITING[waiting]
    if sight.pending:
        return _named_collective(sight.pending[0], [])
    if sight.threads and not sight.answers and not sight.command:
        return "a C call that holds the interpreter's lock"
    return next((words for pattern, words in _WCHAN if pattern.search(sight.wchan)), "a C call")


def _named_collective(function: str, pending: Sequence[str]) -> str:
    """Name a collective by the function that was called and the recorder's number of it."""
    begun = next(iter(pending), "")
    if begun and begun.partition(" ")[0] != function:
        begun = f"{function} ({begun})"  # all_gather_object is two of all_gather
    return f"{begun or function} of torch.distributed"


def _who_waits(frames: Sequence[StackFrame]) -> tuple[str, str]:
    """Return the file of what called the standard library, and that of what it called there."""
    called = ""
    for frame in reversed(frames):
        if not frame.file.startswith(_LIBRARY) or "-packages" in frame.file:
            return frame.file, called
        called = frame.file.rpartition("/")[2]
    return "", called


def _busy_child(sight: Sight) -> str:
    """Say where the child stands that a rank waits for, if one of them is in the user's code."""
    for child in sight.children:
        where = place(child.main)
        if where.startswith("Cell In["):
            return f" (process {child.pid}, at {where})"
    return ""


def parse(text: str) -> dict[str, list[StackFrame]]:
    """Read what faulthandler wrote, by threads; frames outermost first, the main thread first."""
    blocks = [block.splitlines() for block in text.split("\n\n") if block.strip()]
    # the signal goes to the main thread; of one that has it blocked, Python lists the main one last
    blocks.sort(key=lambda lines: not lines[0].startswith("Current"))
    if blocks and not blocks[0][0].startswith("Current"):
        blocks.insert(0, blocks.pop())
    return {
        f"thread {number}" if number else "MainThread": [
            StackFrame(match[1], int(match[2]), match[3])
            for line in reversed(lines)
            if (match := _FRAME.match(line))
        ]
        for number, lines in enumerate(blocks)
    }


def last_seen(stack: Sequence[str]) -> dict[str, list[StackFrame]]:
    """Read the main thread's frames, outermost first, from the lines of a rank's last heartbeat."""
    found: list[StackFrame] = []
    for line in stack:
        if match := _FRAME.match(line):
            found.append(StackFrame(match[1], int(match[2]), match[3]))
        elif found and not found[-1].text:
            found[-1] = found[-1]._replace(text=line.strip())
    return {"MainThread, when it was last seen": found} if found else {}


class Stand:
    """Where the ranks of one attempt on this host stand, and whether none has come forward.

    Args:
        hang_s: After how long that is said; 0: never.
        pump: Knows when ranks wrote something.
        folder: What the ranks share with the agent.
    """

    def __init__(
        self, hang_s: float, attempt: int, ranks: Ranks, pump: Pump, folder: Path, emit: Emit
    ) -> None:
        self._hang_s, self._attempt = hang_s, attempt
        self._ranks, self._pump, self._folder, self._emit = ranks, pump, folder, emit
        self._own_s: dict[int, float] = {}
        self._all_s: dict[int, float] = {}
        self._sampled_at = time.monotonic()
        self._looks_s = sorted({min(hang_s, COLLECTIVE_S), hang_s})
        self._looked_s = 0.0
        self._is_said = False
        self._collecting = threading.Lock()

    def look(self, now: float) -> None:
        """Look whether ranks come forward, and say so when none has for too long."""
        pause_s, passed_s = min(SAMPLE_S, self._hang_s / 4), now - self._sampled_at
        if not self._hang_s or passed_s < pause_s or self._collecting.locked():
            return
        # while this host stood still, no rank could come forward
        stood_s = max(0.0, passed_s - 2 * pause_s)
        for state in self._ranks.states():
            state.forward_at = min(now, state.forward_at + stood_s)
        self._sample(now)
        still_s = now - still_since(self._ranks.states(), now)
        if still_s < self._looks_s[0]:
            self._looked_s = 0.0
            if self._is_said:
                self._is_said = False
                self._emit(Hang(attempt=self._attempt, ranks=[]))
        elif not self._is_said and any(self._looked_s < it <= still_s for it in self._looks_s):
            self._looked_s = still_s
            threading.Thread(target=self._say, args=(still_s,), daemon=True).start()

    def collect(self) -> list[tuple[RankState, Sight]]:
        """Ask all ranks where they stand; takes some seconds where one does not answer."""
        with self._collecting:
            states = self._ranks.states()
            self._ask([state for state in states if not state.ended])
            found = [(state, self._sight(state)) for state in states]
            pids = [state.pid for state in states if not state.ended]
            self._own_s = {pid: _cpu_s(pid) for pid in pids}  # to answer is no progress
            self._all_s = _cpu_s_below(pids)
            return found

    def rows(self, found: Iterable[tuple[RankState, Sight]]) -> list[RankStand]:
        """Return what was collected, for `%taas stacks` and the run's head."""
        now = time.monotonic()
        return [
            sight.stand(RankStand, rank=state.rank, quiet_s=now - state.forward_at)
            for state, sight in found
        ]

    def _say(self, still_s: float) -> None:
        """Say where the ranks stand; before hang_s are over, if one waits for the others."""
        found = self.collect()
        waits = any(waits_for(sight).endswith("of torch.distributed") for _, sight in found)
        limit_s = min(self._hang_s, COLLECTIVE_S) if waits else self._hang_s
        now = time.monotonic()
        has_moved = any(  # or has ended, while the ranks were looked at
            state.ended or now - state.forward_at < self._hang_s / 4
            for state, sight in found
            if sight.state != _GONE
        )
        if still_s >= limit_s and not has_moved:
            self._is_said = True
            rows = [structs.replace(row, threads={}, children=[]) for row in self.rows(found)]
            self._emit(Hang(attempt=self._attempt, ranks=rows))

    def _sample(self, now: float) -> None:
        """Take down which ranks have written or computed since the last sample.

        What they started is looked at only when no rank computes itself: it takes a look at all
        processes of the host.
        """
        passed_s, self._sampled_at = now - self._sampled_at, now
        least_s = max(_COMPUTES_LEAST_S, COMPUTES_SHARE * passed_s)
        pids = [state.pid for state in self._ranks.states() if not state.ended]
        for state in self._ranks.states():
            state.forward_at = max(state.forward_at, self._pump.heard_at(state.rank))
        own_s = {pid: _cpu_s(pid) for pid in pids}
        if not self._take_used(self._own_s, own_s, least_s, now):
            self._take_used(self._all_s, _cpu_s_below(pids), least_s, now)

    def _take_used(
        self, before: dict[int, float], used: dict[int, float], least_s: float, now: float
    ) -> bool:
        """Take down who has used CPU time since `before`, which it updates; returns whether any."""
        is_any = False
        for state in self._ranks.states():
            used_s = used.get(state.pid, 0.0) - before.get(state.pid, used.get(state.pid, 0.0))
            if used_s >= least_s and not state.spins:
                state.forward_at = now
                is_any = True
        before.update(used)
        return is_any

    def _ask(self, states: Sequence[RankState]) -> None:
        """Ask ranks for their stacks; returns when they are there, or will not come."""
        asked = time.monotonic()
        for state in states:
            link.ask(self._folder, state.rank)
        awaited = list(states)
        while awaited and time.monotonic() < asked + ANSWER_S:
            time.sleep(_WAIT_S)
            awaited = [
                state
                for state in awaited
                if state.sight_at < asked and state.stopped_at is None and not state.ended
            ]
        for state in states:
            if state.sight_at < asked:
                state.sight = None

    def _sight(self, state: RankState) -> Sight:
        if state.ended:
            return Sight(state.pid, state=_GONE)
        sight = _of_system(state.pid)
        sight.command, sight.has_finished = "", state.finished
        sight.answers = state.sight is not None or time.monotonic() - state.beat_at < _BEATS_S
        if state.sight is not None:
            sight.pending, sight.threads = state.sight.pending, state.sight.threads
        _complete(sight, link.rank_file(self._folder, state.rank, "stacks"), self._ranks.cells)
        sight.threads = sight.threads or last_seen(state.stack)
        return sight


def of_fetcher(pid: int, path: Path) -> Sight:
    """Look where a fetcher, its server's pid, and its workers stand, who write stacks to `path`."""
    sight = _of_system(pid)
    _complete(sight, path, {})
    sight.command = ""
    for parent in sight.children:
        parent.command = "starts the workers of a loader"
        for worker in parent.children:
            worker.command = "worker"
    return sight


def _complete(sight: Sight, path: Path, cells: Mapping[str, tuple[str, str]]) -> None:
    """Add the stacks of who has not given them itself: by signal, one after the other."""
    if not sight.threads and sight.state != psutil.STATUS_STOPPED:
        found = parse(_written_on_signal(sight.pid, path))
        sight.threads = {n: [_named(frame, cells) for frame in t] for n, t in found.items()}
    for child in sight.children:
        _complete(child, path, cells)


def _of_system(pid: int) -> Sight:
    """Look what the system knows of a process and of those below it."""
    try:
        process = psutil.Process(pid)
        sight = Sight(pid, " ".join(process.cmdline()), process.status(), _wchan(pid))
        sight.children = [_of_system(child.pid) for child in process.children()]
    except psutil.Error:
        return Sight(pid, state=_GONE)
    return sight


def _named(frame: StackFrame, cells: Mapping[str, tuple[str, str]]) -> StackFrame:
    """Return a frame of a cell with the cell's label and its line; others as they are."""
    if frame.file not in cells:
        return frame
    label, source = cells[frame.file]
    lines = source.splitlines()
    text = lines[frame.line - 1].strip() if frame.line <= len(lines) else ""
    return frame._replace(file=label, text=text)


def _written_on_signal(pid: int, path: Path) -> str:
    """Return what a process writes to `path` on SIGNAL; "" where it does not, or cannot."""
    before = path.stat().st_size if path.exists() else 0
    if not _mask(pid, "SigCgt"):
        return ""
    try:
        os.kill(pid, SIGNAL)
    except OSError:  # it has ended just now, or is another user's
        return ""
    until = time.monotonic() + WRITE_S
    while time.monotonic() < until:
        is_begun = path.exists() and path.stat().st_size > before
        if is_begun and not any(_mask(pid, name) for name in ("SigPnd", "ShdPnd", "SigBlk")):
            break  # its handler, during which the signal is blocked, has returned
        time.sleep(_WAIT_S)
    if not path.exists():
        return ""
    with path.open(errors="replace") as file:
        file.seek(before)
        return file.read()


def _mask(pid: int, name: str) -> bool:
    """Return whether SIGNAL is in a set of a process's main thread, as proc(5) names them."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    found = re.search(rf"^{name}:\s*(\w+)$", status, re.MULTILINE)
    return found is not None and int(found[1], 16) >> (SIGNAL - 1) & 1 == 1


def _wchan(pid: int) -> str:
    """Return where in the kernel a process's main thread waits; "" where it may not be known."""
    try:
        where = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    return "" if where == "0" else where


def _cpu_s(pid: int) -> float:
    """Return the CPU time of one process; 0 for one that is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _cpu_s_below(pids: Iterable[int]) -> dict[int, float]:
    """Return the CPU time of processes with all that is below them, by their ids."""
    found = {it.pid: it.info for it in psutil.process_iter(["ppid", "cpu_times"])}
    totals = dict.fromkeys(pids, 0.0)
    for pid, info in found.items():
        above: int | None = pid
        while above is not None and above not in totals:
            above = found[above]["ppid"] if above in found else None
        if above is not None and info["cpu_times"] is not None:
            totals[above] += sum(info["cpu_times"][:4])  # also user, system of reaped children
    return totals
