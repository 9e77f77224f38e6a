"""A Python with torch and what torch requires, and nothing else: no pip, nothing of ours."""

import importlib.metadata
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def make_bare_python(folder: Path, packages: Iterable[str] = ("torch",), pip: bool = False) -> Path:
    """Make an environment whose packages are links to those of the tests' own.

    Args:
        folder: Where it is made.
        packages: What it has; all that these require comes along.
        pip: Whether it has a pip.

    Returns:
        Its interpreter.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    names = [*_with_required(packages), *(["pip"] if pip else [])]
    for entry in set().union(*map(_entries, names)):  # some packages lie in one folder
        (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def _with_required(packages: Iterable[str]) -> set[str]:
    """Return packages and all that they require in turn."""
    found, waiting = set[str](), [*packages]
    while waiting:
        if (name := canonicalize_name(waiting.pop())) not in found:
            found.add(name)
            required = map(Requirement, importlib.metadata.requires(name) or ())
            asked = (it for it in required if not it.marker or it.marker.evaluate({"extra": ""}))
            waiting += [it.name for it in asked]
    return found


def _entries(name: str) -> set[Path]:
    """Return the files and folders of a package that lie directly in site-packages."""
    known = importlib.metadata.distribution(name)
    tops = {
        path.parts[0] for path in known.files or () if path.parts[0] not in ("..", "__pycache__")
    }
    return {Path(str(known.locate_file(top))) for top in tops}
