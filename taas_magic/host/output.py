"""Read the output and messages of a host's ranks, and turn them into events and log files.

Runs in the agent, in one thread for each attempt of a run. If a rank writes faster than this thread
reads, the rank blocks at its full pipe. A `LogBudget` limits the lines that the agent sends to the
notebook. The rank's log file has the complete output.
"""

import os
import re
import select
import selectors
import threading
import time
from bisect import bisect_right
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from typing import IO, NamedTuple

from msgspec import DecodeError

from taas_magic import messages
from taas_magic.errors import reason_of
from taas_magic.host import link
from taas_magic.host.spec import EventSink
from taas_magic.journal.folder import NO_ROOM, DiskReserve, RunFolder
from taas_magic.messages import (
    ClearOutput,
    Display,
    Event,
    InputRequested,
    Lines,
    LinesDropped,
    Note,
    Progress,
    RankMessage,
    RankRaised,
    StoreMessage,
)

LINE_LIMIT_BYTES = 64 * 1024
PROGRESS_LIMIT_BYTES = 1024
"""Maximum bytes of an unfinished line, such as a progress bar, that the notebook shows."""

CURSOR_UP = b"\x1b[A"
"""ANSI sequence that moves the cursor up one row. tqdm writes it between nested bars."""

MAX_BARS = 32
"""Maximum number of nested progress bars of a rank. Further bars become lines of output."""

_CUT_CURSOR_UP = (b"\x1b", b"\x1b[")
# The end of a row that tqdm draws, `[00:01<00:02, 9.8it/s]`, if the bar is not at 100%.
_BAR = re.compile(rb"^(?!.*100%\|).*\[(?:\d+:)?\d\d:\d\d[<,][^\]]*\]\s*$", re.DOTALL)
# The end of a row that tqdm drew, also of a bar at 100%.
_BAR_END = re.compile(rb"\[(?:\d+:)?\d\d:\d\d[<,][^\]]*\]\s*$")
# A row that tqdm drew, and text that another print added to it. The row of a bar ends without a
# newline. One pair of brackets may be nested, as in `lr=[0.1]`.
_TEXT_AFTER_BAR = re.compile(
    rb"^.*?\[(?:\d+:)?\d\d:\d\d[<,](?:[^\[\]]|\[[^\[\]]*\])*\]\s*(?P<text>\S.*)$", re.DOTALL
)
TAIL_LINES = 20
"""Number of last lines of a rank's output that the report of the rank's failure shows."""

ERROR_WORDS = (
    "Traceback",
    "Error:",
    "Exception",
    "CRITICAL",
    "FATAL",
    "Fatal Python error",
    "terminate called",
)
"""Words of error messages. A line of output with one of these words counts as part of an error."""

_decoder = getincrementaldecoder("utf-8")


def _decode_cut(data: bytes | bytearray) -> str:
    """Decode UTF-8 bytes. If the bytes end in the middle of a character, omit this character."""
    return _decoder(errors="replace").decode(bytes(data))


class _Row:
    """One row of a rank's output as a terminal would show it.

    Attributes:
        head: Beginning of the row's text, up to the maximum length of a line.
        length_bytes: Length of the row's whole text.
        is_redrawn: Whether bytes after a carriage return have replaced earlier text of the row.
    """

    def __init__(self) -> None:
        self.head = bytearray()
        self.length_bytes = 0
        self.returned = False
        """Whether the cursor is at the row's start, so that the next bytes replace its text."""
        self.is_redrawn = False
        self.is_left = False
        """Whether a program moved the cursor up from this row, although it was the top row.

        The row above was already returned as a line. So this row is probably a nested progress bar
        that `is_bar` does not recognize, and does not become a line.
        """

    def add_bytes(self, part: bytes, limit_bytes: int) -> None:
        """Add bytes that contain no newline. The row stores at most `limit_bytes` of its text.

        Bytes after a carriage return replace the row's text. If `part` ends with a carriage return,
        the text stays until the bytes of a later call replace it.
        """
        visible = part.rstrip(b"\r")
        if visible:
            _, overwritten, segment = visible.rpartition(b"\r")
            if overwritten or self.returned:
                self.head.clear()
                self.length_bytes = 0
                self.is_redrawn = True
            self.head += segment[: limit_bytes - len(self.head)]
            self.length_bytes += len(segment)
            self.is_left = False
        # After a carriage return, the row stays until other bytes overwrite it.
        self.returned = len(visible) < len(part) or (self.returned and not part)

    @property
    def is_bar(self) -> bool:
        """Whether the row is an unfinished progress bar."""
        return self._may_have_bar and _BAR.search(self.head) is not None

    @property
    def ends_in_bar(self) -> bool:
        """Whether the row is a progress bar, finished or not, without text behind the bar."""
        return self._may_have_bar and _BAR_END.search(self.head) is not None

    @property
    def _may_have_bar(self) -> bool:
        return self.is_redrawn and len(self.head) < 4096

    def text(self, limit_bytes: int) -> str:
        """Return the row's text as a line of output.

        If the text is longer than `limit_bytes`, the line is cut, and its end shows the full length
        of the text. If the program printed text behind a progress bar, the line has only this text.
        """
        if self.length_bytes > limit_bytes:
            return f"{_decode_cut(self.head)}… [cut: {self.length_bytes} bytes]"
        found = _TEXT_AFTER_BAR.match(self.head) if self._may_have_bar else None
        return (found["text"] if found else self.head).decode("utf-8", "replace")


