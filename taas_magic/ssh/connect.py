"""SSH connections to hosts: run commands, write files, and forward ports back to this machine.

This module opens the socket, and paramiko's SSHClient does the handshake over it. To cancel an
attempt at any moment, this module closes the socket.
"""

import contextlib
import errno
import logging
import os
import secrets
import select
import shlex
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from paramiko import Channel, SSHClient, SSHException
from paramiko.auth_strategy import AuthFailure

from taas_magic.errors import PoolError
from taas_magic.host.system import LOOPBACK, wait_or_kill
from taas_magic.setup.facts import CommandResult, python_word
from taas_magic.ssh.config import (
    CONNECT_TIMEOUT_S,
    ConnectStopped,
    KnownHosts,
    SshTarget,
    UserKeys,
    login_refused_message,
)

SILENCE_S = 8.0
"""Default seconds without an answer from the host, after which a connection is closed."""

TAIL_LINES = 15
"""Number of lines at the end of a command's output that are kept for messages."""

_END_S = 2.0
_TICK_S = 0.1
_PROBE_S = 2
_ENDED = SSHException, OSError, EOFError
"""Exceptions that paramiko raises after this machine or the host has ended a connection."""
_TCP_RTO_MAX_MS = 44
"""Number of Linux's socket option for the maximum time, in ms, between retransmissions.

The option exists since Linux 6.15.
"""
_RELAY_CHUNK_BYTES = 1 << 16
_LONGEST_LINE = 4096
_MAX_HANDSHAKES = 4
"""Maximum number of simultaneous handshakes with one sshd.

By default, an sshd refuses some connections if more than 10 have not logged in yet (MaxStartups).
"""

_handshake_limits: dict[str, threading.Semaphore] = {}
_RUN_S = 60.0
_SLOWEST_BYTES_S = 1 << 13

_PUT_SCRIPT = (
    'umask 077; cat >"$0.$1" && [ "$(wc -c <"$0.$1")" -eq "$2" ] && mv -f "$0.$1" "$0" '
    '|| { rm -f "$0.$1"; exit 1; }'
)
"""Shell script that writes standard input to a temporary file, and then renames this file.

Arguments: the file's path, a random suffix for the temporary file, and the number of bytes.
"""

# Failures are raised as exceptions, which say more than paramiko's log.
logging.getLogger("paramiko").setLevel(logging.CRITICAL)


class Connection:
    """An authenticated SSH connection to a host.

    Any thread may call the methods. `start`, `run` and `put` raise PoolError if the connection
    breaks.

    Args:
        client: Client with an open transport.
        undo: Exit stack with the callbacks that close the connection and its jump connections.

    Attributes:
        host: Name of the host in messages, as the user gave it.
        tunnels: For each forwarded port of the host, the address and port of the server to which
            the tunnel leads.
    """

    def __init__(self, target: SshTarget, client: SSHClient, undo: ExitStack) -> None:
        transport = client.get_transport()
        assert transport is not None
        self.target, self.transport, self.host = target, transport, target.label
        self.tunnels: dict[int, tuple[str, int]] = {}
        self._undo = undo

    @property
    def is_open(self) -> bool:
        """Whether the connection is open, as far as this machine knows."""
        return self.transport.is_active()

    def start(self, command: str) -> Channel:
        """Start a command on the host.

        Returns:
            The SSH channel that carries the command's standard input, output and errors.
        """
        try:
            channel = self.transport.open_session(timeout=CONNECT_TIMEOUT_S)
            channel.exec_command(command)
        except _ENDED as error:
            raise self.lost_error(f"{command.split()[0]} was not started", error) from error
        return channel

    def run(self, command: str, data: bytes = b"", timeout_s: float = _RUN_S) -> CommandResult:
        """Run a command in the user's shell on the host, and wait until the command ends.

        Two further threads write the input and read the errors, while this thread reads the output.

        Args:
            data: Standard input of the command.
            timeout_s: Maximum seconds without output. After this time, raise PoolError.
        """
        errors: list[bytes] = []
        with self.start(command) as channel:
            channel.settimeout(timeout_s)
            threading.Thread(target=_write_all, args=(channel, data), daemon=True).start()
            words = channel.recv_stderr, errors.append
            reader = threading.Thread(target=_copy_until_end, args=words, daemon=True)
            reader.start()
            try:
                stdout = channel.makefile("rb").read()
            except _ENDED as error:
                raise self.lost_error(f"{shlex.split(command)[0]} gave no answer", error) from error
            reader.join(timeout_s)
            return CommandResult(channel.recv_exit_status(), stdout, b"".join(errors))

    def put(self, data: bytes, path: str) -> None:
        """Write a small file to the host atomically, accessible to the user only.

        A shell script on the host writes a temporary file, checks its size, and renames it. If the
        script fails, raise PoolError.

        Args:
            path: Absolute, or relative to the home folder. The parent folder must exist.
        """
        # Not by SFTP: a host may not offer SFTP, and the output of a login script breaks SFTP.
        words = [_PUT_SCRIPT, path, secrets.token_hex(4), str(len(data))]
        command = f"exec sh -c {' '.join(map(shlex.quote, words))}"
        done = self.run(command, data, _RUN_S + len(data) / _SLOWEST_BYTES_S)
        if done.code:
            why = done.err.decode(errors="replace").strip() or f"exit code {done.code}"
            raise PoolError(f"host {self.host}: {path} was not written: {why}")

    def lost_error(self, what: str, error: BaseException) -> PoolError:
        """Return a PoolError for an action that failed because the connection or a channel ended.

        Args:
            what: Text of the message about the failed action, such as "no port was forwarded".
            error: The exception of the action. If paramiko has recorded an exception of the whole
                connection, the message names the recorded exception instead of `error`.
        """
        why = self.transport.get_exception() or error
        return PoolError(f"host {self.host}: {what}: {type(why).__name__}: {why}")

    def close(self) -> None:
        """Close the connection with all its channels and tunnels."""
        self._undo.close()


