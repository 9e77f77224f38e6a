"""The agent of a host: a Dask worker without a nanny that runs the host's shares of runs.

Each host has one agent. The agent does not import torch. It starts the forkserver (`forkserver`),
which imports torch. Ranks and fetchers are forks of the forkserver.

The supervisor starts the agent, and writes one JSON line to the agent's standard input. The line
comes from the engine. It holds the scheduler's address and the agent's keys (`AgentSettings`). The
keys are not on the command line, because `ps` shows command lines to all users.

The agent has three command-line arguments:

- the supervisor's pid
- modules that the forkserver imports because of the pool's settings, separated by commas
- the host's folder for temporary files
"""

import gc
import os
import signal
import sys
import tempfile
from multiprocessing import util

from taas_magic.errors import PoolError
from taas_magic.host import forkserver
from taas_magic.host.system import die_with_parent

_LONGEST = 107 - len("/pymp-12345678/listener-12345678")


def main() -> int:
    """Run the agent until the pool closes or the connection to the pool is lost.

    Returns:
        The process's exit code.
    """
    supervisor, preload, folder = sys.argv[1:]
    die_with_parent(int(supervisor))
    _change_to_root_folder()
    use_temporary_folder(folder)
    forkserver.begin([name for name in preload.split(",") if name])
    gc.disable()  # imported objects stay alive, and collections take a tenth of the import time
    import asyncio

    from taas_magic.host.agent_worker import serve

    gc.freeze()
    gc.enable()
    try:
        asyncio.run(serve(sys.stdin.buffer.readline()))
    except PoolError as error:
        sys.exit(str(error))
    finally:
        os.kill(
            int(supervisor), signal.SIGCONT
        )  # a stopped supervisor would not end, nor end the processes below it
    return 0


def use_temporary_folder(folder: str) -> None:
    """Use `folder` for temporary files, but /tmp for sockets if the path of `folder` is too long.

    The path of a Unix socket may have at most 107 bytes. If a path would be longer, Python 3.14
    and later already use /tmp.
    """
    if len(os.fsencode(folder)) > _LONGEST:
        tempfile.tempdir = "/tmp"
        util.get_temp_dir()
    tempfile.tempdir = folder


def _change_to_root_folder() -> None:
    """Change to the folder / and remove the notebook's folder from PYTHONPATH.

    Otherwise a random.py or torch.py in the notebook's folder would replace the real module in this
    process and in the forkserver. Python starts the forkserver with the current folder on its
    import path, and folders in PYTHONPATH come before Python's own modules.
    """
    here, ours = os.getcwd(), os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    folders = map(os.path.abspath, named)
    kept = [folder for folder in folders if folder != here or folder == ours]
    os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    os.chdir("/")
