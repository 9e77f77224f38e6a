"""Connections to hosts: whose key, who is let in, through whom; and what is said when it fails."""

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from taas_magic.errors import PoolError
from taas_magic.ssh.config import Target, find_target, read_config
from taas_magic.ssh.connect import Connection, Stopped, close_tunnel, connect, open_tunnel
from tests.eventually import WITHIN_S, eventually
from tests.rig.hosts import Hosts, hosts_up

pytestmark = [
    pytest.mark.network,
    pytest.mark.usefixtures("no_threads"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_up(2) as hosts:
        yield hosts


@pytest.fixture
def no_threads(hosts: Hosts) -> Iterator[None]:
    """Assert that what was closed has no thread left."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(WITHIN_S)
        assert not thread.is_alive(), thread


def target(hosts: Hosts, tmp_path: Path, number: int = 1, first: str = "") -> Target:
    """Return a host of the rig, with lines that go before the rig's configuration."""
    config = tmp_path / "ssh_config"
    config.write_text(f"Host *\n{first}\n{hosts.ssh_config.read_text()}")
    return find_target(hosts.name(number), read_config(str(config)))


def opened(where: Target) -> Connection:
    return connect(where, threading.Event(), timeout_s=WITHIN_S)


def refusal(where: Target) -> str:
    with pytest.raises(PoolError) as caught:
        opened(where)
    return str(caught.value)


def lets_in(where: Target) -> None:
    """Log in; where a command has run, sshd's log has the login."""
    connection = opened(where)
    assert connection.run("true").code == 0
    connection.close()


def answers(family: int, address: str | tuple[str, int]) -> bool:
    """Whether somebody listens there."""
    with socket.socket(family) as visitor:
        return visitor.connect_ex(address) == 0


@contextmanager
def in_a_hole(hosts: Hosts, number: int) -> Iterator[None]:
    """Let what is sent to a host vanish, for the time of the block."""
    hosts.hole(number)
    try:
        yield
    finally:
        hosts.unhole(number)


def logins(hosts: Hosts, number: int = 1) -> int:
    """How often anybody has tried to log in."""
    return (hosts.state / str(number) / "sshd.log").read_text().count("publickey")


def test_a_command_gets_its_input_and_gives_output_and_exit_code(
    hosts: Hosts, tmp_path: Path
) -> None:
    connection = opened(target(hosts, tmp_path))
    done = connection.run("cat; echo odd >&2; exit 3", b"x" * 1_000_000)
    assert done == (3, b"x" * 1_000_000, b"odd\n")
    connection.close()


def test_files_are_the_users_alone_and_whole(hosts: Hosts, tmp_path: Path) -> None:
    connection = opened(target(hosts, tmp_path))
    connection.put(b"x" * 100_000, "one")
    connection.put(b"y" * 100_000, "/root/two")
    listed = connection.run("stat -c '%n %a %s' one two; ls | wc -l").out.decode().split()
    assert listed == ["one", "600", "100000", "two", "600", "100000", "2"]
    with pytest.raises(PoolError, match=f"host {hosts.name(1)}: nowhere/file was not written"):
        connection.put(b"x", "nowhere/file")
    connection.close()


def test_51_an_unknown_host_key_is_refused_before_authentication(
    hosts: Hosts, tmp_path: Path
) -> None:
    known = tmp_path / "known_hosts"
    tried = logins(hosts)
    where = target(hosts, tmp_path, first=f"UserKnownHostsFile {known}")
    message = refusal(where)
    assert fingerprint(hosts) in message
    assert logins(hosts) == tried
    mend = next(line.strip() for line in message.splitlines() if "ssh-keyscan" in line[:20])
    subprocess.run(mend, shell=True, check=True, capture_output=True)
    lets_in(where)


def test_51_a_changed_host_key_is_refused_before_authentication(
    hosts: Hosts, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    known = tmp_path / "known_hosts"
    words = other.with_suffix(".pub").read_text().split()
    known.write_text(f"{hosts.address(1)} {words[0]} {words[1]}\n")
    tried = logins(hosts)
    where = target(hosts, tmp_path, first=f"UserKnownHostsFile {known}")
    message = refusal(where)
    assert fingerprint(hosts) in message and "is not the one" in message
    assert logins(hosts) == tried
    for line in message.splitlines():
        if line.startswith("  ssh-key"):
            subprocess.run(line, shell=True, check=True, capture_output=True)
    lets_in(where)


def test_a_revoked_host_key_is_refused_though_it_is_known(hosts: Hosts, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    line = (hosts.state / "known_hosts").read_text().splitlines()[0]
    known.write_text(f"{line}\n@revoked * {line.split(maxsplit=1)[1]}\n")
    where = target(hosts, tmp_path, first=f"UserKnownHostsFile {known}")
    assert "@revoked" in refusal(where)


def fingerprint(hosts: Hosts) -> str:
    words = ["ssh-keygen", "-lf", str(hosts.state / "host_key.pub")]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[1]


def test_52_a_refused_login_says_who_where_and_what_was_tried(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    stranger, locked = tmp_path / "stranger", tmp_path / "locked"
    for path, phrase in ((stranger, ""), (locked, "secret")):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", phrase, "-f", str(path)]
        subprocess.run(words, check=True)
    first = f"IdentityFile {stranger}\nIdentityFile {locked}\nIdentityFile {tmp_path}/none\n"
    config = hosts.ssh_config.read_text().replace(str(hosts.state / "id_ed25519"), str(stranger))
    (tmp_path / "config").write_text(f"Host *\n{first}\n{config}")
    found = read_config(str(tmp_path / "config"))
    message = refusal(find_target(f"ada@{hosts.name(1)}", found))
    assert f"host ada@{hosts.name(1)}: SSH authentication as 'ada'" in message
    assert f"{stranger}: refused" in message
    assert f"`ssh-add {locked}`" in message
    assert f"{tmp_path}/none: there is no such file" in message
    assert "no ssh agent" in message


def test_an_agents_key_is_taken(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sock = tmp_path / "agent"
    with subprocess.Popen(["ssh-agent", "-D", "-a", sock], stdout=subprocess.DEVNULL) as agent:
        try:
            eventually(lambda: answers(socket.AF_UNIX, str(sock)))
            monkeypatch.setenv("SSH_AUTH_SOCK", str(sock))
            words = ["ssh-add", "-q", str(hosts.state / "id_ed25519")]
            subprocess.run(words, check=True, capture_output=True)
            config = hosts.ssh_config.read_text().replace(str(hosts.state / "id"), "/nowhere/id")
            (tmp_path / "config").write_text(config.replace("IdentitiesOnly yes", ""))
            found = read_config(str(tmp_path / "config"))
            lets_in(find_target(hosts.name(1), found))
        finally:
            agent.terminate()


def test_a_host_behind_another_is_reached_through_it(hosts: Hosts, tmp_path: Path) -> None:
    first = f"Host {hosts.name(2)}\n  ProxyJump {hosts.name(1)}\nHost *\n"
    connection = opened(target(hosts, tmp_path, 2, first))
    seen = connection.run("hostname; echo $SSH_CONNECTION").out.decode().split()
    assert seen[0] == hosts.name(2)
    assert seen[1] == hosts.address(1)
    connection.close()


def test_a_proxy_command_leads_there(hosts: Hosts, tmp_path: Path) -> None:
    config = hosts.ssh_config
    first = f"Host {hosts.name(2)}\nProxyCommand ssh -F {config} -W %h:%p {hosts.name(1)}\nHost *"
    connection = opened(target(hosts, tmp_path, 2, first))
    assert connection.run("hostname").out.decode().strip() == hosts.name(2)
    connection.close()


def test_a_host_that_is_not_there_is_named(hosts: Hosts, tmp_path: Path) -> None:
    where = target(hosts, tmp_path, 1, "Port 4\n")
    assert f"host {hosts.name(1)}: {hosts.address(1)}:4 cannot be reached" in refusal(where)
    nowhere = find_target("nowhere.invalid", read_config(str(hosts.ssh_config)))
    assert "'nowhere.invalid' has no address" in refusal(nowhere)


def test_a_port_that_speaks_no_ssh_is_named(hosts: Hosts, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        where = target(hosts, tmp_path, 1, f"Port {port}\nHostName 127.0.0.1\n")

        def answer() -> None:
            visitor, _ = server.accept()
            visitor.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
            visitor.close()

        answering = threading.Thread(target=answer)
        answering.start()
        assert "does not speak SSH with us" in refusal(where)
        answering.join()


@pytest.mark.parametrize("way", ["hole", "silence"])
def test_35_a_connect_into_nothing_can_be_stopped(hosts: Hosts, tmp_path: Path, way: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, in_a_hole(hosts, 2):
        first = f"Port {mute.getsockname()[1]}\nHostName 127.0.0.1" if way == "silence" else ""
        where = target(hosts, tmp_path, 2, first)
        stop = threading.Event()
        timer = threading.Timer(0.5, stop.set)
        timer.start()
        with pytest.raises(Stopped):
            connect(where, stop, timeout_s=600)


def test_a_time_limit_names_the_host(hosts: Hosts, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        first = f"Port {mute.getsockname()[1]}\nHostName 127.0.0.1"
        with pytest.raises(PoolError, match=r"no answer from 127\.0\.0\.1:\d+ within 1 s"):
            connect(target(hosts, tmp_path, 1, first), threading.Event(), timeout_s=1)


def test_a_cut_is_noticed(hosts: Hosts, tmp_path: Path) -> None:
    connection = connect(target(hosts, tmp_path, 2), threading.Event(), WITHIN_S, silence_s=3)
    with in_a_hole(hosts, 2):
        connection.transport.join(WITHIN_S)
        assert not connection.is_open
    connection.close()


def talk_to(connection: Connection, port: int, server: socket.socket) -> tuple[bytes, bytes]:
    """Return what a server here hears through a port of the host, and what comes back there."""
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


def test_a_port_of_the_host_leads_back_here(hosts: Hosts, tmp_path: Path) -> None:
    connection = opened(target(hosts, tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = open_tunnel(connection, *server.getsockname())
        assert talk_to(connection, port, server) == (b"ping\n", b"pong\n")
    connection.close()


def test_each_port_leads_to_its_own_place_until_it_is_closed(hosts: Hosts, tmp_path: Path) -> None:
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


def test_a_host_that_forwards_no_ports_is_told_how_to(hosts: Hosts, tmp_path: Path) -> None:
    config = Path("/run/rig/sshd_config")
    script = f"sed 's/^Port .*/Port 2222/; 1i DisableForwarding yes' {config} > /run/rig/no"
    hosts.exec(2, "sh", "-c", f"{script}; /usr/sbin/sshd -f /run/rig/no")
    eventually(lambda: answers(socket.AF_INET, (hosts.address(2), 2222)))  # it forks before it does
    known = tmp_path / "known_hosts"
    line = (hosts.state / "host_key.pub").read_text()
    known.write_text(f"[{hosts.address(2)}]:2222 {line}")
    where = target(hosts, tmp_path, 2, f"Port 2222\nUserKnownHostsFile {known}")
    connection = opened(where)
    with pytest.raises(PoolError, match="AllowTcpForwarding"):
        open_tunnel(connection, "127.0.0.1", 1)
    connection.close()
    hosts.exec(2, "pkill", "-f", "rig/no")


def test_32_hosts_at_once(hosts: Hosts, tmp_path: Path) -> None:
    where, before = target(hosts, tmp_path), len(os.listdir("/proc/self/fd"))
    made: list[Connection] = []
    threads = [threading.Thread(target=lambda: made.append(opened(where))) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 32
    for connection in made:
        connection.close()
    assert len(os.listdir("/proc/self/fd")) < before + 32
