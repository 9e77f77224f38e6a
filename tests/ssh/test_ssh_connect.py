"""Tests of SSH connections: host keys, logins, jump hosts, tunnels, and messages of failures."""

import contextlib
import os
import resource
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from paramiko import Channel

from taas_magic.errors import PoolError
from taas_magic.ssh.config import ConnectStopped, SshTarget, find_target
from taas_magic.ssh.connect import (
    _TCP_RTO_MAX_MS,
    Connection,
    close_tunnel,
    connect,
    open_tunnel,
)
from tests.eventually import HUNG_S, eventually
from tests.rig.hosts import Hosts, hosts_up

pytestmark = [
    pytest.mark.network,
    pytest.mark.usefixtures("no_threads"),
]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_up(2) as hosts:
        yield hosts


@pytest.fixture
def no_threads(hosts: Hosts) -> Iterator[None]:
    """Check after the test that closed connections have left no thread."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(HUNG_S)
        assert not thread.is_alive(), thread


def target(hosts: Hosts, tmp_path: Path, number: int = 1, first: str = "") -> SshTarget:
    """Return host `number` of the simulated hosts, with settings from an SSH configuration.

    The configuration consists of the lines `first`, and then of the configuration of `hosts`.
    """
    config = tmp_path / "ssh_config"
    config.write_text(f"Host *\n{first}\n{hosts.ssh_config.read_text()}")
    return asked(hosts.name(number), config)


def asked(host: str, config: Path) -> SshTarget:
    return find_target(host, str(config), threading.Event())


def opened(where: SshTarget) -> Connection:
    return connect(where, threading.Event(), timeout_s=HUNG_S)


def opened_at_once(where: SshTarget, count: int) -> list[Connection]:
    """Open `count` connections at the same time, in threads; close and return them."""
    made: list[Connection] = []
    threads = [threading.Thread(target=lambda: made.append(opened(where))) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for connection in made:
        connection.close()
    return made


def refusal(where: SshTarget) -> str:
    with pytest.raises(PoolError) as caught:
        opened(where)
    return str(caught.value)


def lets_in(where: SshTarget) -> None:
    """Check that a login succeeds and that a command runs. Then sshd's log contains the login."""
    connection = opened(where)
    assert connection.run("true").code == 0
    connection.close()


def answers(family: int, address: str | tuple[str, int]) -> bool:
    """Return whether the address accepts connections."""
    with socket.socket(family) as visitor:
        return visitor.connect_ex(address) == 0


@contextlib.contextmanager
def in_a_hole(hosts: Hosts, number: int) -> Iterator[None]:
    """Drop all packets to a host until the block ends."""
    hosts.hole(number)
    try:
        yield
    finally:
        hosts.unhole(number)


def logins(hosts: Hosts, number: int = 1) -> int:
    """Return the number of login attempts in the log of a host's sshd."""
    return (hosts.state / str(number) / "sshd.log").read_text().count("publickey")


def test_a_command_gets_its_input_and_gives_output_and_exit_code(
    hosts: Hosts, tmp_path: Path
) -> None:
    connection = opened(target(hosts, tmp_path))
    done = connection.run("cat; echo odd >&2; exit 3", b"x" * 1_000_000)
    assert done == (3, b"x" * 1_000_000, b"odd\n")
    connection.close()


def test_sent_files_are_private_and_complete(hosts: Hosts, tmp_path: Path) -> None:
    connection = opened(target(hosts, tmp_path))
    connection.put(b"x" * 100_000, "one")
    connection.put(b"y" * 100_000, "/root/two")
    listed = connection.run("stat -c '%n %a %s' one two; ls | wc -l").out.decode().split()
    assert listed == ["one", "600", "100000", "two", "600", "100000", "2"]
    with pytest.raises(PoolError, match=f"host {hosts.name(1)}: nowhere/file was not written"):
        connection.put(b"x", "nowhere/file")
    connection.close()


