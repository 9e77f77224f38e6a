"""Tests of `LineAssembler`, which splits a rank's output into lines, and of `LogBudget`."""

import time
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from taas_magic.host.output import PROGRESS_LIMIT_BYTES, LineAssembler, LogBudget

AWKWARD = st.lists(
    st.sampled_from(
        [
            b"\n",
            b"\r",
            b"\r\n",
            b"abc",
            b"\xe2\x82\xac",
            b"\xe2\x82",
            b"\xff",
            b"\0",
            b"\x1b[31m",
            b" ",
            b"\x1b[A",
            b"\x1b",
            b"\r 50%|# | 1/2 [00:01<00:01, 1.0it/s]",
        ]
    ),
    max_size=40,
).map(b"".join)


def assemble(data: bytes, sizes: list[int] | None = None, limit_bytes: int = 64) -> list[str]:
    """Feed `data` to a `LineAssembler`, and return its lines.

    Args:
        data: The output of a rank.
        sizes: Sizes of the chunks in bytes, used again and again; None feeds `data` at once.
        limit_bytes: Longest line that is not cut.
    """
    assembler = LineAssembler(limit_bytes)
    lines: list[str] = []
    sizes = sizes or [len(data) or 1]
    at = step = 0
    while at < len(data):
        size = sizes[step % len(sizes)]
        lines += assembler.feed(data[at : at + size])
        at, step = at + size, step + 1
    return lines + assembler.flush()


class Clock:
    """A clock whose time the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a\nb\n", ["a", "b"]),
        (b"\n\na", ["", "", "a"]),
        (b"a\r\nb\r\r\n", ["a", "b"]),
        (b" 10%\r 50%\r100%\nend\n", ["100%", "end"]),
        (b"\r 10%\r 99%", [" 99%"]),
        (b"\r 10%\r     \r", []),
        (b"\r 10%\r     \rdone\n", ["done"]),
        (b"\x1b[32mok\x1b[0m\n", ["\x1b[32mok\x1b[0m"]),
        (b"a\0b\x0b\x0c\x1c\xc2\x85c\n", ["a\0b\x0b\x0c\x1c\x85c"]),
        ("grün €\n".encode(), ["grün €"]),
        (b"\xff\xe2\x82\n\x80\n", ["\ufffd\ufffd", "\ufffd"]),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_lines(data: bytes, lines: list[str], size: int) -> None:
    assert assemble(data, [size]) == lines


OUTER = "epochs:  50%|##  | {}/4 [00:01<00:01, 1.00it/s]"
INNER = "steps:  50%|##  | {}/9 [00:01<00:01, 9.00it/s]"
DONE = "steps: 100%|####| 9/9 [00:01<00:00, 9.00it/s]"


def nested() -> bytes:
    """Return tqdm's output for an outer bar with inner bars, where the outer loop ends early."""
    text = "\r" + OUTER.format(0)
    for epoch in range(1, 3):
        text += "".join(f"\n\r{INNER.format(step)}\x1b[A" for step in range(9))
        text += f"\n\r{' ' * len(INNER)}\r\x1b[A\r{OUTER.format(epoch)}"
    return f"{text}\nafter\n".encode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100_000])
def test_nested_progress_bars_give_no_line_before_their_end(size: int) -> None:
    assert assemble(nested(), [size], 1000) == [OUTER.format(2), "after"]


def test_a_finished_nested_bar_that_stays_visible_gives_one_line() -> None:
    data = f"\r{OUTER.format(0)}\n\r{INNER.format(1)}\x1b[A\r{DONE}\n\r{OUTER.format(1)}\n"
    assert assemble(data.encode(), [3], 1000) == [DONE, OUTER.format(1)]


def test_three_nested_bars() -> None:
    text = f"\r{OUTER.format(0)}\n\r{INNER.format(0)}\x1b[A"
    text += "".join(f"\n\n\r{INNER.format(step)}\x1b[A\x1b[A" for step in range(5))
    text += f"\n\r{INNER.format(1)}\x1b[A\r{OUTER.format(3)}"
    assembler = LineAssembler(1000)
    assert assembler.feed(text.encode()) == []
    shown = assembler.progress.split("\n")
    assert shown == [OUTER.format(3), INNER.format(1), INNER.format(4)]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_text_printed_after_a_bar_is_a_line_without_the_bar(size: int) -> None:
    bars = [
        "  0%|          | 0/4 [00:00<?, ?it/s]",
        "5it [00:01,  4.99it/s]",
        "Epoch 0:  50%|#### | 5/10 [1:00:01<00:01, 4.2it/s, lr=[0.1], loss=0.5]",
        "100%|##########| 399/400 [00:50<00:00,  7.9it/s]   ",
    ]
    data = "".join(f"\r{bar}[loss] {number}\n" for number, bar in enumerate(bars))
    assert assemble(data.encode(), [size], 1000) == [f"[loss] {n}" for n in range(len(bars))]
    data = f"\r{bars[2]}\nend\n"
    assert assemble(data.encode(), [size], 1000) == [bars[2], "end"]


BAR_THEN_TEXT = b"\r 50%|# | 1/2 [00:01<00:01, 1.0it/s]\nabc\x1b[Adef\n\n"
"""Output of a progress bar, of text in the row below the bar, and then of text in the bar's row."""


@given(data=AWKWARD, sizes=st.lists(st.integers(1, 7), min_size=1), limit=st.sampled_from([3, 64]))
@example(data=BAR_THEN_TEXT, sizes=[BAR_THEN_TEXT.index(b"\n") + 1], limit=64)
def test_lines_do_not_depend_on_how_bytes_are_chunked(
    data: bytes, sizes: list[int], limit: int
) -> None:
    assert assemble(data, sizes, limit) == assemble(data, None, limit)


