"""What hosts are like before anything of ours runs there, and what is wrong with them.

A host is asked by a program (`probe.py`) that goes as text to the standard input of its own Python.
`judge` is pure: a host's facts against what a run needs -> findings, each with what to do. `check`
asks all hosts of pools, side by side. Kernels and pools import this at their start: what takes
30 ms to import, most of `packaging`, is left to install.py.
"""

import importlib.metadata
import json
import platform
import re
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
from msgspec import Struct, structs
from packaging.version import InvalidVersion, Version

from taas_magic import probe
from taas_magic.config import PoolConfig
from taas_magic.errors import PoolError, TaasError
from taas_magic.messages import Facts, unpack

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

DEFAULT_PYTHON = "python3"
PROBE_TIMEOUT_S = 30.0
MARK = "taas-magic says: "
"""Before our answer, because a login script of the host may print whatever it likes."""

FULL_BYTES = 256 * 1024**2
"""With less than this the host's cache holds neither our packages nor a run."""

LOW_BYTES = 2 * 1024**3
CLOCK_S = 60.0
MAX_AT_ONCE = 64
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

    host: str

    def run(self, command: str, data: bytes = b"", timeout_s: float = 60.0) -> Done:
        """Run a command in the user's shell there; `data` is its standard input."""

    def put(self, data: bytes, path: str) -> None:
        """Write a file there, for the user alone; its folder exists."""


def python_word(python: str | None) -> str:
    """Return an interpreter as a word of a command line; the host's shell expands a leading `~`."""
    text = python or DEFAULT_PYTHON
    home, slash, rest = text.partition("/")
    if slash and re.fullmatch(r"~[\w.-]*", home):
        return f"{home}/{shlex.quote(rest)}"
    return shlex.quote(text)


def ask(
    shell: Shell, python: str | None, function: str, asked: Mapping[str, object], timeout_s: float
) -> bytes:
    """Call a function of `probe` with the host's own Python; returns what it returns, as JSON.

    Args:
        python: The interpreter there; None is `python3`.
        asked: Its keyword arguments, plain JSON values.

    Raises:
        PoolError: There is no such interpreter, or the program failed.
    """
    done = shell.run(f"{python_word(python)} -", _program(function, asked), timeout_s)
    for line in reversed(done.out.decode(errors="replace").splitlines()):
        if line.startswith(MARK):
            return line[len(MARK) :].encode()
    if done.code in (126, 127):
        what = (
            f"there is no Python {python or DEFAULT_PYTHON!r} there; name one: "
            'python = "…" in the pool\'s table'
        )
    else:
        what = f"{python or DEFAULT_PYTHON!r} did not run our program (exit code {done.code})"
    said = done.err.decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
    raise PoolError("\n".join([f"host {shell.host}: {what}", *(f"    {line}" for line in said)]))


def _program(function: str, asked: Mapping[str, object]) -> bytes:
    """Return a program that every Python since 2.6 can read, so that an old one can say so."""
    source = Path(probe.__file__).read_text(encoding="utf-8")
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
        f"    answer = names[{function!r}](**asked)",
        f"sys.stdout.write({json.dumps(MARK)} + json.dumps(answer) + '\\n')",
    ]
    return "\n".join(lines).encode("ascii") + b"\n"


class Kernel(Struct, frozen=True):
    """What hosts must agree with: the Python of this kernel or pool.

    Attributes:
        ours: Digest of taas-magic's files.
    """

    python: str
    torch: str
    ours: str


def minor(version: str) -> str:
    """Return `2.13` of a package's or Python's version such as `2.13.0+cpu`; "" of ""."""
    return ".".join(version.split("+")[0].split(".")[:2])


@lru_cache(maxsize=1)
def this_kernel() -> Kernel:
    """Return what the process that asks is like; torch is not imported."""
    ours = probe.digest(probe.package_files(str(Path(__file__).parent.parent)))
    return Kernel(platform.python_version(), importlib.metadata.version("torch"), ours)


def of_this_machine(host: str, packages: Iterable[str] = (), mark: str = "") -> Facts:
    """Return the facts of this very process's host and Python."""
    facts = msgspec.convert(probe.main(tuple(packages), (), mark), Facts)
    return structs.replace(facts, host=host)


def ask_host(
    shell: Shell,
    python: str | None,
    packages: Iterable[str] = (),
    modules: Iterable[str] = (),
    mark: str = "",
) -> Facts:
    """Ask a host, which needs a Python and nothing else.

    Args:
        python: The interpreter there; None is `python3`.
        packages: Distributions whose versions are wanted.
        modules: Top-level modules that must be there.
        mark: A file in the project store, as this machine calls it.

    Raises:
        PoolError: The interpreter is not there or does not work; names the host.
    """
    asked = {"packages": sorted(packages), "modules": sorted(modules), "mark": mark}
    begin = time.time()
    said = ask(shell, python, probe.main.__name__, asked, PROBE_TIMEOUT_S)
    return unpack(said, Facts).of(shell.host, begin)


