"""The kernel's side of a pool: start the pool's process, connect to it, launch runs.

A run, or a wait for hosts, belongs to one connection (`PoolConnection`). It ends when this
connection ends, unless it is a detached run. All methods may be called from any thread of the
kernel. The Dask client runs an event loop in a thread of its own.
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
from taas_magic.engines.base import log_tail, make_engine
from taas_magic.errors import PoolError, RunLost, StoreError
from taas_magic.host.activity import IdleTimer
from taas_magic.messages import (
    EndPool,
    Event,
    GetStatus,
    Halt,
    PoolStatus,
    RegisterKernel,
    Request,
    SessionState,
    StartResponse,
    TakeOverSession,
    WaitForHosts,
    cleaned,
    decode_event,
    send_request,
)
from taas_magic.plan import HostCapacity
from taas_magic.pool.address import PoolAddress, read_address
from taas_magic.pool.process import PoolFolder, PoolProcess
from taas_magic.shared_files import is_unlocked

if TYPE_CHECKING:
    from distributed import Client

    from taas_magic.host.spec import LaunchFetchers, LaunchRanks, RunSpec


_T = TypeVar("_T")

SILENT_S = 15.0
"""Seconds without a beat after which a pool's process counts as stopped or hanging."""

ANSWER_S = 20.0
"""Maximum seconds in which a running process of a pool must accept a kernel.

After that, the kernel kills the process and starts another process.
"""

END_S = 30.0
"""Maximum seconds for a pool's process to end by itself.

After this time, `Pool.down` kills the process. All other functions that wait for the end of the
process raise PoolError.
"""

REPORT_WAIT_AFTER_S = 5.0
"""Seconds that a kernel waits for a pool's process before it shows a message to the user."""

_CHECK_S = 0.25
_POLL_S = 0.02
_PATIENCE_S = 2.0  # a kernel that was busy needs a moment to read beats that have arrived
_MAX_PROCESSES = 3  # an ending process, a process that does not respond, and a new process


class ConnectionEnded(RunLost):
    """Error of a call on a `PoolConnection` that has ended.

    All runs that were started on this connection are lost, except detached runs.
    """


class PoolWait:
    """A wait of this kernel for a pool's process and hosts. Another thread can cancel the wait.

    If the wait is cancelled, or if this kernel ends the pool, the waiting method of `Pool` raises
    PoolError and starts no further process. The pool's process identifies the wait by the attribute
    `id`.
    """

    def __init__(self, pool: "Pool") -> None:
        self.id = secrets.token_hex(8)
        self.is_cancelled = False
        self._pool, self._end_count = pool, pool.end_count

    @property
    def is_over(self) -> bool:
        """Whether the wait was cancelled, or this kernel ended the pool during the wait."""
        return self.is_cancelled or self._pool.end_count != self._end_count

    def cancel(self) -> None:
        """Cancel the wait. `Pool.open`, which waits in another thread, soon raises PoolError."""
        self.is_cancelled = True

    def raise_if_over(self) -> None:
        """Raise PoolError if the wait was cancelled, or if this kernel ended the pool meanwhile."""
        if self.is_cancelled:
            raise PoolError(f'pool "{self._pool.name}": the wait for its hosts was cancelled')
        if self.is_over:
            raise PoolError(f'pool "{self._pool.name}": this kernel ended it during the wait')


def disconnect(client: "Client") -> None:
    """Close a Dask client, even if its scheduler was killed.

    Wait at most 2 s for the client. Write no log messages of Dask about the lost connection. If the
    client is just reconnecting, Dask raises ValueError: then only mark the client as closed.
    """
    # If the scheduler was killed, the client would log that it reconnects. So disable this log.
    logger = logging.getLogger("distributed.client")
    before, logger.disabled = logger.disabled, True
    try:
        client.close(timeout=2)
    except ValueError:
        # tornado raises this error if the client was reconnecting to a scheduler that has ended.
        # The next attempt to close the client would fail, too. Without the status "closed",
        # `Client.__del__` would make this attempt.
        client.status = "closed"
    finally:
        logger.disabled = before


