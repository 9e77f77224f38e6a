"""Install the packages that an agent and its ranks need on a host.

First, the host's own pip installs the packages. If pip fails, this module copies the packages from
this machine's environment, and sends them to the host as one zip file. If this machine's packages
may not work on the host, an error says what to install there.

taas-magic itself is always sent. torch is never installed, because a host's torch must fit the
host's GPUs.
"""

import hashlib
import importlib.metadata
import io
import platform
import posixpath
import secrets
import shlex
import sys
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from taas_magic import probe
from taas_magic.config import PoolConfig
from taas_magic.errors import PoolError
from taas_magic.messages import HostFacts, from_json
from taas_magic.setup.facts import (
    KernelVersions,
    RequiredPackage,
    Shell,
    ask_host,
    call_probe,
    find_missing_packages,
    major_minor,
    raise_if_unusable,
    this_kernel,
)

PROJECT = "taas-magic"

EXACT_VERSION = ("distributed",)
"""Packages that need exactly this machine's version: both ends of Dask's protocol must match."""

NOT_INSTALLED = ("torch", "ipykernel", "paramiko")
"""Packages that taas-magic needs here, but does not install on hosts.

These are torch, and packages that `taas_magic.host` never imports.
"""

PIP_LIMIT_S = 60.0
INSTALL_LIMIT_S = 180.0
DOWNLOAD_LIMIT_S = 300.0

_PIP_ERROR_LINES = 4

_parsing = threading.Lock()
"""Lock that a thread holds while the library packaging parses requirements.

Packaging uses `ast`. On Python 3.11, `ast` fails if two threads parse at the same time
(python/cpython#106905).
"""

_bundle_lock = threading.Lock()
_bundles: dict[str, bytes] = {}

Files = dict[str, bytes]


class InstalledPackage(NamedTuple):
    """The version and the requirements of a package that is installed in this environment."""

    version: str
    requires: tuple[str, ...]


