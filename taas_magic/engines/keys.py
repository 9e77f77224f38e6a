"""Who is who in a pool: certificates of its process, of its kernels, and of each of its hosts.

Nobody trusts more than its part needs. The pool's process trusts what it has signed itself, and
takes from each certificate who its holder is. Kernels and hosts trust the pool's own certificate
alone, so that no host can pass for the pool, and nobody but the pool can connect to a host.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from taas_magic import certificate

_SCHEME = "taas"

SecurityOptions = dict[str, str | bool]
"""Keyword arguments of dask's `Security`."""


class PeerRole(str, Enum):
    """What the holder of a certificate is.

    Attributes:
        KERNEL: A kernel of the user's: it may do everything.
        HOST: The agent of one host.
        VEHICLE: A plain Dask worker that brings an agent to its host; those of a pool share one
            certificate, since the batch system starts them all by one command.
    """

    KERNEL = "kernel"
    HOST = "host"
    VEHICLE = "vehicle"


class Peer(NamedTuple):
    """Who is at the other end of a connection, by the certificate that it has proved.

    Attributes:
        name: Of a host, the name by which Dask knows its agent.
    """

    role: PeerRole
    name: str = ""

    def __str__(self) -> str:
        return f"{self.role.value} {self.name}".strip()

    @property
    def identity(self) -> str:
        """As a certificate has it: a URI."""
        return f"{_SCHEME}:{self.role.value}:{quote(self.name, safe='')}"

    @classmethod
    def of(cls, peercert: Mapping[str, Any]) -> "Peer":
        """Read who the holder of a certificate is.

        Args:
            peercert: As `ssl.SSLSocket.getpeercert` gives it.

        Raises:
            ValueError: It does not say.
        """
        for kind, value in peercert.get("subjectAltName", ()):
            scheme, _, rest = value.partition(":")
            if (kind, scheme) == ("URI", _SCHEME):
                role, _, name = rest.partition(":")
                return cls(PeerRole(role), unquote(name))
        raise ValueError("a certificate that does not say whose it is")


class Keys:
    """The keys of one pool, made when its process starts and kept by nobody else.

    Every method returns keyword arguments for dask's `Security`. They hold private keys: they are
    kept in files that only the user reads (0600), and travel over standard input or inside TLS.
    """

    def __init__(self) -> None:
        self._pool = certificate.make("taas-magic pool")
        self._members = certificate.Authority("taas-magic members")
        self._carriers = certificate.Authority("taas-magic vehicles")
        identity = Peer(PeerRole.VEHICLE).identity
        self._vehicle = self._carriers.issue("vehicle", identity, serves=True)
        self._kernel = self._members.issue("kernel", Peer(PeerRole.KERNEL).identity)

    def scheduler(self) -> SecurityOptions:
        """Return what the pool's own port shows and trusts."""
        trusted = self._members.certificate + self._carriers.certificate
        return security(trusted, scheduler=self._pool)

    def kernel(self) -> SecurityOptions:
        """Return what a kernel, and the pool's process itself, connects to the port with."""
        return security(self._pool[0], client=self._kernel)

    def host(self, name: str) -> SecurityOptions:
        """Return what the agent of one host connects with; a new key each time."""
        issued = self._members.issue("host", Peer(PeerRole.HOST, name).identity)
        return security(self._pool[0], worker=issued)

    def cluster(self, talks: bool) -> SecurityOptions:
        """Return what a Dask cluster class is given, for itself and for its workers.

        Args:
            talks: Whether parts of a worker connect to one another, as Dask's nannies do. All
                workers can then, as they have one certificate.
        """
        trusted = self._pool[0] + (self._carriers.certificate if talks else "")
        return security(trusted, client=self._kernel, worker=self._vehicle)


def security(trusted: str, **pairs: tuple[str, str]) -> SecurityOptions:
    """Return arguments of `Security`: what is trusted, certificate and key by Dask's role."""
    values: SecurityOptions = {"require_encryption": True, "tls_ca_file": trusted}
    for role, (shown, key) in pairs.items():
        values |= {f"tls_{role}_cert": shown, f"tls_{role}_key": key}
    return values
