"""The rendezvous of an attempt's ranks: torch's TCPStore, and horovod's server if it is installed.

The agent of the run's first host binds the store's port. A fork of the forkserver serves the store,
because agents do not import torch. Each attempt has a new store, because the store of an earlier
attempt contains the addresses of ranks that have ended.

Ranks also use the store to wait for one another before they end (`await_all_ending`), to agree on
the contents of their loaders (`LoaderAgreement`), and before they gather results (`exchange`).
"""

import functools
import importlib
import importlib.util
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

from taas_magic.data.watchdog import STOPPED, StoppedProcessWatchdog
from taas_magic.errors import PoolError, signal_name
from taas_magic.host import forkserver

STORE_TIMEOUT_S = 300.0
"""Argument `timeout`, in seconds, of the TCPStore that serves the ranks of an attempt."""

REACH_TIMEOUT_S = 30.0
"""Maximum seconds to wait for a connection from this host to the run's first host."""

_BACKLOG = 1024
_HOROVOD_SERVER = "horovod.runner.http.http_server"
_HOROVOD_KEY = "taas/horovod"
_HOROVOD_ANSWER_S = 60.0
_ANSWER_S, _FIRST_CHECK_S, _CHECK_S, _EXCHANGE_S = 5.0, 0.0005, 0.01, 0.1
_AGREE_S = 60.0
"""Maximum seconds to wait for a value that another rank stores, such as the order of an epoch.

Also the maximum seconds to wait for the connection to the ranks' store.
"""

_PIECE_BYTES = 4 << 20
"""Maximum size in bytes of one value that `LoaderAgreement.publish` sends to the ranks' store.

A TCPStore closes the connection of a rank that sends a message of more than 8 MiB.
"""

_ENDING_KEY, _ALL_END_KEY = "taas/ending", "taas/all end"


