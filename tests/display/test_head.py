"""Tests of a run's status header: its state after events, and the same content as text and HTML."""

import re
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest
from msgspec import structs

from taas_magic.display.head import RunState, duration, header_text, mime_bundle, ranks_text
from taas_magic.messages import Event, GpuUsage, RankStack, RunStacks
from tests.events import event, new_state, parsed

BAR = " epoch 3:  62%|######2   | 31/50 [00:05<00:03, 5.91it/s]"
SURVIVING_TAGS = {"div", "span", "b", "details", "summary", "progress", "img", "br"}
LIVE_TAGS = {"style"}
"""Tags that only the status header of an active run uses. A saved notebook may lose them."""

SURVIVING_ATTRIBUTES = {"style", "value", "max", "src", "alt"}


def failure(rank: int, message: str = "division by zero", **values: Any) -> dict[str, Any]:
    how = {"how": "raised", "etype": "ZeroDivisionError", "consequence": False}
    return {"rank": rank, "host": "gpu1", "pid": 800 + rank, "message": message, **how, **values}


def run_state(*events: Event, **values: Any) -> RunState:
    state = new_state(**{"name": "digits", "world_size": 4, "began": 10.0, **values})
    for number, seen in enumerate(events):
        state.apply(seen, 11.0 + number)
    return state


STARTED = event("started", attempt=0, pids={"0": 1, "1": 2, "2": 3, "3": 4}, gpus=4)
RUNNING = event("state", state="RUNNING")


def at(seen: Event, time: float) -> Event:
    return structs.replace(seen, time=time)


