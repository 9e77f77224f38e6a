"""Pass the scalars of Lightning's `self.log` to `taas.log`.

A Trainer of Lightning asks the installed packages for callbacks. pyproject.toml names this module's
two functions as entry points for this purpose. Lightning calls one of them for each Trainer, and
only then does this module import Lightning.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from taas_magic.host.metrics import is_recording, log_accepted

if TYPE_CHECKING:
    import torch


def lightning_callbacks() -> list[Any]:
    """Return the callback for a Trainer of the package `lightning`; [] outside a rank."""
    return [_new_callback("lightning.pytorch")] if is_recording() else []


def pytorch_lightning_callbacks() -> list[Any]:
    """Return the callback for a Trainer of the package `pytorch_lightning`; [] outside a rank."""
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
    """Hooks of a callback that passes a Trainer's scalars to `taas.log`, as to a logger.

    The scalars and their steps are those that Lightning's loggers get. `Trainer.logged_metrics` has
    the latest scalar of each name. A scalar is new if its memory differs from the memory of the
    last scalar of the same name that a hook has seen. So no hook reads the value of a scalar, which
    would wait for the GPU.

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
        the hooks pass no scalars, because `record_tensorboard` passes them.
        """
        self._seen = {}
        self._step = trainer.global_step
        self._has_stepped = self._is_logged_step = False
        writer = sys.modules.get("torch.utils.tensorboard.writer")
        logs = [getattr(logger, "experiment", None) for logger in trainer.loggers]
        self._is_recorded_otherwise = writer is not None and any(
            isinstance(it, writer.SummaryWriter) for it in logs
        )

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Pass the scalars of a training step if Lightning's loggers get them, too.

        A batch that only accumulates gradients is no step. After the last batch of an epoch, mark
        the scalars as seen if they are not passed.
        """
        self._has_stepped = trainer.global_step != self._step  # False: gradients were accumulated
        self._step = trainer.global_step
        is_due = _is_due(trainer, self._step) or trainer.should_stop
        self._is_logged_step = self._has_stepped and is_due
        if self._is_logged_step or trainer.is_last_batch:
            self._handle_new(trainer, self._is_logged_step)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Pass the scalars of the last epoch, and those that later hooks of the last step logged.

        Before a step whose scalars will be passed, mark the last step's late scalars as seen.
        """
        is_logged = self._is_logged_step or batch_idx == 0
        if is_logged or _is_due(trainer, trainer.global_step + 1):
            self._handle_new(trainer, is_logged)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Pass to `taas.log` what the last training step logged after `on_train_batch_end`."""
        self._handle_new(trainer, self._is_logged_step)

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        """Mark scalars of a single batch as seen. Only those of a whole validation are passed."""
        self._handle_new(trainer, is_logged=False)

    on_test_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Pass the scalars of a validation, a test or a training."""
        self._handle_new(trainer, is_logged=True)

    on_test_end = on_train_end = on_validation_end

    def _handle_new(self, trainer: Any, is_logged: bool) -> None:
        """Mark all new scalars as seen, and pass them to `taas.log` if `is_logged` is True.

        Do nothing during Lightning's sanity check. Pass no scalars if `record_tensorboard` passes
        them. The step is the Trainer's step, counted from 0, or the value of the scalar "step".
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


def _is_due(trainer: Any, step: int) -> bool:
    """Return whether Lightning's loggers get the scalars of a training step.

    Args:
        step: Number of the step; the first step is 1.
    """
    every: int = trainer.log_every_n_steps
    return every > 0 and step % every == 0
