"""Ask hosts for facts before taas-magic runs there, and find problems in the facts.

Facts are, for example, versions, the number of GPUs and the free disk space.

The program `probe.py` is sent as text to the standard input of the host's own Python and returns
the facts.

Kernels and pools import this module when they start, so it must load fast. It imports only
`packaging.version`, because the other modules of `packaging` take 30 ms.
"""

import errno
import importlib.metadata
import json
import os
import platform
import re
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from taas_magic.messages import HostFacts, from_json

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

DEFAULT_PYTHON = "python3"
PROBE_TIMEOUT_S = 30.0
MARK = "taas-magic says: "
"""Prefix of the output line that has the probe's result. A login script may print other lines."""

MIN_FREE_BYTES = 256 * 1024**2
"""Minimum free bytes on the disk of a host's cache folder. With fewer, no run can use the host."""

LOW_FREE_BYTES = 2 * 1024**3
"""Free bytes on the disk of a host's cache folder below which a check of the host warns."""

CLOCK_TOLERANCE_S = 60.0
"""Seconds by which the clocks of a host and this machine may differ without a warning."""

MAX_AT_ONCE = 64
"""Maximum number of hosts that `check_hosts` asks at the same time."""

_TAIL_LINES = 5


class CommandResult(NamedTuple):
    """The result of a command: exit code, standard output, standard error."""

    code: int
    out: bytes
    err: bytes


class Shell(Protocol):
    """An open connection to a host, with methods that run commands and write files on the host.

    Each method blocks until it is done. On failure, it raises a `PoolError` that names the host.
    """

    host: str

    def run(self, command: str, data: bytes = b"", timeout_s: float = 60.0) -> CommandResult:
        """Run a command in the user's shell on the host, and wait until the command ends.

        Args:
            data: Standard input of the command.
            timeout_s: Maximum seconds without output of the command; then raise PoolError.
        """

    def put(self, data: bytes, path: str) -> None:
        """Write `data` to the file `path` on the host. The file's folder must exist.

        Only the user can read the file.
        """


def python_word(python: str | None) -> str:
    """Return the path of an interpreter, quoted as one word of a shell command.

    A leading `~/` or `~user/` is not quoted, so the host's shell expands it. None means `python3`.
    """
    text = python or DEFAULT_PYTHON
    home, slash, rest = text.partition("/")
    if slash and re.fullmatch(r"~[\w.-]*", home):
        return f"{home}/{shlex.quote(rest)}"
    return shlex.quote(text)


def call_probe(
    shell: Shell,
    python: str | None,
    function: str,
    arguments: Mapping[str, object],
    timeout_s: float,
) -> bytes:
    """Call a function of `probe` in the host's own Python; return the function's result as JSON.

    This function sends a program to the standard input of the host's Python. The program contains
    the source code of `probe`, so taas-magic need not be installed on the host. The program prints
    the result in a line that begins with `MARK`.

    Args:
        python: The interpreter on the host; None means `python3`.
        function: Name of the function.
        arguments: Keyword arguments of the function, as values for JSON.
        timeout_s: Maximum seconds without output of the program.

    Raises:
        PoolError: The interpreter does not exist, the program printed no result, or the connection
            to the host failed.
    """
    done = shell.run(f"{python_word(python)} -", _probe_program(function, arguments), timeout_s)
    for line in reversed(done.out.decode(errors="replace").splitlines()):
        if line.startswith(MARK):
            return line[len(MARK) :].encode()
    if done.code in (126, 127):
        what = (
            f"there is no Python {python or DEFAULT_PYTHON!r} there; name one: "
            'python = "…" in the pool\'s table'
        )
    else:
        what = f"{python or DEFAULT_PYTHON!r} did not run a test program (exit code {done.code})"
    lines = done.err.decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
    raise PoolError("\n".join([f"host {shell.host}: {what}", *(f"    {line}" for line in lines)]))


