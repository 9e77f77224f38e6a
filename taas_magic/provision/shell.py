"""What this package needs of a way to a host: run a command, leave a file. Engines have the ways.

Both programs that run on a host that has nothing of ours go there as text, on the standard input
of the host's own Python.
"""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from taas_magic.errors import PoolError

DEFAULT_PYTHON = "python3"
MARK = "taas-magic says: "
"""Before our answer, because a login script of the host may print whatever it likes."""

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

    @property
    def host(self) -> str: ...

    def run(self, command: str, data: bytes = b"", timeout_s: float = 60.0) -> Done:
        """Runs a command in the user's shell there; `data` is its standard input."""

    def put(self, data: bytes, path: str) -> None:
        """Writes a file there, for the user alone; its folder exists."""


def python_word(python: str | None) -> str:
    """An interpreter as a word of a command line; the host's shell expands a leading `~`."""
    text = python or DEFAULT_PYTHON
    home, slash, rest = text.partition("/")
    if slash and re.fullmatch(r"~[\w.-]*", home):
        return f"{home}/{shlex.quote(rest)}"
    return shlex.quote(text)


def ask(
    shell: Shell, python: str | None, program: Path, asked: Mapping[str, Any], timeout_s: float
) -> dict[str, Any]:
    """Runs one of our programs with the host's Python; returns what its `main` answers.

    Args:
        shell: The way to the host.
        python: The interpreter there; None is `python3`.
        program: A module of ours with a function `main`, which needs nothing but Python 3.8.
        asked: Keyword arguments of `main`, plain JSON values.
        timeout_s: How long it may take.

    Raises:
        PoolError: There is no such interpreter, or the program failed.
    """
    text = _text(program.read_text(encoding="utf-8"), asked)
    done = shell.run(f"{python_word(python)} -", text, timeout_s)
    for line in reversed(done.out.decode(errors="replace").splitlines()):
        if line.startswith(MARK):
            answer: dict[str, Any] = json.loads(line[len(MARK) :])
            return answer
    raise PoolError(_why(shell.host, python or DEFAULT_PYTHON, done))


def _text(source: str, asked: Mapping[str, Any]) -> bytes:
    """A program that every Python since 2.6 can read, so that an old one can say that it is."""
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
        "    answer = names['main'](**asked)",
        f"sys.stdout.write({json.dumps(MARK)} + json.dumps(answer) + '\\n')",
    ]
    return "\n".join(lines).encode("ascii") + b"\n"


def _why(host: str, python: str, done: Done) -> str:
    said = done.err.decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
    if done.code == 127 or done.code == 126:
        what = f'there is no Python {python!r} there; name one: python = "…" in the pool\'s table'
    else:
        what = f"{python!r} did not run our program (exit code {done.code})"
    return "\n".join([f"host {host}: {what}", *(f"    {line}" for line in said)])
