"""Tests that a view of a journal that is read later equals the view of the run while it ran."""

import random
from typing import Any

import pytest

from taas_magic.display import replay
from taas_magic.display.head import RunState
from taas_magic.display.replay import OutputPiece, Replay
from taas_magic.messages import Display, Event, Lines, encode
from taas_magic.plan import DataPlan, FetcherPlan
from tests.events import event, failure, new_state


def chunks_of(events: list[Event], size: int = 7) -> list[bytes]:
    lines = [encode(seen) + b"\n" for seen in events]
    return [b"".join(lines[at : at + size]) for at in range(0, len(lines), size)]


def replayed(events: list[Event], state: RunState | None = None) -> Replay:
    found = Replay(state or new_state(world_size=2))
    for chunk in chunks_of(events):
        found.read(chunk)
    return found


def texts(pieces: list[OutputPiece]) -> list[str]:
    """Return one text for each shown line: `RANK:TEXT` if a rank printed it, else the text.

    A piece that is no text, such as a display, becomes the name of its type.
    """
    found: list[str] = []
    for piece in pieces:
        if isinstance(piece, Lines):
            found += [f"{piece.rank}:{line}" for line in piece.lines]
        else:
            found.append(piece if isinstance(piece, str) else type(piece).__name__)
    return found


def some_run(seed: int) -> list[Event]:
    """Return a run's events in random order, with progress bars, loaders and a restart."""
    draw = random.Random(seed)
    now, found = 1000.0, list[Event]()
    batches = {0: 0, 1: 0}

    def add(kind: str, **values: Any) -> None:
        found.append(event(kind, time=now, **values))

    add("state", state="RUNNING")
    for attempt in (0, 1):
        batches = dict.fromkeys(batches, 0)
        add("started", attempt=attempt, pids={"0": 1, "1": 2})
        for _ in range(300):
            now += draw.random()
            rank, batches[0], batches[1] = draw.randrange(2), batches[0] + 1, batches[1] + 2
            counts = {"batches": batches[rank], "span_s": now - 999, "waited_s": batches[rank] / 9}
            texts = [f"step {now}", " 50%|█████     | 5/10", "", "at 7%|but no bar"]
            kinds = ("lines", "progress", "data", "fetched", "usage", "note")
            [kind] = draw.choices(kinds, (4, 4, 4, 4, 4, 1))
            uses = [{"rank": 0, "cpus": draw.random()}, {"rank": 1, "place": f"line {now}"}]
            of_kind: dict[str, dict[str, Any]] = {
                "lines": {"rank": rank, "lines": [draw.choice(texts[:2])]},
                "progress": {"rank": 0, "text": draw.choice(texts)},
                "data": {"rank": rank, "cores": 2, "loaders": {"train": counts}},
                "fetched": {"number": 0, "loaders": {"train": {"prepared": batches[0]}}},
                "usage": {"attempt": attempt, "ranks": uses},
                "note": {"text": f"note {len(found)}"},
            }
            add(kind, **of_kind[kind])
        if attempt == 0:
            add("failure", failure=failure(rank=1, host="gpu1", how="raised", etype="ValueError"))
            add("restart", attempt=1)
    if draw.random() < 0.5:
        add("ended", state="SUCCEEDED", elapsed_s=5.0)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_replayed_state_equals_that_after_all_events(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = some_run(seed)
    fetcher = FetcherPlan(number=0, index=0, loaders=("train",), host=0)
    data = DataPlan("local", 1, 1, (fetcher,), crosses=False, cores=2)
    wanted = new_state(world_size=2, data=data)
    wanted.began = events[0].time
    for seen in events:
        wanted.apply(seen, seen.time)
    assert _facts(replayed(events, new_state(world_size=2, data=data)).state) == _facts(wanted)
    # also if reports are skipped, sums and everything else stay the same
    monkeypatch.setattr(replay, "_BASE_COUNTS", 0)
    few = _facts(replayed(events, new_state(world_size=2, data=data)).state)
    rates, exact = few.pop("points"), _facts(wanted)
    exact_rates = exact.pop("points")
    assert few == exact and rates[-1][0] == pytest.approx(exact_rates[-1][0], abs=2.0)


def _facts(state: RunState) -> dict[str, Any]:
    found = {
        name: getattr(state, name) for name in vars(state) if name not in ("run_counts", "plan")
    }
    loader = state.run_counts.loaders["train"]
    found |= {"ranks": loader.ranks, "fetchers": loader.fetchers, "points": list(loader.points)}
    return found


def test_reports_from_before_a_restart_do_not_count_after_it() -> None:
    report = event("data", rank=0, cores=2, loaders={"train": {"batches": 3, "span_s": 1.0}})
    found = replayed([report, event("restart", attempt=1)]).state.run_counts.loaders["train"]
    assert found.ranks == {}


def printed(rank: int, n_lines: int, text: str) -> list[Event]:
    return [event("lines", rank=rank, time=float(i), lines=[f"{text} {i}"]) for i in range(n_lines)]


def test_a_short_log_is_shown_whole_with_its_displays_in_order() -> None:
    shown = event("display", rank=0, data={"text/plain": "old"}, display_id="d")
    update = event("display", rank=0, data={"text/plain": "new"}, display_id="d", update=True)
    end = event("ended", state="SUCCEEDED")
    found = replayed([*printed(0, 2, "a"), shown, *printed(1, 1, "b"), update, end]).pieces()
    assert texts(found) == ["0:a 0", "0:a 1", "Display", "1:b 0"]
    assert [it.data for it in found if isinstance(it, Display)] == [{"text/plain": "new"}]


def test_an_update_changes_only_displays_of_its_own_rank() -> None:
    def shown(rank: int, text: str, update: bool = False) -> Event:
        data = {"text/plain": text}
        return event("display", rank=rank, data=data, display_id="loss", update=update)

    events = [
        shown(0, "old 0"),
        shown(1, "old 1"),
        shown(0, "new 0", True),
        shown(1, "new 1", True),
    ]
    found = replayed(events, new_state(world_size=2, log_ranks=(0, 1))).pieces()
    displays = [(it.rank, it.data["text/plain"]) for it in found if isinstance(it, Display)]
    assert displays == [(0, "new 0"), (1, "new 1")]


def test_a_long_log_of_an_active_run_is_shown_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "TAIL_BYTES", 1000)
    first, *found = texts(replayed(printed(0, 1000, "a")).pieces())
    assert first.startswith("… ") and first.endswith("are not shown; full log: /runs/r1/logs")
    assert found == [f"0:a {i}" for i in range(1000 - len(found), 1000)] and len(found) > 8


