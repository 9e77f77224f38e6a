"""Tests of the format for plain data: values come back equal, and forged data never runs code."""

import datetime as dt
import os
import pickle
import random
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch

from taas_magic.capture import plain
from taas_magic.capture.plain import NotPlainError, PlainNode, PlainWriter, read_plain
from taas_magic.messages import to_bytes


def there_and_back(value: Any) -> Any:
    writer = PlainWriter()
    writer.write_value(value)
    return read_plain(writer.data, [memoryview(bytearray(it.raw())) for it in writer.buffers])


VALUES = [
    None, True, False, 0, -1, 2**63, -(2**63), 2**64, -(10**50), 1.5, float("inf"), -0.0,
    1 + 2j, "text", "ü\0", "\udcff", b"", b"bytes", bytes(10_000), bytearray(b"x"),
    (), (1, (2, "three")), [], [[], {}], {}, {"a": {1: (2,)}}, {(1, 2): frozenset({3})},
    set(), {1, "a", (2,)}, frozenset({1}), range(1, 9, 2), slice(1, None), deque([1, 2], 3),
    deque([1]), Counter("abca"), OrderedDict(b=1, a=2), Decimal("1.10"), Fraction(1, 3),
    dt.date(2026, 1, 2), dt.datetime(2026, 1, 2, 3, 4, 5, 6, fold=1), dt.time(1, 2),
    dt.datetime(2026, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=2))), dt.timedelta(1, 2, 3),
    UUID(int=7), Path("/a/b"), PurePosixPath("c"), torch.float32, torch.device("cpu"),
    torch.Size([1, 2]), np.dtype("<f4"), np.float64(1.5), np.bool_(True), np.str_("ab"),
    np.datetime64("2026-01-02"), np.int8(-3),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = there_and_back(value)
    assert type(back) is type(value) and back == value
    assert sorted(repr(back)) == sorted(repr(value))  # two equal sets may have different orders


def test_a_defaultdict_comes_back_with_its_factory() -> None:
    back = there_and_back(defaultdict(list, a=[1]))
    assert back == {"a": [1]} and back["b"] == []
    with pytest.raises(NotPlainError):
        there_and_back(defaultdict(lambda: 1))


