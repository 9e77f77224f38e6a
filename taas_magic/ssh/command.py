"""A command on a host that runs for as long as we say that we are there."""

import contextlib
import shlex
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from taas_magic.ssh.connect import Connection

TAIL_LINES = 15
_LONGEST_LINE = 4096


class KeptCommand:
    """Starts a command, and writes an empty line to it now and then.

    Args:
        connection: The host.
        command: For the host's shell.
        first_line: What the command is told at once; not in its arguments, where `ps` shows it.
        beat_s: Seconds from one line to the next.
        log: Given every line of the command's output.

    Raises:
        PoolError: The host does not let it start.
    """

    def __init__(
        self,
        connection: Connection,
        command: str,
        first_line: bytes,
        beat_s: float,
        log: Callable[[str], None],
    ) -> None:
        self._beat_s, self._log = beat_s, log
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._closing = threading.Event()
        self.ended = threading.Event()
        """Set when its output has ended: it is over, or the connection is."""
        self._channel = connection.start(command)
        self._channel.set_combine_stderr(True)
        for work, words in ((self._read, ()), (self._beat, (first_line,))):
            threading.Thread(target=work, args=words, name="taas-ssh", daemon=True).start()

    @property
    def tail(self) -> str:
        """The last lines of its output."""
        return "\n".join(self._tail)

    def close(self, timeout_s: float) -> bool:
        """Ends its standard input and waits until it has ended; says whether it has."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._channel.shutdown_write()
        return self.ended.wait(timeout_s)

    def _beat(self, first_line: bytes) -> None:
        with contextlib.suppress(OSError):  # it is over; its output ends too
            self._channel.sendall(first_line)
            while not self._closing.wait(self._beat_s):
                self._channel.sendall(b"\n")

    def _read(self) -> None:
        output = self._channel.makefile("rb")
        with contextlib.suppress(OSError, EOFError):
            while line := output.readline(_LONGEST_LINE):
                text = line.decode(errors="replace").rstrip()
                self._tail.append(text)
                self._log(text)
        self.ended.set()


def shell_words(
    python: str, arguments: Sequence[str], environ: Mapping[str, str] | None = None
) -> str:
    """A command line that any login shell understands.

    Args:
        python: The program; a `~` at its beginning is the host's own home folder.
        arguments: Its arguments.
        environ: Variables that it gets besides; nothing secret, `ps` shows them.
    """
    home, rest = ("~/", python[2:]) if python.startswith("~/") else ("", python)
    program = home + shlex.quote(rest)
    settings = [f"{name}={shlex.quote(value)}" for name, value in (environ or {}).items()]
    words = ["env", *settings] if settings else []
    return " ".join(["exec", *words, program, *map(shlex.quote, arguments)])
