"""The program that runs on a host to report its facts and to install packages.

A host's Python may get the source of this module as text on its standard input. So the module needs
only Python 3.8 and its standard library, and imports nothing else of this package.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

_SIOCGIFADDR = 0x8915
"""Number of Linux's ioctl call that returns the IPv4 address of a network interface."""

_LINK_LOCAL = "20"
"""Scope of link-local addresses in /proc/net/if_inet6. Other hosts cannot use these addresses."""

_TRIAL_BYTES = 1 << 20
"""Number of bytes that `why_not_writable` writes."""

_CGROUPS = "/sys/fs/cgroup"
_ABANDONED_AFTER_S = 24 * 3600
"""Age in seconds above which an unfinished installation counts as interrupted and is removed."""

_PIP_ERROR_CHARS = 2000
"""Maximum number of characters, from the end of pip's output, that an error text contains."""


def main(
    packages: Sequence[str] = (),
    modules: Sequence[str] = (),
    mark: str = "",
    names: bool = True,
) -> dict[str, Any]:
    """Return facts about this host, such as versions and free disk space, by name of the fact.

    `messages.HostFacts` describes each fact. To find out whether the cache folder is writable, this
    function creates the cache folder if it is missing.

    Args:
        packages: Distributions to check; the result has the versions of the installed ones.
        modules: Top-level modules to check; the result has the missing ones.
        mark: Path of a file that was just created in the project store. If the file exists on this
            host, the host shares the store.
        names: Whether to report the names of the GPUs, which may take seconds.
    """
    cache = cache_folder()
    return {
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "executable": sys.executable,
        "system": platform.system(),
        "machine": platform.machine(),
        "glibc": glibc(),
        "torch": installed_version("torch"),
        "cuda": torch_cuda(),
        "versions": {name: installed_version(name) for name in packages if installed_version(name)},
        "taas_digest": digest_of_taas(),
        "missing": [name for name in modules if not is_installed(name)],
        "cache": cache,
        "cache_error": why_not_writable(cache),
        "free_bytes": free_bytes(cache),
        "sites": sites(cache),
        "cores": cores(),
        "gpus": count_gpus(),
        "gpu_names": gpu_names() if names else [],
        "clock": time.time(),
        "hostname": socket.gethostname(),
        "own_addresses": addresses_of(socket.gethostname()),
        "interfaces": interfaces(),
        "python_path": [e for e in os.environ.get("PYTHONPATH", "").split(os.pathsep) if e],
        "reached_at": (os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[2],
        "is_managed": is_externally_managed(),
        "sees_store": bool(mark) and os.path.exists(mark),
    }


def is_externally_managed() -> bool:
    """Return whether pip refuses to install packages for this Python (PEP 668)."""
    is_venv = sys.prefix != getattr(sys, "base_prefix", sys.prefix)
    marker = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    return not is_venv and os.path.exists(marker)


def cache_folder() -> str:
    """Return taas-magic's cache folder on this host: `$XDG_CACHE_HOME/taas` or `~/.cache/taas`.

    If the user has no home folder, the cache folder is below TMPDIR.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if base.startswith("~"):
        return os.path.join(tempfile.gettempdir(), f"taas-cache-{os.getuid()}")
    return os.path.join(base, "taas")


def glibc() -> str:
    """Return the version of glibc; "" if this host has another C library."""
    name, number = platform.libc_ver()
    return number if name == "glibc" else ""


def cores() -> int:
    """Return the number of cores that this process may use.

    The process's CPU affinity and the quotas of its cgroups limit this number.
    """
    if not hasattr(os, "sched_getaffinity"):
        return 1
    quotas = [_quota(folder) for folder in _cgroup_folders()]
    return max(1, min([len(os.sched_getaffinity(0)), *filter(None, quotas)]))


def _cgroup_folders() -> list[str]:
    """Return the folders of this process's cgroup and of all parent cgroups, for cgroup v1 or v2.

    Read the cgroups from /proc/self/cgroup. For v1, return only cgroups of the controller `cpu`.
    The result also has the folder in which all these cgroups are (`/sys/fs/cgroup` for v2).
    """
    found = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = os.path.join(_CGROUPS, "cpu" if controllers else "")
        found.append(top)  # in a container, /proc may name folders of the outer system
        while path.strip("/"):
            found.append(top.rstrip("/") + path)
            path = os.path.dirname(path)
    return found


def _quota(folder: str) -> int:
    """Return the number of cores that a cgroup may use, rounded up; 0 if it has no limit."""
    quota, period = (
        _read(os.path.join(folder, "cpu.max")).split()
        or _read(os.path.join(folder, "cpu.cfs_quota_us")).split()
        + _read(os.path.join(folder, "cpu.cfs_period_us")).split()
        or ["max", "1"]
    )
    return 0 if quota in ("max", "-1") else -(-int(quota) // int(period))


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def installed_version(name: str) -> str:
    """Return the version of a distribution; "" if it is not installed."""
    try:
        return metadata.version(name) or ""
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return ""


def is_installed(name: str) -> bool:
    """Return whether a top-level module can be found, without importing it."""
    return name in sys.modules or _spec(name) is not None


def _spec(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None


def folder_of(name: str) -> str | None:
    """Return the folder of an installed package; None if it is not installed."""
    origin = getattr(_spec(name), "origin", None)
    return os.path.dirname(origin) if origin else None


def torch_cuda() -> str:
    """Return the CUDA version of torch; "" for a CPU build. Does not import torch."""
    text = _read(os.path.join(folder_of("torch") or "", "version.py"))
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)", text, re.MULTILINE)
    return found.group(1) if found else ""


def digest_of_taas() -> str:
    """Return a digest of taas-magic's files on this host; "" if taas-magic is not installed."""
    folder = folder_of("taas_magic")
    return digest(package_files(folder)) if folder else ""


def package_files(folder: str) -> list[tuple[str, bytes]]:
    """Return the files of a package as (relative path, content), sorted by path.

    The result also has the files of subfolders, except those in `__pycache__`.
    """
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = os.path.join(root, name)
            with open(path, "rb") as file:
                found.append((os.path.relpath(path, folder).replace(os.sep, "/"), file.read()))
    return sorted(found)


def digest(files: Iterable[tuple[str, bytes]]) -> str:
    """Return a digest of a package's files.

    Args:
        files: Pairs of path and content, sorted by path.
    """
    sums = [hashlib.sha256(content).hexdigest() + " " + path for path, content in files]
    return hashlib.sha256("\n".join(sums).encode()).hexdigest()[:16]


def why_not_writable(folder: str) -> str:
    """Create a folder if it is missing, and test whether it is writable; return the error, or "".

    The test writes `_TRIAL_BYTES` bytes, so that a full disk is an error, too.
    """
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * _TRIAL_BYTES)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def free_bytes(folder: str) -> int:
    """Return the free bytes on the disk of a folder, or of its nearest existing parent."""
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    return shutil.disk_usage(folder).free


