"""Pass the scalars of Lightning's `self.log` to `taas.log`, and report a Trainer that trains alone.

Lightning asks installed packages for callbacks, by entry points. pyproject.toml names two functions
as such entry points: `lightning_callbacks` and `pytorch_lightning_callbacks`. Lightning calls one
of the two functions for each Trainer. Only this call imports Lightning.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from taas_magic.host.lone_training import settle_lone_training
from taas_magic.host.metrics import is_recording, log_accepted
from taas_magic.messages import Note

if TYPE_CHECKING:
    import torch


def lightning_callbacks() -> list[Any]:
    """Return the callback for a Trainer of the package `lightning`, in a list.

    The list is empty outside a rank, or if the environment variable TAAS_METRICS is "0".
    """
    return [_new_callback("lightning.pytorch")] if is_recording() else []


def pytorch_lightning_callbacks() -> list[Any]:
    """Return the callback for a Trainer of the package `pytorch_lightning`, in a list.

    The list is empty outside a rank, or if the environment variable TAAS_METRICS is "0".
    """
    return [_new_callback("pytorch_lightning")] if is_recording() else []


def _new_callback(package: str) -> Any:
    """Return a `_ScalarHooks` that is also a `Callback` of a package.

    Args:
        package: "lightning.pytorch" or "pytorch_lightning". The `Callback` classes of the two
            packages are different classes.
    """
    # A strategy of Lightning that spawns processes pickles the callbacks.
    attributes = {"__reduce__": lambda _: (_new_callback, (package,))}
    kind = type("TaasMetrics", (_ScalarHooks, import_module(package).Callback), attributes)
    return kind()


class _ScalarHooks:
    """Hooks of a Lightning callback that passes a Trainer's scalars to `taas.log`.

    `taas.log` gets the same scalars, with the same steps, as Lightning's loggers. The hooks find
    the scalars in `Trainer.logged_metrics`, which has the latest scalar of each name.

    Each hook handles only new scalars. A scalar is new if its memory address differs from the
    address of the last scalar of this name that a hook has handled. The hooks compare addresses
    instead of values, because reading a value would wait for the GPU.

    The hooks run on every rank, because `Trainer.logged_metrics` may start a collective.
    """

    def __init__(self) -> None:
        self._seen: dict[str, torch.Tensor] = {}
        self._step = 0
        self._has_stepped = False
        self._is_logged_step = False
        self._is_recorded_otherwise = False

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Reset the hooks' state for a call of `fit`, `validate`, `test` or `predict`.

        Also record whether a logger of the Trainer uses a `SummaryWriter` of TensorBoard. If so,
        the hooks pass no scalars, because `record_tensorboard` passes them. If the Trainer trains
        without the other ranks, send the user a note.
        """
        if stage == "fit":
            _report_lone_trainer(trainer.world_size)
        self._seen = {}
        self._step = trainer.global_step
        self._has_stepped = self._is_logged_step = False
        writer = sys.modules.get("torch.utils.tensorboard.writer")
        logs = [getattr(logger, "experiment", None) for logger in trainer.loggers]
        self._is_recorded_otherwise = writer is not None and any(
            isinstance(it, writer.SummaryWriter) for it in logs
        )

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Pass the scalars of a training step to `taas.log` if Lightning's loggers get them, too.

        Lightning's loggers get scalars only every `log_every_n_steps` steps, and when the training
        is about to stop. A batch that only accumulates gradients is not a step, and its scalars are
        not passed.

        After the last batch of an epoch, this method discards scalars that it does not pass. If it
        kept them, the hooks that run after the epoch would pass them.
        """
        self._has_stepped = trainer.global_step != self._step  # False: gradients were accumulated
        self._step = trainer.global_step
        is_due = _is_due(trainer, self._step) or trainer.should_stop
        self._is_logged_step = self._has_stepped and is_due
        if self._is_logged_step or trainer.is_last_batch:
            self._handle_new(trainer, self._is_logged_step)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Pass or discard the scalars that were logged since the last `on_train_batch_end`.

        There are three cases:

        - Record these scalars if the scalars of the previous step were recorded, or if the new
          batch is the first of an epoch.
        - Otherwise, discard these scalars if Lightning's loggers will get the scalars of the next
          step. Without this, `on_train_batch_end` would record the old scalars with the next step.
        - In all other cases, keep the scalars.
        """
        is_logged = self._is_logged_step or batch_idx == 0
        if is_logged or _is_due(trainer, trainer.global_step + 1):
            self._handle_new(trainer, is_logged)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Pass or discard the scalars that were logged since the last `on_train_batch_end`.

        Pass these scalars if `on_train_batch_end` passed the scalars of its step. Otherwise,
        discard these scalars, so that no later hook passes them.
        """
        self._handle_new(trainer, self._is_logged_step)

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        """Discard the new scalars of one batch of a validation or test.

        After this, no later hook passes them. `on_validation_end` passes the scalars of the whole
        validation or test, which Lightning logs later.
        """
        self._handle_new(trainer, is_logged=False)

    on_test_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Pass the new scalars at the end of a validation, a test or a training."""
        self._handle_new(trainer, is_logged=True)

    on_test_end = on_train_end = on_validation_end

    def _handle_new(self, trainer: Any, is_logged: bool) -> None:
        """Pass all new scalars to `taas.log` if `is_logged` is True; otherwise, discard them.

        In both cases, these scalars are no longer new, so no later hook passes them. If
        `record_tensorboard` passes the scalars of this Trainer, this method always discards them.
        During Lightning's sanity check, this method does nothing.

        `taas.log` also gets a step: the number of the Trainer's current step, where the first step
        is 0. If a new scalar has the name "step", the value of this scalar is used instead.
        """
        if trainer.sanity_checking:
            return
        new = {
            name: value
            for name, value in trainer.logged_metrics.items()
            if name not in self._seen or value.data_ptr() != self._seen[name].data_ptr()
        }
        self._seen.update(new)
        if new and is_logged and not self._is_recorded_otherwise:
            # The first step has the number 0. A scalar with the name "step" replaces the number.
            step = trainer.global_step - self._has_stepped
            log_accepted(new, int(new.pop("step", step)))


def _report_lone_trainer(world_size: int) -> None:
    """Send the user a note if a Trainer uses fewer ranks than the run has.

    This happens if the Trainer gets no `devices` where there is no GPU: Lightning then uses one
    process.

    Args:
        world_size: Number of ranks that the Trainer uses.
    """
    from taas_magic.host.shell import RankShell

    n_ranks, n_hosts = int(os.environ["WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
    # A process that the cell has spawned has no shell.
    if world_size >= n_ranks or not RankShell.initialized() or RankShell.instance().link is None:
        return
    settle_lone_training()  # one note is enough
    nodes = f", num_nodes={n_hosts}" if n_hosts > 1 else ""
    RankShell.instance().link.send(
        Note(
            text=f"Lightning's Trainer uses {world_size} of the {n_ranks} ranks, so each rank "
            "trains a model of its own, on all data of a loader that is not registered. Write "
            f'Trainer(devices={os.environ["LOCAL_WORLD_SIZE"]}{nodes}, strategy="ddp")'
        )
    )


def _is_due(trainer: Any, step: int) -> bool:
    """Return whether Lightning's loggers get the scalars of a training step.

    Args:
        step: Number of the step; the first step is 1.
    """
    every: int = trainer.log_every_n_steps
    return every > 0 and step % every == 0
