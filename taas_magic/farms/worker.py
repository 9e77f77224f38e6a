"""A node as a Dask worker, and the Dask task that runs a job; no part of node.py: it needs Dask.

The worker unpickles nothing of the user's: what it is given and what it returns are bytes.
"""

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from distributed import WorkerPlugin, get_worker
from distributed.protocol import to_serialize
from msgspec import structs

from taas_magic.farms.terms import (
    ASK,
    DROP,
    INLINE_BYTES,
    TOPIC,
    Blob,
    JobCall,
    JobNews,
    Part,
)
from taas_magic.host.member import ClosedWorker

if TYPE_CHECKING:
    from taas_magic.farms.node import Slots


class NodeWorker(ClosedWorker):
    """A node's Dask worker; it is given large parts by the farm's process, and gives it results."""

    def __init__(self, *args: Any, slots: "Slots", **kwargs: Any) -> None:
        super().__init__(*args, plugins=[_Changes(self)], **kwargs)
        self.slots = slots
        self.results: dict[str, dict[str, Any]] = {}
        self._parts: dict[str, asyncio.Future[Blob]] = {}
        self.stream_handlers[DROP] = self._drop

    async def part(self, part: Part) -> bytes | Blob:
        """Return a part as this node has it, when it has come."""
        if isinstance(part, bytes):
            return part
        if part not in self._parts:
            self._parts[part] = asyncio.ensure_future(self._bring(part))
        return await self._parts[part]

    async def _bring(self, name: str) -> Blob:
        try:
            return await asyncio.to_thread(Blob, await getattr(self.scheduler, ASK)(name=name))
        except BaseException:
            self._drop(name)  # the next job asks again
            raise

    def _drop(self, name: str) -> None:
        self._parts.pop(name, None)


class _Changes(WorkerPlugin):
    """Sends results, and interrupts jobs that nobody wants any more."""

    name = "taas-changes"

    def __init__(self, worker: NodeWorker) -> None:
        self._worker = worker

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Send the result of a job with its end; interrupt one nobody wants; called by Dask."""
        result = self._worker.results.pop(key, None)
        if finish == "memory" and result is not None:  # so it is in one message with its end
            self._worker.log_event(TOPIC, result)
        if finish in ("cancelled", "released"):
            self._worker.slots.cancel(str(key))


async def run_job(call: JobCall, parts: list[Part]) -> None:
    """Run a job in a process of this node, and keep its result to be sent; the Dask task.

    Args:
        parts: The payload, then those of the arguments.

    Raises:
        JobEnded: It did not return.
    """
    worker = get_worker()
    assert isinstance(worker, NodeWorker)

    def say(news: JobNews) -> None:
        worker.log_event(TOPIC, msgspec.to_builtins(news))

    brought = asyncio.gather(*map(worker.part, parts))
    result = await worker.slots.run(call, brought, say)
    result.parts = [_carried(part) for part in result.parts]
    result.files = [(name, _carried(data)) for name, data in result.files]
    worker.results[call.name] = {"type": "outcome", **structs.asdict(result)}


def _carried(data: bytes) -> Any:
    """Return bytes for a message; Dask sends large ones in pieces, beside it."""
    return data if len(data) <= INLINE_BYTES else to_serialize(data)
