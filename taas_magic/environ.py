"""What the notebook changed of its environment: that is what ranks on other machines take over.

The rest of a kernel's environment describes its own machine: where its programs and libraries lie,
which of its GPUs it may use. There the host's own holds.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

Changes = dict[str, str | None]
"""Variables by name; None for one that was removed."""


def changes(initial: bytes, now: Mapping[str, str]) -> Changes:
    """What of an environment is no longer as it was.

    Args:
        initial: As the process got it: `NAME=value` texts, each ended by a zero byte.
        now: As it is.
    """
    before = parsed(initial)
    changed: Changes = {name: v for name, v in now.items() if before.get(name) != v}
    return changed | {name: None for name in before if name not in now}


def parsed(initial: bytes) -> dict[str, str]:
    """An environment as a process got it, as /proc has it."""
    texts = (os.fsdecode(text).partition("=") for text in initial.split(b"\0") if text)
    return {name: value for name, _, value in texts}


def of_this_process() -> Changes:
    """What this process, and the user's code in it, changed since it was started."""
    initial = Path("/proc/self/environ")
    return changes(initial.read_bytes(), os.environ) if initial.exists() else {}


def applied(own: Mapping[str, str], changed: Mapping[str, str | None]) -> dict[str, str]:
    """Another environment with the same changes."""
    merged = {**own, **changed}
    return {name: value for name, value in merged.items() if value is not None}


def users_path(
    path: Iterable[str], prefixes: Iterable[str] = (sys.prefix, sys.base_prefix)
) -> list[str]:
    """Of an import path, what is neither of the interpreter nor of installed packages.

    Args:
        path: `sys.path`, absolute.
        prefixes: Where interpreter and packages lie.
    """
    folders = [os.path.join(prefix, "") for prefix in prefixes]
    packages = ("site-packages", "dist-packages")
    return [
        entry
        for entry in path
        if not any(os.path.join(entry, "").startswith(folder) for folder in folders)
        and not any(part in packages or part.endswith(".zip") for part in Path(entry).parts)
    ]
