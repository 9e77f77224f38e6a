"""Files for a host, over SFTP; small ones, since SSH is slow beside the network that it uses."""

import io
import secrets
from pathlib import Path

from paramiko import SFTPClient, SSHException, Transport

_CHUNK = 1 << 15


def write_file(transport: Transport, data: bytes | Path, path: str) -> None:
    """Writes a file of the user's alone under another name, and renames it when it is whole.

    Raises:
        OSError: The host refuses.
        SSHException: It has no SFTP, or the connection broke.
    """
    beside = f"{path}.{secrets.token_hex(4)}"
    files = SFTPClient.from_transport(transport)
    if files is None:
        raise SSHException("the host opens no SFTP session")
    with files:
        _send(files, data, beside)
        files.posix_rename(beside, path)


def _send(files: SFTPClient, data: bytes | Path, path: str) -> None:
    reading = io.BytesIO(data) if isinstance(data, bytes) else data.open("rb")
    with reading, files.open(path, "wx") as file:
        file.chmod(0o600)
        file.set_pipelined(True)
        while chunk := reading.read(_CHUNK):
            file.write(chunk)
