"""Files for a host, over SFTP; small ones, since SSH is slow beside the network that it uses."""

import io
import posixpath
import secrets
from pathlib import Path

from paramiko import SFTPClient, SSHException

from taas_magic.ssh.connect import Connection


def put(connection: Connection, source: bytes | Path, path: str) -> None:
    """Writes a file on a host, readable by its owner alone; it is there whole or not at all.

    Args:
        connection: The host.
        source: What it holds, or the file here that is sent.
        path: Where; its folder is there. Relative to the home folder unless absolute.

    Raises:
        PoolError: It could not be written; names host and path.
    """
    beside = f"{path}.{secrets.token_hex(4)}"
    try:
        with connection.transport.open_sftp_client() as files:
            _write(files, source, beside)
            files.posix_rename(beside, path)
    except (OSError, SSHException, EOFError) as error:
        raise connection.lost(f"{posixpath.basename(path)} was not written to {path}", error) from (
            error
        )


def _write(files: SFTPClient, source: bytes | Path, path: str) -> None:
    with files.open(path, "wx") as file:
        file.chmod(0o600)
        file.set_pipelined(True)
        reading = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
        with reading:
            while data := reading.read(1 << 15):
                file.write(data)