@dataclass(frozen=True)
class Wanted:
    """A package that a host needs, by its canonical name.

    Attributes:
        version: The version that is installed here; "" where none is.
        allowed: The versions that would do.
    """

    name: str
    version: str
    allowed: "SpecifierSet"

    @property
    def pin(self) -> str:
        """What pip is asked for: the version of here, which is known to work with ours."""
        return f"{self.name}=={self.version}" if self.version else f"{self.name}{self.allowed}"

    def is_met_by(self, version: str) -> bool:
        """Return whether a version would do; "" is none."""
        try:
            return bool(version) and self.allowed.contains(Version(version), prereleases=True)
        except InvalidVersion:
            return False


def lacking(needs: Mapping[str, Wanted], facts: Facts) -> tuple[Wanted, ...]:
    """Return what is not there, or not in a version that would do."""
    return tuple(
        each for name, each in needs.items() if not each.is_met_by(facts.versions.get(name, ""))
    )


ERROR, WARNING, REMARK = "error", "warning", "remark"


@dataclass(frozen=True)
class Finding:
    """One thing about a host that is not as it should be.

    Attributes:
        level: An error refuses the run; a warning is said once; a remark only when asked.
        what: What was found, with both sides where two differ.
        todo: What to do about it; "" where nothing need be done.
    """

    level: str
    what: str
    todo: str = ""

    def __str__(self) -> str:
        return f"{self.what}. {self.todo}" if self.todo else self.what


def judge(
    facts: Facts,
    here: Kernel,
    gpus: int | None = None,
    interface: str | None = None,
    packages: Mapping[str, Wanted] = MappingProxyType({}),
) -> list[Finding]:
    """Return all findings on a host, errors first.

    Args:
        gpus: CUDA devices that the pool promises; None promises nothing.
        interface: The interface that ranks are to use; None finds one.
        packages: What the host side of taas-magic needs.
    """
    if minor(facts.python) != minor(here.python) or not facts.system:
        return [_other_python(facts, here)]  # all else was seen with the wrong interpreter
    found = [
        *_python(facts, here),
        *_disk(facts),
        *_network(facts, interface),
        *_warnings(facts, gpus, packages),
    ]
    return sorted(found, key=lambda finding: (ERROR, WARNING, REMARK).index(finding.level))


def refuse(all_facts: Iterable[Facts], here: Kernel) -> None:
    """Refuse hosts that cannot carry a run.

    Raises:
        PoolError: Names each such host, with all that is wrong there and what to do.
    """
    lines = [
        f"host {facts.host}: {finding}"
        for facts in all_facts
        for finding in judge(facts, here)
        if finding.level == ERROR
    ]
    if lines:
        raise PoolError("\n".join(lines))


def _other_python(facts: Facts, here: Kernel) -> Finding:
    return Finding(
        ERROR,
        f"Python {facts.python} there, {here.python} in this kernel: what is pickled here cannot "
        "be read there",
        f'Name a Python {minor(here.python)} of that host (python = "…" in the pool\'s table), '
        f"or use a kernel with Python {minor(facts.python)}",
    )


def _python(facts: Facts, here: Kernel) -> Iterator[Finding]:
    """Find a system or a Python that will not do, and modules that are missing."""
    if facts.system != "Linux" or facts.implementation != "cpython":
        what = f"it runs {facts.implementation} on {facts.system}"
        yield Finding(ERROR, what, "Hosts need CPython on Linux")
    pip = f"There: {facts.executable} -m pip install"
    install = f"{pip} 'torch=={minor(here.torch)}.*'"
    if not facts.torch:
        yield Finding(ERROR, f"no torch for {facts.executable}", install)
    elif minor(facts.torch) != minor(here.torch):
        what = f"torch {facts.torch} there, {here.torch} in this kernel"
        yield Finding(ERROR, what, f"{install}, or install torch {minor(facts.torch)} here")
    if facts.missing:
        plural = "s" if len(facts.missing) > 1 else ""
        names = ", ".join(facts.missing)
        yield Finding(
            ERROR,
            f"module{plural} {names} that the cell imports: not installed there",
            f"{pip} {' '.join(facts.missing)} (packages may have other names than their modules)",
        )