@given(data=AWKWARD, cut=st.integers(0, 100))
@example(data=BAR_THEN_TEXT, cut=BAR_THEN_TEXT.index(b"\n") + 1)
def test_progress_does_not_depend_on_how_bytes_are_chunked(data: bytes, cut: int) -> None:
    whole, parts = LineAssembler(), LineAssembler()
    whole.feed(data)
    parts.feed(data[:cut])
    parts.feed(data[cut:])
    assert parts.progress == whole.progress


@given(st.lists(st.text(st.characters(blacklist_characters="\r\n", codec="utf-8"))))
def test_every_short_line_arrives_unchanged(lines: list[str]) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    assert assemble(data, [5], limit_bytes=10_000) == lines


def test_progress_is_what_a_terminal_shows() -> None:
    assembler = LineAssembler()
    seen = []
    for data in (b"loss", b" 1.0\r", b" 10%", b"\r 20%\r", b" 30% \xe2\x96", b"\x88", b"\nnext"):
        assembler.feed(data)
        seen.append(assembler.progress)
    assert seen == ["loss", "loss 1.0", " 10%", " 20%", " 30% ", " 30% █", "next"]
    assembler.feed(b"x" * 5000)
    assert len(assembler.progress) == PROGRESS_LIMIT_BYTES


def test_a_long_line_is_cut_with_a_mark_between_whole_characters() -> None:
    assert assemble("€€€€\nok\n".encode(), limit_bytes=10) == ["€€€… [cut: 12 bytes]", "ok"]
    assert assemble(b"0123456789\n", limit_bytes=10) == ["0123456789"]


def test_a_line_of_100_mb_takes_bounded_memory() -> None:
    assembler = LineAssembler()
    block = b"x" * 1_000_000
    tracemalloc.start()
    try:
        for _ in range(100):
            assert assembler.feed(block) == []
        lines = assembler.feed(b"\nnext\n")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 5_000_000
    assert lines == ["x" * 65536 + "… [cut: 100000000 bytes]", "next"]


def test_a_progress_bar_without_end_takes_bounded_memory() -> None:
    assembler = LineAssembler()
    for _ in range(100):
        assembler.feed(b"\r 50%|#####     |" * 1000)
    assert assembler.progress == " 50%|#####     |"
    assert assembler.feed(b"\n") == [" 50%|#####     |"]


def test_output_of_usual_size_passes_complete_in_little_time() -> None:
    data = b"".join(b"%079d\n" % i for i in range(10_000))
    began_s = time.process_time()
    for _ in range(2):
        assembler, budget = LineAssembler(), LogBudget(Clock())
        passed = []
        for at in range(0, len(data), 65536):
            passed += budget.admit(assembler.feed(data[at : at + 65536]))
        assert [int(line) for line in (passed[0], passed[-1])] == [0, 9_999]
        assert len(passed) == 10_000
        assert budget.pop_dropped() == (0, 0)
    assert time.process_time() - began_s < 1.0  # measured: 0.01 s; a loop over bytes is slower


def test_a_flood_is_bounded_and_counted() -> None:
    clock = Clock()
    budget = LogBudget(clock, burst=(1000, 10), per_s=(1000, 10))
    assert len(budget.admit(["x"] * 25)) == 10
    assert budget.pop_dropped() == (15, 30)
    assert budget.pop_dropped() == (0, 0)
    clock.now_s += 0.5
    assert len(budget.admit(["x"] * 25)) == 5
    clock.now_s += 3600
    assert len(budget.admit(["é" * 249] * 25)) == 2  # each line has 499 bytes with its newline


def test_a_clock_that_is_set_back_does_not_enlarge_the_log_budget() -> None:
    clock = Clock()
    budget = LogBudget(clock, burst=(10, 10), per_s=(1, 1))
    budget.admit(["x"] * 5)
    clock.now_s -= 1000
    assert budget.admit(["x"]) == []


def test_tracebacks_pass_when_other_lines_are_dropped() -> None:
    budget = LogBudget(Clock(), burst=(1000, 10), per_s=(0, 0))
    error = [
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in <module>',
        "    1 / 0",
        "ZeroDivisionError: division by zero",
    ]
    flood = ["noise"] * 100
    budget.admit(flood)
    assert budget.admit([*flood, *error, *flood, "terminate called after throwing"]) == [
        *error,
        "terminate called after throwing",
    ]


def test_a_flood_of_errors_is_bounded_too() -> None:
    budget = LogBudget(Clock(), burst=(100, 10), reserve=(1000, 20), reserve_per_s=(0, 0))
    assert len(budget.admit(["E: Exception"] * 1000)) <= 10 + 20


def test_the_tail_remembers_dropped_lines() -> None:
    budget = LogBudget(Clock(), burst=(10, 1))
    budget.admit([str(i) for i in range(100)])
    assert budget.tail == [str(i) for i in range(80, 100)]


def test_a_nested_bar_that_is_erased_gives_progress_but_no_line() -> None:
    assembler = LineAssembler()
    lines = assembler.feed(b"outer 0%\n")
    for step in range(3):
        lines += assembler.feed(f"\n\rinner {step}\x1b[A".encode()[1 if step == 0 else 0 :])
        assert assembler.progress.startswith(f"inner {step}")
    lines += assembler.feed(b"\router 50%\ndone\n")
    assert lines == ["outer 0%", "outer 50%", "done"]
