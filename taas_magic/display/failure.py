"""Turn the failures of a run into the exception that the notebook raises.

The functions do no I/O. They limit the length of all texts, because a message of a megabyte must
not reach the browser.
"""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from taas_magic.display.log import rank_ranges
from taas_magic.errors import PoolError, RankFailed, RunError, RunLost, RunTimeout, StoreError
from taas_magic.messages import Failure, RunEnded

MESSAGE_CHARS = 4096
"""Maximum characters of an exception's message, and of each line of the exception's details."""

HEADLINE_CHARS = 300
"""Maximum characters of the line that describes the cause of a failure."""

DETAIL_LINES = 200
"""Maximum number of lines of a traceback, and of a rank's last lines."""

LINE_CHARS = 120
"""Maximum characters of a line of code in the list of places where ranks were at a timeout."""

MAX_OTHERS = 10
"""Maximum number of lines that an exception has about all failures after the first failure."""

NO_GPU_ADVICE = (
    "this rank has no GPU: its pool has none, its torch cannot use it, or this is a rehearsal. "
    'Write `.to(taas.device_type)` instead of `.cuda()` and "cuda" (it is "cuda" on a GPU, else '
    '"cpu"; `import taas`), give DistributedDataParallel no device_ids, or choose another pool '
    "(--pool)"
)

# Messages of torch without CUDA: a build for the CPU, or a machine without a GPU or its driver.
_NO_GPU = re.compile(
    r"not compiled with CUDA|compiled without CUDA|requires (a )?CUDA|Cannot get CUDA generator"
    r"|no NVIDIA (driver|GPU)|No CUDA GPUs are available|torch\.cuda\.is_available\(\) is False"
    r"|torch\._C' has no attribute '_cuda_|Tried to instantiate dummy base class"
    r"|Cannot access accelerator device when none"
    r"|device_ids and output_device arguments only work with .*\(type='cpu'\)",
    re.DOTALL,
)
_NO_GPU_TYPES = {"AssertionError", "AttributeError", "RuntimeError", "ValueError"}

BROKEN_GPU_ADVICE = (
    "a kernel on the GPU failed, so this process cannot use its GPU any more. CUDA reports such an "
    "error late: with --env CUDA_LAUNCH_BLOCKING=1, the traceback ends at the line that caused it. "
    "A session needs new ranks: %taas restart"
)

# Errors after which every later CUDA call of the process fails too.
_BROKEN_GPU = re.compile(
    r"CUDA error: (device-side assert triggered|an illegal memory access was encountered"
    r"|misaligned address|an illegal instruction was encountered|unspecified launch failure"
    r"|invalid program counter|invalid address space|hardware stack error)"
)

CLOSED_ADVICE = (
    "no rank failed before this one, but another rank has closed its connection, probably because "
    "it had reached the end of the cell. All ranks must take the same number of steps"
)

# Errors of gloo and NCCL in a rank that waits for a rank whose process has ended.
_CLOSED = re.compile(
    r"connection (closed|reset) by (remote )?peer|broken pipe|remote process exit", re.IGNORECASE
)

LIGHTNING_ADVICE = (
    'each rank is one process of the Trainer: write Trainer(devices=N, strategy="ddp"), where N is '
    'the number of ranks on each host, int(os.environ["LOCAL_WORLD_SIZE"]). On CPUs, '
    'devices="auto" means 1'
)

# Errors of Trainers with a wrong number of devices, or with a strategy that starts processes.
_LIGHTNING = re.compile(
    r"in Lightning, but the product .* does not match the world size"
    r"|/strategies/launchers/multiprocessing\.py"
)

EVENT_LOOP_ADVICE = (
    "a rank runs an event loop only in a cell with a top-level `await`. Await the task in the cell "
    "(`await asyncio.create_task(…)`), or run the coroutine with `asyncio.run(…)`"
)

_FRAME = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>\d+)')


