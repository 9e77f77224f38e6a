"""Which packages an agent and its ranks need on a host, and which of them are missing there. Pure.

torch is not among them: a host's torch fits its GPUs and is never replaced.
"""

import importlib.metadata
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from taas_magic.setup.facts import Facts

DIRECT = (
    "cloudpickle>=3",
    "distributed>=2024.1",
    "ipython>=8.20",
    "msgspec>=0.19",
    "pathspec>=0.12",
    "psutil>=5.9",
)
"""What `taas_magic.host` imports; pyproject.toml has the same bounds."""

AS_HERE = ("distributed",)
"""Both ends of Dask's protocol are of one version (and its own bounds say the same of dask)."""

NEVER = ("torch",)


_parsing = threading.Lock()
"""Markers are read with `ast`: Python 3.11 fails at that in two threads (python/cpython#106905)."""


@dataclass(frozen=True)
class Wanted:
    """One package that a host needs.

    Attributes:
        name: Its canonical name.
        version: The version that is installed here; "" where none is.
        allowed: The versions that would do.
    """

    name: str
    version: str
    allowed: SpecifierSet

    @property
    def pin(self) -> str:
        """What pip is asked for: the version of here, which is known to work with ours."""
        return f"{self.name}=={self.version}" if self.version else f"{self.name}{self.allowed}"

    def is_met_by(self, version: str) -> bool:
        """Whether a version would do; "" is none."""
        try:
            return bool(version) and self.allowed.contains(Version(version), prereleases=True)
        except InvalidVersion:
            return False


@dataclass(frozen=True)
class Installed:
    """A package of this environment: its version and what it requires."""

    version: str
    requires: tuple[str, ...]


def packages_needed(facts: Facts | None = None) -> dict[str, Wanted]:
    """What a host needs besides torch and taas-magic; without facts, on any Linux host."""
    environment = environment_of(facts) if facts and facts.system else {"sys_platform": "linux"}
    with _parsing:
        return wanted(_installed(), environment=environment)


@lru_cache(maxsize=1)
def _installed() -> dict[str, Installed]:
    return installed_here(Requirement(text).name for text in DIRECT)


def installed_here(names: Iterable[str]) -> dict[str, Installed]:
    """Those of the packages that this environment has, with all that they require in turn.

    What only extras require is left out.
    """
    found: dict[str, Installed] = {}
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            known = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        needs = tuple(text for text in known.requires or () if "extra ==" not in text)
        found[name] = Installed(known.version, needs)
        waiting += [canonicalize_name(Requirement(text).name) for text in needs]
    return found


def wanted(
    installed: Mapping[str, Installed],
    direct: Iterable[str] = DIRECT,
    environment: Mapping[str, str] | None = None,
    never: Collection[str] = NEVER,
) -> dict[str, Wanted]:
    """The packages that a host needs, by name.

    Args:
        installed: What is here, by canonical name.
        direct: What we need ourselves.
        environment: What differs there of the environment that requirements' markers speak of.
        never: What is left out, with all that it alone requires.
    """
    there: dict[str, Any] = {"extra": "", **(environment or {})}
    found: dict[str, SpecifierSet] = {}
    met: set[str] = set()
    waiting = [Requirement(text) for text in direct]
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if name in never or (one.marker is not None and not one.marker.evaluate(there)):
            continue
        found[name] = found.get(name, SpecifierSet()) & one.specifier
        if name in installed and name not in met:
            met.add(name)
            waiting += map(Requirement, installed[name].requires)
    return {name: _wanted(name, installed, found[name]) for name in sorted(found)}


def _wanted(name: str, installed: Mapping[str, Installed], allowed: SpecifierSet) -> Wanted:
    version = installed[name].version if name in installed else ""
    if name in AS_HERE and version:
        allowed = SpecifierSet(f"=={version}")
    return Wanted(name, version, allowed)


def environment_of(facts: Facts) -> dict[str, str]:
    """What a host's answers say of the markers' environment; its Python is as ours."""
    return {
        "os_name": "posix",
        "sys_platform": facts.system.lower(),
        "platform_system": facts.system,
        "platform_machine": facts.machine,
    }


def lacking(needs: Mapping[str, Wanted], facts: Facts) -> tuple[Wanted, ...]:
    """What is not there, or not in a version that would do."""
    return tuple(
        each for name, each in needs.items() if not each.is_met_by(facts.versions.get(name, ""))
    )