def _connect(pool_address: PoolAddress, check: Callable[[], None]) -> "Client":
    """Return a Dask client that is connected to a pool's process.

    A thread creates the client. Meanwhile, this call waits, and calls `check` every `_CHECK_S`.

    Args:
        check: Function that raises PoolError to end the wait, for example because the process has
            ended. If it raises, a client that connects later is closed.

    Raises:
        OSError: The process does not respond within `ANSWER_S`.
        PoolError: `check` raised this error.
    """
    from distributed import Client, Security

    made: futures.Future[Client] = futures.Future()

    def make() -> None:
        security = Security(**pool_address.security)
        try:
            client = Client(
                pool_address.address, security=security, set_as_default=False, timeout=ANSWER_S
            )
        except BaseException as error:
            made.set_exception(error)
        else:
            made.set_result(client)

    def drop(late: "futures.Future[Client]") -> None:
        if late.exception() is None:
            disconnect(late.result())

    threading.Thread(target=make, name="taas-connect", daemon=True).start()
    while not futures.wait([made], _CHECK_S).done:
        try:
            check()
        except PoolError:
            made.add_done_callback(drop)
            raise
    return made.result()


def ask_pool(folder: Path, request: Request[_T]) -> _T:
    """Send a request to the running process of a pool's folder and return the response.

    This call opens a connection for the request, and closes the connection afterwards.

    Args:
        folder: The pool's folder. Its `pool.json` has the address of the process. The process runs
            if it has locked the file `lock` in this folder.

    Raises:
        PoolError: The folder's pool has no running process. Or the process did not accept the
            connection, or did not respond, within `ANSWER_S`.
    """
    pool_address = read_address(folder)
    if pool_address is None or is_unlocked(folder / "lock"):
        raise PoolError(f"the pool's process has ended ({folder})")
    who = f"the pool's process on machine {pool_address.machine}"
    try:
        client = _connect(pool_address, lambda: None)
    except OSError as error:
        raise PoolError(f"{who} does not answer: {error} ({folder})") from error
    try:
        asking = send_request(client.scheduler, request)
        answer = asyncio.run_coroutine_threadsafe(asking, client.loop.asyncio_loop)
        return answer.result(ANSWER_S)
    except (OSError, futures.TimeoutError) as error:
        raise PoolError(f"{who} does not answer: {error} ({folder})") from error
    finally:
        disconnect(client)


