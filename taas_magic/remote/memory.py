"""Whether the kernel killed a process because memory ran out (Linux; cgroup v1 and v2).

A process that the out-of-memory killer ends looks like any other SIGKILL. The kernel counts its
kills, per memory cgroup and for the whole system; a count that has risen tells.
"""

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def oom_kills(pid: int) -> dict[str, int]:
    """The kill counts that concern a process: of its memory cgroup, and of the system.

    Args:
        pid: A living process of this host.

    Returns:
        Count by file; empty where the kernel tells nothing.
    """
    files = [Path("/proc/vmstat"), *_cgroup_files(pid)]
    counts = {str(file): _count(file) for file in files}
    return {name: count for name, count in counts.items() if count is not None}


def has_risen(before: dict[str, int]) -> str:
    """The file whose count has risen since `before`, a cgroup's before the system's; else empty."""
    for name in sorted(before, key=lambda name: name == "/proc/vmstat"):
        now = _count(Path(name))
        if now is not None and now > before[name]:
            return name
    return ""


def explain(file: str) -> str:
    """Says which memory ran out, from the file that `has_risen` named; empty for none."""
    if not file:
        return ""
    if file == "/proc/vmstat":
        return "killed by the memory limit (the kernel's out-of-memory killer)"
    return f"killed by the memory limit of its cgroup ({Path(file).parent})"


def _cgroup_files(pid: int) -> list[Path]:
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files.append(_CGROUPS / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(_CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
    return files


def _count(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return None
