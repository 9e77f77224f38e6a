"""A Python environment with only torch and its dependencies: without pip and this project."""

import importlib.metadata
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def make_bare_python(folder: Path, packages: Iterable[str] = ("torch",), pip: bool = False) -> Path:
    """Create an environment whose packages are links to the tests' own packages.

    Args:
        folder: Folder for the environment.
        packages: Packages to include, with all their dependencies.
        pip: Whether to include pip.

    Returns:
        The path of the environment's interpreter.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    names = [*_with_required(packages), *(["pip"] if pip else [])]
    for entry in set().union(*map(_entries, names)):  # a set, because some packages share a folder
        (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def _with_required(packages: Iterable[str]) -> set[str]:
    """Return packages and all their direct and indirect dependencies."""
    found, waiting = set[str](), [*packages]
    while waiting:
        if (name := canonicalize_name(waiting.pop())) not in found:
            found.add(name)
            required = map(Requirement, importlib.metadata.requires(name) or ())
            asked = (it for it in required if not it.marker or it.marker.evaluate({"extra": ""}))
            waiting += [it.name for it in asked]
    return found


def _entries(name: str) -> set[Path]:
    """Return a package's top-level files and folders in site-packages."""
    known = importlib.metadata.distribution(name)
    tops = {
        path.parts[0] for path in known.files or () if path.parts[0] not in ("..", "__pycache__")
    }
    return {Path(str(known.locate_file(top))) for top in tops}
