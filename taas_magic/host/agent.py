"""The agent of a host: a Dask worker without a nanny, which runs the host's ranks and fetchers.

The agent must not import torch. It starts the forkserver (`forkserver`). All ranks and fetchers are
forks of the forkserver.

The agent reads its settings, which include secret keys, from its standard input (`AgentSettings`,
one JSON line). The keys are not on the command line, because `ps` shows command lines to all users.

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
    """Run the agent: start the forkserver, join the pool, and carry out the pool's calls.

    Before it starts the forkserver, this function prepares the agent's process:

    - If the supervisor ends, the system will kill the agent.
    - The current folder becomes /.
    - The folder for temporary files is the folder on the command line.

    The agent's settings are the first line of standard input. At the end, even after an error, this
    function sends SIGCONT to the supervisor, because a suspended supervisor cannot exit.

    Returns:
        0 when the pool has closed, the connection to the pool is lost, or the forkserver has ended.

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
    """Make `folder` the folder for temporary files of this process and its children.

    If the path of `folder` is long, multiprocessing's sockets stay in /tmp, because the path of a
    Unix socket may have at most 107 bytes.
    """
    if len(os.fsencode(folder)) > _LONGEST:
        tempfile.tempdir = "/tmp"
        util.get_temp_dir()
    tempfile.tempdir = folder


def _change_to_root_folder() -> None:
    """Remove the current folder from PYTHONPATH, then change the current folder to /.

    The current folder may be the notebook's folder. If this folder had a file random.py or torch.py
    and stayed in PYTHONPATH, the forkserver would import the file instead of the real module.

    There is one exception: if this package itself is imported from the current folder, the folder
    stays in PYTHONPATH. All relative paths in PYTHONPATH become absolute, because they would have
    another meaning after the change to /.
    """
    here, ours = os.getcwd(), os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    folders = map(os.path.abspath, named)
    kept = [folder for folder in folders if folder != here or folder == ours]
    os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    os.chdir("/")
