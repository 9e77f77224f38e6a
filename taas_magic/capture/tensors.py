"""Torch storages as out-of-band buffers.

Torch gives pickle no buffers of its own and writes every storage into the pickle. A tensor is
rebuilt from a typed storage, that from an untyped one, and only the untyped one holds bytes:
handing pickle those bytes as a buffer serves every dtype, and views that share a storage still
share it. This module imports torch only when called, by processes that have it already.
"""

import ctypes
import io
import os
import warnings
from collections.abc import Callable, MutableMapping
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Reduced = tuple[Any, ...]
Storages = MutableMapping[int, "torch.UntypedStorage"]


def reduce_untyped(storage: "torch.UntypedStorage", seen: Storages) -> Reduced:
    """Reduces a storage to a buffer over its bytes.

    Args:
        storage: On any device; what is not on the CPU is copied there first.
        seen: This pickle's storages by identity: torch may show one storage as several objects.
    """
    first = seen.setdefault(storage._cdata, storage)
    if first is not storage:
        return _same, (first,)
    device = storage.device.type
    held = storage if device == "cpu" else storage.cpu()  # type: ignore[no-untyped-call]
    return rebuild_untyped, (PickleBuffer(_bytes_of(held)), device)


def reduce_typed(storage: "torch.TypedStorage", seen: Storages) -> Reduced:
    """Reduces a typed storage to its one untyped storage and a dtype."""
    untyped = storage._untyped_storage
    return rebuild_typed, (seen.setdefault(untyped._cdata, untyped), storage.dtype)


def reduce_tensor(tensor: "torch.Tensor") -> Any:
    """Torch rebuilds its newer dtypes (uint16 …) only from a typed storage but pickles an untyped
    one; all other tensors are reduced as torch does it."""
    import torch

    if tensor.dtype not in torch.storage._new_dtypes():
        return NotImplemented
    rebuild, args = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    if rebuild is torch._utils._rebuild_tensor_v3:
        args = (rebuild_typed(args[0], torch.uint8), *args[1:])
    return rebuild, args


def rebuild_untyped(buffer: Any, device: str) -> "torch.UntypedStorage":
    """Wraps a buffer as a storage without copying it; moves it to this rank's own GPU if it was
    on one and this process is a rank with CUDA, and leaves it on the CPU otherwise."""
    import torch

    empty = memoryview(buffer).nbytes == 0  # torch.frombuffer refuses an empty one
    host = torch.empty(0, device="cpu") if empty else torch.frombuffer(buffer, dtype=torch.uint8)
    return host.to(target_device(device)).untyped_storage()


def rebuild_typed(untyped: "torch.UntypedStorage", dtype: "torch.dtype") -> "torch.TypedStorage":
    import torch

    return torch.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=untyped, dtype=dtype, _internal=True
    )


def target_device(device: str) -> str:
    """Where a value that lived on `device` belongs in this process."""
    import torch

    local_rank = os.environ.get("LOCAL_RANK")
    if device != "cuda" or local_rank is None or not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{int(local_rank) % torch.cuda.device_count()}"


def reduce_generator(generator: "torch.Generator") -> Reduced:
    return rebuild_generator, (generator.device.type, generator.get_state())


def rebuild_generator(device: str, state: "torch.Tensor") -> "torch.Generator":
    """A generator's state means nothing on another kind of device; there it starts afresh."""
    import torch

    target = target_device(device)
    generator = torch.Generator(target)
    if target.partition(":")[0] == device:
        generator.set_state(state)
    return generator


def reduce_loader(loader: Any) -> Any:
    """A DataLoader without the running iterator that persistent fetching processes leave in it."""
    if getattr(loader, "_iterator", None) is None:
        return NotImplemented
    reduced: Reduced = loader.__reduce_ex__(5)
    state = {**reduced[2], "_iterator": None}
    return (*reduced[:2], state, *reduced[3:])


def reduce_name(value: Any) -> Reduced:
    """Torch pickles these by a name that some module, perhaps the notebook, knows `torch` by."""
    import torch

    return getattr, (torch, str(value).removeprefix("torch."))


def reduce_script(script: Any) -> Reduced:
    """Reduces what `torch.jit` compiled to what `torch.jit.save` writes."""
    import torch

    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated; the user has been told
        torch.jit.save(script, file)
    values = [*script.parameters(), *script.buffers()] if hasattr(script, "parameters") else []
    device = values[0].device.type if values else "cpu"
    return rebuild_script, (file.getvalue(), device)


def rebuild_script(data: bytes, device: str) -> Any:
    """A function comes back as a module that is called alike."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        where = target_device(device)
        return torch.jit.load(io.BytesIO(data), map_location=where)  # type: ignore[no-untyped-call]


def reducers(seen: Storages) -> dict[type, Callable[[Any], Any] | None]:
    """What to do with instances of these classes; the first match in order counts."""
    import torch.utils.data

    return {
        torch.Tensor: reduce_tensor,
        torch.UntypedStorage: lambda storage: reduce_untyped(storage, seen),
        torch.TypedStorage: lambda storage: reduce_typed(storage, seen),
        torch.Generator: reduce_generator,
        torch.utils.data.DataLoader: reduce_loader,
        torch.memory_format: reduce_name,
        torch.qscheme: reduce_name,
        torch.jit.ScriptModule: reduce_script,
        torch.jit.ScriptFunction: reduce_script,
    }


def _bytes_of(storage: "torch.UntypedStorage") -> Any:
    array = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    array._storage = storage  # type: ignore[attr-defined]  # keeps the memory alive
    return array


def _same(value: Any) -> Any:
    return value
