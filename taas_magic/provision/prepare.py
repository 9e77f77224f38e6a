"""Makes a host ready for an agent: asks what is there, and puts there what is missing."""

import hashlib
import posixpath
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from taas_magic.config import PoolConfig
from taas_magic.errors import PoolError
from taas_magic.preflight.judge import Needs, refuse
from taas_magic.provision import landing
from taas_magic.provision.facts import Facts, Kernel, ask_host, this_kernel
from taas_magic.provision.requirements import (
    DIRECT,
    Installed,
    Wanted,
    environment_of,
    installed_here,
    lacking,
    wanted,
)
from taas_magic.provision.shell import Shell, ask
from taas_magic.provision.wheels import bundle_for, our_bundle

PIP_LIMIT_S = 60.0
LANDING_LIMIT_S = 180.0

_parsing = threading.Lock()
"""Markers are read with `ast`: Python 3.11 fails at that in two threads (python/cpython#106905)."""

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


def packages_needed(facts: Facts | None = None) -> dict[str, Wanted]:
    """What a host needs besides torch and taas-magic; without facts, on any Linux host."""
    environment = environment_of(facts) if facts and facts.system else {"sys_platform": "linux"}
    with _parsing:
        return wanted(_installed(), environment=environment)


@lru_cache(maxsize=1)
def _installed() -> dict[str, Installed]:
    return installed_here(Requirement(text).name for text in DIRECT)


def what_to_bring(facts: Facts, here: Kernel) -> list["Parcel"]:
    """The folders of packages that a host must have, whether they are there already or not."""
    parcels = []
    missing = lacking(packages_needed(facts), facts)
    if missing:
        pins = [each.pin for each in missing]
        kind = [here.python_minor, facts.implementation, facts.machine, facts.glibc]
        mark = hashlib.sha256(repr([pins, kind]).encode()).hexdigest()[:16]
        parcels.append(Parcel(f"deps-{mark}", tuple(pins), lambda: bundle_for(missing, facts)))
    if facts.ours != here.ours:
        parcels.append(Parcel(f"taas-{here.ours}", (), our_bundle))
    return parcels


@dataclass(frozen=True)
class Parcel:
    """One folder of packages: its name, what pip calls them (if it may have them), and the files.

    Its name says what is in it, so a folder of that name need not be looked into.
    """

    name: str
    pins: tuple[str, ...]
    bundle: Callable[[], bytes]


def bring(parcel: Parcel, shell: Shell, python: str | None, cache: str) -> None:
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


def _bundle(parcel: Parcel) -> bytes:
    """The files of a parcel; made once for hosts that ask at the same time, mostly for the same."""
    with _making:
        if parcel.name not in _bundles:
            _bundles.clear()
            _bundles[parcel.name] = parcel.bundle()
        return _bundles[parcel.name]


def _land(shell: Shell, python: str | None, folder: str, **how: Any) -> str | None:
    """Runs our program for it on the host; None, or why the folder is not there."""
    asked = {"folder": folder, **how}
    answer = ask(shell, python, Path(landing.__file__), asked, LANDING_LIMIT_S)
    return None if answer["done"] else str(answer["error"])
