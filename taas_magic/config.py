"""taas.toml -> frozen values.

The file is looked for in the notebook's folder and the folders above it, up to the home folder (or
the root), then in `$XDG_CONFIG_HOME/taas/`. With none, everything runs on this machine.
docs/config.md lists the keys. Like the notebook, it is trusted: it may name programs to start.
"""

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from taas_magic.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_NAME = "taas.toml"
LOCAL = "local"
ENGINES = ("local", "ssh")
ROLES = ("gpu", "cpu")

_GPU_POOL = re.compile(r"g\d+\.\d+")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_SIZE_FACTORS = {
    unit + infix: base**power
    for power, unit in enumerate(["", "k", "m", "g", "t"])
    for infix, base in (("", 1000), ("i", 1024))
}


@dataclass(frozen=True)
class PoolConfig:
    """How one pool gets its hosts.

    Attributes:
        name: What `--pool` and `#!` call it.
        engine: "local", "ssh", or the import path of a Dask cluster class.
        hosts: Names of the hosts, for engine "ssh".
        gpus: CUDA devices of each host; None asks the host.
        cores: Logical processors of each host; None asks the host.
        role: "gpu" hosts run ranks, "cpu" hosts run fetchers.
        python: The interpreter on the hosts; None is this kernel's.
        max_hosts: Hosts that may be taken at a time.
        idle_timeout_s: Seconds after which a host that nobody uses is given back.
        lease_s: Seconds without a word from the pool after which a host ends what it runs.
        start_timeout_s: Seconds that a host may take to come up.
        options: Handed to the engine as they are.
    """

    name: str
    engine: str = "local"
    hosts: tuple[str, ...] = ()
    gpus: int | None = None
    cores: int | None = None
    role: str = "gpu"
    python: str | None = None
    max_hosts: int = 1
    idle_timeout_s: float = 600.0
    lease_s: float = 10.0
    start_timeout_s: float = 120.0
    options: Mapping[str, Any] = field(default_factory=dict)


def _local_only() -> Mapping[str, PoolConfig]:
    return {LOCAL: PoolConfig(LOCAL)}


@dataclass(frozen=True)
class Config:
    """All settings.

    Attributes:
        store_path: The project store; None is the notebook's folder.
        capture_limit_bytes: What a cell may send to its ranks at most.
        keep_runs: Run folders that are kept at most.
        keep_bytes: Bytes that kept run folders may hold together.
        pools: By name; `local` is always there.
        source: The file that was read; None where there is none.
    """

    store_path: Path | None = None
    capture_limit_bytes: int = 4 * 1024**3
    keep_runs: int = 50
    keep_bytes: int = 10 * 1024**3
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


def find(folder: Path) -> Path | None:
    """The taas.toml that holds for a notebook in `folder`; None where there is none."""
    home = Path.home()
    folder = folder.resolve()
    places = [folder]
    for parent in folder.parents:
        if places[-1] == home:
            break
        places.append(parent)
    user = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "taas"
    files = [place / FILE_NAME for place in (*places, user)]
    return next((file for file in files if file.is_file()), None)


def load(folder: Path) -> Config:
    """The settings that hold for a notebook in `folder`.

    Raises:
        UsageError: The file is no TOML, or holds what it may not; one line with file and key.
    """
    path = find(folder)
    if path is None:
        return Config()
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    return parse(values, path)


def parse(values: Mapping[str, Any], source: Path) -> Config:
    """Checks what a file holds. Relative paths in it are relative to its folder."""
    tables = {"store": _STORE, "capture": _CAPTURE, "runs": _RUNS}
    _refuse_unknown(values, (*tables, "pools"), f"{source}:")
    settings: dict[str, Any] = {}
    for name, keys in tables.items():
        settings |= _read(values.get(name, {}), keys, f"{source}: [{name}]")
    if settings.get("store_path"):
        settings["store_path"] = source.parent / Path(settings["store_path"]).expanduser()
    pools = _table(values.get("pools", {}), f"{source}: [pools]")
    read = {name: _pool(name, table, source) for name, table in pools.items()}
    return Config(**settings, pools={**_local_only(), **read}, source=source)


