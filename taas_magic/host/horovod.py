"""What `horovodrun` gives its ranks, where horovod is installed: variables and a rendezvous.

Horovod's ranks find each other over an HTTP server of horovod's own. The process that serves
torch's store (`rendezvous.serve`) runs it too, and leaves its port in that store for the ranks.
"""

import contextlib
import functools
import importlib
import importlib.util
import socket
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

_SERVER = "horovod.runner.http.http_server"
_KEY = "taas/horovod"
_ANSWER_S = 60.0


@functools.cache
def is_installed() -> bool:
    """Whether this host has horovod; the forkserver looks once for all that it forks."""
    return importlib.util.find_spec("horovod") is not None


def prepare() -> None:
    """Import horovod's server before it is needed; what is wrong with it, `serve` says."""
    if is_installed():
        with contextlib.suppress(Exception):
            importlib.import_module(_SERVER)


def serve(store: Any, address: str) -> None:
    """Serve an attempt's rendezvous from a thread of this process.

    Args:
        store: The attempt's torch store; gets the port, or why there is none.
        address: The one address to listen on; the system chooses the port.
    """
    store.set(_KEY, _start(address) if is_installed() else "the run's first host has no horovod")


def _start(address: str) -> str:
    try:
        http_server = importlib.import_module(_SERVER)
        handler = http_server.RendezvousHandler
        server = http_server.RendezvousHTTPServer((address, 0), handler, verbose=False)
    except Exception as error:  # whatever a broken installation raises
        return f"horovod's rendezvous could not be started: {type(error).__name__}: {error}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return str(server.server_port)


def ask(environ: Mapping[str, str], note: Callable[[str], None]) -> dict[str, str]:
    """What `horovodrun` would set for this rank; blocks until the first host has a server.

    Args:
        environ: The rank's environment.
        note: Tells the user that horovod's ranks will not find each other, and why.
    """
    import torch.distributed as dist

    address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=False, timeout=timedelta(seconds=_ANSWER_S)
    )
    said = store.get(_KEY).decode()
    if said.isdigit():
        return variables(environ, said)
    note(f"{said}: its ranks will not find each other")
    return {}


def variables(environ: Mapping[str, str], port: str) -> dict[str, str]:
    """Horovod's variables of a rank, from torchrun's.

    Args:
        environ: The rank's environment.
        port: Of horovod's rendezvous, on the run's first host.
    """
    local_rank, host_rank = environ["LOCAL_RANK"], environ["GROUP_RANK"]
    interface = environ["GLOO_SOCKET_IFNAME"].partition(",")[0]
    return {
        "HOROVOD_RANK": environ["RANK"],
        "HOROVOD_SIZE": environ["WORLD_SIZE"],
        "HOROVOD_LOCAL_RANK": local_rank,
        "HOROVOD_LOCAL_SIZE": environ["LOCAL_WORLD_SIZE"],
        "HOROVOD_CROSS_RANK": host_rank,
        "HOROVOD_CROSS_SIZE": str(_hosts_with(int(local_rank), environ)),
        # horovod takes ranks with one name to be of one host
        "HOROVOD_HOSTNAME": f"{socket.gethostname()}-{host_rank}",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": environ["MASTER_ADDR"],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        "HOROVOD_GLOO_IFACE": interface,
    }


def _hosts_with(local_rank: int, environ: Mapping[str, str]) -> int:
    """Hosts that have a rank in that place; the first ones may have one more than the others."""
    hosts = int(environ["GROUP_WORLD_SIZE"])
    on_all, larger = divmod(int(environ["WORLD_SIZE"]), hosts)
    return hosts if local_rank < on_all else larger
