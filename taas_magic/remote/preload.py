"""What the forkserver imports before any run, so that a rank finds it done.

Imported for its effects, by multiprocessing's forkserver only. No CUDA context and no Python thread
may come of it: forks would inherit the one broken and the other not at all.
"""

import numpy
import torch

import taas_magic.remote.rank
from taas_magic.remote.shell import RankShell

RankShell.prepare()

PRELOADED = (numpy, torch, taas_magic.remote.rank)
