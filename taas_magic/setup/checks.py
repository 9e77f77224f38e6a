"""Whether hosts are fit for a run, found out before it starts.

`judge` is pure: a host's facts against what a run needs -> findings, each with what to do. `check`
asks all hosts of pools, side by side.
"""

import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from taas_magic.config import PoolConfig
from taas_magic.errors import PoolError, TaasError
from taas_magic.setup.facts import Facts, Kernel, Shell, ask_host, minor, of_this_machine
from taas_magic.setup.requirements import Wanted, lacking, packages_needed

ERROR, WARNING, REMARK = "error", "warning", "remark"

FULL_BYTES = 256 * 1024**2
"""With less than this the host's cache holds neither our packages nor a run."""

LOW_BYTES = 2 * 1024**3
CLOCK_S = 60.0
_LOOPBACK = ("127.", "::1")

MAX_AT_ONCE = 64

Ways = Mapping[str, AbstractContextManager[Shell]]


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


@dataclass(frozen=True)
class Needs:
    """What is asked of a host beyond a Python and torch like the kernel's.

    Attributes:
        gpus: CUDA devices that the pool promises; None promises nothing.
        interface: The interface that ranks are to use; None finds one.
        packages: What the host side of taas-magic needs.
    """

    gpus: int | None = None
    interface: str | None = None
    packages: Mapping[str, Wanted] = field(default_factory=dict)


def judge(facts: Facts, here: Kernel, needs: Needs) -> list[Finding]:
    """All findings on a host, errors first."""
    if facts.python_minor != here.python_minor or not facts.system:
        return [_other_python(facts, here)]  # all else was seen with the wrong interpreter
    found = [
        *_platform(facts),
        *_torch(facts, here),
        *_modules(facts),
        *_disk(facts),
        *_interface(facts, needs),
        *_gpus(facts, needs),
        *_clock(facts),
        *_replaced(facts, needs),
        *_own_name(facts),
    ]
    return sorted(found, key=lambda finding: (ERROR, WARNING, REMARK).index(finding.level))


def refuse(all_facts: Iterable[Facts], here: Kernel, needs: Needs) -> None:
    """Refuses hosts that cannot carry a run.

    Raises:
        PoolError: Names each such host, with all that is wrong there and what to do.
    """
    lines = [
        f"host {facts.host}: {finding}"
        for facts in all_facts
        for finding in judge(facts, here, needs)
        if finding.level == ERROR
    ]
    if lines:
        raise PoolError("\n".join(lines))


def _other_python(facts: Facts, here: Kernel) -> Finding:
    return Finding(
        ERROR,
        f"Python {facts.python} there, {here.python} in this kernel: what is pickled here cannot "
        "be read there",
        f'Name a Python {here.python_minor} of that host (python = "…" in the pool\'s table), '
        f"or use a kernel with Python {facts.python_minor}",
    )


def _platform(facts: Facts) -> list[Finding]:
    if facts.system != "Linux" or facts.implementation != "cpython":
        what = f"it runs {facts.implementation} on {facts.system}"
        return [Finding(ERROR, what, "Hosts need CPython on Linux")]
    return []


def _torch(facts: Facts, here: Kernel) -> list[Finding]:
    install = f"There: {facts.executable} -m pip install 'torch=={minor(here.torch)}.*'"
    if not facts.torch:
        return [Finding(ERROR, f"no torch for {facts.executable}", install)]
    if minor(facts.torch) != minor(here.torch):
        what = f"torch {facts.torch} there, {here.torch} in this kernel"
        return [Finding(ERROR, what, f"{install}, or install torch {minor(facts.torch)} here")]
    return []


def _modules(facts: Facts) -> list[Finding]:
    if not facts.missing:
        return []
    plural = "s" if len(facts.missing) > 1 else ""
    what = f"module{plural} {', '.join(facts.missing)} that the cell imports: not installed there"
    install = f"There: {facts.executable} -m pip install {' '.join(facts.missing)}"
    return [Finding(ERROR, what, f"{install} (packages may have other names than their modules)")]


def _disk(facts: Facts) -> list[Finding]:
    free = f"{facts.free_bytes / 1024**3:.1f} GiB free at {facts.cache}"
    move = "Free some, or set XDG_CACHE_HOME there to a folder on another disk"
    if facts.cache_error:
        return [Finding(ERROR, f"{facts.cache} cannot be written: {facts.cache_error}", move)]
    if facts.free_bytes < FULL_BYTES:
        return [Finding(ERROR, free, move)]
    return [Finding(WARNING, f"only {free}", move)] if facts.free_bytes < LOW_BYTES else []


def _interface(facts: Facts, needs: Needs) -> list[Finding]:
    if needs.interface is None or needs.interface in facts.interfaces:
        return []
    names = ", ".join(facts.interfaces) or "none"
    what = f"no interface {needs.interface!r} with an address there; it has {names}"
    return [Finding(ERROR, what, 'Change interface = "…" in the pool\'s table, or leave it out')]


