"""What `%taas` does: status, logs, stacks, stop, pools, warm, down. Runs in the kernel."""

import os
import re
import shlex
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taas_magic.config import LOCAL, Config, closest
from taas_magic.display.head import duration
from taas_magic.display.log import harmless, size_text
from taas_magic.errors import UsageError
from taas_magic.host.output import LineAssembler
from taas_magic.journal import folder as journal
from taas_magic.journal.folder import ENDED_STATES, RunRecord
from taas_magic.messages import HostStatus
from taas_magic.notebook.flags import whole

if TYPE_CHECKING:
    from taas_magic.notebook.check import CheckReport
    from taas_magic.notebook.pools import PoolRow


USAGE = {
    "status": ("status", "your newest runs, of any kernel"),
    "logs": (
        "logs [RUN] [--rank R]",
        "what a rank wrote, and its traceback; the newest run, the rank that failed or 0",
    ),
    "stacks": (
        "stacks [RUN]",
        "where ranks and fetchers stand: all threads, and their children's",
    ),
    "stop": ("stop [RUN]", "end a run; without RUN the newest that runs"),
    "pools": (
        "pools [--check [POOL]]",
        "the pools; with --check whether their hosts are fit, and why not",
    ),
    "warm": ("warm [POOL]", "make a pool ready, so that the next cell starts at once"),
    "down": ("down [POOL]", "end a pool: its runs, its hosts, its process"),
}
HELP = "Runs and pools; RUN is a run's id, its beginning, or the run's name.\n\n" + "\n".join(
    f"    %taas {usage:22} {text}" for usage, text in USAGE.values()
)
_SHOWN_RUNS = 10
_READ_BYTES = 4_000_000
_SHOWN_BYTES = 500_000
"""A browser bears so much of a log in a cell; what comes before that is named by its file."""


def run(line: str, settings: Config) -> "str | CheckReport":
    """Carries out `%taas LINE`; returns what to show.

    Raises:
        UsageError: No such command, or it does not take these words.
        PoolError: The pool could not be reached.
    """
    try:
        name, *words = shlex.split(line) or ["status"]
    except ValueError:
        raise UsageError(f"%taas {line}: a quote is not closed") from None
    if name.startswith("-"):
        raise UsageError(f"%taas {name}: to run a cell, begin it with %%taas (two percent signs)")
    if name not in USAGE:
        raise UsageError(f'%taas has no "{name}"{closest(name, USAGE)}. It has: {", ".join(USAGE)}')
    return _COMMANDS[name](words, settings)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns, each as wide as its widest text."""
    texts = [[str(value) for value in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in texts)


def _status(words: Sequence[str], settings: Config) -> str:
    _take("status", words, 0)
    rows = [
        (run.run_id, run.state, run.world_size, run.pool, _elapsed(run), run.name)
        for run in journal.runs()[:_SHOWN_RUNS]
    ]
    return table(("run", "state", "ranks", "pool", "elapsed", "name"), rows) if rows else "no runs"


def _elapsed(run: RunRecord) -> str:
    """As the head of the run has it."""
    return duration(run.elapsed_s, decimals=int(run.state in ENDED_STATES))


def _logs(words: Sequence[str], settings: Config) -> str:
    words, asked = _take_rank(words)
    record = journal.find(_take("logs", words, 1))
    rank = asked if asked is not None else record.failed_rank or 0
    shown = _end_of(record.log_path(rank))
    if not shown:
        return f"rank {rank} of run {record.run_id} wrote nothing"
    return shown if asked is not None or not rank else f"rank {rank}, which failed first:\n{shown}"


def _end_of(log: Path) -> str:
    """The last lines of a log as a terminal would show them, and how much comes before them."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _READ_BYTES))
        assembler = LineAssembler()
        lines = [*assembler.feed(file.read()), *assembler.flush()]
    lengths = accumulate(len(line) + 1 for line in reversed(lines))
    fit = sum(length <= _SHOWN_BYTES for length in lengths)
    text = "\n".join(harmless(line) for line in lines[len(lines) - max(1, fit) :])
    left_out = size - len(text)
    is_whole = fit == len(lines) and size <= _READ_BYTES
    return text if is_whole else f"… {size_text(left_out)} before this: {log}\n{text}"


def _stop(words: Sequence[str], settings: Config) -> str:
    from taas_magic.notebook import pools

    record = _running(_take("stop", words, 1))
    return f"stopping run {pools.stop(record.run_id, settings)}"


