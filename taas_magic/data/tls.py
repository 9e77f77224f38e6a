"""TLS between ranks and fetchers: one certificate a run, which both ends show and both demand."""

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tls:
    """A run's certificate and its key (PEM): who has both belongs to the run."""

    certificate: str
    key: str = field(repr=False)

    def server(self) -> ssl.SSLContext:
        """The lane's context."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client(self) -> ssl.SSLContext:
        """The rank's context."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Nobody else has this certificate, so the name of the host in it would say nothing.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate)
        with _in_memory(self.certificate + self.key) as path:
            context.load_cert_chain(path)
        return context


@contextmanager
def _in_memory(text: str) -> Iterator[str]:
    """A path to text that lies on no disk: ssl takes keys from files only."""
    descriptor = os.memfd_create("taas-key", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
