"""Tests that a batch that is encoded for the network and decoded again has the same bits."""

import collections
import dataclasses
import math
import os
import pickle
import random
import sys
from typing import Any
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from taas_magic.data import encode, protocol
from taas_magic.data.encode import checksum

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128),
]
Pair = collections.namedtuple("Pair", "image label")


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    name: str
    hints: dict[str, int]


def there_and_back(value: object) -> Any:
    encoded = encode.encode(value)
    body = bytearray(b"".join(encoded.parts()))
    assert len(body) == encoded.body_bytes
    room = bytearray(os.urandom(len(body)))
    assert encoded.copy_to(memoryview(room), is_summed=True) == checksum(bytes(body))
    assert room == body
    return encode.decode(memoryview(body), len(encoded.head))


def sent_bytes(value: object) -> int:
    return sum(len(buffer) for buffer in encode.encode(value).buffers)


def bits(tensor: torch.Tensor) -> list[int]:
    return list(bytes(tensor.clone().reshape(-1).untyped_storage())) if tensor.numel() else []


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    size = torch.empty(0, dtype=dtype).element_size() * math.prod(shape)
    raw = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype is torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    flat = torch.frombuffer(raw, dtype=dtype) if size else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    for dim in range(tensor.dim()):
        step = draw(st.sampled_from([1, 1, 2]))
        tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
    return tensor.movedim(0, -1) if tensor.dim() > 1 and draw(st.booleans()) else tensor


nested = st.recursive(
    st.one_of(tensors(), st.text(max_size=5), st.integers(), st.none(), st.floats(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=6,
)


def steps(tensor: torch.Tensor) -> list[int]:
    """Return the strides of the dimensions with more than one value.

    If the tensor has no elements, return an empty list.
    """
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [step for size, step in sizes if size > 1] if tensor.numel() else []


def assert_same(left: object, right: object) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert bits(left) == bits(right)
        assert steps(left) == steps(right)
    elif isinstance(left, dict) and isinstance(right, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right or left != left


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(nested)
def test_any_nesting_of_tensors_comes_back(value: object) -> None:
    assert_same(there_and_back(value), value)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(st.binary(max_size=5000))
def test_the_checksum_is_the_sum_of_words(data: bytes) -> None:
    padded = data + bytes(-len(data) % 8)
    words = (int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8))
    assert checksum(data) == sum(words) % 2**64


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(st.integers(0, 600_000), st.integers(0, 9))
def test_the_checksum_is_the_same_without_numpy(size: int, seed: int) -> None:
    data = random.Random(seed).randbytes(size)
    with mock.patch.object(encode, "_numpy", None):
        without = checksum(data)
    assert without == checksum(data)


def test_computing_a_checksum_keeps_no_reference_to_the_batch() -> None:
    encoded = encode.encode("a" * 100_000)
    before = sys.getrefcount(encoded.head)
    encoded.copy_to(memoryview(bytearray(encoded.body_bytes)), is_summed=True)
    after = sys.getrefcount(encoded.head)
    assert after == before


def test_the_checksum_of_a_large_body_sees_one_flipped_bit() -> None:
    data = bytearray(os.urandom(1_000_003))
    before = checksum(bytes(data))
    data[999_999] ^= 4
    assert checksum(bytes(data)) != before


@pytest.mark.parametrize(
    "view",
    [
        *(slice(None, None, 2), slice(None, None, -1), (slice(None), 3), (slice(1, 9, 3), None)),
        (slice(None, None, -2), slice(5, 1, -1)),
    ],
    ids=str,
)
def test_an_array_keeps_its_strides(view: Any) -> None:
    array = np.arange(100, dtype=np.int16).reshape(10, 10)[view]
    found, (again, same) = there_and_back(array), there_and_back([array, array])
    assert found.tolist() == again.tolist() == array.tolist()
    assert found.strides == again.strides == array.strides
    assert again is same


def test_a_view_with_large_strides_arrives_dense() -> None:
    base = torch.arange(1_000_000)
    assert there_and_back(base[::100_000]).stride() == (1,)
    assert there_and_back(base.numpy()[::100_000]).strides == (8,)


def test_only_the_bytes_of_a_view_are_sent() -> None:
    base = torch.arange(1_000_000)
    assert sent_bytes(base[1000:1010]) == 80
    assert sent_bytes(base.view(1000, 1000)[:, 3]) == 8000
    assert sent_bytes([base[:10], base[900_000:900_010]]) == 160


def test_the_bytes_of_an_expanded_tensor_are_sent_once() -> None:
    wide = torch.tensor([[1.5]]).expand(1000, 1000)
    assert sent_bytes(wide) == 4
    assert torch.equal(there_and_back(wide), wide)


def test_shared_storage_stays_shared() -> None:
    base = torch.zeros(10)
    result = there_and_back({"all": base, "tail": base[5:], "odd": base[1::2], "same": base})
    result["all"][5] = 7
    assert result["tail"][0] == 7
    assert result["odd"][2] == 7
    assert result["same"] is result["all"]
    assert sent_bytes([base, base[5:], base[1::2]]) == 40


def test_shared_storage_of_two_dtypes_stays_shared() -> None:
    base = torch.zeros(4, dtype=torch.int32)
    result = there_and_back([base.view(torch.uint8)[1:], base[1:]])
    result[1][0] = 1
    assert result[0][3] == 1


def test_disjoint_rows_of_one_storage_do_not_share() -> None:
    base = torch.zeros(100, 4)
    first, second = there_and_back([base[0], base[50]])
    first += 1
    assert second.sum() == 0


def test_results_are_aligned_and_can_be_written() -> None:
    for part in there_and_back([torch.zeros(3), torch.zeros(5), np.zeros(7)]):
        part += 1
        address = part.data_ptr() if isinstance(part, torch.Tensor) else part.ctypes.data
        assert address % 16 == 0


def test_nan_payloads_and_negative_zero() -> None:
    special = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000], dtype=torch.int32)
    assert bits(there_and_back(special.view(torch.float32))) == bits(special)


