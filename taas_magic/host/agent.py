"""The agent: one a host, a Dask worker without a nanny, that runs hosts' shares of runs.

It is light: torch is imported by the forkserver beside it (`forkserver`), from which ranks and
fetchers come. The agent joins the pool only when that server is warm, so a host that the pool knows
is a host that is ready.

Run by the supervisor, which passes on the engine's words: one JSON line on standard input with the
scheduler's address and the pool's key (never in argv, where `ps` shows it). The arguments are
the supervisor's pid, the modules that the pool's settings add to what the forkserver imports, with
commas, and the host's folder for what is temporary.
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
    """Run until the pool closes the host or is lost; returns the process's exit code."""
    supervisor, preload, folder = sys.argv[1:]
    die_with_parent(int(supervisor))
    _leave_the_notebooks_folder()
    _make_temporary_folders(folder)
    forkserver.begin([name for name in preload.split(",") if name])
    gc.disable()  # what is imported stays; to look through it again and again takes a tenth
    import asyncio

    from taas_magic.host.member import serve

    gc.freeze()
    gc.enable()
    try:
        asyncio.run(serve(sys.stdin.buffer.readline()))
    except PoolError as error:
        sys.exit(str(error))
    finally:
        os.kill(
            int(supervisor), signal.SIGCONT
        )  # a stopped one would stay, and all that it is to end
    return 0


def _make_temporary_folders(folder: str) -> None:
    """Use the host's folder for what is temporary; for sockets /tmp where its name is too long.

    A socket's name has 107 characters at most. Python itself goes to /tmp then, from 3.14 on.
    """
    if len(os.fsencode(folder)) > _LONGEST:
        tempfile.tempdir = "/tmp"
        util.get_temp_dir()
    tempfile.tempdir = folder


def _leave_the_notebooks_folder() -> None:
    """Keep what lies there (a random.py, a torch.py) out of this process and of the forkserver.

    Python starts the forkserver with the current folder on its import path. What PYTHONPATH names
    comes before Python's own modules.
    """
    here, ours = os.getcwd(), os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    folders = map(os.path.abspath, named)
    kept = [folder for folder in folders if folder != here or folder == ours]
    os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    os.chdir("/")
