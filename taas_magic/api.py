"""The public names: what `import taas` gives, in any process, without torch or Dask."""

import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from taas_magic.registry import is_registered, register, registered, unregister

if TYPE_CHECKING:
    from taas_magic.farms.farm import farm
    from taas_magic.federation.federation import Federation as federation
    from taas_magic.host.metrics import log
    from taas_magic.notebook.runs import Run, compare, runs
    from taas_magic.store.publish import save

    device_type: str
    last_run: Run | None

__all__ = [
    "Run",
    "compare",
    "device_type",
    "farm",
    "federation",
    "get_registered_data_loaders_names",
    "get_worker_info",
    "is_registered",
    "last_run",
    "log",
    "register",
    "registered",
    "runs",
    "save",
    "unregister",
    "unregistered",
]

unregistered = unregister
"""The old client's name of `unregister`."""


def get_registered_data_loaders_names() -> list[str]:
    """Return names of the registered loaders; the old client's form of `registered`."""
    return sorted(registered())


def get_worker_info() -> Any:
    """Return torch's `get_worker_info()`, and where that is None, what stands for one worker.

    The old client had one of its own, which always said which share of the data is this process's.

    Returns:
        An object with `id`, `num_workers` and `seed`. In a registered loader with `num_workers=0`,
        whose batches are dealt to the ranks, it is worker 0 of 1; elsewhere in a rank, worker
        `RANK` of `WORLD_SIZE`.
    """
    import torch
    from torch.utils.data import get_worker_info

    found = get_worker_info()
    if found is not None:
        return found
    rank, world_size = (
        int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1))
    )
    return SimpleNamespace(id=rank, num_workers=world_size, seed=torch.initial_seed())


def _device_type() -> str:
    """Return what torch finds in a rank; elsewhere, whether this machine has CUDA devices.

    To ask torch would load it, and CUDA with it, into the notebook's kernel.
    """
    if "LOCAL_RANK" in os.environ and "torch" in sys.modules:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    from taas_magic import probe

    return "cuda" if probe.count_gpus() else "cpu"


def __getattr__(name: str) -> Any:
    """Return a public name of a module that is imported when it is asked for.

    `last_run` is the newest run that this kernel started or attached (None before the first),
    `device_type` is "cuda" or "cpu". The imports are late because the kernel imports this module
    while the notebook's folder, which may hold a `random.py`, still comes before the standard
    library.
    """
    if name == "last_run":
        return getattr(sys.modules.get("taas_magic.notebook.launch"), "last_run", None)
    if name == "log":
        from taas_magic.host.metrics import log

        globals()[name] = log  # a training loop calls it at each step
        return log
    if name in ("Run", "compare", "runs"):
        from taas_magic.notebook import runs

        return getattr(runs, name)
    if name == "device_type":
        return _device_type()
    if name == "farm":
        from taas_magic.farms.farm import farm

        return farm
    if name == "federation":
        from taas_magic.federation.federation import Federation

        return Federation
    if name == "save":
        from taas_magic.store.publish import save

        return save
    raise AttributeError(f"module 'taas' has no attribute {name!r}; it has: {', '.join(__all__)}")
