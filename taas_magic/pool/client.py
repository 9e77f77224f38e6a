"""A pool as a kernel sees it: attach to its process or start it, launch on it, listen to it.

Every method may be called from any thread of the kernel; the Dask client runs a loop of its own.
"""

import asyncio
import concurrent.futures
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from taas_magic.config import PoolConfig
from taas_magic.engines.base import find_engine
from taas_magic.errors import PoolError, StoreError
from taas_magic.messages import (
    EndPool,
    Event,
    GetStatus,
    Halt,
    PoolStatus,
    Request,
    Started,
    WaitForHosts,
    ask,
    cleaned,
    event_of,
)
from taas_magic.plan import HostCapacity
from taas_magic.pool.process import PoolProcess

if TYPE_CHECKING:
    from distributed import Client

    from taas_magic.host.spec import HostSpec


_T = TypeVar("_T")

SILENT_S = 15.0
"""How long after its last beat a pool's process is taken for stopped or hanging."""

ANSWER_S = 20.0
"""How long a pool's process that lives may take to let a kernel in, before another is started."""

END_S = 30.0
"""How long a pool's process that was told to end may take; then it is killed."""

_LOOK_S = 0.25
_PATIENCE_S = 2.0  # beats that wait in this process, which was busy, come in meanwhile


class Wait:
    """A wait for hosts, by which it can be given up.

    Attributes:
        id: What the pool knows it by.
        is_given_up: Whether nobody waits any more.
    """

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.is_given_up = False


class ConnectionBroke(PoolError):
    """The connection to a pool's process broke before it answered: it has ended."""


def disconnect(client: "Client") -> None:
    """Close a Dask client, also one whose scheduler was killed."""
    logger = logging.getLogger("distributed.client")  # such a one says that it connects again
    before, logger.disabled = logger.disabled, True
    try:
        client.close(timeout=2)
    except ValueError:
        pass  # tornado's, where it was connecting again to a scheduler that ended
    finally:
        logger.disabled = before


