"""The head above a run's log: its state as text and as HTML. Pure.

Both show the same facts. The HTML is built from what survives in an untrusted notebook (inline
styles, details, progress) and from colours that read on light and dark themes; all that comes from
outside is escaped.
"""

import re
from html import escape

from taas_magic.display import loaders, stacks
from taas_magic.display.failure import cut, headline, others, others_summary
from taas_magic.display.log import harmless
from taas_magic.display.receipt import lines as receipt_lines
from taas_magic.display.stacks import duration
from taas_magic.display.state import TQDM, RunState

COLOURS = {
    "STARTING": "#8c8c8c",
    "RUNNING": "#3b82d0",
    "SUCCEEDED": "#2f9e62",
    "FAILED": "#d9534f",
    "INTERRUPTED": "#c98a1b",
    "LOST": "#d9534f",
}
COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
MAX_NOTES = 10
MAX_HOSTS = 4
WORDS_CHARS = 500
STALE_S = 30
"""A head of a run that goes on is brought up to date each second."""


def facts(state: RunState, now: float) -> list[tuple[str, str]]:
    """The head's facts as (label, value), in their order."""
    ranks = f"{state.world_size:,}"
    if not state.has_ended and len(state.up) < state.world_size:
        ranks = f"{len(state.up):,} of {ranks} up"
    shown = [
        ("ranks", ranks),
        ("pool", state.pool),
        ("host" if state.n_hosts == 1 else "hosts", _hosts(state)),
        ("elapsed", duration(state.elapsed(now), decimals=int(state.has_ended))),
    ]
    if filling := loaders.filling(state.flow):
        shown.append(("filling", filling))
    if state.gpus:
        shown.append(("GPU-seconds", f"{int(state.gpu_seconds(now)):,}"))
    if state.restarts:
        cause = f" ({cut(state.restart_cause, WORDS_CHARS)})" if state.restart_cause else ""
        shown.append(("restarts", f"{state.restarts}{cause}"))
    return [*shown, ("run", state.run_id)]


def _hosts(state: RunState) -> str:
    names = ", ".join(state.hosts[:MAX_HOSTS]) + ", …" * (len(state.hosts) > MAX_HOSTS)
    if state.n_hosts == 1:
        return names or "…"
    return f"{state.n_hosts:,}" + (f" ({names})" if names else "")


def text(state: RunState, now: float) -> str:
    """The head as plain text, without a newline at its end."""
    title = f"{state.state} {cut(state.name, WORDS_CHARS)}".rstrip()
    lines = [" · ".join([title, *(f"{label} {value}" for label, value in facts(state, now))])]
    if state.progress:
        lines.append(f"rank 0: {plain(state.progress)}")
    for name, found in loaders.lines(state.flow, state.units, state.has_ended):
        said = " · ".join(f"{label} {value}" for label, value in found)
        lines.append(f"{cut(name, WORDS_CHARS)}: {said}".rstrip(": "))
    lines += stacks.hang_lines(state.hang, now)
    if state.advice:
        lines.append(f"advice: {state.advice}")
    lines += [f"note: {note}" for note in _notes(state)]
    if outcome := _outcome(state):
        lines.append(outcome)
    if summary := others_summary(state.first, state.failures):
        lines += [f"{summary}:", *(f"    {line}" for line in others(state.first, state.failures))]
    lines += [f"{label}: {value}" for label, value in receipt_lines(state.receipt)]
    return "\n".join([*lines, f"log: {state.run_dir}"])


def html(state: RunState, now: float) -> str:
    """The head as HTML for a notebook's output."""
    colour = COLOURS.get(state.state, COLOURS["STARTING"])
    rows = [_title_row(state, colour), _facts_row(state, now)]
    rows += [_progress_row(line) for line in state.progress.split("\n") if line]
    rows += _loader_rows(state)
    rows += stacks.hang_rows(state.hang, now)
    if state.advice:
        rows.append(_labelled_row("advice", state.advice))
    rows += [_row(f"note: {escape(note)}", "opacity:0.8") for note in _notes(state)]
    if outcome := _outcome(state):
        rows.append(_row(escape(outcome), f"color:{COLOURS['FAILED']}"))
    if summary := others_summary(state.first, state.failures):
        rows.append(_details_row(summary, others(state.first, state.failures)))
    rows += [_labelled_row(label, value) for label, value in receipt_lines(state.receipt)]
    log = f"log: <span style='{CODE}'>{escape(state.run_dir)}</span>"
    rows.append(_row(log, "font-size:12px;opacity:0.65"))
    return f"<div style='{FRAME};border-left:3px solid {colour}'>{''.join(rows)}</div>"


