"""The log's text: prefixes, bounds, counts of what is left out."""

from typing import Any

import pytest

from taas_magic.display import log
from taas_magic.display.fold import HOLD_S
from taas_magic.display.log import LogText, harmless, size_text


def lines(rank: int, *texts: str, host: str = "gpu1") -> dict[str, Any]:
    return {"kind": "lines", "rank": rank, "host": host, "lines": list(texts)}


def dropped(rank: int, n_lines: int, n_bytes: int) -> dict[str, Any]:
    return {"kind": "dropped", "rank": rank, "lines": n_lines, "bytes": n_bytes}


def log_text(world_size: int = 1, n_hosts: int = 1, ranks: frozenset[int] | None = None) -> LogText:
    return LogText(world_size, n_hosts, "/runs/r1/logs", ranks, now=0.0)


def test_prefixes() -> None:
    text = log_text(4)
    for rank in (0, 1, 2, 3):
        text.lines(lines(rank, "hello"), 0.0)
    text.lines(lines(2, "alone"), 1.0)
    text.flush(1.0)
    assert text.take() == "[0-3 ×4] hello\n[2] alone\n"  # noqa: RUF001
    assert not text.has_text


def test_with_several_hosts_a_prefix_names_the_host() -> None:
    text = log_text(2, n_hosts=2)
    text.lines(lines(1, "a", host="gpu2"), 0.0)
    text.flush(0.0)
    assert text.take() == "[gpu2:1] a\n"


def test_only_the_ranks_asked_for_are_shown_and_fold_among_themselves() -> None:
    text = log_text(8, ranks=frozenset({2, 3, 99}))
    for rank in range(8):
        text.lines(lines(rank, "a"), 0.0)
        text.dropped(dropped(rank, 1, 10))
    text.close(0.0)
    assert text.take() == (
        "[2-3 ×2] a\n"  # noqa: RUF001
        "[2-3] … 2 lines (20 bytes) not shown; full log: /runs/r1/logs\n"
    )


def test_colours_end_with_their_line_and_the_cursor_stays() -> None:
    assert harmless("\x1b[31mred") == "\x1b[31mred\x1b[0m"
    assert harmless("\x1b[31mred\x1b[0m") == "\x1b[31mred\x1b[0m"
    assert harmless("\x1b[2J\x1b[3Aup\x1b[?25l") == "up"


def test_what_was_dropped_is_said_with_the_file() -> None:
    text = log_text(4)
    text.dropped(dropped(3, 81_000, 6_000_000))
    text.dropped(dropped(3, 233, 400_000))
    text.due(0.0)
    assert text.take() == (
        "[3] … 81,233 lines (6.4 MB) not shown; full log: /runs/r1/logs/rank-3.log\n"
    )


def test_a_flood_is_said_less_and_less_often() -> None:
    text = log_text(1)
    notes = 0
    for second in range(600):
        text.dropped(dropped(0, 1000, 1000))
        text.due(float(second))
        notes += text.take().count("not shown")
    assert notes == 15
    text.close(600.0)
    assert "not shown" in text.take()


def test_a_burst_keeps_below_what_jupyters_server_allows() -> None:
    text = log_text(1)
    for step in range(30):
        text.lines(lines(0, *["x" * 99] * 10_000), step / 10)
    assert 1_900_000 < len(text.take()) < 2_800_000


def test_all_shown_text_is_bounded_then_trickles_but_errors_pass() -> None:
    text = log_text(1)
    shown = 0
    for second in range(120):
        text.lines(lines(0, *["x" * 99] * 10_000), float(second))
        shown += len(text.take())
    assert log.TOTAL_BYTES - 1_000 < shown < log.TOTAL_BYTES * 1.1
    text.lines(lines(0, *["x" * 99] * 10_000, "ValueError: bad"), 121.0)
    text.close(121.0)
    assert "[0] ValueError: bad\n" in text.take()


def test_nothing_shown_plus_dropped_is_lost() -> None:
    text = log_text(1)
    text.lines(lines(0, *["x" * 99] * 100_000), 0.0)
    text.close(0.0)
    *kept, note = text.take().splitlines()
    assert len(kept) + int(note.split()[2].replace(",", "")) == 100_000


def test_a_line_that_no_rank_printed_comes_after_what_was_printed() -> None:
    text = log_text(2)
    text.lines(lines(0, "held"), 0.0)
    text.say("── restart ──", 0.0)
    assert text.take() == "[0] held\n── restart ──\n"


def test_next_due() -> None:
    text = log_text(2)
    assert text.next_due() is None
    text.lines(lines(0, "held"), 5.0)
    assert text.next_due() == pytest.approx(5.0 + HOLD_S)
    text.dropped(dropped(0, 1, 1))
    assert text.next_due() == float("-inf")


@pytest.mark.parametrize(
    ("n_bytes", "words"),
    [(812, "812 bytes"), (1000, "1.0 kB"), (6_400_000, "6.4 MB"), (999_960, "1.0 MB")],
)
def test_size_text(n_bytes: int, words: str) -> None:
    assert size_text(n_bytes) == words
