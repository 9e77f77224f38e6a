"""Make certificates for TLS connections between processes of taas-magic.

The certificates come from no public authority. A process trusts only the certificates that
taas-magic has given to it.
"""

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_FROM, _UNTIL = datetime.datetime(1970, 1, 1), datetime.datetime(9999, 12, 31)
"""First and last day on which every certificate is valid.

The certificates are valid at any time, because a host's clock may be wrong.
"""


def make_self_signed(name: str) -> tuple[str, str]:
    """Make a self-signed certificate and its private key, both as PEM.

    The holder of this private key can sign other certificates.
    """
    return _issue(name, name, "", (x509.BasicConstraints(ca=True, path_length=0), True))


def make_server_certificate(certificate: str, key: str, address: str) -> tuple[str, str]:
    """Make the certificate of a server, signed by an issuer, and the server's new private key.

    Both results are text in PEM format.

    Args:
        certificate: The issuer's certificate, from `make_self_signed`.
        key: The issuer's private key.
        address: IP address of the server.
    """
    issuer = x509.load_pem_x509_certificate(certificate.encode()).subject
    name = str(issuer.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    return _issue(address, name, key, (names, False))


class Authority:
    """Issuer of certificates for clients. The issuer's own private key never leaves this object.

    Args:
        name: Common name of the issuer.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.certificate, self._key = make_self_signed(name)

    def issue(self, name: str, identity: str, for_server: bool = False) -> tuple[str, str]:
        """Make a new private key for a client, and a certificate for this key; return both as PEM.

        This issuer signs the certificate. The client cannot sign other certificates.

        Args:
            name: Common name of the client.
            identity: URI that identifies the client.
            for_server: Whether the client may also use the certificate as a server.

        Returns:
            The certificate, and the private key.
        """
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity)])
        limits = x509.BasicConstraints(ca=False, path_length=None)
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] * for_server)]
        purposes = x509.ExtendedKeyUsage(uses)
        return _issue(name, self._name, self._key, (names, False), (limits, True), (purposes, True))


def _issue(
    name: str, issuer: str, signer: str, *extensions: tuple[x509.ExtensionType, bool]
) -> tuple[str, str]:
    """Make a new private key and a signed certificate for this key; return both as PEM.

    The certificate has a random serial number, and is valid at any time.

    Args:
        name: Common name of the holder.
        issuer: Common name of the issuer.
        signer: The issuer's private key; "" to sign with the new key itself.
        *extensions: Extensions, each with a flag that marks the extension as critical.
    """
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