def _stacks(words: Sequence[str], settings: Config) -> str:
    from IPython.core.getipython import get_ipython

    from taas_magic.display.head import stacks_text
    from taas_magic.notebook import launch, pools

    record = _running(_take("stacks", words, 1))
    shell = get_ipython()
    assert shell is not None
    return stacks_text(pools.stacks(record.run_id, settings), launch.labels_of_cells(shell))


def _pools(words: Sequence[str], settings: Config) -> "str | CheckReport":
    from taas_magic.notebook import pools

    if words and words[0] == "--check":
        return _check(words[1:], settings)
    _take("pools", words, 0)
    found = pools.rows(settings)
    rows = [line for pool in found for line in _pool_lines(pool)]
    head = ("pool", "engine", "state", "host", "does", "since", "GPU-hours")
    source = settings.source or "there is no taas.toml: all runs on this machine"
    return "\n".join([table(head, rows), *_cost_lines(found), f"({source})"])


def _check(words: Sequence[str], settings: Config) -> "CheckReport":
    from taas_magic.notebook import check

    name = _take("pools", words, 1)
    return check.hosts(settings, [name] if name else [])


def _warm(words: Sequence[str], settings: Config) -> str:
    from taas_magic.notebook import pools

    pool = settings.pool(_take("warm", words, 1) or LOCAL)
    pools.warm(settings, pool.name)
    return f'Pool "{pool.name}" warms up in the background; %taas pools says when it is ready.'


def _down(words: Sequence[str], settings: Config) -> str:
    from taas_magic.notebook import pools

    pool = settings.pool(_take("down", words, 1) or LOCAL)
    pools.down(pool.name, settings)
    return f'Pool "{pool.name}" is down.'


_COMMANDS: dict[str, Callable[[Sequence[str], Config], "str | CheckReport"]] = {
    "status": _status,
    "logs": _logs,
    "stacks": _stacks,
    "stop": _stop,
    "pools": _pools,
    "warm": _warm,
    "down": _down,
}


def _take(name: str, words: Sequence[str], most: int) -> str | None:
    """The word after a command, if there is one.

    Raises:
        UsageError: There are more than the command takes.
    """
    if len(words) > most:
        raise UsageError(
            f'%taas {name} does not take "{words[most]}". It is used as: %taas {USAGE[name][0]}'
        )
    return words[0] if words else None


def _take_rank(words: Sequence[str]) -> tuple[list[str], int | None]:
    """The words without `--rank R`, and R; None where it is not there."""
    rest = list(words)
    at = next((i for i, word in enumerate(rest) if re.match(r"--rank(=|$)", word)), None)
    if at is None:
        return rest, None
    _, equals, text = rest.pop(at).partition("=")
    if not equals and at < len(rest):
        text = rest.pop(at)
    try:
        return rest, whole(0)(text)
    except ValueError:
        got = f'; got "{text}"' if text else ""
        raise UsageError(f"--rank needs a rank's number (--rank 3){got}") from None


def _running(run_id: str | None) -> RunRecord:
    if run_id is not None:
        return journal.find(run_id)
    running = [record for record in journal.runs() if record.state not in ENDED_STATES]
    if not running:
        raise UsageError("No run is running. %taas status lists the newest.")
    return running[0]


def _pool_lines(pool: "PoolRow") -> list[tuple[str, ...]]:
    """A pool's rows: one a host; its name stands in the first."""
    names = (pool.name, pool.engine, pool.state)
    hosts = [_host_cells(host) for host in pool.status.hosts] or [("", "", "", "")]
    return [(*(names if i == 0 else ("", "", "")), *cells) for i, cells in enumerate(hosts)]


def _host_cells(host: HostStatus) -> tuple[str, ...]:
    does = ", ".join(host.runs) or f"idle {duration(host.idle_s or 0)}"
    return host.host, does, duration(host.had_s), f"{host.gpu_hours:.2f}"


def _cost_lines(pools: Sequence["PoolRow"]) -> list[str]:
    """What each pool with GPUs has cost since it began, hosts that are given back included."""
    return [
        f'pool "{pool.name}": '
        f"{pool.status.gpu_hours:.2f} GPU-hours, "
        f"{pool.status.used_gpu_hours / pool.status.gpu_hours:.0%} of them in runs"
        for pool in pools
        if pool.status.gpu_hours
    ]
