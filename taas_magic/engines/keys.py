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
"""Keyword arguments for Dask's class `Security`: certificates and private keys, as PEM."""


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
    """The owner of a certificate, for example the process at the other end of a connection.

    Attributes:
        role: The role of the process.
        name: For the role `HOST`, the name of the host's agent; "" for any other role.
    """

    role: PeerRole
    name: str = ""

    def __str__(self) -> str:
        return f"{self.role.value} {self.name}".strip()

    @property
    def identity(self) -> str:
        """The role and name as a URI, as they stand in a certificate, such as "taas:host:gpu-1"."""
        return f"{_SCHEME}:{self.role.value}:{quote(self.name, safe='')}"

    @classmethod
    def of(cls, peercert: Mapping[str, Any]) -> "Peer":
        """Return the role and name of a certificate's owner.

        A certificate of taas-magic has the role and name as a URI (`identity`) in its
        subjectAltName. If there are several such URIs, the first one counts.

        Args:
            peercert: A verified certificate, as `ssl.SSLSocket.getpeercert` returns it.

        Raises:
            ValueError: The certificate has no such URI, or the URI has an unknown role.
        """
        for kind, value in peercert.get("subjectAltName", ()):
            scheme, _, rest = value.partition(":")
            if (kind, scheme) == ("URI", _SCHEME):
                role, _, name = rest.partition(":")
                return cls(PeerRole(role), unquote(name))
        raise ValueError("the certificate does not name its owner")


class Keys:
    """The keys and certificates of one pool, which the pool's process creates when it starts.

    Every method returns keyword arguments for Dask's class `Security`. These arguments contain
    private keys. Store them only in files that the user alone can read (mode 0600), and send them
    only over standard input or TLS.
    """

    def __init__(self) -> None:
        self._pool = certificate.make_self_signed("taas-magic pool")
        self._peers = certificate.Authority("taas-magic peers")
        self._carriers = certificate.Authority("taas-magic vehicles")
        identity = Peer(PeerRole.VEHICLE).identity
        self._vehicle = self._carriers.issue("vehicle", identity, for_server=True)
        self._kernel = self._peers.issue("kernel", Peer(PeerRole.KERNEL).identity)

    def scheduler(self) -> SecurityOptions:
        """Return the `Security` options with which the pool's scheduler opens its port."""
        trusted = self._peers.certificate + self._carriers.certificate
        return security_options(trusted, scheduler=self._pool)

    def kernel(self) -> SecurityOptions:
        """Return the `Security` options with which a kernel connects to the pool's scheduler."""
        return security_options(self._pool[0], client=self._kernel)

    def host(self, name: str) -> SecurityOptions:
        """Create a key and certificate for one host.

        Args:
            name: Name of the host's agent.

        Returns:
            The `Security` options with which the agent connects to the pool's scheduler.
        """
        issued = self._peers.issue("host", Peer(PeerRole.HOST, name).identity)
        return security_options(self._pool[0], worker=issued)

    def cluster(self, workers_connect: bool) -> SecurityOptions:
        """Return the `Security` options for a Dask cluster class and its workers.

        Args:
            workers_connect: Whether the processes of a worker connect to each other, for example a
                Dask nanny and its child. If True, these processes trust the certificate that all
                workers of the pool share. So any two workers of the pool can then connect to each
                other.
        """
        trusted = self._pool[0] + (self._carriers.certificate if workers_connect else "")
        return security_options(trusted, client=self._kernel, worker=self._vehicle)


def security_options(trusted: str, **pairs: tuple[str, str]) -> SecurityOptions:
    """Return keyword arguments for Dask's class `Security`, for connections with TLS only.

    Args:
        trusted: The certificates, as PEM, that this side of a connection trusts.
        pairs: Certificate and private key (PEM) for each Dask role: `client`, `scheduler`,
            `worker`.
    """
    values: SecurityOptions = {"require_encryption": True, "tls_ca_file": trusted}
    for role, (shown, key) in pairs.items():
        values |= {f"tls_{role}_cert": shown, f"tls_{role}_key": key}
    return values