class LineAssembler:
    """A splitter of the bytes of one rank's stdout and stderr into whole lines.

    The splitter emulates the rows and the cursor of a terminal. The result does not depend on how
    the bytes are divided into chunks.

    - Only newlines end lines.
    - Text after a carriage return replaces the text before it, as in a terminal. A carriage return
      directly before a newline is part of the line's end.
    - If a program prints text behind an unfinished bar of tqdm, the line has only the printed text,
      without the bar.
    - Between nested bars, tqdm moves the cursor up. So a row that has only an unfinished bar does
      not become a line yet. When a row gets other text, this row and the rows above it become
      lines.
    - Other ANSI sequences are kept. Bytes that are not UTF-8 become U+FFFD.

    Args:
        limit_bytes: Maximum length of a line. A longer line is cut; its end shows the full length.
    """

    def __init__(self, limit_bytes: int = LINE_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._rows = [_Row()]
        self._at = 0
        self._partial = b""

    def feed(self, data: bytes) -> list[str]:
        """Add the next bytes of the output. Return the lines that are now complete.

        The last bytes may be an incomplete ANSI sequence that moves the cursor up (`CURSOR_UP`). If
        so, these bytes are kept until the next call.
        """
        data = self._partial + data
        self._partial = next((end for end in _CUT_CURSOR_UP if data.endswith(end)), b"")
        first, ended, rest = data[: len(data) - len(self._partial)].partition(b"\n")
        self._add_bytes(first)
        if not ended:
            return []
        lines = self._move_down()
        body, ended, tail = rest.rpartition(b"\n")
        if ended:
            lines += self._whole_lines(body)
        self._add_bytes(tail)
        return lines

    @property
    def progress(self) -> str:
        """The unfinished lines as a terminal would show them now; "" if there are none.

        Each line is cut at `PROGRESS_LIMIT_BYTES`.
        """
        rows = (_decode_cut(row.head[:PROGRESS_LIMIT_BYTES]) for row in self._rows if row.head)
        return "\n".join(rows)

    def flush(self) -> list[str]:
        """Return all unfinished lines, as if each ended now. Then start again with an empty row.

        Blank unfinished lines are left out: they are progress bars that the program has erased.
        """
        self._rows[self._at].add_bytes(self._partial, self._limit_bytes)
        lines = [row.text(self._limit_bytes) for row in self._rows if row.head.strip()]
        self._rows, self._at, self._partial = [_Row()], 0, b""
        return lines

    def end_line(self) -> list[str]:
        """Return the output's unfinished line, as if it ended now, in a list with one item.

        Return [] if there is no unfinished line. Also return [] if the unfinished output is a
        progress bar or several nested bars; these bars stay unfinished.

        Call this method before the notebook shows a display. Then the text before the display and
        the text after the display become separate lines.
        """
        is_bar = len(self._rows) > 1 or self._rows[0].ends_in_bar
        return [] if is_bar else self.flush()

    def _whole_lines(self, body: bytes) -> list[str]:
        """Add whole lines of output. Return the lines that later output cannot change any more.

        Later output can change only progress bars. Usually there are none, so all lines are decoded
        at once, which is fast. In three cases, each line is added separately to the rows of the
        emulated terminal: one of these rows already has text, a line exceeds the maximum length, or
        `body` contains a carriage return or `CURSOR_UP`.

        Args:
            body: The lines, separated by newlines, without the last newline.
        """
        pieces = body.split(b"\n")
        is_plain = b"\r" not in body and CURSOR_UP not in body
        is_blank = len(self._rows) == 1 and not self._rows[0].head  # no nested bars above
        if is_plain and is_blank and max(map(len, pieces)) <= self._limit_bytes:
            return body.decode("utf-8", "replace").split("\n")
        lines = []
        for piece in pieces:
            self._add_bytes(piece)
            lines += self._move_down()
        return lines

    def _add_bytes(self, part: bytes) -> None:
        """Add bytes without a newline to the rows of the emulated terminal.

        Each `CURSOR_UP` (an ANSI sequence) in `part` moves the cursor up one row. The bytes after a
        `CURSOR_UP` replace the text of the row to which the cursor has moved.

        A `CURSOR_UP` in the top row does not move the cursor. The program then assumes that there
        is a row above, but this row was already returned as a line. So the top row's `is_left`
        becomes True, until the row gets further bytes.
        """
        first, *others = part.split(CURSOR_UP) if CURSOR_UP in part else [part]
        self._rows[self._at].add_bytes(first, self._limit_bytes)
        for above in others:
            self._rows[self._at].is_left = self._at == 0
            self._at = max(0, self._at - 1)
            self._rows[self._at].returned = True
            self._rows[self._at].add_bytes(above, self._limit_bytes)

    def _move_down(self) -> list[str]:
        """Move the cursor to the row below. Remove finished rows from the top; return their lines.

        If there is no row below, create one. The next bytes replace the text of the row below.

        tqdm may still move the cursor up to nested bars. So no row is finished if all of these are
        true:

        - The top row is an unfinished progress bar.
        - Each other row above the cursor is an unfinished bar or blank.
        - There are at most `MAX_BARS` rows.

        Otherwise, the top row is finished and removed, and the next row becomes the top row. This
        is repeated until no row is finished, or the cursor is in the top row. If a removed row has
        `is_left`, it is a progress bar that `is_bar` does not recognize, and its line is not
        returned.
        """
        self._at += 1
        if self._at == len(self._rows):
            self._rows.append(_Row())
        self._rows[self._at].returned = bool(self._rows[self._at].head)
        lines = []
        while self._at:
            first, *others = self._rows[: self._at]
            bars_only = first.is_bar and all(row.is_bar or not row.head.strip() for row in others)
            if bars_only and len(self._rows) <= MAX_BARS:
                break
            lines += [] if first.is_left else [first.text(self._limit_bytes)]
            del self._rows[0]
            self._at -= 1
        return lines


def _size_bytes(line: str) -> int:
    return 1 + (len(line) if line.isascii() else len(line.encode("utf-8", "replace")))


def _has_error_word(text: str) -> bool:
    return any(word in text for word in ERROR_WORDS)


class _Bucket:
    """A token bucket that limits the rate of lines, and of bytes in these lines.

    The bucket has byte tokens and line tokens. A line may be sent if its tokens are available.

    Args:
        burst: Maximum number of tokens in the bucket, as (byte tokens, line tokens).
        per_s: Number of tokens that are added each second, as (byte tokens, line tokens).
    """

    def __init__(self, burst: tuple[int, int], per_s: tuple[int, int]) -> None:
        self._burst_bytes, self._burst_lines = burst
        self._bytes_per_s, self._lines_per_s = per_s
        self._bytes: float = self._burst_bytes
        self._lines: float = self._burst_lines

    def refill(self, elapsed_s: float) -> None:
        self._bytes = min(self._burst_bytes, self._bytes + elapsed_s * self._bytes_per_s)
        self._lines = min(self._burst_lines, self._lines + elapsed_s * self._lines_per_s)

    def consume(self, sizes: list[int]) -> int:
        """Remove the tokens of the first lines from the bucket, for as many lines as possible.

        Args:
            sizes: Sizes of the lines in bytes. A line of n bytes costs n byte tokens and one line
                token.

        Returns:
            The number of lines whose tokens were removed, counted from the first line.
        """
        fit = bisect_right(list(accumulate(sizes)), self._bytes)
        fit = min(fit, int(self._lines))
        self._bytes -= sum(sizes[:fit])
        self._lines -= fit
        return fit


class LogBudget:
    """A rate limit that selects which of a rank's lines are sent to the notebook.

    Lines that look like errors, such as the frames of a traceback, have an additional budget, the
    reserve.

    Args:
        clock: Function that returns seconds, such as `time.monotonic`.
        burst: Maximum amount that may be sent at once, as (bytes, lines).
        per_s: Maximum amount that may be sent each second in the long run, as (bytes, lines).
        reserve: Maximum additional amount of error lines at once, as (bytes, lines).
        reserve_per_s: Maximum additional amount of error lines each second, as (bytes, lines).
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        burst: tuple[int, int] = (4 * 1024 * 1024, 50_000),
        per_s: tuple[int, int] = (512 * 1024, 5_000),
        reserve: tuple[int, int] = (256 * 1024, 1_000),
        reserve_per_s: tuple[int, int] = (16 * 1024, 50),
    ) -> None:
        self._clock = clock
        self._then_s = clock()
        self._bucket = _Bucket(burst, per_s)
        self._reserve = _Bucket(reserve, reserve_per_s)
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._in_traceback = False
        self._dropped_lines = 0
        self._dropped_bytes = 0

    @property
    def tail(self) -> list[str]:
        """The last `TAIL_LINES` lines of the rank's output, whether sent or dropped."""
        return list(self._tail)

    def admit(self, lines: list[str]) -> list[str]:
        """Return the lines that may be sent to the notebook now, in order. Drop all other lines."""
        fit, errors = self.select(lines)
        return fit + errors

    def select(self, lines: list[str]) -> tuple[list[str], list[str]]:
        """Select the lines that may be sent now, and drop all others.

        First refills the budget, and adds all lines to `tail`. `pop_dropped` later returns how many
        lines and bytes were dropped.

        If all lines fit into the budget, nothing is dropped. The method then records whether one of
        the last lines begins a traceback, because the lines of the next call may belong to this
        traceback.

        Returns:
            Two lists. The first list has the beginning of `lines`, as far as it fits into the
            budget. The second list has the remaining lines that look like errors, as far as
            they fit into the reserve.
        """
        self._refill()
        self._tail.extend(lines)
        sizes = [_size_bytes(line) for line in lines]
        fit = self._bucket.consume(sizes)
        if fit == len(lines):
            self._in_traceback = any(line.startswith("Traceback") for line in self._tail)
            return lines, []
        return lines[:fit], self._errors(lines[fit:], sizes[fit:])

    def select_errors(self, lines: list[str]) -> list[str]:
        """Return the lines that look like errors and fit into the reserve; drop all other lines.

        First refills the reserve. The lines use only the reserve, and are not added to `tail`.
        `pop_dropped` later returns how many lines and bytes were dropped.
        """
        self._refill()
        return self._errors(lines, [_size_bytes(line) for line in lines])

    def pop_dropped(self) -> tuple[int, int]:
        """Return the number of dropped lines, and of bytes in these lines, since the last call."""
        dropped = self._dropped_lines, self._dropped_bytes
        self._dropped_lines = self._dropped_bytes = 0
        return dropped

    def _refill(self) -> None:
        now_s = self._clock()
        elapsed_s = max(0.0, now_s - self._then_s)
        self._then_s = now_s
        self._bucket.refill(elapsed_s)
        self._reserve.refill(elapsed_s)

    def _errors(self, lines: list[str], sizes: list[int]) -> list[str]:
        """Return the lines that look like errors and fit into the reserve; drop all other lines.

        The numbers of dropped lines and bytes are counted for `pop_dropped`.

        If `lines` contain none of `ERROR_WORDS`, and no traceback has begun in an earlier call, all
        lines are dropped without a check of each line, which saves time.

        Args:
            sizes: Sizes of the lines in bytes.
        """
        kept = []
        kept_bytes = 0
        if self._in_traceback or _has_error_word("\n".join(lines)):
            for line, size_bytes in zip(lines, sizes, strict=True):
                if self._is_error(line) and self._reserve.consume([size_bytes]):
                    kept.append(line)
                    kept_bytes += size_bytes
        self._dropped_lines += len(lines) - len(kept)
        self._dropped_bytes += sum(sizes) - kept_bytes
        return kept

    def _is_error(self, line: str) -> bool:
        """Return whether a line is part of an error, such as a traceback.

        Pass all lines of the output in their order, because a traceback may have begun in an
        earlier line.
        """
        belongs = self._in_traceback
        if line.startswith("Traceback"):
            self._in_traceback = True
        elif not line.startswith(" "):
            self._in_traceback = False
        return belongs or _has_error_word(line)


class Wakeup:
    """An event, like `threading.Event`, that wakes a thread which waits in a selector.

    The file descriptor of the event is readable while the event is set. Works only on Linux.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Return the event's descriptor, for a selector or `multiprocessing.connection.wait`."""
        return self._descriptor

    def set(self) -> None:
        """Set the event: make its descriptor readable. Thread-safe. Does nothing after `close`."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Clear the event: make its descriptor unreadable again."""
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:
            return  # the descriptor was not readable

    def close(self) -> None:
        """Close the event's descriptor. Call this method when no thread waits for the event."""
        with self._lock:
            self._is_closed = True
            os.close(self._descriptor)


COALESCE_S = 0.002
"""Minimum seconds between two times at which the agent sends the pending lines of all ranks.

The lines of a rank that arrive in between are sent together, as one event.
"""

PROGRESS_S = 0.1

DRAIN_S = 30.0
"""Maximum seconds to wait until the reader's thread has read what a rank has written."""

MESSAGE_LIMIT_BYTES = 64 << 20
"""Maximum bytes of a rank's message. A note for the user replaces a larger message.

Displays are smaller, because `shell.without_large_parts` removes large representations.
"""

MAX_INCOMPLETE = 64
"""Maximum number of incomplete messages of a rank. If there are more, the oldest one is dropped.

A message stays incomplete if its sender is killed.
"""

_CHUNK_BYTES = 1 << 20
_PIPE_CHUNKS = 2
"""Number of reads that are enough to empty a full pipe. A read gets at most `_CHUNK_BYTES`."""


class _LogStream:
    """The output of one rank: its log pipe, its log file, and the lines that are not sent yet."""

    def __init__(self, rank: int, fd: int, path: Path) -> None:
        self.rank, self.fd = rank, fd
        self.assembler = LineAssembler()
        self.budget = LogBudget(time.monotonic)
        self.pending: list[str] = []
        self.shown_progress = ""
        self.file: IO[bytes] | None = path.open("ab", buffering=0)
        self._disk_reserve = DiskReserve(path.parent)
        self.heard_at = 0.0
        self.is_open = True
        self.is_cut = self.has_traceback = False

    def feed(self, data: bytes) -> str:
        """Append whole lines of output to `pending`, then write the bytes to the log file.

        `pending` gets only the lines that the rank's `LogBudget` admits; other lines are dropped.
        Also records the time, and whether the output ends in the middle of a line.

        If writing fails or the disk has too little room, closes the log file. Later calls then only
        append to `pending`.

        Returns:
            Why this call has closed the log file, such as a full disk; "" if it has not.
        """
        self.heard_at, self.is_cut = time.monotonic(), not data.endswith(b"\n")
        self.pending += self.budget.admit(self.assembler.feed(data))
        if self.file is None:
            return ""
        why = "" if self._disk_reserve.reserve(len(data)) else NO_ROOM
        try:
            if not why:
                self.file.write(data)
        except OSError as error:
            why = reason_of(error)
        if why:
            self._close_file()
        return why

    def end_run(self) -> str:
        """Append unfinished lines to `pending`, and close the log file. The log pipe stays open.

        Returns:
            Why the log file is incomplete, if only its closing shows this; else "".
        """
        self.pending += self.budget.admit(self.assembler.flush())
        return self._close_file()

    def close(self) -> None:
        self.is_open = False
        os.close(self.fd)

    def _close_file(self) -> str:
        """Close the log file, if it is open. Return why this failed; "" if it did not fail.

        On NFS, closing a file reports earlier writes that have failed meanwhile.
        """
        file, self.file = self.file, None
        try:
            if file is not None:
                file.close()
        except OSError as error:
            return reason_of(error)
        return ""


class _MessageStream:
    """The message pipe of one rank, and the parts of messages that are still incomplete.

    Forks of the rank write to the same pipe, so parts of several messages may alternate.
    """

    def __init__(self, rank: int, fd: int) -> None:
        self.rank, self.fd = rank, fd
        self._rest = b""
        self._begun: dict[bytes, tuple[list[bytes], int]] = {}
        self._is_broken = False
        self.is_open = True

    def feed(self, data: bytes) -> list[Event | RankMessage | StoreMessage]:
        """Add bytes from the message pipe, and return the messages that are now complete.

        A note for the user replaces each message above `MESSAGE_LIMIT_BYTES`. A note also replaces
        the first invalid message. Further invalid messages are dropped.
        """
        *pieces, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-select.PIPE_BUF :]
        return [message for piece in pieces if (message := self._put(piece)) is not None]

    def _put(self, piece: bytes) -> Event | RankMessage | StoreMessage | None:
        """Add a piece of a message. If the message is now complete, decode and return it.

        If there are more than `MAX_INCOMPLETE` incomplete messages, drop the oldest one.

        Returns:
            The message; None while it is incomplete. If the complete message is too large or
            invalid, the result is a note for the user or None, as for `_decode`.
        """
        head, _, part = piece.partition(b" ")
        is_last, sender = head.startswith(link.LAST), head[1:]
        parts, size_bytes = self._begun.pop(sender, ([], 0))
        size_bytes += len(part)
        if size_bytes <= MESSAGE_LIMIT_BYTES:
            parts.append(part)
        if is_last:
            return self._decode(parts, size_bytes)
        self._begun[sender] = parts, size_bytes
        if len(self._begun) > MAX_INCOMPLETE:
            del self._begun[next(iter(self._begun))]
        return None

    def _decode(
        self, parts: list[bytes], size_bytes: int
    ) -> Event | RankMessage | StoreMessage | None:
        """Decode a complete message from its pieces.

        Return a note for the user instead of a message above `MESSAGE_LIMIT_BYTES`, and instead of
        the first invalid message. For further invalid messages, return None.
        """
        if size_bytes > MESSAGE_LIMIT_BYTES:
            text = f"rank {self.rank} sent {size_bytes / 1e6:,.0f} MB at once: not shown"
            return Note(text=text)
        try:
            return messages.decode_rank_message(b"".join(parts))
        except DecodeError:
            is_first, self._is_broken = not self._is_broken, True
        text = f"a process of rank {self.rank} wrote to the pipe of taas-magic's own messages"
        return Note(text=f"{text}: its text is not shown") if is_first else None

    def close(self) -> None:
        self.is_open = False
        os.close(self.fd)


