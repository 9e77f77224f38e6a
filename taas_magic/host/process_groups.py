"""Give each process group of a session's ranks a separate prefix in the ranks' key-value store.

A session keeps one key-value store, and torch uses the same keys for every default process group.
Suppose that the ranks call `destroy_process_group` and then `init_process_group`. Without a prefix,
a fast rank would find the old addresses of slower ranks under these keys, and would wait for them
forever.
"""

import functools
import inspect
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's default for gloo


class ProcessGroupPrefixes:
    """Wrapper of `init_process_group` that gives each new process group its own key prefix.

    The prefix has the number of the cell, and the number of the group in this cell.
    """

    def __init__(self) -> None:
        self._cell = self._groups = 0

    def begin_cell(self, number: int) -> None:
        """Begin a cell. The prefixes of process groups created from now on contain `number`.

        The process groups of each cell are counted anew, from 1. So all ranks choose equal
        prefixes, even if an earlier cell failed on some ranks and created fewer process groups
        there.
        """
        self._cell, self._groups = number, 0

    def install(self) -> None:
        """Replace torch's `init_process_group` in this process by the wrapper.

        The wrapper passes a store with a new key prefix to torch's function. If the call names a
        store or an `init_method` other than `env://`, the wrapper leaves the arguments unchanged.
        """
        original = dist.init_process_group
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            given = signature.bind_partial(*args, **kwargs).arguments
            is_default = given.get("init_method") in (None, "env://")
            if is_default and given.get("store") is None and "MASTER_PORT" in os.environ:
                kwargs |= self._store_arguments(given)
                args, kwargs = (), {**given, **kwargs, "init_method": None}
            original(*args, **kwargs)

        dist.init_process_group = init_process_group
        dist.distributed_c10d.init_process_group = init_process_group

    def _store_arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return `store`, `rank` and `world_size` for the user's call of `init_process_group`.

        The store has a new prefix, so that its keys differ from the keys of earlier process groups.

        Args:
            given: Arguments that the user's call has set, by name.
        """
        rank, world_size = given.get("rank", -1), given.get("world_size", -1)
        world_size = int(os.environ["WORLD_SIZE"]) if world_size == -1 else world_size
        timeout = given.get("timeout") or _DEFAULT_TIMEOUT
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size,
            is_master=False,
            timeout=timeout,
        )
        self._groups += 1
        return {
            "store": PrefixStore(f"cell-{self._cell}.{self._groups}", store),
            "rank": int(os.environ["RANK"]) if rank == -1 else rank,
            "world_size": world_size,
        }
