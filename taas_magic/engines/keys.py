"""The key of a pool: a certificate of its own, made when the pool starts, known to nobody else."""

from taas_magic import certificate


def make_security() -> dict[str, object]:
    """Keyword arguments for dask's `Security`: one key pair for all members, TLS for every port.

    Who has the key may do everything in the pool, who has not may not even speak; so it is kept in
    files that only the user reads (0600) and travels over standard input. `Security.temporary`
    does the same with an RSA key, which takes up to half a second to make.
    """
    certificate_pem, key_pem = certificate.make("taas-magic pool")
    roles = ("client", "scheduler", "worker")
    return {
        "require_encryption": True,
        "tls_ca_file": certificate_pem,
        **{f"tls_{role}_cert": certificate_pem for role in roles},
        **{f"tls_{role}_key": key_pem for role in roles},
    }
