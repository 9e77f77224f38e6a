"""The key of a pool: a certificate of its own, made when the pool starts, known to nobody else."""

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

VALID_DAYS = 365


def make_security() -> dict[str, object]:
    """Keyword arguments for dask's `Security`: one key pair for all members, TLS for every port.

    Who has the key may do everything in the pool, who has not may not even speak; so it is kept in
    files that only the user reads (0600) and travels over standard input. `Security.temporary`
    does the same with an RSA key, which takes up to half a second to make.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "taas-magic pool")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))  # clocks of hosts may differ
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
    key_pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()
    roles = ("client", "scheduler", "worker")
    return {
        "require_encryption": True,
        "tls_ca_file": certificate_pem,
        **{f"tls_{role}_cert": certificate_pem for role in roles},
        **{f"tls_{role}_key": key_pem for role in roles},
    }
