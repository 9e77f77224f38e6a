"""Remove terminal control sequences from texts that people will read. Pure.

Control sequences in a text from a host or program could change the user's terminal. Each text is
cleaned once, when the message that contains the text is decoded.
"""

import re
from collections.abc import Callable
from typing import Any, TypeVar

from msgspec import Struct, structs

_T = TypeVar("_T")

# Terminal control sequences except colours: CSI, strings (OSC with hyperlinks and titles, DCS, SOS,
# PM, APC), two-character escapes, and single control characters.
_CONTROLS = re.compile(
    r"\x1b\[[0-9;:?<=>!]*[ -/]*[@-ln-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[!-/]*[0-Z\\^-~]"
    r"|\x1b(?!\[[0-9;:]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]"
)

_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")

_COLOURS_END = ("\x1b[0m", "\x1b[m")

_COLOURED = frozenset({"Lines.lines", "Failure.tail"})
"""Fields in which each string is one line of a program's output and keeps its colours."""

_BLOCKS = frozenset(
    {"Failure.message", "Failure.traceback", "JobOutcome.message", "JobOutcome.traceback"}
    | {"JobUpdate.lines", "Progress.text", "RunEnded.why", "InputRequested.prompt"}
    | {"StartResponse.error", "StartResponse.store_error"}
)
"""Fields in which a string may have several lines and keeps its line breaks and colours."""


def without_controls(text: str) -> str:
    """Return a line without terminal control sequences other than colours.

    If the line has colours, it ends with a sequence that switches the colours off.
    """
    if text.isprintable():
        return text
    text = _CONTROLS.sub("", text)
    return text if text.endswith(_COLOURS_END) or "\x1b[" not in text else f"{text}\x1b[0m"


def block_without_controls(text: str) -> str:
    """Remove all terminal control sequences except colours from a text of several lines."""
    return text if text.isprintable() else "\n".join(map(without_controls, text.split("\n")))


def _harmless_word(text: str) -> str:
    return text if text.isprintable() else _COLOURS.sub("", _harmless_line(text))


def _harmless_line(text: str) -> str:
    """Remove all terminal control sequences except colours, and all line breaks.

    A second line could be mistaken for another rank's output.
    """
    return text if text.isprintable() else without_controls(text.replace("\n", " "))


def cleaned(value: _T) -> _T:
    """Remove terminal control sequences from every string of a value, at any depth.

    Call this function on each decoded value that people will read. Structs are changed in place.

    Strings also lose line breaks and colours, with three exceptions:

    - Fields in `_BLOCKS` keep line breaks and colours.
    - Fields in `_COLOURED` keep colours, but lose line breaks.
    - In a `Display`, plain text keeps line breaks and colours. The contents of other media types
      stay unchanged, because terminals do not show them.
    """
    return _cleaned(value, _harmless_word)  # type: ignore[no-any-return]


def _cleaned(value: Any, clean: Callable[[str], str]) -> Any:
    """Return a value in which the function `clean` has cleaned every string, at any depth.

    Containers are copied. Structs are changed in place: `_cleaned_field` cleans their fields.
    """
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {_cleaned(key, clean): _cleaned(inner, clean) for key, inner in value.items()}
    if isinstance(value, list):
        return [_cleaned(inner, clean) for inner in value]
    if isinstance(value, tuple):
        inner = [_cleaned(each, clean) for each in value]
        return type(value)(*inner) if hasattr(value, "_fields") else tuple(inner)
    if isinstance(value, Struct):
        for name in value.__struct_fields__:
            structs.force_setattr(value, name, _cleaned_field(value, name))
    return value


def _cleaned_field(struct: Struct, name: str) -> Any:
    """Return the value of the field `name` of a struct without terminal control sequences.

    The field decides what else is removed:

    - A field in `_BLOCKS` keeps line breaks and colours.
    - A field in `_COLOURED` keeps colours, but loses line breaks.
    - In `Display.data`, only the plain text is cleaned. It keeps line breaks and colours.
    - `Display.metadata` is returned unchanged.
    - All other fields lose line breaks and colours.
    """
    value, where = getattr(struct, name), f"{type(struct).__name__}.{name}"
    if where == "Display.metadata":
        return value
    if where == "Display.data":
        return {
            form: block_without_controls(it) if form == "text/plain" and isinstance(it, str) else it
            for form, it in value.items()
        }
    if where in _BLOCKS:
        return _cleaned(value, block_without_controls)
    return _cleaned(value, _harmless_line if where in _COLOURED else _harmless_word)
