"""Tests that text from hosts cannot control a terminal or look like a line of another rank."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect, structs

from taas_magic import messages
from taas_magic.errors import RankFailed
from taas_magic.farms.messages import JobUpdate, NodeUpdate
from taas_magic.messages import (
    Display,
    Event,
    GetStacks,
    HostFacts,
    PoolStatus,
    RunStacks,
    StartResponse,
    cleaned,
    decode_event,
    leaf_subclasses,
    to_bytes,
)
from tests.harness import Notebook

HOSTILE = "a\x1b[2Jb\x1b]0;title\x07c\x9bd\r\n[1] forged\x1b[31m\x08"
OBEYED = ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\r", "\x08")
BLOCKS = {"message", "traceback", "why", "error", "store_error", "data"}

SHOWN = [
    *leaf_subclasses(Event),
    RunStacks,
    PoolStatus,
    StartResponse,
    HostFacts,
    NodeUpdate,
    JobUpdate,
]


def hostile(kind: inspect.Type, depth: int = 0) -> Any:
    """Return a value of type `kind`, as decoded JSON, in which each text is `HOSTILE`."""
    match kind:
        case inspect.StrType():
            return HOSTILE
        case inspect.ListType():
            return [hostile(kind.item_type, depth)] if depth < 3 else []
        case inspect.VarTupleType():
            return [hostile(kind.item_type, depth)]
        case inspect.TupleType():
            return [hostile(each, depth) for each in kind.item_types]
        case inspect.NamedTupleType():
            return [hostile(each.type, depth) for each in kind.fields]
        case inspect.DictType():
            return {hostile(kind.key_type, depth): hostile(kind.value_type, depth)}
        case inspect.UnionType():
            return hostile(next(it for it in kind.types if not _is_nothing(it)), depth)
        case inspect.StructType():
            fields = {it.encode_name: hostile(it.type, depth + 1) for it in kind.fields}
            return {**fields, **({"kind": kind.tag} if kind.tag_field == "kind" else {})}
        case inspect.IntType() | inspect.FloatType():
            return 1
        case inspect.BoolType():
            return True
    return HOSTILE  # the type is Any


def _is_nothing(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.NoneType) or "Unset" in type(kind).__name__


def texts(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """Yield each text in a value, after the name of the innermost struct's field that has it."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from (*texts(key, field), *texts(inner, field))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts(inner, field)
    elif isinstance(value, msgspec.Struct):
        for each in structs.fields(value):
            yield from texts(getattr(value, each.name), each.name)


@pytest.mark.fault(46)
@pytest.mark.parametrize("kind", SHOWN, ids=lambda kind: kind.__name__)
def test_no_text_of_any_field_commands_a_terminal_or_begins_a_line(kind: Any) -> None:
    made = hostile(inspect.type_info(kind))
    if kind is Display:
        made |= {"data": {"text/plain": HOSTILE}, "metadata": None}
    found: Any
    if issubclass(kind, Event):
        found = decode_event(msgspec.json.encode(made))
    else:
        found = cleaned(msgspec.convert(made, kind, str_keys=True, strict=False))
    seen = list(texts(found))
    assert kind in (NodeUpdate, JobUpdate) or any(text for _, text in seen) or not _has_text(kind)
    for field, text in seen:
        assert not any(sequence in text for sequence in OBEYED), (field, text)
        is_block = field in BLOCKS or (field, kind.__name__) in {
            ("text", "Progress"),
            ("lines", "JobUpdate"),
            ("prompt", "InputRequested"),  # shown in an input box, not among the lines of the log
        }
        assert is_block or "\n" not in text, (field, text)


def _has_text(kind: Any) -> bool:
    return any(True for _ in texts(hostile(inspect.type_info(kind))))


def test_facts_of_a_host_are_cleaned_before_they_are_shown() -> None:
    said = RunStacks(silent=[HOSTILE])
    [line] = GetStacks("run").read_answer(to_bytes(said)).silent
    assert "\n" not in line and not any(sequence in line for sequence in OBEYED)


def test_pictures_and_html_are_not_cleaned() -> None:
    shown = Display(data={"text/html": HOSTILE, "text/plain": "a\nb"}, metadata={"k": HOSTILE})
    read = decode_event(messages.encode(shown))
    assert isinstance(read, Display)
    assert read.data == shown.data and read.metadata == shown.metadata


def test_a_rank_whose_names_are_hostile_is_shown_in_plain_text(
    notebook: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    source = f"""
from taas_magic.messages import Note
hostile = {HOSTILE!r}
get_ipython().link.send(Note(text="note " + hostile))
print("\\x1b[2Jprinted")
raise type("E" + hostile, (Exception,), {{}})("message " + hostile)
"""
    outcome = notebook.run(source, gpus=1)
    assert isinstance(outcome.error, RankFailed)
    said = capsys.readouterr().out + str(outcome.error) + "\n".join(outcome.error.details)
    assert "note a" in said and "message a" in said and "printed" in said
    assert not any(sequence in said for sequence in OBEYED)
    assert "[1] forged" not in {line.strip() for line in str(outcome.error).splitlines()}


@pytest.mark.parametrize("text", [b"\x7f", "\x9b".encode(), b"\\u001b[2J", b"\\r", b"\\u007f"])
def test_one_control_character_is_enough_to_clean_an_event(text: bytes) -> None:
    event = decode_event(b'{"kind":"note","text":"plain%b"}' % text)
    assert isinstance(event, messages.Note) and event.text == "plain"
