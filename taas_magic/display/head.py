"""The head above a run's log: its state as text and as HTML. Pure.

Both show the same facts. The HTML is built from what survives in an untrusted notebook (inline
styles, details, progress) and from colours that read on light and dark themes; all that comes from
outside is escaped.
"""

import re
from html import escape

from taas_magic.display.failure import cut, headline, others, others_summary
from taas_magic.display.receipt import lines as receipt_lines
from taas_magic.display.state import TQDM, RunState

COLOURS = {
    "STARTING": "#8c8c8c",
    "RUNNING": "#3b82d0",
    "SUCCEEDED": "#2f9e62",
    "FAILED": "#d9534f",
    "INTERRUPTED": "#c98a1b",
    "LOST": "#d9534f",
}
ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
MAX_NOTES = 10
MAX_HOSTS = 4
WORDS_CHARS = 500


def duration(seconds: float, decimals: int = 0) -> str:
    """`8 s`, `8.3 s`, `1 min 05 s`, `2 h 03 min`: whole units have passed."""
    if seconds < 60:
        scale = 10**decimals
        return f"{int(seconds * scale) / scale:.{decimals}f} s"
    minutes, rest_s = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


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
    if state.progress:
        rows.append(_progress_row(state.progress))
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
    dot = f"<span style='color:{colour}'>●</span>"
    return _row(f"{dot} <b style='color:{colour}'>{escape(state.state)}</b>{name}")


def _facts_row(state: RunState, now: float) -> str:
    return _row(
        "".join(
            f"<span style='display:inline-block;margin:0px 18px 0px 0px'>"
            f"<span style='{LABEL}'>{label}</span> {escape(value)}</span>"
            for label, value in facts(state, now)
        )
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
    """A progress text without ANSI sequences and blanks around it."""
    return cut(ANSI.sub("", progress).strip(), WORDS_CHARS)
