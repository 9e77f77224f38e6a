"""Stack reports of a host's ranks and fetchers, and detection of ranks that make no progress.

Runs in the agent, which imports neither torch nor IPython. The agent collects stacks in two ways:

1. The agent sends a request to a rank. The rank's heartbeat thread responds with the stacks of all
   its threads, and with the pending collectives of torch's flight recorder.
2. The agent sends `STACK_SIGNAL` to a rank that does not respond, and to processes without a
   heartbeat: children that a rank forked, fetchers, and fetchers' workers. In these processes,
   faulthandler then writes the main thread's stack to a file (`tracebacks.write_stack_on_signal`).

faulthandler does not wait for the interpreter's lock, so it could crash a process that runs Python
code when the signal arrives. So the agent signals a process without a heartbeat only while the
process's main thread sleeps.
"""

import os
import re
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
from msgspec import structs

from taas_magic.errors import TaasError
from taas_magic.host import link
from taas_magic.host.link import STACK_SIGNAL
from taas_magic.host.output import PipeReader
from taas_magic.host.spec import EventSink, LocalShare
from taas_magic.host.watch import COLLECTIVE_S, Ranks, RankState, last_progress_at
from taas_magic.messages import (
    Hang,
    ProcessStack,
    RankStack,
    StackFrame,
)

if TYPE_CHECKING:
    from taas_magic.capture.payload import CellSource

ANSWER_S = 3.0
"""Maximum seconds to wait for the response of a rank's heartbeat thread.

The heartbeat thread cannot respond while another thread holds the interpreter's lock.
"""

WRITE_S = 2.0
"""Maximum seconds to wait, after `STACK_SIGNAL`, until a process has written its stack."""

SAMPLE_S = 3.0
"""Minimum seconds between two samples of the CPU time of ranks and their descendants."""

COMPUTING_FRACTION = 0.02
"""Fraction of one CPU core. A rank that uses at least this fraction counts as making progress.

A rank that waits uses about a tenth of this fraction.
"""

