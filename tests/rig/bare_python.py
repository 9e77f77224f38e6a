"""A Python with torch and what torch requires, and nothing else: no pip, nothing of ours."""

import importlib.metadata
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from taas_magic.setup.install import wanted


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
    names = [*wanted(packages, never=()), *(["pip"] if pip else [])]
    for entry in set().union(*map(_entries, names)):  # some packages lie in one folder
        (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def _entries(name: str) -> set[Path]:
    """Return the files and folders of a package that lie directly in site-packages."""
    known = importlib.metadata.distribution(name)
    tops = {
        path.parts[0] for path in known.files or () if path.parts[0] not in ("..", "__pycache__")
    }
    return {Path(str(known.locate_file(top))) for top in tops}