class Words(HTMLParser):
    """HTML parser that collects the words, tags and attributes of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.words += data.split()


def words_of_text(source: str) -> set[str]:
    """Return the words of the header's text that its HTML must contain, too.

    Bars and curves are left out, because they are no text in HTML.
    """
    return {word.rstrip(":") for word in re.sub(r"\|[^|]*\|| · |[▁-█]+", " ", source).split()}


COUNTS = {"batches": 9, "units": 9, "bytes": 1e6, "waited_s": 6.0, "span_s": 8.0}


STATES = {
    "starting": run_state(event("started", attempt=0, pids={"0": 1})),
    "running": run_state(STARTED, RUNNING, event("progress", rank=0, text=BAR)),
    "noted": run_state(STARTED, event("note", text="no GPU <here>"), event("note", text="again")),
    "restarted": run_state(STARTED, event("restart", attempt=1, failure=failure(3))),
    "succeeded": run_state(
        STARTED, RUNNING, event("ended", state="SUCCEEDED", failures=[], first=None, elapsed_s=2.5)
    ),
    "failed": run_state(
        STARTED,
        event(
            "ended",
            state="FAILED",
            first=failure(3),
            failures=[failure(3), *(failure(rank, "peer", consequence=True) for rank in range(3))],
            elapsed_s=2.5,
        ),
    ),
    "lost": run_state(
        event("ended", state="LOST", first=None, failures=[], elapsed_s=2.5, why="the pool is gone")
    ),
    "fed": run_state(
        STARTED,
        *(event("data", rank=rank, loaders={"<train>": COUNTS}) for rank in (0, 0, 1)),
        event("ended", state="SUCCEEDED", failures=[], first=None, elapsed_s=2.5),
        units=100,
    ),
    "curves": run_state(
        STARTED,
        event("metrics", rank=0, points=[["<loss>", 0, 2.0, 1.0], ["<loss>", 1, None, 1.0]]),
    ),
    "filling": run_state(event("filling", done=3, wanted=40, unit="batches")),
    "hosts": run_state(*(event("started", f"h{i}", pids={}) for i in range(6)), n_hosts=6),
}


@pytest.mark.parametrize("name", STATES)
def test_html_has_the_words_of_the_text(name: str) -> None:
    state = STATES[name]
    shown = Words(mime_bundle(state, 12.0)["text/html"]).words
    missing = words_of_text(header_text(state, 12.0)) - {word.rstrip(":") for word in shown}
    assert not missing


@pytest.mark.parametrize("name", STATES)
def test_html_uses_only_what_an_untrusted_notebook_keeps(name: str) -> None:
    seen = Words(mime_bundle(STATES[name], 12.0)["text/html"])
    assert seen.tags - (set() if STATES[name].has_ended else LIVE_TAGS) <= SURVIVING_TAGS
    assert seen.attributes <= SURVIVING_ATTRIBUTES


def test_all_texts_of_hosts_are_escaped() -> None:
    evil = "<script>alert('1')</script>\"><img src=x onerror=y>"
    state = run_state(
        event("started", evil, pids={"0": 1}),
        event("note", text=evil),
        event("progress", rank=0, text=f"{evil} 5%|{evil}| {evil}"),
        event("failure", failure=failure(1, evil, etype=evil, host=evil)),
        event("failure", failure=failure(2, evil, consequence=True)),
        run_id=evil,
        name=evil,
        pool=evil,
        run_dir=evil,
    )
    shown = mime_bundle(state, 12.0)["text/html"]
    assert "<script" not in shown
    assert "<img" not in shown
    assert evil in unescape(shown)
    assert Words(shown).tags <= SURVIVING_TAGS | LIVE_TAGS


def test_the_header_of_a_running_run() -> None:
    assert header_text(STATES["running"], 16.4).split("\n") == [
        "RUNNING digits · ranks 4 · pool local · host gpu1 · elapsed 6 s · GPU-seconds 21 · run r1",
        f"rank 0: {BAR.strip()}",
        "log: /runs/r1",
    ]


def test_the_header_of_a_failed_run_collapses_consequences() -> None:
    lines = header_text(STATES["failed"], 99.0).split("\n")
    assert lines[0].startswith("FAILED digits · ranks 4 · pool local · host gpu1 · elapsed 2.5 s")
    assert lines[1:4] == [
        "rank 3 on host gpu1 (pid 803): ZeroDivisionError: division by zero",
        "3 other ranks failed because of this:",
        "    ranks 0-2: ZeroDivisionError: peer (a consequence)",
    ]
    assert (
        "<details><summary>3 other ranks failed because of this</summary>"
        in mime_bundle(STATES["failed"], 99.0)["text/html"]
    )


def test_the_header_of_a_run_with_loaders_ends_with_advice() -> None:
    shown = header_text(STATES["fed"], 12.0).split("\n")
    assert shown[1].startswith(
        "<train>: batches 18 of 100 · per second 2.2 · 0.2 MB/s · waited 75%"
    )
    assert shown[2].startswith("advice: ranks waited 75% for '<train>': the run has no fetchers")
    assert "filling 3 of 40 batches" in header_text(STATES["filling"], 12.0)


def test_the_header_of_a_lost_run_says_why() -> None:
    assert "the pool is gone" in header_text(STATES["lost"], 12.0)


def test_ranks_start_and_restart_in_the_header() -> None:
    state = run_state(event("started", pids={"0": 1, "1": 2}))
    assert "ranks 2 of 4 up" in header_text(state, 12.0)
    state.apply(event("started", "gpu2", pids={"2": 1, "3": 2}), 12.0)
    assert "ranks 4 ·" in header_text(state, 12.0)
    state.apply(event("failure", failure=failure(3)), 12.5)
    assert "ranks 3 of 4 up" in header_text(state, 12.0)
    state.apply(event("restart", attempt=1, failure=failure(3)), 13.0)
    shown = header_text(state, 13.0)
    assert "ranks 0 of 4 up" in shown
    assert "restarts 1 (rank 3 on host gpu1 (pid 803): ZeroDivisionError" in shown


def test_times_do_not_change_after_the_end() -> None:
    assert header_text(STATES["succeeded"], 20.0) == header_text(STATES["succeeded"], 9999.0)
    assert "elapsed 2.5 s · GPU-seconds 8" in header_text(STATES["succeeded"], 20.0)


def test_a_hosts_clock_does_not_matter() -> None:
    state = run_state(at(STARTED, 1e9), at(RUNNING, -1e9))
    assert "elapsed 2 s · GPU-seconds 4" in header_text(state, 12.0)


def test_elapsed_time_depends_only_on_the_journal() -> None:
    state = new_state(began=100.0)
    two = event("started", pids={"0": 1, "1": 2}, gpus=2)
    for seen in (at(two, 101.0), at(event("ended", state="INTERRUPTED"), 105.0)):
        state.apply(seen)
    assert (state.elapsed(1e9), state.gpu_seconds(1e9)) == (5.0, 8.0)


def test_gpu_seconds_follow_the_hosts_of_each_attempt() -> None:
    state = new_state(world_size=4, n_hosts=2)
    for seen in (
        at(event("started", pids={"0": 1, "1": 2}, gpus=2), 1.0),
        at(event("started", "gpu2", pids={"2": 1, "3": 2}, gpus=2), 6.0),
        at(event("restart", attempt=1, failure=failure(3)), 11.0),
        at(event("started", "gpu3", attempt=1, pids={"2": 1, "3": 2}, gpus=1), 11.0),
        at(event("started", attempt=1, pids={"0": 1, "1": 2}, gpus=2), 11.0),
    ):
        state.apply(seen)
    assert (state.gpu_seconds(11.0), state.gpu_seconds(21.0)) == (30.0, 60.0)
    assert "ranks 4 · pool local · hosts 2 (gpu1, gpu3)" in header_text(state, 21.0)
    assert run_state(structs.replace(STARTED, gpus=0)).gpu_seconds(99.0) == 0.0


@pytest.mark.parametrize(
    ("events", "progress"),
    [
        ([("progress", "loss"), ("progress", "loss 0.1"), ("progress", "")], ""),
        ([("progress", " 50%|# | 1/2"), ("progress", "")], "50%|# | 1/2"),
        ([("progress", " 50%|# | 1/2"), ("lines", ["100%|##| 2/2", "end"])], "100%|##| 2/2"),
        ([("lines", ["100%|##| 2/2", "end"])], "100%|##| 2/2"),
        ([("lines", ["the end"])], ""),
    ],
)
def test_the_last_progress_bar_of_rank_0(
    events: list[tuple[str, str | list[str]]], progress: str
) -> None:
    fields = {"progress": "text", "lines": "lines"}
    state = run_state(
        *(parsed({"kind": kind, "rank": 0, fields[kind]: value}) for kind, value in events)
    )
    assert state.progress == progress


def test_the_header_shows_only_the_progress_bar_of_rank_0() -> None:
    assert run_state(event("progress", rank=1, text=BAR)).progress == ""


def test_notes_are_shown_once_and_limited() -> None:
    many = [event("note", text=f"note {i % 15}") for i in range(100)]
    shown = header_text(run_state(*many), 12.0)
    assert shown.count("note: note 3\n") == 1
    assert "… and 5 more notes" in shown


def test_events_that_do_not_concern_the_header_are_ignored() -> None:
    assert header_text(run_state(event("host_ended")), 12.0) == header_text(run_state(), 12.0)


@pytest.mark.parametrize(
    ("seconds", "decimals", "words"),
    [
        (0.0, 0, "0 s"),
        (9.99, 0, "9 s"),
        (9.99, 1, "9.9 s"),
        (65.0, 1, "1 min 05 s"),
        (7380.0, 0, "2 h 03 min"),
    ],
)
def test_duration(seconds: float, decimals: int, words: str) -> None:
    assert duration(seconds, decimals) == words


def test_the_table_of_ranks_has_columns_about_gpus_only_if_a_rank_uses_one() -> None:
    used = GpuUsage(busy=0.93, memory_bytes=1_500_000_000)
    rows = [RankStack(rank=0, pid=1, host="a"), RankStack(rank=1, pid=2, host="a", gpu=used)]
    heading, first, second = ranks_text(RunStacks(ranks=rows), new_state()).splitlines()
    assert re.split(" {2,}", heading)[4:7] == ["memory", "GPU", "GPU memory"]
    assert re.split(" {2,}", first)[5:7] == ["-", "-"]
    assert re.split(" {2,}", second)[5:7] == ["93 %", "1.5 GB"]
    assert "GPU" not in ranks_text(RunStacks(ranks=rows[:1]), new_state())
