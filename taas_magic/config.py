"""taas.toml -> `Config`: the settings as frozen values. With no file, all runs on this machine.

The file is looked for in the notebook's folder and the folders above it, up to the home folder (or
the root), then in `$XDG_CONFIG_HOME/taas/`. docs/config.md lists the keys. Like the notebook, it
may name programs to start, so it is believed only if nobody but the user and root can have
written it.
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
MOST_BYTES = 1 << 60
"""The largest size that a flag or a setting may have."""

_GPU_POOL = re.compile(r"g\d+\.\d+")
_CLOSE = 0.7
"""How alike two names must be for one to be suggested for the other, from 0 to 1."""

_MODULE = r"^[^\W\d]\w*(\.\w+)*\Z"
_T = TypeVar("_T", bound=Struct)

# What a key may hold, and what is said of one that holds something else.
_Whole = Annotated[int, Meta(ge=1, le=10**9, description="a whole number from 1")]
_WholeOrZero = Annotated[int, Meta(ge=0, le=10**9, description="a whole number from 0")]
_Size = Annotated[
    int, Meta(ge=1, le=MOST_BYTES, description='a size such as "4GiB", "500MB" or 1000000')
]
_Seconds = Annotated[float, Meta(gt=0, lt=1e9, description="a number of seconds above 0")]
_SecondsOrZero = Annotated[float, Meta(ge=0, lt=1e9, description="a number of seconds from 0")]
_FetchSeconds = Annotated[
    float,
    Meta(ge=LEAST_FETCH_S, lt=1e9, description=f"a number of seconds from {LEAST_FETCH_S:g}"),
]
_Text = Annotated[str, Meta(min_length=1, description="a text")]
_Texts = Annotated[
    tuple[_Text, ...], Meta(description='a list of texts such as ["host1", "host2"]')
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
_Over = Annotated[Literal["wait", "spill"], Meta(description='"wait" or "spill"')]
_Bool = Annotated[bool, Meta(description="true or false")]
_Options = Annotated[Mapping[str, Any], Meta(description="a table")]


class PoolConfig(Struct, frozen=True):
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
        start_timeout_s: Seconds that a host may take to join, and that a starting process may do
            nothing at all.
        preload: Modules that ranks find imported, besides torch and IPython.
        trusted: Whether its hosts may return what runs code in the kernel or in the browser.
        options: Handed to the engine as they are.
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
    Struct,
    frozen=True,
    rename={"buffer_bytes": "buffer", "rank_buffer_bytes": "rank_buffer", "spill_bytes": "spill"},
):
    """The data service: what may be held of batches, and how long ranks wait for fetchers.

    Attributes:
        buffer_bytes: What a fetcher may hold of prepared batches, over all its loaders.
        rank_buffer_bytes: What a rank may hold of batches that came and were not handed out.
        over: What happens over `buffer_bytes`: "wait" stops preparing, "spill" writes to disk.
        spill_bytes: What a fetcher may write to disk.
        fetch_s: How long no fetcher may answer a rank that waits before the run fails.
    """

    buffer_bytes: _Size = 1024**3
    rank_buffer_bytes: _Size = 256 * 1024**2
    over: _Over = "wait"
    spill_bytes: _Size = 16 * 1024**3
    fetch_s: _FetchSeconds = FetchLease().fetch_s


class StoreConfig(Struct, frozen=True, rename={"limit_bytes": "limit"}):
    """The project store.

    Attributes:
        path: Where it is; None is the notebook's folder.
        limit_bytes: What of it may travel to hosts that do not share it.
        overwrite: Patterns of files that such hosts may write though they are the user's.
    """

    path: _Text | None = None
    limit_bytes: _Size = 1024**3
    overwrite: _Texts = ()


class CaptureConfig(Struct, frozen=True, rename={"limit_bytes": "limit"}):
    """What a cell may send to its ranks at most."""

    limit_bytes: _Size = 4 * 1024**3


class RunsConfig(Struct, frozen=True, rename={"keep_bytes": "keep_size"}):
    """The folders of runs.

    Attributes:
        keep: How many are kept at most.
        keep_bytes: Bytes that these may hold together.
        notify: Command line that is run at the end of a detached run; None: none.
        hang_s: Seconds in which no rank came forward, after which a run's head says so; 0: never.
        session_idle_s: Seconds without a cell after which a session is ended.
    """

    keep: _Whole = 50
    keep_bytes: _Size = 10 * 1024**3
    hang_s: _SecondsOrZero = 60.0
    notify: _Text | None = None
    session_idle_s: _Seconds = 7200.0


class Config(Struct, frozen=True):
    """All settings: a table each.

    Attributes:
        pools: By name; `local` is always there.
        source: The file that was read; None where there is none.
    """

    store: StoreConfig = StoreConfig()
    capture: CaptureConfig = CaptureConfig()
    runs: RunsConfig = RunsConfig()
    data: DataConfig = DataConfig()
    pools: Mapping[str, PoolConfig] = field(default_factory=lambda: {LOCAL: PoolConfig(LOCAL)})
    source: Path | None = None

    def pool(self, name: str) -> PoolConfig:
        """Return the pool that a cell means by `name`; the same one as `local` for an alias of it.

        Raises:
            UsageError: There is no such pool.
        """
        if name in self.pools:
            return self.pools[name]
        if self.pool_note(name):
            return self.pools[LOCAL]
        listed = ", ".join(sorted(self.pools))
        if self.source:
            hint = closest(name, self.pools)
            raise UsageError(f'No pool "{name}" in {self.source}{hint}. It has: {listed}.')
        raise UsageError(
            f'No pool "{name}". There is no {FILE_NAME}, so only "{LOCAL}" (this machine) exists.'
        )

    def pool_note(self, name: str) -> str | None:
        """Return the line that says that `name` is an alias of `local`; None where it is not."""
        if name in self.pools or self.source is not None or not _GPU_POOL.fullmatch(name):
            return None
        return f'There is no {FILE_NAME}: pool "{name}" is this machine.'


def closest(word: str, possible: Iterable[str]) -> str:
    """Return ` (did you mean "x"?)`, or nothing where no word is near."""
    by_name = {name.lstrip("-"): name for name in possible}  # all flags have their dashes alike
    near = difflib.get_close_matches(word.lstrip("-"), by_name, n=1, cutoff=_CLOSE)
    return f' (did you mean "{by_name[near[0]]}"?)' if near else ""


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

IDLE_TIMEOUT_S = 600.0
"""After how long hosts that are not this machine are given back, unless the file says so."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_SIZE_FACTORS = {
    unit + infix: base**power
    for power, unit in enumerate(["", "k", "m", "g", "t"])
    for infix, base in (("", 1000), ("i", 1024))
}