class PoolConnection:
    """The connection of this kernel to one process of a pool.

    The connection ends when the process ends or when the kernel closes the connection. An ended
    connection is never restored. Runs and waits for hosts that were started on the connection end
    with it, except detached runs. Each method that sends a request raises ConnectionEnded if the
    connection has ended, and PoolError if the process sends no beats.

    Attributes:
        id: The Dask client's id, by which the process identifies this kernel.
        why: The reason why the connection has ended; "" while the connection is open.
    """

    def __init__(
        self, config: PoolConfig, process: PoolProcess, client: "Client", log: Path
    ) -> None:
        from taas_magic.host.spec import POOL_BEAT, topic

        self.id, self.config, self.process, self.why = str(client.id), config, process, ""
        self._client, self._log, self._last_beat_at = client, log, time.monotonic()
        # Dask reconnects by itself, but by then the process has dropped this kernel. So `_watch`
        # compares the client's stream with this one, and ends a connection that was restored.
        self._comm = client.scheduler_comm
        self._listeners: dict[str, Callable[[Event], None]] = {}
        self._waiting: dict[str, Callable[[list[str]], None]] = {}
        self._ending, self._closes_when_unused = "", False
        self._lock, self._ended = threading.Lock(), threading.Event()
        client.subscribe_topic(POOL_BEAT, self._on_beat)
        client.subscribe_topic(topic(self.id), self._on_event)
        self._watcher = threading.Thread(target=self._watch, name="taas-pool", daemon=True)
        self._watcher.start()

    @property
    def address(self) -> str:
        """The address of the pool's process, as "tls://host:port"."""
        return str(self._client.scheduler.address)

    @property
    def silent_s(self) -> float:
        """Seconds since the last beat of the pool's process."""
        return time.monotonic() - self._last_beat_at

    @property
    def has_ended(self) -> bool:
        """Whether this connection has ended, for example because the pool's process has ended.

        Reading this property also checks whether the process is alive. If the process has ended,
        mark the connection as ended, and store the reason in `why`.
        """
        if not self.why and not self.process.is_alive():
            self._mark_ended(self._ending or self._how_process_ended())
        return bool(self.why)

    @property
    def is_silent(self) -> bool:
        """Whether the pool's process is alive, but has sent no beat for `SILENT_S`."""
        return not self.has_ended and self.silent_s >= SILENT_S

    @property
    def is_ready(self) -> bool:
        """Whether this connection is open and the pool's process sent a beat within `SILENT_S`."""
        return not self.has_ended and self.silent_s < SILENT_S

    def raise_if_ended(self) -> None:
        """Raise ConnectionEnded if this connection to the pool's process has ended."""
        if self.has_ended:
            raise ConnectionEnded(self.why)

    def register(self) -> bool:
        """Ask the pool's process to accept this kernel; return whether the process accepts it.

        A process that has begun to end accepts no kernel.
        """
        return self.call(RegisterKernel(self.id))

    def wait_for_hosts(
        self, wait: PoolWait, hosts: int, has_run: bool, on_wait: Callable[[list[str]], None]
    ) -> StartResponse:
        """Ask the pool's process for `hosts` hosts, and wait until they can start ranks.

        If `wait` is cancelled, or this kernel ends the pool, this call asks the process repeatedly
        to cancel the wait (`Halt`). One `Halt` is not enough, because a `Halt` that arrives before
        the wait has no effect.

        Args:
            wait: Object by which another thread can cancel this call.
            has_run: Whether a run is to start on the hosts.
            on_wait: Called at each beat of the process with lines about hosts that are not ready.

        Returns:
            The response. Its field `error` is set if the hosts are not available, or if the wait
            was cancelled.

        Raises:
            ConnectionEnded: The connection has ended.
            PoolError: The process sends no beats.
        """

        def halt_if_over() -> None:
            if wait.is_over:  # repeated, since a `Halt` that arrives before the wait has no effect
                self._send(Halt(wait.id, "kill"))

        self._waiting[wait.id] = on_wait
        try:
            return self.call(WaitForHosts(self.id, wait.id, hosts, has_run), halt_if_over)
        finally:
            self._waiting.pop(wait.id, None)

    def launch(
        self,
        run: "RunSpec",
        on_event: Callable[[Event], None],
        fetcher_events: Sequence[Event] = (),
    ) -> list[str]:
        """Start a run's ranks, and pass the run's events to `on_event`.

        Args:
            on_event: Called with every event of the run, in the thread of the Dask client. It may
                be called before this method returns. After a failed start, it is no longer called.
            fetcher_events: Events that the run's fetchers have already sent to this kernel. From
                these events, the ranks learn the addresses of the fetchers.

        Returns:
            The names of the hosts on which the ranks start.

        Raises:
            PoolError: The hosts are not available, or the start failed for another reason.
            StoreError: Another run writes to the project store.
        """
        from taas_magic.host.spec import LaunchRanks

        return self._launch(LaunchRanks(self.id, run, fetcher_events), run.plan.run_id, on_event)

    def launch_fetchers(self, run: "RunSpec", on_event: Callable[[Event], None]) -> list[str]:
        """Start a run's fetchers, and pass their events to `on_event`.

        Args:
            on_event: Called with every event of the fetchers, in the thread of the Dask client.

        Returns:
            The names of the hosts on which the fetchers start.

        Raises:
            PoolError: The hosts are not available.
        """
        from taas_magic.host.spec import LaunchFetchers, fetchers_share_id

        return self._launch(
            LaunchFetchers(self.id, run), fetchers_share_id(run.plan.run_id), on_event
        )

    def _launch(
        self,
        request: "LaunchRanks | LaunchFetchers",
        run_id: str,
        on_event: Callable[[Event], None],
    ) -> list[str]:
        """Send a launch request, and return the names of the hosts.

        Pass the run's events to `on_event` from now on. If the launch fails, stop passing them.

        Raises:
            PoolError: The response has an error about hosts.
            StoreError: The response has an error about the project store.
        """
        self._listeners[run_id] = on_event
        answer = StartResponse()
        try:
            answer = self.call(request)
        finally:
            if not answer.hosts:
                self.stop_events(run_id)
        self.raise_if_failed(answer)
        if answer.store_error:
            raise StoreError(answer.store_error)
        return answer.hosts

    def take_over_session(self, run_id: str, on_event: Callable[[Event], None]) -> SessionState:
        """Make this kernel the owner of a detached session, and receive the session's events.

        `on_event` may be called even before this method returns. If this method raises PoolError,
        `on_event` is not called any more.

        Returns:
            The session's state, such as the number of its cells and the running cell.

        Raises:
            PoolError: The session has ended, is ending, or is not detached. Or the pool's process
                does not respond.
        """
        self._listeners[run_id] = on_event
        error = "the pool's process did not answer"
        try:
            state = self.call(TakeOverSession(self.id, run_id))
            error = state.error
        finally:
            if error:
                self.stop_events(run_id)
        if error:
            raise PoolError(error)
        return state

    def raise_if_failed(self, answer: StartResponse) -> None:
        """Raise PoolError if the field `error` of a response of the pool's process is set.

        This method does not check the field `store_error`.
        """
        if answer.error:
            raise PoolError(f'pool "{self.config.name}": {answer.error}')

    def stop_events(self, run_id: str) -> None:
        """Stop passing events of a run to the run's `on_event`.

        If `close_when_unused` was called and this was the last run, close the connection.
        """
        self._listeners.pop(run_id, None)
        if self._closes_when_unused:
            self.close_when_unused()

    def halt(self, run_id: str, how: str) -> None:
        """Ask the pool's process to interrupt or kill a run's ranks or fetchers.

        This method does not wait for the end of ranks. It waits up to `runs.FETCHERS_END_S` for the
        end of fetchers.

        Args:
            run_id: Id of the run or of the run's fetchers.
            how: "interrupt" or "kill". Both kill fetchers.
        """
        self.call(Halt(run_id, how))

    def status(self) -> PoolStatus:
        """Return the pool's status, such as its hosts and their runs."""
        return self.call(GetStatus())

    def end_process(self) -> None:
        """Make the pool's process end its runs, its hosts and itself; wait until it has ended.

        If the connection has ended, or ends before the process responds, return without an error.

        Raises:
            PoolError: The process sends no beats, or does not end within `END_S`.
        """
        self._ending = f'this kernel ended pool "{self.config.name}"'
        with suppress(ConnectionEnded):
            self.call(EndPool())
            self.process.wait_for_end(END_S)

    def close_when_unused(self) -> None:
        """Close the connection as soon as no run of this kernel uses it. Do not wait for this.

        If a run uses the connection now, the end of the last such run closes the connection
        (`stop_events`). This end may be reported in the thread of the Dask client, which must not
        wait for its own end.
        """
        self._closes_when_unused = True
        if not self._listeners:
            self._leave()

    def close(self, why: str = "") -> None:
        """Close the connection, and wait until the Dask client is closed.

        Runs and waits on the connection end, except detached runs. The pool's process may continue.

        Args:
            why: Message of the ConnectionEnded that later calls on this connection raise. The
                default says that this kernel has left the pool.
        """
        self._leave(why)
        self._watcher.join()

    def _leave(self, why: str = "") -> None:
        """Mark the connection as ended by this kernel. `_watch` then closes the Dask client."""
        self._mark_ended(why or self._ending or f'this kernel has left pool "{self.config.name}"')

    def call(self, request: Request[_T], on_poll: Callable[[], None] = lambda: None) -> _T:
        """Send a request to the pool's process and return the response.

        While the process sends beats, this method waits for the response without a time limit. If
        the connection breaks, wait up to 2.5 s for the reason, and mark the connection as ended.

        Args:
            on_poll: Function called every 0.25 s until the response arrives.

        Raises:
            ConnectionEnded: The process has ended, the connection broke, or this kernel has closed
                the connection.
            PoolError: The process has sent no beat for `SILENT_S`, and this call has waited for
                `_PATIENCE_S`.
        """
        answer = self._send(request)
        until = time.monotonic() + _PATIENCE_S
        while not futures.wait([answer], _CHECK_S).done:
            if self.has_ended:
                answer.cancel()
            self.raise_if_ended()
            if self.silent_s > SILENT_S and time.monotonic() > until:
                answer.cancel()
                raise PoolError(
                    f'pool "{self.config.name}" does not answer: {self.silence_message()}'
                )
            on_poll()
        try:
            return answer.result()
        except (OSError, futures.CancelledError) as error:
            # A process that is ending closes its connections before it exits. So wait a moment:
            # `_watch` may find that the process has exited, which is the better reason.
            self._ended.wait(_PATIENCE_S + 2 * _CHECK_S)
            self._mark_ended(self._broken_message())
            raise ConnectionEnded(self.why) from error

    def silence_message(self) -> str:
        """Return a message for the user: the pool's process runs, but sends no beats."""
        return (
            f"its process {self.process.pid} has been silent for {self.silent_s:.0f} s; it is "
            f"stopped or hangs: the next cell replaces it, and `%taas down {self.config.name}` "
            f"ends it"
        )

    def _send(self, request: Request[_T]) -> "futures.Future[_T]":
        """Send a request in the event loop of the Dask client; return a future of the response.

        Raises:
            ConnectionEnded: The connection has ended.
        """
        self.raise_if_ended()
        client = self._client

        async def answered() -> _T:
            if client.scheduler is None:
                raise OSError("the connection broke")
            return await send_request(client.scheduler, request)

        asking = answered()
        try:
            return asyncio.run_coroutine_threadsafe(asking, client.loop.asyncio_loop)
        except RuntimeError as error:  # the client's loop has just been closed
            asking.close()
            raise ConnectionEnded(self.why) from error

    def _on_beat(self, beat: tuple[float, Sequence[str]]) -> None:
        self._last_beat_at = time.monotonic()
        for on_wait in list(self._waiting.values()):
            on_wait(cleaned(list(beat[1])))

    def _on_event(self, pair: tuple[float, tuple[str, bytes]]) -> None:
        """Pass an event to the `on_event` of the event's run, if there is one.

        Dask calls this method in the thread of the Dask client.
        """
        run_id, line = pair[1]
        listener = self._listeners.get(run_id)
        if listener is not None:
            listener(decode_event(line))

    def _watch(self) -> None:
        """Wait until the connection ends, then close the Dask client. Runs in a thread of its own.

        Meanwhile, check every `_CHECK_S` whether the process has ended or the Dask client has lost
        its connection. If so, mark this connection as ended, with the reason. A process closes its
        connections before it exits. So if the connection is lost, first wait up to `_PATIENCE_S`
        for the end of the process, which is then the reason.
        """
        while not self.has_ended and not self._ended.wait(_CHECK_S):
            if self._client.status != "running" or self._client.scheduler_comm is not self._comm:
                with suppress(PoolError):  # a process closes its connections before it exits
                    self.process.wait_for_end(_PATIENCE_S)
                if not self.has_ended:
                    self._mark_ended(self._broken_message())
        disconnect(self._client)

    def _mark_ended(self, why: str) -> None:
        """Mark the connection as ended, so that `_watch` stops.

        Store the reason `why`, unless an earlier reason is stored.
        """
        with self._lock:
            self.why = self.why or why
        self._ended.set()

    def _how_process_ended(self) -> str:
        """Return a message for the user: how the process ended, and what to do.

        If the process failed, the message has the end of its log, else only the log's path.
        """
        text = (
            f'pool "{self.config.name}": its process {self.process.pid} '
            f"{self.process.state_text()}. "
            f"Its runs have ended; run the cell again to start another process."
        )
        # If the process was killed, its log ends with its hosts' later messages, not with a cause.
        has_failed = (self.process.exit_code or 0) > 0
        log = f"Its log ends with:\n{log_tail(self._log)}" if has_failed else f"Log: {self._log}"
        return f"{text} {log}"

    def _broken_message(self) -> str:
        return (
            f'pool "{self.config.name}": the connection to its process {self.process.pid} broke, '
            f"so the process ends this kernel's runs; run the cell again. Log: {self._log}"
        )


