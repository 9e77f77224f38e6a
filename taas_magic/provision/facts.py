"""What is known of a host before anything of ours runs there, and what this kernel is like."""

import importlib.metadata
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from taas_magic.provision import probe
from taas_magic.provision.shell import Shell, ask

PROBE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Facts:
    """One host, as its own Python saw it.

    Attributes:
        host: The host as the user calls it.
        python: Version of the interpreter that the pool names; all below is what that one finds.
        implementation: "cpython", "pypy", …
        executable: Its path.
        system: "Linux", …
        machine: "x86_64", "aarch64", …
        glibc: Version of the C library; "" where it is another one.
        torch: Version; "" where it is not installed.
        cuda: The CUDA version that torch was built for; "" for a CPU build.
        versions: Versions of the packages that were asked for and are there.
        ours: Digest of taas-magic's files; "" where it is not installed.
        missing: Those of the modules asked for that are not there.
        cache: Where taas-magic keeps things on the host.
        cache_error: Why nothing can be written there; "" if it can.
        free_bytes: What may still be written there.
        sites: Names of the folders of packages that we have put there.
        cores: Logical processors that a process may use.
        memory_bytes: Main memory.
        gpus: CUDA devices.
        gpu_names: What they are called, where that could be asked.
        clock: The host's wall clock, in seconds since 1970.
        ahead_s: How far that is ahead of this machine's clock.
        hostname: What it calls itself.
        own_addresses: What that name resolves to on the host itself.
        interfaces: Network interfaces with their addresses.
        python_path: What its PYTHONPATH is already.
        reached_at: The address at which SSH reached it; "" where it did not come by SSH.
        sees_store: Whether it shares the project store with the notebook.
    """

    host: str
    python: str
    implementation: str = ""
    executable: str = ""
    system: str = ""
    machine: str = ""
    glibc: str = ""
    torch: str = ""
    cuda: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    ours: str = ""
    missing: tuple[str, ...] = ()
    cache: str = ""
    cache_error: str = ""
    free_bytes: int = 0
    sites: tuple[str, ...] = ()
    cores: int = 0
    memory_bytes: int = 0
    gpus: int = 0
    gpu_names: tuple[str, ...] = ()
    clock: float = 0.0
    ahead_s: float = 0.0
    hostname: str = ""
    own_addresses: tuple[str, ...] = ()
    interfaces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    python_path: tuple[str, ...] = ()
    reached_at: str = ""
    sees_store: bool = False

    @classmethod
    def from_json(cls, host: str, values: Mapping[str, Any], ahead_s: float = 0.0) -> "Facts":
        """What the probe answered; what it does not say (an old Python says little) is empty."""
        known = {each.name for each in fields(cls)}
        said = {name: _frozen(value) for name, value in values.items() if name in known}
        return cls(**{"ahead_s": ahead_s, **said, "host": host})

    @property
    def python_minor(self) -> str:
        """`3.11` of `3.11.7`."""
        return minor(self.python)

    def interface_of(self, address: str) -> str:
        """The interface that has an address; "" for none."""
        return next((name for name, seen in self.interfaces.items() if address in seen), "")


@dataclass(frozen=True)
class Kernel:
    """What hosts must agree with: the Python of this kernel or pool.

    Attributes:
        python: Its version.
        torch: Its version of torch.
        ours: Digest of taas-magic's files.
        mark: A file in the project store by which hosts know it; "" asks nobody.
    """

    python: str
    torch: str
    ours: str
    mark: str = ""

    @property
    def python_minor(self) -> str:
        return minor(self.python)


def minor(version: str) -> str:
    """`2.13` of `2.13.0+cpu`; "" of ""."""
    return ".".join(version.split("+")[0].split(".")[:2])


def this_kernel(mark: str = "") -> Kernel:
    """The process that asks; torch is not imported.

    Args:
        mark: A file in the project store.
    """
    python, torch, ours = _this_python()
    return Kernel(python, torch, ours, mark)


@lru_cache(maxsize=1)
def _this_python() -> tuple[str, str, str]:
    folder = Path(__file__).parent.parent
    torch = importlib.metadata.version("torch")
    return platform.python_version(), torch, probe.digest(probe.package_files(str(folder)))


def of_this_machine(host: str, packages: Iterable[str] = (), mark: str = "") -> Facts:
    """The facts of this very process's host and Python."""
    return Facts.from_json(host, probe.main(tuple(packages), (), mark))


def ask_host(
    shell: Shell,
    python: str | None,
    packages: Iterable[str] = (),
    modules: Iterable[str] = (),
    mark: str = "",
) -> Facts:
    """Asks a host, which needs a Python and nothing else.

    Args:
        shell: The way to it.
        python: The interpreter there; None is `python3`.
        packages: Distributions whose versions are wanted.
        modules: Top-level modules that must be there.
        mark: A file in the project store, as this machine calls it.

    Raises:
        PoolError: The interpreter is not there or does not work; names the host.
    """
    asked = {"packages": sorted(packages), "modules": sorted(modules), "mark": mark}
    begin = time.time()
    values = ask(shell, python, Path(probe.__file__), asked, PROBE_TIMEOUT_S)
    ahead_s = float(values.get("clock", begin)) - (begin + time.time()) / 2
    return Facts.from_json(shell.host, values, ahead_s)


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return {name: _frozen(inner) for name, inner in value.items()}
    return value
