"""Read the settings in taas.toml. Without such a file, all runs use this machine.

docs/config.md says where the file may be, and what its keys mean.
"""

import difflib
import grp
import os
import pwd
import re
import shlex
import stat
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct, field, structs

from taas_magic.errors import UsageError
from taas_magic.leases import LEAST_FETCH_S, FetchLease

FILE_NAME = "taas.toml"
LOCAL = "local"
"""Name of the pool that always exists: this machine."""

MOST_BYTES = 1 << 60
"""Largest size in bytes that a flag or a setting may have."""

_GPU_POOL = re.compile(r"g\d+\.\d+")
_MIN_SIMILARITY = 0.7
"""Minimum similarity, from 0 to 1, of an unknown name and the known name that a hint suggests."""

_MODULE = r"^[^\W\d]\w*(\.\w+)*\Z"
_T = TypeVar("_T", bound=Struct)

# Types of the values in taas.toml. The error message for a wrong value shows the description.
_Whole = Annotated[int, Meta(ge=1, le=10**9, description="a whole number, at least 1")]
_WholeOrZero = Annotated[int, Meta(ge=0, le=10**9, description="a whole number, at least 0")]
_Size = Annotated[
    int, Meta(ge=1, le=MOST_BYTES, description='a size such as "4GiB", "500MB" or 1000000')
]
_Seconds = Annotated[float, Meta(gt=0, lt=1e9, description="a number of seconds above 0")]
_SecondsOrZero = Annotated[float, Meta(ge=0, lt=1e9, description="a number of seconds, at least 0")]
_FetchSeconds = Annotated[
    float,
    Meta(ge=LEAST_FETCH_S, lt=1e9, description=f"a number of seconds, at least {LEAST_FETCH_S:g}"),
]
_Text = Annotated[str, Meta(min_length=1, description="a text")]
_Texts = Annotated[
    tuple[_Text, ...], Meta(description='a list of strings such as ["host1", "host2"]')
]
_Modules = Annotated[
    tuple[Annotated[str, Meta(pattern=_MODULE)], ...],
    Meta(description='a list of modules such as ["xarray", "transformers"]'),
]
_Engine = Annotated[
    str,
    Meta(
        description='"local", "ssh", or a Dask cluster class such as "dask_jobqueue.SLURMCluster"'
    ),
]
_Role = Annotated[Literal["ranks", "data"], Meta(description='"ranks" or "data"')]
_Network = Annotated[Literal["shared", "private"], Meta(description='"shared" or "private"')]
_Bool = Annotated[bool, Meta(description="true or false")]
_Options = Annotated[Mapping[str, Any], Meta(description="a table")]


class PoolConfig(Struct, frozen=True):
    """Settings of a pool: one of the tables below [pools]. docs/config.md describes the keys.

    Attributes:
        gpus: Number of CUDA devices of each host; None asks the host.
        cores: Number of logical processors of each host; None asks the host.
        python: Interpreter on the hosts; None for the kernel's own interpreter or, with engine
            "ssh", for `python3`.
        interface: Network interface for ranks and fetchers; None lets each host find one.
        idle_timeout_s: Seconds after which an unused host is released; None never releases it.
        trusted: Whether the pool's hosts may return objects that run code in the kernel or the
            browser.
    """

    name: str
    engine: _Engine = "local"
    hosts: _Texts = ()
    gpus: _WholeOrZero | None = None
    cores: _Whole | None = None
    role: _Role = "ranks"
    python: _Text | None = None
    interface: _Text | None = None
    network: _Network = "shared"
    max_hosts: _Whole = 1
    idle_timeout_s: _Seconds | None = None
    lease_s: _Seconds = 8.0
    start_timeout_s: _Seconds = 120.0
    preload: _Modules = ()
    trusted: _Bool = True
    options: _Options = {}


