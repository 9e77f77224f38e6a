"""The certificates of a pool: of its process, of its kernels, and of each of its hosts.

Each side trusts as little as possible. The pool's process trusts certificates that it has signed
itself, and reads from each certificate who its holder is. Kernels and hosts trust only the pool's
own certificate. So no host can impersonate the pool, and only the pool can connect to a host.
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
    """The role of a certificate's holder.

    Attributes:
        KERNEL: A kernel of the user. It may do everything.
        HOST: The agent of one host.
        VEHICLE: A plain Dask worker that starts an agent on its host. All vehicles of a pool share
            one certificate, because the batch system starts them with one command.
    """

    KERNEL = "kernel"
    HOST = "host"
    VEHICLE = "vehicle"


class Peer(NamedTuple):
    """The other end of a connection, as its verified certificate names it.

    Attributes:
        name: For a host, Dask's name of its agent; otherwise "".
    """

    role: PeerRole
    name: str = ""

    def __str__(self) -> str:
        return f"{self.role.value} {self.name}".strip()

    @property
    def identity(self) -> str:
        """The peer as a URI, the form that a certificate holds."""
        return f"{_SCHEME}:{self.role.value}:{quote(self.name, safe='')}"

    @classmethod
    def of(cls, peercert: Mapping[str, Any]) -> "Peer":
        """Return the holder of a certificate.

        Args:
            peercert: The result of `ssl.SSLSocket.getpeercert`.

        Raises:
            ValueError: The certificate does not name its holder.
        """
        for kind, value in peercert.get("subjectAltName", ()):
            scheme, _, rest = value.partition(":")
            if (kind, scheme) == ("URI", _SCHEME):
                role, _, name = rest.partition(":")
                return cls(PeerRole(role), unquote(name))
        raise ValueError("a certificate that does not say whose it is")


class Keys:
    """The keys of one pool. The pool's process makes them when it starts and keeps them to itself.

    Every method returns keyword arguments for dask's `Security`. They contain private keys. They
    are stored only in files that the user alone can read (0600), and are sent only over standard
    input or TLS.
    """

    def __init__(self) -> None:
        self._pool = certificate.make("taas-magic pool")
        self._members = certificate.Authority("taas-magic members")
        self._carriers = certificate.Authority("taas-magic vehicles")
        identity = Peer(PeerRole.VEHICLE).identity
        self._vehicle = self._carriers.issue("vehicle", identity, serves=True)
        self._kernel = self._members.issue("kernel", Peer(PeerRole.KERNEL).identity)

    def scheduler(self) -> SecurityOptions:
        """Return the options of the pool's own port."""
        trusted = self._members.certificate + self._carriers.certificate
        return security(trusted, scheduler=self._pool)

    def kernel(self) -> SecurityOptions:
        """Return the options with which a kernel, or the pool's process itself, connects."""
        return security(self._pool[0], client=self._kernel)

    def host(self, name: str) -> SecurityOptions:
        """Return the options with which one host's agent connects. Each call makes a new key."""
        issued = self._members.issue("host", Peer(PeerRole.HOST, name).identity)
        return security(self._pool[0], worker=issued)

    def cluster(self, talks: bool) -> SecurityOptions:
        """Return the options for a Dask cluster class and its workers.

        Args:
            talks: Whether the parts of a worker connect to each other, as with Dask's nannies. All
                workers can then connect to each other, because they share one certificate.
        """
        trusted = self._pool[0] + (self._carriers.certificate if talks else "")
        return security(trusted, client=self._kernel, worker=self._vehicle)


def security(trusted: str, **pairs: tuple[str, str]) -> SecurityOptions:
    """Return arguments for `Security`: trusted certificates, and a key pair for each Dask role."""
    values: SecurityOptions = {"require_encryption": True, "tls_ca_file": trusted}
    for role, (shown, key) in pairs.items():
        values |= {f"tls_{role}_cert": shown, f"tls_{role}_key": key}
    return values
