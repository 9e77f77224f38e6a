"""What `%taas` does: status, logs, stop, pools, warm, down. Runs in the notebook's kernel."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from taas_magic import journal
from taas_magic.config import LOCAL, Config, closest
from taas_magic.errors import UsageError
from taas_magic.flag_values import whole
from taas_magic.journal import ENDED_STATES, RunRecord

if TYPE_CHECKING:
    from taas_magic.check import Report

USAGE = {
    "status": ("status", "your newest runs, of any kernel"),
    "logs": ("logs [RUN] [--rank R]", "all that a rank wrote; the newest run, rank 0"),
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


def run(line: str, settings: Config) -> "str | Report":
    """Carries out `%taas LINE`; returns what to show.

    Raises:
        UsageError: No such command, or it does not take these words.
        PoolError: The pool could not be reached.
    """
    try:
        name, *words = shlex.split(line) or ["status"]
    except ValueError:
        raise UsageError(f"%taas {line}: a quote is left open") from None
    if name.startswith("-"):
        raise UsageError(f"%taas {name}: to run a cell, begin it with %%taas (two percent signs)")
    if name not in USAGE:
        raise UsageError(
            f"%taas has no {name!r}{closest(name, USAGE)}; possible: {', '.join(USAGE)}"
        )
    return _COMMANDS[name](words, settings)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns, each as wide as its widest text."""
    texts = [[str(value) for value in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in texts)


def _status(words: Sequence[str], settings: Config) -> str:
    _take("status", words, 0)
    rows = [
        (run.run_id, run.state, run.world_size, run.pool, _clock(run.elapsed_s), run.name)
        for run in journal.runs()[:_SHOWN_RUNS]
    ]
    return table(("run", "state", "ranks", "pool", "elapsed", "name"), rows) if rows else "no runs"


def _logs(words: Sequence[str], settings: Config) -> str:
    words, rank = _take_rank(words)
    record = journal.find(_take("logs", words, 1))
    return record.logs(rank).rstrip("\n") or f"rank {rank} of run {record.run_id} wrote nothing"


def _stop(words: Sequence[str], settings: Config) -> str:
    from taas_magic import pools

    record = _to_stop(_take("stop", words, 1))
    return f"stopping run {pools.stop(record.run_id, settings)}"


def _pools(words: Sequence[str], settings: Config) -> "str | Report":
    from taas_magic import pools

    if words and words[0] == "--check":
        return _check(words[1:], settings)
    _take("pools", words, 0)
    found = pools.rows(settings)
    rows = [line for pool in found for line in _pool_lines(pool)]
    head = ("pool", "engine", "state", "host", "does", "since", "GPU-hours")
    source = settings.source or "no taas.toml: everything runs on this machine"
    return "\n".join([table(head, rows), *_cost_lines(found), f"({source})"])


def _check(words: Sequence[str], settings: Config) -> "Report":
    from taas_magic import check

    name = _take("pools", words, 1)
    return check.hosts(settings, [name] if name else [])


def _warm(words: Sequence[str], settings: Config) -> str:
    from taas_magic import pools

    pool = settings.pool(_take("warm", words, 1) or LOCAL)
    pools.warm(settings, pool.name)
    return f"pool {pool.name!r} is warming up in the background; %taas pools says when it is ready"


def _down(words: Sequence[str], settings: Config) -> str:
    from taas_magic import pools

    pool = settings.pool(_take("down", words, 1) or LOCAL)
    pools.down(pool.name, settings)
    return f"pool {pool.name!r} is down"


_COMMANDS: dict[str, Callable[[Sequence[str], Config], "str | Report"]] = {
    "status": _status,
    "logs": _logs,
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
            f"%taas {name} does not take {words[most]!r}; possible is %taas {USAGE[name][0]}"
        )
    return words[0] if words else None


def _take_rank(words: Sequence[str]) -> tuple[list[str], int]:
    """The words without `--rank R`, and R."""
    rest = list(words)
    at = next((i for i, word in enumerate(rest) if re.match(r"--rank(=|$)", word)), None)
    if at is None:
        return rest, 0
    _, equals, text = rest.pop(at).partition("=")
    if not equals and at < len(rest):
        text = rest.pop(at)
    try:
        return rest, whole(0)(text)
    except ValueError:
        raise UsageError(f"--rank {text or 'R'}: possible is a whole number from 0") from None


def _to_stop(run_id: str | None) -> RunRecord:
    if run_id is not None:
        return journal.find(run_id)
    running = [record for record in journal.runs() if record.state not in ENDED_STATES]
    if not running:
        raise UsageError("no run is running; %taas status lists the newest")
    return running[0]


def _pool_lines(pool: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A pool's rows: one a host; its name stands in the first."""
    names = (pool["pool"], pool["engine"], pool["state"])
    hosts = [_host_cells(host) for host in pool["hosts"]] or [("", "", "", "")]
    return [(*(names if i == 0 else ("", "", "")), *cells) for i, cells in enumerate(hosts)]


def _host_cells(host: Mapping[str, Any]) -> tuple[str, ...]:
    does = ", ".join(host["runs"]) or f"nothing for {_clock(host['idle_s'] or 0)}"
    return host["host"], does, _clock(host["had_s"]), f"{host['gpu_hours']:.2f}"


def _cost_lines(pools: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each pool with GPUs has cost since it began, hosts that are given back included."""
    return [
        f"pool {pool['pool']!r}: {pool['gpu_hours']:.2f} GPU-hours, "
        f"{pool['used_gpu_hours'] / pool['gpu_hours']:.0%} of them in runs"
        for pool in pools
        if pool.get("gpu_hours")
    ]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