ARRAYS = [
    np.arange(12.0).reshape(3, 4),
    np.arange(12).reshape(3, 4).T,
    np.arange(24, dtype=">i4")[::2],
    np.zeros((0, 3)),
    np.array(5),
    np.array(["a", "bcd"]),
    np.array([b"a"]),
    np.array(["2026-01-02"], "M8[ns]"),
    np.zeros(2000, np.complex64),
    np.array([True]),
    np.array(["", ""]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=str)
def test_arrays_come_back_as_they_were(array: np.ndarray) -> None:
    back = there_and_back(array)
    assert back.dtype == array.dtype and back.shape == array.shape
    assert back.flags.f_contiguous == array.flags.f_contiguous or not array.flags.contiguous
    np.testing.assert_array_equal(back, array)
    assert back.size == 0 or back.flags.writeable


TENSORS = [
    torch.arange(12.0).reshape(3, 4),
    torch.arange(12).reshape(3, 4).T,
    torch.zeros(3000, dtype=torch.bfloat16),
    torch.zeros(2, dtype=torch.uint16),
    torch.tensor(3),
    torch.zeros(0, 2),
    torch.ones(2, 1).expand(2, 5),
    torch.ones(3, requires_grad=True),
    torch.ones(1, dtype=torch.complex64),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=str)
def test_tensors_come_back_as_they_were(tensor: torch.Tensor) -> None:
    back = there_and_back(tensor)
    assert type(back) is torch.Tensor and back.requires_grad == tensor.requires_grad
    assert back.stride() == tensor.stride() and back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


def test_a_state_dict_comes_back_with_its_metadata_and_loads() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    state: Any = there_and_back({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    sent: Any = model.state_dict()
    assert state["model"]._metadata == sent._metadata
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    weight = model.state_dict(keep_vars=True)["0.weight"]
    parameter = there_and_back(weight)
    assert type(parameter) is torch.nn.Parameter and parameter.equal(weight)


def test_shared_references_stay_shared() -> None:
    base, row = torch.zeros(4, 4), [1]
    array = np.zeros(3)
    value: dict[str, Any] = {
        "base": base,
        "view": base[1],
        "rows": [row, row],
        "arrays": [array] * 2,
    }
    value["self"] = value
    back = there_and_back(value)
    back["base"][1] = 7
    assert back["view"].tolist() == [7.0] * 4 and back["self"] is back
    assert back["rows"][0] is back["rows"][1] and back["arrays"][0] is back["arrays"][1]


class Own:
    pass


class OwnDict(dict[str, int]):
    pass


def _with_attribute() -> torch.Tensor:
    tensor = torch.ones(1)
    tensor.mine = Own()  # type: ignore[attr-defined]
    return tensor


def _ordered() -> Any:
    ordered: Any = OrderedDict()
    ordered.more = 1
    return ordered


NOT_PLAIN = [
    Own(), Own, len, os.system, OwnDict(), torch.nn.Linear(1, 1), _with_attribute(), _ordered(),
    np.array([Own()], dtype=object), np.zeros(1, [("a", "i4")]), torch.ones(1).to_sparse(),
    memoryview(b""), iter([1]), np.ma.array([1]), NotImplemented,
]  # fmt: skip


@pytest.mark.parametrize("value", NOT_PLAIN, ids=lambda it: type(it).__name__)
def test_a_value_that_is_not_plain_is_refused(value: Any) -> None:
    for holder in (value, [value], {"a": (value,)}):
        with pytest.raises(NotPlainError):
            there_and_back(holder)


def test_values_nested_too_deep_are_neither_written_nor_read() -> None:
    value: Any = ()
    for _ in range(100_000):
        value = (value,)
    with pytest.raises(NotPlainError):
        there_and_back(value)
    nodes = [PlainNode("tuple"), *(PlainNode("tuple", [(number,)]) for number in range(100_000))]
    with pytest.raises(ValueError, match="deep"):
        read_plain(to_bytes([*nodes, PlainNode("root", [(len(nodes) - 1,)])]), [])
    while value:  # Python would destroy the nested tuples recursively
        [value] = value


STORAGE = PlainNode("storage", data=bytes(8))
FORGED = [
    [],
    [PlainNode("os.system", ["true"])],
    [PlainNode("root", [(0,)])],
    [PlainNode("root", [(-1,)])],
    [PlainNode("tuple", [(1,)]), PlainNode("tuple", [(0,)]), PlainNode("root", [(0,)])],
    [PlainNode("list", [(7,)]), PlainNode("root", [(0,)])],
    [PlainNode("list", [(-1,)]), PlainNode("root", [(0,)])],
    [PlainNode("bytes", buffer=3), PlainNode("root", [(0,)])],
    [PlainNode("numpy.dtype", ["O"]), PlainNode("root", [(0,)])],
    [PlainNode("ndarray", ["O", "C", 1], bytes(8)), PlainNode("root", [(0,)])],
    [PlainNode("ndarray", ["i4,O", "C", 1], bytes(16)), PlainNode("root", [(0,)])],
    [PlainNode("ndarray", ["<f8", "C", 100], bytes(8)), PlainNode("root", [(0,)])],
    [PlainNode("torch.dtype", ["load"]), PlainNode("root", [(0,)])],
    [PlainNode("torch.dtype", ["__builtins__"]), PlainNode("root", [(0,)])],
    [PlainNode("defaultdict", ["eval"]), PlainNode("root", [(0,)])],
    [PlainNode("Fraction", ["1e999999999"]), PlainNode("root", [(0,)])],
    [PlainNode("Tensor", ["text", "float32", False, 0, 1, 1]), PlainNode("root", [(0,)])],
    [PlainNode("dict", [1]), PlainNode("root", [(0,)])],
    [PlainNode("set", [(0,)]), PlainNode("root", [(0,)])],
    [PlainNode("complex", ["x", 1.0]), PlainNode("root", [(0,)])],
    *(
        [STORAGE, PlainNode("Tensor", [(0,), "float32", False, *form]), PlainNode("root", [(1,)])]
        for form in (
            [0, 3, 1], [-1, 1, 1], [0, 2, -1], [2**62, 1, 1], [0, 2**62, 2**62], [0, -1, 1],
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("nodes", FORGED, ids=lambda it: it[0].kind if it else "nothing")
def test_a_forged_table_is_refused(nodes: list[PlainNode]) -> None:
    with pytest.raises(ValueError):
        read_plain(to_bytes(nodes), [])


class Makes:
    """Class whose objects create a file when they are unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (str(self.file),)


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(ValueError):
            read_plain(pickle.dumps(Makes(tmp_path / "made"), protocol), [])
    assert not (tmp_path / "made").exists()


def test_random_bytes_are_read_or_raise_value_error() -> None:
    """If random bytes of the data change, reading them succeeds or raises a ValueError."""
    writer = PlainWriter()
    writer.write_value({"a": [torch.ones(2000), {1, 2}], "b": (np.ones(3), Fraction(1, 2), "ü")})
    data, chance = writer.data, random.Random(0)
    buffers = [memoryview(bytearray(it.raw())) for it in writer.buffers]
    n_refused = 0
    for _ in range(3000):
        forged = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            forged[chance.randrange(len(forged))] = chance.randrange(256)
        try:
            read_plain(bytes(forged), buffers)
        except ValueError:
            n_refused += 1
    assert 0 < n_refused < 3000


def test_reading_may_call_only_listed_functions() -> None:
    """This test lists all functions that reading may call. The sender chooses their arguments.

    Before you add a function to the list, check that it is safe with any arguments.
    """
    assert set(plain._CONTAINERS) == {
        "list", "dict", "set", "deque", "Counter", "OrderedDict", "defaultdict",
    }  # fmt: skip
    assert set(plain._MAKERS) == {
        "root", "tuple", "frozenset", "bytes", "bytearray", "int", "str", "complex", "range",
        "slice", "Decimal", "Fraction", "date", "datetime", "time", "timedelta", "UUID",
        "PosixPath", "PurePosixPath", "storage", "Tensor", "Parameter", "torch.dtype",
        "torch.device", "torch.Size", "numpy.dtype", "numpy.generic", "ndarray",
    }  # fmt: skip