def _write_all(channel: Channel, data: bytes) -> None:
    # A command may end without reading its input. Its exit status tells whether it failed.
    with contextlib.suppress(*_ENDED):
        channel.sendall(data)
        channel.shutdown_write()


def connect(
    target: SshTarget,
    stop: threading.Event,
    timeout_s: float | None = None,
    silence_s: float = SILENCE_S,
) -> Connection:
    """Connect to a host, through its jump hosts if it has any. Blocks.

    First wait while `_MAX_HANDSHAKES` other threads connect to the same address. Then open the
    connection, check the host's key against the known_hosts files, and offer the user's keys. After
    an error, close everything that this call has opened.

    Args:
        stop: Event that the caller sets to cancel; the call then raises within about 0.1 s.
        timeout_s: Maximum seconds until the connection is open, including the wait for other
            threads; None for `target.connect_timeout_s`.
        silence_s: Seconds without an answer from the host after which the open connection is
            closed.

    Raises:
        PoolError: The host cannot be reached, its key is not known, or it refuses the login.
        ConnectStopped: `stop` was set.
    """
    if timeout_s is None:
        timeout_s = target.connect_timeout_s
    deadline = _Deadline(target, timeout_s, stop)
    with ExitStack() as undo, _limit_handshakes(deadline):
        sock = _open_stream(target, deadline, silence_s, undo)
        client, known = SSHClient(), KnownHosts(target)
        client.set_missing_host_key_policy(known)
        undo.callback(_close, client)
        with _guard_handshake(sock, deadline):
            client.connect(
                target.hostname,
                target.port,
                target.user,
                sock=sock,
                timeout=timeout_s,
                banner_timeout=timeout_s,
                auth_timeout=timeout_s,
                channel_timeout=timeout_s,
                transport_factory=known.make_transport,
                auth_strategy=UserKeys(target),
            )
        return Connection(target, client, undo.pop_all())
    raise AssertionError("not reached")


