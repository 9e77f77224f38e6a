"""A worker: the process of a fetcher that runs the user's dataset; and its server's end of it.

A worker takes commands from its server, prepares one batch after the other, writes each into its
arena and says where it lies. It has no connection to any rank and no thread but its own, so that
the dataset meets the same conditions as in a worker of a local DataLoader.

The workers of one loader are children of a process that does nothing else (`parent_main`): it can
unpickle a large dataset once and fork, and it can start a worker again without the server's
sockets in it. The server has a `WorkerHandle` of each.
"""

import gc
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from taas_magic.capture.modules import claim_taas
from taas_magic.data import encode, protocol
from taas_magic.data.dataset import Ended, Failed, Source, own_units
from taas_magic.data.memory import Arena, Mapping
from taas_magic.data.protocol import Command, LoaderRequest, Reply, RequestKind, ResponseKind
from taas_magic.data.sharding import UNHINTED, VOID, FetcherShare
from taas_magic.leases import STOPPED_S

MESSAGE_BYTES = 128 << 10
"""The longest message between a server and a worker."""

_PRELOAD_FROM_BYTES = 8 << 20
_HOLD_BACK_S = 0.0005
"""For how long a reply may wait for the next one: a message costs more than a small batch. One that
waits goes with the next, however long that takes; so none of a stream waits, which may be live."""

_DEPTH_BYTES = 8 << 20
_DEPTH_S = 0.01
_LEAST_DEPTH, _MOST_DEPTH = 2, 64
"""How many commands lie with a worker: quick ones a round trip's worth; large batches take memory,
and of slow ones, which a rank waits for in their order, each worker should have the next."""

_MOST_FREES = 64
"""With one message: this, too, has to have room in a worker's socket."""

CONTROL_BYTES = 64
"""The longest message between a server and its workers' parent, and the first one to a worker."""

_CLOEXEC = socket.MSG_CMSG_CLOEXEC
_LOOK_S = 1.0

_pack = msgspec.msgpack.Encoder().encode
_read_orders = msgspec.msgpack.Decoder(protocol.Orders).decode
_read_replies = msgspec.msgpack.Decoder(list[Reply]).decode

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedLoader:
    """One loader of a server: what the server and its workers need to know.

    Attributes:
        where: The fetcher and its host, for messages.
        context: multiprocessing's start method; `fork` shares a large dataset between workers.
        sums: Batches go over a wire that nothing else sees to.
        spill: Folder for batches that memory has no room for.
        fill_batches: Before any rank asks, so many are prepared, of later epochs, too.
        fill_bytes: The same in bytes; 0 of both: of the first epoch, as many as there is room for.
    """

    payload: bytes = field(repr=False)
    name: str
    seed: int
    where: str
    share: FetcherShare
    budget_bytes: int
    context: str = "fork"
    sums: bool = False
    spill: Path | None = None
    spill_bytes: int = 0
    fill_batches: int = 0
    fill_bytes: int = 0


def spilled_file(folder: Path, number: int) -> Path:
    """Return where a worker lays what a command asks for on disk."""
    return folder / f"{number}"