OnMessage = Callable[[int, Event | RankMessage | StoreMessage], None]
"""Function called in the reader's thread with (rank, message) for each message of a rank."""


class _Sink(NamedTuple):
    """Destination of the ranks' output and messages.

    Attributes:
        folder: Folder of the run, which gets the log files.
        emit: Function that sends an event with output to the pool's process.
        on_message: Function that receives each message of a rank.
    """

    folder: RunFolder
    emit: EventSink
    on_message: OnMessage


class PipeReader:
    """Reader of the output and messages of an attempt's ranks on this host. Has its own thread.

    Writes the output to log files, and sends it as events. The constructor creates all named pipes
    between the ranks and the agent, and starts the thread.

    Args:
        pipes: Private folder in which the reader creates the named pipes.
        folder: Folder of the run, which gets the log files.
        ranks: Numbers of the ranks.
        emit: Function that sends an event with output to the pool's process.
        on_message: Function that receives each message of a rank, in the reader's thread.
    """

    def __init__(
        self,
        pipes: Path,
        folder: RunFolder,
        ranks: Iterable[int],
        emit: EventSink,
        on_message: OnMessage,
    ) -> None:
        self._sink = _Sink(folder, emit, on_message)
        self._selector = selectors.DefaultSelector()
        self._wakeup = Wakeup()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._logs: dict[int, _LogStream] = {}
        self._flushed_at = self._progress_at = 0.0
        self._closing = threading.Event()
        self._to_drain: SimpleQueue[tuple[int, threading.Event]] = SimpleQueue()
        self._to_follow: SimpleQueue[tuple[_Sink, dict[int, _LogStream], threading.Event]] = (
            SimpleQueue()
        )
        os.mkfifo(pipes / link.RUNNING, 0o600)
        for rank in ranks:
            log_fd = link.make_pipe(link.rank_file(pipes, rank, "log"))
            message_fd = link.make_pipe(link.rank_file(pipes, rank, "messages"))
            for pipe in ("ask", "cells", "input"):
                os.mkfifo(link.rank_file(pipes, rank, pipe), 0o600)
            self._logs[rank] = stream = _LogStream(rank, log_fd, folder.log(rank))
            self._selector.register(log_fd, selectors.EVENT_READ, stream)
            said = _MessageStream(rank, message_fd)
            self._selector.register(message_fd, selectors.EVENT_READ, said)
        self._thread = threading.Thread(target=self._run, name="taas-pipes", daemon=True)
        self._thread.start()

    def tail(self, rank: int) -> list[str]:
        """Return the last `TAIL_LINES` lines of a rank's output."""
        return self._logs[rank].budget.tail

    def last_output_at(self, rank: int) -> float:
        """Return the time at which a rank or its children last wrote output; 0 before any output.

        The time is in seconds of `time.monotonic`.
        """
        return self._logs[rank].heard_at

    def drain(self, rank: int) -> None:
        """Wait until the reader's thread has read the output and messages that a rank has written.

        Waits up to `DRAIN_S` seconds.
        """
        done = threading.Event()
        self._to_drain.put((rank, done))
        self._wakeup.set()
        done.wait(DRAIN_S)

    def redirect_to(self, folder: RunFolder, emit: EventSink, on_message: OnMessage) -> None:
        """Make another run the destination of all further output and messages of the ranks.

        Output and messages that the ranks have already written still go to the previous run. Waits
        up to `DRAIN_S` seconds until the reader's thread has changed the destination.

        Args:
            folder: Folder of the new run, which gets the log files from now on.
            emit: Function that sends an event with output to the pool's process.
            on_message: Function that receives each message of a rank, in the reader's thread.

        Raises:
            OSError: A log file cannot be created.
        """
        logs = {
            rank: _LogStream(rank, log.fd, folder.log(rank))
            for rank, log in self._logs.items()
            if log.is_open
        }
        done = threading.Event()
        self._to_follow.put((_Sink(folder, emit, on_message), logs, done))
        self._wakeup.set()
        done.wait(DRAIN_S)

    def close(self) -> None:
        """Send what the pipes still contain, close the pipes, and end the reader's thread."""
        self._closing.set()
        self._wakeup.set()
        self._thread.join()
        self._selector.close()
        self._wakeup.close()

    def _run(self) -> None:
        """Read the pipes until `close` is called; then read what the pipes still contain.

        Sends the output and messages that it reads, and at the end closes all pipes and log files.
        Runs in the reader's thread, which also handles the requests of `drain` and `redirect_to`.
        """
        while not self._closing.is_set():
            has_lines = any(stream.pending for stream in self._logs.values())
            due_s = COALESCE_S if has_lines else PROGRESS_S if self._progress_due() else None
            self._read_ready(due_s)
            while not self._to_drain.empty():
                rank, done = self._to_drain.get()
                self._read_all([stream for stream in self._streams() if stream.rank == rank])
                done.set()
            while not self._to_follow.empty():
                sink, logs, done = self._to_follow.get()
                self._change_sink(sink, logs)
                done.set()
            self._flush(time.monotonic())
        self._read_all(self._streams())
        for stream in self._streams():
            self._close_stream(stream)
        self._flush(float("inf"))

    def _change_sink(self, sink: _Sink, logs: dict[int, _LogStream]) -> None:
        """Send all output so far to the old sink; then use the new `sink` and `logs`.

        First reads what the pipes contain now. Sends unfinished lines as whole lines, and closes
        the old log files. If a rank's log pipe has already ended, also closes the rank's new log
        file.

        Args:
            sink: Destination of all later output and messages.
            logs: New log streams, with new log files, by rank.
        """
        self._read_all(self._streams())
        for rank, old in list(self._logs.items()):
            self._warn_of_end(old, old.end_run())
            self._flush_stream(old)
            if rank in logs and old.is_open:
                self._logs[rank] = logs[rank]
                self._selector.modify(old.fd, selectors.EVENT_READ, logs[rank])
            elif rank in logs:  # the rank's pipe has ended since `redirect_to` was called
                logs[rank].end_run()
        self._sink = sink

    def _streams(self) -> list[_LogStream | _MessageStream]:
        return [key.data for key in list(self._selector.get_map().values()) if key.data is not None]

    def _read_ready(self, timeout: float | None) -> None:
        """Wait for readable pipes, and read each of them once. Close pipes that have no writer.

        Reads output before messages, and sends the output first: a rank's messages must not delay
        the lines that the rank printed before. Also returns when `drain`, `redirect_to` or `close`
        wakes the thread.

        Args:
            timeout: Maximum seconds to wait; None for no limit.
        """
        ready: list[_LogStream | _MessageStream | None] = [
            key.data for key, _ in self._selector.select(timeout)
        ]
        if None in ready:
            self._wakeup.clear()
        for kind in (_LogStream, _MessageStream):
            for stream in ready:
                if isinstance(stream, kind) and self._read(stream) == b"" and stream.is_open:
                    self._close_stream(stream)
            self._flush(time.monotonic())

    def _read_all(self, streams: Iterable[_LogStream | _MessageStream]) -> None:
        """Read everything that the pipes contain at the time of the call, and possibly later data.

        Reads each pipe at most `_PIPE_CHUNKS` times, which is enough to empty a full pipe. Reading
        until the pipes are empty might never end, because children of ranks may keep writing.

        A pipe without a writer is not closed: its rank may not have opened the pipe yet, and would
        wait forever without a reader.
        """
        for stream in streams:
            for _ in range(_PIPE_CHUNKS):
                if not self._read(stream):
                    break

    def _read(self, stream: _LogStream | _MessageStream) -> bytes | None:
        """Read a pipe once, and process the data.

        Output goes to the rank's log file and to the rank's pending lines. If the log file cannot
        be written any more, a note tells the user.

        Each message is passed to `on_message`. Before some messages, this method does more:

        - Before a message with a traceback: append the traceback to the log file.
        - Before a request for input: send all output of the rank.
        - Before a new display, or the order to clear the cell: send the rank's lines, also an
          unfinished line, but no progress bars.
        - Before the update of a display: send only whole lines.

        Returns:
            The data. None if the pipe is empty, but some process has the pipe open for writing. The
            result is b"" if the pipe is empty and has no writer, or if this reader has closed it.
        """
        if not stream.is_open:  # the stream ended meanwhile
            return b""
        try:
            data = os.read(stream.fd, _CHUNK_BYTES)
        except BlockingIOError:
            return None
        if not data:
            return data
        if isinstance(stream, _LogStream):
            self._warn_of_end(stream, stream.feed(data))
        else:
            for message in stream.feed(data):
                if isinstance(message, RankRaised):
                    self._log_traceback(stream.rank, message)
                elif isinstance(message, InputRequested):
                    self._send_output(stream.rank)
                elif isinstance(message, Display | ClearOutput):
                    is_update = isinstance(message, Display) and message.update
                    self._send_lines(stream.rank, ends_line=not is_update)
                self._sink.on_message(stream.rank, message)
        return data

    def _log_traceback(self, rank: int, message: RankRaised) -> None:
        """Append a rank's first traceback to the rank's log file, after all earlier output.

        Ignores the rank's further tracebacks, and a traceback that is marked as already logged. If
        the file cannot be written, a note tells the user. The traceback is not sent as output,
        because the notebook shows it in the exception that the cell raises.
        """
        stream = self._logs[rank]
        if stream.has_traceback or message.is_logged:
            return
        stream.has_traceback = True
        self._read_all([stream])  # a thread of the rank may still be writing
        lines = [""] if stream.is_cut else []
        lines += [*message.traceback, ""]
        try:
            with self._sink.folder.log(rank).open("ab") as file:
                file.write("\n".join(lines).encode(errors="backslashreplace"))
        except OSError as error:
            self._warn_of_end(stream, reason_of(error))

    def _send_output(self, rank: int) -> None:
        """Send all output of a rank so far, before the user is asked for input.

        An unfinished line is sent as a whole line, because it may be the question to the user.
        """
        stream = self._logs[rank]
        self._read_all([stream])
        stream.pending += stream.assembler.flush()
        self._flush_stream(stream)

    def _send_lines(self, rank: int, ends_line: bool) -> None:
        """Send a rank's pending lines, so that the notebook shows them above its next display.

        Args:
            ends_line: Whether to send an unfinished line as a whole line. An unfinished progress
                bar is never sent.
        """
        stream = self._logs[rank]
        if ends_line:
            stream.pending += stream.budget.admit(stream.assembler.end_line())
        self._flush_stream(stream)

    def _close_stream(self, stream: _LogStream | _MessageStream) -> None:
        self._selector.unregister(stream.fd)
        if isinstance(stream, _LogStream):
            self._warn_of_end(stream, stream.end_run())
        stream.close()

    def _warn_of_end(self, stream: _LogStream, why: str) -> None:
        if why:
            text = f"the log of rank {stream.rank} is incomplete: {why}"
            self._sink.emit(Note(text=f"{text} ({self._sink.folder.log(stream.rank)})"))

    def _flush(self, now: float) -> None:
        """Send the pending lines of all ranks, and the progress bars of rank 0 if they changed.

        Sends nothing if lines were sent less than `COALESCE_S` seconds ago. Sends no progress bars
        if progress bars were sent less than `PROGRESS_S` seconds ago.

        Args:
            now: Time of the monotonic clock, in seconds; infinity to send everything immediately.
        """
        if now - self._flushed_at < COALESCE_S:
            return
        for stream in list(self._logs.values()):
            if self._flush_stream(stream):
                self._flushed_at = now
        if self._progress_due() and now - self._progress_at >= PROGRESS_S:
            self._progress_at = now
            first = self._logs[0]
            first.shown_progress = first.assembler.progress
            self._sink.emit(Progress(rank=0, text=first.shown_progress))

    def _flush_stream(self, stream: _LogStream) -> bool:
        """Send a rank's pending lines, and the numbers of lines and bytes that were dropped.

        Return whether there were pending lines.
        """
        lines, stream.pending = stream.pending, []
        if lines:
            self._sink.emit(Lines(rank=stream.rank, lines=lines))
        dropped, size = stream.budget.pop_dropped()
        if dropped:
            self._sink.emit(LinesDropped(rank=stream.rank, lines=dropped, bytes=size))
        return bool(lines)

    def _progress_due(self) -> bool:
        """Return whether rank 0's progress bars have changed since they were last sent."""
        first = self._logs.get(0)
        return first is not None and first.assembler.progress != first.shown_progress
