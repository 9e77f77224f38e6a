"""Give each process group of a session's ranks a separate prefix in the ranks' key-value store.

A session keeps one key-value store, and torch uses the same keys for every default process group.
Suppose that the ranks call `destroy_process_group` and then `init_process_group`. Without a prefix,
a fast rank would find the old addresses of slower ranks under these keys, and would then wait
forever for connections.
"""

import functools
import inspect
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's default for gloo


class ProcessGroupPrefixes:
    """Wrapper of `init_process_group` for sessions: gives each new process group a new key prefix.

    With a new prefix, a process group cannot read the values of an earlier process group in the
    session's key-value store. The prefix contains the number of the cell, and the number of the
    process group in this cell.

    Args:
        on_create: Function called before a new process group is created.
    """

    def __init__(self, on_create: Callable[[], None]) -> None:
        self._on_create = on_create
        self._cell = self._groups = 0

    def begin_cell(self, number: int) -> None:
        """Record that a cell begins. Key prefixes of its process groups contain `number`.

        The process groups of each cell are counted from 1. So all ranks choose equal prefixes, even
        if an earlier cell failed and created fewer process groups on some ranks than on others.

        Args:
            number: Number of the cell in the session.
        """
        self._cell, self._groups = number, 0

    def install(self) -> None:
        """Replace torch's `init_process_group` in this process by the wrapper, in all its modules.

        The wrapper calls torch's function with a store that has a new key prefix. In three cases,
        the wrapper passes the arguments on unchanged: the caller passes a store, the caller passes
        an `init_method` other than `env://`, or the environment variable MASTER_PORT is not set.
        """
        original = dist.init_process_group
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            passed = signature.bind_partial(*args, **kwargs).arguments
            is_default = passed.get("init_method") in (None, "env://")
            if is_default and passed.get("store") is None and "MASTER_PORT" in os.environ:
                kwargs |= self._connect_to_store(passed)
                args, kwargs = (), {**passed, **kwargs, "init_method": None}
            self._on_create()
            original(*args, **kwargs)

        dist.init_process_group = init_process_group
        dist.distributed_c10d.init_process_group = init_process_group
        dist.device_mesh.init_process_group = init_process_group  # type: ignore[attr-defined]

    def _connect_to_store(self, passed: dict[str, Any]) -> dict[str, Any]:
        """Connect to the key-value store; return `store`, `rank` and `world_size` for torch.

        Count the new process group. The returned store adds a prefix to each key: the numbers of
        the cell and of the process group. So the keys differ from the keys of earlier process
        groups.

        Args:
            passed: Arguments that the user has passed to `init_process_group`, by name. If the rank
                or the world size is missing, the environment variable RANK or WORLD_SIZE applies.
        """
        rank, world_size = passed.get("rank", -1), passed.get("world_size", -1)
        world_size = int(os.environ["WORLD_SIZE"]) if world_size == -1 else world_size
        timeout = passed.get("timeout") or _DEFAULT_TIMEOUT
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
