"""An SSH connection to a host, and what travels on it: commands, files, a port that leads back.

paramiko's SSHClient does the handshake over a socket that is opened here, so that it can be given
up at any moment, and each refusal says which host, what was tried and what to do.
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
from taas_magic.host.system import LOOPBACK
from taas_magic.setup.facts import Done, python_word
from taas_magic.ssh.config import KnownHosts, Target, UserKeys, refusal

CONNECT_TIMEOUT_S = 15.0
SILENCE_S = 8.0
TAIL_LINES = 15
_END_S = 2.0
_TICK_S = 0.1
_PROBE_S = 2
_ENDED = SSHException, OSError, EOFError
"""What paramiko raises when a channel or its connection has ended, whichever side notices first."""
_TCP_RTO_MAX_MS = 44
"""Linux's option for the longest pause before something is sent again (linux/tcp.h, since 6.15);
the socket module has no name for it."""
_RELAY_CHUNK_BYTES = 1 << 16
_LONGEST_LINE = 4096
_AT_ONCE = 4
"""Of those who have not logged in yet an sshd turns some away beyond 10 (MaxStartups), and it hears
later than they that they have."""

_turns: dict[str, threading.Semaphore] = {}
_RUN_S = 60.0
_SLOWEST_BYTES_S = 1 << 13

_PUT = (
    'umask 077; cat >"$0.$1" && [ "$(wc -c <"$0.$1")" -eq "$2" ] && mv -f "$0.$1" "$0" '
    '|| { rm -f "$0.$1"; exit 1; }'
)
"""Writes standard input to a file; is told its name, something random, and how much comes."""

logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # what fails is raised, and says more


class Stopped(Exception):
    """Whoever asked for the connection does not want it any more."""


class Connection:
    """A host that let us in. Every method may be called from any thread.

    Args:
        undo: What closes it.

    Attributes:
        host: The host as the user calls it.
        tunnels: Where each port of the host leads that is forwarded (`open_tunnel`).
    """

    def __init__(self, target: Target, client: SSHClient, undo: ExitStack) -> None:
        transport = client.get_transport()
        assert transport is not None
        self.target, self.transport, self.host = target, transport, target.label
        self.tunnels: dict[int, tuple[str, int]] = {}
        self._undo = undo

    @property
    def is_open(self) -> bool:
        """Whether the connection is up, as far as this side knows."""
        return self.transport.is_active()

    def start(self, command: str) -> Channel:
        """Start a command; the channel is its standard input, output and error.

        Raises:
            PoolError: The host does not let it start.
        """
        try:
            channel = self.transport.open_session(timeout=CONNECT_TIMEOUT_S)
            channel.exec_command(command)
        except _ENDED as error:
            raise self.lost(f"{command.split()[0]} was not started", error) from error
        return channel

    def run(self, command: str, data: bytes = b"", timeout_s: float = _RUN_S) -> Done:
        """Run a command of the host's shell to its end; `data` is its standard input.

        Raises:
            PoolError: The connection broke, or the command said nothing for `timeout_s`.
        """
        errors: list[bytes] = []
        with self.start(command) as channel:
            channel.settimeout(timeout_s)
            threading.Thread(target=_write_all, args=(channel, data), daemon=True).start()
            words = channel.recv_stderr, errors.append
            reader = threading.Thread(target=_pump, args=words, daemon=True)
            reader.start()
            try:
                stdout = channel.makefile("rb").read()
            except _ENDED as error:
                raise self.lost(f"{shlex.split(command)[0]} gave no answer", error) from error
            reader.join(timeout_s)
            return Done(channel.recv_exit_status(), stdout, b"".join(errors))

    def put(self, data: bytes, path: str) -> None:
        """Write a small file there, for the user alone; it is there whole or not at all.

        Args:
            path: Where; its folder is there. Relative to the home folder unless absolute.

        Raises:
            PoolError: It could not be written.
        """
        # not by SFTP: a host may have none, or a login script whose output breaks it
        words = [_PUT, path, secrets.token_hex(4), str(len(data))]
        command = f"exec sh -c {' '.join(map(shlex.quote, words))}"
        done = self.run(command, data, _RUN_S + len(data) / _SLOWEST_BYTES_S)
        if done.code:
            why = done.err.decode(errors="replace").strip() or f"exit code {done.code}"
            raise PoolError(f"host {self.host}: {path} was not written: {why}")

    def lost(self, what: str, error: BaseException) -> PoolError:
        """Return the error that says what could not be done on this host."""
        why = self.transport.get_exception() or error
        return PoolError(f"host {self.host}: {what}: {type(why).__name__}: {why}")

    def close(self) -> None:
        """Close the connection and all that goes through it."""
        self._undo.close()


def _write_all(channel: Channel, data: bytes) -> None:
    with contextlib.suppress(*_ENDED):  # it ended without reading it; its exit status tells
        channel.sendall(data)
        channel.shutdown_write()


def connect(
    target: Target,
    stop: threading.Event,
    timeout_s: float = CONNECT_TIMEOUT_S,
    silence_s: float = SILENCE_S,
) -> Connection:
    """Connect to a host, through its jump hosts.

    Args:
        stop: Set by whoever does not want it any more; it is then given up within a moment.
        timeout_s: How long it may take.
        silence_s: After how long without an answer the connection counts as cut.

    Raises:
        PoolError: The host cannot be reached, its key is not known, or it does not let us in.
        Stopped: `stop` was set.
    """
    patience = _Patience(target, timeout_s, stop)
    with ExitStack() as undo, _turn(patience):
        sock = _open_way(target, patience, silence_s, undo)
        client, known = SSHClient(), KnownHosts(target)
        client.set_missing_host_key_policy(known)
        undo.callback(_close, client)
        with _handshake(sock, patience):
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


class _Patience:
    """How long to go on with a host: until its time is over, or somebody sets `stop`."""

    def __init__(self, target: Target, timeout_s: float, stop: threading.Event) -> None:
        self.target, self.timeout_s, self.stop = target, timeout_s, stop
        self._until = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return max(_TICK_S, self._until - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.stop.is_set() or time.monotonic() > self._until

    def check(self, doing: str) -> None:
        """Return while there is patience.

        Raises:
            Stopped: `stop` is set.
            PoolError: The time is over; names the host and what it was asked.
        """
        if self.stop.is_set():
            raise Stopped
        if self.is_over:
            raise PoolError(
                f"host {self.target.label}: no answer from {self.target.address} within "
                f"{self.timeout_s:.0f} s ({doing}); is it up, and is this the way to it?"
            )


@contextmanager
def _turn(patience: _Patience) -> Iterator[None]:
    """Let a few threads at a time connect to one sshd: a jump host has all hosts behind it."""
    turn = _turns.setdefault(patience.target.address, threading.Semaphore(_AT_ONCE))
    while not turn.acquire(timeout=_TICK_S):
        patience.check("others connect to it first")
    try:
        yield
    finally:
        turn.release()


@contextmanager
def _handshake(sock: socket.socket | Channel, patience: _Patience) -> Iterator[None]:
    """Close `sock`, so that whatever blocks on it fails, when there is no patience left."""
    target, done = patience.target, threading.Event()

    def watch() -> None:
        while not done.wait(_TICK_S):
            if patience.is_over:
                sock.close()
                return

    watcher = threading.Thread(target=watch, name="taas-ssh", daemon=True)
    watcher.start()
    try:
        yield
    except _ENDED as error:
        patience.check("SSH handshake")
        if isinstance(error, AuthFailure):
            raise PoolError(refusal(target, error)) from error
        raise PoolError(
            f"host {target.label}: {target.address} does not speak SSH with us: "
            f"{error or type(error).__name__}"
        ) from error
    finally:
        done.set()
        watcher.join()


def _close(client: SSHClient) -> None:
    transport = client.get_transport()
    client.close()
    if transport not in (None, threading.current_thread()) and transport.ident is not None:
        transport.join(_END_S)


def _open_way(
    target: Target, patience: _Patience, silence_s: float, undo: ExitStack
) -> socket.socket | Channel:
    """Open the bytes' way to a host's sshd: through a jump host, a program, or a socket.

    `undo` is given what closes it.
    """
    if target.proxy_command and target.jump is None:
        return _program(target.proxy_command, undo)
    if target.jump is None:
        return _dial(target, patience, silence_s, undo)
    jump = connect(target.jump, patience.stop, patience.left_s, silence_s)
    undo.callback(jump.close)
    try:
        channel = jump.transport.open_channel(
            "direct-tcpip",
            (target.hostname, target.port),
            (LOOPBACK, 0),
            timeout=patience.left_s,
        )
    except SSHException as error:
        raise jump.lost(f"no way from it to {target.address}", error) from error
    undo.callback(channel.close)
    return channel


def _program(command: str, undo: ExitStack) -> socket.socket:
    """Start a ProxyCommand with one end of a socket pair as its standard input and output.

    As ssh does, by a shell: paramiko's ProxyCommand knows none.
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
    undo.callback(_end, program)
    return ours


