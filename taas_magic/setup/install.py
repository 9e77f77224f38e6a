"""Makes a host ready for an agent: asks what is there, and puts there what is missing.

Packages go there by the host's own pip, or as one file: from this environment where its files fit
there, else by pip. What is installed here was built for this machine; for a host with another
processor or an older C library the wheels are asked of an index instead, once, and kept in the
user's cache.
"""

import hashlib
import importlib.metadata
import io
import os
import posixpath
import secrets
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct
from packaging.tags import Tag, compatible_tags, cpython_tags, parse_tag

from taas_magic import probe
from taas_magic.config import PoolConfig
from taas_magic.errors import PoolError
from taas_magic.messages import unpack
from taas_magic.setup import landing
from taas_magic.setup.checks import Needs, refuse
from taas_magic.setup.facts import Facts, Kernel, Shell, ask, ask_host, this_kernel
from taas_magic.setup.requirements import Wanted, lacking, packages_needed

PIP_LIMIT_S = 60.0
LANDING_LIMIT_S = 180.0

_making = threading.Lock()
_bundles: dict[str, bytes] = {}


@dataclass(frozen=True)
class Prepared:
    """How an agent is started on a host.

    Attributes:
        python: The interpreter, as the pool names it.
        path_entries: What its PYTHONPATH must be; nothing where it is right as it is.
        facts: What the host is like.
    """

    python: str | None
    path_entries: tuple[str, ...]
    facts: Facts


def prepare(shell: Shell, pool: PoolConfig) -> Prepared:
    """Makes a host ready; the first time this puts packages into the user's cache there.

    Blocks, for a fraction of a second where nothing is to be done.

    Args:
        shell: The way to the host.
        pool: The pool whose host it is.

    Raises:
        PoolError: The host cannot be used as it is; names host, reason and what to do.
    """
    here = this_kernel()
    facts = ask_host(shell, pool.python, packages_needed())
    refuse([facts], here, Needs(gpus=pool.gpus))
    folders = []
    for parcel in what_to_bring(facts, here):
        if parcel.name not in facts.sites:
            bring(parcel, shell, pool.python, facts.cache)
        folders.append(posixpath.join(facts.cache, "site", parcel.name))
    entries = (*folders, *facts.python_path) if folders else ()
    return Prepared(pool.python, entries, facts)


def what_to_bring(facts: Facts, here: Kernel) -> list["PackageFolder"]:
    """The folders of packages that a host must have, whether they are there already or not."""
    parcels = []
    missing = lacking(packages_needed(facts), facts)
    if missing:
        pins = [each.pin for each in missing]
        kind = [here.python_minor, facts.implementation, facts.machine, facts.glibc]
        mark = hashlib.sha256(repr([pins, kind]).encode()).hexdigest()[:16]
        parcels.append(
            PackageFolder(f"deps-{mark}", tuple(pins), lambda: bundle_for(missing, facts))
        )
    if facts.ours != here.ours:
        parcels.append(PackageFolder(f"taas-{here.ours}", (), our_bundle))
    return parcels


@dataclass(frozen=True)
class PackageFolder:
    """One folder of packages: its name, what pip calls them (if it may have them), and the files.

    Its name says what is in it, so a folder of that name need not be looked into.
    """

    name: str
    pins: tuple[str, ...]
    bundle: Callable[[], bytes]


def bring(parcel: PackageFolder, shell: Shell, python: str | None, cache: str) -> None:
    """Puts a parcel into its folder on a host: by the host's own pip, else as files from here.

    Raises:
        PoolError: It is not there; says why.
    """
    folder = posixpath.join(cache, "site", parcel.name)
    if parcel.pins and _land(shell, python, folder, pins=parcel.pins, limit_s=PIP_LIMIT_S) is None:
        return
    data = _bundle(parcel)
    path = posixpath.join(cache, f"{parcel.name}.{secrets.token_hex(4)}.zip")
    shell.put(data, path)
    mark = hashlib.sha256(data).hexdigest()
    problem = _land(shell, python, folder, bundle=path, sha256=mark)
    if problem is not None:
        raise PoolError(f"host {shell.host}: packages could not be put into {folder}: {problem}")


def _bundle(parcel: PackageFolder) -> bytes:
    """The files of a parcel; made once for hosts that ask at the same time, mostly for the same."""
    with _making:
        if parcel.name not in _bundles:
            _bundles.clear()
            _bundles[parcel.name] = parcel.bundle()
        return _bundles[parcel.name]


class _Landed(Struct):
    """What `landing.main` answers."""

    done: bool
    error: str


def _land(shell: Shell, python: str | None, folder: str, **how: object) -> str | None:
    """Runs our program for it on the host; None, or why the folder is not there."""
    asked = {"folder": folder, **how}
    said = ask(shell, python, Path(landing.__file__), asked, LANDING_LIMIT_S)
    answer = unpack(said, _Landed)
    return None if answer.done else answer.error


DOWNLOAD_LIMIT_S = 300.0

_NAMED_GLIBC = {(2, 5): "manylinux1", (2, 12): "manylinux2010", (2, 17): "manylinux2014"}
_OLDEST_GLIBC = 5
_SAID_LINES = 4

Files = dict[str, bytes]


