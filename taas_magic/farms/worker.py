"""A node as a Dask worker, and the Dask task that runs a job; no part of node.py: it needs Dask.

The worker unpickles nothing of the user's: what it is given and what it returns are bytes.
"""

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import msgspec
from distributed import Worker, WorkerPlugin, get_worker
from distributed.protocol import to_serialize

from taas_magic.farms.terms import ASK, DROP, RESULT, TOPIC, Blob, JobCall, JobNews, Part, PartName

if TYPE_CHECKING:
    from taas_magic.farms.node import Slots


class NodeWorker(Worker):
    """A node's Dask worker; it is given large parts by the farm's process, and gives it results."""

    def __init__(self, *args: Any, slots: "Slots", **kwargs: Any) -> None:
        super().__init__(*args, plugins=[_Cancels(slots)], **kwargs)
        self.slots = slots
        self._parts: dict[str, Any] = {}
        self._parts_lock = threading.Lock()
        self.stream_handlers[DROP] = self._drop

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Open no port for Dask's web pages: they would ask nobody for a key."""

    async def start_unsafe(self) -> "NodeWorker":
        """Join the farm; called by Dask. Then nobody can connect to this node any more."""
        await super().start_unsafe()
        for listener in self.listeners:
            listener.stop()
        return self

    def part(self, part: Part) -> Part:
        """Return a part as this node has it; blocks while it is on its way, in a job's thread."""
        if not isinstance(part, PartName):
            return part
        name = part.text
        with self._parts_lock:
            if name not in self._parts:
                loop = self.loop.asyncio_loop
                self._parts[name] = asyncio.run_coroutine_threadsafe(self._bring(name), loop)
            coming = self._parts[name]
        return coming.result()

    async def _bring(self, name: str) -> Blob:
        try:
            return await asyncio.to_thread(Blob, await getattr(self.scheduler, ASK)(name=name))
        except BaseException:
            self._drop(name)  # the next job asks again
            raise

    def _drop(self, name: str) -> None:
        self._parts.pop(name, None)


class _Cancels(WorkerPlugin):
    """Interrupts jobs that nobody wants any more."""

    name = "taas-cancels"

    def __init__(self, slots: "Slots") -> None:
        self._slots = slots

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Called by Dask with each change of a task."""
        if finish in ("cancelled", "released"):
            self._slots.cancel(str(key))


def run_job(call: JobCall, payload: Part, arguments: list[Part]) -> None:
    """Run a job in a process of this node, and send its result; the Dask task.

    Raises:
        JobEnded: It did not return.
    """
    worker = get_worker()
    assert isinstance(worker, NodeWorker)

    def say(news: JobNews) -> None:
        worker.log_event(TOPIC, msgspec.to_builtins(news))

    brought = [worker.part(part) for part in (payload, *arguments)]
    result = worker.slots.run(call, brought[0], brought[1:], say)
    # it is with the farm's process before Dask says that the job is done
    said = {"op": RESULT, "key": call.name, "result": to_serialize(result)}
    worker.loop.add_callback(worker.batched_send, said)
