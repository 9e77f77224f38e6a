"""Reads what the ranks of a host write and turns it into events and log files.

One thread a run, in the agent. A rank that floods its log blocks at the pipe while this thread
writes to disk; what travels on is bounded by the rank's LogBudget.
"""

import contextlib
import json
import os
import selectors
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from taas_magic.journal import Event, RunFolder, event
from taas_magic.remote import link
from taas_magic.remote.lines import LineAssembler, LogBudget

COALESCE_S = 0.002
"""Lines that come closer together than this travel in one event."""

PROGRESS_S = 0.1
_CHUNK_BYTES = 1 << 20

OnMessage = Callable[[int, dict[str, Any]], None]
OnHangup = Callable[[], None]


class _LogStream:
    """The log pipe of one rank."""

    def __init__(self, rank: int, fd: int, path: Path) -> None:
        self.rank, self.fd = rank, fd
        self.assembler = LineAssembler()
        self.budget = LogBudget(time.monotonic)
        self.pending: list[str] = []
        self.shown_progress = ""
        self.file: IO[bytes] | None = path.open("ab", buffering=0)

    def take(self, data: bytes) -> OSError | None:
        """Stores and splits bytes; returns the error that ended the writing of the log file."""
        self.pending += self.budget.admit(self.assembler.feed(data))
        if self.file is None:
            return None
        try:
            self.file.write(data)
        except OSError as error:
            self.file.close()
            self.file = None
            return error
        return None

    def close(self) -> None:
        self.pending += self.budget.admit(self.assembler.flush())
        if self.file is not None:
            self.file.close()
        os.close(self.fd)


class _MessageStream:
    """The message pipe of one rank."""

    def __init__(self, rank: int, fd: int) -> None:
        self.rank, self.fd = rank, fd
        self._partial = b""

    def take(self, data: bytes) -> list[dict[str, Any]]:
        *whole, self._partial = (self._partial + data).split(b"\n")
        return [json.loads(line) for line in whole]

    def close(self) -> None:
        os.close(self.fd)


class Pump:
    """The reading end of all pipes of a run on this host.

    Args:
        pipes: The private folder that holds the named pipes.
        folder: The run's folder, for the log files.
        host: The host's name, for events.
        emit: Sends an event to the pool's process; called in the pump's thread.
        on_message: Called in the pump's thread with (rank, message) for what is not a log.
        on_hangup: Called in the pump's thread when a pipe has no writer any more.
    """

    def __init__(
        self,
        pipes: Path,
        folder: RunFolder,
        host: str,
        emit: Callable[[Event], None],
        on_message: OnMessage,
        on_hangup: OnHangup,
    ) -> None:
        self._pipes, self._folder, self._host = pipes, folder, host
        self._emit, self._on_message, self._on_hangup = emit, on_message, on_hangup
        self._selector = selectors.DefaultSelector()
        self._wakeup_r, self._wakeup_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wakeup_r, selectors.EVENT_READ)
        self._logs: dict[int, _LogStream] = {}
        self._flushed_at = self._progress_at = 0.0
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="taas-pump", daemon=True)
        self._thread.start()

    def open(self, attempt: int, ranks: list[tuple[int, int]]) -> None:
        """Makes the pipes of an attempt's ranks, given as (rank, local rank)."""
        for rank, local_rank in ranks:
            log_fd = link.make_pipe(link.log_pipe(self._pipes, attempt, local_rank))
            message_fd = link.make_pipe(link.message_pipe(self._pipes, attempt, local_rank))
            with self._lock:
                self._logs[rank] = stream = _LogStream(rank, log_fd, self._folder.log(rank))
                self._selector.register(log_fd, selectors.EVENT_READ, stream)
                messages = _MessageStream(rank, message_fd)
                self._selector.register(message_fd, selectors.EVENT_READ, messages)
        self._wake()

    def tail(self, rank: int) -> list[str]:
        """The last lines that a rank wrote."""
        return self._logs[rank].budget.tail if rank in self._logs else []

    def close(self) -> None:
        """Reads what the pipes still hold, sends it, and ends the thread."""
        self._closing.set()
        self._wake()
        self._thread.join()
        os.close(self._wakeup_r)
        os.close(self._wakeup_w)
        self._selector.close()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wakeup_w, b"w")

    def _run(self) -> None:
        while not self._closing.is_set():
            self._read_ready(self._next_timeout())
            self._flush(time.monotonic())
        while self._read_ready(0):
            pass
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._end(key.data)
        self._flush(float("inf"))

    def _next_timeout(self) -> float | None:
        if any(stream.pending for stream in self._logs.values()):
            return COALESCE_S
        if self._progress_due():
            return PROGRESS_S
        return None

    def _read_ready(self, timeout: float | None) -> bool:
        """Reads every readable pipe once; says whether any rank's pipe was."""
        ready = False
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                os.read(key.fd, 4096)
                continue
            ready = self._read(key.data) or ready
        return ready

    def _read(self, stream: _LogStream | _MessageStream) -> bool:
        try:
            data = os.read(stream.fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._end(stream)
            self._on_hangup()
        elif isinstance(stream, _LogStream):
            self._warn_of_full_disk(stream, stream.take(data))
        else:
            for message in stream.take(data):
                self._on_message(stream.rank, message)
        return bool(data)

    def _end(self, stream: _LogStream | _MessageStream) -> None:
        self._selector.unregister(stream.fd)
        stream.close()

    def _warn_of_full_disk(self, stream: _LogStream, error: OSError | None) -> None:
        if error is not None:
            text = f"the log of rank {stream.rank} is incomplete: {error.strerror}"
            self._emit(event("note", self._host, text=f"{text} ({self._folder.log(stream.rank)})"))

    def _flush(self, now: float) -> None:
        if now - self._flushed_at < COALESCE_S:
            return
        for stream in list(self._logs.values()):
            if stream.pending:
                self._flushed_at = now
                lines, stream.pending = stream.pending, []
                self._emit(event("lines", self._host, rank=stream.rank, lines=lines))
            dropped_lines, dropped_bytes = stream.budget.take_dropped()
            if dropped_lines:
                counts = {"lines": dropped_lines, "bytes": dropped_bytes}
                self._emit(event("dropped", self._host, rank=stream.rank, **counts))
        self._flush_progress(now)

    def _progress_due(self) -> bool:
        first = self._logs.get(0)
        return first is not None and first.assembler.progress != first.shown_progress

    def _flush_progress(self, now: float) -> None:
        """The head shows the progress bar of rank 0 only, so only that one travels."""
        if self._progress_due() and now - self._progress_at >= PROGRESS_S:
            self._progress_at = now
            first = self._logs[0]
            first.shown_progress = first.assembler.progress
            self._emit(event("progress", self._host, rank=0, text=first.shown_progress))