class DataConfig(
    Struct, frozen=True, rename={"buffer_bytes": "buffer", "rank_buffer_bytes": "rank_buffer"}
):
    """Settings of the data service: the table [data].

    Attributes:
        buffer_bytes: Size of the prefetch buffer of one fetcher, for all loaders of the fetcher.
        rank_buffer_bytes: Size of the memory for batches that a rank has received but not yet
            used.
        fetch_s: Seconds that a rank waits for a response or a sign of life of any fetcher of a
            loader. If none arrives in this time, the run fails.
    """

    buffer_bytes: _Size = 1024**3
    rank_buffer_bytes: _Size = 256 * 1024**2
    fetch_s: _FetchSeconds = FetchLease().fetch_s


class StoreConfig(Struct, frozen=True, rename={"limit_bytes": "limit"}):
    """Settings of the project store: the table [store].

    Attributes:
        path: Folder of the project store; None for the notebook's folder.
        limit_bytes: Maximum total size of the files that are copied to a host that does not share
            the project store.
        overwrite: Patterns of paths in gitignore's syntax. A host that does not share the store may
            overwrite only those files of the user that match a pattern.
    """

    path: _Text | None = None
    limit_bytes: _Size = 1024**3
    overwrite: _Texts = ()


class CaptureConfig(Struct, frozen=True, rename={"limit_bytes": "limit"}):
    """Settings for capturing the notebook objects that a cell uses: the table [capture].

    Attributes:
        limit_bytes: Maximum size of a payload: the pickled objects that a run gets.
    """

    limit_bytes: _Size = 4 * 1024**3


class RunsConfig(Struct, frozen=True, rename={"keep_bytes": "keep_size"}):
    """Settings of runs and their folders: the table [runs]. docs/config.md describes the keys.

    Attributes:
        notify: Command line to execute at the end of a detached run; None for none.
        hang_s: Seconds without progress of any rank after which the status header shows where the
            ranks are; 0 for never.
    """

    keep: _Whole = 50
    keep_bytes: _Size = 10 * 1024**3
    hang_s: _SecondsOrZero = 60.0
    notify: _Text | None = None
    session_idle_s: _Seconds = 7200.0


class Config(Struct, frozen=True):
    """All settings, with one attribute for each table of taas.toml.

    Attributes:
        pools: Pools by name; the pool `local` always exists.
        source: Path of the taas.toml from which the settings come; None if there is no taas.toml.
    """

    store: StoreConfig = StoreConfig()
    capture: CaptureConfig = CaptureConfig()
    runs: RunsConfig = RunsConfig()
    data: DataConfig = DataConfig()
    pools: Mapping[str, PoolConfig] = field(default_factory=lambda: {LOCAL: PoolConfig(LOCAL)})
    source: Path | None = None

    def pool(self, name: str) -> PoolConfig:
        """Return the pool with this name.

        Without a taas.toml, names such as `g2.8` are aliases of `local`.

        Raises:
            UsageError: There is no pool with this name. The message lists the pools of taas.toml,
                and suggests a similar name.
        """
        if name in self.pools:
            return self.pools[name]
        if self.pool_note(name):
            return self.pools[LOCAL]
        listed = ", ".join(sorted(self.pools))
        if self.source:
            hint = did_you_mean(name, self.pools)
            raise UsageError(f'No pool "{name}" in {self.source}{hint}. It has: {listed}.')
        raise UsageError(
            f'No pool "{name}". There is no {FILE_NAME}, so only "{LOCAL}" (this machine) exists.'
        )

    def pool_note(self, name: str) -> str | None:
        """Return a note for the user if `name` is an alias of `local`, else None."""
        if name in self.pools or self.source is not None or not _GPU_POOL.fullmatch(name):
            return None
        return f'There is no {FILE_NAME}: pool "{name}" is this machine.'


