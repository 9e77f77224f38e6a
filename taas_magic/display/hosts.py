"""The hosts of pools as one table, with all findings and what to do: as text and as HTML. Pure.

Apart from the head, as it imports `setup/`: 0.05 s that no cell pays.
"""

from collections.abc import Sequence
from html import escape

from taas_magic.display.head import CODE, COLOURS, FRAME, columns
from taas_magic.display.log import size_text
from taas_magic.messages import Facts
from taas_magic.setup.facts import ERROR, REMARK, WARNING, Finding, Kernel, Row
from taas_magic.setup.install import what_to_bring

HEAD = ("pool", "host", "python", "torch", "taas", "GPUs", "disk", "clock", "interface", "store")
MARKS = {ERROR: "✗", WARNING: "!", REMARK: "·"}
_COLOUR_OF = {ERROR: COLOURS["FAILED"], WARNING: COLOURS["INTERRUPTED"], REMARK: "inherit"}


def text(rows: Sequence[Row], here: Kernel) -> str:
    """Return the table as plain text; a host's findings stand below it."""
    cells = [HEAD, *(cells_of(row, here) for row in rows)]
    head, *lines = columns(cells)
    shown = [head]
    for row, line in zip(rows, lines, strict=True):
        shown.append(line)
        for finding in row.findings:
            shown.append(f"    {MARKS[finding.level]} {finding.what}")
            shown += [f"      {finding.todo}"] * bool(finding.todo)
    return "\n".join([*shown, summary(rows)])


def html(rows: Sequence[Row], here: Kernel) -> str:
    """Return the table as HTML; all that comes from hosts is escaped."""
    head = "".join(f"<th style='{_CELL};opacity:0.6'>{name}</th>" for name in (*HEAD, "findings"))
    body = "".join(_row_html(row, here) for row in rows)
    table = f"<table style='border-collapse:collapse;{CODE};font-size:12px'>"
    return (
        f"<div style='{FRAME}'>{table}<tr>{head}</tr>{body}</table>"
        f"<div style='margin:4px 0px 0px 0px'>{escape(summary(rows))}</div></div>"
    )


def summary(rows: Sequence[Row]) -> str:
    """Say how many hosts can be used."""
    hosts = [row for row in rows if row.host]
    unfit = [row.host for row in hosts if not row.is_fit]
    without = f"; not {', '.join(unfit)}" if unfit else ""
    return f"fit for runs: {len(hosts) - len(unfit)} of {len(hosts)} hosts{without}"


def cells_of(row: Row, here: Kernel) -> tuple[str, ...]:
    """Return what stands in a host's row, but for the findings."""
    facts = row.facts
    if facts is None or not facts.system:
        python = facts.python if facts else "?"
        return (row.pool, row.host or "none is up", python, *["?"] * (len(HEAD) - 3))
    reached = facts.interface_of(facts.reached_at)
    store = "shared" if facts.sees_store else "travels"
    return (
        row.pool,
        row.host,
        facts.python,
        facts.torch or "none",
        _ours(facts, here),
        f"{facts.gpus} {', '.join(dict.fromkeys(facts.gpu_names))}".rstrip(),
        f"{size_text(facts.free_bytes)} free",
        f"{facts.ahead_s:+.1f} s",
        # the one at which the host was reached is the one that ranks will use
        f"{reached} {facts.reached_at}" if reached else ", ".join(facts.interfaces),
        f"{store}, held by {row.means}" if row.means else store,
    )


def _ours(facts: Facts, here: Kernel) -> str:
    parcels = [parcel.name for parcel in what_to_bring(facts, here)]
    if not parcels:
        return "installed"
    there = all(name in facts.sites for name in parcels)
    return "in its cache" if there else "comes on first use"


_CELL = "text-align:left;vertical-align:top;padding:2px 10px 2px 0px"


def _row_html(row: Row, here: Kernel) -> str:
    cells = "".join(f"<td style='{_CELL}'>{escape(cell)}</td>" for cell in cells_of(row, here))
    found = "".join(_finding_html(finding) for finding in row.findings) or "none"
    return f"<tr>{cells}<td style='{_CELL};white-space:pre-wrap'>{found}</td></tr>"


def _finding_html(finding: Finding) -> str:
    mark = f"<b style='color:{_COLOUR_OF[finding.level]}'>{MARKS[finding.level]}</b>"
    todo = f"<div style='opacity:0.75'>{escape(finding.todo)}</div>" if finding.todo else ""
    return f"<div>{mark} {escape(finding.what)}{todo}</div>"