def gpu_advice(etype: str, message: str) -> str:
    """Return advice for an exception about a missing or broken GPU; "" for other exceptions."""
    if _BROKEN_GPU.search(message):
        return BROKEN_GPU_ADVICE
    return NO_GPU_ADVICE if etype in _NO_GPU_TYPES and _NO_GPU.search(message) else ""


def cut(text: str, limit_chars: int = MESSAGE_CHARS) -> str:
    """Cut a text after `limit_chars` characters; if the text was longer, append a short note.

    The note has the number of characters of the whole text, as in "… [cut: 5,000 characters]".
    """
    if len(text) <= limit_chars:
        return text
    return f"{text[:limit_chars]}… [cut: {len(text):,} characters]"


def cut_middle(lines: Sequence[str], limit_lines: int = DETAIL_LINES) -> list[str]:
    """If there are more than `limit_lines` lines, replace the middle lines by a short note.

    Also shorten each remaining line to `MESSAGE_CHARS` characters.
    """
    if len(lines) > limit_lines:
        half = limit_lines // 2
        left_out = len(lines) - 2 * half
        lines = [*lines[:half], f"… [{left_out:,} lines left out]", *lines[-half:]]
    return [cut(line) for line in lines]


def who_failed(failure: Failure) -> str:
    """Return text that names the failed rank, such as `rank 3 on host gpu1 (pid 812)`.

    If a host failed, the text names only the host.
    """
    if failure.rank is None or failure.how == "host":
        return f"host {failure.host}"
    named = f"rank {failure.rank} on host {failure.host}"
    return named + (f" (pid {failure.pid})" if failure.pid else "")


def cause_text(failure: Failure) -> str:
    """Return what happened, such as `ValueError: bad shape` or `killed by SIGKILL`, in one line.

    The result includes the first line of the failure's message. If this line ends with a colon, the
    result also includes the other lines. But if the message quotes a traceback of a worker process,
    the result instead includes only the last of the other lines, which names the error in the
    worker process. Cut the result to `HEADLINE_CHARS` characters.
    """
    first_line, *others = failure.message.strip().split("\n")
    if any("Traceback (most recent call last)" in line for line in others):
        first_line = f"{first_line} … {others[-1].strip()}"
    elif first_line.endswith(":"):
        first_line = " ".join(line.strip() for line in [first_line, *others])
    words = {
        "raised": failure.etype or "an exception",
        "signal": f"killed by {failure.signal or 'a signal'}",
        "exit": f"exited with code {failure.exitcode}",
        "end": f"failed after the cell's end: {failure.signal or f'exit code {failure.exitcode}'}",
        "left": "ended before the other ranks did",
        "stopped": "stopped from outside (SIGSTOP)",
        "timeout": "",
        "host": "" if _is_of_store(failure) else "lost",
    }.get(failure.how, failure.how)
    return cut(": ".join(filter(None, (words, first_line))), HEADLINE_CHARS)


def _is_of_store(failure: Failure) -> bool:
    """Return whether a host failed only because it could not receive the project store."""
    return failure.how == "host" and failure.etype == StoreError.__name__


def headline(failure: Failure) -> str:
    """Return one line with the failed rank, its host, and the cause of the failure.

    If the time limit has ended the run, the line has only the cause, because no rank is to blame.
    """
    if failure.how == "timeout":
        return cause_text(failure)
    return f"{who_failed(failure)}: {cause_text(failure)}"


