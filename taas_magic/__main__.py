"""Commands in a terminal: `python -m taas_magic run` for scripts, and the `%taas` commands."""

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

INTERRUPTED_EXIT_CODE = 130
"""Exit code after an interrupt by SIGINT, as shells define it (128 + 2)."""


def main(words: list[str]) -> int:
    """Run one command, print its result or error, and return the exit code.

    For a `%taas` command, first load the taas.toml of the working folder. Errors go to stderr. The
    exit code is 1 after a `TaasError`, `INTERRUPTED_EXIT_CODE` after an interrupt, else 0.

    Args:
        words: Arguments after `python -m taas_magic`: "run" with the arguments of
            `functions.run_script`, or a command of `%taas`, such as "attach", with its arguments.
    """
    try:
        if words[:1] == ["run"]:
            from taas_magic.notebook.functions import run_script

            run_script(words[1:])
            return 0
        shown = run_command(shlex.join(words), load_config(Path.cwd()))
    except KeyboardInterrupt as error:
        sys.stderr.write(f"{error}\n")
        return INTERRUPTED_EXIT_CODE
    except TaasError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write(f"{shown}\n" if shown else "")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
