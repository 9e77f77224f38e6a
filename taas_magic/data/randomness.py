"""The random numbers of a process: torch's (CPU), random's, and numpy's where it is in use."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def seed_all(seed: int) -> None:
    """Seed all of them; a few microseconds."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFF_FFFF)


def state() -> Any:
    """Where all of them stand."""
    numpy: Any = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    return torch.default_generator.get_state(), random.getstate(), numpy_state


def go_to(state: Any) -> None:
    """Have all of them go on from where they stood."""
    torch_state, python_state, numpy_state = state
    torch.default_generator.set_state(torch_state)
    random.setstate(python_state)
    if numpy_state is not None:
        sys.modules["numpy"].random.set_state(numpy_state)


@contextmanager
def kept() -> Iterator[None]:
    """Leave the process's random numbers as they are, whatever is drawn inside."""
    before = state()
    try:
        yield
    finally:
        go_to(before)
