"""Tensors as rows of a table and buffers that nobody copies; and back.

A view travels as its own bytes, and tensors whose bytes overlap travel once and share their memory
again at the other end. What is not a plain dense CPU tensor (sparse, requires_grad, with
attributes) is built from those that are.
"""

import ctypes
import math
import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

_WIDEST = 16
_THIN = 2
"""Overlapping views travel together unless that costs more than so many times their own bytes."""

_DTYPES = {
    str(value)[6:]: value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_NAMES = {value: name for name, value in _DTYPES.items()}


class TensorRow(NamedTuple):
    """Where a tensor lies: which buffer (-1: it is empty), at which byte, and its form."""

    buffer: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__
    )


def _dressed(plain: torch.Tensor, grad: bool, attributes: dict[str, Any]) -> torch.Tensor:
    plain.requires_grad_(grad).__dict__.update(attributes)
    return plain


def _sparse_coo(
    indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, coalesced: bool
) -> torch.Tensor:
    made = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
    return made._coalesced_(coalesced)


def _sparse_compressed(
    compressed: torch.Tensor,
    plain: torch.Tensor,
    values: torch.Tensor,
    shape: torch.Size,
    layout: torch.layout,
) -> torch.Tensor:
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=layout, check_invariants=False
    )


def reduce(tensor: torch.Tensor) -> Any:
    """Build a tensor that is not plain from tensors that are."""
    if tensor.requires_grad or tensor.__dict__:
        bare = tensor.detach()
        return _dressed, (bare, tensor.requires_grad, dict(tensor.__dict__))
    if tensor.is_conj() or tensor.is_neg():
        return torch.Tensor.detach, (tensor.resolve_conj().resolve_neg(),)
    if tensor.is_nested and tensor.layout is torch.strided:
        return torch.nested.as_nested_tensor, ([*tensor.unbind()],)
    if tensor.layout is torch.sparse_coo:
        parts = tensor._indices(), tensor._values()
        return _sparse_coo, (*parts, tensor.shape, tensor.is_coalesced())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = tensor.crow_indices(), tensor.col_indices()
        return _sparse_compressed, (*parts, tensor.values(), tensor.shape, tensor.layout)
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = tensor.ccol_indices(), tensor.row_indices()
        return _sparse_compressed, (*parts, tensor.values(), tensor.shape, tensor.layout)
    return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]


def row(buffer: int, tensor: torch.Tensor) -> TensorRow:
    """The row of a tensor that lies at the start of a buffer."""
    return TensorRow(buffer, 0, _NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride())


class _Extent(NamedTuple):
    start: int
    end: int
    number: int


def _extent(number: int, tensor: torch.Tensor) -> _Extent:
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return _Extent(start, start + tensor.nbytes, number)
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return _Extent(start, start + (reach + 1) * tensor.element_size(), number)


def _overlapping(extents: Iterable[_Extent]) -> list[list[_Extent]]:
    """Group extents that overlap, directly or through others."""
    groups: list[list[_Extent]] = []
    end = 0
    for extent in sorted(extents):
        if groups and extent.start < end:
            groups[-1].append(extent)
        else:
            groups.append([extent])
            end = 0
        end = max(end, extent.end)
    return groups


def lay_out(
    tensors: Sequence[torch.Tensor], first_buffer: int
) -> tuple[list[TensorRow], list[memoryview]]:
    """Decide which bytes travel, and where each tensor lies in them."""
    rows = [row(-1, tensor) for tensor in tensors]
    spans: list[memoryview] = []

    def travel(start: int, end: int, members: Iterable[_Extent], owner: torch.Tensor) -> None:
        for at, _, number in members:
            _, _, dtype, shape, stride = rows[number]
            rows[number] = TensorRow(first_buffer + len(spans), at - start, dtype, shape, stride)
        spans.append(_memory(start, end - start, owner))

    for group in _overlapping([_extent(k, t) for k, t in enumerate(tensors) if t.numel()]):
        owner = tensors[group[0].number]
        start, end = group[0].start, max([extent.end for extent in group])
        most_bytes = owner.nbytes
        if len(group) > 1:
            # Mixed dtypes: every offset stays a multiple of its element size.
            start -= (start - owner.untyped_storage().data_ptr()) % _WIDEST
            most_bytes = _THIN * sum([tensors[extent.number].nbytes for extent in group]) + _WIDEST
        if end - start <= most_bytes:
            travel(start, end, group, owner)
            continue
        for extent in group:
            dense = tensors[extent.number].contiguous()
            rows[extent.number] = rows[extent.number]._replace(stride=dense.stride())
            own = _extent(extent.number, dense)
            travel(own.start, own.end, [own], dense)
    return rows, spans


def _memory(address: int, size: int, owner: torch.Tensor) -> memoryview:
    """Bytes of a tensor, which the view keeps alive."""
    array = (ctypes.c_ubyte * size).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]
    return pickle.PickleBuffer(array).raw()


class TensorPlace(NamedTuple):
    """Where a tensor lies in a body: at which byte, how many values, in what (None: alone), how."""

    at: int
    values: int
    storage: tuple[int, int] | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def places(rows: Sequence[TensorRow], spans: Sequence[tuple[int, int]]) -> list[TensorPlace]:
    """Find the tensors of a body whose buffers lie at `spans` (start and size)."""
    uses = Counter(row.buffer for row in rows)
    found = []
    for buffer, offset, name, shape, stride in rows:
        dtype, values = _DTYPES[name], math.prod(shape)
        start, size = spans[buffer] if buffer >= 0 else (0, 0)
        is_alone = uses[buffer] == 1 and values * dtype.itemsize == size
        storage = None if is_alone or not values else (start, size)
        found.append(TensorPlace(start + offset, values, storage, dtype, shape, stride))
    return found


def rebuild(places: Iterable[TensorPlace], body: memoryview) -> list[torch.Tensor]:
    """Put the tensors of a body together, as views of it."""
    storages: dict[tuple[int, int], torch.UntypedStorage] = {}
    tensors = []
    for at, values, storage, dtype, shape, stride in places:
        if not values:
            tensors.append(torch.empty(shape, dtype=dtype))
        elif storage is None:
            tensor = torch.frombuffer(body, dtype=dtype, offset=at, count=values)
            tensors.append(tensor if len(shape) == 1 else tensor.as_strided_(shape, stride))
        else:
            start, size = storage
            if storage not in storages:
                flat = torch.frombuffer(body, dtype=torch.uint8, offset=start, count=size)
                storages[storage] = flat.untyped_storage()
            tensor, offset = torch.empty(0, dtype=dtype), (at - start) // dtype.itemsize
            tensors.append(tensor.set_(storages[storage], offset, shape, stride))
    return tensors
