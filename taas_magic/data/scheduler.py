"""The workers of one loader, as their server has them: started, told what to do next, heard.

Runs in a fetcher's server, on its loop, and never waits: told by the ranks' connections what is
wanted (`buffer`), it tells workers what to prepare (`worker`) and says whose answer has come.
"""

import itertools
import multiprocessing
import selectors
import signal
import socket
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import structs

from taas_magic.data import protocol, worker
from taas_magic.data.buffer import Ahead, Buffer, Disk, FetcherShare, Prepared
from taas_magic.data.memory import largest_file_bytes
from taas_magic.data.protocol import LoaderRequest, Reply, RequestKind, ResponseKind
from taas_magic.data.worker import WorkerHandle, WorkerSpec
from taas_magic.messages import FetcherCounts

_read_change = msgspec.msgpack.Decoder(protocol.WorkerChange).decode

_TRIES = 10
_MAX_LOST = 100


@dataclass(frozen=True)
class ServedLoader:
    """One loader of a server.

    Attributes:
        budget_bytes: How much prepared data may wait in memory.
        spill_bytes: How much may wait on disk.
        fill_batches: Before any rank asks, so many are prepared, of later epochs, too.
        fill_bytes: The same in bytes; 0 of both: of the first epoch, as many as there is room for.
    """

    spec: WorkerSpec
    share: FetcherShare
    budget_bytes: int
    spill_bytes: int = 0
    fill_batches: int = 0
    fill_bytes: int = 0


