"""What the forkserver imports and makes before any run, so that a rank finds it done.

Imported for its effects, by the multiprocessing forkserver of an agent. No CUDA context and no
thread may come of it: forks would inherit the one broken and the other not at all.
"""

import gc
import importlib
import os
import weakref
from multiprocessing.connection import Connection

from taas_magic.host import horovod
from taas_magic.host.forkserver import AGENT_PID, PRELOAD
from taas_magic.host.processes import die_with_parent

MODULES = (
    "torch",
    # the first step of an optimizer imports it: 1 to 2 s in every rank
    "torch._dynamo",
    "taas_magic.api",
    "taas_magic.host.rank",
    "taas_magic.host.fetcher",
)

problems: list[str] = []
"""One message for each module of the pool's settings that could not be imported."""


def preload() -> None:
    """Import everything and make the ranks' shell."""
    # Ranks hold the pipe on whose end a forkserver waits, so it would outlive a killed agent.
    die_with_parent(int(os.environ[AGENT_PID]))
    gc.disable()  # what is imported stays; to look through it again and again takes 0.2 s
    for name in MODULES:
        importlib.import_module(name)
    for name in filter(None, os.environ[PRELOAD].split(",")):
        _import_setting(name)
    horovod.is_installed()
    from taas_magic.host.shell import RankShell

    RankShell.prepare()
    _keep_own_finalizers()
    # A collection in a fork would write to, and so copy, every page that holds an object. Here, it
    # would take 0.4 s to find what little the imports left.
    gc.freeze()
    gc.enable()


def report(control: Connection) -> None:
    """Send the forkserver's process id, and `problems`, to the agent; in a fork."""
    control.send((os.getppid(), problems))


def _keep_own_finalizers() -> None:
    """Have no rank call, at its end, what is to happen at the end of this process.

    torch alone has hundreds of `weakref.finalize`; a temporary folder would go with the first rank.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def _import_setting(name: str) -> None:
    """Import a module that the pool's settings name; whatever it raises is only reported."""
    try:
        importlib.import_module(name)
    except Exception as error:
        problems.append(f"preload: {name!r} was not imported: {type(error).__name__}: {error}")


if AGENT_PID in os.environ:
    preload()
