"""A pool as a kernel sees it: connect to its process or start it, launch on it, listen to it.

A `Pool` has at most one `PoolConnection`, to one process. Whoever starts something on a process (a
run, a wait for hosts) keeps the connection and asks no other one: when the process ends, the
connection ends, and all that was started on it.

Every method may be called from any thread of the kernel; the Dask client runs a loop of its own.
"""

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from taas_magic.config import PoolConfig
from taas_magic.engines.base import find_engine, log_tail
from taas_magic.errors import PoolError, RunLost, StoreError
from taas_magic.messages import (
    EndPool,
    Enter,
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
from taas_magic.pool.process import PoolFolder, PoolPlace, PoolProcess, place_in
from taas_magic.shared_files import is_free

if TYPE_CHECKING:
    from distributed import Client

    from taas_magic.host.spec import HostSpec


_T = TypeVar("_T")

SILENT_S = 15.0
"""Seconds after its last beat when a pool's process counts as stopped or hanging."""

ANSWER_S = 20.0
"""Seconds for a pool's process that lives to let a kernel in; then another one is started."""

END_S = 30.0
"""Seconds for a pool's process that was told to end; then it is killed."""

NAMED_S = 5.0
"""Seconds that a user waits for a pool's process before it is named."""

_LOOK_S = 0.25
_POLL_S = 0.02
_PATIENCE_S = 2.0  # beats that wait in this process, which was busy, arrive meanwhile
_MAX_PROCESSES = 3  # one that is just ending, one that does not answer, and a new one


class ConnectionEnded(RunLost):
    """The process of a pool has ended, or this kernel has left it: what ran there is gone."""


class Wait:
    """One wait of this kernel for a pool's process and its hosts.

    A wait ends for good when it is given up, and when this kernel ends the pool (`Pool.down`). No
    process is started on behalf of a wait that has ended.

    Attributes:
        id: The pool's process knows the wait by it.
        is_given_up: Whether nobody waits any more.
    """

    def __init__(self, pool: "Pool") -> None:
        self.id = secrets.token_hex(8)
        self.is_given_up = False
        self._pool, self._downs = pool, pool.downs

    @property
    def is_over(self) -> bool:
        """Whether the wait has ended for good."""
        return self.is_given_up or self._pool.downs != self._downs

    def give_up(self) -> None:
        """End the wait: its `Pool.open`, in another thread, soon raises PoolError."""
        self.is_given_up = True

    def check(self) -> None:
        """Raise PoolError if the wait has ended."""
        if self.is_given_up:
            raise PoolError(f'pool "{self._pool.name}": the wait for its hosts was cancelled')
        if self.is_over:
            raise PoolError(f'pool "{self._pool.name}" was ended while this waited for it')


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


def _connect(place: PoolPlace, check: Callable[[], None]) -> "Client":
    """Return a Dask client that is connected to a pool's process.

    Args:
        check: Called again and again meanwhile; raises to stop waiting. Dask itself goes on for
            ANSWER_S, also if the process has ended.

    Raises:
        OSError: The process does not answer.
    """
    from distributed import Client, Security

    made: futures.Future[Client] = futures.Future()

    def make() -> None:
        security = Security(**place.security)
        try:
            client = Client(
                place.address, security=security, set_as_default=False, timeout=ANSWER_S
            )
        except BaseException as error:
            made.set_exception(error)
        else:
            made.set_result(client)

    def drop(late: "futures.Future[Client]") -> None:
        if late.exception() is None:
            disconnect(late.result())

    threading.Thread(target=make, name="taas-connect", daemon=True).start()
    while not futures.wait([made], _LOOK_S).done:
        try:
            check()
        except PoolError:
            made.add_done_callback(drop)
            raise
    return made.result()


def ask_pool(folder: Path, request: Request[_T]) -> _T:
    """Ask the process that keeps the pool of a folder, whoever started it; start none.

    Raises:
        PoolError: There is no such process (any more), or it does not answer.
    """
    place = place_in(folder)
    if place is None or is_free(folder / "lock"):
        raise PoolError(f"the pool's process has ended ({folder})")
    try:
        client = _connect(place, lambda: None)
    except OSError as error:
        raise PoolError(f"the pool's process does not answer: {error} ({folder})") from error
    try:
        asking = ask(client.scheduler, request)
        answer = asyncio.run_coroutine_threadsafe(asking, client.loop.asyncio_loop)
        return answer.result(ANSWER_S)
    except (OSError, futures.TimeoutError) as error:
        raise PoolError(f"the pool's process does not answer: {error} ({folder})") from error
    finally:
        disconnect(client)


class PoolConnection:
    """The connection of this kernel to one process of a pool.

    It ends with that process, or when the kernel leaves it, and never comes back. What was started
    on it (a run, a wait for hosts) ends with it, also if another process takes the pool's place.

    Args:
        client: A Dask client that is connected to the process.
        log: The log of the process.

    Attributes:
        id: The Dask client's name, by which the process knows this kernel.
        config: The pool's settings.
        process: The process at the other end.
        why: Why the connection has ended; "" before.
    """

    def __init__(
        self, config: PoolConfig, process: PoolProcess, client: "Client", log: Path
    ) -> None:
        from taas_magic.host.spec import POOL_BEAT, topic

        self.id, self.config, self.process, self.why = str(client.id), config, process, ""
        self._client, self._log, self._heard_at = client, log, time.monotonic()
        # Dask would connect again by itself, but the process has given up this kernel by then.
        self._comm = client.scheduler_comm
        self._listeners: dict[str, Callable[[Event], None]] = {}
        self._waiting: dict[str, Callable[[list[str]], None]] = {}
        self._ending, self._closes_when_unused = "", False
        self._lock, self._over = threading.Lock(), threading.Event()
        client.subscribe_topic(POOL_BEAT, self._on_beat)
        client.subscribe_topic(topic(self.id), self._on_event)
        self._watcher = threading.Thread(target=self._watch, name="taas-pool", daemon=True)
        self._watcher.start()

    @property
    def address(self) -> str:
        """The port of the process, as "tls://host:port"."""
        return str(self._client.scheduler.address)

    @property
    def silent_s(self) -> float:
        """Seconds since the last beat of the process."""
        return time.monotonic() - self._heard_at

    @property
    def is_over(self) -> bool:
        """Whether the connection has ended."""
        if not self.why and not self.process.is_alive():
            self._end(self._ending or self._how_process_ended())
        return bool(self.why)

    @property
    def is_silent(self) -> bool:
        """Whether the process lives, but has sent no beat for SILENT_S: it is stopped or hangs."""
        return not self.is_over and self.silent_s >= SILENT_S

    @property
    def is_ready(self) -> bool:
        """Whether the process answers."""
        return not self.is_over and self.silent_s < SILENT_S

    def check(self) -> None:
        """Raise ConnectionEnded if the connection has ended."""
        if self.is_over:
            raise ConnectionEnded(self.why)

    def is_let_in(self) -> bool:
        """Return whether the process lets this kernel in; it does not if it has begun to end.

        Raises:
            ConnectionEnded: The process has ended.
            PoolError: It does not answer.
        """
        return self.call(Enter(self.id))

    def wait_for_hosts(
        self, wait: Wait, hosts: int, has_run: bool, on_wait: Callable[[list[str]], None]
    ) -> Started:
        """Return when so many hosts are there, or why they will not be; see `Pool.open`.

        Raises:
            ConnectionEnded: The process has ended.
            PoolError: It does not answer.
        """

        def halt_if_over() -> None:
            if wait.is_over:  # said again until it arrives after the wait itself
                self._send(Halt(wait.id, "kill"))

        self._waiting[wait.id] = on_wait
        try:
            return self.call(WaitForHosts(self.id, wait.id, hosts, has_run), halt_if_over)
        finally:
            self._waiting.pop(wait.id, None)

    def launch(
        self, spec: "HostSpec", on_event: Callable[[Event], None], said: Sequence[Event] = ()
    ) -> list[str]:
        """Start a run, or its fetchers, and listen to it; return the names of its hosts.

        Args:
            on_event: Called with every event of the run, in the thread of the Dask client.
            said: What its fetchers have said before.

        Raises:
            ConnectionEnded: The process has ended.
            PoolError: The hosts could not be had.
            StoreError: Another run writes to the project store.
        """
        from taas_magic.host.spec import Launch

        self._listeners[spec.share_id] = on_event
        answer = Started()
        try:
            answer = self.call(Launch(self.id, spec, said))
        finally:
            if not answer.hosts:
                self.forget(spec.share_id)
        self.require(answer)
        if answer.store_error:
            raise StoreError(answer.store_error)
        return answer.hosts

    def require(self, answer: Started) -> None:
        """Raise PoolError if the pool could not do what it was asked."""
        if answer.error:
            raise PoolError(f'pool "{self.config.name}": {answer.error}')

    def forget(self, run_id: str) -> None:
        """Stop listening to a run."""
        self._listeners.pop(run_id, None)
        if self._closes_when_unused:
            self.close_when_unused()

    def halt(self, run_id: str, how: str) -> None:
        """Interrupt (`interrupt`) or end (`kill`) a run; do not wait for its end."""
        self.call(Halt(run_id, how))

    def status(self) -> PoolStatus:
        """Return the pool's hosts and what each does."""
        return self.call(GetStatus())

    def end_process(self) -> None:
        """End the process, with its runs and its hosts; return when it has ended.

        Raises:
            PoolError: The process does not answer, or does not end in END_S.
        """
        self._ending = f'pool "{self.config.name}" was ended by this kernel'
        with suppress(ConnectionEnded):
            self.call(EndPool())
            self.process.wait_for_end(END_S)

    def close_when_unused(self) -> None:
        """Leave the process as soon as this kernel listens to no run on it."""
        self._closes_when_unused = True
        if not self._listeners:
            self.close()

    def close(self, why: str = "") -> None:
        """Leave the process, which decides what follows; what was started on the connection ends.

        Args:
            why: Is said to whoever still uses the connection.
        """
        self._end(why or self._ending or f'this kernel has left pool "{self.config.name}"')
        self._watcher.join()

    def call(self, request: Request[_T], on_look: Callable[[], None] = lambda: None) -> _T:
        """Ask the process; wait for its answer as long as the process is heard.

        Args:
            on_look: Called every quarter of a second until the answer is there.

        Raises:
            ConnectionEnded: The process has ended, or this kernel has left it.
            PoolError: The process does not answer.
        """
        answer = self._send(request)
        until = time.monotonic() + _PATIENCE_S
        while not futures.wait([answer], _LOOK_S).done:
            if self.is_over:
                answer.cancel()
            self.check()
            if self.silent_s > SILENT_S and time.monotonic() > until:
                answer.cancel()
                raise PoolError(f'pool "{self.config.name}" does not answer: {self.silence()}')
            on_look()
        try:
            return answer.result()
        except (OSError, futures.CancelledError) as error:
            # A process that is just ending closes its connections first.
            self._over.wait(_PATIENCE_S + 2 * _LOOK_S)
            self._end(self._broken())
            raise ConnectionEnded(self.why) from error

    def silence(self) -> str:
        """Return what is known of a process that lives and is not heard, and what to do."""
        return (
            f"its process {self.process.pid} has not been heard for {self.silent_s:.0f} s; it is "
            f"stopped or hangs: the next cell replaces it, and `%taas down {self.config.name}` "
            f"ends it"
        )

    def _send(self, request: Request[_T]) -> "futures.Future[_T]":
        self.check()
        client = self._client

        async def answered() -> _T:
            if client.scheduler is None:
                raise OSError("the connection broke")
            return await ask(client.scheduler, request)

        asking = answered()
        try:
            return asyncio.run_coroutine_threadsafe(asking, client.loop.asyncio_loop)
        except RuntimeError as error:  # its loop has just been closed
            asking.close()
            raise ConnectionEnded(self.why) from error

    def _on_beat(self, beat: tuple[float, Sequence[str]]) -> None:
        self._heard_at = time.monotonic()
        for on_wait in list(self._waiting.values()):
            on_wait(cleaned(list(beat[1])))

    def _on_event(self, pair: tuple[float, tuple[str, bytes]]) -> None:
        """Pass an event to the listener of its run; called in the thread of the Dask client."""
        run_id, line = pair[1]
        listener = self._listeners.get(run_id)
        if listener is not None:
            listener(event_of(line))

    def _watch(self) -> None:
        """Wait for the end of the connection, in a thread; then close the Dask client."""
        while not self.is_over and not self._over.wait(_LOOK_S):
            if self._client.status != "running" or self._client.scheduler_comm is not self._comm:
                with suppress(PoolError):  # a process that ends closes its connections first
                    self.process.wait_for_end(_PATIENCE_S)
                if not self.is_over:
                    self._end(self._broken())
        disconnect(self._client)

    def _end(self, why: str) -> None:
        """End the connection for good; the first reason stays."""
        with self._lock:
            self.why = self.why or why
        self._over.set()

    def _how_process_ended(self) -> str:
        said = (
            f'pool "{self.config.name}": its process {self.process.pid} {self.process.state()}. '
            f"What ran on it is gone; run the cell again to start another process."
        )
        # the log of one that was killed says nothing of it, but what its hosts said afterwards
        has_failed = (self.process.exit_code or 0) > 0
        log = f"Its log ends with:\n{log_tail(self._log)}" if has_failed else f"Log: {self._log}"
        return f"{said} {log}"

    def _broken(self) -> str:
        return (
            f'pool "{self.config.name}": the connection to its process {self.process.pid} broke, '
            f"and the process ends what ran for this kernel; run the cell again. Log: {self._log}"
        )


class Pool:
    """One pool, for one kernel: its settings, and the connection to its process, if there is one.

    Attributes:
        downs: How often this kernel has ended the pool.
    """

    def __init__(self, config: PoolConfig, project: Path) -> None:
        self.config, self.downs = config, 0
        self.folder = PoolFolder(config, project)
        self._joining = threading.Lock()
        self._connection: PoolConnection | None = None
        self._is_retired = False

    @property
    def name(self) -> str:
        """What `--pool` calls it."""
        return self.config.name

    def capacity(self) -> HostCapacity:
        """Return what one host offers; takes none."""
        return find_engine(self.config).capacity()

    @property
    def connection(self) -> PoolConnection | None:
        """The connection to the pool's process; None if there is none that lives."""
        found = self._connection
        return None if found is None or found.is_over else found

    @property
    def is_ready(self) -> bool:
        """Whether this kernel is connected to a process that answers."""
        return (found := self.connection) is not None and found.is_ready

    @property
    def is_silent(self) -> bool:
        """Whether this kernel is connected to a process that is stopped or hangs."""
        return (found := self.connection) is not None and found.is_silent

    def connection_with(self, hosts: int) -> PoolConnection | None:
        """Return the connection if a launch on so many hosts would start at once on it."""
        found = self.connection
        with suppress(PoolError):  # the process has just ended, or stopped
            if found is not None and found.is_ready and len(found.status().hosts) >= hosts:
                return found
        return None

    def open(
        self,
        hosts: int = 1,
        on_wait: Callable[[list[str]], None] = lambda lines: None,
        wait: Wait | None = None,
        has_run: bool = True,
    ) -> PoolConnection:
        """Wait until so many hosts can start ranks at once; start the pool's process if need be.

        Args:
            on_wait: Called with what is known of hosts that are awaited, a line each, with each
                beat of the pool's process; in the thread of the Dask client.
            wait: Ends this call when it is given up.
            has_run: Whether a run waits for them.

        Returns:
            The connection to the process that has the hosts.

        Raises:
            ConnectionEnded: The process that was to get the hosts has ended.
            PoolError: It could not be started, or hosts could not be had.
        """
        wait = wait or Wait(self)
        connection = self.connect(on_wait, wait)
        answer = connection.wait_for_hosts(wait, hosts, has_run, on_wait)
        if answer.is_ending:  # another kernel has ended it before this one asked
            on_wait([self._waits_for(connection.process, "to end")])
            connection.process.wait_for_end(END_S)
            connection = self.connect(on_wait, wait)
            answer = connection.wait_for_hosts(wait, hosts, has_run, on_wait)
        connection.require(answer)
        return connection

    def connect(
        self,
        tell: Callable[[list[str]], None] = lambda lines: None,
        wait: Wait | None = None,
    ) -> PoolConnection:
        """Connect to the pool's process; start one if none lives. No host is taken.

        One that lives and does not answer (it is stopped, or hangs) is ended, and another started.

        Args:
            tell: Called with lines for the user who waits.
            wait: Ends this call when it is given up.

        Raises:
            PoolError: It could not be started; the message ends with the last lines of its log.
        """
        wait = wait or Wait(self)
        with self._joining:
            found = self._ready_connection() or self._join(wait, tell, starts=True)
            assert found is not None
            wait.check()
            return found

    def join(self) -> PoolConnection | None:
        """Connect to the pool's process if one lives; start none.

        Raises:
            PoolError: It is of another version, or does not answer.
        """
        with self._joining:
            return self._ready_connection() or self._join(Wait(self), lambda lines: None)

    def _ready_connection(self) -> PoolConnection | None:
        """Return the connection if the process answers; leave one that is silent."""
        if (found := self.connection) is None:
            return None
        until = time.monotonic() + _PATIENCE_S
        while found.is_silent and time.monotonic() < until:
            time.sleep(_LOOK_S)  # this process may have been too busy to hear beats
        if found.is_ready:
            return found
        found.close(f'pool "{self.name}" did not answer: {found.silence()}')
        return None

    def _join(
        self, wait: Wait, tell: Callable[[list[str]], None], starts: bool = False
    ) -> PoolConnection | None:
        """Connect to the pool's process; `_joining` is held.

        Nothing of this kernel depends on a process before that has let the kernel in. So one that
        ends before is no failure, unless this kernel started it.

        Args:
            starts: Whether to start a process if none lives; else None is returned then.

        Raises:
            PoolError: The process did not start, or nobody waits any more.
        """
        for _ in range(_MAX_PROCESSES):
            process = self._find(wait, starts)
            if process is None:
                return None
            try:
                found = self._enter(process, wait, tell)
            except OSError:  # it is stopped, or hangs
                tell([f'pool "{self.name}" did not answer: it is ended and started again'])
                process.kill()
                continue
            if found is not None:
                self._connection = found
                return found
        raise self._error("did not start: its processes end, or do not answer")

    def _enter(
        self, process: PoolProcess, wait: Wait, tell: Callable[[list[str]], None]
    ) -> PoolConnection | None:
        """Return the connection to a process that has let this kernel in.

        Returns:
            None if the process has ended before, and did not fail.

        Raises:
            OSError: The process lives, but does not answer.
            PoolError: The process, which this kernel started, has failed. Or nobody waits any more.
        """
        began, is_told = time.monotonic(), False

        def check() -> None:
            nonlocal is_told
            wait.check()
            if not process.is_alive():
                raise ConnectionEnded(f"process {process.pid} {process.state()}")
            if not is_told and time.monotonic() - began > NAMED_S:
                is_told = True
                tell([self._waits_for(process, "to answer")])

        try:
            client = _connect(self._place_of(process, check), check)
            with ExitStack() as stack:
                found = PoolConnection(self.config, process, client, self.folder.log)
                stack.callback(found.close)
                if found.is_let_in():
                    stack.pop_all()
                    return found
        except ConnectionEnded:
            pass
        except OSError:
            if self.folder.place(process) is not None and process.is_alive():
                raise
        if process.is_alive():  # it has begun to end
            tell([self._waits_for(process, "to end")])
        process.wait_for_end(END_S)
        if process.exit_code:
            raise self._error(f"did not start: its process {process.pid} {process.state()}")
        return None

    def _find(self, wait: Wait, starts: bool) -> PoolProcess | None:
        """Return the pool's process; start one, or return None, if there is none."""
        deadline = time.monotonic() + END_S
        while True:
            wait.check()
            process = self.folder.find() or (self.folder.start() if starts else None)
            if process is not None or not (starts or self.folder.is_locked):
                return process
            if time.monotonic() > deadline:  # another kernel was stopped while it started one
                raise self._error(f"did not start: {self.folder.path}/lock is held by no process")
            time.sleep(_POLL_S)

    def _place_of(self, process: PoolProcess, check: Callable[[], None]) -> PoolPlace:
        """Return how to connect to a process as soon as it listens.

        Raises:
            PoolError: The process does not listen in time, and is ended. Or `check` raised it.
        """
        import distributed  # noqa: F401  # takes 0.8 s, while the process starts

        deadline = time.monotonic() + self.config.start_timeout_s
        while (place := self.folder.place(process)) is None:
            check()
            if time.monotonic() > deadline:
                error = self._error(f"did not start within {self.config.start_timeout_s:g} s")
                process.kill()
                raise error
            time.sleep(_POLL_S)
        return place

    def _waits_for(self, process: PoolProcess, what: str) -> str:
        return f'pool "{self.name}": waits for its process {process.pid} {what} ({self.folder.log})'

    def _error(self, what: str) -> PoolError:
        return PoolError(f'pool "{self.name}" {what}. Its log:\n{log_tail(self.folder.log)}')

    def down(self) -> None:
        """End the pool: its runs, its hosts, its process, also one that is just starting.

        All waits of this kernel for the pool end. A process that does not answer is killed; its
        hosts end with it.
        """
        self.downs += 1
        with self._joining:  # a thread that has started the process leaves it now
            try:
                found = self._ready_connection() or self._join(Wait(self), lambda lines: None)
                if found is not None:
                    found.end_process()
            except PoolError:
                if (process := self.folder.find()) is not None:
                    process.kill()
            self.close()

    def retire(self) -> None:
        """Leave the pool as soon as no run of this kernel is on it: its settings have changed."""
        self._is_retired = True
        if (found := self.connection) is not None:
            found.close_when_unused()

    def is_over(self) -> bool:
        """Return whether this kernel has left it, and waits for no process of it."""
        return self.connection is None and not self.folder.has_children()

    def close(self) -> None:
        """Leave the pool; its process decides what follows."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self.folder.has_children()