def _probe_program(function: str, arguments: Mapping[str, object]) -> bytes:
    """Return the source code of a program that calls a function of `probe`.

    The program begins a new line, because the last line of a login script may lack its newline.
    There it prints `MARK` and the function's result as JSON. Every Python since 2.6 can run the
    program. A Python before 3.8 is too old for `probe`. There, the program prints a dict with only
    the version of Python.
    """
    source = Path(probe.__file__).read_text(encoding="utf-8")
    lines = [
        "import sys",
        "sys.path[:] = [entry for entry in sys.path if entry]",  # no modules of the home folder
        "import json",
        f"source, asked = json.loads({json.dumps(json.dumps([source, arguments]))})",
        "if sys.version_info < (3, 8):",
        "    answer = {'python': '.'.join(map(str, sys.version_info[:3]))}",
        "else:",
        "    names = {'__name__': 'taas_probe'}",
        "    exec(compile(source, 'taas_probe', 'exec'), names)",
        f"    answer = names[{function!r}](**asked)",
        f"sys.stdout.write('\\n' + {json.dumps(MARK)} + json.dumps(answer) + '\\n')",
    ]
    return "\n".join(lines).encode("ascii") + b"\n"


class KernelVersions(Struct, frozen=True):
    """Versions of Python, torch and taas-magic in this process, which a host must match.

    Attributes:
        taas_digest: Digest of taas-magic's own files.
    """

    python: str
    torch: str
    taas_digest: str


def major_minor(version: str) -> str:
    """Return the major and minor number of a version: `2.13` for `2.13.0+cpu`, "" for ""."""
    return ".".join(version.split("+")[0].split(".")[:2])


@lru_cache(maxsize=1)
def this_kernel() -> KernelVersions:
    """Return the versions of Python, torch and taas-magic here, without importing torch."""
    ours = probe.digest(probe.package_files(str(Path(__file__).parent.parent)))
    return KernelVersions(platform.python_version(), importlib.metadata.version("torch"), ours)


def collect_local_facts(
    host: str, packages: Iterable[str] = (), mark: str = "", modules: Iterable[str] = ()
) -> HostFacts:
    """Return the facts of this machine and this Python.

    Args:
        host: Name of this machine, for the result.
        packages: Distributions whose versions are reported.
        mark: Path of a file in the project store, to find out whether this process shares the
            store; "" skips this check.
        modules: Top-level modules to check; the result has the missing ones.
    """
    facts = msgspec.convert(probe.main(tuple(packages), tuple(modules), mark), HostFacts)
    return structs.replace(facts, host=host)


def ask_host(
    shell: Shell,
    python: str | None,
    packages: Iterable[str] = (),
    modules: Iterable[str] = (),
    mark: str = "",
) -> HostFacts:
    """Return the facts of a host. The host needs only a Python, not taas-magic.

    Args:
        python: The interpreter on the host; None means `python3`.
        packages: Distributions whose versions are reported.
        modules: Top-level modules to check; the result has the missing ones.
        mark: Path of a file in the project store, to find out whether the host shares the store; ""
            skips this check.

    Raises:
        PoolError: The interpreter does not exist or does not work, or the host does not respond.
    """
    arguments = {"packages": sorted(packages), "modules": sorted(modules), "mark": mark}
    begin = time.time()
    output = call_probe(shell, python, probe.main.__name__, arguments, PROBE_TIMEOUT_S)
    return from_json(output, HostFacts).with_host(shell.host, begin)


@dataclass(frozen=True)
class RequiredPackage:
    """A package that a host needs to run taas-magic.

    Attributes:
        version: The version that is installed on this machine; "" if it is not installed.
        allowed: Versions that the host may have.
    """

    name: str
    version: str
    allowed: "SpecifierSet"

    @property
    def pin(self) -> str:
        """Requirement for pip: this machine's version, such as `zict==3.0.0`.

        If the package is not installed here, the requirement is any version in `allowed`.
        """
        return f"{self.name}=={self.version}" if self.version else f"{self.name}{self.allowed}"

    def is_met_by(self, version: str) -> bool:
        """Return whether a version is allowed; False for "", the version of a missing package."""
        try:
            return bool(version) and self.allowed.contains(Version(version), prereleases=True)
        except InvalidVersion:
            return False