def test_an_ended_run_shows_both_ends_of_a_long_log_and_what_looks_like_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "TAIL_BYTES", 20_000)
    traceback = ["Traceback (most recent call last):", '  File "x", line 1', "ValueError: no"]
    middle = event("lines", rank=1, time=500.5, lines=["fine", *traceback, "on"])
    events = [*printed(0, 500, "a"), middle, *printed(1, 500, "b"), event("ended", state="FAILED")]
    shown = texts(replayed(events).pieces())
    assert shown[:100] == [f"0:a {i}" for i in range(100)]
    assert shown[-100:] == [f"1:b {i}" for i in range(400, 500)]
    between = shown[100:-100]
    assert "at most 1,000 are shown" in between[1]
    assert [it for it in between if it.startswith("1:")] == [f"1:{line}" for line in traceback]
    assert "full log: /runs/r1/logs" in between[0] and between[-1] == "the last 100 lines:"


def test_errors_among_many_lines_of_one_event_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "TAIL_BYTES", 20_000)
    lines = [f"a {i}" for i in range(300)]
    errors = {0: "Error: shown at the start", 150: "Error: hidden", 299: "Error: shown at the end"}
    for at, text in errors.items():
        lines[at] = text
    ends = [event("lines", rank=rank, time=rank, lines=lines) for rank in (0, 1)]
    events = [ends[0], *printed(0, 1000, "b"), ends[1], event("ended", state="FAILED")]
    shown = texts(replayed(events).pieces())
    assert shown[:100] == [f"0:{line}" for line in lines[:100]]
    assert shown[-100:] == [f"1:{line}" for line in lines[-100:]]
    assert [it for it in shown[100:-100] if "Error" in it] == [
        "0:Error: hidden",
        "0:Error: shown at the end",
        "1:Error: shown at the start",
        "1:Error: hidden",
    ]


def test_lines_of_hidden_ranks_do_not_count_towards_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "TAIL_BYTES", 1000)
    state = new_state(world_size=2, log_ranks=frozenset({0}))
    found = replayed([*printed(0, 3, "a"), *printed(1, 1000, "b")], state)
    assert texts(found.pieces()) == ["0:a 0", "0:a 1", "0:a 2"]


def test_output_that_rank_0_cleared_is_not_shown() -> None:
    shown = event("display", rank=0, data={"text/plain": "old"})
    events = [*printed(0, 2, "a"), shown, event("clear", rank=0), *printed(0, 1, "b")]
    assert texts(replayed(events).pieces()) == ["0:b 0"]
    # in a cell with `--ranks 1`, rank 1 clears the output
    events = [*printed(1, 2, "a"), event("clear", rank=1), *printed(1, 1, "b")]
    assert texts(replayed(events, new_state(world_size=2, ranks=(1,))).pieces()) == ["1:b 0"]


def test_the_elapsed_time_begins_when_the_hosts_are_ready() -> None:
    state = new_state(began=5.0)
    events = [event("note", text="waits", time=7.0), event("state", state="RUNNING", time=50.0)]
    assert replayed(events, state).state.elapsed(60.0) == 10.0
