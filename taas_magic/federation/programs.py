"""Start and end Flower's programs on one host of a federation. The host's only rank runs this code.

Rank 0's host runs the SuperLink and the ServerApp. Every host runs a SuperNode, and the ClientApp
in one process for each message. All ports require a key:

- the SuperLink's Control API: the federation's key (`FederationSettings.key`)
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
"""Maximum seconds for a rank to connect to the run's TCPStore."""

END_S = 3.0
"""Seconds that a rank waits until Flower's programs end on SIGTERM. Then the rank kills them.

Must be shorter than 5 s, because a rank is killed if it has not ended 5 s after an interrupt.
"""

CHECK_S = 0.5
"""Seconds between two checks that Flower's programs run, or that a key is in the TCPStore."""

PORTS = range(20_000, 32_000)
"""Range of ports on which Flower's programs listen.

It is below the range from which Linux takes ports for outgoing connections.
"""

_PORTS_TRIED = 100

PORT_TRIES = 3
"""Number of times that a program is started, each time with a new port, before its start fails."""

_HOST, _SUPERLINK, _ENDED = "taas/host/", "taas/superlink", "taas/over"
"""Keys in the run's TCPStore, by which ranks exchange data.

The first key, followed by the number of a rank, holds the name of the rank's host. The second key
holds the SuperLink's address. The third key exists when the training has ended.
"""


