"""A lane: one process of a fetcher, which prepares one loader's batches and sends them itself.

The main thread runs the user's dataset, so that it meets the same conditions as in a worker of a
local DataLoader, and between two batches it may serve the connections; each of them has a thread of
its own for when the dataset takes its time. A batch goes from the memory where the dataset left it
straight into the socket, or once into memory that the rank maps.
"""

import gc
import json
import socket
import ssl
import sys
import time
from collections.abc import MutableSequence, Sequence
from typing import Any

import torch
from torch._utils import ExceptionWrapper

from taas_magic.data import encode
from taas_magic.data.answer import Answer, Sent
from taas_magic.data.connection import Connection
from taas_magic.data.door import Door
from taas_magic.data.lane_spec import LaneSpec
from taas_magic.data.outbox import LIGHT_BYTES, Outbox
from taas_magic.data.outcome import Ended, Failed, Opened, is_counted, units_of
from taas_magic.data.shard import VOID
from taas_magic.data.share import Share
from taas_magic.data.shelf import Shelf
from taas_magic.data.sockets import Socket
from taas_magic.data.source import Source
from taas_magic.data.spill import Spill
from taas_magic.data.stock import Key
from taas_magic.data.talk import Talk
from taas_magic.data.visits import Visits
from taas_magic.data.wire import Kind

STATS = (
    *("prepared", "sent", "sent_bytes", "ready", "ready_bytes"),
    *("fetch_s", "fetch_cpu_s", "refused", "idle"),
    *("spilled_bytes", "spill_refused"),
)
"""What a lane counts, in the order of its slots in the shared array."""

_IDLE, _SPILLED = STATS.index("idle"), STATS.index("spilled_bytes")
_STOCK_S = 0.1


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
        self._spec, self._listeners = spec, listeners
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
        self._spill = Spill(spec.spill, spec.spill_bytes) if spec.spill is not None else None
        follows = self._source.follows if self._source and self._source.streams else None
        self.shelf = Shelf(
            spec.buffer_bytes,
            follows,
            spec.follows_a_death,
            on_idle=self._rest,
            disk=self._spill,
        )
        self._ahead = Share(spec, self._opened, self._is_filled)
        self._sent = Sent(self.stats, STATS.index("sent"), STATS.index("sent_bytes"))
        self._door = Door(spec, tls, self._serve, self._refused)
        self._visits = Visits(is_allowed=not spec.follows_a_death)
        self._stock_taken = 0.0

    def run(self) -> None:
        """Serve until the process ends. Blocks; call it in the main thread."""
        # What is here stays; looking through it for garbage would touch all of a large dataset.
        gc.freeze()
        sys.setswitchinterval(0.001)
        torch.set_num_threads(1)
        for listener in self._listeners:
            self._door.open(listener)
        self.shelf.work_ahead(self._ahead)
        while (key := self.shelf.next()) is not None:
            self.stats[_IDLE] = 0.0
            if self.shelf.wants(key):
                self._ahead.reached(key.epoch, key.slot)
            self.shelf.put(key, self._prepare(key))
            self._look_around(time.monotonic())

    def _opened(self, epoch: int) -> Opened | None:
        try:
            return self._source.open(epoch) if self._source else None
        except Failed:
            return None

    def _is_filled(self) -> bool:
        """Whether there is as much as was asked for before the ranks."""
        spec, shelf = self._spec, self.shelf
        spilled_bytes = self._spill.bytes if self._spill is not None else 0
        has_batches = shelf.ready_batches >= spec.fill_batches
        return has_batches and shelf.ready_bytes + spilled_bytes >= spec.fill_bytes

    def _rest(self) -> float | None:
        """There is nothing to prepare, or no room for it; returns for how long to rest."""
        self.stats[_IDLE] = 1.0
        self._take_stock()
        return self._visits.rest(time.monotonic())

    def _look_around(self, now: float) -> None:
        """Between two batches: what else is to be done now and then."""
        self._visits.look_in(now)
        if now - self._stock_taken > _STOCK_S:
            self._take_stock()

    def _take_stock(self) -> None:
        self._stock_taken = time.monotonic()
        self.stats[3], self.stats[4] = self.shelf.ready_batches, self.shelf.ready_bytes
        # A system call, so not for every batch; beside visits this thread does nothing but prepare.
        self.stats[6] = time.thread_time() - self._visits.cpu_s
        if self._spill is not None:
            self.stats[_SPILLED] = self._spill.bytes
            self.stats[_SPILLED + 1] = float(self._spill.is_full)
        if self._source is not None:
            self._source.forget_before(self.shelf.oldest_epoch)

    def _serve(self, sock: Socket, talk: Talk) -> None:
        outbox = Outbox(sock, self._sent, self._spec.shared_bytes)
        connection = Connection(sock, talk, self.shelf, outbox, self._visits.are_frequent)
        self._visits.add(connection)
        try:
            connection.run()
        finally:
            self._visits.remove(connection)

    def _refused(self) -> None:
        self.stats[STATS.index("refused")] += 1

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
        if key.kind is Kind.GET:
            return self._batch(self._source, key)
        if key.kind is Kind.OPEN:
            opened = self._source.open(key.epoch)
            if self._spec.units is not None:
                opened = opened._replace(counted=self._is_counted(key.epoch))
            return Answer(Kind.OPENED, json.dumps(opened).encode())
        if key.kind is Kind.SAMPLE:
            index = encode.from_bytes(key.detail)
            return Answer(Kind.VALUE, encode.as_bytes(self._source.sample(index)))
        if key.kind is Kind.STATE:
            return Answer(Kind.VALUE, encode.as_bytes(self._state(key)))
        indices = encode.as_bytes(self._source.indices(key.epoch, key.slot))
        return Answer(Kind.VALUE, indices, order=self._source.digest(key.epoch))

    def _batch(self, source: Source, key: Key) -> Answer:
        order = source.digest(key.epoch)
        given = encode.from_bytes(key.detail) if key.detail else None
        batch = source.prepare(key.epoch, key.slot, given)
        answer = Answer(Kind.BATCH, encode.encode(batch), units_of(batch), order)
        if self._visits.sums and answer.size <= LIGHT_BYTES:
            # By a connection's thread it would take longer: each call of torch's hands the
            # interpreter over to this one. For a large batch that is as it should be.
            answer.checksum()
        return answer

    def _state(self, key: Key) -> Any:
        """What a stream's dataset says of itself; or, where a rank has it, what it is to be."""
        assert self._source is not None
        if not key.detail:
            return self._source.state(key.epoch, key.slot)
        self._source.restore(key.epoch, key.slot, encode.from_bytes(key.detail))
        return None

    def _is_counted(self, epoch: int) -> bool:
        assert self._source is not None
        try:
            return is_counted(self._source.prepare(epoch, 0))
        except (Ended, Failed):
            return False


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
