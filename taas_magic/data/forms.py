"""The common batch: a tensor, or a list, tuple or dict of some, each dense and apart from the rest.

What the wire says about such a batch depends on its form alone (container, dtypes, shapes), so that
is made once for a form, and a batch of a form seen before costs a few microseconds.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch

_MOST_TENSORS = 16


def take_apart(batch: Any) -> tuple[Hashable, tuple[memoryview, ...]] | None:
    """Return a common batch's form and its tensors' memory; None for any other batch."""
    kind, names = type(batch), ()
    if kind is torch.Tensor:
        tensors: Sequence[torch.Tensor] = (batch,)
    elif kind is list or kind is tuple:
        tensors = batch
    elif kind is dict and all([type(name) is str for name in batch]):
        tensors, names = tuple(batch.values()), tuple(batch)
    else:
        return None
    if not 0 < len(tensors) <= _MOST_TENSORS:
        return None
    try:
        buffers = tuple([_memory(tensor) for tensor in tensors])
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    if len(tensors) > 1 and _overlap(tensors):
        return None
    return (kind, names, *[(tensor.dtype, tensor.shape) for tensor in tensors]), buffers


def _memory(tensor: torch.Tensor) -> memoryview:
    """A tensor's memory.

    Raises:
        Exception: It is not plain, dense and on the CPU (numpy refuses it), or it is empty.
    """
    if type(tensor) is not torch.Tensor or tensor.__dict__:
        raise TypeError
    return memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]


def _overlap(tensors: Sequence[torch.Tensor]) -> bool:
    end = 0
    for start, size in sorted([(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]):
        if start < end:
            return True
        end = start + size
    return False
