"""Record the scalars of `taas.log` in a buffer. The rank's heartbeat thread sends the buffer.

`taas.log` must not wait, so it only appends to a list. The heartbeat thread converts CUDA tensors
to numbers after the GPU has computed the tensors. The heartbeat thread must not wait for the GPU:
if a collective never ends, the GPU computes nothing more, and the thread would send no heartbeats.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from taas_magic.messages import MetricPoint

if TYPE_CHECKING:
    import torch

METRICS_VARIABLE = "TAAS_METRICS"
"""Environment variable. If its value is "0", ranks do not log the scalars of other libraries."""


NAME_CHARS = 1000
"""Maximum number of characters in the name of a metric."""

_USAGE = "write taas.log(step=step, loss=loss) or taas.log({'loss': loss}, step=step)"
_NOT_SHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_GPU_POLL_S = 0.01
_STEP_LIMIT = 1 << 63


class _GpuScalar:
    """Copy of a logged scalar, in the GPU's memory.

    The heartbeat thread reads the copy later. The program may have changed the original by then.

    Attributes:
        stream: CUDA stream in which the GPU makes the copy.
    """

    def __init__(self, value: "torch.Tensor") -> None:
        import torch

        self._copy = value.clone()
        self.stream = torch.cuda.current_stream(value.device)

    def __float__(self) -> float:
        """Return the scalar as a number. Call this method only after the GPU has made the copy."""
        import torch

        # In the program's own stream, the read would wait for all work that was queued since.
        stream = torch.cuda.Stream(self._copy.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            return float(self._copy)


_Logged = tuple[float, int | None, str, float | _GpuScalar]
"""Time in seconds (`time.time`), step, name and value of a scalar. The step may be None."""


class MetricBuffer:
    """The scalars that a rank has logged, but not yet sent to its agent.

    Any thread may add scalars.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._pid = rank, os.getpid()
        self._waiting: list[_Logged] = []
        self._batch: list[_Logged] = []
        self._events: list[torch.cuda.Event] = []
        self._counts: Counter[str] = Counter()

    def add(self, values: Mapping[str, Any], step: int | None, all_ranks: bool) -> None:
        """Check scalars, and append them to the buffer if this rank's scalars are kept.

        Rank 0 always appends its scalars. Other ranks append scalars only if `all_ranks` is True. A
        child that the rank forked appends nothing.

        Args:
            values: Scalars by name.
            step: Step of the training. If None, each scalar gets the last step of the same name
                plus 1. The first scalar of a name gets step 0.

        Raises:
            TypeError: A name, a value or the step has a wrong type. The buffer does not change.
            ValueError: A name is not allowed, or a value or the step is too large. The buffer does
                not change.
        """
        now, number = time.time(), None if step is None else _checked_step(step)
        found = [(now, number, _checked_name(it), _checked_copy(it, values[it])) for it in values]
        # Wrong arguments raise on every rank: if only rank 0 raised, the other ranks would continue
        # alone.
        if (all_ranks or not self._rank) and os.getpid() == self._pid:
            self._waiting.extend(found)

    def pop_scalars(self, waits_for_gpu: bool) -> list[MetricPoint]:
        """Remove scalars from the buffer, and return them as numbers.

        A scalar without a step gets the last step of the same name plus 1. The first scalar of a
        name gets step 0. If the GPU has failed, scalars on the GPU are lost. Only one thread at a
        time may call this method.

        Args:
            waits_for_gpu: Whether to wait until the GPU has computed all scalars. If False, scalars
                that the GPU has not computed stay in the buffer, and so do all later scalars.
        """
        points = self._pop_computed()
        while waits_for_gpu and (self._batch or self._waiting):
            time.sleep(_GPU_POLL_S)
            points += self._pop_computed()
        return points

    def _pop_computed(self) -> list[MetricPoint]:
        """Return the scalars of the current group as numbers, if the GPU has computed all of them.

        A group has all scalars that were in the buffer when the group began. If the GPU has not
        computed all of them, return [], and check the same group again at the next call. If the
        group is returned, the next call begins a new group.

        A scalar without a step gets the last step of its name plus 1. If the GPU has failed, the
        result lacks the scalars on the GPU.

        For each group, this method records one CUDA event in each stream of the group's scalars.
        These events show whether the GPU has computed the group. If `log` recorded an event for
        each scalar, `log` would be slow.
        """
        with suppress(RuntimeError):  # if the GPU has failed, there is nothing to wait for
            if not self._batch:
                # Other threads may extend the list meanwhile, so it must stay the same list.
                self._batch = self._waiting[:]
                del self._waiting[: len(self._batch)]
                streams = {it.stream for *_, it in self._batch if not isinstance(it, float)}
                self._events = [stream.record_event() for stream in streams]
            if not all(event.query() for event in self._events):  # type: ignore[no-untyped-call]
                return []
        points = []
        for seen_at, step, name, value in self._batch:
            number = self._counts[name] if step is None else step
            self._counts[name] = number + 1
            with suppress(RuntimeError):
                points.append(MetricPoint(name, number, float(value), seen_at))
        self._batch, self._events = [], []
        return points


