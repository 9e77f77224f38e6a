"""What the forkserver imports before any run, so that a rank finds it done.

Imported for its effects, by multiprocessing's forkserver only. No CUDA context and no Python thread
may come of it: forks would inherit the one broken and the other not at all.

The server ends with the agent by a signal: the end of its pipe, for which it waits, is also held by
every rank.
"""

import gc
import multiprocessing.popen_forkserver
import multiprocessing.queues

import torch
import torch.distributed.elastic.multiprocessing

import taas_magic.remote.fetcher
import taas_magic.remote.rank
from taas_magic.remote.process import die_with_parent
from taas_magic.remote.shell import RankShell

die_with_parent()

RankShell.prepare()
# what a rank unpickles when it begins: its entry point, and through what torch calls it
PRELOADED = (
    taas_magic.remote.rank,
    torch.distributed.elastic.multiprocessing,
    multiprocessing.popen_forkserver,
    multiprocessing.queues,
)

# a collection in a fork would write to, and so copy, every page that holds an object
gc.collect()
gc.freeze()
