"""taas.toml -> `Config`.

The file is looked for in the notebook's folder and the folders above it, up to the home folder (or
the root), then in `$XDG_CONFIG_HOME/taas/`. docs/config.md lists the keys. Like the notebook, it is
trusted: it may name programs to start.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from taas_magic.config import (
    FILE_NAME,
    LOCAL,
    NETWORKS,
    OVER,
    ROLES,
    Config,
    DataConfig,
    PoolConfig,
    closest,
)
from taas_magic.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENGINES = ("local", "ssh")
IDLE_TIMEOUT_S = 600.0
"""After how long hosts that are not this machine are given back, unless the file says so."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_SIZE_FACTORS = {
    unit + infix: base**power
    for power, unit in enumerate(["", "k", "m", "g", "t"])
    for infix, base in (("", 1000), ("i", 1024))
}


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
    _refuse_unknown(values, (*tables, "data", "pools"), f"{source}:")
    settings: dict[str, Any] = {}
    for name, keys in tables.items():
        settings |= _read(values.get(name, {}), keys, f"{source}: [{name}]")
    if settings.get("store_path"):
        settings["store_path"] = source.parent / Path(settings["store_path"]).expanduser()
    data = DataConfig(**_read(values.get("data", {}), _DATA, f"{source}: [data]"))
    pools = _table(values.get("pools", {}), f"{source}: [pools]")
    read = {name: _pool(name, table, source) for name, table in pools.items()}
    return Config(**settings, data=data, pools={**Config().pools, **read}, source=source)


def parse_size(text: str) -> int:
    """ "4GiB", "500MB", "1.5G" or "4096" as bytes.

    Raises:
        ValueError: It is none of these.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    return int(float(match[1]) * _SIZE_FACTORS[(match[2] or "").lower()])


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


def _one_of(*possible: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in possible:
            raise _Wrong(" or ".join(f'"{word}"' for word in possible))
        return str(value)

    return read


def _options(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong("a table")
    return value


@dataclass(frozen=True)
class _Key:
    """What a key of the file is called among our settings, and how its value is read."""

    setting: str
    read: Callable[[Any], Any]


_STORE = {"path": _Key("store_path", _text), "limit": _Key("store_limit_bytes", _size)}
_CAPTURE = {"limit": _Key("capture_limit_bytes", _size)}
_RUNS = {"keep": _Key("keep_runs", _whole), "keep_size": _Key("keep_bytes", _size)}
_DATA = {
    "buffer": _Key("buffer_bytes", _size),
    "rank_buffer": _Key("rank_buffer_bytes", _size),
    "over": _Key("over", _one_of(*OVER)),
    "spill": _Key("spill_bytes", _size),
}
_POOL = {
    name: _Key(name, read)
    for name, read in {
        "engine": _engine,
        "hosts": _texts,
        "gpus": _whole_or_zero,
        "cores": _whole,
        "role": _one_of(*ROLES),
        "python": _text,
        "interface": _text,
        "network": _one_of(*NETWORKS),
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
        pool = replace(pool, max_hosts=len(pool.hosts))
    if pool.engine != "local" and "idle_timeout_s" not in table:
        pool = replace(pool, idle_timeout_s=IDLE_TIMEOUT_S)
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
