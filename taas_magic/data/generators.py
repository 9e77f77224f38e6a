"""Find random generators in a dataset's attributes, and list the types of random generators.

The data service seeds the global generators for each batch, but not generators in attributes. If a
dataset has such a generator, `taas.register` warns the user.
"""

import random
import reprlib
import sys
from collections import deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

_MAX_OBJECTS = 1000
"""Maximum number of objects to examine in one search."""

_MAX_DEPTH = 3
"""Maximum depth of nested attributes to examine."""


def generator_types() -> tuple[type, ...]:
    """Return the types of random generators; numpy's only if this process has imported numpy."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return torch.Generator, random.Random
    made = numpy.random
    return torch.Generator, random.Random, made.Generator, made.RandomState, made.BitGenerator


def find_generators(value: object) -> Iterator[str]:
    """Yield the paths of the random generators in an object, such as `transform.noise.rng`.

    Search attributes, lists, tuples and dicts, up to `_MAX_OBJECTS` objects and `_MAX_DEPTH` nested
    attributes. Do not search the attributes of classes, modules and tensors.
    """
    kinds = generator_types()
    left = deque([("", value)])
    for _ in range(_MAX_OBJECTS):
        if not left:
            return
        path, one = left.popleft()
        if isinstance(one, kinds):
            yield path
        elif path.count(".") < _MAX_DEPTH:
            left.extend(_parts(path, one))


def _parts(path: str, value: object) -> list[tuple[str, object]]:
    if isinstance(value, (list, tuple)):
        return [(f"{path}[{at}]", one) for at, one in enumerate(value[:_MAX_OBJECTS])]
    if isinstance(value, dict):
        # Skip numbers and strings, so that a large vocabulary does not use up `_MAX_OBJECTS`.
        return [
            (f"{path}[{reprlib.repr(key)}]", one)
            for key, one in list(value.items())[:_MAX_OBJECTS]
            if not isinstance(one, (str, int, float))
        ]
    if isinstance(value, (type, ModuleType, torch.Tensor)):
        return []
    attributes = getattr(value, "__dict__", {})
    return [(f"{path}.{name}".lstrip("."), one) for name, one in attributes.items()]
