"""`pool.json` in a pool's folder: how to connect to the pool's process."""

from pathlib import Path

from msgspec import Struct

from taas_magic.engines.keys import SecurityOptions
from taas_magic.messages import from_json
from taas_magic.setup.facts import KernelVersions


class PoolAddress(Struct):
    """The contents of `pool.json`: the data that a kernel needs to connect to the pool's process.

    Attributes:
        address: Address of the Dask scheduler in the pool's process, as "tls://host:port".
        security: Keyword arguments for Dask's `Security`, including a private key.
        project: Path of the project folder (the notebook's folder).
        made_of: Versions of Python, torch and taas-magic that the pool's process uses. A kernel
            with other versions does not connect.
        machine: Name of the machine on which the pool's process runs.
    """

    address: str
    security: SecurityOptions
    project: str
    made_of: KernelVersions
    pid: int = 0
    machine: str = ""


def read_address(folder: Path) -> PoolAddress | None:
    """Return the contents of `pool.json` in a pool's folder; None if there is no such file."""
    try:
        return from_json((folder / "pool.json").read_bytes(), PoolAddress)
    except FileNotFoundError:
        return None
