"""A rank's side of the data service: connections to the fetchers of one loader, and its requests.

A batch is asked of the fetcher whose share it is. A connection that fails puts its fetcher aside
for a moment that grows with every failure in a row; what it was asked goes to another fetcher,
which gives the same answer. Only when no fetcher has answered for a while is the run lost, and it
says so instead of waiting for ever.
"""

import ssl
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, NamedTuple

from taas_magic.data import encode, protocol
from taas_magic.data.connection import FetcherLink, Silent, is_of_the_cell
from taas_magic.data.dataset import Raised
from taas_magic.data.memory import Blocks
from taas_magic.data.protocol import LoaderRequest, Opened, RequestKind, Response, ResponseKind
from taas_magic.data.service import Directory
from taas_magic.data.sharding import VOID, SlotRequest, home
from taas_magic.errors import ProtocolError, RunLost
from taas_magic.leases import ALIVE_S, FetchLease
from taas_magic.messages import LoaderPlace

_FEW_BYTES = 32 << 10
"""Bodies up to this are copied out: a batch that is kept must not keep all that came with it."""

_LOOK_AGAIN_S = 0.25
_FIRST_LOOKS_S = 0.01
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_PAUSE_PER_SILENCE = 10
"""So many times longer than it was waited for a fetcher in vain, others are asked instead of it."""

_OTHER_ORDER = (
    "epoch {epoch}: the loader's sampler gives another order each time it is run, and the fetcher "
    "that ran it for this epoch is gone, so the rest of the epoch is not known. Draw the order "
    "from torch, numpy.random or random, which are seeded, and any fetcher can repeat it"
)