class Pool:
    """One pool, for one kernel.

    Attributes:
        address: Of its port, as "tls://host:port"; "" before it was open.
    """

    def __init__(self, config: PoolConfig, project: Path) -> None:
        self.config, self.address = config, ""
        self.process = PoolProcess(config, project)
        self._opening = threading.Lock()
        self._client: Client | None = None
        self._is_retired = False
        self._listeners: dict[str, Callable[[Event], None]] = {}
        self._waiting: dict[str, Callable[[list[str]], None]] = {}
        self._heard_at = 0.0

    @property
    def name(self) -> str:
        """What `--pool` calls it."""
        return self.config.name

    def capacity(self) -> HostCapacity:
        """Return what one host offers; takes none."""
        return find_engine(self.config).capacity()

    @property
    def is_ready(self) -> bool:
        """Whether the pool's process answers."""
        return self._client is not None and self.silent_s < SILENT_S and self.process.is_alive()

    @property
    def is_silent(self) -> bool:
        """Whether the pool's process lives, but is not heard any more: it is stopped, or hangs."""
        return self._client is not None and self.silent_s >= SILENT_S and self.process.is_alive()

    @property
    def silent_s(self) -> float:
        """Seconds since the pool's process was heard last, by a kernel that is connected."""
        return time.monotonic() - self._heard_at

    def has_hosts(self, count: int) -> bool:
        """Return whether a launch on so many hosts would start at once."""
        try:
            return self.is_ready and len(self.status().hosts) >= count
        except PoolError:  # it has ended, or stopped, just now: `open` starts another
            return False

    def open(
        self,
        hosts: int = 1,
        on_wait: Callable[[list[str]], None] = lambda lines: None,
        wait: Wait | None = None,
        has_run: bool = True,
    ) -> None:
        """Return when so many hosts are there and can start ranks at once; starts the pool first.

        Args:
            on_wait: Called with what is known of hosts that are awaited, a line each, with each
                beat of the pool's process; in the thread of the Dask client.
            wait: By what another thread may give it up.
            has_run: Whether a run waits for them.

        Raises:
            PoolError: It could not be started, or hosts could not be had.
        """
        wait = wait or Wait()
        try:
            said = self._ready(hosts, on_wait, wait, has_run)
        except ConnectionBroke:  # it was killed: one that is told to end answers first
            if wait.is_given_up:
                raise
            said = Started(is_ending=True)
        if said.is_ending:  # nobody had used it for a while before this kernel came
            self.close()
            self.process.wait_for_end(END_S, self.address)
            said = self._ready(hosts, on_wait, wait, has_run)
        self._require(said)

    def _ready(
        self, hosts: int, on_wait: Callable[[list[str]], None], wait: Wait, has_run: bool
    ) -> Started:
        """Wait for hosts, as `open` does."""
        self.connect(on_wait)
        if wait.is_given_up:
            raise PoolError(f'pool "{self.name}": nobody waits for its hosts any more')
        if self.process.is_ending():
            return Started(is_ending=True)
        self._waiting[wait.id] = on_wait
        try:
            return self.call(WaitForHosts(self._connected().id, wait.id, hosts, has_run))
        finally:
            self._waiting.pop(wait.id, None)

    def give_up(self, wait: Wait) -> None:
        """Give up a wait: its `open`, in another thread, raises PoolError."""
        wait.is_given_up = True
        if self._client is not None:
            self.halt(wait.id, "kill")

    def connect(self, tell: Callable[[list[str]], None] = lambda lines: None) -> None:
        """Return when the pool's process answers; starts it if need be. It takes no host.

        One that lives and does not answer (it is stopped, or hangs) is ended, and another started.

        Raises:
            PoolError: It could not be started; the message ends with the last lines of its log.
        """
        with self._opening:
            until = time.monotonic() + _PATIENCE_S
            while self.is_silent and time.monotonic() < until:
                time.sleep(_LOOK_S)  # this process may have been too busy to hear beats
            if self.is_ready:
                return
            self.close()
            try:
                self._join()
            except OSError:
                tell([f'pool "{self.name}" did not answer: it is ended and started again'])
                self.process.kill()
                self._join()

    def _join(self) -> None:
        """Connect to the pool's process; first start one where none lives.

        Raises:
            PoolError: It could not be started.
            OSError: It lives, but does not answer.
        """
        self.process.begin()
        from distributed import Client, Security  # takes 0.8 s, while the process starts

        from taas_magic.host.spec import POOL_BEAT, topic

        place = self.process.wait_for_place()
        self.address = place.address
        self._client = Client(
            place.address,
            security=Security(**place.security),
            set_as_default=False,
            timeout=ANSWER_S,
        )
        self._heard_at = time.monotonic()
        self._client.subscribe_topic(POOL_BEAT, self._hear)
        self._client.subscribe_topic(topic(self._client.id), self._on_event)

    def _hear(self, beat: tuple[float, Sequence[str]]) -> None:
        self._heard_at = time.monotonic()
        for tell in list(self._waiting.values()):
            tell(cleaned(list(beat[1])))

    def _on_event(self, pair: tuple[float, tuple[str, bytes]]) -> None:
        """Hand an event to who started its run; called in the thread of the Dask client."""
        run_id, line = pair[1]
        listener = self._listeners.get(run_id)
        if listener is not None:
            listener(event_of(line))

    def launch(
        self, spec: "HostSpec", on_event: Callable[[Event], None], said: Sequence[Event] = ()
    ) -> list[str]:
        """Start a run, or its fetchers, and listen to it; returns the names of its hosts.

        Args:
            on_event: Called with every event of the run, in the thread of the Dask client.
            said: What its fetchers have said before.

        Raises:
            PoolError: The hosts could not be had.
            StoreError: Another run writes to the project store.
        """
        from taas_magic.host.spec import Launch

        request = Launch(self._connected().id, spec, said)
        self._listeners[spec.share_id] = on_event
        answer = self.call(request)
        if not answer.hosts:
            self.forget(spec.share_id)
        self._require(answer)
        if answer.store_error:
            raise StoreError(answer.store_error)
        return answer.hosts

    def _require(self, answer: Started) -> None:
        if answer.error:
            raise PoolError(f'pool "{self.name}": {answer.error}')

    def forget(self, run_id: str) -> None:
        """Stop listening to a run."""
        self._listeners.pop(run_id, None)
        if self._is_retired:
            self.retire()

    def halt(self, run_id: str, how: str) -> None:
        """Interrupt (`interrupt`) or end (`kill`) a run, or a wait; does not wait for its end."""
        self.call(Halt(run_id, how))

    def status(self) -> PoolStatus:
        """Return the pool's hosts and what each does."""
        return self.call(GetStatus())

    def down(self) -> None:
        """End the pool: its runs, its hosts, its process, also while that is coming up.

        A process that does not answer is killed; its hosts end with it.
        """
        with self._opening:  # a thread that has just started the process has it by now
            if self.process.is_alive() or not self.process.is_over():
                try:
                    if not self.is_ready:
                        self.close()
                        self._join()
                    self.call(EndPool())
                except (PoolError, OSError):
                    self.process.kill()
        self.close()
        try:
            self.process.wait_for_end(END_S)
        except PoolError:
            self.process.kill()

    def retire(self) -> None:
        """Leave the pool, as soon as no run of this kernel is on it: its settings have changed."""
        self._is_retired = True
        if not self._listeners:
            self.close()

    def is_over(self) -> bool:
        """Return whether this kernel has left it, and waits for no process of it."""
        return self._client is None and self.process.is_over()

    def close(self) -> None:
        """Leave the pool; its process decides what follows."""
        if self._client is not None:
            disconnect(self._client)
            self._client = None
        self.process.is_over()

    def _connected(self) -> "Client":
        if self._client is None:
            raise PoolError(f'pool "{self.name}" is not open')
        return self._client

    def call(self, request: Request[_T]) -> _T:
        """Ask the controller; waits for its answer as long as the pool's process is heard.

        Raises:
            ConnectionBroke: The pool's process has ended.
            PoolError: It does not answer.
        """
        client = self._connected()

        async def answered() -> _T:
            if client.scheduler is None:
                raise OSError("the connection to it broke")
            return await ask(client.scheduler, request)

        answer = asyncio.run_coroutine_threadsafe(answered(), client.loop.asyncio_loop)
        until = time.monotonic() + _PATIENCE_S
        while not concurrent.futures.wait([answer], _LOOK_S).done:
            if self.silent_s > SILENT_S and time.monotonic() > until:
                answer.cancel()
                raise PoolError(f'pool "{self.name}" does not answer: {self.silence()}')
        try:
            return answer.result()
        except OSError as error:
            raise ConnectionBroke(f'pool "{self.name}" does not answer: {error}') from error

    def silence(self) -> str:
        """Return what is known of a pool's process that is not heard, and what to do."""
        return (
            f"its process {self.process.pid() or '?'} has not been heard for "
            f"{self.silent_s:.0f} s; it is stopped or hangs: the next cell replaces it, and "
            f"`%taas down {self.name}` ends it"
        )