def did_you_mean(word: str, possible: Iterable[str]) -> str:
    """Return a hint ` (did you mean "x"?)` for an unknown word; "" if no word is similar.

    Upper and lower case count as the same.
    """
    # With the dashes, all flags would be similar.
    by_name = {name.lstrip("-").lower(): name for name in possible}
    near = difflib.get_close_matches(word.lstrip("-").lower(), by_name, n=1, cutoff=_MIN_SIMILARITY)
    return f' (did you mean "{by_name[near[0]]}"?)' if near else ""


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

IDLE_TIMEOUT_S = 600.0
"""Default of `idle_timeout_s` for pools whose engine is not `local`."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_SIZE_FACTORS = {
    unit + infix: base**power
    for power, unit in enumerate(["", "k", "m", "g", "t"])
    for infix, base in (("", 1000), ("i", 1024))
}


def working_folder() -> Path:
    """Return the working folder of this process, which is the notebook's folder in a kernel.

    Raises:
        UsageError: The folder has been removed.
    """
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UsageError(
            "the notebook's folder has been removed or replaced: change to another folder with "
            "`%cd FOLDER`, or create the folder again and restart the kernel"
        ) from None


def find_config(folder: Path) -> Path | None:
    """Return the path of the taas.toml for a notebook in `folder`, or None if there is none.

    The first taas.toml in these folders counts, in this order:

    - `folder` and its parent folders, up to the home folder. If `folder` is outside the home
      folder, up to the root folder.
    - the folder `taas` in `$XDG_CONFIG_HOME`, by default `~/.config/taas`
    """
    home, folder = Path(os.path.expanduser("~")).resolve(), folder.resolve()
    above = [folder, *folder.parents]
    folders = above[: above.index(home) + 1] if home in above else above
    user = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "taas"
    files = [folder / FILE_NAME for folder in (*folders, user)]
    return next((file for file in files if os.path.isfile(file)), None)


def load_config(folder: Path) -> Config:
    """Read and check the taas.toml for a notebook in `folder`, and return the settings.

    If `find_config` finds no taas.toml, return the defaults.

    Raises:
        UsageError: The file cannot be read, is not TOML, or has an unknown key or a wrong value. Or
            users other than this user and root can write or replace the file.
    """
    path = find_config(folder)
    if path is None:
        return Config()
    try:
        values = tomllib.loads(_read_own(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{path} cannot be read: its brackets are nested too deeply") from error
    return parse(values, path)


def _read_own(path: Path) -> str:
    """Return the text of a taas.toml, if only this user and root can write or replace the file.

    The file may name programs to start. So this function checks who can write the file and the
    folder of the file. If the file is a symbolic link, this function checks the target of the link,
    the folder of the link, and the folder of the target.

    Raises:
        UsageError: Another user can write the file, or replace it in its folder.
        OSError: The file cannot be read.
    """
    with path.open(encoding="utf-8") as file:
        seen = [(path.resolve(), os.fstat(file.fileno()))]
        folders = {path.parent.resolve(), path.resolve().parent}
        seen += [(folder, folder.stat()) for folder in sorted(folders)]
        for checked, status in seen:
            why, command = _why_untrusted(checked, status)
            if why:
                raise UsageError(
                    f"{path} is not trusted, because it can name programs to run: {why}. Move the "
                    f"file to ~/.config/taas. Or, if you trust its content, run: {command}"
                )
        return file.read()


def _why_untrusted(path: Path, status: os.stat_result) -> tuple[str, str]:
    """Return who can change a file or folder, other than this user and root.

    Check the owner first. Then check whether everybody or the group may write, except for the
    user's private group. If a folder has the sticky bit, check only the folder's owner, because
    other users cannot replace files in such a folder.

    Returns:
        Two texts: who can change the file or folder, and a shell command that prevents this. Both
        texts are empty if only this user and root can change the file or folder.
    """
    user, quoted = os.geteuid(), shlex.quote(str(path))
    if status.st_uid not in (user, 0):
        owner = f"uid {status.st_uid}"
        with suppress(KeyError):
            owner = f"{pwd.getpwuid(status.st_uid).pw_name} ({owner})"
        return f"{path} belongs to {owner}", f"sudo chown {user} {quoted}"
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    others = status.st_mode & stat.S_IWOTH and not is_sticky
    group = status.st_mode & stat.S_IWGRP and not is_sticky and not _is_own(status.st_gid)
    if others or group:
        name = str(status.st_gid)
        with suppress(KeyError):
            name = grp.getgrgid(status.st_gid).gr_name
        who = "everybody" if others else f"group {name}"
        sudo = "" if status.st_uid == user else "sudo "
        return f"{who} can write {path}", f"{sudo}chmod go-w {quoted}"
    return "", ""


def _is_own(group: int) -> bool:
    """Return whether a group is the user's private group, which has no other members.

    On many systems, a new file is by default writable by its owner's private group.
    """
    try:
        found, own = grp.getgrgid(group), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    private = (found.gr_gid, found.gr_name) == (own.pw_gid, own.pw_name)
    return private and set(found.gr_mem) <= {own.pw_name}


def parse(values: Mapping[str, Any], source: Path) -> Config:
    """Check the contents of taas.toml and convert them to a `Config`.

    Refuse unknown tables first. Then convert each table. Missing tables get their defaults, and the
    pool `local` always exists.

    Args:
        source: Path of the file. The `path` of the store may begin with `~`. A relative `path` is
            relative to the file's folder.

    Raises:
        UsageError: The file has an unknown key or a wrong value. The message names the key.
    """
    _refuse_unknown(
        values, [name for name in Config.__struct_fields__ if name != "source"], f"{source}:"
    )

    def table(name: str, kind: type[_T]) -> _T:
        return _convert_table(values.get(name, {}), kind, f"{source}: [{name}]")

    store = table("store", StoreConfig)
    if store.path:
        path = source.parent / os.path.expanduser(store.path)
        store = structs.replace(store, path=str(path))
    pools = _table(values.get("pools", {}), f"{source}: [pools]")
    read = {name: _pool(name, found, source) for name, found in pools.items()}
    return Config(
        store=store,
        capture=table("capture", CaptureConfig),
        runs=table("runs", RunsConfig),
        data=table("data", DataConfig),
        pools={**Config().pools, **read},
        source=source,
    )


def parse_size(text: str) -> int:
    """Parse a size such as "4GiB", "500MB", "1.5G" or "4096" to a number of bytes.

    Raises:
        ValueError: `text` is no size, is a fraction without a unit, or is above `MOST_BYTES`.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or ("." in match[1] and not match[2]):
        raise ValueError(text)
    n_bytes = float(match[1]) * _SIZE_FACTORS[(match[2] or "").lower()]
    if n_bytes > MOST_BYTES:
        raise ValueError(text)
    return int(n_bytes)


