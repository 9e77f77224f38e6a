"""Tests of the log's text: prefixes of lines, size limits, and counts of omitted lines."""

import pytest

from taas_magic.config import size_text
from taas_magic.display import log
from taas_magic.display.log import MERGE_WAIT_S, LogText
from taas_magic.messages import Lines, LinesDropped, without_controls
from tests.events import new_state


def lines(rank: int, *texts: str, host: str = "gpu1") -> Lines:
    return Lines(rank=rank, host=host, lines=list(texts))


def dropped(rank: int, n_lines: int, n_bytes: int) -> LinesDropped:
    return LinesDropped(rank=rank, lines=n_lines, bytes=n_bytes)


def log_text(world_size: int = 1, n_hosts: int = 1, ranks: frozenset[int] | None = None) -> LogText:
    state = new_state(world_size, n_hosts, log_ranks=ranks)
    return LogText(state.plan, state.run_dir, log.CELL_BYTES)


def test_prefixes() -> None:
    text = log_text(4)
    for rank in (0, 1, 2, 3):
        text.add_lines(lines(rank, "hello"), 0.0)
    text.add_lines(lines(2, "alone"), 1.0)
    text.flush()
    assert text.pop_text() == "[0-3 ×4] hello\n[2] alone\n"  # noqa: RUF001
    assert not text.has_text


def test_with_several_hosts_a_prefix_names_the_host() -> None:
    text = log_text(2, n_hosts=2)
    text.add_lines(lines(1, "a", host="gpu2"), 0.0)
    text.flush()
    assert text.pop_text() == "[gpu2:1] a\n"


def test_only_the_selected_ranks_are_shown_and_merged() -> None:
    text = log_text(8, ranks=frozenset({2, 3, 99}))
    for rank in range(8):
        text.add_lines(lines(rank, "a"), 0.0)
        text.add_dropped(dropped(rank, 1, 10))
    text.close(0.0)
    assert text.pop_text() == (
        "[2-3 ×2] a\n"  # noqa: RUF001
        "[2-3] … 2 lines (20 bytes) not shown; full log: /runs/r1/logs\n"
    )


def test_colours_end_with_their_line_and_the_cursor_stays() -> None:
    assert without_controls("\x1b[31mred") == "\x1b[31mred\x1b[0m"
    assert without_controls("\x1b[31mred\x1b[0m") == "\x1b[31mred\x1b[0m"
    assert without_controls("\x1b[2J\x1b[3Aup\x1b[?25l") == "up"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]8;;http://x\x1b\\a link\x1b]8;;\x1b\\ ends", "a link ends"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1bPdevice\x1b\\text", "text"),
        ("bare \x1b and \x1b", "bare  and "),
        ("\x1b(Bcharacters\x1bc", "characters"),
        ("\x9b2J\x90x\x9cC1\x9d0;t\x07", "2JC1"),
        ("bell\x07 and back\x08", "bell and back"),
        ("a\ttab", "a\ttab"),
        ("\x1b[1;38:2::1:2:3mred", "\x1b[1;38:2::1:2:3mred\x1b[0m"),
        ("\x1b]an end is missing", "]an end is missing"),
    ],
)
def test_escape_sequences_other_than_colours_are_removed(text: str, shown: str) -> None:
    assert without_controls(text) == shown


def test_a_line_names_the_log_file_of_dropped_lines() -> None:
    text = log_text(4)
    text.add_dropped(dropped(3, 81_000, 6_000_000))
    text.add_dropped(dropped(3, 233, 400_000))
    text.add_due_lines(0.0)
    assert text.pop_text() == (
        "[3] … 81,233 lines (6.4 MB) not shown; full log: /runs/r1/logs/rank-3.log\n"
    )


def test_counts_of_a_flood_are_shown_less_and_less_often() -> None:
    text = log_text(1)
    notes = 0
    for second in range(600):
        text.add_dropped(dropped(0, 1000, 1000))
        text.add_due_lines(float(second))
        notes += text.pop_text().count("not shown")
    assert notes == 15
    text.close(600.0)
    assert "not shown" in text.pop_text()


def test_a_full_cell_shows_further_lines_only_in_one_display_of_the_last_lines() -> None:
    text = log_text(1)
    for second in range(60):
        text.add_lines(lines(0, *(f"{second:02}-{number:096}" for number in range(10_000))), second)
    shown = text.pop_text()
    assert log.CELL_BYTES * 0.9 < len(shown) < log.CELL_BYTES * 1.1
    rest = text.summary
    assert rest is not None
    first, *last = rest.text().splitlines()
    n_more = 600_000 - shown.count("\n")
    assert first == f"… {n_more:,} lines more ({n_more / 10_000:.1f} MB): %taas logs r1"
    assert last == [f"[0] 59-{number:096}" for number in range(10_000 - log.LAST_LINES, 10_000)]
    assert not text.has_text


