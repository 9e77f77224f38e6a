"""Start and end Flower's programs on one host of a federation. Runs in the host's rank.

Rank 0's host runs the SuperLink and the ServerApp. Every host runs a SuperNode, and the ClientApp
in one process for each message. All ports require a key:

- the SuperLink's Control API: the run's key
- the SuperLink's Fleet API: the key of a registered SuperNode
- each host's Runtime API: a secret of this host
"""

import contextlib
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cloudpickle
import httpx
import psutil
import tomli_w
from cryptography.hazmat.primitives import serialization
from flwr.cli.build import build_fab_from_files
from flwr.clientapp import ClientApp
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import (
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StreamLogsRequest,
)
from flwr.serverapp import ServerApp
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from taas_magic import certificate
from taas_magic.errors import UsageError
from taas_magic.federation.executor import IMPORTS, needed_modules
from taas_magic.federation.flower import KEY_FILE, RESULT, FederationSettings
from taas_magic.host import rendezvous
from taas_magic.host.activity import IdleTimer
from taas_magic.host.cell_main import PAYLOAD
from taas_magic.host.shell import RankShell
from taas_magic.host.spec import HOST
from taas_magic.host.system import LOOPBACK, spawn_command, wait_or_kill
from taas_magic.leases import START_TIMEOUT_S
from taas_magic.messages import FederationStarted

STORE_CONNECT_S = 120.0
"""Maximum seconds to wait for a connection to the run's TCPStore."""

END_S = 3.0
"""Seconds to wait for Flower's programs to end before they are killed.

Must be shorter than the 5 s that a rank has after an interrupt.
"""

LOOK_S = 0.5
"""Seconds between checks of Flower's programs and of the run's TCPStore."""

PORTS = range(20_000, 32_000)
"""Ports for Flower's programs, below the range that systems use for outgoing connections."""

_PORTS_TRIED = 100

PORT_TRIES = 3
"""Number of ports to try for a program before its start counts as failed."""

_HOST, _SUPERLINK, _ENDED = "taas/host/", "taas/superlink", "taas/over"
"""Keys in the run's TCPStore: each rank's host, the SuperLink's address, and the training's end."""


def run_programs(settings: FederationSettings, server_app: Any, client_app: Any) -> Any:
    """Run Flower's programs on this host until the ServerApp has ended. Blocks.

    Rank 0 runs the SuperLink, the ServerApp and a SuperNode. The other ranks wait for the
    SuperLink's address in the run's TCPStore, and then run only a SuperNode. At the end, all
    programs of this host are ended.

    Args:
        settings: The settings of the federation.
        server_app: The notebook's ServerApp. Only its type is checked here; the app's process loads
            the app again (`flower`).
        client_app: The notebook's ClientApp. Only its type is checked here.

    Returns:
        On rank 0, the return value of the ServerApp's main function; None on other ranks.

    Raises:
        TypeError: An app has the wrong type.
        UsageError: `per_host` does not match the hosts that take part.
        RuntimeError: The ServerApp failed, or one of Flower's programs ended by itself.
    """
    for app, kind in ((server_app, ServerApp), (client_app, ClientApp)):
        if not isinstance(app, kind):
            raise TypeError(f"run(server_app, client_app): {app!r} is not a Flower {kind.__name__}")
    tcp_store = rendezvous.connect(os.environ, STORE_CONNECT_S)
    tcp_store.set(_HOST + os.environ["RANK"], os.environ[HOST])
    folder = tempfile.TemporaryDirectory(prefix="taas-flower-")
    with folder as path, _HostPrograms(Path(path), settings) as host:
        if os.environ["RANK"] == "0":
            try:
                return _run_first_host(host, tcp_store)
            finally:
                tcp_store.set(_ENDED, "")
        host.start_supernode(_wait_for_key(tcp_store, _SUPERLINK))
        while not tcp_store.check([_ENDED]):
            host.check_running()
            time.sleep(LOOK_S)
    return None


