"""The prompt of a session's rank: a loop that waits for a cell and runs it.

Between cells, SIGINT has no effect. During a cell, SIGINT raises KeyboardInterrupt. But while the
rank waits in C++ code for other ranks, Python cannot raise KeyboardInterrupt. So after an
interrupt, the agent asks the rank's heartbeat thread to cut the rank's connections to the other
ranks (`Prompt.cut_connections`). This cut ends the wait in C++ code.
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
from taas_magic.host.link import AgentLink, LineReader, rank_file
from taas_magic.messages import CellOrder, RankFinished, RankIdle, RankTakesInterrupts

_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_SHELLS_OWN = re.compile(r"_{1,3}|_\d+|_i{1,3}|_i\d+|In|Out|_ih|_oh|_dh|__taas\w*")

_order_of: Callable[[bytes], CellOrder] = msgspec.json.Decoder(CellOrder).decode


class Prompt:
    """The loop in which a session's rank waits for cells and runs them. Runs in the main thread.

    Args:
        link: The rank's connection to its agent.
        folder: Folder with the rank's pipes, from which the rank reads the agent's orders.
        run: Function that runs a cell, sends the results or the failure, and returns whether the
            cell succeeded.
        has_pending: Function that returns whether any collective of this rank has begun and has not
            ended.
    """

    def __init__(
        self,
        link: AgentLink,
        folder: Path,
        rank: int,
        run: Callable[[CellOrder], bool],
        has_pending: Callable[[], bool],
    ) -> None:
        self._link, self._run, self._has_pending = link, run, has_pending
        self._orders = LineReader(rank_file(folder, rank, "cells"))
        self._main = threading.get_ident()
        self._is_running = self._was_cut = False
        self._number = 0

    def serve(self, report: Callable[[bool], None]) -> None:
        """Run each cell that the agent sends. Return when the agent sends the order to end.

        SIGINT has no effect between cells. After each cell, calls `report`, sends `RankFinished` if
        the cell succeeded, and then sends `RankIdle`. At the end, sends `RankFinished`. If a child
        process that a cell forked reaches the end of the cell, the child flushes stdout and exits.

        Args:
            report: Function that sends batch counts and metrics to the agent. If its argument is
                True, as after a cell that succeeded, the function first waits until the GPU has
                computed the metrics.
        """
        signal.signal(signal.SIGINT, _ignore)
        while (order := _order_of(self._orders.read_line())).number:
            has_succeeded = self._run_one(order)
            if not self._link.is_own:  # this is a child that the cell forked
                with suppress(OSError, ValueError):
                    sys.stdout.flush()
                os._exit(0 if has_succeeded else 1)
            self._is_running = False
            report(has_succeeded)
            if has_succeeded:
                self._link.send(RankFinished())
            self._link.send(RankIdle(was_cut=self._was_cut))
        self._link.send(RankFinished())

    def cut_connections(self, cell: int) -> None:
        """Cut this rank's connections to other ranks if the rank waits for other ranks in a cell.

        The rank waits if its main thread runs code of torch.distributed, or if a collective is
        pending. Without connections, a collective of gloo raises an exception. So the rank returns
        from C++ code to Python, and Python raises KeyboardInterrupt for a SIGINT that has arrived
        before.

        At the end of the cell, `RankIdle` reports the cut. Any thread may call this method.

        Args:
            cell: Number of the cell. If the rank does not run this cell now, do nothing.
        """
        if (
            cell == self._number
            and self._is_running
            and (self._is_in_distributed() or self._has_pending())
        ):
            self._was_cut = True
            _shut_down_sockets()

    def _run_one(self, order: CellOrder) -> bool:
        """Enable SIGINT, run one cell, and ignore SIGINT again; return whether the cell succeeded.

        Before the cell, tells the agent that the rank accepts SIGINT. If SIGINT arrives during this
        call, but outside of the user's code, sends the interrupt as the cell's failure.
        """
        self._was_cut, self._number, self._is_running = False, order.number, True
        has_succeeded = False
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._link.send(RankTakesInterrupts())
            has_succeeded = self._run(order)
        except KeyboardInterrupt as error:  # raised outside of the user's code
            has_succeeded = False
            tracebacks.send_failure(self._link, tracebacks.describe_exception(error))
        finally:
            self._ignore_interrupts()
        return has_succeeded

    def _ignore_interrupts(self) -> None:
        """Ignore SIGINT from now on, including a SIGINT that arrives during this call."""
        try:
            signal.signal(signal.SIGINT, _ignore)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, _ignore)

    def _is_in_distributed(self) -> bool:
        frame = tracebacks.current_frames().get(self._main)
        while frame is not None:
            if _DISTRIBUTED in frame.f_code.co_filename:
                return True
            frame = frame.f_back
        return False


def _ignore(number: int, frame: types.FrameType | None) -> None:
    """Do nothing. Between cells, this function is the SIGINT handler of a session's rank."""


def _shut_down_sockets() -> None:
    """Shut down all TCP connections of this process that no Python socket object owns.

    Among these are the connections of process groups and key-value stores, which C++ code of torch
    has opened. Connections of other C libraries, such as a database driver, are shut down, too.
    """
    pythons = {it.fileno() for it in gc.get_objects() if issubclass(type(it), socket.socket)}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor was closed meanwhile, or is not connected
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
    """Return the user's variables: `names` without IPython's variables, such as `_1` and `In`.

    Names that begin with `__taas` are also left out.
    """
    return {name: it for name, it in names.items() if not _SHELLS_OWN.fullmatch(name)}
