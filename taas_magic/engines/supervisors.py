"""Supervisors of this machine: started before Dask is imported, told what they need, ended."""

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Sequence

from taas_magic.host.system import spawn_command, supervisor_arguments
from taas_magic.messages import AgentSettings, pack

CLOSE_S = 10.0
"""How long a supervisor may take to end all of its host, in seconds."""


def start_supervisor(preload: Sequence[str]) -> subprocess.Popen[bytes]:
    """A supervisor of this machine, waiting for the agent's settings on its standard input."""
    command = spawn_command("taas_magic.host.supervisor")
    command += supervisor_arguments(None, preload)
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


async def end_supervisor(supervisor: subprocess.Popen[bytes]) -> None:
    """Closes a supervisor's lease and waits until its host is clean."""
    assert supervisor.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it ended before it read what it was told
        supervisor.stdin.close()
    supervisor.send_signal(signal.SIGCONT)  # a stopped one would not see it
    try:
        await asyncio.to_thread(supervisor.wait, CLOSE_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()


def tell_agent(supervisor: subprocess.Popen[bytes], settings: AgentSettings) -> None:
    """Sends the agent its settings."""
    assert supervisor.stdin is not None
    supervisor.stdin.write(pack(settings) + b"\n")
    supervisor.stdin.flush()
