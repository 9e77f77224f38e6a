"""Failure events become one exception with bounded, useful words."""

from typing import Any

import pytest

from taas_magic.display.failure import details, headline, others, others_summary, to_exception
from taas_magic.errors import RankFailed, RunLost, RunTimeout


def failure(rank: int | None = 3, how: str = "raised", **values: Any) -> dict[str, Any]:
    event = {
        "how": how,
        "rank": rank,
        "host": "gpu1",
        "pid": 812 if rank is not None else None,
        "etype": "ZeroDivisionError" if how == "raised" else "",
        "message": "division by zero" if how == "raised" else "",
        "traceback": ["Traceback", "Cell In[3], line 1\n----> 1 1 / 0"] if how == "raised" else [],
        "signal": None,
        "exitcode": None,
        "consequence": False,
        "log_path": "/runs/x/logs/rank-3.log",
        "advice": "",
        "tail": ["loading", "bad"],
    }
    return event | values


def ended(first: dict[str, Any] | None, *rest: dict[str, Any], state: str = "FAILED") -> Any:
    failures = [first, *rest] if first else list(rest)
    return {"kind": "ended", "state": state, "first": first, "failures": failures, "elapsed_s": 1.0}


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (failure(), "rank 3 on host gpu1 (pid 812): ZeroDivisionError: division by zero"),
        (
            failure(how="signal", signal="SIGSEGV"),
            "rank 3 on host gpu1 (pid 812): killed by SIGSEGV",
        ),
        (failure(how="exit", exitcode=3), "rank 3 on host gpu1 (pid 812): exited with code 3"),
        (failure(None, "host", message="no heartbeat"), "host gpu1: lost: no heartbeat"),
        (
            failure(how="timeout", pid=None),
            "rank 3 on host gpu1: still running when --timeout was over",
        ),
        (failure(message=""), "rank 3 on host gpu1 (pid 812): ZeroDivisionError"),
        (failure(message="a\nb"), "rank 3 on host gpu1 (pid 812): ZeroDivisionError: a"),
    ],
)
def test_headline(event: dict[str, Any], text: str) -> None:
    assert headline(event) == text


@pytest.mark.parametrize("how", ["left", "stopped", "of a later version"])
def test_every_how_has_a_headline(how: str) -> None:
    assert headline(failure(how=how)).startswith("rank 3 on host gpu1 (pid 812): ")


def test_an_exception_shows_its_traceback_and_where_the_log_is() -> None:
    assert details(failure(advice="check the data")) == [
        "Traceback",
        "Cell In[3], line 1",
        "----> 1 1 / 0",
        "full log: /runs/x/logs/rank-3.log",
        "advice: check the data",
    ]


def test_a_death_by_signal_shows_the_last_lines() -> None:
    lines = details(failure(how="signal", signal="SIGKILL"))
    assert lines[:3] == ["last lines of rank 3:", "    loading", "    bad"]
    assert "memory" in lines[-1]


def test_a_message_of_a_megabyte_is_cut() -> None:
    message = "x" * 1_000_000
    error = to_exception(ended(failure(message=message, traceback=[f"ValueError: {message}"])))
    assert len(str(error)) < 500
    assert len("\n".join(error._render_traceback_())) < 10_000
    assert "[cut: 1,000,012 characters]" in "\n".join(error.details)


def test_a_deep_recursion_keeps_both_ends() -> None:
    lines = details(failure(traceback=[f"frame {i}" for i in range(3000)], log_path=None))
    assert (lines[0], lines[-1]) == ("frame 0", "frame 2999")
    assert "… [2,800 lines left out]" in lines
    assert len(lines) == 201


def test_consequences_are_collapsed() -> None:
    first = failure()
    rest = [
        failure(rank, etype="RuntimeError", message="peer closed", consequence=True)
        for rank in (0, 1, 2, 4, 5, 6)
    ]
    rest.append(failure(7, "exit", exitcode=5))
    assert others_summary(first, [first, *rest]) == (
        "6 more ranks failed as a consequence; 1 more rank failed"
    )
    assert others(first, [first, *rest]) == [
        "ranks 0-2,4-6: RuntimeError: peer closed (a consequence)",
        "rank 7: exited with code 5",
    ]


def test_many_different_failures_are_bounded() -> None:
    rest = [failure(rank, message=f"no {rank}") for rank in range(4, 1000)]
    lines = others(failure(), rest)
    assert len(lines) == 11
    assert lines[-1] == "… and 986 more"


def test_the_exception_carries_rank_and_type_and_renders_itself() -> None:
    error = to_exception(ended(failure(), failure(4, consequence=True)))
    assert type(error) is RankFailed
    assert (error.rank, error.etype) == (3, "ZeroDivisionError")
    text = error._render_traceback_()
    assert text[0] == "Traceback"
    assert "1 more rank failed as a consequence:" in text
    assert text[-1] == f"RankFailed: {headline(failure())}"


def test_timeout_loss_and_a_run_that_only_ended() -> None:
    assert type(to_exception(ended(failure(how="timeout")))) is RunTimeout
    lost = to_exception(ended(failure(None, "host", message="no heartbeat"), state="LOST"))
    assert type(lost) is RunLost
    assert "host gpu1: lost: no heartbeat" in str(lost)
    assert str(to_exception(ended(None, state="INTERRUPTED"))) == "the run ended as INTERRUPTED"
