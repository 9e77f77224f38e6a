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
    key = ec.generate_private_key(ec.SECP256R1())
    return _self_signed(name, key), _key_pem(key)


def sign(certificate: str, key: str, address: str) -> tuple[str, str]:
    """Make a key pair and a certificate for the server at an IP address, both as PEM.

    They are signed by a certificate with its key as `make` returns them.
    """
    issuer = x509.load_pem_x509_certificate(certificate.encode())
    signer = serialization.load_pem_private_key(key.encode(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    own = ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    name = str(issuer.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    builder = _builder(address, name, own).add_extension(names, critical=False)
    return _pem(builder.sign(signer, hashes.SHA256())), _key_pem(own)


class Authority:
    """Signs certificates of clients; its own key leaves this process by no method."""

    def __init__(self, name: str) -> None:
        self._name, self._key = name, ec.generate_private_key(ec.SECP256R1())
        self.certificate = _self_signed(name, self._key)

    def issue(self, name: str, identity: str, serves: bool = False) -> tuple[str, str]:
        """Make a key pair and a certificate by which its holder connects to others, as PEM.

        Args:
            identity: A URI that says who the holder is.
            serves: Whether others may connect to it as well.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(name, self._name, key)
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity)])
        limits = x509.BasicConstraints(ca=False, path_length=None)
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] * serves)]
        purposes = x509.ExtendedKeyUsage(uses)
        for extension, critical in ((names, False), (limits, True), (purposes, True)):
            builder = builder.add_extension(extension, critical)
        return _pem(builder.sign(self._key, hashes.SHA256())), _key_pem(key)


def _self_signed(name: str, key: ec.EllipticCurvePrivateKey) -> str:
    limits = x509.BasicConstraints(ca=True, path_length=0)
    builder = _builder(name, name, key).add_extension(limits, critical=True)
    return _pem(builder.sign(key, hashes.SHA256()))


def _builder(name: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    subject, signer = (x509.NameAttribute(NameOID.COMMON_NAME, it) for it in (name, issuer))
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([subject]))
        .issuer_name(x509.Name([signer]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()
