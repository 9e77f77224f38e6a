"""A rank's own servers: without fetchers, each rank has processes that run its loaders.

They descend from a child that is forked while the rank has one thread and has run none of the
user's code. A fork at the time when the cell iterates a loader would copy whatever lock another
thread holds at that moment, that of torch's random generator for one, and wait for it for ever.
"""

import dataclasses
import multiprocessing
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from taas_magic.data.connection import is_of_the_cell
from taas_magic.data.scheduler import ServedLoader
from taas_magic.data.server import Server
from taas_magic.data.worker import begin_process
from taas_magic.errors import RunLost
from taas_magic.leases import ALIVE_S

_NAME_BYTES = 64
_LOADER_BYTES = 1 << 16
_END_S = 5.0

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
        self._key, self._payload, self._prepare = key, payload, prepare
        self._pid = os.getpid()
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._life, life = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not by multiprocessing: a cell may end all children that it has of that, or wait for them.
        self._starter_pid = os.fork()
        if not self._starter_pid:
            try:
                self._control.close()
                self._life.close()
                self._start_servers(control, life)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        control.close()
        life.close()

    def start(self, served: ServedLoader, timeout_s: float) -> str:
        """Start a server, and return the name of its Unix socket; forks of this process may, too.

        Args:
            served: The loader, without its payload.
            timeout_s: How long it may take until the server listens.

        Raises:
            RunLost: It does not.
        """
        answer, theirs = socket.socketpair()
        with answer:
            try:
                with theirs:
                    socket.send_fds(self._control, [pickle.dumps(served)], [theirs.fileno()])
                answer.settimeout(timeout_s)
                name = answer.recv(_NAME_BYTES)
                why = "ended before it listened"
            except TimeoutError as error:
                if is_of_the_cell(error):
                    raise
                name, why = b"", f"did not start within {timeout_s:g} s"
            except ConnectionError as error:
                name, why = b"", f"cannot be started ({error})"
        if not name:
            raise RunLost(
                f'loader "{served.spec.loader}": {served.spec.where} {why}; see the rank\'s log'
            )
        return name.decode()

    def close(self) -> None:
        """End all servers and their workers; nothing in a fork of the process that made this."""
        if os.getpid() != self._pid:
            return
        # Closing it would say nothing: forks of this process have it, too.
        self._life.shutdown(socket.SHUT_RDWR)
        self._life.close()
        with suppress(ChildProcessError):  # the cell has waited for all children that it found
            os.waitpid(self._starter_pid, 0)
        self._control.close()

    def _start_servers(self, control: socket.socket, life: socket.socket) -> None:
        """Be the process that starts what the rank asks for.

        Args:
            control: A loader comes, and the socket on which its server says its name.
            life: Has an end when the rank has no servers any more.
        """
        begin_process()
        servers = []
        while life not in wait([control, life]):
            loader, descriptors, _, _ = socket.recv_fds(control, _LOADER_BYTES, 1)
            if not loader:
                break
            with socket.socket(fileno=descriptors[0]) as answer:
                arguments = (pickle.loads(loader), answer, life)
                server = _context.Process(target=self._serve, args=arguments, name="taas-fetcher")
                server.start()
            servers.append(server)
        for server in servers:
            server.join(_END_S)
            server.kill()  # one that has not ended still imports what the user's loader needs
            server.join()

    def _serve(self, served: ServedLoader, answer: socket.socket, life: socket.socket) -> None:
        """Serve one loader until the rank is gone."""
        self._prepare()
        name = served.spec.loader
        spec = dataclasses.replace(served.spec, payload=self._payload(name))
        server = Server(self._key, {name: dataclasses.replace(served, spec=spec)})
        answer.send(server.addresses[2].encode())
        answer.close()
        over: list[bool] = []
        server.watch(life, lambda: over.append(True))
        try:
            while not over:
                server.step(ALIVE_S)
                for sentence in server.warnings():
                    sys.stderr.write(f"{sentence}\n")
        finally:
            # Python would wait for the workers' parent before it says what was raised here.
            server.close()