_BEATS_S = 5.0  # a rank that sent a heartbeat in the last 5 s can respond, even if it is late now
_GONE = "gone"
_COMPUTES_LEAST_S = 0.02  # two ticks of the system's CPU clock
_WAIT_S = 0.01
_WRITTEN_S = 0.03  # a stack is complete if the file has not grown for this time
_STACK = "Stack (most recent call first):"
_FRAME = re.compile(r'^ +File "(.*)", line (\d+) in (.+)$', re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_C10D = re.compile(r"torch/distributed/(distributed_c10d|_functional_collectives)\.py$")
_DATALOADER = "torch/utils/data/dataloader.py"
_OURS = "/taas_magic/"
_KEYBOARD = f"{_OURS}host/keyboard.py"
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
"""Texts for the user that name the object for which a thread of the standard library waits.

The keys are names of library files. The text applies if the thread waits in a function of the file.
"""

_DATA_WAITING = {"server.py": "requests from ranks", "worker.py": "requests from its fetcher"}
"""Texts for the user that name the messages for which a process of a fetcher waits.

The keys are names of files in `taas_magic/data`. The text applies if the process waits in a
function of the file.
"""

_CPUS_LEAST_S = 0.5
"""Minimum seconds for which `StackMonitor.collect` measures the CPU use of ranks."""

_Report = TypeVar("_Report", bound=ProcessStack)


@dataclass
class StackSample:
    """Data about one process and its children, from which `report` makes a stack report.

    Attributes:
        command: Command line of the process, or a text that says what the process does.
        state: Process state as psutil names it; "gone" if the process has ended.
        threads: Frames of each thread, outermost first, by the thread's name. The main thread comes
            first.
        pending: Entries of torch's flight recorder for collectives that have not ended.
        answers: Whether the rank's heartbeat thread responds. None for a process that is not a
            rank.
        has_finished: Whether the process is a rank that has run the cell to its end.
        has_returned: Whether the process is a session's rank that has ended the cell, and waits for
            the next cell.
        children: The same data about each child process.
        cpus: Average number of CPUs that a rank and its descendants used while the data was
            collected. 0 for a process that is not a rank.
    """

    pid: int
    command: str = ""
    state: str = ""
    threads: dict[str, list[StackFrame]] = field(default_factory=dict)
    pending: list[str] = field(default_factory=list)
    answers: bool | None = None
    has_finished: bool = False
    has_returned: bool = False
    children: list["StackSample"] = field(default_factory=list)
    memory_bytes: int = 0
    cpus: float = 0.0

    @property
    def main(self) -> list[StackFrame]:
        """Frames of the main thread, outermost first. Empty if they are not known."""
        return next(iter(self.threads.values()), [])

    def report(self, kind: type[_Report], **more: Any) -> _Report:
        """Return a stack report about this process and its children, with frames as text.

        The report also says which code the main thread runs (`code_position`), and what the thread
        waits for (`waits_for`).

        Args:
            kind: Class of the report, a subclass of `ProcessStack`.
            more: Values of the fields that `kind` adds to `ProcessStack`.
        """
        return kind(
            pid=self.pid,
            command=self.command,
            place="the end of the cell" if self.has_returned else code_position(self.main),
            waits_for=waits_for(self),
            system=self.state,
            threads={n: [str(frame) for frame in t] for n, t in self.threads.items()},
            pending=self.pending,
            children=[child.report(ProcessStack) for child in self.children],
            memory_bytes=self.memory_bytes,
            **more,
        )


def code_position(frames: Sequence[StackFrame]) -> str:
    """Return the position of a thread as text: the innermost of its frames that is in a cell.

    If no frame is in a cell, return the innermost frame outside this package; "" if there is none.

    Args:
        frames: Frames of the thread, outermost first.
    """
    cells = [frame for frame in frames if frame.file.startswith("Cell In[")]
    users = [frame for frame in frames if _OURS not in frame.file]
    return str(cells[-1]) if cells else str(users[-1]) if users else ""


def waits_for(sample: StackSample) -> str:
    """Return a text for the user that says what a process's main thread waits for.

    The first of these conditions that is true decides which text the function returns:

    1. The process has ended, is suspended, is in an uninterruptible system call, is ending, or has
       ended the cell.
    2. The thread is in a function of torch.distributed, or in `os.fork`.
    3. The thread waits for a batch, for the user's input, or in a known waiting function of the
       standard library. The batch may be of a DataLoader or of a registered loader.
    4. A collective is pending.
    5. The rank's heartbeat thread does not respond, because a C call holds the interpreter's lock.
    6. The thread is running; it waits for nothing.

    If no condition is true, the text says that the thread is in a C call. If the thread's stack is
    not known, the text says that it waits for an unknown event.
    """
    if sample.state == _GONE:
        return "nothing: it has ended"
    if sample.state == psutil.STATUS_STOPPED:
        return "SIGCONT: another program stopped it (SIGSTOP)"
    if sample.state == psutil.STATUS_DISK_SLEEP:
        return "an uninterruptible system call"
    if sample.has_returned:
        return "nothing: it has finished the cell"
    if sample.has_finished:
        return "the end of its process: its threads, or functions registered by atexit"
    called = next((frame for frame in sample.main if _C10D.search(frame.file)), None)
    if called is not None:
        return _named_collective(called.function, sample.pending)
    if sample.main and sample.main[-1].function == "_launch":
        return "os.fork, in which Python before 3.11.10 can hang (python/cpython#112275)"
    who, waiting = _waiting_code(sample.main)
    if who.endswith(_DATALOADER):
        return "a DataLoader's worker" + _busy_child(sample)
    if f"{_OURS}data/" in who:
        return _DATA_WAITING.get(who.rpartition("/")[2], "batches of a registered loader")
    if any(frame.file.endswith(_KEYBOARD) for frame in sample.main):
        return "your input"
    if waiting in _WAITING:
        return _WAITING[waiting]
    if sample.pending:
        return _named_collective(sample.pending[0], [])
    if sample.threads and sample.answers is False:
        return "a C call that holds the interpreter's lock"
    if sample.state == psutil.STATUS_RUNNING:
        return "nothing: it is running"
    return "a C call" if sample.threads else "an unknown event"


def _named_collective(function: str, pending: Sequence[str]) -> str:
    """Return a description, for the user, of the collective in which a rank waits.

    Args:
        function: Name of the torch.distributed function that the rank has called.
        pending: The flight recorder's entries for the rank's pending collectives. Only the first
            entry is used.
    """
    begun = next(iter(pending), "")
    if begun and begun.partition(" ")[0] != function:
        begun = f"{function} ({begun})"  # all_gather_object, for example, calls all_gather twice
    return f"{begun or function} of torch.distributed"


def _waiting_code(frames: Sequence[StackFrame]) -> tuple[str, str]:
    """Find which code waits, and in which file of the standard library it waits.

    Args:
        frames: Frames of the waiting thread, outermost first.

    Returns:
        Two values. First, the file path of the innermost frame outside the standard library; "" if
        there is no such frame. Second, the name of the library file with the function that this
        frame has called; "" if the frame has not called a library function.
    """
    called = ""
    for frame in reversed(frames):
        if not frame.file.startswith(_LIBRARY) or "-packages" in frame.file:
            return frame.file, called
        called = frame.file.rpartition("/")[2]
    return "", called


def _busy_child(sample: StackSample) -> str:
    """Return text with the pid and position of a rank's first child that runs code of a cell.

    Return "" if no child process runs code of a cell.
    """
    for child in sample.children:
        where = code_position(child.main)
        if where.startswith("Cell In["):
            return f" (process {child.pid}, at {where})"
    return ""


class StackMonitor:
    """Monitor of the progress of an attempt's ranks on this host, and collector of their stacks.

    Args:
        folder: Private folder of the attempt, with the files that the ranks share with the agent.

    Attributes:
        is_paused: Whether a rank waits for the user's input. This time does not count as time
            without progress.
    """

    def __init__(
        self, share: LocalShare, ranks: Ranks, reader: PipeReader, folder: Path, emit: EventSink
    ) -> None:
        self._attempt, self._payload = share.spec.attempt, share.folder.payload
        self._hang_s = hang_s = share.plan.hang_s
        self._ranks, self._reader, self._folder, self._emit = ranks, reader, folder, emit
        self._own_s: dict[int, float] = {}
        self._all_s: dict[int, float] = {}
        self._sampled_at = time.monotonic()
        self._check_at_s = sorted({min(hang_s, COLLECTIVE_S), hang_s})
        self._checked_at_s = 0.0
        self._is_reported = self.is_paused = False
        self._collecting = threading.Lock()

    def check(self, now: float) -> None:
        """Record which ranks make progress. If no rank makes progress for too long, report a hang.

        The method does nothing if `--hang` is 0, a rank waits for the user's input, or another
        thread collects stacks. It also does nothing if the last check was less than `SAMPLE_S`
        seconds ago, or less than a quarter of the time of `--hang` if this is shorter. Time in
        which this host was stalled does not count.

        A thread that this method starts collects the stacks, and sends a `Hang` event if the rules
        of `_report_hang` apply. So this method does not block. It starts at most two such threads
        until a rank makes progress again: after `COLLECTIVE_S` seconds, and after the time of
        `--hang` if the hang is not reported yet.

        When a rank makes progress again after a reported hang, the method sends a `Hang` event
        without ranks, which reports the end of the hang.

        Args:
            now: The agent's monotonic clock, in seconds.
        """
        pause_s, passed_s = min(SAMPLE_S, self._hang_s / 4), now - self._sampled_at
        is_due = passed_s >= pause_s and not self._collecting.locked()
        if not self._hang_s or self.is_paused or not is_due:
            return
        # Do not count time in which this host was stalled or the clocks were paused, because no
        # rank could make progress then.
        stood_s = max(0.0, passed_s - 2 * pause_s)
        for state in self._ranks.states():
            state.progress_at = min(now, state.progress_at + stood_s)
        self._sample(now)
        still_s = now - last_progress_at(self._ranks.states(), now)
        if still_s < self._check_at_s[0]:
            self._checked_at_s = 0.0
            if self._is_reported:
                self._is_reported = False
                self._emit(Hang(attempt=self._attempt, ranks=[]))
        elif not self._is_reported and any(
            self._checked_at_s < it <= still_s for it in self._check_at_s
        ):
            self._checked_at_s = still_s
            threading.Thread(target=self._report_hang, args=(still_s,), daemon=True).start()

    def collect(self) -> list[tuple[RankState, StackSample]]:
        """Collect the stacks of all ranks and their children. Blocks for some seconds.

        Also measure, for at least `_CPUS_LEAST_S`, how many CPUs each rank uses. Only one thread at
        a time runs this method; other threads wait.

        The ranks use CPU time for the stack reports, which must not count as progress. So at the
        end, record the CPU time that each rank has used. The next measurement of progress starts
        from there.
        """
        with self._collecting:
            states = self._ranks.states()
            alive = [state.pid for state in states if not state.ended]
            began, before_s = time.monotonic(), _cpu_s_below(alive)
            self._request_stacks([state for state in states if not state.ended])
            cells = _cells(self._payload)
            found = [(state, self._sample_of(state, cells)) for state in states]
            pids = [state.pid for state in states if not state.ended]
            time.sleep(max(0.0, began + _CPUS_LEAST_S - time.monotonic()))
            # Start from new values, so that the CPU time of the responses is no progress.
            self._own_s = {pid: _cpu_s(pid) for pid in pids}
            self._all_s = _cpu_s_below(pids)
            passed_s = time.monotonic() - began
            for state, sample in found:
                used_s = self._all_s.get(state.pid, 0.0) - before_s.get(state.pid, 0.0)
                sample.cpus = max(0.0, used_s / passed_s)
            return found

    def rows(self, found: Iterable[tuple[RankState, StackSample]]) -> list[RankStack]:
        """Return one stack report for each rank.

        In addition to the stacks, a report has the seconds since the rank's last progress, the
        rank's use of CPUs and GPU, and the fraction of time that the rank spends in collectives.

        Args:
            found: State and stacks of each rank, as returned by `collect`.
        """
        now = time.monotonic()
        return [
            sample.report(
                RankStack,
                rank=state.rank,
                quiet_s=now - state.progress_at,
                cpus=sample.cpus,
                in_collectives=state.collective_fraction,
                gpu=state.beat.gpu,
            )
            for state, sample in found
        ]

    def _report_hang(self, still_s: float) -> None:
        """Collect stacks, and send a `Hang` event if the time without progress is too long.

        The limit is the time of `--hang`. If a rank waits in a collective, the limit is at most
        `COLLECTIVE_S`. If a rank makes progress or ends while the stacks are collected, send no
        event. The event says which code each rank runs, and what the rank waits for, but leaves out
        the stacks of threads and children.

        Args:
            still_s: Seconds for which no rank has made progress.
        """
        found = self.collect()
        waits = any(waits_for(sample).endswith("of torch.distributed") for _, sample in found)
        limit_s = min(self._hang_s, COLLECTIVE_S) if waits else self._hang_s
        now = time.monotonic()
        has_moved = any(  # made progress or ended while the stacks were collected
            state.ended or now - state.progress_at < self._hang_s / 4
            for state, sample in found
            if sample.state != _GONE
        )
        if still_s >= limit_s and not has_moved:
            self._is_reported = True
            rows = [structs.replace(row, threads={}, children=[]) for row in self.rows(found)]
            self._emit(Hang(attempt=self._attempt, ranks=rows))

    def _sample(self, now: float) -> None:
        """Record progress of each rank that wrote output or computed since the last call.

        A rank has computed if it used at least the fraction `COMPUTING_FRACTION` of one CPU core.

        If no rank's own process has used enough CPU time, this method also checks the CPU time of
        the ranks' descendants. Otherwise it skips this check, which reads all processes of the
        host.
        """
        passed_s, self._sampled_at = now - self._sampled_at, now
        least_s = max(_COMPUTES_LEAST_S, COMPUTING_FRACTION * passed_s)
        pids = [state.pid for state in self._ranks.states() if not state.ended]
        for state in self._ranks.states():
            state.progress_at = max(state.progress_at, self._reader.last_output_at(state.rank))
        own_s = {pid: _cpu_s(pid) for pid in pids}
        if not self._record_cpu_progress(self._own_s, own_s, least_s, now):
            self._record_cpu_progress(self._all_s, _cpu_s_below(pids), least_s, now)

    def _record_cpu_progress(
        self, before: dict[int, float], used: dict[int, float], least_s: float, now: float
    ) -> bool:
        """Record progress of each rank that has used enough CPU time since the last sample.

        A rank that busy-waits for a collective makes no progress. Return whether any rank has made
        progress.

        Args:
            before: CPU seconds of each rank in the last sample, by pid. This method writes the
                values of `used` to it.
            used: CPU seconds of each rank now, by pid.
            least_s: Minimum CPU seconds that a rank must have used since the last sample.
            now: The agent's monotonic clock, in seconds.
        """
        is_any = False
        for state in self._ranks.states():
            used_s = used.get(state.pid, 0.0) - before.get(state.pid, used.get(state.pid, 0.0))
            if used_s >= least_s and not state.beat.spins:
                state.progress_at = now
                is_any = True
        before.update(used)
        return is_any

    def _request_stacks(self, states: Sequence[RankState]) -> None:
        """Request stack reports of ranks, and wait up to `ANSWER_S` for all responses.

        The response of a rank becomes the `sample` of the rank's state. If a rank does not respond
        in time, its `sample` becomes None. Does not wait for ranks that SIGSTOP has suspended.
        """
        asked = time.monotonic()
        for state in states:
            link.request_stacks(self._folder, state.rank)
        awaited = list(states)
        while awaited and time.monotonic() < asked + ANSWER_S:
            time.sleep(_WAIT_S)
            awaited = [
                state
                for state in awaited
                if state.sampled_at < asked and state.stopped_at is None and not state.ended
            ]
        for state in states:
            if state.sampled_at < asked:
                state.sample = None

    def _sample_of(self, state: RankState, cells: "Cells") -> StackSample:
        """Return a rank's stacks and other data about the rank.

        If the rank has sent no stacks, send it `STACK_SIGNAL`, and use the stack that the rank then
        writes. If the rank writes no stack, use the stack of its last heartbeat. Children of the
        rank also get `STACK_SIGNAL`. For a rank that has ended, the result only says so.

        The field `answers` is True if the rank has sent its stacks, or has sent a heartbeat in the
        last `_BEATS_S` seconds.
        """
        if state.ended:
            return StackSample(state.pid, state=_GONE)
        sample = _sample_from_psutil(state.pid)
        sample.command = ""
        sample.has_finished, sample.has_returned = state.finished, state.has_returned
        sample.answers = state.sample is not None or time.monotonic() - state.beat_at < _BEATS_S
        if state.sample is not None:
            sample.pending, sample.threads = state.sample.pending, state.sample.threads
        file = link.rank_file(self._folder, state.rank, "stacks")
        _add_signalled_stacks(sample, file, cells, (psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING))
        if state.beat.stack and not sample.threads:
            sample.threads = {"MainThread, when it was last seen": state.beat.stack}
        return sample


Cells = Mapping[str, "CellSource"]
"""The notebook's cells by the file name under which the kernel compiled them."""


def _cells(path: Path) -> Cells:
    """Return the notebook's cells that are in a run's payload.

    The result is empty if the payload cannot be read, for example because it has been removed.

    Args:
        path: Path of the payload.
    """
    from taas_magic.capture import payload  # imported here, because most agents never need it

    try:
        return payload.read(path).sources
    except (OSError, TaasError):
        return {}


def sample_fetcher(pid: int, path: Path) -> StackSample:
    """Collect the stacks of a fetcher and its workers.

    The processes that sleep get `STACK_SIGNAL`, and then write their stacks. For any other process,
    the result has no stack. The `command` of a child process says what the process does, such as
    "worker".

    Args:
        pid: Process id of the fetcher.
        path: File to which the fetcher and its workers write their stacks.
    """
    sample = _sample_from_psutil(pid)
    _add_signalled_stacks(sample, path, {}, (psutil.STATUS_SLEEPING,))
    sample.command = ""
    for parent in sample.children:
        parent.command = "starts the workers of a loader"
        for worker in parent.children:
            worker.command = "worker"
    return sample


def _add_signalled_stacks(
    sample: StackSample, path: Path, cells: Cells, states: Collection[str]
) -> None:
    """Add the main threads' stacks to the data about a process and its descendants.

    Sends `STACK_SIGNAL` to each process whose stack is not known yet. Signals one process after the
    other, because all processes write to the same file. Signals a descendant only if it sleeps.

    Args:
        sample: Data about the process, with its descendants in `children`.
        path: File to which the processes write their stacks.
        cells: The notebook's cells, by file name, which give frames in cells their labels.
        states: States, as psutil names them, in which the process itself may be signalled.
    """
    if not sample.threads and (frames := _request_stack_by_signal(sample.pid, path, states)):
        sample.threads = {"MainThread": [_with_cell_label(frame, cells) for frame in frames]}
    for child in sample.children:
        _add_signalled_stacks(child, path, cells, (psutil.STATUS_SLEEPING,))


def _sample_from_psutil(pid: int) -> StackSample:
    """Return psutil's data about a process and its descendants, without stacks.

    The data are the command, the state and the memory of each process. If a process has ended, its
    state is "gone".
    """
    try:
        process = psutil.Process(pid)
        sample = StackSample(pid, " ".join(process.cmdline()), process.status())
        sample.memory_bytes = memory_bytes(process)
        sample.children = [_sample_from_psutil(child.pid) for child in process.children()]
    except psutil.Error:
        return StackSample(pid, state=_GONE)
    return sample


def memory_bytes(process: psutil.Process) -> int:
    """Return the memory of a process in bytes, with its part of shared memory (PSS).

    For another user's process, return the RSS, which includes all shared memory of the process.
    """
    try:
        return int(process.memory_full_info().pss)
    except psutil.AccessDenied:
        return int(process.memory_info().rss)


def _with_cell_label(frame: StackFrame, cells: Cells) -> StackFrame:
    """Return a frame with the label and source line of its cell, if the frame is in a cell.

    Return any other frame unchanged.
    """
    if (cell := cells.get(frame.file)) is None:
        return frame
    lines = cell.text.splitlines()
    text = lines[frame.line - 1].strip() if frame.line <= len(lines) else ""
    return frame._replace(file=cell.label, text=text)


def _request_stack_by_signal(pid: int, path: Path, states: Collection[str]) -> list[StackFrame]:
    """Send `STACK_SIGNAL` to a process, which then writes its stack to `path`; return the frames.

    `STACK_SIGNAL` would end a process that has no handler for it. So only a process that has `path`
    open gets the signal: a fork inherits the handler and the open file, and a newly executed
    program inherits neither.

    Args:
        states: States, as psutil names them, in which the process may be signalled.

    Returns:
        The frames, outermost first. Empty if the process was not signalled or did not respond.
    """
    try:
        process = psutil.Process(pid)
        has_handler = any(file.path == os.path.realpath(path) for file in process.open_files())
        if not has_handler or process.status() not in states:
            return []
        begin = path.stat().st_size
        process.send_signal(STACK_SIGNAL)
        return _parse_stack(_await_stack(path, begin))
    # The process has ended or belongs to another user, or the run's folder is being removed.
    except (psutil.Error, FileNotFoundError):
        return []


def _await_stack(path: Path, begin: int) -> str:
    """Wait up to `WRITE_S` until a stack is written to a file, and return the stack's text.

    The stack counts as written when two reads, one after the other, find the same text. If this has
    not happened after `WRITE_S`, return the text that was read last.

    Args:
        begin: Size of the file, in bytes, before the stack is written.
    """
    written, until = "", time.monotonic() + WRITE_S
    while time.monotonic() < until:
        time.sleep(_WRITTEN_S)
        before, written = written, path.read_bytes()[begin:].decode()
        if written and written == before:
            break
    return written


def _parse_stack(written: str) -> list[StackFrame]:
    """Parse the stack of one thread that faulthandler has written.

    Returns:
        The frames, outermost first. Empty if the text has no stack. Empty also if the text has
        several stacks, because one of these is then a late response of another process.
    """
    if written.count(_STACK) != 1:
        return []
    text = _ESCAPE.sub(lambda escape: chr(int(escape[0][2:], 16)), written)
    return [StackFrame(it[1], int(it[2]), it[3]) for it in _FRAME.finditer(text)][::-1]


def _cpu_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _cpu_s_below(pids: Iterable[int]) -> dict[int, float]:
    """Return the CPU seconds that each process and all its descendants have used, by pid."""
    return {pid: sum(map(cpu_s, found)) for pid, found in processes_below(pids).items()}


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds that a process and its ended children have used.

    Args:
        process: A process that `processes_below` has returned.
    """
    times = process.info["cpu_times"]
    return float(sum(times[:4])) if times is not None else 0.0


def processes_below(pids: Iterable[int]) -> dict[int, list[psutil.Process]]:
    """Return, for each of the given pids, a list of the process and its descendants.

    If a process descends from two of the given processes, it is only in the list of the nearer
    ancestor. The list of a process that does not run is empty. The function reads all processes of
    the host once, with their CPU times.
    """
    found = {it.pid: it for it in psutil.process_iter(["ppid", "cpu_times"])}
    below: dict[int, list[psutil.Process]] = {pid: [] for pid in pids}
    for pid, process in found.items():
        above: int | None = pid
        while above is not None and above not in below:
            above = found[above].info["ppid"] if above in found else None
        if above is not None:
            below[above].append(process)
    return below
