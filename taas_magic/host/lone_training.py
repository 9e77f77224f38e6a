"""Find out whether each rank trains a model of its own, and send the user a note about it.

An optimizer's step changes the model of its rank only. Ranks exchange gradients by a process group
of torch, or by horovod. Without both, a training loop that was written for one process trains as
many different models as there are ranks.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from taas_magic.host.link import AgentLink
from taas_magic.messages import Note

LONE_TRAINING = (
    "each rank trained a model of its own, because the program created no process group. To train "
    "one model on all ranks, call torch.distributed.init_process_group() and wrap the model in "
    "DistributedDataParallel (docs/coming_from.md). If you want separate models, ignore this note"
)

_stepped_alone = False  # an optimizer has made a step without a process group
_is_settled = False  # this rank has had a process group, or the user knows of the lone training


def watch_optimizers() -> None:
    """From now on, record for each optimizer's step in this process whether a group exists."""
    register_optimizer_step_post_hook(_record_step)


def settle_lone_training() -> None:
    """Make `report_lone_training` send no note any more."""
    global _is_settled
    _is_settled = True


def report_lone_training(link: AgentLink, rank: int, working_ranks: Sequence[int]) -> None:
    """Send the user a note, at most once in this process, if each rank has trained alone.

    Call this function on each rank after successful work. Only the second of the working ranks
    sends the note: the first one may have trained alone on purpose, below `if rank == 0:`.

    Args:
        link: Connection to the agent. A child that the work forked sends no note.
        rank: Number of this rank.
        working_ranks: Ranks that run the work, in ascending order.
    """
    is_alone = _stepped_alone and not (dist.is_initialized() or "horovod.torch" in sys.modules)
    is_sender = rank in working_ranks[1:2]
    if is_alone and is_sender and link.is_own and not _is_settled:
        settle_lone_training()
        link.send(Note(text=LONE_TRAINING))


def _record_step(*_: Any) -> None:
    """Record that an optimizer has made a step. torch calls this function after each step.

    torch.compile may compile this function as part of the step. So the function reads no variable
    that changes: torch would compile the step again after each change.
    """
    global _stepped_alone, _is_settled
    if dist.is_initialized():
        _is_settled = True
    else:
        _stepped_alone = True
