"""Where the ranks of a session meet: a place of its own in their store for each process group.

A session has one store for its whole life, and torch names what it writes there alike for each
default process group. A rank that makes its group anew (`destroy_process_group`,
`init_process_group`) would find the old addresses of ranks that have not come so far, and wait for
them for ever. So each group that is made gets a prefix: the cell's number, and which group of the
cell it is.
"""

import functools
import inspect
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

_DEFAULT_TIMEOUT = timedelta(minutes=30)  # that of gloo's groups, as torch has it


class CellMeeting:
    """Gives `init_process_group` a store with a prefix of its own."""

    def __init__(self) -> None:
        self._cell = self._groups = 0

    def begin_cell(self, number: int) -> None:
        """Count the groups of a new cell from 0."""
        self._cell, self._groups = number, 0

    def install(self) -> None:
        """Replace `init_process_group` in this process."""
        original = dist.init_process_group
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            given = signature.bind_partial(*args, **kwargs).arguments
            is_default = given.get("init_method") in (None, "env://")
            if is_default and given.get("store") is None and "MASTER_PORT" in os.environ:
                kwargs |= self._place(given)
                args, kwargs = (), {**given, **kwargs, "init_method": None}
            original(*args, **kwargs)

        dist.init_process_group = init_process_group
        dist.distributed_c10d.init_process_group = init_process_group

    def _place(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that say where to meet."""
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