def _checked_name(name: Any) -> str:
    """Check the name of a scalar, and return it. The name becomes a column of `run.metrics`.

    Names with control characters are refused, because other processes remove these characters from
    texts that ranks send. Two names could then become the name of the same column.

    Raises:
        TypeError: The name is not a string.
        ValueError: The name is too long, or has characters that cannot be shown.
    """
    if not isinstance(name, str):
        raise TypeError(f"taas.log: the name of a value must be a string, not {name!r}")
    if len(name) > NAME_CHARS:
        text = f"taas.log: the name {name[:20]!r}… has {len(name):,} characters"
        raise ValueError(f"{text}; at most {NAME_CHARS:,} are allowed")
    if not name.isprintable() and _NOT_SHOWN.search(name):
        raise ValueError(f"taas.log: the name {name!r} has control characters or surrogates")
    return name


def _checked_step(step: Any) -> int:
    """Return a step as an int.

    Args:
        step: An integer, a float with an integer value such as 3.0, or a tensor that has one
            element with an integer value.

    Raises:
        TypeError: The step is not an integer.
        ValueError: The step has more than 64 bits.
    """
    number = None
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        if not isinstance(step, str) and int(step) == step:
            number = int(step)
    if number is None:
        raise TypeError(f"taas.log: step must be an integer; it is {step!r}")
    if not -_STEP_LIMIT <= number < _STEP_LIMIT:
        raise ValueError("taas.log: step is too large; it must fit into 64 bits")
    return number


def _checked_copy(name: str, value: Any) -> float | _GpuScalar:
    """Check a scalar, and return a copy of its value for the buffer.

    The copy is a float. For a scalar on a GPU, the copy stays on the GPU.

    Args:
        name: Name of the scalar, for the error message.

    Raises:
        TypeError: The value is neither a number nor a tensor or array with one element. Or the
            value is a DTensor with partial sums.
        ValueError: The value is an integer or a fraction that is too large for a float.
    """
    if type(value) is float:  # the most frequent case
        return value
    if any(it.is_partial() for it in getattr(value, "placements", ())):
        text = f"taas.log: {name} is a DTensor with partial sums of the ranks. "
        raise TypeError(f"{text}Log its full_tensor(), which all ranks must call")
    kind = f"a {type(value).__name__}"
    if hasattr(value, "detach"):
        value = value.detach()
        if value.numel() == 1 and not value.is_complex():
            return _GpuScalar(value) if value.is_cuda else float(value)
        kind = f"a {value.dtype} tensor with the shape {tuple(value.shape)}"
    else:
        if getattr(value, "size", None) == 1 and hasattr(value, "item"):  # an array of numpy or JAX
            value = value.item()
        try:
            with suppress(TypeError, ValueError):
                if not isinstance(value, str | bytes):  # `float` also accepts "3.0"
                    return float(value)
        except OverflowError:
            raise ValueError(f"taas.log: {name} is too large for a float") from None
    text = f"taas.log: {name} must be a number, or a tensor or array with one element"
    raise TypeError(f"{text}; it is {kind}")


_buffer: MetricBuffer | None = None


def use_buffer(buffer: MetricBuffer | None) -> None:
    """Set the buffer to which `log` appends scalars. If `buffer` is None, `log` does nothing."""
    global _buffer
    _buffer = buffer


