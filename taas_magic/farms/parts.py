"""Large parts of what jobs are given, and results, on their way through the farm's process.

Nobody connects to a node, which may lie behind an SSH server or in a batch system's network: nodes
connect to the farm's process, and all that they need or have made passes through it. A part that
travels by itself is there once while a job needs it, and each node asks for it once.
"""

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from distributed import Scheduler, Worker
from distributed.protocol import to_serialize

from taas_magic.farms import values
from taas_magic.farms.terms import JobResult, Part, PartName
from taas_magic.farms.values import Blob

if TYPE_CHECKING:
    from distributed import Client

PUT, ASK, DROP, RESULT = "taas_put_part", "taas_ask_part", "taas_drop_part", "taas-result"


class Shelf:
    """The parts that the jobs of a kernel need, each once in the farm's process; any thread.

    Args:
        client: The kernel's connection to the farm's process.
    """

    def __init__(self, client: "Client") -> None:
        self._client, self._lock = client, threading.Lock()
        self._numbers = itertools.count()
        self._known: dict[str, PartName] = {}
        self._users: Counter[str] = Counter()

    def part(self, part: Any) -> Part:
        """A part as a job is told it: itself, or its name once it is in the farm's process."""
        if not values.is_large(part):
            return bytes(part)
        mark = values.digest(part)
        with self._lock:
            if mark not in self._known:
                # another name each time: what is dropped may be on its way still
                name = PartName(mark, next(self._numbers))
                self._call(PUT, name=name.text, data=to_serialize(bytes(part))).result()
                self._known[mark] = name
            self._users[mark] += 1
            return self._known[mark]

    def drop(self, parts: Collection[Part]) -> None:
        """A job does not need its parts any more."""
        with self._lock:
            for part in parts:
                if isinstance(part, PartName):
                    self._users[part.mark] -= 1
                    if not self._users[part.mark]:
                        del self._users[part.mark], self._known[part.mark]
                        self._call(DROP, name=part.text)

    def _call(self, op: str, **arguments: Any) -> Any:
        calling = getattr(self._client.scheduler, op)(**arguments)
        return asyncio.run_coroutine_threadsafe(calling, self._client.loop.asyncio_loop)


class PartsScheduler(Scheduler):
    """Dask's scheduler; it keeps parts that jobs need, and results until the kernel has them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parts: dict[str, Any] = {}
        self._results: dict[str, Any] = {}
        self.handlers |= {PUT: self._put, ASK: self._ask, DROP: self._drop}
        self.stream_handlers[RESULT] = self._take

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Opens no port for Dask's web pages: they would ask nobody for a key."""

    async def gather(self, keys: Collection[Any], serializers: Any = None) -> dict[str, Any]:
        """Called by a Dask client for results; Dask's own connects to workers for them."""
        missing = [key for key in keys if key not in self._results]
        if missing:
            return {"status": "error", "keys": missing}
        return {"status": "OK", "data": {key: self._results[key] for key in keys}}

    def forget(self, key: str) -> None:
        """Nobody wants the result of a job any more."""
        self._results.pop(key, None)

    def _take(self, key: str, result: Any, worker: str) -> None:
        if key in self.tasks:
            self._results[key] = result

    def _put(self, name: str, data: Any) -> None:
        self._parts[name] = data

    def _ask(self, name: str) -> Any:
        return self._parts[name]

    def _drop(self, name: str) -> None:
        self._parts.pop(name, None)
        dropped = [{"op": DROP, "name": name}]
        self.send_all({}, dict.fromkeys(self.workers, dropped))


class PartsWorker(Worker):
    """A Dask worker that is given parts by the farm's process, and gives it results."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parts: dict[str, Any] = {}
        self._parts_lock = threading.Lock()
        self.stream_handlers[DROP] = self._drop

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Opens no port for Dask's web pages: they would ask nobody for a key."""

    async def start_unsafe(self) -> "PartsWorker":
        """Called by Dask to join the farm; then nobody can connect to this node any more."""
        await super().start_unsafe()
        for listener in self.listeners:
            listener.stop()
        return self

    def part(self, part: Part) -> Part:
        """A part as this node has it; blocks while it is on its way. Called by jobs' threads."""
        if not isinstance(part, PartName):
            return part
        with self._parts_lock:
            if part.text not in self._parts:
                asking = asyncio.run_coroutine_threadsafe(
                    self._bring(part.text), self.loop.asyncio_loop
                )
                self._parts[part.text] = asking
            coming = self._parts[part.text]
        return coming.result()

    def send(self, key: str, result: JobResult) -> None:
        """Send a result; it is there before Dask says that the job is done."""
        said = {"op": RESULT, "key": key, "result": to_serialize(result)}
        self.loop.add_callback(self.batched_send, said)

    async def _bring(self, name: str) -> Blob:
        try:
            return await asyncio.to_thread(Blob, await getattr(self.scheduler, ASK)(name=name))
        except BaseException:
            self._parts.pop(name, None)  # the next job asks again
            raise

    def _drop(self, name: str) -> None:
        self._parts.pop(name, None)