@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_coo(coalesced: bool) -> None:
    indices, values = torch.tensor([[0, 0, 2], [1, 1, 0]]), torch.tensor([1.0, 2.0, 3.0])
    sparse = torch.sparse_coo_tensor(indices, values, (3, 2), check_invariants=True)
    sparse = sparse.coalesce() if coalesced else sparse
    result = there_and_back(sparse)
    assert result.is_coalesced() == coalesced
    assert torch.equal(result._values(), sparse._values())
    assert torch.equal(result.to_dense(), sparse.to_dense())


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("form", ["to_sparse_csr", "to_sparse_csc"])
def test_sparse_compressed(form: str) -> None:
    sparse = getattr(torch.eye(4), form)()
    result = there_and_back(sparse)
    assert result.layout == sparse.layout
    assert torch.equal(result.to_dense(), torch.eye(4))


def test_channels_last_keeps_its_strides() -> None:
    image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    result = there_and_back(image)
    assert result.stride() == image.stride()
    assert torch.equal(result, image)


def test_attributes_requires_grad_and_lazy_conjugates_arrive() -> None:
    tensor = torch.arange(3.0, requires_grad=True)
    vars(tensor)["hints"] = {"units": 5}
    result = there_and_back(tensor)
    assert result.requires_grad
    assert result.hints == {"units": 5}
    values = torch.tensor([1 + 2j])
    whole, conjugate, negative = there_and_back((values, values.conj(), values.conj().imag))
    assert conjugate.is_conj() and torch.equal(conjugate, torch.tensor([1 - 2j]))
    assert conjugate.data_ptr() == whole.data_ptr()  # they share memory, as in the dataset
    assert torch.equal(negative, torch.tensor([-2.0]))


def test_numpy_strings_and_custom_types() -> None:
    sample = Sample(torch.ones(2), "a", {"units": 3})
    arrays = {"a": np.arange(6).reshape(2, 3), "s": np.array(["x", "yy"]), "o": sample}
    result = there_and_back(arrays)
    assert (result["a"] == arrays["a"]).all()
    assert (result["s"] == arrays["s"]).all()
    assert type(result["o"]) is Sample
    assert result["o"].hints == {"units": 3}


def test_a_class_that_cannot_be_imported_is_pickled_by_value() -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec("class Custom:\n    def __init__(self, x): self.x = x", namespace)
    custom = namespace["Custom"]
    assert isinstance(custom, type)
    result = there_and_back(custom(torch.ones(3)))
    assert type(result).__name__ == "Custom"
    assert torch.equal(result.x, torch.ones(3))


def test_an_object_that_cannot_be_pickled_raises() -> None:
    with pytest.raises((TypeError, pickle.PicklingError)):
        encode.encode([torch.ones(1), (n for n in range(3))])


def test_encoded_parts_keep_their_memory_alive() -> None:
    parts = encode.encode([torch.full((100_000,), 3.0)[::2], torch.full((100_000,), 4.0)]).parts()
    torch.zeros(200_000), torch.zeros(50_000)
    body = bytearray(b"".join(parts))
    first, second = encode.decode(memoryview(body), len(parts[0]))
    assert first.sum() == 150_000
    assert second.sum() == 400_000


def test_a_small_value_can_be_encoded_as_one_piece() -> None:
    value = {"t": torch.arange(5), "s": "x"}
    assert_same(encode.from_bytes(encode.as_bytes(value)), value)


def test_layout_is_aligned() -> None:
    offsets, size = protocol.layout(10, [1, 64, 65, 0])
    assert offsets == [64, 128, 192, 320]
    assert size == 320


def test_the_fingerprint_does_not_depend_on_the_addresses_of_the_tensors() -> None:
    one, other = torch.empty(6), torch.empty(6)
    prints = set()
    for first, second in ((one, other), (other, one)):
        first.fill_(1.0)
        second.fill_(2.0)
        prints.add(encode.fingerprint(encode.encode([(0, first), (1, second)])))
    assert len(prints) == 1
    assert encode.fingerprint(encode.encode([(0, second), (1, first)])) not in prints