def size_text(n_bytes: float, base: int = 1000) -> str:
    """Format a number of bytes with a unit: `812 bytes`, `6.4 MB`, or `1.5 GiB` for base 1024."""
    if n_bytes < base:
        return "1 byte" if round(n_bytes) == 1 else f"{n_bytes:.0f} bytes"
    for unit in ("kB", "MB", "GB") if base == 1000 else ("KiB", "MiB", "GiB"):
        n_bytes /= base
        if n_bytes < base - 0.05:
            return f"{n_bytes:.1f} {unit}"
    return f"{n_bytes / base:.1f} {'TB' if base == 1000 else 'TiB'}"


def _convert_table(table: object, kind: type[_T], where: str, **given: str) -> _T:
    """Convert a table of the file to a settings struct. Sizes may be text such as "4GiB".

    Args:
        where: File and table, for error messages.
        **given: Values of fields that the caller sets. The table must not contain these keys.

    Raises:
        UsageError: `table` is not a table, has an unknown key, or has a wrong value.
    """
    held = _table(table, where)
    fields = {each.encode_name: each.type for each in structs.fields(kind)}
    _refuse_unknown(held, [name for name in fields if name not in given], where)
    values = {**held, **given}
    for name in held:
        if _field_meta(fields[name]) == _field_meta(_Size):
            with suppress(ValueError):  # `convert` below refuses a value that is no size
                values[name] = parse_size(str(held[name]))
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        # The message ends with the path of the wrong value: "at `$.hosts[0]`" is in key `hosts`.
        name = str(error).rpartition("`$.")[2].rstrip("`").partition("[")[0]
        needs = f"{name} needs {_field_meta(fields[name])}; got {held[name]!r}"
        raise UsageError(f"{where} {needs}") from None


