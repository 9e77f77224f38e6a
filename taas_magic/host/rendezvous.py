"""Where the ranks of an attempt meet: torch's TCPStore, in a process of its own on the first host.

torchrun's agent serves the store itself; ours imports no torch. The agent binds the port, so that
all hosts can be told of it at once, and a process of the forkserver, which waits for it since the
last run, serves it. Every attempt has a store of its own: in an old one its ranks would find where
those of the last attempt listened.
"""

import functools
import queue
import socket
from datetime import timedelta
from typing import Any

from taas_magic.errors import PoolError
from taas_magic.host import forkserver, horovod
from taas_magic.host.processes import die_with_parent

STORE_TIMEOUT_S = 300.0
REACH_TIMEOUT_S = 30.0
"""How long a host may take to reach the first one."""

_BACKLOG = 1024


class _Server:
    """A process that serves one store, once it is given the socket; used in the agent."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            self._process: Any = forkserver.start(f"{__name__}.serve", theirs)

    def serve(self, listener: socket.socket, address: str) -> None:
        socket.send_fds(self._ours, [address.encode()], [listener.fileno()])

    def close(self) -> None:
        self._ours.close()
        self._process.kill()
        forkserver.forget(self._process)


_spare: queue.SimpleQueue[_Server] = queue.SimpleQueue()


def prepare() -> None:
    """Have a process wait for the next attempt; any thread may call it, in the agent."""
    if _spare.empty():
        _spare.put(_Server())


def _take_server() -> _Server:
    try:
        return _spare.get_nowait()
    except queue.Empty:  # several runs begin at a time
        return _Server()


class Rendezvous:
    """The rendezvous of one attempt, on the run's first host; used in the agent.

    Args:
        address: The one address on which it listens; the system chooses the port.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._address = address
        self._listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._server: _Server | None = None

    def start(self) -> None:
        """Have a process serve it."""
        self._server = _take_server()
        self._server.serve(self._listener, self._address)
        self._listener.close()

    def close(self) -> None:
        """End it; called when the attempt's ranks are gone."""
        self._listener.close()
        if self._server is not None:
            self._server.close()
            self._server = None


def serve(control: socket.socket) -> None:
    """Serve a store on the socket that comes over `control`, until that is closed.

    Runs in a process of the forkserver.
    """
    import torch.distributed as dist

    die_with_parent()
    horovod.prepare()
    address, descriptors, _, _ = socket.recv_fds(control, 1024, 1)
    if not descriptors:
        return
    listener = socket.socket(fileno=descriptors[0])
    make_store = functools.partial(
        dist.TCPStore,  # type: ignore[attr-defined]
        address.decode(),
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    try:
        store = make_store()
    except NotImplementedError:  # the libuv store of torch 2.4 takes no listening socket
        store = make_store(use_libuv=False)
    horovod.serve(store, address.decode())
    control.recv(1)
    del store


def reach(address: str, port: int) -> None:
    """Check from another host that the first one can be reached; blocks.

    Raises:
        PoolError: It cannot.
    """
    try:
        socket.create_connection((address, port), REACH_TIMEOUT_S).close()
    except OSError as error:
        raise PoolError(
            f"the run's first host cannot be reached from here at {address}, port {port}: ranks of "
            f"several hosts must reach each other; name the network that they share with "
            f"`interface` in taas.toml ({error})"
        ) from error