@pytest.mark.fault(51)
@pytest.mark.parametrize("alias", ["", "HostKeyAlias lab"])
def test_an_unknown_host_key_is_refused_before_authentication(
    hosts: Hosts, tmp_path: Path, alias: str
) -> None:
    known = tmp_path / "known_hosts"
    tried = logins(hosts)
    where = target(hosts, tmp_path, first=f"UserKnownHostsFile {known}\n{alias}")
    message = refusal(where)
    assert fingerprint(hosts) in message
    assert logins(hosts) == tried
    mend = next(line.strip() for line in message.splitlines() if "ssh-keyscan" in line[:20])
    subprocess.run(mend, shell=True, check=True, capture_output=True)
    lets_in(where)


@pytest.mark.fault(51)
def test_a_changed_host_key_is_refused_before_authentication(hosts: Hosts, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_key(other)
    known = tmp_path / "known_hosts"
    words = other.with_suffix(".pub").read_text().split()
    known.write_text(f"{hosts.address(1)} {words[0]} {words[1]}\n")
    tried = logins(hosts)
    where = target(hosts, tmp_path, first=f"UserKnownHostsFile {known}")
    message = refusal(where)
    assert fingerprint(hosts) in message and "differs from the key in" in message
    assert logins(hosts) == tried
    for line in message.splitlines():
        if line.startswith("  ssh-key"):
            subprocess.run(line, shell=True, check=True, capture_output=True)
    lets_in(where)


@pytest.mark.parametrize("checking", ["accept-new", "no"])
def test_a_new_host_key_is_added_if_the_configuration_allows_it(
    hosts: Hosts, tmp_path: Path, checking: str
) -> None:
    known = tmp_path / "new" / "known_hosts"
    first = f"UserKnownHostsFile {known}\nStrictHostKeyChecking"
    lets_in(target(hosts, tmp_path, first=f"{first} {checking}"))
    line = known.read_text()
    assert line.startswith(f"{hosts.address(1)} ssh-ed25519 ")
    known.write_text("# no line end")
    lets_in(target(hosts, tmp_path, first=f"{first} {checking}"))
    assert known.read_text() == f"# no line end\n{line}"
    lets_in(target(hosts, tmp_path, first=f"{first} yes"))
    make_key(tmp_path / "other")
    other = (tmp_path / "other.pub").read_text()
    known.write_text(f"{hosts.address(1)} {other}")
    assert "differs from the key in" in refusal(
        target(hosts, tmp_path, first=f"{first} {checking}")
    )


def test_host_keys_are_found_as_ssh_finds_them(hosts: Hosts, tmp_path: Path) -> None:
    key = (hosts.state / "host_key.pub").read_text()
    known, address = tmp_path / "known_hosts", hosts.address(1)
    where = target(hosts, tmp_path, first=f"UserKnownHostsFile {known}")
    torn = "gpu9 ssh-rsa AAAA\n|1|odd ssh-ed25519 AAAA\ngpu9 ssh-ed25519 AAAAC3Nz\n"
    for names in (f"{hosts.subnet}.*", f"gpu9,{hosts.subnet}.?", address):
        known.write_text(f"{torn}{names} \t{key}")
        lets_in(where)
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
    lets_in(where)
    for names in (f"!{address},*", "[1]*", f"[{address}]:22"):
        known.write_text(f"{names} {key}")
        assert "is unknown" in refusal(where)


def test_a_revoked_host_key_is_refused_though_it_is_known(hosts: Hosts, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    line = (hosts.state / "known_hosts").read_text().splitlines()[0]
    known.write_text(f"{line}\n@revoked * {line.split(maxsplit=1)[1]}\n")
    where = target(hosts, tmp_path, first=f"UserKnownHostsFile {known}")
    assert "@revoked" in refusal(where)


def fingerprint(hosts: Hosts) -> str:
    words = ["ssh-keygen", "-lf", str(hosts.state / "host_key.pub")]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[1]


@pytest.mark.fault(52)
def test_a_refused_login_says_who_where_and_what_was_tried(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    stranger, locked = tmp_path / "stranger", tmp_path / "locked"
    make_key(stranger)
    make_key(locked, "secret")
    first = f"IdentityFile {stranger}\nIdentityFile {locked}\nIdentityFile {tmp_path}/none\n"
    config = hosts.ssh_config.read_text().replace(str(hosts.state / "id_ed25519"), str(stranger))
    (tmp_path / "config").write_text(f"Host *\n{first}\n{config}")
    message = refusal(asked(f"ada@{hosts.name(1)}", tmp_path / "config"))
    assert f"host ada@{hosts.name(1)}: SSH authentication as 'ada'" in message
    assert f"{stranger}: refused" in message
    assert f"`ssh-add {locked}`" in message
    assert f"{tmp_path}/none: there is no such file" in message
    assert "no ssh agent" in message
    assert f"`ssh -F {tmp_path}/config ada@{hosts.name(1)}` must work" in message


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run an ssh agent without keys."""
    sock = tmp_path / "agent"
    with subprocess.Popen(["ssh-agent", "-D", "-a", sock], stdout=subprocess.DEVNULL) as agent:
        try:
            eventually(lambda: answers(socket.AF_UNIX, str(sock)))
            monkeypatch.setenv("SSH_AUTH_SOCK", str(sock))
            yield
        finally:
            agent.terminate()


def add_to_agent(*keys: Path) -> None:
    subprocess.run(["ssh-add", "-q", *keys], check=True, capture_output=True)


def make_key(path: Path, phrase: str = "") -> Path:
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", phrase, "-f", str(path)]
    subprocess.run(words, check=True)
    return path


def with_key(hosts: Hosts, tmp_path: Path, key: Path, only: bool) -> SshTarget:
    """Return host 1 with the IdentityFile `key`.

    If `only`, the configuration has `IdentitiesOnly yes`, so the agent's other keys are not tried.
    """
    config = hosts.ssh_config.read_text().replace(str(hosts.state / "id_ed25519"), str(key))
    (tmp_path / "config").write_text(config if only else config.replace("IdentitiesOnly yes", ""))
    return asked(hosts.name(1), tmp_path / "config")


@pytest.mark.usefixtures("agent")
def test_a_key_of_the_agent_is_used(hosts: Hosts, tmp_path: Path) -> None:
    add_to_agent(hosts.state / "id_ed25519")
    lets_in(with_key(hosts, tmp_path, Path("/nowhere/id"), only=False))


@pytest.mark.usefixtures("agent")
def test_an_identity_file_selects_a_key_of_the_agent(hosts: Hosts, tmp_path: Path) -> None:
    """The IdentityFile selects one of the agent's 8 keys: a host accepts only 6 attempts."""
    rigs = hosts.state / "id_ed25519"
    add_to_agent(*(make_key(tmp_path / f"other{number}") for number in range(7)), rigs)
    public, locked = tmp_path / "mine.pub", tmp_path / "locked"
    public.write_text((hosts.state / "id_ed25519.pub").read_text())
    locked.write_bytes(rigs.read_bytes())
    locked.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", locked], check=True)
    advice = f"`ssh-keygen -y -f {locked} > {locked}.pub`"
    assert advice in refusal(with_key(hosts, tmp_path, locked, only=True))
    (tmp_path / "locked.pub").write_text(public.read_text())
    for key in (public, locked, rigs):
        for only in (True, False):
            lets_in(with_key(hosts, tmp_path, key, only))


@pytest.mark.parametrize("answer", [b"", b"\0\0\0\1\5"], ids=["silence", "a refusal"])
def test_an_agent_that_does_not_answer_does_not_prevent_a_login(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    """For example, an agent does not answer if it was forwarded from a machine that now sleeps."""
    sock = str(tmp_path / "agent")
    monkeypatch.setenv("SSH_AUTH_SOCK", sock)
    visitors: list[socket.socket] = []

    def listen() -> None:
        with contextlib.suppress(OSError):
            while True:
                visitors.append(odd.accept()[0])
                visitors[-1].sendall(answer)

    with socket.socket(socket.AF_UNIX) as odd:
        odd.bind(sock)
        odd.listen()
        listening = threading.Thread(target=listen)
        listening.start()
        lets_in(target(hosts, tmp_path))
        message = refusal(with_key(hosts, tmp_path, make_key(tmp_path / "stranger"), only=True))
        assert f"the ssh agent does not answer ({sock})" in message
        odd.shutdown(socket.SHUT_RDWR)
        listening.join()
    for visitor in visitors:
        visitor.close()


def test_include_and_match_apply_as_with_ssh(hosts: Hosts, tmp_path: Path) -> None:
    """`Match exec` runs its command. `Match final` applies after all other entries."""
    part = tmp_path / "part.conf"
    part.write_text(f"Host lab\n  HostName {hosts.address(1)}\n")
    first = (
        f'Include {part}\nMatch originalhost lab exec "test -e {part}"\n  Port 22\n'
        f"Match final originalhost lab\n  HostKeyAlias {hosts.name(1)}\n"
        "Match originalhost lab\n  Port 4\nHost *"
    )
    target(hosts, tmp_path, 1, first)
    lets_in(found := asked("lab", tmp_path / "ssh_config"))
    assert found.known_as == hosts.name(1)


def test_a_host_is_reached_through_a_jump_host(hosts: Hosts, tmp_path: Path) -> None:
    first = f"Host {hosts.name(2)}\n  ProxyJump {hosts.name(1)}\nHost *\n"
    connection = opened(target(hosts, tmp_path, 2, first))
    seen = connection.run("hostname; echo $SSH_CONNECTION").out.decode().split()
    assert seen[0] == hosts.name(2)
    assert seen[1] == hosts.address(1)
    connection.close()


def test_a_jump_host_that_ends_the_connection_is_named(hosts: Hosts, tmp_path: Path) -> None:
    first = f"Host {hosts.name(2)}\n  ProxyJump {hosts.name(1)}\nHost *\n"

    def kill() -> None:
        """Kill the jump host's sshd while it connects to host 2."""
        sent = " 02 "  # a connection in the state SYN_SENT
        eventually(lambda: sent in hosts.exec(1, "cat", "/proc/net/tcp"))
        hosts.kill_processes(1, "sshd")

    killing = threading.Thread(target=kill)
    hosts.deafen(2)
    killing.start()
    try:
        said = refusal(target(hosts, tmp_path, 2, first))
    finally:
        killing.join()
        hosts.undeafen(2)
    assert f"host {hosts.name(1)}: it cannot connect to {hosts.address(2)}" in said


@pytest.mark.parametrize("command", ["{}", "sh -c 'trap \"\" TERM; {}; exec sleep 600'"])
def test_a_host_is_reached_through_a_proxy_command(
    hosts: Hosts, tmp_path: Path, command: str
) -> None:
    """The second proxy command ignores SIGTERM and the end of its input. So it must be killed."""
    command = command.format(f"ssh -F {hosts.ssh_config} -W %h:%p {hosts.name(1)}")
    first = f"Host {hosts.name(2)}\nProxyCommand {command}\nHost *"
    connection = opened(target(hosts, tmp_path, 2, first))
    assert connection.run("hostname").out.decode().strip() == hosts.name(2)
    connection.close()


def test_an_unreachable_host_is_named(hosts: Hosts, tmp_path: Path) -> None:
    where = target(hosts, tmp_path, 1, "Port 4\n")
    assert f"host {hosts.name(1)}: {hosts.address(1)}:4 cannot be reached" in refusal(where)
    assert "cannot resolve host " in refusal(asked("nowhere.invalid", hosts.ssh_config))
    assert "('gpu1..lab'): " in refusal(asked("gpu1..lab", hosts.ssh_config))


def test_one_of_two_addresses_may_be_unreachable(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = [(hosts.address(number), 22) for number in (2, 1)]
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with in_a_hole(hosts, 2):
        connection = connect(target(hosts, tmp_path), threading.Event(), timeout_s=20)
    assert connection.run("hostname").out.decode().strip() == hosts.name(1)
    connection.close()


def test_a_process_with_many_open_files_connects(hosts: Hosts, tmp_path: Path) -> None:
    """select(2) cannot handle descriptors above 1,023."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2000, before[0]), before[1]))
    many = [os.open("/dev/null", os.O_RDONLY) for _ in range(1024)]
    try:
        lets_in(target(hosts, tmp_path))
    finally:
        for descriptor in many:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_port_without_ssh_is_named(hosts: Hosts, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        where = target(hosts, tmp_path, 1, f"Port {port}\nHostName 127.0.0.1\n")

        def answer() -> None:
            visitor, _ = server.accept()
            visitor.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
            visitor.close()

        answering = threading.Thread(target=answer)
        answering.start()
        assert "SSH handshake with" in refusal(where)
        answering.join()


@pytest.mark.fault(35)
@pytest.mark.parametrize("way", ["hole", "silence"])
def test_a_connect_into_nothing_can_be_stopped(hosts: Hosts, tmp_path: Path, way: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, in_a_hole(hosts, 2):
        first = f"Port {mute.getsockname()[1]}\nHostName 127.0.0.1" if way == "silence" else ""
        where = target(hosts, tmp_path, 2, first)
        stop = threading.Event()
        timer = threading.Timer(0.5, stop.set)
        timer.start()
        with pytest.raises(ConnectStopped):
            connect(where, stop, timeout_s=600)


def test_a_time_limit_names_the_host(hosts: Hosts, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        first = f"Port {mute.getsockname()[1]}\nHostName 127.0.0.1"
        with pytest.raises(PoolError, match=r"no answer from 127\.0\.0\.1:\d+ within 1 s"):
            connect(target(hosts, tmp_path, 1, first), threading.Event(), timeout_s=1)
        with pytest.raises(PoolError, match="within 2 s"):
            connect(target(hosts, tmp_path, 1, f"{first}\nConnectTimeout 2"), threading.Event())


def test_a_broken_network_closes_the_connection(hosts: Hosts, tmp_path: Path) -> None:
    connection = connect(target(hosts, tmp_path, 2), threading.Event(), HUNG_S, silence_s=3)
    with in_a_hole(hosts, 2):
        connection.transport.join(HUNG_S)
        assert not connection.is_open
    connection.close()


def test_a_connection_may_end_while_a_command_gets_its_input(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes the command's input must not raise an exception."""
    start = Connection.start

    def start_and_cut(self: Connection, command: str) -> Channel:
        channel = start(self, command)
        sock = self.transport.sock
        assert isinstance(sock, socket.socket)
        sock.shutdown(socket.SHUT_WR)
        return channel

    monkeypatch.setattr(Connection, "start", start_and_cut)
    connection = opened(target(hosts, tmp_path))
    assert connection.run("cat").code == -1
    connection.close()


def test_lost_data_are_sent_again_every_second(hosts: Hosts, tmp_path: Path) -> None:
    connection = connect(target(hosts, tmp_path, 2), threading.Event(), HUNG_S, silence_s=60)
    sock = connection.transport.sock
    assert isinstance(sock, socket.socket)
    if not has_rto_max(sock):
        pytest.skip("Linux before 6.15 cannot be told so")
    with in_a_hole(hosts, 2):
        connection.transport.send_ignore()
        eventually(lambda: retransmissions(sock)[0] >= DOUBLED_PAST_A_SECOND)
        assert retransmissions(sock)[1] <= 1.0
    connection.close()


DOUBLED_PAST_A_SECOND = 4
"""Number of retransmissions after which TCP's pause would be 3 s, if it doubled from 0.2 s on."""


def has_rto_max(sock: socket.socket) -> bool:
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS) > 0
    except OSError:
        return False


def retransmissions(sock: socket.socket) -> tuple[int, float]:
    """Return how often TCP has sent the oldest unacknowledged bytes again, and the next pause.

    The pause is in seconds.
    """
    n_times, rto_us = struct.unpack_from(
        "2xB5xI", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 12)
    )
    return n_times, rto_us / 1e6


def talk_to(connection: Connection, port: int, server: socket.socket) -> tuple[bytes, bytes]:
    """Send "ping" through a port of the host to `server`, which answers "pong".

    Returns:
        The bytes that the server received, and the bytes that came back to the host.
    """
    said: list[bytes] = []

    def answer() -> None:
        visitor, _ = server.accept()
        with visitor:
            said.append(visitor.recv(100))
            visitor.sendall(b"pong\n")

    answering = threading.Thread(target=answer)
    answering.start()
    talk = f"exec 3<>/dev/tcp/127.0.0.1/{port}; echo ping >&3; head -1 <&3"
    heard = connection.run(f"bash -c '{talk}'").out
    answering.join()
    return said[0], heard


def test_a_tunnel_leads_from_a_port_of_the_host_to_this_machine(
    hosts: Hosts, tmp_path: Path
) -> None:
    connection = opened(target(hosts, tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = open_tunnel(connection, *server.getsockname())
        assert talk_to(connection, port, server) == (b"ping\n", b"pong\n")
    connection.close()


def test_each_tunnel_leads_to_its_own_address_until_it_is_closed(
    hosts: Hosts, tmp_path: Path
) -> None:
    connection = opened(target(hosts, tmp_path))
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("127.0.0.1", 0)) as second,
    ):
        servers = {open_tunnel(connection, *it.getsockname()): it for it in (first, second)}
        for port, server in servers.items():
            assert talk_to(connection, port, server) == (b"ping\n", b"pong\n")
        closed, kept = servers
        close_tunnel(connection, closed)
        knock = f"exec 3<>/dev/tcp/127.0.0.1/{closed} || exit 7; head -1 <&3"
        assert connection.run(f"bash -c '{knock}'").out == b""
        assert talk_to(connection, kept, servers[kept]) == (b"ping\n", b"pong\n")
    connection.close()


def test_the_error_for_a_host_without_port_forwarding_says_how_to_allow_it(
    hosts: Hosts, tmp_path: Path
) -> None:
    with another_sshd(hosts, tmp_path, "1i DisableForwarding yes") as where:
        connection = opened(where)
        with pytest.raises(PoolError, match="AllowTcpForwarding"):
            open_tunnel(connection, "127.0.0.1", 1)
        connection.close()


@contextlib.contextmanager
def another_sshd(hosts: Hosts, tmp_path: Path, change: str) -> Iterator[SshTarget]:
    """Run another sshd on port 2222 of host 2 until the block ends; yield the host.

    The known_hosts file has the key for the host without a port, where ssh also searches for it.

    Args:
        hosts: The simulated hosts.
        tmp_path: Folder for the SSH configuration.
        change: A sed script, applied to the configuration of sshd.
    """
    script = f"sed 's/^Port .*/Port 2222/; {change}' /run/rig/sshd_config > /run/rig/other"
    hosts.exec(2, "sh", "-c", f"{script}; /usr/sbin/sshd -f /run/rig/other")
    place = (hosts.address(2), 2222)
    eventually(lambda: answers(socket.AF_INET, place))  # sshd forks before it listens
    try:
        yield target(hosts, tmp_path, 2, "Port 2222")
    finally:
        hosts.exec(2, "pkill", "-f", "rig/other")
        eventually(lambda: not answers(socket.AF_INET, place))  # the next sshd needs the port


def test_files_arrive_without_sftp_and_although_a_login_script_prints(
    hosts: Hosts, tmp_path: Path
) -> None:
    script = "echo Welcome, $USER; echo and mind the disk >&2"
    hosts.exec(2, "sh", "-c", f"echo '{script}' > /root/.bashrc")
    try:
        with another_sshd(hosts, tmp_path, "/^Subsystem/d") as where:
            connection = opened(where)
            connection.put(b"x" * 3_000_000, "one")
            assert connection.run("cat one").out.endswith(b"x" * 3_000_000)
            connection.close()
    finally:
        hosts.exec(2, "rm", "/root/.bashrc")


def test_many_connections_succeed_although_sshd_allows_few_logins_at_a_time(
    hosts: Hosts, tmp_path: Path
) -> None:
    with another_sshd(hosts, tmp_path, "s/^MaxStartups.*/MaxStartups 10:100:10/") as where:
        assert len(opened_at_once(where, 32)) == 32


def test_32_connections_can_be_opened_at_once(hosts: Hosts, tmp_path: Path) -> None:
    where, before = target(hosts, tmp_path), len(os.listdir("/proc/self/fd"))
    assert len(opened_at_once(where, 32)) == 32
    assert len(os.listdir("/proc/self/fd")) < before + 32
