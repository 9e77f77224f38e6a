"""Tests that `messages.txt` lists all texts of the package for users, so that people review them.

`python tests/package/test_messages.py` writes the file again. A text is a string of at least two
words in the code, except docstrings and regular expressions. In a line, `{name}` is a value,
`[one|other]` are alternatives, and `⏎` is a line break.
"""

import ast
import re
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "taas_magic"
FILE = Path(__file__).with_name("messages.txt")

TWO_WORDS = re.compile(r"[^\W\d_]{2}[^\s<>=]* [^\s<>=]*[^\W\d_]{2}")
HTML = re.compile(r"</?[a-z]+( [^<>]*='[^<>]*)?/?>")
CSS = re.compile(r"[a-z]:[^ ;]+;.*[a-z]:")


def has_string(node: ast.AST) -> bool:
    """Return whether an expression is a string literal, or joins or selects string literals."""
    match node:
        case ast.Constant(value=str()) | ast.JoinedStr():
            return True
        case ast.BinOp(op=ast.Add() | ast.Mult(), left=first, right=second):
            return has_string(first) or has_string(second)
        case ast.IfExp(body=first, orelse=second):
            return has_string(first) or has_string(second)
        case ast.BoolOp(values=values):
            return any(map(has_string, values))
    return False


def text_of(node: ast.AST) -> str:
    """Return the text of an expression, with `{name}` in place of values."""
    if not has_string(node) and not isinstance(node, ast.FormattedValue):
        return f"{{{name_of(node)}}}"
    match node:
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=parts):
            return "".join(map(text_of, parts))
        case ast.FormattedValue(value=value):
            return text_of(value)
        case ast.BinOp(op=ast.Add(), left=first, right=second):
            return text_of(first) + text_of(second)
        case ast.BinOp(left=first, right=second):  # "s" * (n > 1)
            return f"[{text_of(first if has_string(first) else second)}|]"
        case ast.IfExp(body=first, orelse=second):
            return f"[{text_of(first)}|{text_of(second)}]"
        case ast.BoolOp(values=values):
            return f"[{'|'.join(map(text_of, values))}]"
    raise AssertionError(ast.dump(node))


def name_of(node: ast.AST) -> str:
    """Return a short name for a value."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_")
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
        case ast.Call(func=ast.Name(), args=[first, *_]):
            return name_of(first)
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return name_of(inner)
        case ast.BinOp(left=inner, right=other):
            return name_of(other if isinstance(inner, ast.Constant) else inner)
    names = [name_of(inner) for inner in ast.walk(node) if isinstance(inner, ast.Name)]
    return names[0] if names else "…"


def texts_in(node: ast.AST) -> Iterator[str]:
    """Yield the texts in a part of a module, in the order of the source."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Expr(value=ast.Constant()):  # a docstring
                continue
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re"))):
                continue
        if not has_string(child):
            yield from texts_in(child)
        elif TWO_WORDS.search(text := HTML.sub("", text_of(child))) and not CSS.search(text):
            yield re.sub(r"\n *", "⏎", text.strip())


def lines() -> list[str]:
    """Return the lines of `messages.txt`."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if texts := list(dict.fromkeys(texts_in(ast.parse(path.read_text())))):
            found += [f"# {path.relative_to(PACKAGE)}", *texts, ""]
    return found


def test_the_file_has_all_texts() -> None:
    changed = list(unified_diff(FILE.read_text().split("\n"), lines(), n=0, lineterm=""))[2:]
    assert not changed, "run `python tests/package/test_messages.py` and review what it changes"


def test_a_text_shows_values_and_alternatives() -> None:
    code = '''
def fail(hosts, log):
    """Fail with a text."""
    why = f"{len(hosts)} host{'s' * (len(hosts) > 1)} {'are' if hosts else 'is'} gone"
    raise PoolError(f"the pool ended: {why}" + (f"\\n  see {log.path}" if log else ""))
'''
    assert list(texts_in(ast.parse(code))) == [
        "{hosts} host[s|] [are|is] gone",
        "the pool ended: {why}[⏎see {path}|]",
    ]


def test_no_text_is_left_out_because_it_is_html() -> None:
    code = "f\"<div style='{FRAME};color:red'><b>rank {n}</b> is gone</div>\""
    assert list(texts_in(ast.parse(f"shown = {code}"))) == ["rank {n} is gone"]


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()))
