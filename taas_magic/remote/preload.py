"""What the forkserver imports before any run, so that a rank finds it done.

Imported for its effects, by multiprocessing's forkserver only. No CUDA context and no Python thread
may come of it: forks would inherit the one broken and the other not at all.

The server ends with the agent by a signal: the end of its pipe, for which it waits, is also held by
every rank.
"""

import gc
import importlib

from taas_magic.remote.process import die_with_parent

PRELOADED = (
    "taas_magic.remote.rank",
    "taas_magic.remote.fetcher",
    # what a rank unpickles when it begins: its entry point, and through what torch calls it
    "torch.distributed.elastic.multiprocessing",
    "multiprocessing.popen_forkserver",
    "multiprocessing.queues",
)


def preload() -> None:
    """Imports everything and makes the ranks' shell."""
    gc.disable()  # what is imported stays; to look through it again and again takes 0.2 s
    for name in PRELOADED:
        importlib.import_module(name)
    from taas_magic.remote.shell import RankShell

    RankShell.prepare()
    # a collection in a fork would write to, and so copy, every page that holds an object
    gc.collect()
    gc.freeze()
    gc.enable()


die_with_parent()
preload()
