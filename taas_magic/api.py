"""The public names of `import taas`.

Any process can import this module, even if torch and Dask are not installed.
"""

import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import taas_magic
from taas_magic import load_ipython_extension as load_ipython_extension  # for `%load_ext taas`
from taas_magic.errors import (
    CaptureError,
    JobFailed,
    PoolError,
    RankFailed,
    ResultError,
    RunError,
    RunLost,
    RunTimeout,
    SaveError,
    StoreError,
    TaasError,
    UsageError,
)
from taas_magic.late_imports import import_in_thread
from taas_magic.registry import is_registered, register, registered, unregister

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from taas_magic.farms.farm import farm
    from taas_magic.federation.federation import federation
    from taas_magic.host.metrics import log
    from taas_magic.host.profile import step
    from taas_magic.notebook.functions import run
    from taas_magic.notebook.runs import Run, compare, runs
    from taas_magic.store.publish import save

    device_type: str
    last_run: Run | None

__all__ = [
    "CaptureError",
    "JobFailed",
    "PoolError",
    "RankFailed",
    "ResultError",
    "Run",
    "RunError",
    "RunLost",
    "RunTimeout",
    "SaveError",
    "StoreError",
    "TaasError",
    "UsageError",
    "compare",
    "device_type",
    "farm",
    "federation",
    "is_registered",
    "last_run",
    "log",
    "register",
    "registered",
    "run",
    "runs",
    "save",
    "step",
    "unregister",
]
"""The names that `taas.<Tab>` offers.

The names that exist only for code written for DataSphere's old package `taas` are not listed.
"""

unregistered = unregister
"""Alias of `unregister`, for code written for DataSphere's old package `taas`."""


def get_registered_data_loaders_names() -> list[str]:
    """Return the sorted names of the registered loaders.

    For code written for DataSphere's old package `taas`. New code uses `registered`.
    """
    return sorted(registered())


def get_worker_info() -> Any:
    """Return the result of torch's `get_worker_info()` or, if that is None, a replacement.

    For code written for DataSphere's old package `taas`, whose function never returned None.

    Returns:
        An object with `id`, `num_workers` and `seed`. The replacement has these values:

        - `seed` is torch's initial seed.
        - In a rank, `id` is the rank and `num_workers` is the world size.
        - In any other process, `id` is 0 and `num_workers` is 1, so that the dataset reads all
          data. An example is a fetcher that runs a registered loader with `num_workers=0`.
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


def unload_ipython_extension(shell: "InteractiveShell") -> None:
    """Undo `%load_ext taas`, but keep `sys.modules["taas"]`, which `%reload_ext taas` needs."""
    taas_magic.unload_ipython_extension(shell)
    sys.modules.setdefault("taas", sys.modules[__name__])


def _device_type() -> str:
    """Return "cuda" if this process can use a GPU, else "cpu".

    Only a rank asks torch. Other processes, such as the kernel, must not load torch and CUDA. In
    these processes, `probe.count_gpus` counts the GPUs instead.
    """
    if "LOCAL_RANK" in os.environ and "torch" in sys.modules:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    from taas_magic import probe

    return "cuda" if probe.count_gpus() else "cpu"


_MODULES = {
    "Run": "taas_magic.notebook.runs",
    "compare": "taas_magic.notebook.runs",
    "farm": "taas_magic.farms.farm",
    "federation": "taas_magic.federation.federation",
    "log": "taas_magic.host.metrics",
    "run": "taas_magic.notebook.functions",
    "runs": "taas_magic.notebook.runs",
    "save": "taas_magic.store.publish",
    "step": "taas_magic.host.profile",
}
"""Module of each object that `__getattr__` imports, by the object's name."""


def __getattr__(name: str) -> Any:
    """Return the public object of `taas` that has this name; import its module on first use.

    Python calls this function for a name that is not yet an attribute of this module:

    - `last_run` is the run that this kernel started or attached last, or None. `device_type` is
      "cuda" or "cpu". This function computes these two values at each access.
    - Any other object becomes an attribute of this module at its first use, so that loops can call
      `log` and `step` quickly.

    `import taas` itself does not import the modules of these objects. Reason: during this import,
    the notebook's folder comes before the standard library on the import path. If this folder has a
    `random.py`, a module that needs Python's own `random` could not be imported.

    Raises:
        AttributeError: `taas` has no such name.
    """
    if name == "last_run":
        return getattr(sys.modules.get("taas_magic.notebook.launch"), "last_run", None)
    if name == "device_type":
        return _device_type()
    if (module := _MODULES.get(name)) is not None:
        import_in_thread(module)
        globals()[name] = getattr(sys.modules[module], name)
        return globals()[name]
    raise AttributeError(f"module 'taas' has no attribute {name!r}; it has: {', '.join(__all__)}")


def __dir__() -> list[str]:
    """Return the names that Tab completion offers."""
    return __all__
