"""The `%taas` commands in a terminal: `python -m taas_magic attach [RUN]`."""

import os
import shlex
import sys
from pathlib import Path

# `python -m` puts this folder first; a random.py there would break the imports below.
if __name__ == "__main__" and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from taas_magic.config import load_config
from taas_magic.errors import TaasError
from taas_magic.notebook.magic import run_command

INTERRUPTED = 130
"""Exit code of a program that SIGINT ended, as shells have it."""


def main(words: list[str]) -> int:
    """Carry out one command and print what it says; return the process's exit code."""
    try:
        shown = run_command(shlex.join(words), load_config(Path.cwd()))
    except KeyboardInterrupt as error:
        sys.stderr.write(f"{error}\n")
        return INTERRUPTED
    except TaasError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write(f"{shown}\n" if shown else "")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