FRAME = (
    "background-color:rgba(128,128,128,0.08);padding:6px 12px 7px 12px;margin:2px 0px;"
    "font-size:13px;line-height:1.5;overflow-wrap:break-word"
)
CODE = "font-family:monospace"
LABEL = "opacity:0.6;font-size:12px"


def _row(content: str, style: str = "") -> str:
    return f"<div style='margin:2px 0px 0px 0px;{style}'>{content}</div>"


def _title_row(state: RunState, colour: str) -> str:
    name = f" <b>{escape(cut(state.name, WORDS_CHARS))}</b>" if state.name else ""
    title = f"<span style='color:{colour}'>● <b>{escape(state.state)}</b></span>"
    return _row(f"{title if state.has_ended else _until_stale(title)}{name}")


def _until_stale(title: str) -> str:
    """A title that gives way to another one where nothing brings it up to date any more.

    So it is in a page that was loaded again, and after the kernel is gone: nobody can reach this
    HTML then. Each update begins the time anew.
    """
    late = f"0s {STALE_S}s forwards"
    stale = f"no news for {STALE_S} s; <span style='{CODE}'>%taas status</span> says how it stands"
    return (
        "<style>@keyframes taas-go{to{visibility:hidden;font-size:0}}"
        "@keyframes taas-come{to{visibility:visible;font-size:13px}}</style>"
        f"<span style='animation:taas-go {late}'>{title}</span>"
        f"<b style='visibility:hidden;font-size:0;animation:taas-come {late}'>● {stale}</b>"
    )


def _facts_row(state: RunState, now: float) -> str:
    return _row(_facts(facts(state, now)))


def _loader_rows(state: RunState) -> list[str]:
    found = loaders.lines(state.flow, state.units, state.has_ended)
    return [_row(f"<b>{escape(cut(name, WORDS_CHARS))}</b> {_facts(said)}") for name, said in found]


def _facts(found: list[tuple[str, str]]) -> str:
    return "".join(
        f"<span style='display:inline-block;margin:0px 18px 0px 0px'>"
        f"<span style='{LABEL}'>{label}</span> {escape(value)}</span>"
        for label, value in found
    )


def _labelled_row(label: str, value: str) -> str:
    return _row(f"<span style='{LABEL}'>{label}</span> {escape(cut(value, WORDS_CHARS))}")


def _progress_row(progress: str) -> str:
    bar = TQDM.fullmatch(plain(progress))
    if bar is None:
        content = f"<span style='{CODE};white-space:pre-wrap'>{escape(plain(progress))}</span>"
    else:
        label, percent, rest = (escape(bar[group]) for group in ("label", "percent", "rest"))
        meter = f"<progress value='{percent}' max='100' style='width:180px'></progress>"
        content = f"<span style='{CODE}'>{label}{percent}%</span> {meter} "
        content += f"<span style='{CODE}'>{rest}</span>"
    return _row(f"<span style='{LABEL}'>rank 0</span> {content}")


def _details_row(summary: str, lines: list[str]) -> str:
    body = "".join(_row(escape(line), "padding:0px 0px 0px 16px;opacity:0.8") for line in lines)
    return _row(f"<details><summary>{escape(summary)}</summary>{body}</details>")


def _outcome(state: RunState) -> str:
    return headline(state.first) if state.first else cut(state.why, WORDS_CHARS)


def _notes(state: RunState) -> list[str]:
    notes = [cut(note, WORDS_CHARS) for note in state.notes[:MAX_NOTES]]
    left_out = len(state.notes) - MAX_NOTES
    return notes if left_out <= 0 else [*notes, f"… and {left_out} more notes"]


def plain(progress: str) -> str:
    """A progress text without what a terminal obeys and without blanks around it."""
    return cut(COLOUR.sub("", harmless(progress)).strip(), WORDS_CHARS)
