"""The workers of one loader, as their server has them: started, told what to do next, heard.

Runs in a fetcher's server, on its loop, and never waits: told by the ranks' connections what is
wanted (`buffer`), it tells workers what to prepare (`worker`) and says whose answer has come.
"""

import multiprocessing
import selectors
import shutil
import signal
import socket
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from taas_magic.data import worker
from taas_magic.data.buffer import Ahead, Answer, Buffer, Disk, FetcherShare
from taas_magic.data.dataset import Opened
from taas_magic.data.memory import largest_file_bytes
from taas_magic.data.protocol import Kind
from taas_magic.data.worker import DISK_FULL, SPILLED, Key, Reply, WorkerHandle, WorkerSpec
from taas_magic.messages import FetcherCounts

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
    workers: int
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
        sent: How many batches ranks were sent; the server counts, here and in `sent_bytes`.
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
        fits_bytes = served.workers * (largest_file_bytes() // 2)
        self._budget_bytes = min(served.budget_bytes, fits_bytes)
        self.buffer = Buffer(self._budget_bytes, Ahead(served.share, self._is_filled), self._home)
        folder = served.spec.spill
        self._disk = Disk(folder, served.spill_bytes) if folder is not None else None
        self._streams: int | None = None
        self._positions: dict[int, tuple[int, int]] = {}
        self._held: dict[int, deque[Key]] = {}
        self._tries: dict[Key, int] = {}
        self._oldest = self._lost = self._commands = 0
        self._prepared = self.sent = self.sent_bytes = 0
        self._wall_s: dict[int, float] = {}
        self._cpu_s = 0.0
        self._workers: dict[int, WorkerHandle] = {}
        self._suspects: set[int] = set()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Forked before there is any connection that a child could keep open.
        context: Any = multiprocessing.get_context("fork")
        arguments = (served.spec, theirs, self._control)
        self._parent = context.Process(target=worker.parent_main, args=arguments)
        self._parent.start()
        theirs.close()
        for number in range(served.workers):
            self._start(number)
        selector.register(self._control, selectors.EVENT_READ, self._hear_parent)

    def stats(self) -> FetcherCounts:
        """Return what it has counted."""
        disk = self._disk
        return FetcherCounts(
            prepared=self._prepared,
            sent=self.sent,
            sent_bytes=self.sent_bytes,
            ready=self.buffer.ready_batches,
            ready_bytes=self.buffer.ready_bytes,
            fetch_s=sum(self._wall_s.values()),
            fetch_cpu_s=self._cpu_s,
            fetch_most_s=max(self._wall_s.values(), default=0.0),
            idle=sum(not one.told for one in self._workers.values()),
            spilled_bytes=disk.used_bytes if disk else 0,
            spill_refused=bool(disk and disk.is_full),
            workers=self._served.workers,
            budget_bytes=self._budget_bytes,
        )

    def dispatch(self) -> None:
        """Give every worker that has room something to do.

        Raises:
            RuntimeError: Workers end again and again.
        """
        oldest = self.buffer.oldest_epoch
        if oldest > self._oldest:
            self._oldest = oldest
            for one in self._workers.values():
                if one.is_up:
                    one.forget_before(oldest)
        for one in self._workers.values():
            if not one.has_room:
                continue
            for _ in range(one.room):
                key, is_for_disk = self._choose(one)
                if key is None:
                    break
                if self._streams is not None and key.kind is Kind.GET:
                    item, stream = divmod(key.slot, self._streams)
                    self._positions[stream] = key.epoch, item + 1
                self._commands = (self._commands + 1) & 0xFFFFFFFF
                one.tell(self._commands, key, SPILLED if is_for_disk else 0)
            one.send()

    def close(self) -> None:
        """End all workers."""
        self._selector.unregister(self._control)
        # Closing it would say nothing: the parents of other loaders' workers have it, too.
        self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        for one in self._workers.values():
            self._hang_up(one)
        self._parent.join()
        if self._spec.spill is not None:
            shutil.rmtree(self._spec.spill, ignore_errors=True)

    def _choose(self, one: WorkerHandle) -> tuple[Key | None, bool]:
        """Return what a worker does next, and whether that goes to disk."""
        follows = None if self._streams is None else self._follows
        key = self.buffer.choose(one.number, follows)
        if key is not None:
            return key, False
        is_full = self.buffer.is_full
        if is_full and (self.buffer.has_open or not (self._disk and self._disk.has_room)):
            return None, False
        return self._choose_ahead(one), is_full

    def _choose_ahead(self, one: WorkerHandle) -> Key | None:
        """Return the next key of the share; those of another worker's streams are kept for it."""
        held = self._held.get(one.number)
        while held:
            key = held.popleft()
            # A rank may have asked for it since.
            if self.buffer.begin(key):
                return key
        for _ in range(4 * self._served.workers):
            ahead = self.buffer.choose_ahead()
            home = None if ahead is None else self._home(ahead)
            if ahead is None or home is None or home == one.number:
                return ahead
            self.buffer.postpone(ahead)
            self._held.setdefault(home, deque()).append(ahead)
        return None

    def _home(self, key: Key) -> int | None:
        """Return the worker that has to prepare a key; None: any may."""
        if key.kind in (Kind.OPEN, Kind.ORDER):
            # One alone enumerates: a sampler may give another order each time it is asked.
            return 0
        if key.kind in (Kind.GET, Kind.STATE) and not (key.kind is Kind.GET and key.detail):
            return self._served.share.home(key.slot, self._streams)[1]
        return None

    def _follows(self, key: Key) -> bool:
        """Return whether a stream need not go back for a batch."""
        assert self._streams is not None
        epoch, item = self._positions.get(key.slot % self._streams, (-1, 0))
        return epoch != key.epoch or key.slot // self._streams >= item

    def _is_filled(self) -> bool:
        """Return whether there is as much as was asked for before the ranks."""
        served, buffer = self._served, self.buffer
        ready_bytes = buffer.ready_bytes + (self._disk.used_bytes if self._disk else 0)
        return buffer.ready_batches >= served.fill_batches and ready_bytes >= served.fill_bytes

    def _start(self, number: int) -> None:
        self._control.send(f"{number}".encode())

    def _hear_parent(self) -> None:
        said, descriptors, _, _ = socket.recv_fds(self._control, 64, 1)
        if not said:
            raise RuntimeError(
                f'the process that starts the workers of loader "{self._spec.loader}" has ended'
            )
        number, _, code = said.decode().partition(" ")
        if not descriptors:
            self._lose(int(number), int(code))
            return
        sock = socket.socket(fileno=descriptors[0])
        one = WorkerHandle(int(number), next(self._arenas), sock, int(number) in self._suspects)
        self._workers[one.number] = one
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

    def _take(self, one: WorkerHandle, key: Key, reply: Reply) -> None:
        self._prepared += 1
        self._wall_s[one.number] = self._wall_s.get(one.number, 0.0) + reply.wall_s
        self._cpu_s += reply.cpu_s
        if self._disk is not None and reply.flags & DISK_FULL:
            self._disk.is_full = True
        answer = Answer(reply, one, disk=self._disk if reply.flags & SPILLED else None)
        if self._tries:
            self._tries.pop(key, None)
        if key.kind is Kind.OPEN:
            opened = None
            if answer.kind is Kind.OPENED:
                opened = msgspec.json.decode(answer.body(), type=Opened)
                self._streams = opened.streams
            self.buffer.ahead.opened(key.epoch, opened)
        self._put(key, answer)

    def _put(self, key: Key, answer: Answer) -> None:
        for connection in self.buffer.put(key, answer):
            self._ready(connection)

    def _hang_up(self, one: WorkerHandle) -> None:
        if not one.is_gone:
            self._selector.unregister(one.socket)
            one.close()

    def _lose(self, number: int, exitcode: int) -> None:
        """Start a worker that has ended again; the first of its keys may be what ended it."""
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
            raise RuntimeError(f"{_MAX_LOST} workers ended, at last: {said}")
        self._note(said)
        self._positions.clear()
        for at, key in enumerate(one.told.values()):
            if not at:
                self._tries[key] = self._tries.get(key, 0) + 1
                if self._tries[key] >= _TRIES:
                    self._put(key, _given_up(key, said))
                    continue
            self.buffer.lost(key)


def _given_up(key: Key, said: str) -> Answer:
    text = (
        f"batch {key.slot} of epoch {key.epoch} was asked for {_TRIES} times, and every time the "
        f"process that prepared it ended, at last: {said}. Its data may crash the process that "
        "reads it, or need more memory than the fetcher's host has"
    ).encode()
    reply = Reply(0, Kind.LOST, 0, 0, 1, 0, 0, len(text), 0, 0, 0.0, 0.0)
    return Answer(reply, text=text)
