"""`taas.log` in a rank: scalars go into a buffer, and the rank's heartbeat sends them.

Nothing here waits: a call appends to a list. The heartbeat's thread converts tensors to numbers,
which for a CUDA tensor waits for the GPU, and writes to the pipe. Light: every rank imports it.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from taas_magic.messages import MetricPoint

OFF = "TAAS_METRICS"
"""Environment variable; "0" records nothing that a library writes. `taas.log` still works."""


class MetricBuffer:
    """The scalars that a rank has logged and not sent yet. Any thread may use it.

    Args:
        rank: Number of this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._pid = rank, os.getpid()
        self._waiting: list[tuple[float, int | None, str, Any]] = []
        self._counts: Counter[str] = Counter()

    def add(self, values: Mapping[str, Any], step: int | None, all_ranks: bool) -> None:
        """Append scalars; drop those of a rank other than 0, unless `all_ranks` is True.

        Raises:
            TypeError: A value is neither a number nor a tensor with one element.
        """
        if (self._rank and not all_ranks) or os.getpid() != self._pid:
            return
        now = time.time()
        for name, value in values.items():
            self._waiting.append((now, step, name, _kept(name, value)))

    def take(self) -> list[MetricPoint]:
        """Return what was logged since the last call, as numbers. Only the heartbeat calls it."""
        waiting, self._waiting = self._waiting, []
        points = []
        for seen_at, step, name, value in waiting:
            number = self._counts[name] if step is None else int(step)
            self._counts[name] = number + 1
            points.append(MetricPoint(name, number, float(value), seen_at))
        return points


def _kept(name: str, value: Any) -> Any:
    """Return a number, or a copy of a tensor with one element, which the program may change."""
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
    """Make `log` append to a buffer; None makes it do nothing."""
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
    """Log scalars of a training; the cell's header draws them as live curves.

    Costs a few microseconds: nothing waits, no file is written, no other rank is involved. Call it
    in a rank. In the notebook, or in a program outside of a run, it does nothing.

    Example:
        `taas.log(step=step, loss=loss, lr=scheduler.get_last_lr()[0])`

    Args:
        values: Scalars by name, for names that are no Python names: `{"loss/train": loss}`.
        step: The x-coordinate; default: counts the calls for each name from 0.
        all_ranks: Keep one series for each rank. By default only rank 0's values are kept.
        **scalars: More scalars. A scalar is a number or a tensor with one element.

    Raises:
        TypeError: A value is neither.
    """
    if _buffer is not None:
        _buffer.add({**(values or {}), **scalars}, step, all_ranks)


def record_tensorboard() -> None:
    """Also log what the program writes by `SummaryWriter.add_scalar`. Call after its import.

    Lightning's TensorBoardLogger and transformers' TensorBoardCallback write through it as well.
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
        if not isinstance(scalar_value, str):  # caffe2 names its blobs by texts
            log({tag: scalar_value}, step=global_step)
        return original(self, tag, scalar_value, global_step, *rest, **more)

    kind.add_scalar = add_scalar
