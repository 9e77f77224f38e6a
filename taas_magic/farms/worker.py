"""A node as a Dask worker, and the Dask task that runs a job on it.

The worker unpickles nothing of the user's: what it is given and what it returns are bytes.
"""

import functools
from typing import Any

import msgspec
from distributed import WorkerPlugin, get_worker

from taas_magic.farms.parts import PartsWorker
from taas_magic.farms.slots import Slots
from taas_magic.farms.terms import JobCall, JobNews, Part

TOPIC = "taas-farm"
"""What nodes and the farm's process say, to the kernel."""

LOST_NODES = 3
"""On how many nodes that were lost a job may have been; with one more it fails."""


class NodeWorker(PartsWorker):
    """A node's Dask worker.

    Args:
        slots: Where its jobs run.
    """

    def __init__(self, *args: Any, slots: Slots, **kwargs: Any) -> None:
        super().__init__(*args, plugins=[_Cancels(slots)], **kwargs)
        self.slots = slots


class _Cancels(WorkerPlugin):
    """Interrupts jobs that nobody wants any more."""

    name = "taas-cancels"

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Called by Dask with each change of a task."""
        if finish in ("cancelled", "released"):
            self._slots.cancel(str(key))


def run_job(call: JobCall, payload: Part, arguments: list[Part]) -> None:
    """Run a job in a process of this node, and send its result; the Dask task.

    Args:
        call: The job.
        payload: What its function needs.
        arguments: Parts of its arguments.

    Raises:
        JobEnded: It did not return.
    """
    worker = get_worker()
    assert isinstance(worker, NodeWorker)
    brought = [worker.part(part) for part in (payload, *arguments)]
    say = functools.partial(_say, worker)
    worker.send(call.name, worker.slots.run(call, brought[0], brought[1:], say))


def _say(worker: NodeWorker, news: JobNews) -> None:
    worker.log_event(TOPIC, msgspec.to_builtins(news))