def parse_size(text: str) -> int:
    """ "4GiB", "500MB", "1.5G" or "4096" as bytes.

    Raises:
        ValueError: It is none of these.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    return int(float(match[1]) * _SIZE_FACTORS[(match[2] or "").lower()])


def closest(word: str, possible: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing where no word is near."""
    near = difflib.get_close_matches(word, list(possible), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


class _Wrong(Exception):
    """What a key may hold instead."""


def _size(value: Any) -> int:
    try:
        size = parse_size(str(value))
    except ValueError:
        size = 0
    if size <= 0:
        raise _Wrong('a size such as "4GiB", "500MB" or 1000000')
    return size


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _Wrong("a whole number from 1")
    return value


def _whole_or_zero(value: Any) -> int:
    if value == 0 and not isinstance(value, bool):
        return 0
    try:
        return _whole(value)
    except _Wrong:
        raise _Wrong("a whole number from 0") from None


def _seconds(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e9:
        raise _Wrong("a number of seconds above 0")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _Wrong("a text")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise _Wrong('a list of texts such as ["host1", "host2"]')
    return tuple(value)


def _engine(value: Any) -> str:
    if value in ENGINES or (isinstance(value, str) and re.fullmatch(r"\w+(\.\w+)+", value)):
        return str(value)
    raise _Wrong('"local", "ssh", or a Dask cluster class such as "dask_jobqueue.SLURMCluster"')


def _role(value: Any) -> str:
    if value not in ROLES:
        raise _Wrong('"gpu" or "cpu"')
    return str(value)


def _options(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong("a table")
    return value


@dataclass(frozen=True)
class _Key:
    """What a key of the file is called among our settings, and how its value is read."""

    setting: str
    read: Callable[[Any], Any]


_STORE = {"path": _Key("store_path", _text)}
_CAPTURE = {"limit": _Key("capture_limit_bytes", _size)}
_RUNS = {"keep": _Key("keep_runs", _whole), "keep_size": _Key("keep_bytes", _size)}
_POOL = {
    name: _Key(name, read)
    for name, read in {
        "engine": _engine,
        "hosts": _texts,
        "gpus": _whole_or_zero,
        "cores": _whole,
        "role": _role,
        "python": _text,
        "max_hosts": _whole,
        "idle_timeout_s": _seconds,
        "lease_s": _seconds,
        "start_timeout_s": _seconds,
        "options": _options,
    }.items()
}


def _read(table: Any, keys: Mapping[str, _Key], where: str) -> dict[str, Any]:
    _refuse_unknown(_table(table, where), keys, where)
    settings = {}
    for name, value in table.items():
        try:
            settings[keys[name].setting] = keys[name].read(value)
        except _Wrong as wrong:
            raise UsageError(f"{where} {name} = {value!r}: possible is {wrong}") from None
    return settings


def _pool(name: str, table: Any, source: Path) -> PoolConfig:
    where = f'{source}: [pools."{name}"]'
    if not re.fullmatch(r"[A-Za-z][\w.-]*", name):
        raise UsageError(f"{where}: a pool's name is letters, digits, '.', '_' and '-'")
    pool = PoolConfig(**{"name": name, **_read(table, _POOL, where)})
    if name == LOCAL and pool.engine != "local":
        raise UsageError(f"{where} engine = {pool.engine!r}: pool 'local' is this machine")
    if (pool.engine == "ssh") != bool(pool.hosts):
        raise UsageError(f'{where}: hosts = ["host1", …] and engine = "ssh" belong together')
    if pool.hosts and "max_hosts" not in table:
        return PoolConfig(**{**vars(pool), "max_hosts": len(pool.hosts)})
    return pool


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where} = {value!r}: possible is a table")
    return value


def _refuse_unknown(table: Mapping[str, Any], possible: Iterable[str], where: str) -> None:
    for name in table:
        if name not in possible:
            listed = ", ".join(possible)
            hint = closest(name, possible)
            raise UsageError(f"{where} no such key {name!r}{hint}; possible: {listed}")
