"""The prompt of a session's rank: where it waits for cells, and how it comes back from one.

The main thread reads one `CellOrder` after the other from a pipe of the agent's. Between cells
SIGINT has no effect. A rank that does not come back from a cell because it waits for other ranks in
C++ is helped by its heartbeat's thread (`Prompt.cut`).
"""

import gc
import os
import re
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from taas_magic.host import tracebacks
from taas_magic.host.link import Link, rank_file
from taas_magic.messages import CellOrder, RankFinished, RankReturned, RankUp

_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_READ_BYTES = 65536
_SHELLS_OWN = re.compile(r"_{1,3}|_\d+|_i{1,3}|_i\d+|In|Out|_ih|_oh|_dh|__taas\w*")

_order_of: Callable[[bytes], CellOrder] = msgspec.json.Decoder(CellOrder).decode


class Prompt:
    """The prompt of one rank.

    Args:
        run: Runs a cell and sends what came of it; returns whether the cell succeeded.
        has_pending: Returns whether this process waits for a collective that has begun.
    """

    def __init__(
        self,
        link: Link,
        folder: Path,
        rank: int,
        run: Callable[[CellOrder], bool],
        has_pending: Callable[[], bool],
    ) -> None:
        self._link, self._run, self._has_pending = link, run, has_pending
        # for writing, too: so the pipe has no end when the agent closes its own
        self._pipe = os.open(rank_file(folder, rank, "cells"), os.O_RDWR | os.O_CLOEXEC)
        self._rest = b""
        self._main = threading.get_ident()
        self._is_running = self._was_cut = False
        self._number = 0

    def serve(self) -> None:
        """Run cells until the agent ends the session."""
        signal.signal(signal.SIGINT, _ignore)
        while (order := self._next()).number:
            has_succeeded = self._run_one(order)
            if not self._link.is_own:  # a child that the cell forked, and that ran on
                with suppress(OSError, ValueError):
                    sys.stdout.flush()
                os._exit(0 if has_succeeded else 1)
            self._is_running = False
            if has_succeeded:
                self._link.send(RankFinished())
            self._link.send(RankReturned(was_cut=self._was_cut))
        self._link.send(RankFinished())

    def cut(self, cell: int) -> None:
        """Cut the connections to other ranks, if that cell still waits for them; in any thread.

        What waits for a collective of gloo then raises, and the interpreter handles the interrupt.
        """
        if (
            cell == self._number
            and self._is_running
            and (self._is_in_distributed() or self._has_pending())
        ):
            self._was_cut = True
            cut_connections()

    def _run_one(self, order: CellOrder) -> bool:
        """Run one cell; an interrupt is raised only in here."""
        self._was_cut, self._number, self._is_running = False, order.number, True
        has_succeeded = False
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._link.send(RankUp())
            has_succeeded = self._run(order)
        except KeyboardInterrupt as error:  # outside of the user's code
            has_succeeded = False
            tracebacks.send(self._link, tracebacks.failure_of(error))
        finally:
            self._return()
        return has_succeeded

    def _return(self) -> None:
        """Have SIGINT ignored again; one that comes just before counts for the cell."""
        try:
            signal.signal(signal.SIGINT, _ignore)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, _ignore)

    def _next(self) -> CellOrder:
        while b"\n" not in self._rest:
            self._rest += os.read(self._pipe, _READ_BYTES)
        line, _, self._rest = self._rest.partition(b"\n")
        return _order_of(line)

    def _is_in_distributed(self) -> bool:
        """Return whether the main thread is in a function of torch.distributed."""
        frame = tracebacks.current_frames().get(self._main)
        while frame is not None:
            if _DISTRIBUTED in frame.f_code.co_filename:
                return True
            frame = frame.f_back
        return False


def _ignore(number: int, frame: types.FrameType | None) -> None:
    """Handle SIGINT between cells."""


def cut_connections() -> None:
    """Shut down this process's TCP connections that C++ made: those of process groups and stores.

    Sockets of Python are left alone.
    """
    pythons = {it.fileno() for it in gc.get_objects() if issubclass(type(it), socket.socket)}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or not connected
            descriptor = int(name)
            is_socket = os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
            if is_socket and descriptor not in pythons:
                _shut_down(descriptor)


def _shut_down(descriptor: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6)
        if is_tcp and copy.type == socket.SOCK_STREAM:
            copy.getpeername()
            copy.shutdown(socket.SHUT_RDWR)


def users_names(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return variables without those in which IPython keeps inputs and values."""
    return {name: it for name, it in names.items() if not _SHELLS_OWN.fullmatch(name)}
