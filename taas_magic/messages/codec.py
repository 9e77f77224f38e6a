"""Encode and decode messages between processes: JSON lines, JSON files, and msgpack. Pure."""

import json
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

_T = TypeVar("_T")

_encoder = msgspec.json.Encoder(enc_hook=repr)


def encode(message: Struct) -> bytes:
    """Encode a message as one line of JSON, without a line end.

    If JSON has no type for a value, the line has the `repr` of the value. If UTF-8 cannot encode a
    character of the message, for example in a file name, encode a copy that `escaped` returns.
    """
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return _encoder.encode(escaped(msgspec.to_builtins(message, enc_hook=repr)))


def escaped(value: Any) -> Any:
    r"""Return a copy of a value in which all strings, at any depth, can be encoded as UTF-8.

    Each lone surrogate in a string is replaced by six ASCII characters, such as `\udce9`. The keys
    of dicts are changed, too. Tuples are replaced by lists. Other values stay as they are.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {escaped(name): escaped(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(inner) for inner in value]
    return value


def to_json(value: object, indent: int | None = None) -> bytes:
    """Encode a value as ASCII JSON, which keeps even strings that are not valid UTF-8.

    Args:
        indent: Number of spaces for each level of nesting; None for a single line.
    """
    return json.dumps(msgspec.to_builtins(value, str_keys=True), indent=indent).encode()


def from_json(packed: bytes, kind: type[_T]) -> _T:
    """Decode a value that `to_json` encoded.

    Raises:
        ValueError: `packed` does not decode to a value of the type `kind`.
    """
    try:
        return msgspec.convert(json.loads(packed), kind, str_keys=True)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def to_bytes(value: object) -> bytes:
    """Encode a request or a response as msgpack, or as JSON if msgpack cannot encode it.

    msgpack cannot encode strings that are not valid UTF-8, or integers of more than 64 bits.
    """
    try:
        return msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError):  # `to_json` is ten times slower, and rarely needed
        return to_json(value)


def from_bytes(packed: bytes, kind: type[_T]) -> _T:
    """Decode a value that `to_bytes` encoded as msgpack or as JSON.

    Raises:
        ValueError: `packed` does not decode to a value of the type `kind`.
    """
    try:
        # `to_bytes` may have written JSON. The first byte of a JSON text is below 0x80. A msgpack
        # value whose first byte is below 0x80 is a small number, which has no further bytes.
        is_json = len(packed) > 1 and packed[0] < 0x80
        return (
            from_json(bytes(packed), kind) if is_json else msgspec.msgpack.decode(packed, type=kind)
        )
    except (TypeError, RecursionError) as error:
        raise ValueError(f"it is no message: {error}") from error
