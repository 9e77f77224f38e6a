"""An SSH connection to a host: the way, then the host's key, then authentication, in this order.

What paramiko's `SSHClient.connect` does in one call is done here step by step, so that every step
can be stopped, and each refusal says which host, what was tried and what to do.
"""

import logging
import shlex
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

from paramiko import Channel, SSHException, Transport

from taas_magic.errors import PoolError
from taas_magic.provision.shell import Done
from taas_magic.ssh.auth import authenticate
from taas_magic.ssh.files import write_file
from taas_magic.ssh.known import known_types, verify
from taas_magic.ssh.target import Target
from taas_magic.ssh.way import Patience, open_way

CONNECT_TIMEOUT_S = 15.0
SILENCE_S = 8.0
_END_S = 2.0

logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # what fails is raised, and says more


class Connection:
    """A host that let us in. Every method may be called from any thread.

    Args:
        target: The host.
        transport: The open connection to it.
        undo: What closes it.
    """

    def __init__(self, target: Target, transport: Transport, undo: ExitStack) -> None:
        self.target, self.transport = target, transport
        self._undo = undo

    @property
    def host(self) -> str:
        """The host as the user calls it."""
        return self.target.label

    @property
    def is_open(self) -> bool:
        return self.transport.is_active()

    def start(self, command: str) -> Channel:
        """Starts a command; the channel is its standard input, output and error.

        Raises:
            PoolError: The host does not let it start.
        """
        try:
            channel = self.transport.open_session(timeout=CONNECT_TIMEOUT_S)
            channel.exec_command(command)
        except (SSHException, OSError, EOFError) as error:
            raise self.lost(f"{command.split()[0]} was not started", error) from error
        return channel

    def run(self, command: str, data: bytes = b"", timeout_s: float = 60.0) -> Done:
        """Runs a command to its end.

        Args:
            command: For the host's shell.
            data: Its standard input.
            timeout_s: How long it may say nothing.

        Raises:
            PoolError: The connection broke, or the command said nothing for `timeout_s`.
        """
        channel = self.start(command)
        with channel:
            channel.settimeout(timeout_s)
            try:
                writer = threading.Thread(target=_write_all, args=(channel, data), daemon=True)
                writer.start()
                errors: list[bytes] = []
                reader = threading.Thread(target=_read_errors, args=(channel, errors), daemon=True)
                reader.start()
                stdout = channel.makefile("rb").read()
                reader.join(timeout_s)
            except (OSError, EOFError) as error:
                raise self.lost(f"{shlex.split(command)[0]} gave no answer", error) from error
            return Done(channel.recv_exit_status(), stdout, b"".join(errors))

    def put(self, data: bytes | Path, path: str) -> None:
        """Writes a file there, for the user alone; it is there whole or not at all.

        Args:
            data: What it holds, or the file here that is sent.
            path: Where; its folder is there. Relative to the home folder unless absolute.

        Raises:
            PoolError: It could not be written.
        """
        try:
            write_file(self.transport, data, path)
        except (OSError, SSHException, EOFError) as error:
            raise self.lost(f"{path} was not written", error) from error

    def lost(self, what: str, error: BaseException) -> PoolError:
        """The error that says what could not be done on this host."""
        why = self.transport.get_exception() or error
        return PoolError(f"host {self.target.label}: {what}: {type(why).__name__}: {why}")

    def close(self) -> None:
        """Closes the connection and all that goes through it."""
        self._undo.close()


def connect(
    target: Target,
    stop: threading.Event,
    timeout_s: float = CONNECT_TIMEOUT_S,
    silence_s: float = SILENCE_S,
) -> Connection:
    """Connects to a host, through its jump hosts.

    Args:
        target: The host.
        stop: Set by whoever does not want it any more; it is then given up within a moment.
        timeout_s: How long it may take.
        silence_s: After how long without an answer the connection counts as cut.

    Raises:
        PoolError: The host cannot be reached, its key is not known, or it does not let us in.
        Stopped: `stop` was set.
    """
    patience = Patience(timeout_s, stop)
    with ExitStack() as undo:
        if target.jump is None:
            sock: socket.socket | Channel = open_way(target, patience, silence_s, undo)
        else:
            jump = connect(target.jump, stop, patience.left_s, silence_s)
            undo.callback(jump.close)
            sock = _channel_through(jump, target, patience)
            undo.callback(sock.close)
        transport = Transport(sock)
        undo.callback(_end_transport, transport)
        transport.auth_timeout = timeout_s
        transport.banner_timeout = 2 * timeout_s  # our own patience ends first, and says more
        transport.channel_timeout = timeout_s
        _agree_on_keys(transport, target, patience)
        verify(target, transport.get_remote_server_key())
        authenticate(transport, target, patience)
        return Connection(target, transport, undo.pop_all())
    raise AssertionError("not reached")


def _end_transport(transport: Transport) -> None:
    transport.close()
    if transport.ident is not None and transport is not threading.current_thread():
        transport.join(_END_S)


def _channel_through(jump: Connection, target: Target, patience: Patience) -> Channel:
    try:
        return jump.transport.open_channel(
            "direct-tcpip",
            (target.hostname, target.port),
            ("127.0.0.1", 0),
            timeout=patience.left_s,
        )
    except SSHException as error:
        raise jump.lost(f"no way from it to {target.hostname}:{target.port}", error) from error


def _agree_on_keys(transport: Transport, target: Target, patience: Patience) -> None:
    options = transport.get_security_options()
    known = [name for name in known_types(target) if name in options.key_types]
    options.key_types = [*known, *(name for name in options.key_types if name not in known)]
    agreed = threading.Event()
    transport.start_client(event=agreed)
    patience.wait(agreed, target, "SSH greeting")
    if not transport.is_active():
        error = transport.get_exception() or EOFError("the connection was closed")
        raise PoolError(
            f"host {target.label}: {target.hostname}:{target.port} does not speak SSH with us: "
            f"{error}"
        )


def _write_all(channel: Channel, data: bytes) -> None:
    try:
        channel.sendall(data)
        channel.shutdown_write()
    except OSError:
        return  # the command ended without reading it; its exit status tells


def _read_errors(channel: Channel, into: list[bytes]) -> None:
    try:
        while data := channel.recv_stderr(65536):
            into.append(data)
    except OSError:
        return  # nothing came in time; who reads the output says so
