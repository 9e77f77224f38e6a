"""Failure events -> the one exception that the notebook raises. Pure.

Which failure came first is decided by the agent; here it gets its words, the others are collapsed,
and everything is bounded: a message of a megabyte must not reach the browser.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from taas_magic.display.fold import rank_ranges
from taas_magic.errors import RankFailed, RunLost, RunTimeout, StoreError

Event = Mapping[str, Any]

MESSAGE_CHARS = 4096
HEADLINE_CHARS = 300
DETAIL_LINES = 200
MAX_OTHERS = 10

SIGNAL_ADVICE = {
    "SIGKILL": "SIGKILL often is the system's answer to too little memory: look at `dmesg` there",
    "SIGBUS": "SIGBUS often means that shared memory (/dev/shm) is full",
}


def cut(text: str, limit_chars: int = MESSAGE_CHARS) -> str:
    """The beginning of a long text, marked with its length."""
    if len(text) <= limit_chars:
        return text
    return f"{text[:limit_chars]}… [cut: {len(text):,} characters]"


def middle_cut(lines: Sequence[str], limit_lines: int = DETAIL_LINES) -> list[str]:
    """The first and last of many lines, with a mark between them; a long line is cut, too."""
    if len(lines) > limit_lines:
        half = limit_lines // 2
        left_out = len(lines) - 2 * half
        lines = [*lines[:half], f"… [{left_out:,} lines left out]", *lines[-half:]]
    return [cut(line) for line in lines]


def place(failure: Event) -> str:
    """Who failed: `rank 3 on host gpu1 (pid 812)`, or the host where no rank is to blame."""
    rank, host, pid = failure.get("rank"), failure.get("host"), failure.get("pid")
    if rank is None or failure.get("how") == "host":
        return f"host {host}"
    return f"rank {rank} on host {host}" + (f" (pid {pid})" if pid else "")


def cause(failure: Event) -> str:
    """What happened, in one line without the place."""
    message = cut(str(failure.get("message") or "").strip())
    first_line = message.partition("\n")[0]
    match failure.get("how"):
        case "raised":
            words = str(failure.get("etype") or "an exception")
        case "signal":
            words = f"killed by {failure.get('signal') or 'a signal'}"
        case "exit":
            words = f"exited with code {failure.get('exitcode')}"
        case "left":
            words = "left before the others were done"
        case "stopped":
            words = "stopped: it gives no sign of life"
        case "timeout":
            words = "still running when --timeout was over"
        case "host":
            words = "" if _is_of_store(failure) else "lost"
        case how:
            words = str(how)
    return cut(": ".join(filter(None, (words, first_line))), HEADLINE_CHARS)


def _is_of_store(failure: Event) -> bool:
    """Whether a host is there, but the project store could not get to it."""
    return failure.get("how") == "host" and failure.get("etype") == StoreError.__name__


def headline(failure: Event) -> str:
    """One line: rank, host, and what happened."""
    return f"{place(failure)}: {cause(failure)}"


def details(failure: Event) -> list[str]:
    """What helps to understand a failure, line by line: traceback or log, exit, file, advice."""
    traceback = [line for block in failure.get("traceback") or () for line in block.split("\n")]
    lines = middle_cut(traceback)
    if not traceback:
        lines += _multi_line_message(failure)
    tail = [] if failure.get("how") == "raised" else failure.get("tail") or []
    if tail:
        lines += [f"last lines of rank {failure.get('rank')}:"]
        lines += [f"    {line}" for line in middle_cut(tail)]
    log_path = failure.get("log_path")
    advice = failure.get("advice") or SIGNAL_ADVICE.get(str(failure.get("signal")))
    lines += [f"full log: {log_path}"] if log_path else []
    lines += [f"advice: {cut(advice)}"] if advice else []
    return lines


def _multi_line_message(failure: Event) -> list[str]:
    message = cut(str(failure.get("message") or "").strip())
    return middle_cut(message.split("\n")) if "\n" in message else []


def others(first: Event | None, failures: Sequence[Event]) -> list[str]:
    """The failures besides the first, equal causes of many ranks in one line."""
    rest = [failure for failure in failures if not same(first, failure)]
    alike: defaultdict[tuple[str, bool], list[int]] = defaultdict(list)
    for failure in rest:
        if failure.get("rank") is not None:
            alike[cause(failure), bool(failure.get("consequence"))].append(failure["rank"])
    lines = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {rank_ranges(sorted(ranks))}: {words}"
        + (" (a consequence)" if consequence else "")
        for (words, consequence), ranks in alike.items()
    ]
    lines += [headline(failure) for failure in rest if failure.get("rank") is None]
    left_out = len(lines) - MAX_OTHERS
    return lines if left_out <= 0 else [*lines[:MAX_OTHERS], f"… and {left_out:,} more"]


def others_summary(first: Event | None, failures: Sequence[Event]) -> str:
    """How many ranks failed besides the first, in one line; "" for none."""
    rest = [failure for failure in failures if not same(first, failure)]
    n_consequences = sum(bool(failure.get("consequence")) for failure in rest)
    parts = []
    if n_consequences:
        parts.append(f"{_more_ranks(n_consequences)} failed as a consequence")
    if n_own := len(rest) - n_consequences:
        parts.append(f"{_more_ranks(n_own)} failed")
    return "; ".join(parts)


def _more_ranks(n_ranks: int) -> str:
    return f"{n_ranks:,} more rank{'s' * (n_ranks > 1)}"


def same(first: Event | None, failure: Event) -> bool:
    """Whether two failure events are of the same process."""
    keys = ("rank", "host", "pid")
    return first is not None and all(first.get(key) == failure.get(key) for key in keys)


def _without_failure(ended: Event) -> str:
    why = cut(str(ended.get("why") or ""), HEADLINE_CHARS)
    return f"the run ended as {ended.get('state')}" + (f": {why}" if why else "")


def to_exception(ended: Event) -> RankFailed | RunTimeout | RunLost | StoreError:
    """The exception for an `ended` event whose state is not SUCCEEDED."""
    first, failures = ended.get("first"), ended.get("failures") or []
    words = headline(first) if first else _without_failure(ended)
    lines = details(first) if first else []
    if summary := others_summary(first, failures):
        lines += [f"{summary}:", *(f"    {line}" for line in others(first, failures))]
    if first and _is_of_store(first):
        return StoreError("\n".join([words, *lines]))
    if ended.get("state") == "LOST" or (first and first.get("how") == "host"):
        return RunLost("\n".join([words, *lines]))
    error = RunTimeout if first and first.get("how") == "timeout" else RankFailed
    return error(
        words,
        lines,
        rank=first.get("rank") if first else None,
        etype=str(first.get("etype") or "") if first else "",
    )
