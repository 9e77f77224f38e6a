"""Attach VS Code to a rank of a session: `%taas debug --debugpy`."""

import json
from typing import TYPE_CHECKING

from msgspec import convert

from taas_magic.config import Config, PoolConfig
from taas_magic.errors import UsageError
from taas_magic.host.debugger import DebugpyListener, listen_with_debugpy
from taas_magic.notebook.launch import call_on_ranks
from taas_magic.notebook.sessions import Session
from taas_magic.ssh.config import forward_command

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def attach_debugpy(session: Session, rank: int, shell: "InteractiveShell", config: Config) -> str:
    """Make debugpy listen in one rank of a session, and return text for the user.

    The text has the port at which debugpy listens, and a configuration for VS Code's launch.json.
    If the rank is on another machine, the text also has a command that forwards this port. A second
    call for the same rank returns the same text.

    Raises:
        UsageError: The session has no such rank, or the rank's host lacks debugpy.
        PoolError: The session has ended, or is running a cell.
        RunError: The call failed on a rank.
        KeyboardInterrupt: The user interrupted the call.
    """
    assert session.plan is not None
    last = session.plan.world_size - 1
    if rank > last:
        raise UsageError(f'--rank {rank}: session "{session.name}" has ranks 0 to {last}')
    answers = call_on_ranks(session, listen_with_debugpy, shell, config, rank)
    listener = convert(answers[rank], DebugpyListener)
    if listener.problem:
        raise UsageError(listener.problem)
    return listener_text(
        listener, f"rank {rank} of session {session.name}", config.pool(session.flags.pool)
    )


def listener_text(listener: DebugpyListener, rank: str, pool: PoolConfig) -> str:
    """Return text for the user about a rank in which debugpy listens.

    The text has the address, and a configuration for VS Code's launch.json. Unless the pool is on
    this machine, the text also has a command that forwards the port.

    Args:
        rank: The rank as text, such as "rank 1 of session exp".
        pool: Settings of the rank's pool.
    """
    port, is_here = listener.port, pool.engine == "local"
    where = "this machine" if is_here else f"host {listener.host}"
    settings = {
        "name": f"taas: {rank}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": "127.0.0.1", "port": port},
    }
    lines = [f"debugpy in {rank} listens at 127.0.0.1:{port} of {where}."]
    if not is_here:
        lines += [
            "Forward the port. Keep this command running while you debug:",
            f"    {_command(listener, pool)}",
        ]
    lines += [
        'Add this to "configurations" in .vscode/launch.json, and start it in VS Code:',
        json.dumps(settings, indent=4),
    ]
    return "\n".join(lines)


def _command(listener: DebugpyListener, pool: PoolConfig) -> str:
    if pool.engine == "ssh":
        return forward_command(listener.host, pool.options.get("ssh_config"), listener.port)
    return forward_command(listener.host, None, listener.port)
