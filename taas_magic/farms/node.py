"""A node: what a farm has on a host. A Dask worker, and the processes that its jobs run in.

It is a program of its own beside the rank of a one-rank run (`keep`), so that the pool takes it for
what it knows: it has leases, an end, and a place in the journal. As an agent does, it starts a
forkserver before it imports Dask, and joins when that is warm.
"""

import asyncio
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from msgspec import structs

from taas_magic import environ as environs
from taas_magic import messages
from taas_magic.farms.slots import Slots
from taas_magic.farms.terms import NodeSetting, NodeTerms
from taas_magic.host import forkserver
from taas_magic.host.hardware import LOOPBACK
from taas_magic.host.processes import die_with_parent, spawn_command
from taas_magic.host.spec import REACH, TORCHRUN_NAMES
from taas_magic.host.supervisor import host_folder
from taas_magic.leases import NODE_START_S


def keep(terms: NodeTerms) -> None:
    """Run a node until the run is ended; in its rank.

    Raises:
        RuntimeError: The node ended by itself.
    """
    scheduler, here = os.environ.pop(REACH), os.getcwd()
    names = (*TORCHRUN_NAMES, "OMP_NUM_THREADS")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    environ["PYTHONPATH"] = _agents_path()
    node = subprocess.Popen(spawn_command(__name__), stdin=subprocess.PIPE, cwd="/", env=environ)
    store = structs.replace(terms.store, path=here)
    setting = NodeSetting(terms, scheduler, store, sys.path, here, dict(os.environ))
    assert node.stdin is not None
    try:
        node.stdin.write(messages.pack(setting) + b"\n")
        node.stdin.flush()
        code = node.wait()
    except KeyboardInterrupt:  # how a run is ended
        code = 0
    finally:
        node.kill()
        node.wait()
    if code:
        raise RuntimeError(f"the farm's node ended with exit code {code}; its log says why")


def _agents_path() -> str:
    """The PYTHONPATH by which this host's agent found this package, and what it needs."""
    first = environs.parsed(Path("/proc/self/environ").read_bytes()).get("PYTHONPATH", "")
    ours = str(Path(__file__).parent.parent.parent)
    return os.pathsep.join(dict.fromkeys([*filter(None, first.split(os.pathsep)), ours]))


def main() -> int:
    """Keep a node until its parent ends, or the farm; returns the process's exit code.

    Standard input has one line, a packed `NodeSetting`.
    """
    die_with_parent(os.getppid())
    setting = messages.unpack(sys.stdin.buffer.readline(), NodeSetting)
    logging.getLogger("distributed").setLevel(logging.ERROR)
    with host_folder() as folder:
        tempfile.tempdir = str(folder)
        forkserver.begin([])
        asyncio.run(_serve(setting, folder))
    return 0


async def _serve(setting: NodeSetting, folder: Path) -> None:
    from distributed import Security

    from taas_magic.farms.worker import NodeWorker
    from taas_magic.host.member import use_steady_clock
    from taas_magic.store import guard

    use_steady_clock()
    means = guard.strongest().value
    forkserver.warm_up()
    terms, slots = setting.terms, Slots(setting, folder, means)
    node = NodeWorker(
        setting.scheduler,
        slots=slots,
        nthreads=terms.slots,
        memory_limit=0,
        name=terms.name,
        host=LOOPBACK,
        contact_address=terms.place,
        security=Security(**terms.security),
        local_directory=str(folder),
        death_timeout=NODE_START_S,
    )
    async with node:
        await node.finished()
    slots.close()
