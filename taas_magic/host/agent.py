"""The agent of a host: a Dask worker without a nanny that runs the host's shares of runs.

The agent must not import torch. It starts the forkserver (`forkserver`), of which ranks and
fetchers are forks.

The agent reads its settings, with the keys, from its standard input (`AgentSettings`, one JSON
line). The keys are not on the command line, because `ps` shows command lines to all users.

The agent has three command-line arguments:

- the supervisor's pid
- the modules that the pool's settings add to the forkserver's imports, separated by commas
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
    """Start the forkserver, join the pool, and handle the pool's calls.

    First makes the system kill this process when the supervisor ends. Then changes to the folder /,
    and sets the folder for temporary files. At the end, sends SIGCONT to the supervisor, which may
    be suspended.

    Returns 0 when the pool has closed or the connection to the pool is lost.

    Raises:
        SystemExit: The forkserver could not import a module that ranks need.
    """
    supervisor, preload, folder = sys.argv[1:]
    die_with_parent(int(supervisor))
    _change_to_root_folder()
    use_temporary_folder(folder)
    forkserver.start_forkserver([name for name in preload.split(",") if name])
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
        )  # a supervisor suspended by SIGSTOP could neither exit nor end its descendants
    return 0


def use_temporary_folder(folder: str) -> None:
    """Use `folder` for temporary files, but /tmp for sockets if the path of `folder` is too long.

    The path of a Unix socket may have at most 107 bytes.
    """
    if len(os.fsencode(folder)) > _LONGEST:
        tempfile.tempdir = "/tmp"
        util.get_temp_dir()
    tempfile.tempdir = folder


def _change_to_root_folder() -> None:
    """Change the current folder to /, and remove the old current folder from PYTHONPATH.

    The old current folder may be the notebook's folder. A random.py or torch.py there would replace
    the real module in this process and in the forkserver. If this package itself is imported from
    the old current folder, the folder stays in PYTHONPATH.
    """
    here, ours = os.getcwd(), os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    folders = map(os.path.abspath, named)
    kept = [folder for folder in folders if folder != here or folder == ours]
    os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    os.chdir("/")
