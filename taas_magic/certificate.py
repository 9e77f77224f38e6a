"""Certificates that are made here and trusted by nobody but who was given them."""

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_FROM, _UNTIL = datetime.datetime(1970, 1, 1), datetime.datetime(9999, 12, 31)
"""Always: a host's clock may show anything, and no key outlives the process that made it."""


def make(name: str) -> tuple[str, str]:
    """Make a certificate that signs itself, and its key, both as PEM, in under a millisecond.

    Whoever holds the key can sign for others, too: where that matters, see `Authority`.
    """
    return _issue(name, name, "", (x509.BasicConstraints(ca=True, path_length=0), True))


def sign(certificate: str, key: str, address: str) -> tuple[str, str]:
    """Make a key pair and a certificate for the server at an IP address, both as PEM.

    They are signed by a certificate with its key as `make` returns them.
    """
    issuer = x509.load_pem_x509_certificate(certificate.encode()).subject
    name = str(issuer.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    return _issue(address, name, key, (names, False))


class Authority:
    """Signs certificates of clients; its own key leaves this process by no method."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.certificate, self._key = make(name)

    def issue(self, name: str, identity: str, serves: bool = False) -> tuple[str, str]:
        """Make a key pair and a certificate by which its holder connects to others, as PEM.

        Args:
            identity: A URI that says who the holder is.
            serves: Whether others may connect to it as well.
        """
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity)])
        limits = x509.BasicConstraints(ca=False, path_length=None)
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] * serves)]
        purposes = x509.ExtendedKeyUsage(uses)
        return _issue(name, self._name, self._key, (names, False), (limits, True), (purposes, True))


def _issue(
    name: str, issuer: str, signer: str, *extensions: tuple[x509.ExtensionType, bool]
) -> tuple[str, str]:
    """Make a key pair and a certificate as PEM; without the key of a signer it signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    signs = serialization.load_pem_private_key(signer.encode(), None) if signer else key
    assert isinstance(signs, ec.EllipticCurvePrivateKey)
    subject, by = (x509.NameAttribute(NameOID.COMMON_NAME, it) for it in (name, issuer))
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([subject]))
        .issuer_name(x509.Name([by]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
    )
    for extension, is_critical in extensions:
        builder = builder.add_extension(extension, is_critical)
    made = builder.sign(signs, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return made.decode(), pem.decode()
