"""What is known of a host before anything of ours runs there, and how it is asked.

Programs go to the host as text, on the standard input of its own Python. A `Shell` is what is
needed of a way to a host; engines have the ways.
"""

import importlib.metadata
import json
import platform
import re
import shlex
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from msgspec import Struct, structs

from taas_magic import probe
from taas_magic.errors import PoolError
from taas_magic.messages import unpack

DEFAULT_PYTHON = "python3"
MARK = "taas-magic says: "
"""Before our answer, because a login script of the host may print whatever it likes."""

_TAIL_LINES = 5


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: bytes
    err: bytes


class Shell(Protocol):
    """A way to one host. Calls block; a `PoolError` from either names the host.

    Attributes:
        host: The host as the user calls it.
    """

    @property
    def host(self) -> str: ...

    def run(self, command: str, data: bytes = b"", timeout_s: float = 60.0) -> Done:
        """Runs a command in the user's shell there; `data` is its standard input."""

    def put(self, data: bytes, path: str) -> None:
        """Writes a file there, for the user alone; its folder exists."""


def python_word(python: str | None) -> str:
    """An interpreter as a word of a command line; the host's shell expands a leading `~`."""
    text = python or DEFAULT_PYTHON
    home, slash, rest = text.partition("/")
    if slash and re.fullmatch(r"~[\w.-]*", home):
        return f"{home}/{shlex.quote(rest)}"
    return shlex.quote(text)


def ask(
    shell: Shell, python: str | None, program: Path, asked: Mapping[str, object], timeout_s: float
) -> bytes:
    """Runs one of our programs with the host's Python; returns what its `main` answers, packed.

    Args:
        shell: The way to the host.
        python: The interpreter there; None is `python3`.
        program: A module of ours with a function `main`, which needs nothing but Python 3.8.
        asked: Keyword arguments of `main`, plain JSON values.
        timeout_s: How long it may take.

    Raises:
        PoolError: There is no such interpreter, or the program failed.
    """
    text = _text(program.read_text(encoding="utf-8"), asked)
    done = shell.run(f"{python_word(python)} -", text, timeout_s)
    for line in reversed(done.out.decode(errors="replace").splitlines()):
        if line.startswith(MARK):
            return line[len(MARK) :].encode()
    raise PoolError(_why(shell.host, python or DEFAULT_PYTHON, done))


def _text(source: str, asked: Mapping[str, object]) -> bytes:
    """A program that every Python since 2.6 can read, so that an old one can say that it is."""
    lines = [
        "import sys",
        "sys.path[:] = [entry for entry in sys.path if entry]",  # not the home folder's modules
        "import json",
        f"source, asked = json.loads({json.dumps(json.dumps([source, asked]))})",
        "if sys.version_info < (3, 8):",
        "    answer = {'python': '.'.join(map(str, sys.version_info[:3]))}",
        "else:",
        "    names = {'__name__': 'taas_probe'}",
        "    exec(compile(source, 'taas_probe', 'exec'), names)",
        "    answer = names['main'](**asked)",
        f"sys.stdout.write({json.dumps(MARK)} + json.dumps(answer) + '\\n')",
    ]
    return "\n".join(lines).encode("ascii") + b"\n"


def _why(host: str, python: str, done: Done) -> str:
    said = done.err.decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
    if done.code == 127 or done.code == 126:
        what = f'there is no Python {python!r} there; name one: python = "…" in the pool\'s table'
    else:
        what = f"{python!r} did not run our program (exit code {done.code})"
    return "\n".join([f"host {host}: {what}", *(f"    {line}" for line in said)])


PROBE_TIMEOUT_S = 30.0


class Facts(Struct, frozen=True):
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

    host: str = ""
    python: str = ""
    implementation: str = ""
    executable: str = ""
    system: str = ""
    machine: str = ""
    glibc: str = ""
    torch: str = ""
    cuda: str = ""
    versions: Mapping[str, str] = {}
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
    interfaces: Mapping[str, tuple[str, ...]] = {}
    python_path: tuple[str, ...] = ()
    reached_at: str = ""
    sees_store: bool = False

    def of(self, host: str, began: float) -> "Facts":
        """What the probe answered; what it does not say (an old Python says little) is empty.

        Args:
            host: Who answered just now.
            began: When it was asked, by this machine's clock.
        """
        ahead_s = self.clock - (began + time.time()) / 2 if self.clock else 0.0
        return structs.replace(self, host=host, ahead_s=ahead_s)

    @property
    def python_minor(self) -> str:
        """`3.11` of `3.11.7`."""
        return minor(self.python)

    def interface_of(self, address: str) -> str:
        """The interface that has an address; "" for none."""
        return next((name for name, seen in self.interfaces.items() if address in seen), "")


class HostFacts(Struct):
    """A host of a pool that is up, and what holds its ranks off the project store."""

    facts: Facts
    means: str


class Kernel(Struct, frozen=True):
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
    facts = msgspec.convert(probe.main(tuple(packages), (), mark), Facts)
    return structs.replace(facts, host=host)


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
    said = ask(shell, python, Path(probe.__file__), asked, PROBE_TIMEOUT_S)
    return unpack(said, Facts).of(shell.host, begin)
