"""The workers of one loader, as their server sees them: start, tell, hear, start again.

Nothing here waits: the server's loop calls when a socket has something to say.
"""

import logging
import mmap
import multiprocessing
import os
import selectors
import shutil
import signal
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taas_magic.data import worker
from taas_magic.data.memory import Mapping
from taas_magic.data.protocol import KINDS, Kind
from taas_magic.data.worker import DISK_FULL, REPLY, SPILLED, Key, Reply, WorkerSpec, spilled_file

_DEPTH_BYTES = 4 << 20
_DEPTH_S = 0.01
_LEAST_DEPTH, _MOST_DEPTH = 2, 64
"""How many commands lie with a worker: quick ones a round trip's worth; large batches take memory,
and of slow ones, which a rank waits for in their order, each worker should have the next."""

_MOST_FREES = 64
"""With one message: this, too, has to have room in a worker's socket."""

_log = logging.getLogger(__name__)


@dataclass
class Disk:
    """Where batches lie that memory has no room for.

    Attributes:
        folder: Where.
        limit_bytes: How much may lie there.
        used_bytes: How much does.
        is_full: Whether a worker found no room; nothing more is written then.
    """

    folder: Path
    limit_bytes: int
    used_bytes: int = 0
    is_full: bool = False

    @property
    def has_room(self) -> bool:
        """Whether more may be written."""
        return not self.is_full and self.used_bytes < self.limit_bytes