def find_missing_packages(
    needs: Mapping[str, RequiredPackage], facts: HostFacts
) -> tuple[RequiredPackage, ...]:
    """Return the packages in `needs` that the host lacks, or has in a version that is not allowed.

    Args:
        needs: Packages that the host needs, by name.
    """
    return tuple(
        each for name, each in needs.items() if not each.is_met_by(facts.versions.get(name, ""))
    )


ERROR, WARNING, REMARK = "error", "warning", "remark"


@dataclass(frozen=True)
class HostProblem:
    """One problem of a host.

    Attributes:
        level: ERROR if no run can use the host. WARNING if runs can use the host, but the user
            should mend something. REMARK if the user need not act.
        what: Text that describes the problem.
        todo: Text that says what to do; "" if nothing needs to be done.
    """

    level: str
    what: str
    todo: str = ""

    def __str__(self) -> str:
        return f"{self.what}. {self.todo}" if self.todo else self.what


def find_problems(
    facts: HostFacts,
    here: KernelVersions,
    gpus: int | None = None,
    interface: str | None = None,
    packages: Mapping[str, RequiredPackage] = MappingProxyType({}),
) -> list[HostProblem]:
    """Return all problems of a host, errors first; empty if there are none.

    If the host's Python has another minor version than this Python, return only an error about
    Python, because all other facts describe the wrong interpreter.

    Args:
        here: Versions that the host must match.
        gpus: Number of CUDA devices in taas.toml; None if taas.toml has none.
        interface: Network interface for ranks in taas.toml; None if taas.toml has none.
        packages: Packages that the host needs, by name.
    """
    if major_minor(facts.python) != major_minor(here.python) or not facts.system:
        return [_other_python_problem(facts, here)]
    found = [
        *_python_problems(facts, here),
        *_disk_problems(facts),
        *_network_problems(facts, interface),
        *_warnings(facts, gpus, packages),
    ]
    return sorted(found, key=lambda problem: (ERROR, WARNING, REMARK).index(problem.level))


def raise_if_unusable(all_facts: Iterable[HostFacts], here: KernelVersions) -> None:
    """Raise PoolError if at least one of the hosts cannot execute a run.

    The text lists all errors of all hosts, each with a remedy.

    Args:
        here: Versions that the hosts must match.
    """
    lines = [
        f"host {facts.host}: {problem}"
        for facts in all_facts
        for problem in find_problems(facts, here)
        if problem.level == ERROR
    ]
    if lines:
        raise PoolError("\n".join(lines))


def _other_python_problem(facts: HostFacts, here: KernelVersions) -> HostProblem:
    return HostProblem(
        ERROR,
        f"Python {facts.python} there, {here.python} in this kernel: they cannot exchange "
        "pickled objects",
        f'Name a Python {major_minor(here.python)} of that host (python = "…" in the '
        f"pool's table), or use a kernel with Python {major_minor(facts.python)}",
    )


def _python_problems(facts: HostFacts, here: KernelVersions) -> Iterator[HostProblem]:
    """Yield errors about the operating system, the Python implementation, torch, and modules.

    A host needs CPython on Linux, torch with the same minor version as here, and all modules that
    the cell, the functions that it uses and the project's files import.
    """
    if facts.system != "Linux" or facts.implementation != "cpython":
        what = f"it runs {facts.implementation} on {facts.system}"
        yield HostProblem(ERROR, what, "Hosts need CPython on Linux")
    pip = f"There: {facts.executable} -m pip install"
    if facts.is_managed:
        pip = (
            "The operating system manages this Python. Make a virtual environment there "
            f'({facts.executable} -m venv ~/venv), and write python = "~/venv/bin/python" in the '
            "pool's table. Then run there: ~/venv/bin/python -m pip install"
        )
    install = f"{pip} 'torch=={major_minor(here.torch)}.*'"
    if not facts.torch:
        yield HostProblem(ERROR, f"no torch for {facts.executable}", install)
    elif major_minor(facts.torch) != major_minor(here.torch):
        what = f"torch {facts.torch} there, {here.torch} in this kernel"
        yield HostProblem(
            ERROR, what, f"{install}, or install torch {major_minor(facts.torch)} here"
        )
    if facts.missing:
        plural = "s" if len(facts.missing) > 1 else ""
        names = ", ".join(facts.missing)
        yield HostProblem(
            ERROR,
            f"module{plural} {names} that the cell needs: not installed there",
            f"{pip} {' '.join(facts.missing)} (packages may have other names than their modules)",
        )


