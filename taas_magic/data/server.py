"""A lane: one process of a fetcher, which prepares one loader's batches and sends them itself.

The main thread runs the user's dataset and nothing else, so that it meets the same conditions as in
a worker of a local DataLoader. One thread for each connection hears a rank's questions, answers
them in order, and gathers what is ready into one system call. A batch goes from the memory where
the dataset left it straight into the socket, or once into memory that the rank maps.
"""

import errno
import json
import logging
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch._utils import ExceptionWrapper

from taas_magic.data import encode, link
from taas_magic.data.connection import PROOF_S, Answer, Connection, Sent, introduce
from taas_magic.data.link import TICK_S, Socket
from taas_magic.data.shard import VOID, home
from taas_magic.data.shelf import Key, Shelf
from taas_magic.data.source import Ended, Failed, Opened, Source, is_counted, units_of
from taas_magic.data.wire import Kind
from taas_magic.errors import ProtocolError

STATS = (
    *("prepared", "sent", "sent_bytes", "ready", "ready_bytes"),
    *("fetch_s", "fetch_cpu_s", "refused"),
)
"""What a lane counts, in the order of its slots in the shared array."""

_log = logging.getLogger(__name__)
_NEXT_EPOCH_BATCHES = 2
_GREETERS = 128
_STOCK_S = 0.1


@dataclass(frozen=True)
class LaneSpec:
    """What a lane needs to know.

    Attributes:
        payload: The pickled loader.
        loader: Its name.
        seed: The run's seed.
        key: The run's key.
        fetcher: Number of the fetcher.
        lane: Number of this lane in its fetcher.
        number: Number of this lane among all lanes of all fetchers.
        lanes: How many there are.
        stride: Distance of the slots that these lanes are asked for (see `shard.home`).
        first: The first of them.
        buffer_bytes: How much prepared data may wait in memory.
        shared_bytes: How much memory may be shared with the ranks of this host.
        units: The bound of `--units`, None for none.
        host: Name of the host, for messages.
        follows_a_death: Whether it takes the place of a lane that died, perhaps of a batch.
    """

    payload: bytes = field(repr=False)
    loader: str
    seed: int
    key: bytes = field(repr=False)
    fetcher: int = 0
    lane: int = 0
    number: int = 0
    lanes: int = 1
    stride: int = 1
    first: int = 0
    buffer_bytes: int = 256 << 20
    shared_bytes: int = 512 << 20
    units: int | None = None
    host: str = ""
    follows_a_death: bool = False


class Lane:
    """Prepares and serves; lives as long as its process.

    Args:
        spec: What it needs to know.
        listeners: Bound sockets, TCP and perhaps Unix; they belong to the fetcher, which hands the
            same ones to the next process if this one dies.
        tls: Context for TCP connections.
        stats: Where it counts (`STATS`), shared with the fetcher.
        loader: The loader, where the fetcher has unpickled it for all its lanes.
    """

    def __init__(
        self,
        spec: LaneSpec,
        listeners: Sequence[socket.socket],
        tls: ssl.SSLContext | None = None,
        stats: MutableSequence[float] | None = None,
        loader: Any = None,
    ) -> None:
        self._spec, self._listeners, self._tls = spec, listeners, tls
        self.stats = stats if stats is not None else [0.0] * len(STATS)
        where = f"fetcher {spec.fetcher} on host {spec.host or socket.gethostname()}"
        self._source: Source | None = None
        self._broken: Answer | None = None
        try:
            self._source = Source(spec.payload, spec.loader, spec.seed, where, spec.lane, loader)
        except Failed as failure:
            self._broken = _failed(failure)
        except Exception:
            self._broken = _caught(f"in {where} (loader {spec.loader!r}, when it was unpickled)")
        self.shelf = Shelf(spec.buffer_bytes, self._follows, spec.follows_a_death)
        self._ahead = _Ahead(self)
        self._sent = Sent(self.stats, STATS.index("sent"), STATS.index("sent_bytes"))
        about = {"loader": spec.loader, "fetcher": spec.fetcher, "lane": spec.lane}
        self._about = json.dumps(about).encode()
        self._stock_taken = 0.0
        self._greeters = threading.BoundedSemaphore(_GREETERS)

    @property
    def spec(self) -> LaneSpec:
        """What the lane was told."""
        return self._spec

    def run(self) -> None:
        """Serve until the process ends. Blocks; call it in the main thread."""
        sys.setswitchinterval(0.001)
        torch.set_num_threads(1)
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        self.shelf.work_ahead(self._ahead)
        while (key := self.shelf.next()) is not None:
            if self.shelf.wants(key):
                self._ahead.reached(key.epoch, key.slot)
            self.shelf.put(key, self._prepare(key))
            self._take_stock()

    def opened(self, epoch: int) -> Opened | None:
        """What is known of an epoch; None when its sampler raised. In the main thread only."""
        try:
            return self._source.open(epoch) if self._source else None
        except Failed:
            return None

    def _follows(self, epoch: int, slot: int) -> bool:
        return self._source is None or self._source.follows(epoch, slot)

    def _take_stock(self) -> None:
        self.stats[3], self.stats[4] = self.shelf.ready_batches, self.shelf.ready_bytes
        if (now := time.monotonic()) - self._stock_taken > _STOCK_S:
            # A system call, so not for every batch; this thread does nothing but prepare.
            self._stock_taken, self.stats[6] = now, time.thread_time()

    def _prepare(self, key: Key) -> Answer:
        if self._broken is not None:
            return self._broken
        started = time.perf_counter()
        try:
            return self._answer(key)
        except Ended:
            self._ahead.ended(key.epoch, key.slot)
            return Answer(Kind.VOID, units=VOID)
        except Failed as failure:
            return _failed(failure)
        except Exception:
            return _caught(f"while batch {key.slot} of {self._spec.loader!r} was being pickled")
        finally:
            self.stats[0] += 1
            self.stats[5] += time.perf_counter() - started

    def _answer(self, key: Key) -> Answer:
        assert self._source is not None
        if key.kind is Kind.OPEN:
            opened = self._source.open(key.epoch)
            if self._spec.units is not None:
                opened = opened._replace(counted=self._is_counted(key.epoch))
            return Answer(Kind.OPENED, json.dumps(opened).encode())
        if key.kind is Kind.SAMPLE:
            index = encode.from_bytes(key.detail)
            return Answer(Kind.VALUE, encode.as_bytes(self._source.sample(index)))
        order = self._source.open(key.epoch).order
        if key.kind is Kind.ORDER:
            indices = encode.as_bytes(self._source.indices(key.epoch, key.slot))
            return Answer(Kind.VALUE, indices, order=order)
        given = encode.from_bytes(key.detail) if key.detail else None
        batch = self._source.prepare(key.epoch, key.slot, given)
        return Answer(Kind.BATCH, encode.encode(batch), units_of(batch), order)

    def _is_counted(self, epoch: int) -> bool:
        assert self._source is not None
        try:
            return is_counted(self._source.prepare(epoch, 0))
        except (Ended, Failed):
            return False

    def _accept(self, listener: socket.socket) -> None:
        while True:
            self._greeters.acquire()
            try:
                sock, _ = listener.accept()
            except OSError as error:
                self._greeters.release()
                if error.errno not in (errno.ECONNABORTED, errno.EMFILE, errno.ENFILE):
                    return
                time.sleep(TICK_S / 10)
                continue
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: Socket) -> None:
        spec = self._spec
        try:
            try:
                sock = self._greet(sock)
                talk = introduce(sock, self._spec.key, self._about)
            finally:
                self._greeters.release()
            link.tick(sock, TICK_S)
            Connection(sock, talk, self.shelf, self._sent, self._spec.shared_bytes).run()
        except ProtocolError as error:
            self.stats[STATS.index("refused")] += 1
            _log.warning("lane %s of %r refused a peer: %s", spec.lane, spec.loader, error)
        except OSError as error:
            # A rank that is gone has nothing more to ask, and one that is not asks again.
            _log.info("lane %s of %r lost a peer: %s", spec.lane, spec.loader, error)
        finally:
            sock.close()

    def _greet(self, sock: Socket) -> Socket:
        sock.settimeout(PROOF_S)
        link.keep_watch(sock)
        if self._tls is None or sock.family == socket.AF_UNIX:
            link.tick(sock, PROOF_S)
            return sock
        return self._tls.wrap_socket(sock, server_side=True)


