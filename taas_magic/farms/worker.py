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
    CANCELLED,
    DROP_PART,
    GET_PART,
    INLINE_BYTES,
    TOPIC,
    JobCall,
    JobEnded,
    JobOutcome,
    JobUpdate,
    Part,
    SharedBytes,
)
from taas_magic.host.agent_worker import ClosedWorker

if TYPE_CHECKING:
    from taas_magic.farms.node import Slots


class NodeWorker(ClosedWorker):
    """The Dask worker of a node. It runs jobs in the node's slots, and fetches large arguments.

    Attributes:
        slots: The node's slots, in which the jobs run.
        results: Outcome of each job whose Dask task is about to end, by the job's name.
            `_JobEndPlugin` sends the outcome to the kernel when the task has ended.
    """

    def __init__(self, *args: Any, slots: "Slots", **kwargs: Any) -> None:
        super().__init__(*args, plugins=[_JobEndPlugin(self)], **kwargs)
        self.slots = slots
        self.results: dict[str, dict[str, Any]] = {}
        self._loaded_parts: dict[str, asyncio.Future[SharedBytes]] = {}
        self.stream_handlers[DROP_PART] = self._forget_part

    async def load_part(self, part: Part) -> bytes | SharedBytes:
        """Return the content of one part of a job's payload or arguments.

        Args:
            part: The bytes of the part, or the name of a part that is stored in the farm's process.
                The node fetches a stored part once, and keeps it for later jobs until the farm's
                process removes the part.
        """
        if isinstance(part, bytes):
            return part
        if part not in self._loaded_parts:
            self._loaded_parts[part] = asyncio.ensure_future(self._fetch_part(part))
        return await self._loaded_parts[part]

    async def _fetch_part(self, name: str) -> SharedBytes:
        try:
            return await asyncio.to_thread(
                SharedBytes, await getattr(self.scheduler, GET_PART)(name=name)
            )
        except BaseException:
            self._forget_part(name)  # the next job tries again
            raise

    def _forget_part(self, name: str) -> None:
        self._loaded_parts.pop(name, None)


class _JobEndPlugin(WorkerPlugin):
    """Dask plugin that sends results to the kernel and interrupts jobs that were cancelled."""

    name = "taas-changes"

    def __init__(self, worker: NodeWorker) -> None:
        self._worker = worker

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """If a job has returned, send the outcome to the kernel. Interrupt a cancelled job.

        In all cases, remove the job's outcome from `NodeWorker.results`. If the task has not ended
        normally, this outcome is not sent. Dask calls this method when the state of a job's task
        changes.

        Args:
            key: Name of the job.
            finish: Dask's new state of the task.
        """
        result = self._worker.results.pop(key, None)
        if finish == "memory" and result is not None:  # this message also reports the job's end
            self._worker.log_event(TOPIC, result)
        if finish in ("cancelled", "released"):
            self._worker.slots.cancel(str(key))


async def run_job(call: JobCall, parts: list[Part]) -> None:
    """Run a job in a job process of this node. Dask calls this function as the job's task.

    Fetch the parts that are stored in the farm's process, run the job in a slot, and send its state
    and output to the kernel. Store its outcome in `NodeWorker.results`. When the task has ended,
    `_JobEndPlugin` sends this outcome to the kernel. If the job was cancelled before this call, do
    not run the job.

    Args:
        parts: The payload, then the job's pickled arguments and the buffers of this pickle.

    Raises:
        JobEnded: The function raised, its process died, or the job was cancelled.
    """
    worker = get_worker()
    assert isinstance(worker, NodeWorker)

    def report(update: JobUpdate) -> None:
        worker.log_event(TOPIC, msgspec.to_builtins(update))

    # A message of Dask may contain both the job and its cancellation. Then the job has no slot when
    # `_JobEndPlugin` would interrupt it.
    if worker.state.tasks[call.name].state == "cancelled":
        raise JobEnded(JobOutcome(job=call.name, etype=CANCELLED))
    loaded_parts = asyncio.gather(*map(worker.load_part, parts))
    result = await worker.slots.run(call, loaded_parts, report)
    result.parts = [_wrap_if_large(part) for part in result.parts]
    result.files = [(name, _wrap_if_large(data)) for name, data in result.files]
    worker.results[call.name] = {"type": "outcome", **structs.asdict(result)}


def _wrap_if_large(data: bytes) -> Any:
    """Return `data` for a Dask message.

    If `data` is larger than `INLINE_BYTES`, wrap it so that Dask sends it separately, without
    copying it.
    """
    return data if len(data) <= INLINE_BYTES else to_serialize(data)