def _field_meta(kind: object) -> str:
    metas = [it for each in (kind, *get_args(kind)) for it in getattr(each, "__metadata__", ())]
    return next((meta.description for meta in metas if meta.description), "another value")


def _pool(name: str, table: object, source: Path) -> PoolConfig:
    """Check the table of one pool and convert it to a `PoolConfig`.

    After the checks, set two defaults. If the table has `hosts`, the default of `max_hosts` is
    the number of `hosts`. The default of `idle_timeout_s` is `IDLE_TIMEOUT_S`, except for the
    engine `local`.

    Raises:
        UsageError: One of these problems:

            - The name is not allowed, or a key or value is wrong.
            - A value does not fit the engine: `ssh` needs `hosts`, other engines refuse `hosts`,
              and the pool `local` needs the engine `local`.
            - The table contains a table other than `options`. This happens if the user writes
              `[pools.g2.8]` without quotes, so the message shows the quotes.
    """
    where = f'{source}: [pools."{name}"]'
    if not re.fullmatch(r"[A-Za-z][\w.-]*", name):
        raise UsageError(f"{where}: a pool's name is letters, digits, '.', '_' and '-'")
    given = _table(table, where)
    for key, value in given.items():
        if isinstance(value, dict) and key != "options":  # such as [pools.g2.8] without quotes
            raise UsageError(
                f'{source}: [pools.{name}.{key}] is a table below pool "{name}". If the pool is '
                f'called "{name}.{key}", write [pools."{name}.{key}"]'
            )
    pool = _convert_table(table, PoolConfig, where, name=name)
    if not re.fullmatch(r"local|ssh|\w+(\.\w+)+", pool.engine):
        raise UsageError(f"{where} engine needs {_field_meta(_Engine)}; got {pool.engine!r}")
    if name == LOCAL and pool.engine != "local":
        raise UsageError(
            f'{where} engine needs "local": pool "local" is this machine; got {pool.engine!r}'
        )
    if pool.engine == "ssh" and not pool.hosts:
        raise UsageError(f'{where}: engine "ssh" needs hosts = ["host1", …]')
    if pool.hosts and pool.engine != "ssh":
        raise UsageError(f'{where}: hosts needs engine = "ssh"; got engine {pool.engine!r}')
    if pool.engine == "ssh":
        _refuse_unknown(pool.options, ["ssh_config"], f"{where} options")
    if pool.hosts and "max_hosts" not in given:
        pool = structs.replace(pool, max_hosts=len(pool.hosts))
    if pool.engine != "local" and "idle_timeout_s" not in given:
        pool = structs.replace(pool, idle_timeout_s=IDLE_TIMEOUT_S)
    return pool


def _table(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where} needs a table; got {value!r}")
    return value


def _refuse_unknown(table: Mapping[str, Any], possible: Iterable[str], where: str) -> None:
    for name in table:
        if name not in possible:
            listed = ", ".join(possible)
            hint = did_you_mean(name, possible) or _right_table(name)
            raise UsageError(f'{where} has no key "{name}"{hint}. The keys are: {listed}')


def _right_table(name: str) -> str:
    """Return a hint such as ` (it belongs below "[runs]")` if another table has the key `name`."""
    tables = {key: getattr(Config(), key) for key in ("store", "capture", "runs", "data")}
    right = [key for key, table in tables.items() if name in table.__struct_fields__]
    return f' (it belongs below "[{right[0]}]")' if right else ""