def sites(cache: str) -> list[str]:
    """Return the names of the folders that `install` has filled with packages in the cache.

    The result lacks folders of installations that are not finished. If the cache cannot be read,
    the result is empty.

    Args:
        cache: Path of the cache folder.
    """
    try:
        return sorted(n for n in os.listdir(os.path.join(cache, "site")) if not n.startswith("."))
    except OSError:
        return []


def count_gpus() -> int:
    """Count the CUDA devices that a process on this host would see, without using CUDA.

    If `CUDA_VISIBLE_DEVICES` is set, count its entries, without empty entries and `-1`. Otherwise,
    count the NVIDIA devices in `/dev`. This function does not call torch, because torch could
    create a CUDA context in this process. Then CUDA would not work in forks of this process.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip() not in ("", "-1")])
    try:
        return sum(1 for name in os.listdir("/dev") if re.match(r"nvidia\d+$", name))
    except OSError:
        return 0


def gpu_names() -> list[str]:
    """Return the GPU names that nvidia-smi prints; empty if it fails or needs more than 3 s."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        said = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=3, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return said.decode(errors="replace").split("\n")[:-1]


def addresses_of(name: str) -> list[str]:
    """Return the IP addresses to which this host resolves a name; empty if that fails."""
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None)})
    except (OSError, UnicodeError):
        return []


def interfaces() -> dict[str, list[str]]:
    """Return the IP addresses of each network interface, by name of the interface.

    The system call ioctl returns at most one IPv4 address of each interface. /proc/net/if_inet6 has
    the IPv6 addresses; link-local ones are left out.
    """
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, asked)
            except OSError:
                continue  # the interface has no IPv4 address
            found[name] = [socket.inet_ntoa(answer[20:24])]
    for line in _read("/proc/net/if_inet6").splitlines():
        address, _, _, scope, _, name = line.split()
        if scope != _LINK_LOCAL:
            text = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
            found.setdefault(name, []).append(text)
    return found