class _Ahead(Iterator[Key]):
    """What a lane prepares when nobody waits: its own share, from where the ranks are."""

    def __init__(self, lane: Lane) -> None:
        self._lane, self._epoch, self._slot = lane, 0, 0
        self._keys = self._share(0, 0)
        self._ends: dict[int, int] = {}

    def __next__(self) -> Key:
        return next(self._keys)

    def reached(self, epoch: int, slot: int) -> None:
        """A rank asked for this batch; what the lane works ahead on lies behind it."""
        if epoch > self._epoch or (epoch == self._epoch and slot >= self._slot):
            self._epoch, self._slot = epoch, slot + 1
            self._keys = self._share(epoch, slot + 1)

    def ended(self, epoch: int, slot: int) -> None:
        """There is no batch in this slot: not worth going on behind it."""
        self._ends[epoch] = min(slot, self._ends.get(epoch, slot))

    def _share(self, epoch: int, first_slot: int) -> Iterator[Key]:
        spec = self._lane.spec
        for ahead in (0, 1):
            # Enumerating the order takes time: it is work like any other.
            yield Key(Kind.OPEN, epoch + ahead, 0)
            opened = self._lane.opened(epoch + ahead)
            if opened is None:
                return
            slots = self._slots(epoch + ahead, opened, first_slot if not ahead else 0)
            for done, slot in enumerate(slots):
                if ahead and done >= _NEXT_EPOCH_BATCHES:
                    return
                if spec.units is not None and slot >= spec.units:
                    return
                yield Key(Kind.GET, epoch + ahead, slot)

    def _slots(self, epoch: int, opened: Opened, first_slot: int) -> Iterator[int]:
        """This lane's slots of an epoch, as long as there are any."""
        spec, streams = self._lane.spec, opened.streams
        if streams is not None and spec.number >= streams:
            return
        for slot in count(first_slot):
            at_end = self._ends.get(epoch, opened.batches)
            if at_end is not None and slot >= at_end:
                return
            ours = streams is not None or slot % spec.stride == spec.first
            if ours and home(slot, streams, spec.lanes, spec.stride) == spec.number:
                yield slot


def _caught(where: str) -> Answer:
    return _failed(Failed(ExceptionWrapper(where=where)))  # type: ignore[no-untyped-call]


def _failed(failure: Failed) -> Answer:
    """An answer that raises again what the user's code raised."""
    wrapped: Any = failure.wrapped
    try:
        return Answer(Kind.ERROR, encode.as_bytes(wrapped))
    except Exception:
        wrapped.exc_type = RuntimeError
        return Answer(Kind.ERROR, encode.as_bytes(wrapped))