def _disk_problems(facts: HostFacts) -> Iterator[HostProblem]:
    """Yield at most one problem of taas-magic's cache folder on the host.

    This is an error if the folder is not writable or its disk is full, and a warning if its disk is
    nearly full.
    """
    free = f"{facts.free_bytes / 1024**3:.1f} GiB free at {facts.cache}"
    move = "Free some, or set XDG_CACHE_HOME there to a folder on another disk"
    if facts.cache_error:
        is_full = facts.cache_error in map(os.strerror, (errno.ENOSPC, errno.EDQUOT))
        allow = "Make it writable, or set XDG_CACHE_HOME there to another folder"
        what = f"{facts.cache} cannot be written: {facts.cache_error}"
        yield HostProblem(ERROR, what, move if is_full else allow)
    elif facts.free_bytes < MIN_FREE_BYTES:
        yield HostProblem(ERROR, free, move)
    elif facts.free_bytes < LOW_FREE_BYTES:
        yield HostProblem(WARNING, f"only {free}", move)


def _network_problems(facts: HostFacts, interface: str | None) -> Iterator[HostProblem]:
    """Yield an error if the host lacks the network interface that taas.toml names.

    Also yield a remark if the host's own name resolves to no address, or only to loopback
    addresses.

    Args:
        interface: Network interface for ranks in taas.toml; None if taas.toml has none.
    """
    if interface is not None and interface not in facts.interfaces:
        names = ", ".join(facts.interfaces) or "none"
        what = f"no interface {interface!r} with an address there; it has {names}"
        yield HostProblem(
            ERROR, what, 'Change interface = "…" in the pool\'s table, or leave it out'
        )
    own = facts.own_addresses
    if not own or all(address.startswith(("127.", "::1")) for address in own):
        what = f"its own name {facts.hostname} resolves to {own[0] if own else 'nothing'} there"
        yield HostProblem(REMARK, f"{what}; nothing to do: taas-magic gives ranks their interface")


def _warnings(
    facts: HostFacts, promised: int | None, packages: Mapping[str, RequiredPackage]
) -> Iterator[HostProblem]:
    """Yield warnings about problems that do not prevent a run.

    These are: fewer GPUs than in taas.toml, GPUs but a torch without CUDA, a wrong clock, and
    packages with other versions than taas-magic needs.

    Args:
        promised: Number of CUDA devices in taas.toml; None if taas.toml has none.
        packages: Packages that the host needs, by name.
    """
    if promised is not None and facts.gpus < promised:
        what = f"{facts.gpus} GPUs there, gpus = {promised} in taas.toml"
        yield HostProblem(WARNING, what, "Ranks without one run on the CPU: correct the number")
    if facts.gpus and facts.torch and not facts.cuda:
        what = f"torch {facts.torch} there was built without CUDA: its {facts.gpus} GPUs stay idle"
        yield HostProblem(WARNING, what, "Install torch's CUDA build there")
    if abs(facts.ahead_s) > CLOCK_TOLERANCE_S:
        side = "ahead of" if facts.ahead_s > 0 else "behind"
        what = f"its clock is {abs(facts.ahead_s):,.0f} s {side} this machine's"
        yield HostProblem(
            WARNING, what, "Runs work, but times of files are wrong: set it, or use NTP"
        )
    other = [  # packages of the host that this machine's versions will replace on `sys.path`
        f"{each.name} {facts.versions[each.name]} (here {each.version})"
        for each in find_missing_packages(packages, facts)
        if facts.versions.get(each.name)
    ]
    if other:
        what = f"its packages have other versions than taas-magic needs: {', '.join(other)}"
        yield HostProblem(
            WARNING,
            what,
            "Ranks use this machine's versions, which taas-magic installs there in a separate "
            "folder. To avoid this, install these versions there yourself",
        )


