"""A rank's client of the data service: requests the batches of one loader from its fetchers.

The client requests each batch from the fetcher that prepares it (`sharding.assigned_worker`). If a
connection fails, the client sends the pending requests to another fetcher, which gives the same
responses.

After a failure, the client *pauses* the fetcher: for a while, the fetcher gets no requests. If no
fetcher has responded for `fetch_s` seconds (a setting in `[data]`), the client raises `RunLost`.
"""

import ssl
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, NamedTuple

from taas_magic.data import encode, protocol
from taas_magic.data.connection import FetcherLink, PeerSilent, is_raised_by_cell
from taas_magic.data.dataset import UserErrorReport
from taas_magic.data.memory import ReceiveBlocks
from taas_magic.data.protocol import (
    EpochDescription,
    LoaderRequest,
    RequestKind,
    Response,
    ResponseKind,
)
from taas_magic.data.service import Directory
from taas_magic.data.sharding import VOID, SlotRequest, assigned_worker
from taas_magic.errors import ProtocolError, RunLost
from taas_magic.leases import ALIVE_S, FetchLease
from taas_magic.messages import LoaderAddresses

_FEW_BYTES = 32 << 10
"""Maximum size in bytes of a response body to copy out of the receive buffer.

Without the copy, a small batch that the cell keeps would keep the whole buffer alive.
"""

_CHECK_AGAIN_S = 0.25
"""Seconds between checks whether more fetchers have started, after the first has started."""

_FIRST_CHECKS_S = 0.01
"""Seconds between checks while the client waits for a fetcher to start."""

_FIRST_PAUSE_S = 0.05
"""Seconds for which the client sends no requests to a fetcher after the fetcher's first failure.

Each further failure of the same fetcher doubles this pause.
"""

_LONGEST_PAUSE_S = 1.0
"""Maximum seconds for which the client sends no requests to a fetcher after failed connections."""

_PAUSE_PER_SILENCE = 10
"""Factor for the pause in which the client sends no requests to a silent fetcher.

The pause is this factor times the seconds that the client waited for a response of the fetcher.
"""

_OTHER_ORDER = (
    "epoch {epoch}: the sampler gives another order each time, and the order of this epoch is no "
    "longer known, so the rest of the epoch is unknown. Either the fetcher that ran the sampler is "
    "gone, or another rank is several epochs ahead. Draw the order from torch, numpy.random or "
    "random: these are seeded, so that any fetcher can repeat the order"
)


