"""Tests of the exception that a cell raises for a run's failure events, and of its message."""

import sys
from typing import Any

import pytest
from msgspec import structs

from taas_magic.display.failure import (
    BROKEN_GPU_ADVICE,
    CLOSED_ADVICE,
    NO_GPU_ADVICE,
    cause_of,
    details,
    gpu_advice,
    headline,
    other_failures_text,
    rank_positions,
    to_exception,
)
from taas_magic.errors import PoolError, RankFailed, RunLost, RunTimeout
from taas_magic.messages import Failure, RunEnded, cleaned
from tests import events


def failure(rank: int | None = 3, how: str = "raised", **values: Any) -> Failure:
    event = {
        "how": how,
        "rank": rank,
        "host": "gpu1",
        "pid": 812 if rank is not None else None,
        "etype": "ZeroDivisionError" if how == "raised" else "",
        "message": "division by zero" if how == "raised" else "",
        "traceback": ["Traceback", "Cell In[3], line 1\n----> 1 1 / 0"] if how == "raised" else [],
        "exitcode": None,
        "consequence": False,
        "log_path": "/runs/x/logs/rank-3.log",
        "advice": "",
        "tail": ["loading", "bad"],
    }
    return events.failure(**(event | values))


def ended(first: Failure | None, *rest: Failure, state: str = "FAILED", why: str = "") -> RunEnded:
    failures = [first, *rest] if first else list(rest)
    return RunEnded(state=state, first=first, failures=failures, why=why, elapsed_s=1.0)


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
            failure(how="timeout", message='run x on pool "local" exceeded the timeout of 3 s'),
            'run x on pool "local" exceeded the timeout of 3 s',
        ),
        (failure(message=""), "rank 3 on host gpu1 (pid 812): ZeroDivisionError"),
        (failure(message="a\nb"), "rank 3 on host gpu1 (pid 812): ZeroDivisionError: a"),
        (
            failure(
                message="in worker 0.\nOriginal Traceback (most recent call last):\n\nKeyError: 7"
            ),
            "rank 3 on host gpu1 (pid 812): ZeroDivisionError: in worker 0. … KeyError: 7",
        ),
    ],
)
def test_headline(event: Failure, text: str) -> None:
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


def test_a_message_of_a_megabyte_is_cut() -> None:
    message = "x" * 1_000_000
    error = to_exception(ended(failure(message=message, traceback=[f"ValueError: {message}"])))
    assert isinstance(error, RankFailed) and len(str(error)) < 500
    assert len("\n".join(error._render_traceback_())) < 10_000
    assert "[cut: 1,000,012 characters]" in "\n".join(error.details)


def test_a_deep_recursion_keeps_both_ends() -> None:
    lines = details(failure(traceback=[f"frame {i}" for i in range(3000)], log_path=""))
    assert (lines[0], lines[-1]) == ("frame 0", "frame 2999")
    assert "… [2,800 lines left out]" in lines
    assert len(lines) == 201


def test_text_of_a_rank_can_only_colour_a_terminal() -> None:
    evil = "\x1b]0;title\x07\x1b[31mred\x1b[0m\x1b[2J\x1bP1;x\x1b\\"
    event = cleaned(failure(message=evil, traceback=[evil], tail=[evil], how="exit"))
    assert headline(event).endswith(": \x1b[31mred\x1b[0m")
    assert details(event)[0] == "\x1b[31mred\x1b[0m"
    assert "    \x1b[31mred\x1b[0m" in details(event)


def test_positions_of_ranks_are_notebook_lines_and_merged() -> None:
    def stack(line: int) -> list[str]:
        cell = [f'  File "Cell In[5]", line {line}, in train', "    loss.backward()"]
        return [*cell, '  File "/lib/torch/autograd.py", line 9, in run', "    engine()"]

    failures = [failure(rank, "timeout", stack=stack(7 + (rank == 2))) for rank in range(4)]
    assert rank_positions([*failures, failure(4, "timeout", stack=[])]) == [
        "where the ranks were:",
        "    ranks 0-1,3: Cell In[5], line 7: loss.backward()",
        "    rank 2: Cell In[5], line 8: loss.backward()",
        "    rank 4: position not reported yet",
    ]


def test_failures_that_are_consequences_are_collapsed() -> None:
    first = failure()
    rest = [
        failure(rank, etype="RuntimeError", message="peer closed", consequence=True)
        for rank in (0, 1, 2, 4, 5, 6)
    ]
    rest.append(failure(7, "exit", exitcode=5))
    summary, lines = other_failures_text(first, [first, *rest])
    assert summary == "6 other ranks failed because of this; 1 other rank failed, too"
    assert lines == [
        "ranks 0-2,4-6: RuntimeError: peer closed (a consequence)",
        "rank 7: exited with code 5",
    ]