@dataclass(frozen=True)
class HostCheck:
    """The result of checking one host of a pool.

    Attributes:
        host: Name of the host, as shown to the user; "" if the pool has no host that is up.
        facts: The facts of the host; None if the host did not answer.
        problems: Problems of the host, errors first.
    """

    pool: str
    host: str
    facts: HostFacts | None
    problems: tuple[HostProblem, ...]

    @property
    def is_fit(self) -> bool:
        """Whether a run may use the host."""
        return not any(problem.level == ERROR for problem in self.problems)


Shells = Mapping[str, AbstractContextManager[Shell]]
"""For each host of a pool, by name: a context manager that connects to the host as a `Shell`."""


def check_hosts(
    pools: Iterable[PoolConfig],
    shells: Callable[[PoolConfig, threading.Event], Shells],
    here: KernelVersions,
    packages: Mapping[str, RequiredPackage],
    mark: str = "",
    modules: Sequence[str] = (),
) -> list[HostCheck]:
    """Check the hosts of pools in parallel. KeyboardInterrupt ends the call at any time.

    A host that cannot be reached has one error, and no facts. For a local pool, check this machine.

    Args:
        shells: Function that returns the context managers that connect to the hosts of a pool, such
            as `Engine.shells`. The second argument is an event that `check_hosts` sets before it
            returns. If the event is set, a context manager that is still connecting must give up.
        here: Versions that the hosts must match.
        packages: Packages that a host needs, by name.
        mark: Path of a file in the project store, to find out whether a host shares the store; ""
            skips this check.
        modules: Top-level modules that a host must have.

    Returns:
        A `HostCheck` for each host, in the order of the pools and their hosts.
    """

    def ask_one(
        pool: PoolConfig, host: str, opening: AbstractContextManager[Shell] | None
    ) -> HostCheck:
        """Connect to one host, ask for its facts, and check the facts.

        If a step fails, return a `HostCheck` with one error and no facts.

        Args:
            opening: Context manager that connects to the host; None for this machine.
        """
        try:
            if opening is None:
                facts = collect_local_facts(host, packages, mark, modules)
            else:
                with opening as shell:
                    facts = ask_host(shell, pool.python, packages, modules, mark)
        except TaasError as error:
            what = str(error).removeprefix(f"host {host}: ")
            return HostCheck(pool.name, host, None, (HostProblem(ERROR, what),))
        return check_host_facts(pool, facts, here, packages)

    stop = threading.Event()
    executor = ThreadPoolExecutor(MAX_AT_ONCE, "taas-check")
    rows = []
    try:
        for pool in pools:
            if pool.engine == "local":
                rows.append(executor.submit(ask_one, pool, socket.gethostname(), None))
            for host, opening in shells(pool, stop).items():
                rows.append(executor.submit(ask_one, pool, host, opening))
        return [row.result() for row in rows]
    finally:
        stop.set()
        executor.shutdown(wait=False, cancel_futures=True)


def check_host_facts(
    pool: PoolConfig,
    facts: HostFacts,
    here: KernelVersions,
    packages: Mapping[str, RequiredPackage],
) -> HostCheck:
    """Find the problems in a host's facts, and return the facts and problems as a `HostCheck`.

    Args:
        pool: Settings of the host's pool, such as the number of GPUs.
        here: Versions that the host must match.
        packages: Packages that the host needs, by name.
    """
    found = find_problems(facts, here, pool.gpus, pool.interface, packages)
    return HostCheck(pool.name, facts.host, facts, tuple(found))