def run_programs(settings: FederationSettings, server_app: Any, client_app: Any) -> Any:
    """Run Flower's programs on this host until the ServerApp has ended; then end the programs.

    Each rank of a federation calls this function. First check the types of the apps, connect to the
    run's TCPStore, and publish this host's name there.

    The next steps depend on the rank:

    - Rank 0 runs the SuperLink, the ServerApp and a SuperNode. When the ServerApp has ended, or
      after an error, rank 0 sets the key `_ENDED` in the TCPStore.
    - Each further rank waits for the SuperLink's address in the TCPStore, and starts only a
      SuperNode. Then this rank checks repeatedly that its programs run, until rank 0 has set
      `_ENDED`.

    Args:
        settings: The settings of the federation.
        server_app: The notebook's ServerApp. This function only checks its type. The app's process
            loads the app from the payload.
        client_app: The notebook's ClientApp. This function only checks its type.

    Returns:
        On rank 0, the return value of the ServerApp's main function. On any further rank, None.

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
            time.sleep(CHECK_S)
    return None


def _run_first_host(host: "_HostPrograms", tcp_store: TCPStore) -> Any:
    """Start the SuperLink and this host's SuperNode, run the ServerApp, and return its result.

    First wait, without a time limit, until all ranks have started, and compare the names of their
    hosts with `per_host`. Then report `FederationStarted` to the agent. When the SuperLink listens,
    publish its address to all further ranks through the run's TCPStore.
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

    There is no time limit, because a host may copy a large project store before its rank starts. If
    a rank fails before it has set its key, the pool ends all ranks of the run, including this one.
    """
    while not tcp_store.check([key]):
        time.sleep(CHECK_S)
    found: str = tcp_store.get(key).decode()
    return found


class _HostPrograms:
    """Flower's programs on this host. The end of a `with` block ends the programs.

    At this end, all programs get SIGTERM. Programs that still run `END_S` later get SIGKILL.

    Args:
        folder: A temporary folder for keys and certificates. Only this user can read it.
        settings: The settings of the federation.
    """

    def __init__(self, folder: Path, settings: FederationSettings) -> None:
        self._folder, self._settings = folder, settings
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        self._failed: RuntimeError | None = None
        self._is_over = threading.Event()
        self._root = self._write_file("root.pem", settings.certificate)
        self._result = folder / "result"
        self._environ = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            KEY_FILE: str(self._write_file("key", settings.key)),
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
        """Check that `per_host`, if it is not empty, has settings for exactly the hosts in `names`.

        Raises:
            UsageError: `per_host` has no settings for a host that takes part, or names a host that
                does not take part.
        """
        if (expected := self._settings.per_host.keys()) and expected != set(names):
            raise UsageError(
                f"per_host names {', '.join(sorted(expected))}; the hosts that take part are "
                f"{', '.join(sorted(names))}: name each of them, and no other"
            )

    def start_superlink(self, host: str) -> str:
        """Start the SuperLink and the SuperExec that starts the ServerApp.

        The SuperLink gets a certificate for `host`, signed by the federation's certificate. If a
        foreign program takes the SuperLink's port first, try a new port. Before the SuperExec
        starts, check that the SuperLink refuses a wrong key.

        Args:
            host: Address at which all hosts reach this host.

        Returns:
            The address on which the SuperLink listens, as "host:port".

        Raises:
            RuntimeError: The SuperLink ended at each start, did not listen in time, or accepts
                clients without a key.
            httpx.HTTPError: The SuperLink does not answer.
        """
        settings = self._settings
        mine, key = certificate.make_server_certificate(
            settings.certificate, settings.signing_key, host
        )
        secret = self._write_file("superlink.secret", secrets.token_hex(32))
        superlink = [sys.executable, "-m", "taas_magic.federation.flower"]
        superlink += ["--host", host, "--isolation", "process"]
        superlink += ["--ssl-ca-certfile", str(self._root), "--enable-supernode-auth"]
        superlink += ["--ssl-certfile", str(self._write_file("superlink.pem", mine))]
        superlink += ["--ssl-keyfile", str(self._write_file("superlink.key", key))]
        superlink += ["--superexec-auth-secret-file", str(secret)]
        port = self._start_listening("SuperLink", host, superlink)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._check_key_required(address)
        self._start_superexec("SuperLink's SuperExec", address, secret, tls=True)
        return address

    def start_supernode(self, superlink: str) -> None:
        """Register this host's SuperNode with the SuperLink, and start the SuperNode.

        The SuperNode gets a new key pair, and a configuration with the host's name, the rank, the
        world size and the host's settings in `per_host`. Also start the SuperExec that starts the
        ClientApp for each message.

        Args:
            superlink: The SuperLink's address, as "host:port".

        Raises:
            RuntimeError: The SuperNode ended, did not listen in time, or is not installed.
            httpx.HTTPError: The SuperLink does not answer.
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
        with self._control_client(superlink) as control:
            control.RegisterNode(
                RegisterNodeRequest(public_key=public_key_to_bytes(public), name=name)
            )
        secret = self._write_file("supernode.secret", secrets.token_hex(32))
        supernode = ["flower-supernode", "--superlink", superlink, "--isolation", "process"]
        supernode += ["--root-certificates", str(self._root), "--host", LOOPBACK]
        supernode += [
            "--auth-supernode-private-key",
            str(self._write_file("node.key", key.decode())),
        ]
        supernode += ["--node-config", str(self._write_file("node.toml", tomli_w.dumps(config)))]
        supernode += ["--superexec-auth-secret-file", str(secret)]
        port = self._start_listening("SuperNode", LOOPBACK, supernode)
        self._start_superexec("SuperNode's SuperExec", f"{LOOPBACK}:{port}", secret, tls=False)

    def run_server_app(self, superlink: str) -> Any:
        """Start the ServerApp, print its log until it has ended, and return its result.

        While the ServerApp runs, a thread checks that Flower's programs run.

        Args:
            superlink: The SuperLink's address, as "host:port".

        Returns:
            The return value of the ServerApp's main function; None if the app has no main function.

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
        """Check repeatedly that Flower's programs run, until `run_server_app` returns.

        This method runs in a thread. If a program has ended, this method stores the error, kills
        the SuperLink, and returns. Then `run_server_app` stops waiting and raises the error.
        """
        while not self._is_over.wait(CHECK_S):
            try:
                self.check_running()
            except RuntimeError as error:
                self._failed = error
                self._is_over.set()
                self._programs["SuperLink"].kill()

    def _run_server_app(self, superlink: str) -> Any:
        """Start the ServerApp through the Control API, print its log, and return its result.

        The app's process has written the result to a file. If there is no such file, return None.

        Raises:
            RuntimeError: The ServerApp failed or was stopped.
            httpx.HTTPError: The SuperLink does not answer.
        """
        fab, _ = build_fab_from_files(
            {"pyproject.toml": _pyproject_text(self._settings.config).encode()}
        )
        with self._control_client(superlink) as control:
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
        """Raise RuntimeError if one of Flower's programs on this host has ended."""
        for name, program in self._programs.items():
            if (code := program.poll()) is not None:
                raise RuntimeError(f"Flower's {name} ended with exit code {code}; see above")

    def _start(self, name: str, *command: str) -> None:
        """Start a program with the environment of this object, and record its process as `name`.

        All programs except a SuperExec log only warnings.

        Raises:
            RuntimeError: The program is not installed beside this Python or on `PATH`.
        """
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
        """Start a program with a free port; return the port when the program listens on it.

        If the program ends before it listens, for example because its port is in use, start the
        program again with a new port. Start it at most `PORT_TRIES` times.

        Args:
            name: Name of the program for messages.
            host: Address on which the program listens.
            command: The command line, to which `--port` is added.

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
        """Wait until a program listens on its port. Return False if the program ends before.

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
            time.sleep(CHECK_S)
        return False

    def _check_key_required(self, superlink: str) -> None:
        """Check that the SuperLink's Control API refuses a wrong key.

        A different version of flwr might ignore our authentication class and accept every client.

        Raises:
            RuntimeError: The Control API accepts a wrong key.
            httpx.HTTPError: The SuperLink does not answer, or answers with another error.
        """
        try:
            with self._control_client(superlink, key="none") as control:
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
    def _control_client(self, superlink: str, key: str = "") -> Iterator[ControlHttpClient]:
        """Yield a client of the SuperLink's Control API; close the client at the end.

        Args:
            superlink: The SuperLink's address, as "host:port".
            key: The key that the client sends; "" for the federation's key.
        """
        client = ControlHttpClient.from_server_address(
            superlink,
            insecure=False,
            root_certificates=self._settings.certificate.encode(),
            interceptors=[_KeyInterceptor(key or self._settings.key)],
        )
        with contextlib.closing(client):
            yield client

    def _write_file(self, name: str, text: str) -> Path:
        path = self._folder / name
        path.write_text(text, encoding="utf-8")
        return path


@dataclass(frozen=True)
class _KeyInterceptor:
    """HTTP interceptor that adds `key` to each request to the SuperLink's Control API."""

    key: str

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers["Authorization"] = f"Bearer {self.key}"
        response: httpx.Response = call_next(context)
        return response


def _pyproject_text(config: Mapping[str, Any]) -> str:
    """Return the text of a pyproject.toml that tells Flower where to find the two apps.

    Args:
        config: Settings of the apps (`context.run_config`).
    """
    places = {
        "serverapp": "taas_magic.federation.flower:server_app",
        "clientapp": "taas_magic.federation.flower:client_app",
    }
    app = {"publisher": "taas", "components": places, "config": dict(config)}
    project = {"name": "notebook", "version": "0"}
    text: str = tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}})
    return text


def _free_port(host: str) -> int:
    """Return a port of `PORTS` that is free now on the address `host`.

    Flower's programs cannot choose a free port themselves. Try up to `_PORTS_TRIED` random ports.

    Raises:
        RuntimeError: All tried ports failed, for example because this machine does not have the
            address `host`.
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
