"""The lane processes of one loader: start them, mend them, end them.

The listening sockets belong to the process that starts the lanes, so a lane that died (a crash in
the user's native code, out of memory) is replaced behind the same address, and questions asked
meanwhile wait in the socket's backlog.
"""

import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.sharedctypes import RawArray
from typing import Any

import torch

from taas_magic.data.entries import Address
from taas_magic.data.lane_spec import LaneSpec
from taas_magic.data.link import machine
from taas_magic.data.server import STATS, Lane
from taas_magic.data.tls import Tls

_PRELOAD_FROM_BYTES = 8 << 20
_BACKLOG = 512


class Lanes:
    """All lanes of one loader in one process's charge.

    Args:
        specs: One for each lane.
        host: Address to listen at for TCP, "" for none (only this host's ranks).
        tls: For TCP.
        context: multiprocessing's start method; `fork` shares a large dataset between the lanes.
    """

    def __init__(
        self, specs: Sequence[LaneSpec], host: str = "", tls: Tls | None = None, context: str = ""
    ) -> None:
        self._specs, self._tls = list(specs), tls
        self._context: Any = multiprocessing.get_context(context or "fork")
        self._listeners = [_listen(host) for _ in specs]
        self._stats = [RawArray("d", len(STATS)) for _ in specs]
        self._read_end, self._write_end = os.pipe()
        self._loader = self._preload()
        self._processes: list[Any] = [self._start(at) for at in range(len(specs))]

    @property
    def addresses(self) -> dict[int, Address]:
        """Where each lane, by its number, listens."""
        found = {}
        for spec, listeners in zip(self._specs, self._listeners, strict=True):
            host, port, unix = "", 0, ""
            for listener in listeners:
                if listener.family == socket.AF_UNIX:
                    unix = listener.getsockname()[1:].decode()
                else:
                    host, port = listener.getsockname()[:2]
            found[spec.number] = Address(spec.fetcher, spec.lane, host, port, unix, machine())
        return found

    @property
    def pids(self) -> list[int]:
        """The lanes' processes."""
        return [process.pid for process in self._processes]

    @property
    def sentinels(self) -> list[int]:
        """What becomes readable when a lane dies."""
        return [process.sentinel for process in self._processes]

    def stats(self) -> dict[str, float]:
        """What all lanes counted together (`server.STATS`), and how many they are.

        `fetch_most_s` is how long the busiest of them prepared.
        """
        counted = {name: sum(lane[at] for lane in self._stats) for at, name in enumerate(STATS)}
        most_s = max(lane[STATS.index("fetch_s")] for lane in self._stats)
        return {**counted, "fetch_most_s": most_s, "lanes": len(self._stats)}

    def mend(self) -> list[str]:
        """Start dead lanes again; returns a sentence for each."""
        said = []
        for at, process in enumerate(self._processes):
            if process.is_alive():
                continue
            process.join()
            said.append(
                f"lane {self._specs[at].lane} of fetcher {self._specs[at].fetcher} "
                f"(loader {self._specs[at].loader!r}, pid {process.pid}) "
                f"{_how(process.exitcode)}; it was started again"
            )
            self._specs[at] = replace(self._specs[at], follows_a_death=True)
            self._processes[at] = self._start(at)
        return said

    def close(self) -> None:
        """End all lanes and their sockets."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for listener in (one for listeners in self._listeners for one in listeners):
            listener.close()
        os.close(self._read_end)
        os.close(self._write_end)

    def _preload(self) -> Any:
        """A large dataset is unpickled once, and its pages shared by all lanes."""
        payload = self._specs[0].payload
        if self._context.get_start_method() != "fork" or len(payload) < _PRELOAD_FROM_BYTES:
            return None
        torch.set_num_threads(1)
        return pickle.loads(payload)

    def _start(self, at: int) -> Any:
        ends = (self._read_end, self._write_end)
        if self._context.get_start_method() != "fork":
            ends = (-1, -1)
        spec, listeners, stats = self._specs[at], self._listeners[at], self._stats[at]
        process = self._context.Process(
            target=_lane_main, args=(spec, listeners, self._tls, stats, self._loader, ends)
        )
        process.start()
        return process


def _lane_main(
    spec: LaneSpec,
    listeners: list[socket.socket],
    tls: Tls | None,
    stats: Any,
    loader: Any,
    lifeline: tuple[int, int],
) -> None:
    """A lane's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with_parent, args=lifeline, daemon=True).start()
    lane = Lane(spec, listeners, tls.server() if tls else None, stats, loader)
    lane.run()


def _die_with_parent(read_end: int, write_end: int) -> None:
    """End this process when the one that started it has gone."""
    if read_end < 0:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
    else:
        os.close(write_end)
        os.read(read_end, 1)
    os._exit(1)


def _listen(host: str) -> list[socket.socket]:
    listeners = []
    if sys.platform == "linux":
        unix = socket.socket(socket.AF_UNIX)
        unix.bind("\0taas-" + secrets.token_hex(12))
        listeners.append(unix)
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listeners.append(socket.create_server((host, 0), family=family))
    for listener in listeners:
        listener.listen(_BACKLOG)
    return listeners


def _how(exitcode: int) -> str:
    if exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"left with exit code {exitcode}"
