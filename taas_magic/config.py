"""The settings as frozen values; `taas_toml` reads them from the file.

With no file, everything runs on this machine.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from taas_magic.errors import UsageError

FILE_NAME = "taas.toml"
LOCAL = "local"
ROLES = ("ranks", "data")
NETWORKS = ("shared", "private")
OVER = ("wait", "spill")

_GPU_POOL = re.compile(r"g\d+\.\d+")


@dataclass(frozen=True)
class PoolConfig:
    """How one pool gets its hosts.

    Attributes:
        name: What `--pool` and `#!` call it.
        engine: "local", "ssh", or the import path of a Dask cluster class.
        hosts: Names of the hosts, for engine "ssh".
        gpus: CUDA devices of each host; None asks the host.
        cores: Logical processors of each host; None asks the host.
        role: "ranks", or "data" for the hosts that run fetchers.
        python: The interpreter on the hosts; None is this kernel's.
        interface: Network interface that ranks and fetchers use; None finds it.
        network: "shared", whose data travels under TLS, or "private", where it need not.
        max_hosts: Hosts that may be taken at a time.
        idle_timeout_s: Seconds after which a host that nobody uses is given back; None keeps it.
        lease_s: Seconds without a word from the pool after which a host ends what it runs.
        start_timeout_s: Seconds that a host may take to come up.
        options: Handed to the engine as they are.
    """

    name: str
    engine: str = "local"
    hosts: tuple[str, ...] = ()
    gpus: int | None = None
    cores: int | None = None
    role: str = "ranks"
    python: str | None = None
    interface: str | None = None
    network: str = "shared"
    max_hosts: int = 1
    idle_timeout_s: float | None = None
    lease_s: float = 8.0
    start_timeout_s: float = 120.0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataConfig:
    """Memory of the data service.

    Attributes:
        buffer_bytes: What a fetcher may hold of prepared batches, over all its loaders.
        rank_buffer_bytes: What a rank may hold of batches that came and were not handed out.
        over: What happens over `buffer_bytes`: "wait" stops preparing, "spill" writes to disk.
        spill_bytes: What a fetcher may write to disk.
    """

    buffer_bytes: int = 1024**3
    rank_buffer_bytes: int = 256 * 1024**2
    over: str = "wait"
    spill_bytes: int = 16 * 1024**3


def _local_only() -> Mapping[str, PoolConfig]:
    return {LOCAL: PoolConfig(LOCAL)}


@dataclass(frozen=True)
class Config:
    """All settings.

    Attributes:
        store_path: The project store; None is the notebook's folder.
        store_limit_bytes: What of the store may travel to hosts that do not share it.
        capture_limit_bytes: What a cell may send to its ranks at most.
        keep_runs: Run folders that are kept at most.
        keep_bytes: Bytes that kept run folders may hold together.
        data: Memory of the data service.
        pools: By name; `local` is always there.
        source: The file that was read; None where there is none.
    """

    store_path: Path | None = None
    store_limit_bytes: int = 1024**3
    capture_limit_bytes: int = 4 * 1024**3
    keep_runs: int = 50
    keep_bytes: int = 10 * 1024**3
    data: DataConfig = DataConfig()
    pools: Mapping[str, PoolConfig] = field(default_factory=_local_only)
    source: Path | None = None

    def pool(self, name: str) -> PoolConfig:
        """The pool that a cell means by `name`; the same one as `local` for an alias of it.

        Raises:
            UsageError: There is no such pool.
        """
        if name in self.pools:
            return self.pools[name]
        if self._is_alias(name):
            return self.pools[LOCAL]
        listed = ", ".join(sorted(self.pools))
        if self.source:
            hint = closest(name, self.pools)
            raise UsageError(f"no pool {name!r} in {self.source}{hint}; possible: {listed}")
        raise UsageError(
            f"no pool {name!r}; possible without a {FILE_NAME}: {listed}, or a name such as g2.8, "
            f"which then means the same"
        )

    def pool_note(self, name: str) -> str | None:
        """The line that tells the user that `name` is an alias of `local`; None where it is not."""
        if name in self.pools or not self._is_alias(name):
            return None
        return f"no {FILE_NAME}: pool {name!r} means this machine (pool {LOCAL!r})"

    def _is_alias(self, name: str) -> bool:
        return self.source is None and _GPU_POOL.fullmatch(name) is not None


def closest(word: str, possible: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing where no word is near."""
    near = difflib.get_close_matches(word, list(possible), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