def details(failure: Failure) -> list[str]:
    """Return lines with the details of a failure, for the exception that the notebook raises.

    The details are, in this order:

    - The traceback of the rank's exception. Without a traceback, the failure's message, if it has
      several lines.
    - The last known Python stack of the rank.
    - The last lines of the rank's log, unless the rank raised an exception.
    - The path of the rank's log.
    - The failure's own advice. Without such advice, advice on a missing or broken GPU, on the
      arguments of Lightning's Trainer, on asyncio, or on a connection that another rank has closed,
      if the message is about one of these.

    Details without content are left out. If the traceback, the message or the last lines are longer
    than `DETAIL_LINES` lines, a note replaces the middle lines.
    """
    traceback = [line for block in failure.traceback for line in block.split("\n")]
    lines = cut_middle(traceback)
    if not traceback and "\n" in (message := cut(failure.message.strip())):
        lines += cut_middle(message.split("\n"))
    if stack := failure.stack:
        lines += ["its last known Python stack:", *(f"    {line}" for line in stack)]
    tail = [] if failure.how == "raised" else failure.tail
    if tail:
        lines += [f"last lines of rank {failure.rank}:"]
        lines += [f"    {line}" for line in cut_middle(tail)]
    lines += [f"full log: {failure.log_path}"] if failure.log_path else []
    advice = failure.advice or gpu_advice(failure.etype, failure.message)
    if not advice and _LIGHTNING.search(failure.message):
        advice = LIGHTNING_ADVICE
    if not advice and failure.message == "no running event loop":
        advice = EVENT_LOOP_ADVICE
    if not advice and failure.consequence and _CLOSED.search(failure.message):
        advice = CLOSED_ADVICE
    lines += [f"advice: {cut(advice)}"] if advice else []
    return lines


def other_failures_text(
    first: Failure | None, failures: Sequence[Failure]
) -> tuple[str, list[str]]:
    """Summarize all failures of a run except the first failure.

    Args:
        first: The failure that came first, if known.
        failures: All failures of the run, including the first failure.

    Returns:
        Two values: a line of text, and a list of lines. The line of text says how many ranks and
        hosts failed because of the first failure, and how many failed for other reasons. The list
        has one line for each cause, with the ranks, and one line for each failed host. After
        `MAX_OTHERS` lines, a last line has the number of further lines. Both values are empty if
        there are no other failures, or if `--timeout` has ended the run.
    """
    if first is not None and first.how == "timeout":
        return "", []
    rest = [it for it in failures if first is None or _process(it) != _process(first)]
    counts = Counter((failure.rank is None, not failure.consequence) for failure in rest)
    summary = "; ".join(
        f"{count:,} other {'host' if is_host else 'rank'}{'s' * (count > 1)} failed"
        + (", too" if is_cause else " because of this")
        for (is_host, is_cause), count in sorted(counts.items())
    )
    alike: defaultdict[tuple[str, bool], list[int]] = defaultdict(list)
    for failure in rest:
        if failure.rank is not None:
            alike[cause_text(failure), failure.consequence].append(failure.rank)
    lines = [
        f"{_ranks(ranks)}: {words}" + (" (a consequence)" if consequence else "")
        for (words, consequence), ranks in alike.items()
    ]
    lines += [headline(failure) for failure in rest if failure.rank is None]
    left_out = len(lines) - MAX_OTHERS
    return summary, lines if left_out <= 0 else [*lines[:MAX_OTHERS], f"… and {left_out:,} more"]


def _process(failure: Failure) -> tuple[int | None, str, int | None]:
    return failure.rank, failure.host, failure.pid


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {rank_ranges(sorted(ranks))}"


def rank_positions(failures: Sequence[Failure]) -> list[str]:
    """Return lines of text that say where in the code ranks were when `--timeout` ended the run.

    Ranks at the same line of code share one line of the result. If no failure names a rank, return
    an empty list.
    """
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for failure in failures:
        if failure.rank is not None:
            alike[_notebook_line(failure.stack)].append(failure.rank)
    lines = [f"    {_ranks(ranks)}: {line}" for line, ranks in alike.items()]
    return ["where the ranks were:", *cut_middle(lines, 2 * MAX_OTHERS)] if lines else []


