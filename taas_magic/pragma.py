"""The comment form: `#!g2.8` and `#pragma taas …` at the top of a cell -> `%%taas …`.

The cell stays plain Python for editors; `magic.locate` finds the body's lines in it again. A pure
function of the text, because IPython also asks it whether a half-typed cell is complete; what is
wrong is said when the cell runs.
"""

import re
from itertools import takewhile

# A word and nothing else, unlike an interpreter's path: `#!/usr/bin/env python`, `#!python3`.
_POOL = re.compile(r"#!\s*(?!python|i?pypy|sh$|bash$)([A-Za-z][\w.-]*)\s*")
_PRAGMA = re.compile(r"#\s?pragma\s+taas(?:\s+(.*))?")


def head(lines: list[str]) -> tuple[str, int] | None:
    """What the comments at the top of a cell ask for.

    Without a pragma, `#!name` counts only as the cell's first line: further down it is a comment.

    Returns:
        The flags, and the number of lines down to the last that says so; None for an ordinary cell.
    """
    top = [line.strip() for line in takewhile(_is_comment_or_blank, lines)]
    pools = [(i, found[1]) for i, line in enumerate(top) if (found := _POOL.fullmatch(line))]
    pragmas = [(i, found[1]) for i, line in enumerate(top) if (found := _PRAGMA.fullmatch(line))]
    if not pragmas and not (pools and not any(top[: pools[0][0]])):
        return None
    flags = [f"--pool {name}" for _, name in pools[:1]]
    flags += [text.strip() for _, text in pragmas if text]
    return " ".join(flags), max(i for i, _ in (*pools[:1], *pragmas)) + 1


def transform(lines: list[str]) -> list[str]:
    """IPython's input transformer: lines with their ends in, lines out."""
    found = head(lines)
    if found is None:
        return lines
    flags, used = found
    return [f"%%taas {flags}\n", *(lines[used:] or ["\n"])]


def _is_comment_or_blank(line: str) -> bool:
    text = line.strip()
    return not text or text.startswith("#")
