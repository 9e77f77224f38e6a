"""Results of the programs in tests/programs under torchrun, without this package.

torchrun.json has the recorded results, and the versions of the libraries that the programs import.
A test runs torchrun only if its results differ from the record, or if the record lacks this text of
the program.

    python -m tests.rig.torchrun    runs all programs and writes torchrun.json again
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.eventually import HUNG_S

PROGRAMS = Path(__file__).parents[1] / "programs"
BESIDE = PROGRAMS / "beside"
RECORD = Path(__file__).with_name("torchrun.json")
GUIDE = "guide_mnist"
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py") if path.stem != GUIDE)
SCRIPT = BESIDE / "argparse_script.py"
ARGUMENTS = ("--epochs", "2", "--lr", "0.3", "--workers", "1")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_IMPORTED = (
    *("torch", "numpy", "accelerate", "datasets", "lightning", "scikit-learn"),
    *("tensorboard", "torchdata", "transformers", "wandb"),
)


def results(text: str) -> list[str]:
    """Return the different RESULT lines of a text, sorted because ranks print in any order."""
    return sorted(set(re.findall(r"RESULT .*", _ANSI.sub("", text))))


@cache
def torchrun(script: Path, *arguments: str) -> list[str]:
    """Run a script on two ranks by torchrun; return its RESULT lines.

    A second call in this process returns the same lines without a run.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder) / "logs"
        options = ("--standalone", "--nproc_per_node", "2", "--redirects", "1", "--log-dir", logs)
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *options, script, *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=HUNG_S,
            check=True,
        )
        return results("".join(path.read_text() for path in logs.rglob("stdout.log")))


def recorded(script: Path, *arguments: str) -> list[str] | None:
    """Return a script's recorded RESULT lines; None if its text has changed since the record."""
    found: list[str] | None = _record()["results"].get(_key(script, arguments))
    return found


def _key(script: Path, arguments: Sequence[str]) -> str:
    made_of = [script.read_text(), arguments]
    return f"{script.stem} {hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@cache
def _record() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORD.read_text())
    return record


def main() -> None:
    """Run all programs by torchrun, and write the record again."""
    asked = [*((PROGRAMS / f"{name}.py", ()) for name in NAMES), (SCRIPT, ARGUMENTS)]
    given = {_key(script, words): torchrun(script, *words) for script, words in asked}
    versions = {"python": platform.python_version(), **{it: _version(it) for it in _IMPORTED}}
    RECORD.write_text(json.dumps({"versions": versions, "results": given}, indent=1) + "\n")


if __name__ == "__main__":
    main()