def _notebook_line(stack: Sequence[str]) -> str:
    """Return file, line number and code of the innermost stack frame in a notebook cell, as text.

    If no frame is in a cell, use the innermost frame of the stack. If the stack has no frames,
    return "position not reported yet".

    Args:
        stack: Lines of a stack, as in a traceback.
    """
    frames = [i for i, line in enumerate(stack) if _FRAME.match(line)]
    if not frames:
        return "position not reported yet"
    at = ([i for i in frames if "Cell In[" in stack[i]] or frames)[-1]
    found = _FRAME.match(stack[at])
    assert found is not None
    code = stack[at + 1].strip() if at + 1 < len(stack) and at + 1 not in frames else ""
    return f"{found['file']}, line {found['line']}" + (f": {cut(code, LINE_CHARS)}" if code else "")


def labelled(text: str, labels: Mapping[str, str]) -> str:
    """Replace the file names of the notebook's cells in a text by labels such as `Cell In[5]`.

    The kernel compiles each cell under a file name of its own. Worker processes, fetchers and
    faulthandler know only this file name, so their texts contain it instead of the label.

    Args:
        text: Any text, such as a line of a traceback.
        labels: The labels of the cells, by file name.
    """
    for filename, label in labels.items():
        text = text.replace(filename, label)
    return text


def with_labels(failure: Failure | None, labels: Mapping[str, str]) -> Failure | None:
    """Return a copy of a failure whose texts name the notebook's cells by their labels.

    The texts are the message, traceback, stack and last lines.

    Args:
        failure: The failure; if None, return None.
        labels: Labels of the cells, such as `Cell In[5]`, by file name.
    """
    if failure is None:
        return None
    names = ("traceback", "stack", "tail")
    lines = {name: [labelled(line, labels) for line in getattr(failure, name)] for name in names}
    return structs.replace(failure, message=labelled(failure.message, labels), **lines)


def to_exception(ended: RunEnded) -> RunError | PoolError | StoreError:
    """Return the exception to raise for a run that did not succeed.

    The exception's text has three parts:

    - The first failure. If no failure is known, the run's final state.
    - The details of the first failure. If `--timeout` ended the run, the lines of code at which the
      ranks were.
    - A summary of the other failures.

    Returns:
        StoreError if a host could not receive the project store. RunLost if a host or the whole run
        was lost. PoolError if no rank failed, for example because no rank started. RunTimeout if
        `--timeout` ended the run. Otherwise RankFailed.
    """
    first, failures = ended.first, ended.failures
    why = cut(ended.why, HEADLINE_CHARS)
    words = f"the run ended as {ended.state}" + (f": {why}" if why else "")
    words = headline(first) if first else words
    is_timeout = first is not None and first.how == "timeout"
    lines = rank_positions(failures) if is_timeout else details(first) if first else []
    summary, more = other_failures_text(first, failures)
    lines += [f"{summary}:", *(f"    {line}" for line in more)] if summary else []
    if first and _is_of_store(first):
        return StoreError("\n".join([words, *lines]))
    if ended.state == "LOST" or (first and first.how == "host"):
        return RunLost("\n".join([words, *lines]))
    if first is None:
        return PoolError("\n".join([words, *lines]))
    error = RunTimeout if is_timeout else RankFailed
    return error(words, lines, rank=first.rank, etype=first.etype)


def cause_of(failure: Failure | None, notebook: Mapping[str, object]) -> BaseException | None:
    """Create an exception of the type that a rank raised, as the cause of the notebook's exception.

    The new exception has the failure's message as its only argument. The type's own `__new__` and
    `__init__` are not called, so the attributes that they set are missing. Return None in these
    cases:

    - There is no failure, or the failure has no exception type.
    - The kernel does not have the type, or the type is no subclass of Exception.
    - Python cannot create the exception from a message alone.

    Args:
        failure: The failure that came first.
        notebook: The notebook's variables, by name, among which to find a type of `__main__`.
    """
    if failure is None or not failure.etype:
        return None
    module = sys.modules.get(failure.etype_module)
    names = notebook if failure.etype_module == "__main__" else vars(module) if module else {}
    kind = names.get(failure.etype)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return None
    built_in: Any = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    try:
        made: BaseException = built_in.__new__(kind, failure.message)
    except TypeError:  # an ExceptionGroup needs its exceptions, which only the rank has
        return None
    return made