def _end(program: "subprocess.Popen[bytes]") -> None:
    """End a ProxyCommand; one that leads through a service may have to say there that it ends."""
    program.terminate()
    try:
        program.wait(_END_S)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()


def _dial(target: Target, patience: _Patience, silence_s: float, undo: ExitStack) -> socket.socket:
    try:
        found = socket.getaddrinfo(target.hostname, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a name with two dots in a row is no text for DNS
        why = error.strerror if isinstance(error, OSError) else error
        raise PoolError(
            f"cannot resolve host {target.label} ({target.hostname!r}): {why}"
        ) from error
    refusals: list[str] = []
    for left, (family, _, _, _, address) in zip(range(len(found), 0, -1), found, strict=True):
        sock = socket.socket(family, socket.SOCK_STREAM)
        undo.callback(sock.close)
        # one that answers nothing leaves time for the next
        code = _connect(sock, address, patience, patience.left_s / left if left > 1 else None)
        if code == 0:
            _notice_silence(sock, silence_s)
            return sock
        refusals.append(f"{address[0]}: {os.strerror(code)}")
    raise PoolError(
        f"host {target.label}: {target.address} cannot be reached "
        f"({'; '.join(refusals)}); is sshd running there?"
    )


def _connect(
    sock: socket.socket, address: Any, patience: _Patience, limit_s: float | None = None
) -> int:
    """Connect; returns an error number, 0 for none. A blocking connect could not be stopped."""
    until = None if limit_s is None else time.monotonic() + limit_s
    sock.setblocking(False)
    code = sock.connect_ex(address)
    if code == errno.EINPROGRESS:
        connected = select.poll()  # select(2) takes no descriptor beyond 1,023
        connected.register(sock, select.POLLOUT)
        while not connected.poll(_TICK_S * 1000):
            patience.check("TCP connection")
            if until is not None and time.monotonic() > until:
                return errno.ETIMEDOUT
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    sock.setblocking(True)
    return code


def _notice_silence(sock: socket.socket, silence_s: float) -> None:
    """Have the system close a connection whose other end does not answer.

    ssh's own keepalive only sends; that nothing is acknowledged is known to TCP alone. What was
    lost is sent again after a second at most: TCP doubles that pause with each loss, so that on a
    link that loses much a host would hear nothing for longer than its lease.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(silence_s * 1000))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    with contextlib.suppress(OSError):  # Linux before 6.15 has no such option
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000)


class KeptCommand:
    """Starts a command, and writes an empty line to it now and then.

    Args:
        command: For the host's shell.
        first_line: What the command is told at once; not in its arguments, where `ps` shows it.
        beat_s: Seconds from one line to the next.
        log: Given every line of the command's output.

    Attributes:
        ended: Set when its output has ended: it is over, or the connection is.

    Raises:
        PoolError: The host does not let it start.
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
        self.ended = threading.Event()
        self._channel = connection.start(command)
        self._channel.set_combine_stderr(True)
        for work, words in ((self._read, ()), (self._beat, (first_line,))):
            threading.Thread(target=work, args=words, name="taas-ssh", daemon=True).start()

    @property
    def tail(self) -> str:
        """The last lines of its output."""
        return "\n".join(self._tail)

    def close(self, timeout_s: float) -> bool:
        """End its standard input and wait until it has ended; says whether it has."""
        self._closing.set()
        with contextlib.suppress(*_ENDED):
            self._channel.shutdown_write()
        return self.ended.wait(timeout_s)

    def _beat(self, first_line: bytes) -> None:
        with contextlib.suppress(*_ENDED):  # it is over; its output ends too
            self._channel.sendall(first_line)
            while not self._closing.wait(self._beat_s):
                self._channel.sendall(b"\n")

    def _read(self) -> None:
        output = self._channel.makefile("rb")
        with contextlib.suppress(*_ENDED):
            while line := output.readline(_LONGEST_LINE):
                text = line.decode(errors="replace").rstrip()
                self._tail.append(text)
                self._log(text)
        self.ended.set()


def shell_words(
    python: str | None, arguments: Sequence[str], environ: Mapping[str, str] | None = None
) -> str:
    """Return a command line that any login shell understands.

    Args:
        python: The program, as `python_word` takes it.
        environ: Variables that it gets besides; nothing secret, `ps` shows them.
    """
    settings = [f"{name}={shlex.quote(value)}" for name, value in (environ or {}).items()]
    words = ["env", *settings] if settings else []
    return " ".join(["exec", *words, python_word(python), *map(shlex.quote, arguments)])


def open_tunnel(connection: Connection, host: str, port: int) -> int:
    """Forward a port of the host's own loopback to (`host`, `port`) as seen from here.

    It lasts as long as the connection, or until `close_tunnel`. What it leads to must ask for a key
    itself, since everybody on the host may use it: ports of pools and farms speak TLS with
    certificates on both sides.

    Returns:
        The port on the host.

    Raises:
        PoolError: The host does not forward ports, or the connection broke.
    """

    def on_visitor(channel: Channel, origin: Any, server: tuple[str, int]) -> None:
        address = connection.tunnels.get(server[1])  # of all ports: paramiko keeps one function
        if address is None:
            channel.close()
            return
        threading.Thread(
            target=_relay, args=(channel, address), name="taas-tunnel", daemon=True
        ).start()

    try:
        opened = connection.transport.request_port_forward(LOOPBACK, 0, on_visitor)
    except (OSError, EOFError) as error:
        raise connection.lost("no port was forwarded", error) from error
    except SSHException as error:
        raise PoolError(
            f"host {connection.host}: its sshd refuses to forward a port ({error}), by "
            "which its ranks would report; its /etc/ssh/sshd_config must have "
            "`AllowTcpForwarding yes` (or `remote`), `DisableForwarding no`, and no `PermitListen` "
            "that leaves out localhost"
        ) from error
    connection.tunnels[opened] = host, port
    return opened


def close_tunnel(connection: Connection, port: int) -> None:
    """End a tunnel: nobody comes through `port` of the host any more.

    Another program may soon listen where it led to. paramiko's own function for it would end all
    tunnels of the connection.
    """
    connection.tunnels.pop(port, None)
    with contextlib.suppress(*_ENDED):  # the connection has ended
        connection.transport.global_request("cancel-tcpip-forward", (LOOPBACK, port), wait=False)


def _relay(channel: Channel, address: tuple[str, int]) -> None:
    """Carry bytes both ways until either side is at its end."""
    # the connection may go before the channel, or the pool before both: the host sees them close
    with contextlib.suppress(*_ENDED), channel, socket.create_connection(address) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(
            target=_pump, args=(sock.recv, channel.sendall, channel.close), daemon=True
        )
        back.start()
        _pump(channel.recv, sock.sendall, lambda: sock.shutdown(socket.SHUT_RDWR))
        back.join()


def _pump(
    read: Callable[[int], bytes],
    write: Callable[[bytes], Any],
    close: Callable[[], Any] = lambda: None,
) -> None:
    with contextlib.suppress(*_ENDED):  # either end may go at any time, in any way
        while data := read(_RELAY_CHUNK_BYTES):
            write(data)
    with contextlib.suppress(*_ENDED):
        close()
