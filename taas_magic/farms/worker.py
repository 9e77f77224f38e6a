"""The Dask worker of a node, and the Dask task that runs a job.

This module imports Dask, so node.py imports it only after the forkserver has started. The worker
unpickles no objects of the user: it receives bytes and returns bytes.
"""

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from distributed import WorkerPlugin, get_worker
from distributed.protocol import to_serialize
from msgspec import structs

from taas_magic.farms.messages import (
    DROP_PART,
    GET_PART,
    INLINE_BYTES,
    TOPIC,
    JobCall,
    JobUpdate,
    Part,
    SharedBytes,
)
from taas_magic.host.agent_worker import ClosedWorker

if TYPE_CHECKING:
    from taas_magic.farms.node import Slots


class NodeWorker(ClosedWorker):
    """The Dask worker of a node.

    Attributes:
        results: Outcome of each job whose Dask task is about to end, by the job's name.
            `_JobEndPlugin` sends the outcome when the task ends.
    """

    def __init__(self, *args: Any, slots: "Slots", **kwargs: Any) -> None:
        super().__init__(*args, plugins=[_JobEndPlugin(self)], **kwargs)
        self.slots = slots
        self.results: dict[str, dict[str, Any]] = {}
        self._parts: dict[str, asyncio.Future[SharedBytes]] = {}
        self.stream_handlers[DROP_PART] = self._drop

    async def load_part(self, part: Part) -> bytes | SharedBytes:
        """Return the content of one part of a job's payload or arguments.

        Args:
            part: The bytes, or the name of a part that is stored in the farm's process. A stored
                part is fetched once and then kept for the other jobs of this node.
        """
        if isinstance(part, bytes):
            return part
        if part not in self._parts:
            self._parts[part] = asyncio.ensure_future(self._fetch_part(part))
        return await self._parts[part]

    async def _fetch_part(self, name: str) -> SharedBytes:
        try:
            return await asyncio.to_thread(
                SharedBytes, await getattr(self.scheduler, GET_PART)(name=name)
            )
        except BaseException:
            self._drop(name)  # the next job tries again
            raise

    def _drop(self, name: str) -> None:
        self._parts.pop(name, None)


class _JobEndPlugin(WorkerPlugin):
    """Dask plugin that sends results to the kernel and interrupts jobs that were cancelled."""

    name = "taas-changes"

    def __init__(self, worker: NodeWorker) -> None:
        self._worker = worker

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Send the result of an ended job, or interrupt a cancelled job. Called by Dask."""
        result = self._worker.results.pop(key, None)
        if finish == "memory" and result is not None:  # this message also reports the job's end
            self._worker.log_event(TOPIC, result)
        if finish in ("cancelled", "released"):
            self._worker.slots.cancel(str(key))


async def run_job(call: JobCall, parts: list[Part]) -> None:
    """Run a job in a process of this node. This is the function of the job's Dask task.

    Fetch the parts that are stored in the farm's process, and send the job's state and output to
    the kernel. The outcome is put into `NodeWorker.results`.

    Args:
        parts: The payload, then the job's pickled arguments and their buffers.

    Raises:
        JobEnded: The job did not return.
    """
    worker = get_worker()
    assert isinstance(worker, NodeWorker)

    def report(update: JobUpdate) -> None:
        worker.log_event(TOPIC, msgspec.to_builtins(update))

    loaded_parts = asyncio.gather(*map(worker.load_part, parts))
    result = await worker.slots.run(call, loaded_parts, report)
    result.parts = [_wrap_if_large(part) for part in result.parts]
    result.files = [(name, _wrap_if_large(data)) for name, data in result.files]
    worker.results[call.name] = {"type": "outcome", **structs.asdict(result)}


def _wrap_if_large(data: bytes) -> Any:
    """Return `data` for a Dask message; wrap large data, so that Dask sends them separately."""
    return data if len(data) <= INLINE_BYTES else to_serialize(data)
