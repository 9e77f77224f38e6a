"""Keep the process group of each DDP model alive longer than the model.

A DDP model contains a C++ object, torch's reducer, with a reference to the model's process group.
After `destroy_process_group`, this reference may be the last one. If Python then deletes the model,
a deadlock could occur: the main thread deletes the process group and waits for gloo's threads. The
main thread holds the GIL meanwhile, and one of gloo's threads may wait for the GIL
(pytorch/pytorch#56297). Such a thread needs the GIL to delete the tensor of a collective that has
just ended.

If Python deletes a process group whose last reference is a Python object, no deadlock occurs:
torch then releases the GIL.
"""

import weakref
from typing import Any

from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

_kept: list[tuple["weakref.ref[Module]", Any]] = []  # DDP models and their process groups


def keep_ddp_groups() -> None:
    """From now on, keep a reference to the process group of each DDP model of this process.

    The references last until the process ends, or until `release_ddp_groups`.
    """
    register_module_module_registration_hook(_keep_group)


def release_ddp_groups() -> None:
    """Delete the references to process groups whose DDP models do not exist any more."""
    for entry in [entry for entry in _kept if entry[0]() is None]:
        _kept.remove(entry)


def _keep_group(model: Module, name: str, submodule: Module | None) -> None:
    """Keep the process group of a DDP model. torch calls this function for each new submodule.

    The constructor of a DDP model first sets `process_group`, and then the submodule `module`.
    """
    if name == "module" and isinstance(model, DistributedDataParallel):
        _kept.append((weakref.ref(model), model.process_group))