class Answer:
    """What a worker prepared: a batch, a value, a failure, or that there is nothing.

    Args:
        reply: What the worker said.
        worker: Who prepared it; None: nobody, `text` is the body.
        text: A body that lies in no arena.
        disk: Where the body lies; None: in the worker's arena.

    Attributes:
        memory_bytes: What its body takes of memory.
    """

    __slots__ = (
        *("_disk", "_holders", "_worker", "kind", "memory_bytes", "offset", "reply", "text"),
        "units",
    )

    def __init__(
        self,
        reply: Reply,
        worker: "WorkerHandle | None" = None,
        text: bytes = b"",
        disk: Disk | None = None,
    ) -> None:
        self.reply, self._worker, self.text, self._disk = reply, worker, text, disk
        self.memory_bytes = reply.body_bytes
        if disk is not None:
            disk.used_bytes += reply.body_bytes
            self.memory_bytes = 0
        self.kind, self.units, self.offset = KINDS[reply.kind], reply.units, reply.offset
        self._holders = 1

    @property
    def arena(self) -> "WorkerHandle | None":
        """Whose memory it lies in, if a rank of this host may map that."""
        return self._worker if self._disk is None else None

    def body(self) -> memoryview:
        """Its bytes."""
        if self._disk is not None:
            with self._file.open("rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if self._worker is None or not self.reply.body_bytes:
            return memoryview(self.text)
        return self._worker.memory.view(self.offset, self.reply.body_bytes)

    @property
    def _file(self) -> Path:
        assert self._disk is not None and self._worker is not None
        return spilled_file(self._disk.folder, self._worker.pid, self.reply.number)

    @property
    def is_shared(self) -> bool:
        """Whether anybody else waits for it or is being sent it: then no rank may change it."""
        return self._holders > 1

    def hold(self) -> None:
        """One more holds it."""
        self._holders += 1

    def release(self) -> None:
        """One less holds it; the last one's release frees its memory."""
        self._holders -= 1
        if self._holders:
            return
        if self._disk is not None:
            self._file.unlink(missing_ok=True)
            self._disk.used_bytes -= self.reply.body_bytes
        elif self._worker is not None and self.reply.body_bytes:
            self._worker.frees.append(self.offset)


class WorkerHandle:
    """One worker's socket, and what it was told.

    Args:
        number: Its number in its fetcher.
        sock: The server's end.

    Attributes:
        arena: A number that no other arena of the server has.
        memory: What it has written.
        frees: Spans of its arena that nobody reads any more; it is told with the next command.
        told: Keys that it has not answered, by the number of the command.
        pid: Its process; 0 as long as that has not begun.
        is_gone: Whether it has closed its end.
    """

    def __init__(self, number: int, arena: int, sock: socket.socket, is_suspect: bool) -> None:
        self.number, self.arena, self.socket = number, arena, sock
        self._most = 1 if is_suspect else _MOST_DEPTH
        self._depth = min(self._most, _LEAST_DEPTH)
        self.memory: Mapping
        self.frees: list[int] = []
        self.told: dict[int, Key] = {}
        self.pid, self.is_gone = 0, False
        self._unsent: list[tuple[bytes, int | None]] = []

    @property
    def is_up(self) -> bool:
        """Whether it can be told anything."""
        return self.pid > 0 and not self.is_gone

    @property
    def has_room(self) -> bool:
        """Whether it may be told more. As long as it has enough to do, it is not disturbed."""
        return self.is_up and len(self.told) <= self._depth // 2

    @property
    def room(self) -> int:
        """How much more."""
        return self._depth - len(self.told)

    def tell(self, number: int, key: Key, flags: int) -> None:
        """Lay a command ready."""
        self.told[number] = key
        self._unsent.append(worker.command(number, key, flags))

    def forget_before(self, epoch: int) -> None:
        """Lay ready that nobody asks for earlier epochs."""
        self._unsent.append((worker.forget_before(epoch), None))

    def send(self) -> None:
        """Send what is laid ready. A worker that is gone is noticed elsewhere."""
        if not self._unsent:
            return
        parts, self._unsent = self._unsent, []
        frees, self.frees = self.frees[:_MOST_FREES], self.frees[_MOST_FREES:]
        message = worker.free(frees)
        try:
            for text, descriptor in parts:
                if message and (
                    descriptor is not None or len(message) + len(text) > worker.MESSAGE_BYTES
                ):
                    self.socket.send(message)
                    message = b""
                message += text
                if descriptor is not None:
                    socket.send_fds(self.socket, [message], [descriptor])
                    os.close(descriptor)
                    message = b""
            if message:
                self.socket.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            _log.info("worker %d is gone: %s", self.number, error)

    def hear(self) -> Iterator[Reply]:
        """What it says, which has come; its first word is about itself.

        Raises:
            EOFError: It has ended.
        """
        try:
            message, descriptors, _, _ = socket.recv_fds(
                self.socket, worker.MESSAGE_BYTES, 1, socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return
        except ConnectionResetError:
            raise EOFError from None
        if not message:
            raise EOFError
        if not self.pid:
            (self.pid,) = struct.unpack("<I", message)
            self.memory = Mapping(descriptors[0])
            return
        largest, slowest_s = 0, 1e-6
        for fields in REPLY.iter_unpack(message):
            reply = Reply._make(fields)
            if reply.kind == Kind.BATCH:
                largest = max(largest, reply.body_bytes, 1)
                slowest_s = max(slowest_s, reply.wall_s)
            yield reply
        if largest:
            worth = min(_DEPTH_BYTES // largest, int(_DEPTH_S / slowest_s))
            self._depth = min(self._most, max(_LEAST_DEPTH, worth))

    def close(self) -> None:
        """Close the socket; its arena stays as long as somebody reads it."""
        self.is_gone = True
        self.socket.close()


class Workers:
    """All workers of one loader.

    Args:
        spec: What they are told.
        count: How many.
        selector: Of the server's loop.
        arenas: Numbers for their arenas.
        disk: Where batches lie that memory has no room for; None: nowhere.
        on_reply: Called with a worker, the key and the answer of each reply.
        on_lost: Called with the keys that a worker that ended has not answered, in their order,
            and a sentence about it; the first of them may be what ended it.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        count: int,
        selector: selectors.BaseSelector,
        arenas: Iterator[int],
        disk: Disk | None,
        on_reply: Callable[[WorkerHandle, Key, Answer], None],
        on_lost: Callable[[Sequence[Key], str], None],
    ) -> None:
        self._spec, self._selector, self._arenas, self._disk = spec, selector, arenas, disk
        self._on_reply, self._on_lost = on_reply, on_lost
        self._numbers = 0
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Forked before there is any connection that a child could keep open.
        context: Any = multiprocessing.get_context("fork")
        self._parent = context.Process(target=_parent, args=(spec, theirs, self._control))
        self._parent.start()
        theirs.close()
        self.all: dict[int, WorkerHandle] = {}
        self._suspects: set[int] = set()
        for number in range(count):
            self._start(number)
        selector.register(self._control, selectors.EVENT_READ, self._hear_parent)

    @property
    def pids(self) -> list[int]:
        """Of the workers that have begun."""
        return [one.pid for one in self.all.values() if one.is_up]

    def tell(self, one: WorkerHandle, key: Key, spill: bool) -> None:
        """Have a worker prepare a key; `send` follows."""
        self._numbers = (self._numbers + 1) & 0xFFFFFFFF
        one.tell(self._numbers, key, SPILLED if spill else 0)

    def close(self) -> None:
        """End all workers."""
        self._selector.unregister(self._control)
        # Closing it would say nothing: the parents of other loaders' workers have it, too.
        self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        for one in self.all.values():
            if not one.is_gone:
                self._selector.unregister(one.socket)
                one.close()
        self._parent.join()
        if self._spec.spill is not None:
            shutil.rmtree(self._spec.spill, ignore_errors=True)

    def _start(self, number: int) -> None:
        self._control.send(f"{number}".encode())

    def _hear_parent(self) -> None:
        said, descriptors, _, _ = socket.recv_fds(self._control, 64, 1)
        if not said:
            raise RuntimeError(
                f'the process that starts the workers of loader "{self._spec.loader}" has ended'
            )
        number, _, code = said.decode().partition(" ")
        if descriptors:
            self._join(int(number), socket.socket(fileno=descriptors[0]))
        else:
            self._lose(int(number), int(code))

    def _join(self, number: int, sock: socket.socket) -> None:
        one = WorkerHandle(number, next(self._arenas), sock, number in self._suspects)
        self.all[number] = one
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._hear(one))

    def _hear(self, one: WorkerHandle) -> None:
        if one.is_gone:
            return  # its parent has said so in the same moment
        try:
            for reply in one.hear():
                key = one.told.pop(reply.number)
                if self._disk is not None and reply.flags & DISK_FULL:
                    self._disk.is_full = True
                disk = self._disk if reply.flags & SPILLED else None
                self._on_reply(one, key, Answer(reply, one, disk=disk))
        except EOFError:
            # Its parent says how it ended; until then nothing is to be heard here.
            self._selector.unregister(one.socket)
            one.close()

    def _lose(self, number: int, exitcode: int) -> None:
        one = self.all.pop(number)
        self._hear(one)  # what it said before it ended
        if not one.is_gone:
            self._selector.unregister(one.socket)
            one.close()
        self._suspects.add(number)
        self._start(number)
        said = (
            f'worker {number} of {self._spec.where} (loader "{self._spec.loader}", '
            f"pid {one.pid}) {_how(exitcode)}; it was started again"
        )
        self._on_lost(list(one.told.values()), said)


def _parent(spec: WorkerSpec, control: socket.socket, servers: socket.socket) -> None:
    servers.close()
    worker.parent_main(spec, control)


def _how(exitcode: int) -> str:
    if exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"left with exit code {exitcode}"