def log(
    values: Mapping[str, Any] | None = None,
    /,
    *wrong: Any,
    step: int | None = None,
    all_ranks: bool = False,
    **scalars: Any,
) -> None:
    """Log scalars of a training. The status header above the run's log draws them as live curves.

    Call `log` in a rank. In the notebook, or in a program outside of a run, `log` does nothing.

    A call takes a few microseconds, or tens of microseconds for a tensor on a GPU. The call does
    not wait, writes no file, and involves no other rank.

    Example:
        `taas.log(step=step, loss=loss, lr=scheduler.get_last_lr()[0])`

    Args:
        values: Scalars by name, for names that cannot be keyword arguments, such as `loss/train` in
            `{"loss/train": loss}`.
        step: Step of the training, the x-coordinate of the curves. By default, steps are counted
            for each name: the first step is 0, and each further step is the last step plus 1. After
            a restart, the first step is 0 again, so a cell that resumes should pass `step`.
        all_ranks: Whether to keep one series for each rank. By default, only rank 0's values are
            kept.
        *wrong: Not allowed. The step and other scalars must be keyword arguments.
        **scalars: More scalars by name.

    Raises:
        TypeError: A positional argument is wrong, a name is not a string, a value is neither a
            number nor a tensor or array with one element, or the step is not an integer.
        ValueError: A value is too large for a float, the step does not fit into 64 bits, or a name
            has control characters or more than 1,000 characters.
    """
    if wrong:
        raise TypeError(_USAGE)
    if _buffer is not None:
        try:
            found = scalars if values is None else {**values, **scalars}
        except TypeError:
            raise TypeError(_USAGE) from None
        _buffer.add(found, step, all_ranks)


def is_recording() -> bool:
    """Return whether to log the scalars that a program gives to other libraries.

    The result is True in a rank, unless the environment variable TAAS_METRICS is "0".
    """
    return _buffer is not None and os.environ.get(METRICS_VARIABLE) != "0"


def record_tensorboard() -> None:
    """Make TensorBoard's `SummaryWriter` also pass each of its scalars to `log`.

    Replaces the methods `add_scalar` and `add_scalars`. Scalars of `add_scalar` keep their names.
    Scalars of `add_scalars` get the names `TAG/NAME`. If `log` refuses a scalar, only TensorBoard
    writes the scalar. Lightning's TensorBoardLogger and transformers' TensorBoardCallback call
    `add_scalar`, so their scalars are logged, too. host/lightning.py handles Trainers of Lightning
    without a TensorBoardLogger.

    Call this function after the import of `torch.utils.tensorboard.writer`.
    """
    from torch.utils.tensorboard import writer

    kind: Any = writer.SummaryWriter
    add_one: Callable[..., Any] = kind.add_scalar
    add_many: Callable[..., Any] = kind.add_scalars

    def add_scalar(
        self: Any,
        tag: str,
        scalar_value: Any,
        global_step: int | None = None,
        *rest: Any,
        **more: Any,
    ) -> Any:
        added = add_one(self, tag, scalar_value, global_step, *rest, **more)
        log_accepted({tag: scalar_value}, global_step)
        return added

    def add_scalars(
        self: Any,
        main_tag: str,
        tag_scalar_dict: Mapping[str, Any],
        global_step: int | None = None,
        *rest: Any,
        **more: Any,
    ) -> Any:
        added = add_many(self, main_tag, tag_scalar_dict, global_step, *rest, **more)
        values = {f"{main_tag}/{name}": value for name, value in tag_scalar_dict.items()}
        log_accepted(values, global_step)
        return added

    kind.add_scalar, kind.add_scalars = add_scalar, add_scalars


def log_accepted(values: Mapping[str, Any], step: int | None) -> None:
    """Log each scalar that `log` accepts, and skip the other scalars without an error.

    Other libraries accept more than `log`, such as a step of 0.5 or a str as a value.

    Args:
        values: Scalars by name.
    """
    for name, value in values.items():
        if not isinstance(value, str):  # for TensorBoard, a str is the name of a caffe2 blob
            with suppress(TypeError, ValueError):
                log({name: value}, step=step)
