"""A fake remote shell: this machine's `sh` with its own home folder and environment."""

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from taas_magic.errors import PoolError
from taas_magic.setup.facts import CommandResult


@dataclass
class SubShell:
    """Shell that runs commands like sshd: in the home folder, with a minimal environment.

    Attributes:
        host: Name of the host, for messages.
        environ: Environment variables in addition to PATH and HOME.
        profile: Output of a login script before each command.
        puts: Paths of the files that `put` has written.
        sent_bytes: Number of bytes of each file that arrive; None for all.
    """

    home: Path
    host: str = "there"
    environ: dict[str, str] = field(default_factory=dict)
    profile: str = ""
    puts: list[str] = field(default_factory=list)
    sent_bytes: int | None = None

    def run(self, command: str, data: bytes = b"", timeout_s: float = 60.0) -> CommandResult:
        """Run a command with `data` as its input, after the output of the login script.

        Raises:
            PoolError: The command did not end within `timeout_s`.
        """
        self.home.mkdir(exist_ok=True)
        try:
            done = subprocess.run(
                ["sh", "-c", f"printf '%s' '{self.profile}'; {command}"],
                input=data,
                capture_output=True,
                timeout=timeout_s,
                cwd=self.home,
                env={"PATH": os.environ["PATH"], "HOME": str(self.home), **self.environ},
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise PoolError(f"host {self.host}: no answer after {timeout_s} s") from None
        return CommandResult(done.returncode, done.stdout, done.stderr)

    def put(self, data: bytes, path: str) -> None:
        self.puts.append(path)
        Path(path).write_bytes(data[: self.sent_bytes])