def tags_of(facts: Facts) -> frozenset[Tag]:
    """The wheels that a host's Python takes."""
    version = tuple(int(part) for part in facts.python.split(".")[:2])
    platforms = list(platforms_of(facts))
    return frozenset(
        [
            *cpython_tags(version, platforms=platforms),
            *compatible_tags(version, f"cp{version[0]}{version[1]}", platforms),
        ]
    )


def platforms_of(facts: Facts) -> Iterator[str]:
    """The platforms of a host as wheels name them (PEP 600 and its forerunners), newest first."""
    major, _, rest = facts.glibc.partition(".")
    for number in range(int(rest.split(".")[0] or 0), _OLDEST_GLIBC - 1, -1) if rest else ():
        yield f"manylinux_{major}_{number}_{facts.machine}"
        if name := _NAMED_GLIBC.get((int(major), number)):
            yield f"{name}_{facts.machine}"


def bundle_for(packages: Sequence[Wanted], facts: Facts) -> bytes:
    """A zip file with the packages for a host, as they lie in a folder on `sys.path`.

    Raises:
        PoolError: Some are not for that host here, and no index has them; says what to do.
    """
    tags = tags_of(facts)
    files: Files = {}
    elsewhere = []
    for each in packages:
        own = installed_files(each.name, tags)
        files.update(own or {})
        elsewhere += [] if own else [each.pin]
    return zipped({**files, **downloaded(elsewhere, facts)} if elsewhere else files)


def our_bundle() -> bytes:
    """A zip file with taas-magic itself: this very code, never an index's."""
    root = Path(__file__).parents[2]
    files = probe.package_files(str(root / "taas_magic"))
    programs = {"taas.py": (root / "taas.py").read_bytes()}  # `import taas` in the user's scripts
    return zipped({f"taas_magic/{path}": content for path, content in files} | programs)


def zipped(files: Mapping[str, bytes]) -> bytes:
    """The files as a zip file, the same bytes for the same files."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(files):
            archive.writestr(zipfile.ZipInfo(path), files[path], zipfile.ZIP_DEFLATED, 1)
    return target.getvalue()


def installed_files(name: str, tags: frozenset[Tag]) -> Files | None:
    """The files of a package of this environment; None where they would not work on the host."""
    try:
        known = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    own = set(_tags_in(known.read_text("WHEEL") or ""))
    if not own & tags or '"editable": true' in (known.read_text("direct_url.json") or ""):
        return None
    paths = [path for path in known.files or () if _belongs(path.parts)]
    try:
        return {path.as_posix(): Path(str(path.locate())).read_bytes() for path in paths} or None
    except OSError:
        return None


def _tags_in(wheel: str) -> Iterator[Tag]:
    for line in wheel.splitlines():
        if line.startswith("Tag:"):
            yield from parse_tag(line.partition(":")[2].strip())


def _belongs(parts: Sequence[str]) -> bool:
    """Whether an installed file lies among the modules; programs and caches do not."""
    return ".." not in parts and "__pycache__" not in parts and not Path(*parts).is_absolute()


def downloaded(pins: Sequence[str], facts: Facts) -> Files:
    """The files of packages that pip finds for a host; the wheels are kept for the next one.

    Raises:
        PoolError: pip is missing here, reaches no index, or there is no such wheel.
    """
    mark = hashlib.sha256(repr((sorted(pins), sorted(map(str, tags_of(facts))))).encode())
    kept = Path(probe.cache_folder()) / "wheels" / mark.hexdigest()[:16]
    if not kept.is_dir():
        _download(pins, facts, kept)
    return {
        path: content
        for wheel in sorted(kept.glob("*.whl"))
        for path, content in files_of_wheel(wheel)
    }


def _download(pins: Sequence[str], facts: Facts, kept: Path) -> None:
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=kept.parent) as folder:
        aside = Path(folder) / "wheels"
        words = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--quiet"]
        words += ["--python-version", facts.python_minor, "--dest", str(aside), "--no-input"]
        words += [word for name in platforms_of(facts) for word in ("--platform", name)]
        done = _pip(["download", *words, *pins], facts.host)
        if done.returncode:
            raise PoolError(_not_found(pins, facts, done.stderr))
        try:
            os.rename(aside, kept)
        except OSError:
            if not kept.is_dir():  # else another process was first
                raise


def _pip(words: Iterable[str], host: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pip", *words]
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PoolError(
            f"host {host}: pip on this machine was not done with downloading packages for it "
            f"after {DOWNLOAD_LIMIT_S:.0f} s"
        ) from None


def _not_found(pins: Sequence[str], facts: Facts, said: str) -> str:
    tail = [line for line in said.strip().splitlines() if line.strip()][-_SAID_LINES:]
    what = f"Python {facts.python_minor} on {facts.system} {facts.machine}"
    return "\n".join(
        [
            f"host {facts.host}: packages that it lacks could not be fetched here for {what}. "
            f"Install them there: pip install {' '.join(pins)}",
            *(f"    {line}" for line in tail),
        ]
    )


def files_of_wheel(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """The modules of a wheel as they lie when it is installed (PEP 427); programs are left out."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            first, _, rest = name.partition("/")
            if first.endswith(".data"):
                kind, _, name_there = rest.partition("/")
                if kind not in ("purelib", "platlib"):
                    continue
            else:
                name_there = name
            if name_there and not name_there.endswith("/"):
                yield name_there, archive.read(name)