class WorkerHandle:
    """The server's end of one worker: its socket, and what it was told and has not answered.

    Args:
        arena: A number that no other arena of the server has.
        is_suspect: One of this number has ended: it is told one command at a time.
    """

    def __init__(self, number: int, arena: int, sock: socket.socket, is_suspect: bool) -> None:
        self.number, self.arena, self.socket = number, arena, sock
        self._most = 1 if is_suspect else _MOST_DEPTH
        self._depth = min(self._most, _LEAST_DEPTH)
        self.memory = Mapping(os.memfd_create("taas-batches", os.MFD_CLOEXEC))
        socket.send_fds(sock, [b"arena"], [self.memory.descriptor])
        self.frees: list[int] = []
        self.told: dict[int, LoaderRequest] = {}
        self.is_gone = False
        self._commands: list[Command] = []
        self._files: list[int] = []

    @property
    def room(self) -> int:
        """How many commands more it may be told: none while it has enough to do, or is gone."""
        told = len(self.told)
        return 0 if self.is_gone or told > self._depth // 2 else self._depth - told

    def tell(self, number: int, request: LoaderRequest, to_disk: bool = False) -> None:
        """Lay a command ready; the reply to it has the same `number`.

        All that lies with a worker has room in its socket, so that its server never waits: what a
        request says besides, which few do and may be large, comes as a file.
        """
        self.told[number] = request
        if has_file := bool(request.detail):
            file = os.memfd_create("taas-detail", os.MFD_CLOEXEC)
            with os.fdopen(file, "wb", closefd=False) as writer:
                writer.write(request.detail)
            self._files.append(file)
            request = msgspec.structs.replace(request, detail=b"")
        self._commands.append(Command(number, request, to_disk, has_file))

    def send(self, oldest_epoch: int) -> None:
        """Send what is laid ready. A worker that is gone is noticed elsewhere."""
        if not self._commands:
            return
        commands, self._commands = self._commands, []
        files, self._files = self._files, []
        frees, self.frees = self.frees[:_MOST_FREES], self.frees[_MOST_FREES:]
        message = _pack(protocol.Orders(commands, frees, oldest_epoch))
        try:
            if files:
                socket.send_fds(self.socket, [message], files)
            else:
                self.socket.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            _log.info("worker %d is gone: %s", self.number, error)
        for file in files:
            os.close(file)

    def hear(self) -> Iterator[Reply]:
        """Yield what it says, which has come.

        Raises:
            EOFError: It has ended.
        """
        try:
            message = self.socket.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            raise EOFError from None
        if not message:
            raise EOFError
        largest, slowest_s = 0, 1e-6
        for reply in _read_replies(message):
            if reply.kind is ResponseKind.BATCH:
                largest = max(largest, reply.body_bytes, 1)
                slowest_s = max(slowest_s, reply.wall_s)
            yield reply
        if largest:
            worth = min(_DEPTH_BYTES // largest, int(_DEPTH_S / slowest_s))
            self._depth = min(self._most, max(_LEAST_DEPTH, worth))

    def close(self) -> None:
        """Close the socket; the arena stays as long as somebody reads it."""
        self.is_gone = True
        self.socket.close()


class Worker:
    """Prepares what it is told to; lives as long as its process.

    Args:
        arena: Descriptor of the file that batches go to.
        loader: The loader, where it was unpickled for all workers.
    """

    def __init__(
        self, served: ServedLoader, number: int, sock: socket.socket, arena: int, loader: Any = None
    ) -> None:
        self._served, self._socket, self._arena = served, sock, Arena(arena)
        self._source: Source | Failed
        self._hold_back_s = 0.0
        try:
            self._source = Source(
                served.payload, served.name, served.seed, served.where, number, loader
            )
            if self._source.streams is None:
                self._hold_back_s = _HOLD_BACK_S
        except Failed as failure:
            self._source = failure
        except (Exception, SystemExit) as error:
            where = f'in {served.where} (loader "{served.name}", when it was unpickled)'
            self._source = Failed(error, where)
        self._replies: list[Reply] = []
        self._replied, self._cpu = 0.0, time.thread_time()

    def run(self) -> None:
        """Do what the server says until it is gone."""
        # What is here stays; looking through it for garbage would touch all of a large dataset.
        gc.freeze()
        torch.set_num_threads(1)
        while True:
            message, files, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, _MOST_DEPTH)
            if not message:
                return
            self._obey(_read_orders(message), files)
            self._say()

    def _obey(self, orders: protocol.Orders, files: list[int]) -> None:
        for offset in orders.frees:
            self._arena.free(offset)
        if isinstance(self._source, Source):
            self._source.forget_before(orders.oldest_epoch)
        for command in orders.commands:
            request = command.request
            if command.has_file:
                with os.fdopen(files.pop(0), "rb") as file:
                    file.seek(0)
                    request = msgspec.structs.replace(request, detail=file.read())
            self._reply(command.number, request, command.to_disk)

    def _reply(self, number: int, request: LoaderRequest, to_disk: bool) -> None:
        """Prepare an answer, lay it in shared memory or on disk, and say so."""
        began = time.perf_counter()
        kind, body, units, order = self._prepare(request)
        offset = body_sum = 0
        to_disk = to_disk and kind is ResponseKind.BATCH
        on_disk = to_disk and self._spill(number, body)
        if body.body_bytes and not on_disk:
            try:
                offset, room = self._arena.take(body.body_bytes)
            except OSError as error:
                where = f"with {self._where(request)}"
                kind, body, units, order = _failed(Failed(error, where))
                offset, room = self._arena.take(body.body_bytes)
            is_summed = self._served.sums and kind is ResponseKind.BATCH
            body_sum = body.copy_to(room, is_summed)
        now, cpu = time.perf_counter(), time.thread_time()
        sizes = len(body.head), body.body_bytes, offset, body_sum
        times = now - began, cpu - self._cpu
        self._cpu = cpu
        disk = on_disk, to_disk and not on_disk
        self._replies.append(Reply(number, kind, units, order, *sizes, *times, *disk))
        if now - self._replied > self._hold_back_s:
            self._say()
            self._replied = now

    def _where(self, request: LoaderRequest) -> str:
        return f'batch {request.slot} of loader "{self._served.name}"'

    def _say(self) -> None:
        if self._replies:
            replies, self._replies = self._replies, []
            self._socket.send(_pack(replies))

    def _spill(self, number: int, body: encode.Encoded) -> bool:
        """Write a batch to disk; return whether there was room."""
        assert self._served.spill is not None
        path = spilled_file(self._served.spill, number)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
                file.writelines(body.parts())
        except OSError as error:
            _log.warning("a batch could not be written to %s: %s", path, error)
            path.unlink(missing_ok=True)
            return False
        return True

    def _prepare(self, request: LoaderRequest) -> "_Prepared":
        try:
            if isinstance(self._source, Failed):
                raise self._source
            prepared = self._answer(self._source, request)
            if (size := prepared[1].body_bytes) > protocol.MAX_BATCH_BYTES:
                # Ranks would refuse it, and ask for it again and again.
                most_gb, where = protocol.MAX_BATCH_BYTES / 1e9, self._where(request)
                text = f"it has {size / 1e9:.1f} GB, and a batch may have {most_gb:.1f} GB"
                raise Failed(ValueError(text), f"with {where}")
            return prepared
        except Ended:
            # The sampler of the worker that opened the epoch may have given more batches.
            order = self._source.digest(request.epoch) if isinstance(self._source, Source) else 0
            return ResponseKind.VOID, encode.NOTHING, VOID, order
        except Failed as failure:
            return _failed(failure)
        except Exception as error:
            where = f"while {self._where(request)} was being pickled"
            return _failed(Failed(error, where))

    def _answer(self, source: Source, request: LoaderRequest) -> "_Prepared":
        kind, epoch, slot, detail = request.kind, request.epoch, request.slot, request.detail
        if kind is RequestKind.GET:
            batch = source.prepare(epoch, slot, encode.from_bytes(detail) if detail else None)
            body, units = encode.encode(batch), own_units(batch)
            units = UNHINTED if units is None else units
            order = source.digest(epoch)
            if source.streams is not None and _is_compared(slot // source.streams):
                order = encode.fingerprint(body)
            return ResponseKind.BATCH, body, units, order
        if kind is RequestKind.OPEN:
            opened = source.open(epoch)
            if self._served.share.units is not None:
                # What is raised here is raised again when the batch itself is asked for.
                with suppress(Ended, Failed):
                    counted = own_units(source.prepare(epoch, 0)) is not None
                    opened = msgspec.structs.replace(opened, counted=counted)
            return ResponseKind.OPENED, encode.raw(_pack(opened)), 1, 0
        value, order = None, 0
        if kind is RequestKind.SAMPLE:
            value = source.sample(encode.from_bytes(detail))
        elif kind is RequestKind.ORDER:
            value = source.all_indices(epoch) if detail else source.indices(epoch, slot)
            order = source.digest(epoch)
        elif detail:
            source.restore(epoch, slot, encode.from_bytes(detail))
        else:
            value = source.state(epoch, slot)
        return ResponseKind.VALUE, encode.raw(encode.as_bytes(value)), 1, order


_Prepared = tuple[ResponseKind, encode.Encoded, int, int]
"""What to answer: its kind, its body, its units and the hash of its order."""


def _is_compared(item: int) -> bool:
    """Return whether ranks compare a stream's item: 0 and powers of two, to cost little."""
    return item & (item - 1) == 0


def _failed(failure: Failed) -> _Prepared:
    """Return a body that raises again what the user's code raised."""
    try:
        body = encode.as_bytes(failure.raised)
    except Exception:  # of whatever kind the user's exception raises when it is pickled
        body = encode.as_bytes(failure.raised.plain())
    return ResponseKind.ERROR, encode.raw(body), 1, 0


class StoppedChildren:
    """Ends children of this process that are stopped (SIGSTOP) for `STOPPED_S`.

    Attributes:
        ended: Their process ids.
    """

    def __init__(self) -> None:
        self.ended: set[int] = set()
        self._since: dict[int, float] = {}

    def end(self, children: Iterable[int]) -> None:
        """Look at children that this process has not waited for; call it about once a second."""
        now = time.monotonic()
        stopped = [it for it in children if psutil.Process(it).status() == psutil.STATUS_STOPPED]
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        for pid, since in self._since.items():
            if now - since >= STOPPED_S:
                os.kill(pid, signal.SIGKILL)
                self.ended.add(pid)


def parent_main(served: ServedLoader, control: socket.socket, servers: socket.socket) -> None:
    """Run the process whose children are the workers of one loader.

    It starts one when it is told to, says when it has ended, and ends one that is stopped. Without
    a server it ends, and they with it.

    Args:
        control: Its end of the socket to the server.
        servers: The server's end, which the fork has, too.
    """
    servers.close()
    begin_process()
    context: Any = multiprocessing.get_context(served.context)
    loader = _preload(served)
    inherited = control if served.context == "fork" else None
    processes: dict[int, Any] = {}
    stopped = StoppedChildren()
    try:
        while True:
            sentinels = {process.sentinel: number for number, process in processes.items()}
            for ready in wait([control, *sentinels], _LOOK_S):
                if ready is control:
                    said, sockets, _, _ = socket.recv_fds(control, CONTROL_BYTES, 1, _CLOEXEC)
                    if not said:
                        return
                    number = msgspec.msgpack.decode(said, type=protocol.WorkerChange).number
                    with socket.socket(fileno=sockets[0]) as theirs:
                        arguments = served, number, theirs, loader, inherited
                        process = context.Process(target=_worker_main, args=arguments)
                        process.start()
                    processes[number] = process
                else:
                    number = sentinels[ready]
                    process = processes.pop(number)
                    process.join()
                    was_stopped = process.pid in stopped.ended
                    ended = protocol.WorkerChange(
                        number, process.pid, process.exitcode, was_stopped
                    )
                    control.send(_pack(ended))
            stopped.end(process.pid for process in processes.values())
    except (BrokenPipeError, ConnectionResetError):
        return  # the server is gone
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def _preload(served: ServedLoader) -> Any:
    """Unpickle a large dataset once, whose pages all workers then share."""
    if served.context != "fork" or len(served.payload) < _PRELOAD_FROM_BYTES:
        return None
    torch.set_num_threads(1)
    try:
        return pickle.loads(served.payload)
    except Exception:
        return None  # each worker tries it again, and can say of which batch it is the end


def _worker_main(
    served: ServedLoader,
    number: int,
    sock: socket.socket,
    loader: Any,
    inherited: socket.socket | None,
) -> None:
    begin_process()
    if inherited is not None:
        inherited.close()
    with suppress(BrokenPipeError, ConnectionResetError):  # the server is gone
        _, arena, _, _ = socket.recv_fds(sock, CONTROL_BYTES, 1, _CLOEXEC)
        if arena:
            Worker(served, number, sock, arena[0], loader).run()


def begin_process() -> None:
    """Name this process; an interrupt is for others, and SIGTERM ends it."""
    claim_taas()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
