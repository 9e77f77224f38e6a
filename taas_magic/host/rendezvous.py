"""Where the ranks of an attempt meet: torch's TCPStore, and horovod's server where it is installed.

torchrun's agent serves the store itself; ours imports no torch. The agent binds the port, so that
all hosts can be told of it at once, and starts a process of the forkserver that serves it once the
ranks are started. Every attempt has a store of its own: in an old one its ranks would find where
those of the last attempt listened.

Ranks of several hosts that end wait for one another there (`await_all`). Ranks without fetchers
agree there on what their loaders give (`LoaderAgreement`).

Horovod's ranks find each other over an HTTP server of horovod's own. The same process runs it, and
leaves its port in the store, from which ranks make what `horovodrun` would tell them.
"""

import functools
import importlib
import importlib.util
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

from taas_magic.errors import PoolError
from taas_magic.host import forkserver

STORE_TIMEOUT_S = 300.0
REACH_TIMEOUT_S = 30.0
"""How long a host may take to reach the first one."""

_BACKLOG = 1024
_HOROVOD_SERVER = "horovod.runner.http.http_server"
_HOROVOD_KEY = "taas/horovod"
_HOROVOD_ANSWER_S = 60.0
_ANSWER_S, _LOOK_S = 5.0, 0.01
_AGREE_S = 60.0
"""How long a rank may take to publish the order of an epoch, once it has run the sampler."""

_ENDING_KEY, _ALL_END_KEY = "taas/ending", "taas/all end"


class Rendezvous:
    """The rendezvous of one attempt, on the run's first host; used in the agent.

    It listens on one address; the system chooses the port.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._address = address
        self._listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._server: Any = None

    def start(self) -> None:
        """Have a process serve it; who has come already waits in the kernel."""
        self._server = forkserver.start(f"{__name__}.serve", self._listener, self._address)
        self._listener.close()

    def close(self) -> None:
        """End it; called when the attempt's ranks are gone."""
        self._listener.close()
        if self._server is not None:
            self._server.kill()
            forkserver.forget(self._server)
            self._server = None


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


def await_all(environ: Mapping[str, str], limit_s: float) -> None:
    """Return when all ranks of the attempt are here, or `limit_s` have passed; in a rank that ends.

    Args:
        environ: torchrun's variables of this rank.
    """
    import torch.distributed as dist

    until = time.monotonic() + limit_s
    with suppress(RuntimeError):  # the store is gone with its host
        store = dist.TCPStore(  # type: ignore[attr-defined]
            environ["MASTER_ADDR"],
            int(environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=_ANSWER_S),
            wait_for_workers=False,
        )
        if store.add(_ENDING_KEY, 1) == int(environ["WORLD_SIZE"]):
            store.set(_ALL_END_KEY, "")
        # torch writes warnings when the time of its own wait() is over
        while not store.check([_ALL_END_KEY]) and time.monotonic() < until:
            time.sleep(_LOOK_S)


class LoaderAgreement:
    """What the ranks of an attempt agree on about their loaders, in its store; any thread may ask.

    Args:
        environ: torchrun's variables of this rank, as they were before the cell could change them.
        run: What tells the values of this run apart from those of another one in the same ranks.
    """

    def __init__(self, environ: Mapping[str, str], run: str) -> None:
        self._address, self._port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        self._prefix = f"taas/loaders/{run}/"
        self._lock = threading.Lock()
        self._pid, self._store = 0, cast(Any, None)

    def first(self, key: str, value: bytes) -> bytes:
        """Return the value that the first rank gave for a key, which may be this one."""
        found: bytes = self._client().compare_set(self._prefix + key, "", value.decode())
        return found

    def publish(self, key: str, value: bytes, replaced: str) -> None:
        """Store a value for the other ranks; remove the one of another key."""
        store = self._client()
        store.set(self._prefix + key, value)
        store.delete_key(self._prefix + replaced)

    def read(self, key: str) -> bytes:
        """Return a value that another rank publishes; wait for it.

        Raises:
            RuntimeError: That rank, or the store, is gone.
        """
        found: bytes = self._client().get(self._prefix + key)
        return found

    def _client(self) -> Any:
        """Return the connection of this process; a fork of the rank has one of its own."""
        import torch.distributed as dist

        with self._lock:
            if self._pid != os.getpid():
                self._store = dist.TCPStore(  # type: ignore[attr-defined]
                    *(self._address, self._port),
                    is_master=False,
                    timeout=timedelta(seconds=_AGREE_S),
                    wait_for_workers=False,
                )
                self._pid = os.getpid()
            return self._store


def serve(listener: socket.socket, address: str) -> None:
    """Serve a store on a socket until it is killed; a process of the forkserver."""
    import torch.distributed as dist

    make_store = functools.partial(
        dist.TCPStore,  # type: ignore[attr-defined]
        address,
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
    store.set(_HOROVOD_KEY, _serve_horovod(address))
    threading.Event().wait()


@functools.cache
def has_horovod() -> bool:
    """Return whether this host has horovod; the forkserver looks once for all that it forks."""
    return importlib.util.find_spec("horovod") is not None


def _serve_horovod(address: str) -> str:
    """Serve horovod's ranks from a thread; returns the port, or why there is none."""
    if not has_horovod():
        return "the run's first host has no horovod"
    try:
        http_server = importlib.import_module(_HOROVOD_SERVER)
        handler = http_server.RendezvousHandler
        server = http_server.RendezvousHTTPServer((address, 0), handler, verbose=False)
    except Exception as error:  # whatever a broken installation raises
        return f"horovod's rendezvous could not be started: {type(error).__name__}: {error}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return str(server.server_port)


def ask_horovod(environ: Mapping[str, str], note: Callable[[str], None]) -> dict[str, str]:
    """Return what `horovodrun` would set for this rank; blocks until the first host has a server.

    Where horovod's ranks will not find each other, `note` tells the user why.
    """
    import torch.distributed as dist

    store = dist.TCPStore(  # type: ignore[attr-defined]
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=_HOROVOD_ANSWER_S),
    )
    said = store.get(_HOROVOD_KEY).decode()
    if said.isdigit():
        return horovod_variables(environ, said)
    note(f"{said}: its ranks will not find each other")
    return {}


def horovod_variables(environ: Mapping[str, str], port: str) -> dict[str, str]:
    """Return horovod's variables of a rank, from torchrun's and the port of its rendezvous."""
    local_rank, host_rank = environ["LOCAL_RANK"], environ["GROUP_RANK"]
    # hosts that have a rank in that place; the first ones may have one more than the others
    hosts = int(environ["GROUP_WORLD_SIZE"])
    on_all, larger = divmod(int(environ["WORLD_SIZE"]), hosts)
    return {
        "HOROVOD_RANK": environ["RANK"],
        "HOROVOD_SIZE": environ["WORLD_SIZE"],
        "HOROVOD_LOCAL_RANK": local_rank,
        "HOROVOD_LOCAL_SIZE": environ["LOCAL_WORLD_SIZE"],
        "HOROVOD_CROSS_RANK": host_rank,
        "HOROVOD_CROSS_SIZE": str(hosts if int(local_rank) < on_all else larger),
        # horovod takes ranks with one name to be of one host
        "HOROVOD_HOSTNAME": f"{socket.gethostname()}-{host_rank}",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": environ["MASTER_ADDR"],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        "HOROVOD_GLOO_IFACE": environ["GLOO_SOCKET_IFNAME"].partition(",")[0],
    }
