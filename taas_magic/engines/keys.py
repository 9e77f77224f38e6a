"""The certificates of a pool: of its process, of its kernels, and of each of its hosts.

The pool's process trusts certificates that it has signed itself. Each certificate says to which
kernel or host it belongs. Kernels and hosts trust only the pool's own certificate. So no host can
impersonate the pool, and only the pool can connect to a host.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from taas_magic import certificate

_SCHEME = "taas"

SecurityOptions = dict[str, str | bool]
"""Type of the keyword arguments of dask's `Security`, which hold certificates and keys."""


class PeerRole(str, Enum):
    """The role of the process that holds a certificate.

    Attributes:
        KERNEL: A kernel of the user. It may send any operation to the pool's process.
        HOST: The agent of one host.
        VEHICLE: A plain Dask worker that starts an agent on its host. All vehicles of a pool share
            one certificate.
    """

    KERNEL = "kernel"
    HOST = "host"
    VEHICLE = "vehicle"


class Peer(NamedTuple):
    """The process at the other end of a connection, as its verified certificate describes it.

    Attributes:
        name: For a host, Dask's name of its agent; otherwise "".
    """

    role: PeerRole
    name: str = ""

    def __str__(self) -> str:
        return f"{self.role.value} {self.name}".strip()

    @property
    def identity(self) -> str:
        """The role and name as a URI, which is the form in the certificate."""
        return f"{_SCHEME}:{self.role.value}:{quote(self.name, safe='')}"

    @classmethod
    def of(cls, peercert: Mapping[str, Any]) -> "Peer":
        """Return the peer that a certificate describes.

        The role and name come from the first URI of this package in the certificate's
        subjectAltName.

        Args:
            peercert: The result of `ssl.SSLSocket.getpeercert`.

        Raises:
            ValueError: The certificate contains no role and name in the form of `identity`.
        """
        for kind, value in peercert.get("subjectAltName", ()):
            scheme, _, rest = value.partition(":")
            if (kind, scheme) == ("URI", _SCHEME):
                role, _, name = rest.partition(":")
                return cls(PeerRole(role), unquote(name))
        raise ValueError("the certificate does not name its owner")


class Keys:
    """The keys and certificates of one pool, which the pool's process creates when it starts.

    Every method returns keyword arguments for dask's `Security`. The arguments contain private
    keys: store them only in files that the user alone can read (0600), and send them only over
    standard input or TLS.
    """

    def __init__(self) -> None:
        self._pool = certificate.make("taas-magic pool")
        self._peers = certificate.Authority("taas-magic peers")
        self._carriers = certificate.Authority("taas-magic vehicles")
        identity = Peer(PeerRole.VEHICLE).identity
        self._vehicle = self._carriers.issue("vehicle", identity, serves=True)
        self._kernel = self._peers.issue("kernel", Peer(PeerRole.KERNEL).identity)

    def scheduler(self) -> SecurityOptions:
        """Return the options with which the pool's scheduler opens its port."""
        trusted = self._peers.certificate + self._carriers.certificate
        return security(trusted, scheduler=self._pool)

    def kernel(self) -> SecurityOptions:
        """Return the options with which a kernel, or the pool's process itself, connects."""
        return security(self._pool[0], client=self._kernel)

    def host(self, name: str) -> SecurityOptions:
        """Create a key for one host; return the options with which the host's agent connects."""
        issued = self._peers.issue("host", Peer(PeerRole.HOST, name).identity)
        return security(self._pool[0], worker=issued)

    def cluster(self, workers_connect: bool) -> SecurityOptions:
        """Return the options for a Dask cluster class and its workers.

        Args:
            workers_connect: Whether processes of a worker connect to each other, as with Dask's
                nannies. If so, any worker can also connect to any other worker, because all
                workers share one certificate.
        """
        trusted = self._pool[0] + (self._carriers.certificate if workers_connect else "")
        return security(trusted, client=self._kernel, worker=self._vehicle)


def security(trusted: str, **pairs: tuple[str, str]) -> SecurityOptions:
    """Return arguments for dask's `Security`.

    Args:
        trusted: The certificates, as PEM, that this side of a connection trusts.
        pairs: Certificate and private key for each Dask role, such as `client`.
    """
    values: SecurityOptions = {"require_encryption": True, "tls_ca_file": trusted}
    for role, (shown, key) in pairs.items():
        values |= {f"tls_{role}_cert": shown, f"tls_{role}_key": key}
    return values