class Rendezvous:
    """The rendezvous of one attempt: the port and the process of the ranks' key-value store.

    Used in the agent of the run's first host. The constructor binds a free port.

    Args:
        address: Address of this host at which the store listens for connections of ranks.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._address = address
        self._listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._server: Any = None
        self._watchdog = StoppedProcessWatchdog()

    def start(self) -> None:
        """Start the process that serves the ranks' key-value store.

        Ranks may connect before this call, because the port is already bound. Such ranks wait.
        """
        self._server = forkserver.start_process(f"{__name__}.serve", self._listener, self._address)
        self._listener.close()

    def kill_if_stopped(self) -> None:
        """Kill the key-value store's process if SIGSTOP has suspended it for `STOPPED_S` seconds.

        Ranks would wait forever for a suspended process. After the kill, calls of the key-value
        store in ranks raise errors. Call this method regularly: the time is measured from the first
        call that finds the process suspended.
        """
        if self._server is not None:
            self._watchdog.kill_stopped([self._server.pid])

    def why_ended(self) -> str:
        """Return text for the user: how the process of the ranks' key-value store has ended.

        The text is "" if the process has not ended or was not started.
        """
        code = forkserver.exitcode(self._server) if self._server is not None else None
        if code is None:
            return ""
        how = f"was killed by {signal_name(code)}" if code < 0 else f"exited with code {code}"
        if self._watchdog.killed:
            how = STOPPED
        return f"process {self._server.pid}, which serves the ranks' key-value store, {how}"

    def close(self) -> None:
        """Close the port, and kill the process that serves the key-value store.

        Call this method after the attempt's ranks have ended.
        """
        self._listener.close()
        if self._server is not None:
            self._server.kill()
            forkserver.close_process(self._server)
            self._server = None


def check_reachable(address: str, port: int) -> None:
    """Check that this host can connect to the rendezvous on the run's first host.

    Blocks for up to `REACH_TIMEOUT_S` seconds.

    Args:
        address: Address of the run's first host.
        port: Port of the ranks' key-value store.

    Raises:
        PoolError: The connection failed.
    """
    try:
        socket.create_connection((address, port), REACH_TIMEOUT_S).close()
    except OSError as error:
        raise PoolError(
            f"this host cannot reach the run's first host at {address}, port {port} ({error}): the "
            f"ranks' hosts must reach each other; name the network interface that they share in "
            f"taas.toml (`interface`)"
        ) from error


def connect(environ: Mapping[str, str], timeout_s: float) -> Any:
    """Connect a rank to its attempt's key-value store; return the connection, a torch TCPStore.

    Args:
        environ: torchrun's environment variables of the rank.
        timeout_s: Maximum seconds to wait for the connection, and later for a value of the store.
    """
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


def await_all_ending(environ: Mapping[str, str], limit_s: float) -> None:
    """Report to the other ranks that this rank is ending, and wait until all ranks are ending.

    Uses a counter in the ranks' key-value store. If the store's process has ended, or the time is
    over, return without an error.

    Args:
        environ: torchrun's environment variables of this rank.
        limit_s: Maximum seconds to wait for the other ranks.
    """
    until = time.monotonic() + limit_s
    with suppress(RuntimeError):  # the store has ended with its host
        store = connect(environ, _ANSWER_S)
        if store.add(_ENDING_KEY, 1) == int(environ["WORLD_SIZE"]):
            store.set(_ALL_END_KEY, "")
        # Not `store.wait`, because torch logs warnings when it times out.
        while not store.check([_ALL_END_KEY]) and time.monotonic() < until:
            time.sleep(_CHECK_S)


def exchange(
    environ: Mapping[str, str], key: str, value: bytes, ranks: Collection[int]
) -> dict[int, bytes]:
    """Store a value of this rank for the other ranks; return the values of `ranks`.

    Waits until all of `ranks` have stored their values. The wait has no time limit, because the
    other ranks may still work. A signal handler, such as Python's for SIGINT, may end the wait.

    Args:
        environ: torchrun's environment variables of this rank.
        key: Name of the exchange. Each rank calls this function once with the name.
        ranks: Ranks whose values to wait for. If empty, only store the value of this rank.

    Raises:
        RuntimeError: The process of the key-value store has ended.
    """
    store = connect(environ, _AGREE_S if ranks else _ANSWER_S)
    store.set(f"{key}/{environ['RANK']}", value)
    keys = {rank: f"{key}/{rank}" for rank in sorted(ranks)}
    while keys and not store.check([*keys.values()]):
        time.sleep(_EXCHANGE_S)
    return {rank: store.get(it) for rank, it in keys.items()}


class LoaderAgreement:
    """A rank's access to values on which all ranks must agree, such as the order of an epoch.

    The values are in the ranks' key-value store. Thread-safe.

    Args:
        environ: torchrun's environment variables of this rank, copied before code of the user can
            change them.
        run: Id of the run, or of the session and its cell. Keys in the store contain this id.
    """

    def __init__(self, environ: Mapping[str, str], run: str) -> None:
        self._environ = dict(environ)
        self._prefix = f"taas/loaders/{run}/"
        self._lock = threading.Lock()
        self._pid, self._store = 0, cast(Any, None)

    def reconnect(self) -> None:
        """Make the next call open a new connection, because the present one may be broken."""
        with self._lock:
            self._pid, self._store = 0, None

    def store_first(self, key: str, value: bytes) -> bytes:
        """Store `value` under `key`, unless `key` already has a value, for example of another rank.

        Return the value that is now stored under `key`.
        """
        found: bytes = self._client().compare_set(self._prefix + key, "", value.decode())
        return found

    def store_largest(self, key: str, value: int) -> int:
        """Store `value` under `key`, unless `key` already has a larger number of another rank.

        Return the number that is now stored under `key`.

        Raises:
            RuntimeError: The connection is broken, or the store's process has ended.
        """
        store, place = self._client(), self._prefix + key
        found: bytes = store.compare_set(place, "", str(value))
        while int(found) < value:
            found = store.compare_set(place, found.decode(), str(value))
        return int(found)

    def await_all_ranks(self, key: str) -> None:
        """Wait until all ranks have called this method with the same `key`.

        An interrupt ends the wait. A rank may call this method only once for each key.

        Raises:
            RuntimeError: The connection is broken, or the store's process has ended.
        """
        store, place = self._client(), self._prefix + key
        world_size, wait_s = int(self._environ["WORLD_SIZE"]), _FIRST_CHECK_S
        arrived = store.add(place, 1)
        while arrived < world_size:
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _CHECK_S)
            arrived = store.add(place, 0)

    def publish(self, key: str, value: bytes, replaced: str) -> None:
        """Store `value` under `key` for the other ranks, and remove the older key `replaced`.

        The value may have any size: it is stored in pieces, and `key` has the number of pieces.
        The removal keeps the key-value store small if a rank publishes a long series of values,
        such as the orders of all epochs.
        """
        store, place = self._client(), self._prefix + key
        if store.check([self._prefix + replaced]):
            for old in [*self._keys_of_pieces(store, replaced), self._prefix + replaced]:
                store.delete_key(old)
        begins = range(0, len(value), _PIECE_BYTES)
        for number, begin in enumerate(begins):
            store.set(f"{place}/{number}", value[begin : begin + _PIECE_BYTES])
        store.set(place, str(len(begins)))  # last, because other ranks wait for this key

    def read(self, key: str) -> bytes:
        """Wait for up to `_AGREE_S` seconds until another rank publishes `key`; return the value.

        Raises:
            RuntimeError: No rank has published `key` in time, or the store's process has ended.
        """
        store = self._client()
        return b"".join(store.get(piece) for piece in self._keys_of_pieces(store, key))

    def _keys_of_pieces(self, store: Any, key: str) -> list[str]:
        """Wait until a rank has published `key`; return the store's keys of the value's pieces."""
        place = self._prefix + key
        return [f"{place}/{number}" for number in range(int(store.get(place)))]

    def _client(self) -> Any:
        """Return this process's connection to the ranks' key-value store.

        The first call in a process opens the connection, and so does the first call after
        `reconnect`. A fork of the rank opens a new connection.
        """
        with self._lock:
            if self._pid != os.getpid():
                self._store = connect(self._environ, _AGREE_S)
                self._pid = os.getpid()
            return self._store


def serve(listener: socket.socket, address: str) -> None:
    """Serve the ranks' key-value store, and horovod's server if horovod is installed.

    Ignores SIGINT. If torch's default store does not accept a listening socket, as in torch 2.4,
    uses the store without libuv. Writes the port of horovod's server to the store, or the reason
    why there is no server.

    Runs in a fork of the forkserver. Never returns: the agent kills this process.

    Args:
        listener: Listening socket of the store, which the agent has bound.
        address: Address of this host at which both servers listen.
    """
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
    except NotImplementedError:  # torch 2.4's libuv store does not accept a listening socket
        store = make_store(use_libuv=False)
    store.set(_HOROVOD_KEY, _serve_horovod(address))
    threading.Event().wait()


@functools.cache
def has_horovod() -> bool:
    """Return whether horovod is installed. Ranks inherit the cached result from the forkserver."""
    return importlib.util.find_spec("horovod") is not None


def _serve_horovod(address: str) -> str:
    """Start horovod's rendezvous server in a thread.

    Returns:
        The server's port as decimal digits, or the reason why there is no server.
    """
    if not has_horovod():
        return "horovod is not installed on the run's first host"
    try:
        http_server = importlib.import_module(_HOROVOD_SERVER)
        handler = http_server.RendezvousHandler
        server = http_server.RendezvousHTTPServer((address, 0), handler, verbose=False)
    except Exception as error:  # a broken installation may raise anything
        return f"horovod's rendezvous could not be started: {type(error).__name__}: {error}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return str(server.server_port)


def query_horovod(environ: Mapping[str, str], note: Callable[[str], None]) -> dict[str, str]:
    """Wait for horovod's server, and return horovod's environment variables for this rank.

    Blocks until the run's first host has tried to start horovod's server. If the start has failed,
    send a note and return an empty dict.

    Args:
        environ: torchrun's environment variables of this rank.
        note: Function that sends a note to the user.

    Raises:
        RuntimeError: The first host has not reported within `_HOROVOD_ANSWER_S` seconds whether the
            server has started.
    """
    said = connect(environ, _HOROVOD_ANSWER_S).get(_HOROVOD_KEY).decode()
    if said.isdigit():
        return horovod_variables(environ, said)
    note(f"{said}: horovod's ranks will not find each other")
    return {}


def horovod_variables(environ: Mapping[str, str], port: str) -> dict[str, str]:
    """Return the environment variables that `horovodrun` would set for a rank.

    Args:
        environ: Environment of the rank: torchrun's variables and `GLOO_SOCKET_IFNAME`.
        port: Port of horovod's rendezvous server.
    """
    local_rank, host_rank = environ["LOCAL_RANK"], environ["GROUP_RANK"]
    # HOROVOD_CROSS_SIZE is the number of hosts that have this local rank. The first hosts may have
    # one rank more than the others.
    hosts = int(environ["GROUP_WORLD_SIZE"])
    on_all, larger = divmod(int(environ["WORLD_SIZE"]), hosts)
    return {
        "HOROVOD_RANK": environ["RANK"],
        "HOROVOD_SIZE": environ["WORLD_SIZE"],
        "HOROVOD_LOCAL_RANK": local_rank,
        "HOROVOD_LOCAL_SIZE": environ["LOCAL_WORLD_SIZE"],
        "HOROVOD_CROSS_RANK": host_rank,
        "HOROVOD_CROSS_SIZE": str(hosts if int(local_rank) < on_all else larger),
        # Horovod treats ranks with the same host name as ranks of one host.
        "HOROVOD_HOSTNAME": f"{socket.gethostname()}-{host_rank}",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": environ["MASTER_ADDR"],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        "HOROVOD_GLOO_IFACE": environ["GLOO_SOCKET_IFNAME"].partition(",")[0],
    }