def install(
    folder: str,
    pins: Sequence[str] = (),
    options: Sequence[str] = (),
    limit_s: float = 60,
    bundle: str = "",
    sha256: str = "",
) -> str:
    """Create a folder of packages with pip or from a zip file; return an error text, or "".

    If the folder exists already, only remove the zip file. Otherwise, do these steps:

    - Remove the temporary folders of other installations, if these folders are older than a day.
    - Fill a folder with a temporary name.
    - Rename this folder to the final name. So a folder with the final name is always complete.

    If several hosts share a home folder, they may install the same packages at once. Then all of
    them use the folder of the host that finishes first.

    Args:
        folder: The folder to create; its name identifies the content.
        pins: Requirements for pip, such as `zict==3.0.0`.
        options: Options of pip.
        limit_s: Maximum seconds for pip.
        bundle: Path of a zip file to use instead of pip; "" to use pip. This function removes the
            zip file at the end.
        sha256: The SHA-256 that the zip file must have.
    """
    parent, error = os.path.dirname(folder), ""
    try:
        if not os.path.isdir(folder):
            os.makedirs(parent, mode=0o700, exist_ok=True)
            _remove_old_drafts(parent)
            aside = tempfile.mkdtemp(prefix=".new-", dir=parent)
            try:
                if bundle:
                    error = _unpack(bundle, sha256, aside)
                else:
                    error = _pip([*options, *pins], aside, limit_s)
                if not error:
                    _publish(aside, folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except (OSError, zipfile.BadZipFile) as problem:
        error = str(problem) or repr(problem)
    finally:
        _remove(bundle)
    return error


def _publish(aside: str, folder: str) -> None:
    """Rename a complete folder to its final name.

    If another host has already made a folder with the final name, leave both folders as they are.

    Args:
        aside: Path of the complete folder.
        folder: Path with the final name.
    """
    try:
        os.rename(aside, folder)
    except OSError:
        if not os.path.isdir(folder):  # otherwise another host was faster
            raise


def _unpack(bundle: str, sha256: str, into: str) -> str:
    """Check the SHA-256 of a zip file, and unpack the file into the folder `into`.

    Returns:
        An error text if the file has another SHA-256; else "".

    Raises:
        OSError: The zip file cannot be read, or a file cannot be written.
        zipfile.BadZipFile: The file is not a valid zip file.
    """
    with open(bundle, "rb") as file:
        seen = hashlib.sha256(file.read()).hexdigest()
    if seen != sha256:
        return f"{bundle} was damaged in transit"
    with zipfile.ZipFile(bundle) as archive:
        archive.extractall(into)
    return ""


def _pip(words: Sequence[str], into: str, limit_s: float) -> str:
    """Install wheels into a folder with pip, without their dependencies.

    Args:
        words: Options of pip, and the requirements to install.
        limit_s: Maximum seconds for pip.

    Returns:
        "" if pip succeeded. Otherwise, an error text: the end of pip's output or, without output,
        pip's exit code. If pip exceeds `limit_s`, the error text says so.
    """
    command = [sys.executable, "-m", "pip", "install", "--target", into, "--no-deps", "--no-input"]
    command += ["--only-binary=:all:", "--no-compile", "--quiet", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*command, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"pip did not finish within {limit_s:.0f} s"
    said = done.stdout.decode(errors="replace").strip()
    return said[-_PIP_ERROR_CHARS:] or f"exit code {done.returncode}" if done.returncode else ""


def _remove_old_drafts(parent: str) -> None:
    """Remove files and folders `.new-…` in `parent` that are older than a day.

    Interrupted installations left these files and folders.
    """
    for name in os.listdir(parent):
        path = os.path.join(parent, name)
        try:
            old = time.time() - os.stat(path).st_mtime > _ABANDONED_AFTER_S
        except OSError:
            continue  # another host with the same home folder has just renamed it
        if old and name.startswith(".new-"):
            shutil.rmtree(path, ignore_errors=True)
            _remove(path)


def _remove(path: str) -> None:
    try:
        os.remove(path)
    except OSError:
        return