class Route:
    """A rank's record of one loader's fetchers: addresses, failures and idle connections.

    Each pass over the loader has its own `Client`. The clients of a loader share one route, and may
    run in several threads. The route has no lock, so another thread may change the route between
    any two statements of a method.

    Args:
        tls: TLS client context for fetchers on other hosts; None for plain TCP.
    """

    def __init__(
        self,
        loader: str,
        directory: Directory,
        key: bytes,
        tls: ssl.SSLContext | None = None,
        lease: FetchLease = FetchLease(),  # noqa: B008
    ) -> None:
        self._loader, self._directory, self._key = loader, directory, key
        self._tls, self._lease = tls, lease
        self._found = LoaderAddresses(fetchers=0)
        self._next_check_at, self._stream_deadline = 0.0, 0.0
        self._started: set[int] = set()
        self._links: weakref.WeakSet[FetcherLink] = weakref.WeakSet()
        self._idle: list[tuple[dict[int, FetcherLink], ReceiveBlocks]] = []
        self._paused: dict[int, tuple[float, float]] = {}
        self._silent_s = 0.0
        self._reasons: dict[int, str] = {}

    @property
    def workers(self) -> int:
        """Number of workers of all fetchers together.

        Reading this property waits until the first fetcher has started.
        """
        self._await_fetchers()
        return self._found.workers

    def choose_fetcher(self, slot: int, streams: int | None, preferred: int | None = None) -> int:
        """Return the index of the fetcher to request a batch from.

        First wait until a fetcher has started. For an iterable-style loader, also wait up to
        `start_s` seconds for the start of the assigned fetcher. The reason: if the dataset is not
        seeded, another fetcher may read the stream in a different order. Then samples could arrive
        twice or not at all.

        A fetcher is usable if it has started and is not paused. The result is the first of these
        fetchers that is usable:

        - the fetcher `preferred`
        - the assigned fetcher (`sharding.assigned_worker`)
        - another fetcher, which depends on the batch, so that the batches are spread

        Exception: if any fetcher has failed and has not responded since then, the second and third
        choice prefer fetchers that have not failed since the last response of any fetcher. If no
        fetcher is usable, return the assigned one.

        Args:
            slot: Number of the batch in its epoch.
            streams: Number of streams of an iterable-style loader; None for a map-style one.
            preferred: Index of a fetcher to return if it is usable.

        Raises:
            RunLost: No fetcher has started in time, or all fetchers have ended.
        """
        self._await_fetchers()
        if streams is not None:
            self._await_start(self._assigned_fetcher(slot, streams))
        found = self._found
        if preferred is not None and preferred in self._usable_fetchers():
            return preferred
        wanted = self._assigned_fetcher(slot, streams)
        if not self._paused and wanted in found.addresses:
            return wanted
        up = self._usable_fetchers()
        # Prefer fetchers that have not failed since the last response of any fetcher, so that each
        # fetcher is tried.
        up = [number for number in up if number not in self._reasons] or up
        if wanted in up or not up:
            return wanted
        turn = slot // found.workers if streams is None else slot
        number, _ = assigned_worker(turn, streams, len(up), 1)
        return up[number]

    @property
    def silence_limit_s(self) -> float:
        """Seconds that a fetcher may be silent before it counts as failed.

        Usually, the result is half of `fetch_s`. If the rank has already waited for more than half
        of `fetch_s` without any response, the result is the remaining part of `fetch_s`. The
        minimum is `ALIVE_S`. So if all fetchers are silent, the run fails after about `fetch_s`,
        even if the rank tries several fetchers.
        """
        return max(ALIVE_S, min(self._lease.silent_s, self._lease.fetch_s - self._silent_s))

    def connect(self, number: int) -> FetcherLink:
        """Return a new connection to fetcher `number`, and record the connection.

        A fork of the rank closes its copies of all recorded connections (`close_copies`).

        Raises:
            OSError: The fetcher has no address, or cannot be reached.
            ProtocolError: The peer is not a fetcher of this run, or the fetcher rejected this rank.
        """
        address = self._found.addresses.get(number)
        if address is None:
            raise ConnectionError(f"fetcher {number} has not started yet")
        patience = self.silence_limit_s, self._lease.silent_s
        link = FetcherLink(address, self._loader, self._key, self._tls, *patience)
        self._links.add(link)
        return link

    def acquire_idle(self, keep_bytes: int) -> tuple[dict[int, FetcherLink], ReceiveBlocks]:
        """Remove and return the connections and the receive memory that a finished pass has stored.

        If nothing is stored, return an empty dict and new memory.

        Args:
            keep_bytes: Maximum size in bytes of the memory blocks, if this method makes new memory.

        Returns:
            The connections by the index of the fetcher, and the receive memory, for a new pass.
        """
        with suppress(IndexError):  # another thread may take the last entry at any time
            return self._idle.pop()
        return {}, ReceiveBlocks(keep_bytes)

    def store_idle(self, links: dict[int, FetcherLink], blocks: ReceiveBlocks) -> None:
        """Store the connections and the receive memory of a finished pass for the next pass."""
        self._idle.append((links, blocks))

    def close_copies(self) -> None:
        """In a fork of the rank, close the fork's copies of the rank's connections.

        The rank itself continues to use the connections. With open copies, the fork could end a
        pass, and thereby cancel requests of the rank.
        """
        for link in list(self._links):
            link.close_copy()
        self._idle.clear()

    def record_response(self, number: int) -> None:
        """Record that a fetcher has responded, and end its pause after a failure, if any."""
        self._paused.pop(number, None)
        if self._reasons:
            self._silent_s = 0.0
            self._reasons.clear()

    def record_failure(self, number: int, error: Exception, silent_s: float) -> None:
        """Pause a fetcher that has failed: it gets no requests for a while.

        Each further failure of the same fetcher doubles its pause, up to `_LONGEST_PAUSE_S`. But if
        the fetcher was silent for more than `ALIVE_S`, the pause is a multiple of the silence.

        This method has three further effects:

        - It closes the idle connections to the fetcher.
        - It reads the current addresses of all fetchers.
        - If each fetcher is then paused or has no address, it sleeps until the first pause ends,
          but at most 0.25 s.

        Args:
            number: Index of the fetcher.
            silent_s: Seconds that the client waited for a response of the fetcher.

        Raises:
            RunLost: No fetcher has responded for `fetch_s`, or all fetchers have ended.
        """
        for _ in range(len(self._idle)):
            with suppress(IndexError):  # another thread may take the last entry at any time
                links, blocks = self._idle.pop(0)
                if number in links:
                    links.pop(number).close()
                self._idle.append((links, blocks))
        _, pause_s = self._paused.get(number, (0.0, _FIRST_PAUSE_S / 2))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if silent_s > ALIVE_S:
            pause_s = _PAUSE_PER_SILENCE * silent_s
        self._paused[number] = time.monotonic() + pause_s, pause_s
        who = self._found.addresses.get(number, f"fetcher {number}")
        self._reasons[number] = f"{who} {_describe_failure(error)}"
        self._silent_s += silent_s
        self._found = self._current_addresses()
        have_all_failed = self._found.addresses.keys() <= self._reasons.keys()
        if have_all_failed and self._silent_s >= self._lease.fetch_s:
            reasons = "; ".join(sorted(set(self._reasons.values()))[:4])
            raise RunLost(
                f'no fetcher of loader "{self._loader}" has answered for {self._silent_s:.0f} s: '
                f"{reasons}. See the fetchers' log in the run folder; fetch_s in [data] of "
                "taas.toml sets how long ranks wait"
            )
        if not self._usable_fetchers():
            # No fetcher can be tried now: wait until the first pause ends, but at most 0.25 s.
            now = time.monotonic()
            first = min((until for until, _ in list(self._paused.values())), default=now)
            pause_s = max(0.0, min(first - now, 0.25))
            time.sleep(pause_s)
            self._silent_s += pause_s

    def _assigned_fetcher(self, slot: int, streams: int | None) -> int:
        """Return the index of the fetcher to which a batch is assigned."""
        found = self._found
        return assigned_worker(slot, streams, found.fetchers, found.workers // found.fetchers)[0]

    def _usable_fetchers(self) -> list[int]:
        now, aside = time.monotonic(), self._paused
        return [at for at in sorted(self._found.addresses) if aside.get(at, (0.0, 0.0))[0] <= now]

    def _await_fetchers(self) -> None:
        """Wait until this route has the address of at least one fetcher, up to `start_s` seconds.

        If the route already has an address, this method does not wait. But if the addresses of
        other fetchers are missing, it reads the current addresses, because more fetchers may have
        started. It reads them at most once in `_CHECK_AGAIN_S` seconds.

        Raises:
            RunLost: No fetcher has started in time, or all fetchers have ended.
        """
        known = self._found
        if len(known.addresses) >= max(1, known.fetchers):
            return
        now = time.monotonic()
        if known.addresses and now < self._next_check_at:
            return
        self._next_check_at, deadline = now + _CHECK_AGAIN_S, now + self._lease.start_s
        while True:
            found = self._current_addresses()
            if found.addresses or known.addresses:
                self._found = found if found.addresses else known
                return
            if time.monotonic() > deadline:
                again = "was started again" if self._started else "has started"
                raise RunLost(
                    f'no fetcher of loader "{self._loader}" {again} within '
                    f"{self._lease.start_s:g} s; the run's log says why"
                )
            time.sleep(_FIRST_CHECKS_S)

    def wait_for_describing_fetcher(self) -> None:
        """Wait for the start of the fetcher from which all ranks request descriptions of epochs.

        Return without this fetcher after `start_s` seconds, or if the fetcher cannot start.

        Raises:
            RunLost: No fetcher has started in time, or all fetchers have ended.
        """
        self._await_fetchers()
        self._await_start(self._assigned_fetcher(0, None))

    def _await_start(self, number: int) -> None:
        """Wait until fetcher `number` has started, no fetcher is starting, or a deadline passes.

        All calls have the same deadline. It is `start_s` seconds after the first call for a fetcher
        that had not started.

        Raises:
            RunLost: All fetchers have ended or could not start.
        """
        if number in self._started:
            return
        self._stream_deadline = self._stream_deadline or time.monotonic() + self._lease.start_s
        while number not in self._started and self._found.starting:
            if time.monotonic() > self._stream_deadline:
                return
            time.sleep(_FIRST_CHECKS_S)
            found = self._current_addresses()
            self._found = found if found.addresses else self._found

    def _current_addresses(self) -> LoaderAddresses:
        """Return the addresses of the loader's fetchers; none while all fetchers are restarting.

        Also record in `_started` which fetchers have an address.

        Raises:
            RunLost: All fetchers have ended or could not start, and none will be restarted.
        """
        found = self._directory(self._loader)
        if found.failed:
            raise RunLost(f'no fetcher of loader "{self._loader}" is left: {found.failed}')
        self._started |= found.addresses.keys()
        return found


def _describe_failure(error: Exception) -> str:
    if isinstance(error, (PeerSilent, TimeoutError)):
        return "is silent"
    kind = "broke the protocol" if isinstance(error, ProtocolError) else "is gone"
    return f"{kind} ({error})"


class SlotResponse(NamedTuple):
    """Decoded response to a `SlotRequest`.

    Attributes:
        units: Units of the batch; UNHINTED if the batch has no `hints["units"]`; VOID if the slot
            has no batch.
        batch: The batch; None if only the units were requested, or if there is no batch.
        size: Size of the encoded batch in bytes.
        failure: Exception that the user's code raised instead of returning a batch; else None.
        order: Hash of the epoch's order or of the batch (see `Response.order`); 0 for none.
    """

    units: int
    batch: Any = None
    size: int = 0
    failure: UserErrorReport | None = None
    order: int = 0


class Client:
    """Client for one pass over a loader; sends a rank's requests and returns the responses.

    If a sampler draws from an unseeded generator, the fetchers' workers compute different orders.
    The pass then follows one order: that of the fetcher which described the epoch (the response to
    OPEN). The client compares each response's hash with the hash of this order. If they differ, the
    client requests the batch's indices (ORDER) from the fetcher that described the epoch. Then the
    client requests the batch with these indices from any fetcher.

    Args:
        keep_bytes: Maximum size in bytes of the memory that receives batches. Memory of batches
            that are still in use may exceed this limit.
        timeout_s: Seconds that a batch may take, from `DataLoader(timeout=…)`. If 0, there is no
            limit as long as the fetcher reports that it is alive.

    Attributes:
        must_end: Whether the pass must end early. If another thread sets this attribute to True, a
            call that waits for a response raises `CancelledError` within `ALIVE_S`.
        retried: Number of requests that were sent again after a failed connection.
    """

    def __init__(self, route: Route, keep_bytes: int, timeout_s: float = 0.0) -> None:
        self._route, self._timeout_s, self.must_end = route, timeout_s, False
        self._links, self._blocks = route.acquire_idle(keep_bytes)
        self._where: dict[LoaderRequest, int] = {}
        self._responses: dict[LoaderRequest, tuple[Response, memoryview]] = {}
        self._instead: dict[LoaderRequest, LoaderRequest] = {}
        self._epoch = 0
        self._describing_fetcher: int | None = None  # the fetcher that described the epoch
        self._order: int | None = None
        self._indices: Sequence[Any] | None = None
        self._streams: int | None = None
        self.retried = 0

    @property
    def workers(self) -> int:
        """Number of workers of all fetchers of the loader together.

        Reading this property waits until the first fetcher has started.
        """
        return self._route.workers

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that hold received batches or are kept for the next batches."""
        links = list(self._links.values())
        return self._blocks.held_bytes + sum(link.borrowed.held_bytes for link in links)

    def request_description(self, epoch: int, has_own_sampler: bool = False) -> EpochDescription:
        """Begin an epoch: request and return the epoch's description from one fetcher.

        If the sampler is not seeded, two fetchers may have different orders. The pass follows the
        order of the fetcher that sent the description, until the caller calls `use_order`.

        Args:
            has_own_sampler: Whether the sampler is of a type that is not torch's. Such a sampler is
                perhaps unseeded, so that fetchers have different orders. If True, this method
                therefore first waits for the fetcher from which all ranks request the description.

        Raises:
            RunLost: No fetcher responds.
            Exception: The exception that the loader's sampler raised.
        """
        if has_own_sampler:
            self._route.wait_for_describing_fetcher()
        body = self._request_body(LoaderRequest(RequestKind.OPEN, epoch, 0), ResponseKind.OPENED)
        description = protocol.decode_epoch_description(body)
        self._epoch, self._streams, self._indices = epoch, description.streams, None
        self._order = description.order if description.streams is None else None
        return description

    def request_order(self) -> bytes:
        """Request and return the encoded indices of all batches of the epoch, for `use_order`.

        Raises:
            RunLost: No fetcher responds.
        """
        request = LoaderRequest(RequestKind.ORDER, self._epoch, 0, b"all")
        return bytes(self._request_body(request, ResponseKind.VALUE))

    def use_order(self, order: bytes) -> int:
        """Use another rank's order for all later requests of this epoch.

        Args:
            order: Result of `request_order` in the other rank.

        Returns:
            The number of batches in the epoch.
        """
        self._indices, self._order = encode.from_bytes(order), None
        return len(self._indices)

    def send_requests(self, requests: Sequence[SlotRequest]) -> None:
        """Send requests without waiting for the responses.

        This method waits only while no fetcher can be reached.

        Raises:
            RunLost: No fetcher can be reached.
        """
        for request in requests:
            self._queue_request(self._loader_request(request))
        self._flush()

    def wait_for_response(self, request: SlotRequest) -> SlotResponse:
        """Wait for the response to a request, and return the response.

        If `send_requests` has not sent the request, send it first.

        Raises:
            RunLost: No fetcher responds, or no worker can prepare the batch.
            RuntimeError: The batch took longer than the loader's `timeout`.
        """
        return decode_slot_response(*self._send_and_wait(self._loader_request(request)))

    def sample(self, index: Any) -> Any:
        """Request `dataset[index]` from a fetcher, and return the item.

        Raises:
            RunLost: No fetcher responds.
            Exception: The exception that the dataset raised.
        """
        return self._request_object(LoaderRequest(RequestKind.SAMPLE, 0, 0, encode.as_bytes(index)))

    def find_state(self, slot: int) -> tuple[int, Any] | None:
        """Request a saved state of the dataset from which the slot's stream can resume.

        Each stream has its own copy of the dataset, and a worker sometimes saves the copy's state.
        The result is the latest state that was saved before the stream went beyond `slot`.

        Returns:
            The number of batches that the stream had yielded when the state was saved, and the
            state. None if there is no such state.
        """
        found: tuple[int, Any] | None = self._request_object(
            LoaderRequest(RequestKind.STATE, self._epoch, slot)
        )
        return found

    def restore(self, slot: int, state: Any) -> None:
        """Make a fetcher resume the slot's stream at `slot`, with a dataset that loads `state`.

        Raises:
            RunLost: No fetcher responds.
            Exception: The exception of the user's code, for example if the loader cannot be loaded.
        """
        self._request_object(
            LoaderRequest(RequestKind.STATE, self._epoch, slot, encode.as_bytes(state))
        )

    def close(self) -> None:
        """End the pass: cancel pending requests, and store the connections for the next pass.

        If cancelling fails on a connection, close this connection and do not store it. Nor store a
        connection that is closed already: the next pass would take the fetcher for a failed one.

        Raises:
            OSError: A signal handler in the user's cell raised an OSError during the call. Errors
                of the connection are not raised.
        """
        for number, link in list(self._links.items()):
            try:
                link.cancel()
            except OSError as error:
                self._links.pop(number).close()
                if is_raised_by_cell(error):
                    raise
        self._where.clear()
        self._responses.clear()
        links = {number: link for number, link in self._links.items() if not link.is_closed}
        self._route.store_idle(links, self._blocks)
        self._links = {}

    def _loader_request(self, slot_request: SlotRequest) -> LoaderRequest:
        kind = RequestKind.GET if slot_request.is_own else RequestKind.PEEK
        detail = b"" if self._indices is None else encode.as_bytes(self._indices[slot_request.slot])
        return LoaderRequest(kind, self._epoch, slot_request.slot, detail)

    def _request_object(self, request: LoaderRequest) -> Any:
        """Send a request whose response is an object, and return the object.

        Raises:
            ValueError: The response is a dataset's state of more than `MAX_STATE_BYTES`. A rank
                could not load this state later, because fetchers reject larger states.
            RunLost: No fetcher responds.
            Exception: The exception that the user's code raised.
        """
        body = self._request_body(request, ResponseKind.VALUE)
        if request.kind is RequestKind.STATE and len(body) > protocol.MAX_STATE_BYTES:
            raise ValueError(
                f"state_dict: the dataset's own state is {len(body) / 1e9:.1f} GB; at most "
                f"{protocol.MAX_STATE_BYTES / 1e9:.1f} GB can be loaded again. Leave large data "
                "out of it"
            )
        return encode.from_bytes(bytes(body))

    def _request_body(self, request: LoaderRequest, expected: ResponseKind) -> memoryview:
        """Send a request, wait for the response, and return the response's body.

        Raises:
            ProtocolError: The response has a kind other than `expected` or ERROR.
            Exception: The exception of the user's code that an ERROR response carries.
        """
        response, body = self._send_and_wait(request)
        if response.kind is expected:
            return body
        if response.kind is not ResponseKind.ERROR:
            raise ProtocolError(
                f"the fetcher answered a request of kind {request.kind.name} with a response of "
                f"kind {response.kind.name}"
            )
        raised: UserErrorReport = encode.from_bytes(bytes(body))
        raised.reraise()

    def _send_and_wait(self, request: LoaderRequest) -> tuple[Response, memoryview]:
        """Send a request if it is not sent yet, wait for its response, and return the response.

        Raises:
            CancelledError: Another thread has set `must_end`.
            RuntimeError: The response took longer than `timeout_s`.
            RunLost: No fetcher responds, or each worker that tried to prepare the batch has ended.
        """
        if request not in self._responses:
            if request not in self._where:
                self._queue_request(request)
                self._flush()
            self._receive_until(request)
        response, body = self._responses.pop(request)
        if response.kind is ResponseKind.LOST:
            raise RunLost(bytes(body).decode())
        return response, body

    def _queue_request(self, request: LoaderRequest) -> None:
        """Choose a fetcher for a request, and queue the request on the connection to the fetcher.

        For an ORDER request, prefer the fetcher that described the epoch. If there is no connection
        to the chosen fetcher yet, make one. If connecting fails, record the failure and choose a
        fetcher again. The attribute `_where` records which fetcher has the request. This method
        does not send the request; `_flush` sends it later.

        Raises:
            RunLost: No fetcher can be reached.
            OSError: A signal handler in the user's cell raised an OSError during the call. Errors
                of the connection are not raised.
        """
        while True:
            of_order = request.kind in (RequestKind.OPEN, RequestKind.ORDER)
            # Request the order from the fetcher that described the epoch: others may differ.
            preferred = self._describing_fetcher if request.kind is RequestKind.ORDER else None
            number = self._route.choose_fetcher(
                0 if of_order else request.slot, self._streams, preferred
            )
            began = time.monotonic()
            try:
                if number not in self._links:
                    self._links[number] = self._route.connect(number)
            except (OSError, ProtocolError) as error:
                if is_raised_by_cell(error):
                    raise
                self._route.record_failure(number, error, time.monotonic() - began)
                continue
            self._links[number].unsent.append(request)
            self._where[request] = number
            if self._instead and request in self._instead:
                self._where[self._instead[request]] = number
            return

    def _flush(self) -> None:
        for number, link in list(self._links.items()):
            try:
                if link.unsent:
                    link.send_unsent()
            except OSError as error:
                self._reroute_requests(number, error)

    def _receive_until(self, request: LoaderRequest) -> None:
        """Receive and store responses until the response to `request` has arrived.

        If the fetcher is silent for too long, or the connection to the fetcher fails, send the
        pending requests to other fetchers.

        Raises:
            CancelledError: Another thread has set `must_end`.
            RuntimeError: The response took longer than `timeout_s`.
            RunLost: No fetcher responds.
        """
        began = received_at = time.monotonic()
        silent_s = 0.0
        while request in self._where:
            if self.must_end:
                raise CancelledError
            if self._timeout_s and time.monotonic() - began > self._timeout_s:
                raise RuntimeError(f"DataLoader timed out after {self._timeout_s:g} seconds")
            number = self._where[request]
            try:
                self._receive(number)
            except PeerSilent as error:
                silent_s += ALIVE_S
                if silent_s < self._route.silence_limit_s:
                    continue
                self._reroute_requests(number, error, silent_s)
            except (OSError, ProtocolError) as error:
                self._reroute_requests(number, error, time.monotonic() - received_at)
            silent_s, received_at = 0.0, time.monotonic()

    def _receive(self, number: int) -> None:
        """Receive a fetcher's next message and all further messages that arrived with it.

        Store each message that is a response. Any message ends the fetcher's pause, in which the
        fetcher gets no requests. Stop early if the connection is closed or replaced while a
        response is being stored.
        """
        link = self._links[number]
        for message, body in link.receive(self._blocks):
            self._route.record_response(number)
            if isinstance(message, Response):
                self._store_response(link, message, body)
            if self._links.get(number) is not link:
                return

    def _store_response(self, link: FetcherLink, response: Response, body: memoryview) -> None:
        """Store a response, which may answer several pending requests of the connection `link`.

        Remove the answered requests from `link.pending`. Each of these requests gets an equal part
        of the body. A small part is copied, so that it does not keep the whole body in memory. If a
        batch was prepared in a wrong order, send a further request instead of storing the batch.

        Raises:
            ProtocolError: The response does not belong to the oldest pending request, or answers
                more requests than are pending.
        """
        pending, bodies = link.pending, 1 + response.more
        request = pending[0] if len(pending) >= bodies else None
        if request is None or response.slot != request.slot or response.epoch != request.epoch:
            expected = (
                f"batch {request.slot} of epoch {request.epoch}" if request else "fewer batches"
            )
            raise ProtocolError(
                f"{link.address} sent batch {response.slot} of epoch {response.epoch} and "
                f"{response.more} more, but this rank expects {expected}"
            )
        size = len(body) // bodies
        for number, one in enumerate([pending.popleft() for _ in range(bodies)]):
            own = body[number * size : (number + 1) * size]
            self._store_one_response(
                one, response, memoryview(bytearray(own)) if size <= _FEW_BYTES else own
            )

    def _store_one_response(
        self, request: LoaderRequest, response: Response, body: memoryview
    ) -> None:
        """Store the response to `request`, or send a further request for the same batch.

        A further request is necessary if the worker's order is not the epoch's order, because the
        batch is then wrong (`_follow_up_request`). When the right batch arrives, store it as the
        response to the original request. If `request` is OPEN, also record which fetcher has
        described the epoch.
        """
        number = self._where.pop(request)
        if request.kind is RequestKind.OPEN:
            self._describing_fetcher = number
        first = self._instead.pop(request, request) if self._instead else request
        instead = self._follow_up_request(request, first, response, body)
        if instead is not None:
            self._instead[instead] = first
            self._queue_request(instead)
            self._flush()
            return
        if first is not request:
            del self._where[first]
        self._responses[first] = response, body

    def _follow_up_request(
        self, request: LoaderRequest, first: LoaderRequest, response: Response, body: memoryview
    ) -> LoaderRequest | None:
        """Return the request to send next for a batch that was prepared in a wrong order.

        The order of a response is wrong if the response has a hash, and this hash is not the hash
        of the epoch's order. To get the right batch, the client sends three requests:

        1. GET without indices. The worker's order is wrong, so its batch is wrong, too.
        2. ORDER. The response is the list of the indices of the samples in the right batch.
        3. GET with this list.

        Args:
            request: The request that `response` answers.
            first: The first of the three requests; `request` itself, unless `request` is the second
                or third request.

        Returns:
            The second or third request. None if `response` is the final response to `first`: its
            order is not wrong, or it answers the third request, or it is an error.

        Raises:
            RunLost: The order of the response to ORDER is wrong, too.
        """
        order = response.order
        is_other = order != self._order and order != 0 and self._order is not None
        if first is request and is_other:
            return LoaderRequest(RequestKind.ORDER, request.epoch, request.slot)
        has_indices = request.kind is RequestKind.ORDER and response.kind is ResponseKind.VALUE
        if has_indices and first is not request:
            if is_other:
                raise RunLost(_OTHER_ORDER.format(epoch=request.epoch))
            return LoaderRequest(RequestKind.GET, first.epoch, first.slot, bytes(body))
        return None

    def _reroute_requests(self, number: int, error: Exception, silent_s: float = 0.0) -> None:
        """Close a failed connection and send its pending requests to other fetchers.

        For a while, the failed fetcher gets no requests (`Route.record_failure`). Also add the
        number of pending requests to `retried`.

        Raises:
            RunLost: No fetcher responds.
            OSError: This is `error`, which a signal handler in the user's cell raised. In this
                case, the connection has not failed, and stays open.
        """
        if is_raised_by_cell(error):
            raise error
        link = self._links.pop(number)
        link.close()
        owed = [*link.pending, *link.unsent]
        self._route.record_failure(number, error, silent_s)
        self.retried += len(owed)
        for request in owed:
            self._queue_request(request)
        self._flush()


def decode_slot_response(response: Response, body: memoryview) -> SlotResponse:
    """Decode the response to a GET or PEEK request.

    If the user's code raised an exception, this function returns it as `failure`. If the slot has
    no batch, the units are VOID. The response to a PEEK request has units, but no batch.

    Raises:
        ProtocolError: The response has a kind that these requests do not allow.
    """
    kind = response.kind
    if kind is ResponseKind.BATCH:
        batch, order = encode.decode(body, response.head_bytes), response.order
        return SlotResponse(response.units, batch, len(body), order=order)
    if kind is ResponseKind.ERROR:
        return SlotResponse(1, failure=encode.from_bytes(bytes(body)))
    if kind is ResponseKind.VOID:
        return SlotResponse(VOID)
    if kind is ResponseKind.PEEKED:
        return SlotResponse(response.units, order=response.order)
    raise ProtocolError(
        f"the fetcher answered a request for a batch with a response of kind {kind.name}"
    )
