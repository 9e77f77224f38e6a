"""Record the scalars of `taas.log` in a buffer. The rank's heartbeat thread sends the buffer.

A call of `taas.log` only appends to a list, and does not wait. The heartbeat thread converts
tensors to numbers, and writes the numbers to the pipe. To convert a CUDA tensor, a thread must wait
for the GPU. The main thread does this only at the end of a cell, for the scalars that are left.
This module imports little, because every rank imports it.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from taas_magic.messages import MetricPoint

OFF = "TAAS_METRICS"
"""Name of the environment variable by which the user disables metrics from TensorBoard.

If its value is "0", only scalars from `taas.log` are recorded. Otherwise, scalars that libraries
write for TensorBoard are recorded, too (`record_tensorboard`).
"""


class MetricBuffer:
    """The scalars that a rank has logged and not yet sent. Any thread may add scalars.

    Args:
        rank: Number of this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._pid = rank, os.getpid()
        self._waiting: list[tuple[float, int | None, str, Any]] = []
        self._counts: Counter[str] = Counter()

    def add(self, values: Mapping[str, Any], step: int | None, all_ranks: bool) -> None:
        """Append scalars to the buffer. On a rank other than 0, do so only if `all_ranks` is True.

        In a child that the rank forked, do nothing.

        Args:
            values: Scalars by name.
            step: Step of the training. None to use the last step of the same name plus 1, or 0 for
                the first scalar of a name.
            all_ranks: Whether ranks other than 0 store their scalars, too.

        Raises:
            TypeError: A value is neither a number nor a tensor with one element.
        """
        if (self._rank and not all_ranks) or os.getpid() != self._pid:
            return
        now = time.time()
        for name, value in values.items():
            self._waiting.append((now, step, name, _kept(name, value)))

    def pop_scalars(self) -> list[MetricPoint]:
        """Return the scalars logged since the last call, as numbers. Clears the buffer.

        While the cell runs, only the heartbeat thread calls this, because to convert a CUDA tensor,
        a thread must wait for the GPU. At the end of the cell, the main thread calls this, too.
        """
        waiting, self._waiting = self._waiting, []
        points = []
        for seen_at, step, name, value in waiting:
            number = self._counts[name] if step is None else int(step)
            self._counts[name] = number + 1
            points.append(MetricPoint(name, number, float(value), seen_at))
        return points


def _kept(name: str, value: Any) -> Any:
    """Check a scalar, and return the copy that the buffer stores: a float or a tensor.

    A tensor is copied, because the program may change it before the heartbeat thread reads it.

    Raises:
        TypeError: The value is neither a number nor a tensor with one element.
    """
    if hasattr(value, "detach") and value.numel() == 1:
        return value.detach().clone()
    try:
        return float(value)
    except (TypeError, ValueError):
        kind = type(value).__name__
        text = f"taas.log: {name} must be a number or a tensor with one element; it is a {kind}"
        raise TypeError(text) from None


_buffer: MetricBuffer | None = None


def use_buffer(buffer: MetricBuffer | None) -> None:
    """Make `log` append to a buffer. With None, `log` does nothing."""
    global _buffer
    _buffer = buffer


def log(
    values: Mapping[str, Any] | None = None,
    /,
    *,
    step: int | None = None,
    all_ranks: bool = False,
    **scalars: Any,
) -> None:
    """Log scalars of a training. The status header above the run's log draws them as live curves.

    A call takes a few microseconds. It does not wait, writes no file, and involves no other rank.
    Call it in a rank. In the notebook, or in a program outside of a run, it does nothing.

    Example:
        `taas.log(step=step, loss=loss, lr=scheduler.get_last_lr()[0])`

    Args:
        values: Scalars by name, for names that cannot be keyword arguments, such as `loss/train` in
            `{"loss/train": loss}`.
        step: Step of the training, the x-coordinate of the curves. By default, each name counts its
            own steps: the first step is 0, and each further step is the last step plus 1.
        all_ranks: Whether to keep one series for each rank. By default, only rank 0's values are
            kept.
        **scalars: More scalars by name.

    Raises:
        TypeError: A value is neither a number nor a tensor with one element.
    """
    if _buffer is not None:
        _buffer.add({**(values or {}), **scalars}, step, all_ranks)


def record_tensorboard() -> None:
    """Make TensorBoard's `SummaryWriter.add_scalar` also log its scalars as `taas.log` does.

    Lightning's TensorBoardLogger and transformers' TensorBoardCallback call `add_scalar`, so their
    scalars are logged, too. Call this function when `torch.utils.tensorboard.writer` is imported.
    """
    from torch.utils.tensorboard import writer

    kind: Any = writer.SummaryWriter
    original: Callable[..., Any] = kind.add_scalar

    def add_scalar(
        self: Any,
        tag: str,
        scalar_value: Any,
        global_step: int | None = None,
        *rest: Any,
        **more: Any,
    ) -> Any:
        if not isinstance(scalar_value, str):  # a str is the name of a caffe2 blob
            log({tag: scalar_value}, step=global_step)
        return original(self, tag, scalar_value, global_step, *rest, **more)

    kind.add_scalar = add_scalar