def _run_first_host(host: "_HostPrograms", tcp_store: TCPStore) -> Any:
    """Start the SuperLink and this host's SuperNode, run the ServerApp, and return its result.

    First wait, without a time limit, until all ranks have started, and check their host names
    against `per_host`. Then send `FederationStarted` to the agent, and publish the SuperLink's
    address to the other ranks.
    """
    ranks = range(int(os.environ["WORLD_SIZE"]))
    host.check_host_names([_wait_for_key(tcp_store, f"{_HOST}{rank}") for rank in ranks])
    link = RankShell.instance().link
    assert link is not None
    link.send(FederationStarted())
    address = host.start_superlink(os.environ["MASTER_ADDR"])
    tcp_store.set(_SUPERLINK, address)
    host.start_supernode(address)
    return host.run_server_app(address)


def _wait_for_key(tcp_store: TCPStore, key: str) -> str:
    """Wait until another rank has set `key` in the run's TCPStore, and return the value.

    The wait has no time limit, because a host may copy a large store before its rank starts. If a
    rank fails before it has set its key, the pool ends the run (`PoolRun._report`). The end of the
    run also ends this wait.
    """
    while not tcp_store.check([key]):
        time.sleep(LOOK_S)
    found: str = tcp_store.get(key).decode()
    return found