def _gpus(facts: Facts, needs: Needs) -> list[Finding]:
    found = []
    if needs.gpus is not None and facts.gpus < needs.gpus:
        what = f"{facts.gpus} GPUs there, gpus = {needs.gpus} in taas.toml"
        found.append(Finding(WARNING, what, "Ranks without one run on the CPU: correct the number"))
    if facts.gpus and facts.torch and not facts.cuda:
        what = f"torch {facts.torch} there was built without CUDA: its {facts.gpus} GPUs stay idle"
        found.append(Finding(WARNING, what, "Install torch's CUDA build there"))
    return found


def _clock(facts: Facts) -> list[Finding]:
    if abs(facts.ahead_s) <= CLOCK_S:
        return []
    side = "ahead of" if facts.ahead_s > 0 else "behind"
    what = f"its clock is {abs(facts.ahead_s):,.0f} s {side} this machine's"
    return [Finding(WARNING, what, "Runs do not mind; times in files will: set it, or use NTP")]


def _replaced(facts: Facts, needs: Needs) -> list[Finding]:
    """Packages of the host's environment that ours will come before on `sys.path`."""
    other = [
        f"{each.name} {facts.versions[each.name]} (here {each.version})"
        for each in lacking(needs.packages, facts)
        if facts.versions.get(each.name)
    ]
    if not other:
        return []
    what = f"other versions than taas-magic needs: {', '.join(other)}"
    return [Finding(WARNING, what, "Ranks will see those of here; install them there to choose")]


def _own_name(facts: Facts) -> list[Finding]:
    if not facts.own_addresses:
        what = f"its own name {facts.hostname} resolves to nothing there"
    elif all(address.startswith(_LOOPBACK) for address in facts.own_addresses):
        what = f"its own name {facts.hostname} resolves to {facts.own_addresses[0]} there"
    else:
        return []
    return [Finding(REMARK, f"{what}; nothing to do: ranks are told their interface")]


def interface_of(facts: Facts, needs: Needs) -> str:
    """The interface that ranks will use, as far as it is known before they start."""
    return needs.interface or facts.interface_of(facts.reached_at)


@dataclass(frozen=True)
class Row:
    """One host of a pool, or why it could not be asked.

    Attributes:
        pool: The pool's name.
        host: The host as the user calls it; "" for a pool none of whose hosts can be asked.
        facts: What it is like; None where it did not say.
        findings: What is not as it should be.
        means: What holds its ranks off the project store, where its agent is up.
    """

    pool: str
    host: str
    facts: Facts | None
    findings: tuple[Finding, ...]
    means: str = ""

    @property
    def is_fit(self) -> bool:
        """Whether a run may use it."""
        return not any(finding.level == ERROR for finding in self.findings)


def needs_of(pool: PoolConfig) -> Needs:
    """What a pool's settings promise of its hosts."""
    return Needs(pool.gpus, pool.interface, packages_needed())


def check(
    pools: Iterable[PoolConfig],
    ways: Callable[[PoolConfig, threading.Event], Ways],
    here: Kernel,
) -> list[Row]:
    """Asks the hosts of pools, all at the same time. May be interrupted at any moment.

    Args:
        pools: The pools.
        ways: From a pool to the ways to its hosts, which are opened here and given up when the
            event is set; none for hosts that are not there until a run takes them.
        here: What hosts must agree with.

    Returns:
        A row for each host, in the order of the pools and their hosts.
    """
    stop = threading.Event()
    executor = ThreadPoolExecutor(MAX_AT_ONCE, "taas-check")
    try:
        asked = [
            executor.submit(work)
            for pool in pools
            for work in _questions(pool, ways(pool, stop), here)
        ]
        return [row.result() for row in asked]
    finally:
        stop.set()
        executor.shutdown(wait=False, cancel_futures=True)


def _questions(pool: PoolConfig, ways: Ways, here: Kernel) -> list[Callable[[], Row]]:
    if pool.engine == "local":
        return [partial(_ask_this_machine, pool, here)]
    return [partial(_ask, pool, here, name, way) for name, way in ways.items()]


def _ask_this_machine(pool: PoolConfig, here: Kernel) -> Row:
    facts = of_this_machine(socket.gethostname(), packages_needed(), mark=here.mark)
    return judged(pool, facts, here)


def _ask(pool: PoolConfig, here: Kernel, host: str, way: AbstractContextManager[Shell]) -> Row:
    try:
        with way as shell:
            facts = ask_host(shell, pool.python, packages_needed(), mark=here.mark)
    except TaasError as error:
        what = str(error).removeprefix(f"host {host}: ")
        return Row(pool.name, host, None, (Finding(ERROR, what),))
    return judged(pool, facts, here)


def judged(pool: PoolConfig, facts: Facts, here: Kernel, means: str = "") -> Row:
    """The row of a host that has said what it is like."""
    found = judge(facts, here, needs_of(pool))
    return Row(pool.name, facts.host, facts, tuple(found), means)
