"""What one rank prints, as whole lines, and how much of it the notebook gets.

Runs in the agent on the rank's host. Pure: bytes in, text out, the clock is given. The complete
output is in the rank's log file; what is decided here is only what travels to the notebook.
"""

from bisect import bisect_right
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Callable
from itertools import accumulate

LINE_LIMIT_BYTES = 64 * 1024
PROGRESS_LIMIT_BYTES = 1024
CURSOR_UP = "\x1b[A"
TAIL_LINES = 20

ERROR_WORDS = (
    "Traceback",
    "Error:",
    "Exception",
    "CRITICAL",
    "FATAL",
    "Fatal Python error",
    "terminate called",
)

_decoder = getincrementaldecoder("utf-8")


def _decode_cut(data: bytes | bytearray) -> str:
    """Decodes bytes that may end inside a character, which is then left out."""
    return _decoder(errors="replace").decode(bytes(data))


class LineAssembler:
    """Turns the bytes of one rank's stdout and stderr into whole lines.

    The result does not depend on how the bytes were cut into chunks. Lines end at `\\n` only. A
    carriage return overwrites what stood before it in its line, as in a terminal and for tqdm;
    one before `\\n` is part of the line's end. A line that ends with the cursor going up is about
    to be drawn again (the inner bar of nested tqdm) and is progress, no line. ANSI sequences pass,
    bytes that are no UTF-8 become U+FFFD. Memory is bounded by `limit_bytes`, however long a line
    gets.

    Args:
        limit_bytes: A longer line is cut there and marked with its length.
    """

    def __init__(self, limit_bytes: int = LINE_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._head = bytearray()
        self._length_bytes = 0
        self._returned = False

    def feed(self, data: bytes) -> list[str]:
        """Takes the next bytes; returns the lines that they complete, without their ends."""
        first, ended, rest = data.partition(b"\n")
        self._extend(first)
        if not ended:
            return []
        lines = [self._take()]
        body, ended, tail = rest.rpartition(b"\n")
        if ended:
            lines += self._whole_lines(body)
        self._extend(tail)
        return [line for line in lines if not line.endswith(CURSOR_UP)]

    @property
    def progress(self) -> str:
        """The unfinished line as a terminal would show it now; "" where there is none."""
        return _decode_cut(self._head[:PROGRESS_LIMIT_BYTES])

    def flush(self) -> list[str]:
        """Ends the output: the unfinished line, unless it is blank (a progress bar wiped out)."""
        text = self._take()
        return [text] if text.strip() else []

    def _whole_lines(self, body: bytes) -> list[str]:
        pieces = body.split(b"\n")
        if b"\r" not in body and max(map(len, pieces)) <= self._limit_bytes:
            return body.decode("utf-8", "replace").split("\n")
        lines = []
        for piece in pieces:
            self._extend(piece)
            lines.append(self._take())
        return lines

    def _extend(self, part: bytes) -> None:
        """Adds bytes without a `\\n` to the unfinished line."""
        visible = part.rstrip(b"\r")
        if visible:
            _, overwritten, segment = visible.rpartition(b"\r")
            if overwritten or self._returned:
                self._reset()
            self._head += segment[: self._limit_bytes - len(self._head)]
            self._length_bytes += len(segment)
        # The cursor stands at the line's start, but what is there stays until overwritten.
        self._returned = len(visible) < len(part) or (self._returned and not part)

    def _take(self) -> str:
        if self._length_bytes > self._limit_bytes:
            text = f"{_decode_cut(self._head)}… [cut: {self._length_bytes} bytes]"
        else:
            text = self._head.decode("utf-8", "replace")
        self._reset()
        return text

    def _reset(self) -> None:
        self._head.clear()
        self._length_bytes = 0
        self._returned = False


def _size_bytes(line: str) -> int:
    return 1 + (len(line) if line.isascii() else len(line.encode("utf-8", "replace")))


def _has_error_word(text: str) -> bool:
    return any(word in text for word in ERROR_WORDS)


class _Bucket:
    """A token bucket in bytes and lines (the idea is the leaky bucket of network shapers)."""

    def __init__(self, burst: tuple[int, int], per_s: tuple[int, int]) -> None:
        self._burst_bytes, self._burst_lines = burst
        self._bytes_per_s, self._lines_per_s = per_s
        self._bytes: float = self._burst_bytes
        self._lines: float = self._burst_lines

    def refill(self, elapsed_s: float) -> None:
        self._bytes = min(self._burst_bytes, self._bytes + elapsed_s * self._bytes_per_s)
        self._lines = min(self._burst_lines, self._lines + elapsed_s * self._lines_per_s)

    def take(self, sizes: list[int]) -> int:
        """Takes what lines of these sizes need; returns how many of them, from the first, fit."""
        fit = bisect_right(list(accumulate(sizes)), self._bytes)
        fit = min(fit, int(self._lines))
        self._bytes -= sum(sizes[:fit])
        self._lines -= fit
        return fit


class LogBudget:
    """Decides which of a rank's lines travel to the notebook, and counts the others.

    Lines that look like errors, and the frames under a traceback's first line, have a reserve of
    their own: they arrive when a flood keeps everything else out.

    Args:
        clock: Seconds, as `time.monotonic`.
        burst: Bytes and lines that may pass at once.
        per_s: Bytes and lines a second that may pass for ever.
        reserve: Burst for lines that look like errors.
        reserve_per_s: Rate for lines that look like errors.
        tail_lines: How many last lines to remember.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        burst: tuple[int, int] = (4 * 1024 * 1024, 50_000),
        per_s: tuple[int, int] = (512 * 1024, 5_000),
        reserve: tuple[int, int] = (256 * 1024, 1_000),
        reserve_per_s: tuple[int, int] = (16 * 1024, 50),
        tail_lines: int = TAIL_LINES,
    ) -> None:
        self._clock = clock
        self._then_s = clock()
        self._bucket = _Bucket(burst, per_s)
        self._reserve = _Bucket(reserve, reserve_per_s)
        self._tail: deque[str] = deque(maxlen=tail_lines)
        self._in_traceback = False
        self._dropped_lines = 0
        self._dropped_bytes = 0

    @property
    def tail(self) -> list[str]:
        """The last lines, forwarded or not: what a failure report quotes."""
        return list(self._tail)

    def admit(self, lines: list[str]) -> list[str]:
        """Returns those of `lines` that may travel now, in their order."""
        self._refill()
        self._tail.extend(lines)
        sizes = [_size_bytes(line) for line in lines]
        fit = self._bucket.take(sizes)
        if fit == len(lines):
            self._in_traceback = any(line.startswith("Traceback") for line in self._tail)
            return lines
        return lines[:fit] + self._errors(lines[fit:], sizes[fit:])

    def take_dropped(self) -> tuple[int, int]:
        """Lines and bytes kept out since the last call."""
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
        """Drops all but errors; looks line by line only where the whole has a word of an error."""
        kept = []
        kept_bytes = 0
        if self._in_traceback or _has_error_word("\n".join(lines)):
            for line, size_bytes in zip(lines, sizes, strict=True):
                if self._is_error(line) and self._reserve.take([size_bytes]):
                    kept.append(line)
                    kept_bytes += size_bytes
        self._dropped_lines += len(lines) - len(kept)
        self._dropped_bytes += sum(sizes) - kept_bytes
        return kept

    def _is_error(self, line: str) -> bool:
        """Whether a line belongs to an error: a traceback's frames and its last line do, too."""
        belongs = self._in_traceback
        if line.startswith("Traceback"):
            self._in_traceback = True
        elif not line.startswith(" "):
            self._in_traceback = False
        return belongs or _has_error_word(line)
