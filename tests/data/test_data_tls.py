"""Tests of TLS between fetchers and ranks, and of faults 47 to 50 of docs/faults.md."""

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from taas_magic.data import service
from taas_magic.data.service import Tls
from taas_magic.errors import ProtocolError
from taas_magic.messages import FetcherReport, decode_fetcher_message
from tests.data.data_proxy import Proxy
from tests.data.data_rig import (
    Noise,
    Rows,
    Service,
    address_of,
    is_dropped,
    linked,
    over_tcp,
    plain,
    stream,
)
from tests.data.data_rig import service as data_service

pytestmark = pytest.mark.usefixtures("forkserver")


@pytest.fixture(scope="module")
def ours() -> Tls:
    return service.new_certificate()


@pytest.fixture(params=["plain", "tls"])
def running(request: pytest.FixtureRequest, tmp_path: Path, ours: Tls) -> Iterator[Service]:
    certificate = ours if request.param == "tls" else None
    with data_service(tmp_path, DataLoader(Noise(40, width=20_000), 2), tls=certificate) as it:
        yield it


def handed_over_tcp(running: Service) -> list[object]:
    """Return the batches of an epoch. The rank receives them under TLS, not in shared memory."""
    return stream(running, direct=False, tls=client_of(running))


def refused(running: Service) -> int:
    """Wait until the first fetcher reports that it refused peers; return their number."""
    control, count = running.processes[0][1], 0
    while not count:
        said = decode_fetcher_message(control.recv_bytes())
        count = said.loaders["train"].refused if isinstance(said, FetcherReport) else 0
    return count


def test_batches_are_the_same_with_and_without_tls(running: Service) -> None:
    assert handed_over_tcp(running) == stream(running, local=True)


def test_with_tls_the_network_data_do_not_contain_the_batch(running: Service) -> None:
    seen: list[bytes] = []

    def look(number: int, data: bytes) -> bytes:
        seen.append(data)
        return data

    proxy = Proxy(running.directory, look)
    (first, *_), *_ = running.loader(direct=False, directory=proxy, tls=client_of(running))
    proxy.close()
    said = bytes(first.numpy()) in b"".join(seen)
    assert said is (running.changes["tls"] is None)


def client_of(running: Service) -> Callable[[], ssl.SSLContext] | None:
    has = running.changes["tls"]
    return has.client_context if has else None


@pytest.mark.fault(47)
@pytest.mark.parametrize("shows", ["another", "none"])
def test_a_peer_without_the_runs_certificate_is_refused(
    tmp_path: Path, ours: Tls, shows: str
) -> None:
    with data_service(tmp_path, DataLoader(Rows(4), 2), tls=ours) as running:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if shows == "another":
            context = service.new_certificate().client_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with pytest.raises(OSError):
            linked(running, context, direct=False)
        assert refused(running) == 1
        assert len(handed_over_tcp(running)) == 2


@pytest.mark.fault(47)
def test_a_server_without_the_runs_certificate_is_refused(tmp_path: Path, ours: Tls) -> None:
    another, loader = service.new_certificate(), DataLoader(Rows(4), 2)
    refuses = pytest.raises(ssl.SSLCertVerificationError)
    with data_service(tmp_path, loader, tls=another) as running, refuses:
        linked(running, ours.client_context(), direct=False)


@pytest.mark.fault(47)
def test_a_plain_peer_of_a_server_with_tls_is_refused(tmp_path: Path, ours: Tls) -> None:
    with data_service(tmp_path, DataLoader(Rows(4), 2), tls=ours) as running:
        with pytest.raises((OSError, ProtocolError)):
            linked(running, direct=False)
        assert refused(running) == 1
        assert len(handed_over_tcp(running)) == 2


TLS = pytest.mark.parametrize("running", ["tls"], indirect=True)
"""Mark for tests that run only with TLS.

Similar tests without TLS are those of faults 25 and 48 in test_data_faults.py, and of fault 74 in
test_data_robust.py.
"""


@pytest.mark.fault(48)
@TLS
@pytest.mark.parametrize("says", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 9, b"\0" * 500, b""])
def test_strangers_are_dropped_and_the_run_goes_on(running: Service, says: bytes) -> None:
    batches = iter(running.loader(direct=False, tls=client_of(running)))
    handed = [plain(next(batches))]
    with over_tcp(running) as sock:
        sock.sendall(says)
        assert is_dropped(sock)
    handed += [plain(batch) for batch in batches]
    assert handed == stream(running, local=True)


@pytest.mark.fault(49)
def test_a_recorded_conversation_is_worth_nothing(running: Service) -> None:
    proxy = Proxy(running.directory, lambda number, data: data)
    assert len([*running.loader(direct=False, directory=proxy, tls=client_of(running))]) == 20
    proxy.close()
    with over_tcp(running) as sock:
        sock.sendall(b"".join(proxy.said))
        answers = bytearray()
        with contextlib.suppress(ConnectionError):
            while data := sock.recv(1 << 16):
                answers += data
    assert proxy.said
    assert len(answers) < 4096
    assert refused(running) == 1


@pytest.mark.fault(50)
@TLS
def test_five_thousand_connections_at_once(running: Service, many_files: None) -> None:
    address, crowd = address_of(running), list[socket.socket]()
    batches = iter(running.loader(direct=False, tls=client_of(running)))
    handed = [plain(next(batches))]
    try:
        for _ in range(5000):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex((address.host, address.port))
            crowd.append(sock)
        handed += [plain(batch) for batch in batches]
    finally:
        for sock in crowd:
            sock.close()
    assert handed == stream(running, local=True)


def test_no_repr_shows_a_key(ours: Tls) -> None:
    assert "PRIVATE" not in repr(ours)
    assert "PRIVATE" not in repr(service.Tls(ours.certificate, ours.key))