class Scheduler:
    """One loader of a server: its buffer, its workers, and what they have counted.

    Args:
        selector: Of the server's loop.
        arenas: Numbers for the arenas of its workers.
        ready: Called with a connection that an answer is ready for.
        note: Called with a sentence for the user.

    Attributes:
        counts: What is counted; what ranks were sent is counted by the server.
    """

    def __init__(
        self,
        served: ServedLoader,
        selector: selectors.BaseSelector,
        arenas: Iterator[int],
        ready: Callable[[Hashable], None],
        note: Callable[[str], None],
    ) -> None:
        self._served, self._spec, self._ready, self._note = served, served.spec, ready, note
        self._selector, self._arenas = selector, arenas
        # half: spans that ranks still read lie among those that are free again
        fits_bytes = served.share.workers * (largest_file_bytes() // 2)
        budget_bytes = min(served.budget_bytes, fits_bytes)
        self.buffer = Buffer(budget_bytes, Ahead(served.share, self._is_filled), self._home)
        folder = served.spec.spill
        self._disk = Disk(folder, served.spill_bytes) if folder is not None else None
        self._streams: int | None = None
        self._positions: dict[int, tuple[int, int]] = {}
        self._tries: dict[LoaderRequest, int] = {}
        self._lost, self._numbers = 0, itertools.count()
        self._wall_s: dict[int, float] = {}
        self.counts = FetcherCounts(workers=served.share.workers, budget_bytes=budget_bytes)
        self._workers: dict[int, WorkerHandle] = {}
        self._suspects: set[int] = set()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Forked before there is any connection that a child could keep open.
        context: Any = multiprocessing.get_context("fork")
        arguments = (served.spec, theirs, self._control)
        self._parent = context.Process(target=worker.parent_main, args=arguments)
        self._parent.start()
        theirs.close()
        for number in range(served.share.workers):
            self._start(number)
        selector.register(self._control, selectors.EVENT_READ, self._hear_parent)

    def stats(self) -> FetcherCounts:
        """Return what it has counted."""
        disk = self._disk
        return structs.replace(
            self.counts,
            ready=self.buffer.ready_batches,
            ready_bytes=self.buffer.ready_bytes,
            fetch_s=sum(self._wall_s.values()),
            fetch_most_s=max(self._wall_s.values(), default=0.0),
            idle=sum(one.is_idle for one in self._workers.values()),
            spilled_bytes=disk.used_bytes if disk else 0,
            spill_refused=bool(disk and disk.is_full),
        )

    def dispatch(self) -> None:
        """Give every worker that has room something to do.

        Raises:
            RuntimeError: Workers end again and again.
        """
        for one in self._workers.values():
            if not one.has_room:
                continue
            for _ in range(one.room):
                request, to_disk = self._choose(one)
                if request is None:
                    break
                if self._streams is not None and request.kind is RequestKind.GET:
                    item, stream = divmod(request.slot, self._streams)
                    self._positions[stream] = request.epoch, item + 1
                one.tell(next(self._numbers), request, to_disk)
            one.send(self.buffer.oldest_epoch)

    def close(self) -> None:
        """End all workers."""
        self._selector.unregister(self._control)
        # Closing it would say nothing: the parents of other loaders' workers have it, too.
        self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        for one in self._workers.values():
            self._hang_up(one)
        self._parent.join()

    def _choose(self, one: WorkerHandle) -> tuple[LoaderRequest | None, bool]:
        """Return what a worker does next, and whether that goes to disk."""
        follows = None if self._streams is None else self._follows
        request = self.buffer.choose(one.number, follows)
        if request is not None:
            return request, False
        is_full = self.buffer.is_full
        if is_full and (self.buffer.has_open or not (self._disk and self._disk.has_room)):
            return None, False
        return self.buffer.choose_ahead(one.number), is_full

    def _home(self, request: LoaderRequest) -> int | None:
        """Return the worker that has to prepare what is requested; None: any may."""
        kind = request.kind
        if kind in (RequestKind.OPEN, RequestKind.ORDER):
            # One alone enumerates: a sampler may give another order each time it is asked.
            return 0
        has_indices = kind is RequestKind.GET and request.detail
        if kind is RequestKind.SAMPLE or has_indices:
            return None
        return self._served.share.home(request.slot, self._streams)[1]

    def _follows(self, request: LoaderRequest) -> bool:
        """Return whether a stream need not go back for a batch."""
        assert self._streams is not None
        epoch, item = self._positions.get(request.slot % self._streams, (-1, 0))
        return epoch != request.epoch or request.slot // self._streams >= item

    def _is_filled(self) -> bool:
        """Return whether there is as much as was asked for before the ranks."""
        served, buffer = self._served, self.buffer
        ready_bytes = buffer.ready_bytes + (self._disk.used_bytes if self._disk else 0)
        return buffer.ready_batches >= served.fill_batches and ready_bytes >= served.fill_bytes

    def _start(self, number: int) -> None:
        self._control.send(msgspec.msgpack.encode(protocol.WorkerChange(number)))

    def _hear_parent(self) -> None:
        said, descriptors, _, _ = socket.recv_fds(self._control, 64, 1)
        if not said:
            raise RuntimeError(
                f'the process that starts the workers of loader "{self._spec.loader}" has ended'
            )
        number, exitcode = structs.astuple(_read_change(said))
        if exitcode is not None:
            self._lose(number, exitcode)
            return
        sock = socket.socket(fileno=descriptors[0])
        one = WorkerHandle(number, next(self._arenas), sock, number in self._suspects)
        self._workers[number] = one
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._hear(one))

    def _hear(self, one: WorkerHandle) -> None:
        if one.is_gone:
            return  # its parent has said so in the same moment
        try:
            for reply in one.hear():
                self._take(one, one.told.pop(reply.number), reply)
        except EOFError:
            # Its parent says how it ended; until then nothing is to be heard here.
            self._hang_up(one)

    def _take(self, one: WorkerHandle, request: LoaderRequest, reply: Reply) -> None:
        self.counts.prepared += 1
        self._wall_s[one.number] = self._wall_s.get(one.number, 0.0) + reply.wall_s
        self.counts.fetch_cpu_s += reply.cpu_s
        if self._disk is not None and reply.disk_is_full:
            self._disk.is_full = True
        prepared = Prepared(reply, one, disk=self._disk if reply.on_disk else None)
        if self._tries:
            self._tries.pop(request, None)
        if request.kind is RequestKind.OPEN:
            opened = None
            if reply.kind is ResponseKind.OPENED:
                opened = protocol.read_opened(prepared.body())
                self._streams = opened.streams
            self.buffer.ahead.opened(request.epoch, opened)
        self._put(request, prepared)

    def _put(self, request: LoaderRequest, prepared: Prepared) -> None:
        for connection in self.buffer.put(request, prepared):
            self._ready(connection)

    def _hang_up(self, one: WorkerHandle) -> None:
        if not one.is_gone:
            self._selector.unregister(one.socket)
            one.close()

    def _lose(self, number: int, exitcode: int) -> None:
        """Start a worker that has ended again; the first of its requests may be what ended it."""
        one = self._workers.pop(number)
        self._hear(one)  # what it said before it ended
        self._hang_up(one)
        self._suspects.add(number)
        self._start(number)
        how = f"left with exit code {exitcode}"
        if exitcode < 0:
            how = f"was killed by {signal.Signals(-exitcode).name}"
        said = (
            f'worker {number} of {self._spec.where} (loader "{self._spec.loader}", '
            f"pid {one.pid}) {how}; it was started again"
        )
        self._lost += 1
        if self._lost > _MAX_LOST:
            raise RuntimeError(f"{self._lost} workers have ended. The last time, {said}")
        self._note(said)
        self._positions.clear()
        for at, request in enumerate(one.told.values()):
            if not at:
                self._tries[request] = self._tries.get(request, 0) + 1
                if self._tries[request] >= _TRIES:
                    self._put(request, _given_up(request, said))
                    continue
            self.buffer.lost(request)


def _given_up(request: LoaderRequest, said: str) -> Prepared:
    text = (
        f"batch {request.slot} of epoch {request.epoch} was asked for {_TRIES} times, and each "
        f"time the worker that prepared it ended. The last time, {said}. Its data may crash the "
        "process that reads it, or need more memory than the fetcher's host has"
    ).encode()
    return Prepared(Reply(0, ResponseKind.LOST, 1, body_bytes=len(text)), text=text)