def find_config(folder: Path) -> Path | None:
    """Return the taas.toml that holds for a notebook in `folder`; None where there is none."""
    home, folder = Path(os.path.expanduser("~")).resolve(), folder.resolve()
    above = [folder, *folder.parents]
    places = above[: above.index(home) + 1] if home in above else above
    user = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "taas"
    files = [place / FILE_NAME for place in (*places, user)]
    return next((file for file in files if os.path.isfile(file)), None)


def load_config(folder: Path) -> Config:
    """Return the settings that hold for a notebook in `folder`.

    Raises:
        UsageError: The file is no TOML, holds what it may not, or is not the user's alone to
            write; one line.
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
    """Read a file that nobody but the user and root can have written: it may name programs.

    Raises:
        UsageError: Somebody else can; says who, and what mends it.
        OSError: It cannot be read.
    """
    with path.open(encoding="utf-8") as file:
        seen = [(path.resolve(), os.fstat(file.fileno()))]
        folders = {path.parent.resolve(), path.resolve().parent}
        seen += [(folder, folder.stat()) for folder in sorted(folders)]
        for place, status in seen:
            if why := _why_foreign(place, status):
                raise UsageError(
                    f"{path} is not trusted, as it may name programs to run: {why}, "
                    "or keep it in ~/.config/taas"
                )
        return file.read()


def _why_foreign(place: Path, status: os.stat_result) -> str:
    """Return why somebody else than the user and root can change `place`; "" when nobody can."""
    user, quoted = os.geteuid(), shlex.quote(str(place))
    if status.st_uid not in (user, 0):
        owner = f"uid {status.st_uid}"
        with suppress(KeyError):
            owner = f"{pwd.getpwuid(status.st_uid).pw_name} ({owner})"
        return f"{place} belongs to {owner}. If you trust it: sudo chown {user} {quoted}"
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    others = status.st_mode & stat.S_IWOTH and not is_sticky
    group = status.st_mode & stat.S_IWGRP and not is_sticky and not _is_own(status.st_gid)
    if others or group:
        name = str(status.st_gid)
        with suppress(KeyError):
            name = grp.getgrgid(status.st_gid).gr_name
        who = "everybody" if others else f"group {name}"
        sudo = "" if status.st_uid == user else "sudo "
        return f"{who} can write {place}. If you trust it: {sudo}chmod go-w {quoted}"
    return ""


def _is_own(group: int) -> bool:
    """Return whether a group is the user's private one, which many systems let write by default."""
    try:
        found, own = grp.getgrgid(group), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    private = (found.gr_gid, found.gr_name) == (own.pw_gid, own.pw_name)
    return private and set(found.gr_mem) <= {own.pw_name}


