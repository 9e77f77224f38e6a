"""A rank's own servers: without fetchers, each rank has processes that run its loaders.

They descend from a child that is forked while the rank has one thread and has run none of the
user's code. A fork at the time when the cell iterates a loader would copy whatever lock another
thread holds at that moment, that of torch's random generator for one, and wait for it for ever.
"""

import dataclasses
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from taas_magic.data.scheduler import ServedLoader
from taas_magic.data.server import Server, ServerSpec
from taas_magic.data.worker import begin_process
from taas_magic.errors import RunLost
from taas_magic.leases import ALIVE_S

_context: Any = multiprocessing.get_context("fork")


class OwnServers:
    """Starts servers for this process, each with one loader, by a child of it.

    Nothing of them is left when `close` has returned, or when this process is gone.

    Args:
        key: What a connection has to prove.
        payload: Returns the pickled loader of a name; called in a server's process.
        prepare: Called first in a server's process.
    """

    def __init__(
        self, key: bytes, payload: Callable[[str], bytes], prepare: Callable[[], object]
    ) -> None:
        self._pid = os.getpid()
        self._control, control = _context.Pipe()
        self._life, life = socket.socketpair()
        starter = _Starter(key, payload, prepare, control, life)
        arguments = (starter, self._control, self._life)
        self._process = _context.Process(target=_starter_main, args=arguments, name="taas-starter")
        self._process.start()
        control.close()
        life.close()

    def start(self, served: ServedLoader, timeout_s: float) -> str:
        """Start a server, and return the name of its Unix socket.

        Args:
            served: The loader, without its payload.
            timeout_s: How long it may take until the server listens.

        Raises:
            RunLost: It does not.
        """
        name = None
        try:
            self._control.send(served)
            if self._control.poll(timeout_s):
                name = self._control.recv()
        except (EOFError, ConnectionError):
            pass  # whoever starts servers is gone, and no name has come
        if name is None:
            raise RunLost(
                f'loader "{served.spec.loader}": {served.spec.where} did not start within '
                f"{timeout_s:g} s; the rank's log says why"
            )
        return str(name)

    def close(self) -> None:
        """End all servers and their workers; nothing in a child of the process that made this."""
        if os.getpid() != self._pid:
            return
        # Closing it would say nothing: children of this process have it, too.
        self._life.shutdown(socket.SHUT_RDWR)
        self._life.close()
        self._process.join()
        self._control.close()


@dataclass(frozen=True)
class _Starter:
    """What the process that starts servers works with.

    Attributes:
        control: Loaders come, and names of sockets go; None for a server that has ended at once.
        life: Has an end when the rank has none of its servers any more.
    """

    key: bytes
    payload: Callable[[str], bytes]
    prepare: Callable[[], object]
    control: Connection
    life: socket.socket


def _starter_main(starter: _Starter, control: Connection, life: socket.socket) -> None:
    """Start what the rank asks for; `control` and `life` are the rank's ends."""
    control.close()
    life.close()
    begin_process()
    servers = []
    while (served := _asked_for(starter)) is not None:
        answer, theirs = _context.Pipe(duplex=False)
        arguments = (starter, served, theirs)
        server = _context.Process(target=_server_main, args=arguments, name="taas-fetcher")
        server.start()
        theirs.close()
        if starter.life in wait([answer, starter.life]):
            server.kill()  # it may still import what the user's loader needs
        else:
            starter.control.send(_received(answer))
        answer.close()
        servers.append(server)
    for server in servers:
        server.join()


def _asked_for(starter: _Starter) -> ServedLoader | None:
    """Wait for the next loader; None when the rank has no servers any more, or is gone."""
    if starter.life in wait([starter.control, starter.life]):
        return None
    try:
        served: ServedLoader = starter.control.recv()
    except EOFError:
        return None
    return served


def _received(answer: Connection) -> str | None:
    try:
        return str(answer.recv())
    except EOFError:
        return None


def _server_main(starter: _Starter, served: ServedLoader, answer: Connection) -> None:
    """Serve one loader until the rank is gone."""
    starter.prepare()
    name = served.spec.loader
    spec = dataclasses.replace(served.spec, payload=starter.payload(name))
    served = dataclasses.replace(served, spec=spec)
    server = Server(ServerSpec(starter.key, {name: served}))
    answer.send(server.addresses[2])
    answer.close()
    over: list[bool] = []
    server.watch(starter.life, lambda: over.append(True))
    try:
        while not over:
            server.step(ALIVE_S)
            for sentence in server.warnings():
                sys.stderr.write(f"{sentence}\n")
    finally:
        # Python would wait for the workers' parent before it says what was raised here.
        server.close()