class _HostPrograms:
    """Flower's programs on this host. The end of the `with` block ends them.

    Args:
        folder: A folder of this run that only this user can read.
    """

    def __init__(self, folder: Path, settings: FederationSettings) -> None:
        self._folder, self._settings = folder, settings
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        self._failed: RuntimeError | None = None
        self._is_over = threading.Event()
        self._root = self._write("root.pem", settings.certificate)
        self._result = folder / "result"
        self._environ = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            KEY_FILE: str(self._write("key", settings.key)),
            RESULT: str(self._result),
            IMPORTS: ",".join(needed_modules(Path(os.environ[PAYLOAD]), list(sys.modules))),
        }

    def __enter__(self) -> "_HostPrograms":
        return self

    def __exit__(self, *error: object) -> None:
        for program in self._programs.values():
            program.terminate()
        until = time.monotonic() + END_S
        for program in self._programs.values():
            wait_or_kill(program, max(0.0, until - time.monotonic()))

    def check_host_names(self, names: Sequence[str]) -> None:
        """Raise UsageError unless `per_host` is empty or names exactly the hosts in `names`."""
        if (expected := self._settings.per_host.keys()) and expected != set(names):
            raise UsageError(
                f"per_host names {', '.join(sorted(expected))}; the hosts that take part are "
                f"{', '.join(sorted(names))}: name each of them, and no other"
            )

    def start_superlink(self, host: str) -> str:
        """Start the SuperLink and the SuperExec that starts the ServerApp.

        The SuperLink gets a certificate for `host`, signed by the run's certificate. If another
        program takes the SuperLink's port first, try another port.

        Args:
            host: Address at which other hosts reach this host.

        Returns:
            The SuperLink's address, once it listens.

        Raises:
            RuntimeError: The SuperLink ended, did not listen in time, or accepts clients without a
                key.
        """
        settings = self._settings
        mine, key = certificate.sign(settings.certificate, settings.signing_key, host)
        secret = self._write("superlink.secret", secrets.token_hex(32))
        superlink = [sys.executable, "-m", "taas_magic.federation.flower"]
        superlink += ["--host", host, "--isolation", "process"]
        superlink += ["--ssl-ca-certfile", str(self._root), "--enable-supernode-auth"]
        superlink += ["--ssl-certfile", str(self._write("superlink.pem", mine))]
        superlink += ["--ssl-keyfile", str(self._write("superlink.key", key))]
        superlink += ["--superexec-auth-secret-file", str(secret)]
        port = self._start_listening("SuperLink", host, superlink)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._check_key_required(address)
        self._start_superexec("SuperLink's SuperExec", address, secret, tls=True)
        return address

    def start_supernode(self, superlink: str) -> None:
        """Register a SuperNode for this host with the SuperLink, and start the SuperNode.

        The SuperNode gets a new key pair, and a configuration with the host's name, the rank and
        the values of `per_host`. Also start the SuperExec, which starts the ClientApps.

        Args:
            superlink: The SuperLink's address.
        """
        name = os.environ[HOST]
        config = {
            "host": name,
            "partition-id": int(os.environ["RANK"]),
            "num-partitions": int(os.environ["WORLD_SIZE"]),
            **self._settings.per_host.get(name, {}),
        }
        private, public = generate_key_pairs()
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH)
        key = private.private_bytes(*form, serialization.NoEncryption())
        with self._control(superlink) as control:
            control.RegisterNode(
                RegisterNodeRequest(public_key=public_key_to_bytes(public), name=name)
            )
        secret = self._write("supernode.secret", secrets.token_hex(32))
        supernode = ["flower-supernode", "--superlink", superlink, "--isolation", "process"]
        supernode += ["--root-certificates", str(self._root), "--host", LOOPBACK]
        supernode += ["--auth-supernode-private-key", str(self._write("node.key", key.decode()))]
        supernode += ["--node-config", str(self._write("node.toml", tomli_w.dumps(config)))]
        supernode += ["--superexec-auth-secret-file", str(secret)]
        port = self._start_listening("SuperNode", LOOPBACK, supernode)
        self._start_superexec("SuperNode's SuperExec", f"{LOOPBACK}:{port}", secret, tls=False)

    def run_server_app(self, superlink: str) -> Any:
        """Start the ServerApp, print its log until it has ended, and return its result.

        While the ServerApp runs, a thread checks that Flower's programs are running.

        Args:
            superlink: The SuperLink's address.

        Raises:
            RuntimeError: The ServerApp failed, or one of Flower's programs has ended.
            httpx.HTTPError: The SuperLink does not answer.
        """
        watching = threading.Thread(target=self._watch, name="taas-flower", daemon=True)
        watching.start()
        try:
            return self._run_server_app(superlink)
        except httpx.HTTPError as error:
            raise self._failed or error from error
        finally:
            self._is_over.set()
            watching.join()

    def _watch(self) -> None:
        """Check all programs until `run_server_app` returns. Runs in a thread.

        If a program has ended, kill the SuperLink, because `run_server_app` then stops waiting.
        """
        while not self._is_over.wait(LOOK_S):
            try:
                self.check_running()
            except RuntimeError as error:
                self._failed = error
                self._is_over.set()
                self._programs["SuperLink"].kill()

    def _run_server_app(self, superlink: str) -> Any:
        """Start the ServerApp through the Control API, print its log, and return its result.

        Raises:
            RuntimeError: The ServerApp did not complete.
        """
        fab, _ = build_fab_from_files({"pyproject.toml": _bundle(self._settings.config).encode()})
        with self._control(superlink) as control:
            request = StartRunRequest(fab=fab_to_proto(Fab("", fab, {})))
            run_id = control.StartRun(request).run_id
            for part in control.StreamLogs(StreamLogsRequest(run_id=run_id)):
                sys.stdout.write(part.log_output)
                sys.stdout.flush()
            run = control.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id]
        if run.status.sub_status != "completed":
            raise RuntimeError(f"the ServerApp {run.status.sub_status}: {run.status.details}")
        return cloudpickle.loads(self._result.read_bytes()) if self._result.exists() else None

    def check_running(self) -> None:
        """Raise RuntimeError if a program has ended."""
        for name, program in self._programs.items():
            if (code := program.poll()) is not None:
                raise RuntimeError(f"Flower's {name} ended with exit code {code}; see above")

    def _start(self, name: str, *command: str) -> None:
        program = shutil.which(command[0], path=self._environ["PATH"])
        if program is None:
            raise RuntimeError(
                f"{command[0]} is not installed beside {sys.executable}: pip install flwr there"
            )
        # A SuperExec keeps the default log level, because its apps inherit the level.
        quiet = {} if "SuperExec" in name else {"FLWR_LOG_LEVEL": "WARNING"}
        environ = {**self._environ, **quiet}
        self._programs[name] = subprocess.Popen([program, *command[1:]], env=environ)

    def _start_superexec(self, name: str, address: str, secret: Path, *, tls: bool) -> None:
        how = ["--root-certificates", str(self._root)] if tls else ["--insecure"]
        command = spawn_command("taas_magic.federation.executor")
        command += ["--runtime-api-address", address, *how]
        command += ["--parent-pid", str(os.getpid())]
        self._start(name, *command, "--superexec-auth-secret-file", str(secret))

    def _start_listening(self, name: str, host: str, command: Sequence[str]) -> int:
        """Start a program that listens on a free port; return the port when the program listens.

        If the program ends first, for example because another program has taken the port, try
        another port, with at most `PORT_TRIES` starts in all.

        Raises:
            RuntimeError: The program ended at each start, did not listen in time, or is not
                installed.
        """
        for _ in range(PORT_TRIES):
            port = _free_port(host)
            self._start(name, *command, "--port", str(port))
            if self._wait_until_listening(name, port):
                return port
        raise RuntimeError(f"Flower's {name} ended at each of {PORT_TRIES} starts; see above")

    def _wait_until_listening(self, name: str, port: int) -> bool:
        """Wait until a program listens on a port. Return False if the program ends first.

        Raises:
            RuntimeError: The program was idle for `START_TIMEOUT_S` before it listened.
        """
        program = self._programs[name]
        timer = IdleTimer(program.pid)
        while program.poll() is None:
            own = [seen for seen in psutil.net_connections("tcp") if seen.pid == program.pid]
            if any(seen.status == "LISTEN" and tuple(seen.laddr)[1:] == (port,) for seen in own):
                return True
            if timer.idle_s() >= START_TIMEOUT_S:
                stuck = f"did nothing for {START_TIMEOUT_S:g} s before it listened at {port}"
                raise RuntimeError(f"Flower's {name} {stuck}")
            time.sleep(LOOK_S)
        return False

    def _check_key_required(self, superlink: str) -> None:
        """Raise RuntimeError if the SuperLink's Control API accepts a wrong key.

        Another version of flwr might ignore our authentication class and accept every client.
        """
        try:
            with self._control(superlink, key="none") as control:
                control.ListRuns(ListRunsRequest())
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.UNAUTHORIZED:
                return
            raise
        raise RuntimeError(
            f"Flower's SuperLink of flwr {version('flwr')} accepts peers without a key and cannot "
            "be used: pip install 'taas-magic[federated]' installs a suitable version"
        )

    @contextlib.contextmanager
    def _control(self, superlink: str, key: str = "") -> Iterator[ControlHttpClient]:
        """Yield a client of the SuperLink's Control API.

        Args:
            key: The key that the client sends; "" for the run's key.
        """
        client = ControlHttpClient.from_server_address(
            superlink,
            insecure=False,
            root_certificates=self._settings.certificate.encode(),
            interceptors=[_KeyInterceptor(key or self._settings.key)],
        )
        with contextlib.closing(client):
            yield client

    def _write(self, name: str, text: str) -> Path:
        path = self._folder / name
        path.write_text(text, encoding="utf-8")
        return path


@dataclass(frozen=True)
class _KeyInterceptor:
    """HTTP interceptor that adds the run's key to each request to the Control API."""

    key: str

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers["Authorization"] = f"Bearer {self.key}"
        response: httpx.Response = call_next(context)
        return response


def _bundle(config: Mapping[str, Any]) -> str:
    """Return the text of a Flower app's pyproject.toml, which points to the two apps."""
    places = {
        "serverapp": "taas_magic.federation.flower:server_app",
        "clientapp": "taas_magic.federation.flower:client_app",
    }
    app = {"publisher": "taas", "components": places, "config": dict(config)}
    project = {"name": "notebook", "version": "0"}
    text: str = tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}})
    return text


def _free_port(host: str) -> int:
    """Return a port that is free now. Flower's programs cannot choose a free port themselves.

    Raises:
        RuntimeError: No port of `host` can be used, for example because this machine lacks the
            address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    why: OSError | None = None
    for port in random.SystemRandom().sample(PORTS, _PORTS_TRIED):
        try:
            with socket.create_server((host, port), family=family):
                return port
        except OSError as error:
            why = error
    raise RuntimeError(f"Flower's programs cannot listen on {host}: {why}")