def test_failed_hosts_are_not_counted_as_ranks() -> None:
    hosts = [failure(None, "host", host=f"h{number}", message="full") for number in (1, 2, 3)]
    summary, lines = other_failures_text(hosts[0], [*hosts, failure(7, "exit", exitcode=5)])
    assert summary == "1 other rank failed, too; 2 other hosts failed, too"
    assert len(lines) == 3


def test_many_different_failures_are_bounded() -> None:
    rest = [failure(rank, message=f"no {rank}") for rank in range(4, 1000)]
    _, lines = other_failures_text(failure(), rest)
    assert len(lines) == 11
    assert lines[-1] == "… and 986 more"


def test_the_exception_carries_rank_and_type_and_renders_itself() -> None:
    error = to_exception(ended(failure(), failure(4, consequence=True)))
    assert type(error) is RankFailed
    assert (error.rank, error.etype) == (3, "ZeroDivisionError")
    text = error._render_traceback_()
    assert text[0] == "Traceback"
    assert "1 other rank failed because of this:" in text
    assert text[-1] == f"RankFailed: {headline(failure())}"


def test_a_timeout_a_lost_run_and_an_end_without_failure_have_their_exceptions() -> None:
    assert type(to_exception(ended(failure(how="timeout")))) is RunTimeout
    lost = to_exception(ended(failure(None, "host", message="no heartbeat"), state="LOST"))
    assert type(lost) is RunLost
    assert "host gpu1: lost: no heartbeat" in str(lost)
    refused = to_exception(ended(None, state="FAILED", why="no host"))
    assert type(refused) is PoolError
    assert str(refused) == "the run ended as FAILED: no host"


@pytest.mark.parametrize(
    ("etype", "message"),
    [
        ("AssertionError", "Torch not compiled with CUDA enabled"),
        ("RuntimeError", "Found no NVIDIA driver on your system. Please check that you have one"),
        ("RuntimeError", "No CUDA GPUs are available"),
        ("AttributeError", "module 'torch._C' has no attribute '_cuda_setDevice'"),
        ("RuntimeError", "Attempting to deserialize … but torch.cuda.is_available() is False. If"),
        ("RuntimeError", "torch.cuda.Stream requires CUDA support"),
        ("RuntimeError", "Tried to instantiate dummy base class Event"),
        (
            "ValueError",
            "DistributedDataParallel device_ids and output_device arguments only work with … but "
            "got device_ids [0], output_device None, and module parameters {device(type='cpu')}.",
        ),
    ],
)
def test_a_missing_gpu_is_explained(etype: str, message: str) -> None:
    assert gpu_advice(etype, message) == NO_GPU_ADVICE
    assert f"advice: {NO_GPU_ADVICE}" in details(failure(etype=etype, message=message))
    own = failure(etype=etype, message=message, advice="other")
    assert "advice: other" in details(own)


@pytest.mark.parametrize(
    ("etype", "message"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        ("KeyError", "No CUDA GPUs are available"),
        ("AssertionError", ""),
    ],
)
def test_other_errors_do_not_mention_a_missing_gpu(etype: str, message: str) -> None:
    assert gpu_advice(etype, message) == ""


def test_a_closed_connection_comes_with_advice_if_no_other_rank_is_to_blame() -> None:
    closed = failure(etype="RuntimeError", message="[…] Connection closed by peer [10.0.0.1]:80")
    assert f"advice: {CLOSED_ADVICE}" not in details(closed)
    assert f"advice: {CLOSED_ADVICE}" in details(structs.replace(closed, consequence=True))


def test_a_failed_gpu_kernel_comes_with_advice() -> None:
    for etype in ("AcceleratorError", "RuntimeError"):
        failed = failure(etype=etype, message="CUDA error: device-side assert triggered\nCompile")
        assert f"advice: {BROKEN_GPU_ADVICE}" in details(failed)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups of exceptions came with Python 3.11")
def test_an_exception_group_is_not_rebuilt_as_the_cause() -> None:
    grouped = Failure(etype="ExceptionGroup", etype_module="builtins", message="two parts")
    assert cause_of(grouped, {}) is None
    other = cause_of(structs.replace(grouped, etype="KeyError"), {})
    assert type(other) is KeyError and other.args == ("two parts",)