@cache
def installed(name: str) -> InstalledPackage | None:
    """Return the version and requirements of a package here; None if it is not installed."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return InstalledPackage(found.version, tuple(found.requires or ()))


def packages_needed(
    find: Callable[[str], InstalledPackage | None] = installed,
) -> dict[str, RequiredPackage]:
    """Return the packages that a host needs to run taas-magic, by canonical name.

    The result has the dependencies of taas-magic, and their dependencies in turn. Packages in
    `NOT_INSTALLED`, such as torch, are left out. A package that only left-out packages need is left
    out, too. The allowed versions of a package meet the requirements of all packages that need it.
    A package in `EXACT_VERSION`, such as distributed, must have this machine's version.

    Environment markers are evaluated for this Python, because the host's Python has the same minor
    version.

    Args:
        find: Function that looks up a package of this environment by its canonical name.

    Raises:
        PoolError: taas-magic itself is not installed here, so its requirements are unknown.
    """
    if (ours := find(PROJECT)) is None:
        folder = Path(__file__).parents[2]
        raise PoolError(
            f"cannot tell which packages hosts need: {sys.executable} runs taas-magic from "
            f"{folder} without installing it. Run: {sys.executable} -m pip install -e {folder}"
        )
    found: dict[str, SpecifierSet] = {}
    with _parsing:
        waiting = [*map(Requirement, ours.requires)]
        while waiting:
            one = waiting.pop()
            name = canonicalize_name(one.name)
            if name in NOT_INSTALLED or (
                one.marker is not None and not one.marker.evaluate({"extra": ""})
            ):
                continue
            if name not in found and (here := find(name)):
                waiting += map(Requirement, here.requires)
            found[name] = found.get(name, SpecifierSet()) & one.specifier
    return {name: _required_package(name, found[name], find(name)) for name in sorted(found)}


def _required_package(
    name: str, allowed: SpecifierSet, here: InstalledPackage | None
) -> RequiredPackage:
    version = here.version if here else ""
    if name in EXACT_VERSION and version:
        allowed = SpecifierSet(f"=={version}")
    return RequiredPackage(name, version, allowed)


def install_missing_packages(shell: Shell, pool: PoolConfig) -> tuple[str, ...]:
    """Check a host, and install the packages that an agent needs and the host lacks. Blocks.

    The packages are installed into the user's cache on the host. Later calls use them again.

    Returns:
        Folders for the agent's PYTHONPATH: first the folders with installed packages, then the
        folders of the host's own PYTHONPATH. Empty if the host lacks no package.

    Raises:
        PoolError: The host cannot execute runs, or the packages cannot be installed.
    """
    here = this_kernel()
    facts = ask_host(shell, pool.python, packages_needed())
    raise_if_unusable([facts], here)
    folders = []
    for package_folder in needed_package_folders(facts, here):
        if package_folder.name not in facts.sites:
            install_package(package_folder, shell, pool.python, facts.cache)
        folders.append(posixpath.join(facts.cache, "site", package_folder.name))
    return (*folders, *facts.python_path) if folders else ()


@dataclass(frozen=True)
class PackageFolder:
    """A folder of packages to install on a host.

    Attributes:
        name: Name of the folder. The name identifies the content. So if the host has a folder of
            this name, nothing is installed.
        pins: Requirements for pip, such as `zict==3.0.0`; empty if pip cannot provide the packages.
        bundle: Function that returns the packages as a zip file.
    """

    name: str
    pins: tuple[str, ...]
    bundle: Callable[[], bytes]


def needed_package_folders(facts: HostFacts, here: KernelVersions) -> list[PackageFolder]:
    """Return the package folders that the agent of a host needs on its PYTHONPATH.

    - If the host's Python lacks dependencies of taas-magic, the result has one folder for them.
    - If the host's taas-magic is missing, or its files differ from this machine's taas-magic, the
      result has a folder for taas-magic.

    A folder is in the result even if it is already on the host.
    """
    package_folders = []
    missing = find_missing_packages(packages_needed(), facts)
    if missing:
        pins = [each.pin for each in missing]
        kind = [major_minor(here.python), facts.implementation, facts.machine, facts.glibc]
        mark = hashlib.sha256(repr([pins, kind]).encode()).hexdigest()[:16]
        package_folders.append(
            PackageFolder(f"deps-{mark}", tuple(pins), lambda: bundle_for(missing, facts))
        )
    if facts.taas_digest != here.taas_digest:
        package_folders.append(PackageFolder(f"taas-{here.taas_digest}", (), our_bundle))
    return package_folders


def install_package(
    package_folder: PackageFolder, shell: Shell, python: str | None, cache: str
) -> None:
    """Install a package folder on a host: by the host's own pip, or else by sending the files.

    If `package_folder.pins` is not empty, the host's pip first tries to install these requirements.
    If pip fails, or `pins` is empty, this function sends the files as a zip file, and the host
    unpacks it. An error of pip is ignored. The last zip file stays in memory, because the next host
    often needs the same file.

    Args:
        python: The host's Python; None for `python3`.
        cache: Path of taas-magic's cache folder on the host.

    Raises:
        PoolError: The zip file cannot be made, because this machine's packages may not work on the
            host or cannot be found. Or the file could not be sent or unpacked.
    """
    folder = posixpath.join(cache, "site", package_folder.name)
    if package_folder.pins:
        # One short attempt, so that an unreachable index is noticed at once.
        options = ["--retries", "0", "--timeout", "5"]
        how = {"pins": package_folder.pins, "options": options, "limit_s": PIP_LIMIT_S}
        if not _install(shell, python, folder, how):
            return
    with _bundle_lock:  # hosts that start together mostly need the same folder: make it once
        if package_folder.name not in _bundles:
            _bundles.clear()
            _bundles[package_folder.name] = package_folder.bundle()
        data = _bundles[package_folder.name]
    path = posixpath.join(cache, f"{package_folder.name}.{secrets.token_hex(4)}.zip")
    shell.put(data, path)
    mark = hashlib.sha256(data).hexdigest()
    if error := _install(shell, python, folder, {"bundle": path, "sha256": mark}):
        raise PoolError(f"host {shell.host}: packages could not be put into {folder}: {error}")


def _install(shell: Shell, python: str | None, folder: str, how: Mapping[str, object]) -> str:
    """Install packages into `folder` on a host; return an error text, or "" on success.

    Args:
        how: Further arguments of `probe.install`: requirements for pip, or a zip file.
    """
    arguments = {"folder": folder, **how}
    output = call_probe(shell, python, probe.install.__name__, arguments, INSTALL_LIMIT_S)
    return from_json(output, str)


def our_bundle() -> bytes:
    """Return a zip file with taas-magic: the files that this process uses, not a release.

    The zip file also has taas.py, for `import taas`, and a dist-info folder with the name, the
    version and the entry points of taas-magic. By the entry points, Lightning finds the callback in
    `host/lightning.py`.
    """
    root = Path(__file__).parents[2]
    files = probe.package_files(str(root / "taas_magic"))
    programs = {"taas.py": (root / "taas.py").read_bytes()}  # `import taas` in the user's scripts
    known = importlib.metadata.distribution(PROJECT)
    texts = {name: known.read_text(name) for name in ("METADATA", "entry_points.txt")}
    info = f"taas_magic-{known.version}.dist-info"
    facts = {f"{info}/{name}": text.encode() for name, text in texts.items() if text}
    return zip_files({f"taas_magic/{path}": content for path, content in files} | programs | facts)


def bundle_for(packages: Sequence[RequiredPackage], facts: HostFacts) -> bytes:
    """Return a zip file with packages for a host, laid out as a folder on `sys.path`.

    Copy the files from this environment. Download packages that cannot be copied, with pip.

    Raises:
        PoolError: The packages of this machine may not work on the host, or a package can neither
            be copied from this environment nor downloaded with pip.
    """
    if why := why_incompatible(facts):
        pins = [each.pin for each in packages]
        raise _not_installed_error(
            facts, pins, f"This machine's packages may not work there: {why}"
        )
    files: Files = {}
    elsewhere = []
    for each in packages:
        own = installed_files(each.name)
        files.update(own or {})
        elsewhere += [] if own else [each.pin]
    return zip_files({**files, **download_wheels(elsewhere, facts)} if elsewhere else files)


def why_incompatible(facts: HostFacts) -> str:
    """Return why packages of this machine may not work on a host; "" if they should work.

    Packages should work if the processors and the C libraries fit. Both machines need the same kind
    of processor. Either the host's glibc is the same or newer, or both machines have no glibc.
    """
    machine, glibc = platform.machine(), probe.glibc()
    if facts.machine != machine:
        return f"its processor is {facts.machine}, but this machine's is {machine}"
    if facts.glibc == glibc or (facts.glibc and glibc and Version(facts.glibc) > Version(glibc)):
        return ""
    there, here = (f"glibc {number}" if number else "not glibc" for number in (facts.glibc, glibc))
    return f"its C library is {there}, but this machine's is {here}"


def _not_installed_error(facts: HostFacts, pins: Sequence[str], why: str) -> PoolError:
    return PoolError(
        f"host {facts.host}: it lacks packages, and its own pip did not install them. {why}\n"
        f"Install them there: {facts.executable} -m pip install {shlex.join(pins)}"
    )


def zip_files(files: Mapping[str, bytes]) -> bytes:
    """Return a zip file with the given files. The same files always give the same bytes.

    Args:
        files: Content of each file, by path in the zip file.
    """
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(files):
            archive.writestr(zipfile.ZipInfo(path), files[path], zipfile.ZIP_DEFLATED, 1)
    return target.getvalue()


def installed_files(name: str) -> Files | None:
    """Return a package's files from this environment; None if they may not work on other machines.

    Files work on other machines only if they come from a pure Python wheel or from a manylinux
    wheel (PEP 600). The result is also None if the package is not installed here, if it is
    installed in editable mode, or if a file cannot be read. The result contains no programs and no
    `__pycache__`.
    """
    if installed(name) is None:
        return None
    known = importlib.metadata.distribution(name)
    wheel = known.read_text("WHEEL") or ""
    is_editable = '"editable": true' in (known.read_text("direct_url.json") or "")
    if "Tag: " not in wheel or "-linux_" in wheel or is_editable:
        return None
    paths = [  # without programs, which lie outside of the packages' folder, and without caches
        path
        for path in known.files or ()
        if not {"..", "__pycache__"} & {*path.parts} and not path.is_absolute()
    ]
    try:
        return {path.as_posix(): Path(str(path.locate())).read_bytes() for path in paths} or None
    except OSError:
        return None


def download_wheels(pins: Sequence[str], facts: HostFacts) -> Files:
    """Download wheels for a host with this machine's pip, and return their files except programs.

    The wheels fit this machine. So call this function only if the host is like this machine
    (`why_incompatible` returns ""). The files stay in this user's cache, and later calls with the
    same `pins` use them again.

    Args:
        pins: Requirements for pip.
        facts: Facts of the host, for messages.

    Raises:
        PoolError: pip is missing, reaches no index, or the index has no such wheel.
    """
    kind = sys.version_info[:2], platform.machine(), probe.glibc()
    mark = hashlib.sha256(repr((sorted(pins), kind)).encode())
    kept = Path(probe.cache_folder()) / "packages" / mark.hexdigest()[:16]
    if error := probe.install(str(kept), pins, limit_s=DOWNLOAD_LIMIT_S):
        tail = [line for line in error.splitlines() if line.strip()][-_PIP_ERROR_LINES:]
        raise _not_installed_error(
            facts, pins, "\n    ".join(["This machine's pip failed as well:", *tail])
        )
    paths = {path.relative_to(kept): path for path in kept.rglob("*") if path.is_file()}
    return {
        inside.as_posix(): path.read_bytes()
        for inside, path in paths.items()
        if inside.parts[0] != "bin"  # programs
    }