class _Deadline:
    """Deadline of one connection attempt. The caller's `stop` event ends the attempt earlier."""

    def __init__(self, target: SshTarget, timeout_s: float, stop: threading.Event) -> None:
        self.target, self.timeout_s, self.stop = target, timeout_s, stop
        self._until = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return max(_TICK_S, self._until - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.stop.is_set() or time.monotonic() > self._until

    def check(self, doing: str) -> None:
        """Raise an exception if the connection attempt must end now.

        Args:
            doing: What the attempt waits for, as text for the message.

        Raises:
            ConnectStopped: `stop` is set.
            PoolError: The deadline is over.
        """
        if self.stop.is_set():
            raise ConnectStopped
        if self.is_over:
            raise PoolError(
                f"host {self.target.label}: no answer from {self.target.address} within "
                f"{self.timeout_s:.0f} s ({doing}); is it up, and is this its address?"
            )


@contextmanager
def _limit_handshakes(deadline: _Deadline) -> Iterator[None]:
    """Wait until fewer than `_MAX_HANDSHAKES` threads connect to the target; then run the block.

    Without this limit, threads for many hosts behind one jump host would connect to the jump host
    at once, and its sshd would refuse some of the connections.

    Raises:
        ConnectStopped: The connection was cancelled.
        PoolError: The deadline is over.
    """
    limit = _handshake_limits.setdefault(
        deadline.target.address, threading.Semaphore(_MAX_HANDSHAKES)
    )
    while not limit.acquire(timeout=_TICK_S):
        deadline.check("waiting for other connections to it")
    try:
        yield
    finally:
        limit.release()


@contextmanager
def _guard_handshake(sock: socket.socket | Channel, deadline: _Deadline) -> Iterator[None]:
    """Run a `with` block that does an SSH handshake over `sock`; raise its errors as PoolError.

    The handshake may block. So another thread closes `sock` at the deadline, or when
    `deadline.stop` is set.

    Raises:
        ConnectStopped: `deadline.stop` was set, so the handshake failed.
        PoolError: The deadline is over, the host refused the login, or the handshake failed.
    """
    target, done = deadline.target, threading.Event()

    def watch() -> None:
        while not done.wait(_TICK_S):
            if deadline.is_over:
                sock.close()
                return

    watcher = threading.Thread(target=watch, name="taas-ssh", daemon=True)
    watcher.start()
    try:
        yield
    except _ENDED as error:
        deadline.check("SSH handshake")
        if isinstance(error, AuthFailure):
            raise PoolError(login_refused_message(target, error)) from error
        raise PoolError(
            f"host {target.label}: the SSH handshake with {target.address} failed: "
            f"{error or type(error).__name__}"
        ) from error
    finally:
        done.set()
        watcher.join()


def _close(client: SSHClient) -> None:
    """Close an SSH connection, then wait at most `_END_S` seconds for paramiko's thread to end."""
    transport = client.get_transport()
    client.close()
    if transport not in (None, threading.current_thread()) and transport.ident is not None:
        transport.join(_END_S)


def _open_stream(
    target: SshTarget, deadline: _Deadline, silence_s: float, undo: ExitStack
) -> socket.socket | Channel:
    """Open a byte stream to a host's sshd: directly, through a jump host, or by a ProxyCommand.

    If there is a jump host, first open an SSH connection to the jump host. Add callbacks to `undo`
    that close or end all that this function has opened or started.

    Args:
        silence_s: Seconds without an answer after which an open connection is closed.
        undo: Exit stack that the caller closes at the end of the connection.

    Raises:
        PoolError: The host or its jump host cannot be reached in time.
        ConnectStopped: `deadline.stop` was set.
    """
    if target.proxy_command and target.jump is None:
        return _start_proxy_command(target.proxy_command, undo)
    if target.jump is None:
        return _open_tcp(target, deadline, silence_s, undo)
    jump = connect(target.jump, deadline.stop, deadline.left_s, silence_s)
    undo.callback(jump.close)
    try:
        channel = jump.transport.open_channel(
            "direct-tcpip",
            (target.hostname, target.port),
            (LOOPBACK, 0),
            timeout=deadline.left_s,
        )
    except _ENDED as error:
        raise jump.lost_error(f"it cannot connect to {target.address}", error) from error
    undo.callback(channel.close)
    return channel


def _start_proxy_command(command: str, undo: ExitStack) -> socket.socket:
    """Start a ProxyCommand, and return a socket that leads to its standard input and output.

    A shell runs the command, as with ssh; paramiko's own ProxyCommand uses no shell. Add callbacks
    to `undo` that end the command and close the socket.
    """
    ours, its = socket.socketpair()
    undo.callback(ours.close)
    with its:
        program = subprocess.Popen(
            f"exec {command}",
            shell=True,
            stdin=its.fileno(),
            stdout=its.fileno(),
            start_new_session=True,
        )
    undo.callback(_end_proxy_command, program)
    return ours


def _end_proxy_command(program: "subprocess.Popen[bytes]") -> None:
    """Send SIGTERM to a ProxyCommand, and SIGKILL if it does not exit within `_END_S` seconds."""
    program.terminate()
    wait_or_kill(program, _END_S)


def _open_tcp(
    target: SshTarget, deadline: _Deadline, silence_s: float, undo: ExitStack
) -> socket.socket:
    """Open a TCP connection to the host: try its addresses in turn, until one of them accepts.

    Each address gets an equal part of the remaining time. After the connection is open, the system
    closes it if the host does not answer for `silence_s` seconds.

    Raises:
        PoolError: The name cannot be resolved, or no address accepts the connection in time.
        ConnectStopped: `deadline.stop` was set.
    """
    try:
        found = socket.getaddrinfo(target.hostname, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a name with two dots in a row: UnicodeError
        why = error.strerror if isinstance(error, OSError) else error
        raise PoolError(
            f"cannot resolve host {target.label} ({target.hostname!r}): {why}"
        ) from error
    refusals: list[str] = []
    for left, (family, _, _, _, address) in zip(range(len(found), 0, -1), found, strict=True):
        sock = socket.socket(family, socket.SOCK_STREAM)
        undo.callback(sock.close)
        code = _connect(sock, address, deadline, deadline.left_s / left if left > 1 else None)
        if code == 0:
            _notice_silence(sock, silence_s)
            return sock
        refusals.append(f"{address[0]}: {os.strerror(code)}")
    raise PoolError(
        f"host {target.label}: {target.address} cannot be reached "
        f"({'; '.join(refusals)}); is sshd running there?"
    )


def _connect(
    sock: socket.socket, address: Any, deadline: _Deadline, limit_s: float | None = None
) -> int:
    """Connect a socket in non-blocking mode, so that `deadline` can cancel the attempt.

    Args:
        sock: Unconnected socket. If the call succeeds, the socket is in blocking mode again.
        limit_s: Maximum seconds for this address; None for no limit except `deadline`.

    Returns:
        Error number of the system (errno), such as ETIMEDOUT after `limit_s`; 0 for success.

    Raises:
        ConnectStopped: The connection was cancelled.
        PoolError: The deadline is over.
    """
    until = None if limit_s is None else time.monotonic() + limit_s
    sock.setblocking(False)
    code = sock.connect_ex(address)
    if code == errno.EINPROGRESS:
        connected = select.poll()  # select(2) takes no descriptor beyond 1,023
        connected.register(sock, select.POLLOUT)
        while not connected.poll(_TICK_S * 1000):
            deadline.check("TCP connection")
            if until is not None and time.monotonic() > until:
                return errno.ETIMEDOUT
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    sock.setblocking(True)
    return code


def _notice_silence(sock: socket.socket, silence_s: float) -> None:
    """Make the system close a connection if the host does not answer for `silence_s` seconds.

    This function sets a time limit of TCP, because paramiko's keepalive does not check for answers.
    It also sets these options of the connection:

    - Without traffic, the system sends a probe every `_PROBE_S` seconds.
    - Small packets are sent without delay.
    - On Linux 6.15 and newer, the system sends a lost packet again at least every second. By
      default, TCP doubles the time between two attempts. Over a bad link, a host could then receive
      nothing for longer than its lease.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(silence_s * 1000))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    with contextlib.suppress(OSError):  # Linux before 6.15 has no such option
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000)


class HeartbeatCommand:
    """A command on a host that gets an empty line on its standard input every `beat_s` seconds.

    The empty lines are heartbeats. The constructor starts the command.

    Args:
        first_line: First input of the command. Unlike a command line, this input may
            contain secrets.
        log: Function to call with each line of the command's output, except empty lines.

    Attributes:
        has_output: Whether the command has written anything, even if only an empty line.
        ended: Event that is set when the command or the connection has ended.
    """

    def __init__(
        self,
        connection: Connection,
        command: str,
        first_line: bytes,
        beat_s: float,
        log: Callable[[str], None],
    ) -> None:
        self._beat_s, self._log = beat_s, log
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._closing = threading.Event()
        self.has_output, self.ended = False, threading.Event()
        self._channel = connection.start(command)
        self._channel.set_combine_stderr(True)
        for work, words in ((self._read, ()), (self._beat, (first_line,))):
            threading.Thread(target=work, args=words, name="taas-ssh", daemon=True).start()

    @property
    def tail(self) -> str:
        """The last `TAIL_LINES` lines of the command's output."""
        return "\n".join(self._tail)

    def close(self, timeout_s: float) -> bool:
        """Stop the heartbeats, close the command's standard input, and wait until the command ends.

        Returns:
            Whether the command ended within `timeout_s`.
        """
        self._closing.set()
        with contextlib.suppress(*_ENDED):
            self._channel.shutdown_write()
        return self.ended.wait(timeout_s)

    def _beat(self, first_line: bytes) -> None:
        with contextlib.suppress(*_ENDED):  # the command ended, and `_read` notices it as well
            self._channel.sendall(first_line)
            while not self._closing.wait(self._beat_s):
                self._channel.sendall(b"\n")

    def _read(self) -> None:
        """Log the lines of the command's output until the output ends; then set `ended`.

        Also keep the last lines for `tail`. Empty lines are ignored.
        """
        output = self._channel.makefile("rb")
        with contextlib.suppress(*_ENDED):
            while line := output.readline(_LONGEST_LINE):
                self.has_output = True
                if text := line.decode(errors="replace").rstrip():
                    self._tail.append(text)
                    self._log(text)
        self.ended.set()


def shell_words(
    python: str | None, arguments: Sequence[str], environ: Mapping[str, str] | None = None
) -> str:
    """Return a command line that starts a Python interpreter; any login shell understands it.

    Args:
        python: Path of the interpreter on the host; None for `python3`.
        arguments: Arguments of the interpreter, unquoted.
        environ: Additional environment variables; not for secrets, since `ps` shows them.
    """
    settings = [f"{name}={shlex.quote(value)}" for name, value in (environ or {}).items()]
    words = ["env", *settings] if settings else []
    return " ".join(["exec", *words, python_word(python), *map(shlex.quote, arguments)])


def open_tunnel(connection: Connection, host: str, port: int) -> int:
    """Forward a loopback port of the connected host to the server at (`host`, `port`).

    Processes on the connected host connect to the forwarded port. For each such connection, a
    thread relays the bytes to and from the server. The tunnel lasts as long as the SSH connection,
    or until `close_tunnel`. Every user of the connected host may use the tunnel, so the server must
    authenticate its clients.

    Args:
        host: Address of the server, as reachable from this machine.

    Returns:
        The forwarded port on the connected host.

    Raises:
        PoolError: The host refuses to forward ports, or the connection broke.
    """

    def on_visitor(channel: Channel, origin: Any, server: tuple[str, int]) -> None:
        """Relay a connection that a process on the host has made to a forwarded port.

        Called by paramiko. A new thread relays the bytes. If the tunnel of this port is closed,
        close the process's connection, and start no thread.
        """
        # paramiko calls the same function for all forwarded ports, so look up the port
        address = connection.tunnels.get(server[1])
        if address is None:
            channel.close()
            return
        threading.Thread(
            target=_relay, args=(channel, address), name="taas-tunnel", daemon=True
        ).start()

    try:
        opened = connection.transport.request_port_forward(LOOPBACK, 0, on_visitor)
    except (OSError, EOFError) as error:
        raise connection.lost_error("no port was forwarded", error) from error
    except SSHException as error:
        raise PoolError(
            f"host {connection.host}: its sshd refuses to forward a port ({error}), but taas-magic "
            "needs one to reach its agent; its /etc/ssh/sshd_config must have "
            "`AllowTcpForwarding yes` (or `remote`), `DisableForwarding no`, and no `PermitListen` "
            "that excludes localhost"
        ) from error
    connection.tunnels[opened] = host, port
    return opened


def close_tunnel(connection: Connection, port: int) -> None:
    """Stop forwarding `port` of the connected host; connections that exist already stay open.

    Call this function when the server on this machine has ended. Otherwise, the tunnel would lead
    to any other program that opens the server's old port later. paramiko's own function would stop
    all forwarded ports of the connection.

    Args:
        port: The forwarded port on the connected host, as returned by `open_tunnel`.
    """
    connection.tunnels.pop(port, None)
    with contextlib.suppress(*_ENDED):  # the connection may have ended
        connection.transport.global_request("cancel-tcpip-forward", (LOOPBACK, port), wait=False)


def _relay(channel: Channel, address: tuple[str, int]) -> None:
    """Connect to the server at `address`, and relay bytes between the server and `channel`.

    Return after either side has closed the connection.
    """
    # The connection or the pool may end at any time. Then `with` closes the channel and the socket.
    with contextlib.suppress(*_ENDED), channel, socket.create_connection(address) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(
            target=_copy_until_end, args=(sock.recv, channel.sendall, channel.close), daemon=True
        )
        back.start()
        _copy_until_end(channel.recv, sock.sendall, lambda: sock.shutdown(socket.SHUT_RDWR))
        back.join()


def _copy_until_end(
    read: Callable[[int], bytes],
    write: Callable[[bytes], Any],
    close: Callable[[], Any] = lambda: None,
) -> None:
    """Copy bytes from `read` to `write` until the data or connection ends; then call `close`."""
    with contextlib.suppress(*_ENDED):  # either side may close at any time, with any exception
        while data := read(_RELAY_CHUNK_BYTES):
            write(data)
    with contextlib.suppress(*_ENDED):
        close()