def test_the_command_below_a_full_cell_names_a_rank_that_has_all_further_lines() -> None:
    text = log_text(2)
    text.add_lines(lines(1, *["x" * 99] * 10_000), 0.0)
    text.flush()
    assert text.summary is not None
    assert text.summary.text().splitlines()[0].endswith(": %taas logs r1 --rank 1")
    text.add_line("── restart ──")
    text.add_dropped(dropped(1, 10, 1000))
    assert text.summary.text().splitlines()[0].endswith(": %taas logs r1 --rank 1")
    text.add_dropped(dropped(0, 10, 1000))
    assert text.summary.text().splitlines()[0].endswith(": %taas logs r1")


def test_once_the_cell_is_full_no_later_line_gets_in_before() -> None:
    text = log_text(1)
    text.add_lines(lines(0, "x" * (log.CELL_BYTES - 10), "too long for what is left", "fits"), 0.0)
    text.add_line("── restart ──")
    assert text.pop_text().count("\n") == 1
    assert text.summary is not None
    assert text.summary.text().splitlines()[-3:] == [
        "[0] too long for what is left",
        "[0] fits",
        "── restart ──",
    ]


def test_errors_among_omitted_lines_are_kept_and_limited() -> None:
    text = log_text(1)
    text.add_lines(lines(0, *["x" * 99] * 10_000, "ValueError: bad", *["y" * 99] * 100), 0.0)
    assert text.summary is not None
    shown = text.summary.text()
    assert shown.count("[0] ValueError: bad") == 1
    assert "\nerrors in these lines (at most 200 are shown):\n" in shown
    text.add_lines(lines(0, *["ValueError: " + "z" * 1_000_000] * 1000), 1.0)
    assert len(text.summary.text()) < 60_000


def test_lines_that_a_host_did_not_send_count_as_omitted() -> None:
    text = log_text(1)
    text.add_lines(lines(0, *["x" * 99] * 10_000), 0.0)
    assert text.summary is not None
    before = text.summary.text()
    text.add_dropped(dropped(0, 1_000_000, 50_000_000))
    assert text.has_text and "1,005,000 lines more (50.5 MB)" in text.summary.text() != before


def test_a_cleared_cell_has_its_full_size_again() -> None:
    text = log_text(1)
    text.add_lines(lines(0, *["x" * 99] * 10_000), 0.0)
    text.pop_text()
    text.clear()
    text.add_lines(lines(0, "again"), 1.0)
    assert (text.pop_text(), text.summary) == ("[0] again\n", None)


def test_shown_and_omitted_lines_are_all_lines() -> None:
    text = log_text(1)
    text.add_lines(lines(0, *["x" * 99] * 100_000), 0.0)
    text.close(0.0)
    assert text.summary is not None
    more = int(text.summary.text().split()[1].replace(",", ""))
    assert len(text.pop_text().splitlines()) + more == 100_000


def test_progress_bars_merge_only_if_they_are_equal() -> None:
    text = log_text(2)
    bars = [f"steps: 100%|████| 20/20 [00:01<00:00, {rate}it/s]" for rate in (9.87, 12.3)]
    for rank in range(2):
        text.add_lines(lines(rank, bars[0]), 0.0)
    for rank in range(2):
        text.add_lines(lines(rank, bars[rank]), 1.0)
    text.flush()
    assert text.pop_text() == f"[0-1 ×2] {bars[0]}\n[0] {bars[0]}\n[1] {bars[1]}\n"  # noqa: RUF001


def test_a_line_that_no_rank_printed_comes_after_earlier_lines_of_ranks() -> None:
    text = log_text(2)
    text.add_lines(lines(0, "held"), 0.0)
    text.add_line("── restart ──")
    assert text.pop_text() == "[0] held\n── restart ──\n"


def test_next_due() -> None:
    text = log_text(2)
    assert text.next_due() == float("inf")
    text.add_lines(lines(0, "held"), 5.0)
    assert text.next_due() == pytest.approx(5.0 + MERGE_WAIT_S)
    text.add_dropped(dropped(0, 1, 1))
    assert text.next_due() == float("-inf")


@pytest.mark.parametrize(
    ("n_bytes", "words"),
    [(812, "812 bytes"), (1000, "1.0 kB"), (6_400_000, "6.4 MB"), (999_960, "1.0 MB")],
)
def test_size_text(n_bytes: int, words: str) -> None:
    assert size_text(n_bytes) == words