class Pool:
    """One pool, as used by one kernel: its settings and the connection to its process.

    Attributes:
        end_count: Number of times that this kernel has ended the pool.
    """

    def __init__(self, config: PoolConfig, project: Path) -> None:
        self.config, self.end_count = config, 0
        self.folder = PoolFolder(config, project)
        self._joining = threading.Lock()
        self._connection: PoolConnection | None = None

    @property
    def name(self) -> str:
        """The pool's name, as given to `--pool`."""
        return self.config.name

    def capacity(self) -> HostCapacity:
        """Return the numbers of GPUs and cores of one host of the pool. Requests no host."""
        return make_engine(self.config).capacity()

    def notes(self) -> tuple[str, ...]:
        """Return lines about the pool's settings for the status header of each run."""
        return make_engine(self.config).notes()

    @property
    def connection(self) -> PoolConnection | None:
        """The open connection to the pool's process; None if there is none."""
        found = self._connection
        return None if found is None or found.has_ended else found

    def connection_with(self, hosts: int) -> PoolConnection | None:
        """Return the open connection to the pool's process if at least `hosts` hosts are ready.

        A host is ready when it can start ranks. Return None if too few hosts are ready, if there is
        no connection, or if the process sends no beats or has begun to end. Start nothing.
        """
        found = self.connection
        with suppress(PoolError):  # the process has just ended or been stopped
            if found is not None and found.is_ready and found.register():
                return found if len(found.status().hosts) >= hosts else None
        return None

    def open(
        self,
        hosts: int = 1,
        on_wait: Callable[[list[str]], None] = lambda lines: None,
        wait: PoolWait | None = None,
        has_run: bool = True,
    ) -> PoolConnection:
        """Wait until `hosts` hosts can start ranks. Start the pool's process if none is running.

        If the pool's process has begun to end, wait for its end and try once more with a new
        process.

        Args:
            on_wait: Function called at each beat of the pool's process, in the thread of the Dask
                client, with one line for each host that is not ready. The function also receives a
                message if a process does not answer, or if an old process must end before a new
                process can start.
            wait: Object whose method `cancel` cancels this call.
            has_run: Whether a run is to start on the hosts. False if the user only starts the pool
                in advance (`%taas warm`).

        Returns:
            The connection to the pool's process.

        Raises:
            ConnectionEnded: The pool's process ended while it was getting the hosts.
            PoolError: The process could not be started, hosts are not available, or `wait` was
                cancelled.
        """
        wait = wait or PoolWait(self)
        connection = self.connect(on_wait, wait)
        answer = connection.wait_for_hosts(wait, hosts, has_run, on_wait)
        if answer.is_ending:  # another kernel ended the process before this request
            on_wait([self._wait_message(connection.process, "to end")])
            connection.process.wait_for_end(END_S)
            connection = self.connect(on_wait, wait)
            answer = connection.wait_for_hosts(wait, hosts, has_run, on_wait)
        connection.raise_if_failed(answer)
        return connection

    def connect(
        self,
        on_wait: Callable[[list[str]], None] = lambda lines: None,
        wait: PoolWait | None = None,
    ) -> PoolConnection:
        """Connect to the pool's process; start one if none is running. Request no host.

        A process that runs but does not respond (it is stopped or hangs) is killed and replaced.

        Args:
            on_wait: Called with messages for the user, for example that the process does not
                answer yet.
            wait: Object whose method `cancel` cancels this call.

        Raises:
            PoolError: The process could not be started, or `wait` was cancelled.
        """
        wait = wait or PoolWait(self)
        with self._joining:
            found = self._join(wait, on_wait, starts=True)
            assert found is not None
            wait.raise_if_over()
            return found

    def connect_if_running(self) -> PoolConnection | None:
        """Connect to the pool's process if one is running; return None otherwise.

        If a process runs but does not respond (it is stopped or hangs), kill it, and return None.

        Raises:
            PoolError: The process has other versions of Python, torch or taas-magic than this
                kernel, or it did not accept this kernel.
        """
        with self._joining:
            return self._join(PoolWait(self))

    def _ready_connection(self) -> PoolConnection | None:
        """Return the open connection if the pool's process sends beats and accepts this kernel.

        Return None if the process has begun to end. If the process has sent no beat for `SILENT_S`,
        wait up to `_PATIENCE_S` for a beat. If none arrives, close the connection, and return None.

        Raises:
            PoolError: The process became silent during this call.
        """
        if (found := self.connection) is None:
            return None
        until = time.monotonic() + _PATIENCE_S
        while found.is_silent and time.monotonic() < until:
            time.sleep(_CHECK_S)  # this kernel may have been too busy to read beats
        if found.is_ready:
            with suppress(ConnectionEnded):
                return found if found.register() else None
            return None
        found.close(f'pool "{self.name}" did not answer: {found.silence_message()}')
        return None

    def _join(
        self,
        wait: PoolWait,
        on_wait: Callable[[list[str]], None] = lambda lines: None,
        starts: bool = False,
    ) -> PoolConnection | None:
        """Return the open connection, or connect to the pool's process and store the connection.

        If the process ends normally before it accepts this kernel, find or start another process.
        If the process does not respond, report this to `on_wait`, kill the process, and find or
        start another process. Try at most `_MAX_PROCESSES` processes.

        Args:
            starts: Whether to start a process if none is running.

        Returns:
            The connection. None if no process is running and `starts` is False.

        Raises:
            PoolError: No process accepted this kernel. Also for the reasons that `_connect_to` and
                `_find_or_start` document.
        """
        if (ready := self._ready_connection()) is not None:
            return ready
        for _ in range(_MAX_PROCESSES):
            process = self._find_or_start(wait, starts)
            if process is None:
                return None
            try:
                found = self._connect_to(process, wait, on_wait)
            except OSError:  # the process is stopped or hangs
                on_wait([f'pool "{self.name}" did not answer: its process is replaced'])
                process.kill()
                continue
            if found is not None:
                self._connection = found
                return found
        raise self._pool_error("did not start: each of its processes ended or did not answer")

    def _connect_to(
        self, process: PoolProcess, wait: PoolWait, on_wait: Callable[[list[str]], None]
    ) -> PoolConnection | None:
        """Connect to a pool's process and ask it to accept this kernel.

        First wait until the process has written its address to `pool.json`. A process that has
        begun to end does not accept the kernel. In this case, wait up to `END_S` for the end of the
        process.

        Args:
            on_wait: Called with a message for the user if the process does not answer within
                `REPORT_WAIT_AFTER_S`. Also called with a message before the wait for the end of the
                process.

        Returns:
            The connection. None if the process ended without a failure before it accepted this
            kernel.

        Raises:
            OSError: The process runs, but does not respond.
            PoolError: The process failed after this kernel had started it. Or the process hung at
                its start, and this call killed it. Or the process has other versions than this
                kernel, or did not end within `END_S`. Also if `wait` was cancelled, or if this
                kernel ended the pool.
        """
        began, is_told = time.monotonic(), False

        def check() -> None:
            nonlocal is_told
            wait.raise_if_over()
            if not process.is_alive():
                raise ConnectionEnded(f"process {process.pid} {process.state_text()}")
            if not is_told and time.monotonic() - began > REPORT_WAIT_AFTER_S:
                is_told = True
                on_wait([self._wait_message(process, "to answer")])

        try:
            client = _connect(self._wait_for_address(process, check), check)
            with ExitStack() as stack:
                found = PoolConnection(self.config, process, client, self.folder.log)
                stack.callback(found.close)
                if found.register():
                    stack.pop_all()
                    return found
        except ConnectionEnded:
            pass
        except OSError:
            if self.folder.address_of(process) is not None and process.is_alive():
                raise
        if process.is_alive():  # the process has begun to end
            on_wait([self._wait_message(process, "to end")])
        process.wait_for_end(END_S)
        if process.exit_code:
            raise self._pool_error(
                f"did not start: its process {process.pid} {process.state_text()}"
            )
        return None

    def _find_or_start(self, wait: PoolWait, starts: bool) -> PoolProcess | None:
        """Find or start the pool's process; return None if none runs and `starts` is False.

        If another kernel is just starting the pool's process, wait up to `END_S` for this process.

        Raises:
            PoolError: `wait` was cancelled, or this kernel ended the pool. Also if another kernel
                has locked the pool's folder, but started no process within `END_S`.
        """
        deadline = time.monotonic() + END_S
        while True:
            wait.raise_if_over()
            process = self.folder.find_process() or (
                self.folder.start_process() if starts else None
            )
            if process is not None or not (starts or self.folder.is_locked):
                return process
            if time.monotonic() > deadline:
                lock = self.folder.path / "lock"
                raise self._pool_error(
                    f"did not start: another process of yours has locked {lock}, but starts no "
                    f"process of the pool. It may be stopped: `fuser {lock}` shows its pid"
                )
            time.sleep(_POLL_S)

    def _wait_for_address(self, process: PoolProcess, check: Callable[[], None]) -> PoolAddress:
        """Wait until a process accepts connections. Return the address and keys of the process.

        If the process uses no processor time and reads nothing for `start_timeout_s`, kill the
        process.

        Args:
            check: Called repeatedly during the wait. May raise PoolError to end the wait.

        Raises:
            PoolError: This call killed the process, the process has other versions than this
                kernel, or `check` raised PoolError.
        """
        import distributed  # noqa: F401  # takes 0.8 s, meanwhile the process starts

        timer, limit_s = IdleTimer(process.pid, with_children=False), self.config.start_timeout_s
        next_check_at = time.monotonic()
        while (pool_address := self.folder.address_of(process)) is None:
            check()
            if time.monotonic() >= next_check_at:
                next_check_at += _CHECK_S
                if timer.idle_s() >= limit_s:
                    error = self._pool_error(
                        f"did not start: its process {process.pid} used no processor time and read "
                        f"nothing for start_timeout_s = {limit_s:g} s, and was killed"
                    )
                    process.kill()
                    raise error
            time.sleep(_POLL_S)
        return pool_address

    def _wait_message(self, process: PoolProcess, what: str) -> str:
        return (
            f'pool "{self.name}": waiting for its process {process.pid} {what} ({self.folder.log})'
        )

    def _pool_error(self, what: str) -> PoolError:
        return PoolError(f'pool "{self.name}" {what}. Its log:\n{log_tail(self.folder.log)}')

    def down(self) -> None:
        """End the pool's runs, hosts and process, and cancel this kernel's waits for the pool.

        Connect to the running process, if there is one, and ask it to end. If this kernel cannot
        connect to the process, or the process does not end within `END_S`, kill the process. Then
        close the connection.
        """
        self.end_count += 1
        with self._joining:  # a thread that is starting the process now stops waiting for it
            try:
                found = self._join(PoolWait(self))
                if found is not None:
                    found.end_process()
            except PoolError:
                if (process := self.folder.find_process()) is not None:
                    process.kill()
            self.close()

    def close_when_unused(self) -> None:
        """Close the connection to the pool's process when no run of this kernel uses it any more.

        Call this when the pool's settings have changed and a new `Pool` replaces this object.
        """
        if (found := self.connection) is not None:
            found.close_when_unused()

    def is_unused(self) -> bool:
        """Return whether this kernel no longer uses the pool.

        True if this kernel has no connection to the pool, and no process of the pool that this
        kernel started is still running. Also reap child processes that have ended.
        """
        return self.connection is None and not self.folder.reap_children()

    def close(self) -> None:
        """Close the connection to the pool's process, and reap child processes that have ended.

        The pool's process may continue.
        """
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self.folder.reap_children()