class Route:
    """A rank's ways to the fetchers of one loader; its connections and memory are used again.

    Several threads may use it, each with a client of its own.
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
        self._found = LoaderPlace(fetchers=0)
        self._look_again_at, self._has_started = 0.0, False
        self._links: weakref.WeakSet[FetcherLink] = weakref.WeakSet()
        self._idle: list[tuple[dict[int, FetcherLink], Blocks]] = []
        self._paused: dict[int, tuple[float, float]] = {}
        self._silent_s = 0.0
        self._reasons: dict[int, str] = {}

    @property
    def workers(self) -> int:
        """How many workers all fetchers have; waits for the first fetcher."""
        self._await_fetchers()
        return self._found.workers

    def pick(self, slot: int, streams: int | None) -> int:
        """Return the fetcher to ask for a slot: whose share it is; while that is aside, another.

        Raises:
            RunLost: No fetcher has answered for `fetch_s`.
        """
        self._await_fetchers()
        found = self._found
        wanted, _ = home(slot, streams, found.fetchers, found.workers // found.fetchers)
        if not self._paused and wanted in found.addresses:
            return wanted
        up = self._up()
        # Those that have failed come last until one has answered: each is tried once at least.
        up = [number for number in up if number not in self._reasons] or up
        if wanted in up or not up:
            return wanted
        return up[home(slot // found.workers if streams is None else slot, streams, len(up), 1)[0]]

    @property
    def patience_s(self) -> float:
        """How long a fetcher may be silent: less, the longer none has answered."""
        return max(ALIVE_S, min(self._lease.silent_s, self._lease.fetch_s - self._silent_s))

    def connect(self, number: int) -> FetcherLink:
        """Return a new connection to a fetcher.

        Raises:
            OSError, ProtocolError: It does not answer.
        """
        address = self._found.addresses.get(number)
        if address is None:
            raise ConnectionError(f"fetcher {number} has not started yet")
        patience = self.patience_s, self._lease.silent_s
        link = FetcherLink(address, self._loader, self._key, self._tls, *patience)
        self._links.add(link)
        return link

    def take(self, keep_bytes: int) -> tuple[dict[int, FetcherLink], Blocks]:
        """Return the connections of a pass that is over and its memory to receive into, if any."""
        with suppress(IndexError):  # another thread may take the last ones at any time
            return self._idle.pop()
        return {}, Blocks(keep_bytes)

    def give_back(self, links: dict[int, FetcherLink], blocks: Blocks) -> None:
        """Keep what a pass had for the next one."""
        self._idle.append((links, blocks))

    def leave(self) -> None:
        """Leave all connections to the process that this one was forked from.

        A pass of that process that ends in this one would call off what that process waits for.
        """
        for link in list(self._links):
            link.leave()
        self._idle.clear()

    def answered(self, number: int) -> None:
        """Take note that a fetcher has answered."""
        self._paused.pop(number, None)
        if self._reasons:
            self._silent_s = 0.0
            self._reasons.clear()

    def failed(self, number: int, error: Exception, silent_s: float) -> None:
        """Put a fetcher aside, and wait if all are.

        Args:
            silent_s: How long it was waited for.

        Raises:
            RunLost: No fetcher has answered for `fetch_s`.
        """
        for links, _ in list(self._idle):
            if number in links:
                links.pop(number).close()
        _, pause_s = self._paused.get(number, (0.0, _FIRST_PAUSE_S / 2))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if silent_s > ALIVE_S:
            pause_s = _PAUSE_PER_SILENCE * silent_s
        self._paused[number] = time.monotonic() + pause_s, pause_s
        who = self._found.addresses.get(number, f"fetcher {number}")
        self._reasons[number] = f"{who} {_why_useless(error)}"
        self._silent_s += silent_s
        self._found = self._looked_up()
        have_all_failed = self._found.addresses.keys() <= self._reasons.keys()
        if have_all_failed and self._silent_s >= self._lease.fetch_s:
            reasons = "; ".join(sorted(set(self._reasons.values()))[:4])
            raise RunLost(
                f'no fetcher of loader "{self._loader}" has answered for {self._silent_s:.0f} s: '
                f"{reasons}. See the fetchers' log in the run folder; fetch_s in taas.toml's "
                "[data] is how long ranks wait"
            )
        if not self._up():
            # Every fetcher is aside: wait for the first to be tried again.
            now = time.monotonic()
            first = min((until for until, _ in self._paused.values()), default=now)
            pause_s = max(0.0, min(first - now, 0.25))
            time.sleep(pause_s)
            self._silent_s += pause_s

    def _up(self) -> list[int]:
        now, aside = time.monotonic(), self._paused
        return [at for at in sorted(self._found.addresses) if aside.get(at, (0.0, 0.0))[0] <= now]

    def _await_fetchers(self) -> None:
        """Wait for the first fetcher; look now and then for those that had not started yet."""
        known = self._found
        if len(known.addresses) >= max(1, known.fetchers):
            return
        now = time.monotonic()
        if known.addresses and now < self._look_again_at:
            return
        self._look_again_at, deadline = now + _LOOK_AGAIN_S, now + self._lease.start_s
        while True:
            found = self._looked_up()
            if found.addresses or known.addresses:
                self._found = found if found.addresses else known
                return
            if time.monotonic() > deadline:
                again = "was started again" if self._has_started else "has started"
                raise RunLost(
                    f'no fetcher of loader "{self._loader}" {again} within '
                    f"{self._lease.start_s:g} s; the run's log says why"
                )
            time.sleep(_FIRST_LOOKS_S)

    def _looked_up(self) -> LoaderPlace:
        """Return where fetchers listen now; none while they are started again.

        Raises:
            RunLost: All have ended, or could not start, and none is started again.
        """
        found = self._directory(self._loader)
        if found.failed:
            raise RunLost(f'no fetcher of loader "{self._loader}" is left: {found.failed}')
        self._has_started = self._has_started or bool(found.addresses)
        return found


def _why_useless(error: Exception) -> str:
    """Return what an unusable connection says of its fetcher."""
    if isinstance(error, (Silent, TimeoutError)):
        return "says nothing"
    kind = "broke the protocol" if isinstance(error, ProtocolError) else "is gone"
    return f"{kind} ({error})"


class Delivered(NamedTuple):
    """What a rank gets for a `SlotRequest`.

    Attributes:
        units: Number that the batch counts, or UNHINTED; VOID: there is none.
        size: Its bytes on the wire, 0 if it was on none.
        failure: What the user's code raised instead; `reraise()` raises it here.
        order: `Response.order`.
    """

    units: int
    batch: Any = None
    size: int = 0
    failure: Raised | None = None
    order: int = 0


class Client:
    """Answers a rank's requests about one loader from its fetchers, for one pass over it.

    A sampler that draws from something else than the seeded generators gives every worker another
    order. Then the one of the worker that opened the epoch holds: it is asked for a batch's indices
    (ORDER), and any worker for the batch by those, in the place of the first request.

    Args:
        keep_bytes: How much memory is kept to receive into again.
        timeout_s: `DataLoader(timeout=…)`: how long a batch may take; 0: as long as it takes, while
            its fetcher says that it is alive.

    Attributes:
        is_left: Set from another thread: whoever waits for an answer gives up within a tick.
    """

    def __init__(self, route: Route, keep_bytes: int, timeout_s: float = 0.0) -> None:
        self._route, self._timeout_s, self.is_left = route, timeout_s, False
        self._links, self._blocks = route.take(keep_bytes)
        self._where: dict[LoaderRequest, int] = {}
        self._here: dict[LoaderRequest, tuple[Response, memoryview]] = {}
        self._instead: dict[LoaderRequest, LoaderRequest] = {}
        self._epoch = 0
        self._order: int | None = None
        self._indices: Sequence[Any] | None = None
        self._streams: int | None = None
        self.retried = 0

    @property
    def workers(self) -> int:
        """How many workers share the work."""
        return self._route.workers

    @property
    def held_bytes(self) -> int:
        """Memory that batches lie in, in use or kept for the next ones."""
        links = list(self._links.values())
        return self._blocks.held_bytes + sum(link.lent.held_bytes for link in links)

    def open(self, epoch: int) -> Opened:
        """Begin an epoch, and say how long it is; the first fetcher says it for all.

        Raises:
            RunLost: No fetcher answers.
            Exception: What the loader's sampler raised.
        """
        body = self._answer_to(LoaderRequest(RequestKind.OPEN, epoch, 0), ResponseKind.OPENED)
        opened = protocol.read_opened(body)
        self._epoch, self._streams, self._indices = epoch, opened.streams, None
        self._order = opened.order if opened.streams is None else None
        return opened

    def order(self) -> bytes:
        """Return the indices of all batches of the epoch, encoded (`follow`)."""
        ask = LoaderRequest(RequestKind.ORDER, self._epoch, 0, b"all")
        return bytes(self._answer_to(ask, ResponseKind.VALUE))

    def follow(self, order: bytes) -> int:
        """Ask for the batches of this epoch by another rank's order; return their number."""
        self._indices, self._order = encode.from_bytes(order), None
        return len(self._indices)

    def ask(self, asks: Sequence[SlotRequest]) -> None:
        """Send requests ahead."""
        for ask in asks:
            self._send_later(self._request(ask))
        self._flush()

    def reply(self, ask: SlotRequest) -> Delivered:
        """Return the answer to a request.

        Raises:
            RunLost: No fetcher answers, or the batch cannot be had.
            RuntimeError: It took longer than the loader's `timeout`.
        """
        return received(*self._await(self._request(ask)))

    def sample(self, index: Any) -> Any:
        """Return `dataset[index]` from a fetcher's dataset."""
        return self._value(LoaderRequest(RequestKind.SAMPLE, 0, 0, encode.as_bytes(index)))

    def state(self, slot: int) -> tuple[int, Any] | None:
        """Return where the dataset of a slot's stream stood, and after how many items."""
        found: tuple[int, Any] | None = self._value(
            LoaderRequest(RequestKind.STATE, self._epoch, slot)
        )
        return found

    def restore(self, slot: int, state: Any) -> None:
        """Have the stream of a slot begin there, in a dataset that has loaded this state."""
        self._value(LoaderRequest(RequestKind.STATE, self._epoch, slot, encode.as_bytes(state)))

    def close(self) -> None:
        """End the pass; what is under way is not wanted any more."""
        for number, link in list(self._links.items()):
            try:
                link.cancel()
            except OSError as error:
                self._links.pop(number).close()
                if is_of_the_cell(error):
                    raise
        self._where.clear()
        self._here.clear()
        self._route.give_back(self._links, self._blocks)
        self._links = {}

    def _request(self, ask: SlotRequest) -> LoaderRequest:
        kind = RequestKind.GET if ask.mine else RequestKind.PEEK
        detail = b"" if self._indices is None else encode.as_bytes(self._indices[ask.slot])
        return LoaderRequest(kind, self._epoch, ask.slot, detail)

    def _value(self, ask: LoaderRequest) -> Any:
        body = self._answer_to(ask, ResponseKind.VALUE)
        if ask.kind is RequestKind.STATE and len(body) > protocol.MAX_STATE_BYTES:
            raise ValueError(
                f"state_dict: the dataset's own state is {len(body) / 1e9:.1f} GB; at most "
                f"{protocol.MAX_STATE_BYTES / 1e9:.1f} GB can be loaded again. Keep its large "
                "parts out"
            )
        return encode.from_bytes(bytes(body))

    def _answer_to(self, ask: LoaderRequest, expected: ResponseKind) -> memoryview:
        """Ask something besides batches, and wait for what is said; raise what is said instead."""
        response, body = self._await(ask)
        if response.kind is expected:
            return body
        if response.kind is not ResponseKind.ERROR:
            raise ProtocolError(f"a request was answered with {response.kind.name}")
        raised: Raised = encode.from_bytes(bytes(body))
        raised.reraise()

    def _await(self, ask: LoaderRequest) -> tuple[Response, memoryview]:
        """Return the response to a request, which is sent now where it was not sent ahead."""
        if ask not in self._here:
            if ask not in self._where:
                self._send_later(ask)
                self._flush()
            self._until(ask)
        response, body = self._here.pop(ask)
        if response.kind is ResponseKind.LOST:
            raise RunLost(bytes(body).decode())
        return response, body

    def _send_later(self, ask: LoaderRequest) -> None:
        """Lay a request ready for the fetcher that has to answer it."""
        while True:
            of_order = ask.kind in (RequestKind.OPEN, RequestKind.ORDER)
            number = self._route.pick(0 if of_order else ask.slot, self._streams)
            began = time.monotonic()
            try:
                if number not in self._links:
                    self._links[number] = self._route.connect(number)
            except (OSError, ProtocolError) as error:
                if is_of_the_cell(error):
                    raise
                self._route.failed(number, error, time.monotonic() - began)
                continue
            self._links[number].unsent.append(ask)
            self._where[ask] = number
            if self._instead and ask in self._instead:
                self._where[self._instead[ask]] = number
            return

    def _flush(self) -> None:
        for number, link in list(self._links.items()):
            try:
                if link.unsent:
                    link.request()
            except OSError as error:
                self._lost(number, error)

    def _until(self, ask: LoaderRequest) -> None:
        """Receive until `ask` is answered."""
        began = heard = time.monotonic()
        silent_s = 0.0
        while ask in self._where:
            if self.is_left:
                raise CancelledError
            if self._timeout_s and time.monotonic() - began > self._timeout_s:
                raise RuntimeError(f"DataLoader timed out after {self._timeout_s:g} seconds")
            number = self._where[ask]
            try:
                self._receive(number)
            except Silent as error:
                silent_s += ALIVE_S
                if silent_s < self._route.patience_s:
                    continue
                self._lost(number, error, silent_s)
            except (OSError, ProtocolError) as error:
                self._lost(number, error, time.monotonic() - heard)
            silent_s, heard = 0.0, time.monotonic()

    def _receive(self, number: int) -> None:
        """Take the next frame of a fetcher, and all that have come with it."""
        link = self._links[number]
        for message, body in link.receive(self._blocks):
            self._route.answered(number)
            if isinstance(message, Response):
                self._take(link, message, body)
            if self._links.get(number) is not link:
                return

    def _take(self, link: FetcherLink, response: Response, body: memoryview) -> None:
        """Take the response to the oldest requests on a connection."""
        asked, bodies = link.asked, 1 + response.more
        ask = asked[0] if len(asked) >= bodies else None
        if ask is None or response.slot != ask.slot or response.epoch != ask.epoch:
            raise ProtocolError(
                f"{link.address} was asked {ask} and answered with batch {response.slot} of "
                f"epoch {response.epoch}, and {response.more} more"
            )
        size = len(body) // bodies
        for number, one in enumerate([asked.popleft() for _ in range(bodies)]):
            own = body[number * size : (number + 1) * size]
            self._take_one(one, response, memoryview(bytearray(own)) if size <= _FEW_BYTES else own)

    def _take_one(self, ask: LoaderRequest, response: Response, body: memoryview) -> None:
        del self._where[ask]
        first = self._instead.pop(ask, ask) if self._instead else ask
        instead = self._after(ask, first, response, body)
        if instead is not None:
            self._instead[instead] = first
            self._send_later(instead)
            self._flush()
            return
        if first is not ask:
            del self._where[first]
        self._here[first] = response, body

    def _after(
        self, ask: LoaderRequest, first: LoaderRequest, response: Response, body: memoryview
    ) -> LoaderRequest | None:
        """Return what to ask after an answer; None when it is the answer to the first request."""
        order = response.order
        is_other = order != self._order and order != 0 and self._order is not None
        if first is ask and is_other:
            return LoaderRequest(RequestKind.ORDER, ask.epoch, ask.slot)
        has_indices = ask.kind is RequestKind.ORDER and response.kind is ResponseKind.VALUE
        if has_indices and first is not ask:
            if is_other:
                raise RunLost(_OTHER_ORDER.format(epoch=ask.epoch))
            return LoaderRequest(RequestKind.GET, first.epoch, first.slot, bytes(body))
        return None

    def _lost(self, number: int, error: Exception, silent_s: float = 0.0) -> None:
        """Close a connection that is of no use any more; ask elsewhere what it still owes.

        Raises:
            RunLost: No fetcher is left to ask.
            OSError: `error` itself, where the cell raised it.
        """
        if is_of_the_cell(error):
            raise error
        link = self._links.pop(number)
        link.close()
        owed = [*link.asked, *link.unsent]
        self._route.failed(number, error, silent_s)
        self.retried += len(owed)
        for ask in owed:
            self._send_later(ask)
        self._flush()


def received(response: Response, body: memoryview) -> Delivered:
    """Return what a rank gets by the response to GET or PEEK.

    Raises:
        ProtocolError: It is no such response.
    """
    kind = response.kind
    if kind is ResponseKind.BATCH:
        batch, order = encode.decode(body, response.head_bytes), response.order
        return Delivered(response.units, batch, len(body), order=order)
    if kind is ResponseKind.ERROR:
        return Delivered(1, failure=encode.from_bytes(bytes(body)))
    if kind is ResponseKind.VOID:
        return Delivered(VOID)
    if kind is ResponseKind.PEEKED:
        return Delivered(response.units, order=response.order)
    raise ProtocolError(f"a request for a batch was answered with {kind.name}")
