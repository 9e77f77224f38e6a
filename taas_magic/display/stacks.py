"""Where ranks stand: in the head of a run that hangs, and for `%taas stacks`. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape

from taas_magic.display.failure import cut
from taas_magic.display.log import rank_ranges
from taas_magic.messages import ProcessStand, RankStand, RunStacks

HEAD = ("rank", "host", "since", "at", "waits for")
MAX_GROUPS = 10
CELL_CHARS = 200
_COLLECTIVE = "of torch.distributed"
_CELL = "text-align:left;vertical-align:top;padding:0px 10px 0px 0px"


def duration(seconds: float, decimals: int = 0) -> str:
    """`8 s`, `8.3 s`, `1 min 05 s`, `2 h 03 min`: whole units have passed."""
    if seconds < 60:
        scale = 10**decimals
        return f"{int(seconds * scale) / scale:.{decimals}f} s"
    minutes, rest_s = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def hang_lines(rows: Sequence[RankStand], now: float) -> list[str]:
    """What the head's text says of a run that hangs; nothing for one that does not.

    Args:
        rows: Where each rank stands, and `since` when, by the clock of `now`.
        now: The time.
    """
    if not rows:
        return []
    cells = [HEAD, *(_cells(group, now) for group in groups(rows)[:MAX_GROUPS])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
    return [f"{_title(rows, now)}:", *(f"    {line}" for line in table)]


def hang_rows(rows: Sequence[RankStand], now: float) -> list[str]:
    """The same as HTML; what comes from hosts is escaped."""
    if not rows:
        return []
    head = "".join(f"<th style='{_CELL};opacity:0.6'>{name}</th>" for name in HEAD)
    body = "".join(
        "<tr>" + "".join(f"<td style='{_CELL}'>{escape(it)}</td>" for it in line) + "</tr>"
        for line in (_cells(group, now) for group in groups(rows)[:MAX_GROUPS])
    )
    style = "border-collapse:collapse;font-family:monospace;font-size:12px"
    title = f"<div style='margin:2px 0px 0px 0px;color:#c98a1b'>{escape(_title(rows, now))}</div>"
    return [title, f"<table style='{style}'><tr>{head}</tr>{body}</table>"]


def groups(rows: Sequence[RankStand]) -> list[list[RankStand]]:
    """Ranks that stand at the same line and wait for the same; the odd ones out come first.

    Who waits for the others in a collective is no culprit, however few they are.
    """
    alike: defaultdict[tuple[str, str], list[RankStand]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.rank):
        alike[row.place, row.waits_for].append(row)
    return sorted(
        alike.values(), key=lambda group: (_is_in_collective(group), len(group), group[0].rank)
    )


def text(found: RunStacks, labels: Mapping[str, str]) -> str:
    """What `%taas stacks` prints.

    Args:
        found: As `pools.stacks` returns it.
        labels: What this kernel calls its cells, by the names of their files.
    """
    alike: defaultdict[str, list[RankStand]] = defaultdict(list)
    for group in groups(found.ranks):
        for row in group:
            alike["\n".join(_inside(row, "  "))].append(row)
    shown = [f"{_who(same)}\n{inside}" for inside, same in alike.items()]
    for fetcher in sorted(found.fetchers, key=lambda one: one.fetcher):
        who = f"fetcher {fetcher.fetcher} on {fetcher.host} (process {fetcher.pid})"
        inside = (_with_label(line, labels) for line in _inside(fetcher, "  "))
        shown.append("\n".join([who, *inside]))
    return "\n\n".join([*shown, *found.silent]) or "no rank runs"


def _with_label(line: str, labels: Mapping[str, str]) -> str:
    """A frame's line with the cell's label for its file, which a fetcher does not know."""
    file = line.partition(", line ")[0].strip()
    return line.replace(file, labels[file], 1) if file in labels else line


def _who(rows: Sequence[RankStand]) -> str:
    hosts = ", ".join(dict.fromkeys(row.host for row in rows))
    pids = ", ".join(str(row.pid) for row in rows[:MAX_GROUPS])
    ranks = rank_ranges(row.rank for row in rows)
    several = "s" * (len(rows) > 1)
    return f"rank{several} {ranks} on {hosts} (process{'es' * (len(rows) > 1)} {pids})"


def _inside(process: ProcessStand, indent: str) -> list[str]:
    """A process's lines: what it waits for, its threads, and its children."""
    lines = [f"{indent}waits for {process.waits_for} ({process.system or 'gone'})"]
    for name, frames in process.threads.items():
        lines += [f"{indent}{name}:", *(f"{indent}  {frame}" for frame in frames)]
    for child in process.children:
        lines += [f"{indent}child {child.pid}: {cut(child.command, CELL_CHARS)}"]
        lines += _inside(child, indent + "  ")
    return lines


def _title(rows: Sequence[RankStand], now: float) -> str:
    still = duration(now - max(row.since for row in rows))
    return f"no rank has come forward for {still} (%taas stacks shows all threads)"


def _cells(group: Sequence[RankStand], now: float) -> tuple[str, ...]:
    hosts = list(dict.fromkeys(row.host for row in group))
    since = duration(now - min(row.since for row in group))
    words = (group[0].place or "?", group[0].waits_for)
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    ranks = rank_ranges(row.rank for row in group)
    return (ranks, where, since, *(cut(" ".join(it.split()), CELL_CHARS) for it in words))


def _is_in_collective(group: Sequence[RankStand]) -> bool:
    return group[0].waits_for.endswith(_COLLECTIVE)