def _disk(facts: Facts) -> Iterator[Finding]:
    free = f"{facts.free_bytes / 1024**3:.1f} GiB free at {facts.cache}"
    move = "Free some, or set XDG_CACHE_HOME there to a folder on another disk"
    if facts.cache_error:
        yield Finding(ERROR, f"{facts.cache} cannot be written: {facts.cache_error}", move)
    elif facts.free_bytes < FULL_BYTES:
        yield Finding(ERROR, free, move)
    elif facts.free_bytes < LOW_BYTES:
        yield Finding(WARNING, f"only {free}", move)


def _network(facts: Facts, interface: str | None) -> Iterator[Finding]:
    if interface is not None and interface not in facts.interfaces:
        names = ", ".join(facts.interfaces) or "none"
        what = f"no interface {interface!r} with an address there; it has {names}"
        yield Finding(ERROR, what, 'Change interface = "…" in the pool\'s table, or leave it out')
    own = facts.own_addresses
    if not own or all(address.startswith(("127.", "::1")) for address in own):
        what = f"its own name {facts.hostname} resolves to {own[0] if own else 'nothing'} there"
        yield Finding(REMARK, f"{what}; nothing to do: ranks are told their interface")


def _warnings(
    facts: Facts, promised: int | None, packages: Mapping[str, Wanted]
) -> Iterator[Finding]:
    """Find what is not as it should be, though runs can do with it."""
    if promised is not None and facts.gpus < promised:
        what = f"{facts.gpus} GPUs there, gpus = {promised} in taas.toml"
        yield Finding(WARNING, what, "Ranks without one run on the CPU: correct the number")
    if facts.gpus and facts.torch and not facts.cuda:
        what = f"torch {facts.torch} there was built without CUDA: its {facts.gpus} GPUs stay idle"
        yield Finding(WARNING, what, "Install torch's CUDA build there")
    if abs(facts.ahead_s) > CLOCK_S:
        side = "ahead of" if facts.ahead_s > 0 else "behind"
        what = f"its clock is {abs(facts.ahead_s):,.0f} s {side} this machine's"
        yield Finding(WARNING, what, "Runs do not mind; times in files will: set it, or use NTP")
    other = [  # packages of the host's environment that ours will come before on `sys.path`
        f"{each.name} {facts.versions[each.name]} (here {each.version})"
        for each in lacking(packages, facts)
        if facts.versions.get(each.name)
    ]
    if other:
        what = f"other versions than taas-magic needs: {', '.join(other)}"
        yield Finding(WARNING, what, "Ranks will see those of here; install them there to choose")


@dataclass(frozen=True)
class Row:
    """One host of a pool, or why it could not be asked.

    Attributes:
        host: The host as the user calls it; "" for a pool none of whose hosts can be asked.
        facts: What it is like; None where it did not say.
    """

    pool: str
    host: str
    facts: Facts | None
    findings: tuple[Finding, ...]

    @property
    def is_fit(self) -> bool:
        """Whether a run may use it."""
        return not any(finding.level == ERROR for finding in self.findings)


Ways = Mapping[str, AbstractContextManager[Shell]]


def check(
    pools: Iterable[PoolConfig],
    ways: Callable[[PoolConfig, threading.Event], Ways],
    here: Kernel,
    packages: Mapping[str, Wanted],
    mark: str = "",
) -> list[Row]:
    """Ask the hosts of pools, all at the same time. May be interrupted at any moment.

    Args:
        ways: From a pool to the ways to its hosts, which are opened here and given up when the
            event is set; none for hosts that are not there until a run takes them.
        mark: A file in the project store by which hosts know it; "" asks nobody.

    Returns:
        A row for each host, in the order of the pools and their hosts.
    """

    def ask_one(pool: PoolConfig, host: str, way: AbstractContextManager[Shell] | None) -> Row:
        try:
            if way is None:
                facts = of_this_machine(host, packages, mark)
            else:
                with way as shell:
                    facts = ask_host(shell, pool.python, packages, mark=mark)
        except TaasError as error:
            what = str(error).removeprefix(f"host {host}: ")
            return Row(pool.name, host, None, (Finding(ERROR, what),))
        return judged(pool, facts, here, packages)

    stop = threading.Event()
    executor = ThreadPoolExecutor(MAX_AT_ONCE, "taas-check")
    asked = []
    try:
        for pool in pools:
            if pool.engine == "local":
                asked.append(executor.submit(ask_one, pool, socket.gethostname(), None))
            for host, way in ways(pool, stop).items():
                asked.append(executor.submit(ask_one, pool, host, way))
        return [row.result() for row in asked]
    finally:
        stop.set()
        executor.shutdown(wait=False, cancel_futures=True)


def judged(pool: PoolConfig, facts: Facts, here: Kernel, packages: Mapping[str, Wanted]) -> Row:
    """Return the row of a host that has said what it is like."""
    found = judge(facts, here, pool.gpus, pool.interface, packages)
    return Row(pool.name, facts.host, facts, tuple(found))