def parse(values: Mapping[str, Any], source: Path) -> Config:
    """Check what a file holds. Relative paths in it are relative to its folder."""
    _refuse_unknown(
        values, [name for name in Config.__struct_fields__ if name != "source"], f"{source}:"
    )

    def table(name: str, kind: type[_T]) -> _T:
        return _read(values.get(name, {}), kind, f"{source}: [{name}]")

    store = table("store", StoreConfig)
    if store.path:
        path = source.parent / Path(store.path).expanduser()
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
    """Read "4GiB", "500MB", "1.5G" or "4096" in bytes.

    Raises:
        ValueError: It is none of these.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or ("." in match[1] and not match[2]):
        raise ValueError(text)
    n_bytes = float(match[1]) * _SIZE_FACTORS[(match[2] or "").lower()]
    if n_bytes > MOST_BYTES:
        raise ValueError(text)
    return int(n_bytes)


def size_text(n_bytes: float, base: int = 1000) -> str:
    """Return bytes with a unit: `812 bytes`, `6.4 MB`; to base 1024 `1.5 GiB`."""
    if n_bytes < base:
        return f"{n_bytes:.0f} bytes"
    for unit in ("kB", "MB", "GB") if base == 1000 else ("KiB", "MiB", "GiB"):
        n_bytes /= base
        if n_bytes < base - 0.05:
            return f"{n_bytes:.1f} {unit}"
    return f"{n_bytes / base:.1f} {'TB' if base == 1000 else 'TiB'}"


def _read(table: object, kind: type[_T], where: str, **given: str) -> _T:
    """Read a table of the file; `given` are settings that are no keys of it.

    Raises:
        UsageError: It is no table, or a key of it is unknown or holds what it may not.
    """
    held = _table(table, where)
    fields = {each.encode_name: each.type for each in structs.fields(kind)}
    _refuse_unknown(held, [name for name in fields if name not in given], where)
    values = {**held, **given}
    for name in held:
        if _meta(fields[name]) == _meta(_Size):
            with suppress(ValueError):  # what is no size stays, and is refused
                values[name] = parse_size(str(held[name]))
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        # it ends in the place of what is wrong: - at `$.hosts[0]` is in `hosts`
        name = str(error).rpartition("`$.")[2].rstrip("`").partition("[")[0]
        needs = f"{name} needs {_meta(fields[name])}; got {held[name]!r}"
        raise UsageError(f"{where} {needs}") from None


def _meta(kind: object) -> str:
    """Return what a key of a type may hold, in words."""
    metas = [it for each in (kind, *get_args(kind)) for it in getattr(each, "__metadata__", ())]
    return next((meta.description for meta in metas if meta.description), "another value")


def _pool(name: str, table: object, source: Path) -> PoolConfig:
    where = f'{source}: [pools."{name}"]'
    if not re.fullmatch(r"[A-Za-z][\w.-]*", name):
        raise UsageError(f"{where}: a pool's name is letters, digits, '.', '_' and '-'")
    pool, given = _read(table, PoolConfig, where, name=name), _table(table, where)
    if not re.fullmatch(r"local|ssh|\w+(\.\w+)+", pool.engine):
        raise UsageError(f"{where} engine needs {_meta(_Engine)}; got {pool.engine!r}")
    if name == LOCAL and pool.engine != "local":
        raise UsageError(
            f'{where} engine needs "local", as pool "local" is this machine; got {pool.engine!r}'
        )
    if pool.engine == "ssh" and not pool.hosts:
        raise UsageError(f'{where}: engine "ssh" needs hosts = ["host1", …]')
    if pool.hosts and pool.engine != "ssh":
        raise UsageError(f'{where}: hosts needs engine = "ssh"; got engine {pool.engine!r}')
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
            hint = closest(name, possible) or _right_table(name)
            raise UsageError(f'{where} has no key "{name}"{hint}. The keys are: {listed}')


def _right_table(name: str) -> str:
    """Return ` (it belongs below "[runs]")` for a key of that table, which stands elsewhere."""
    tables = {key: getattr(Config(), key) for key in ("store", "capture", "runs", "data")}
    right = [key for key, table in tables.items() if name in table.__struct_fields__]
    return f' (it belongs below "[{right[0]}]")' if right else ""
