"""The pool's keeper, as an agent reaches it. Every connection is the agent's own."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from taas_magic.errors import PoolError
from taas_magic.journal import Event
from taas_magic.remote.lease import Lease
from taas_magic.remote.topics import ANSWER, BEAT, CALL, EVENT, HEARD

if TYPE_CHECKING:
    from distributed import Worker

ASK_TIMEOUT_S = 60.0

Handler = Callable[..., Awaitable[Any]]

logger = logging.getLogger("taas_magic.agent")


class Head:
    """Calls the keeper, answers its calls, sends it events, and beats.

    Args:
        worker: The agent's Dask worker, not started yet.
        lease: The agent's lease.
        calls: What the keeper may call, by name; may be extended later.
    """

    def __init__(self, worker: "Worker", lease: Lease, calls: Mapping[str, Handler]) -> None:
        self._worker, self._lease = worker, lease
        self.calls = dict(calls)
        self._tasks: set[asyncio.Task[None]] = set()
        worker.stream_handlers[CALL] = self._on_call
        worker.stream_handlers[HEARD] = lease.heard

    async def call(self, name: str, **arguments: Any) -> Any:
        """Calls what the keeper has put into the scheduler's handlers; on the agent's event loop.

        Raises:
            PoolError: It could not be reached.
        """
        try:
            return await getattr(self._worker.scheduler, name)(**arguments)
        except OSError as error:
            raise PoolError(f"the pool does not answer {name}: {error}") from error

    def ask(self, name: str, **arguments: Any) -> Any:
        """The same from any other thread; blocks.

        Raises:
            PoolError: It could not be reached, or did not answer in time.
        """
        loop = self._worker.loop.asyncio_loop
        answer = asyncio.run_coroutine_threadsafe(self.call(name, **arguments), loop)
        try:
            return answer.result(ASK_TIMEOUT_S)
        except TimeoutError:
            answer.cancel()
            raise PoolError(f"the pool did not answer {name} in {ASK_TIMEOUT_S:.0f} s") from None

    def emit(self, run_id: str, event: Event) -> None:
        """Sends an event of a run; any thread may call it."""
        message = {"op": EVENT, "run_id": run_id, "event": event}
        self._worker.loop.add_callback(self._worker.batched_send, message)

    async def beat(self) -> None:
        """Beats until it is cancelled."""
        while True:
            self._worker.batched_send({"op": BEAT, "beat": self._lease.beat()})
            await asyncio.sleep(self._lease.beat_s)

    def _on_call(self, id: int, name: str, arguments: Mapping[str, Any]) -> None:
        task = asyncio.ensure_future(self._answer(id, name, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, name: str, arguments: Mapping[str, Any]) -> None:
        try:
            said = {"answer": await self.calls[name](**arguments)}
        except Exception as error:  # the keeper hears of it, and the pool's log has it all
            logger.exception("the call %s failed", name)
            said = {"error": f"{type(error).__name__}: {error}"}
        self._worker.batched_send({"op": ANSWER, "id": number, **said})
