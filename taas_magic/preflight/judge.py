"""A host's facts against what a run needs -> findings, each with what to do. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from taas_magic.errors import PoolError
from taas_magic.provision.facts import Facts, Kernel, minor
from taas_magic.provision.requirements import Wanted, lacking

ERROR, WARNING, REMARK = "error", "warning", "remark"

FULL_BYTES = 256 * 1024**2
"""With less than this the host's cache holds neither our packages nor a run."""

LOW_BYTES = 2 * 1024**3
CLOCK_S = 60.0
_LOOPBACK = ("127.", "::1")


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
