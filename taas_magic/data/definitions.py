"""Add a loader's functions and classes from the notebook to the `__main__` of a worker.

The loader's code in a worker may pickle such a function, or an instance of such a class, for
example to send it to a process pool. pickle saves only the name of the function or class, and looks
this name up in `__main__`.
"""

import itertools
import sys
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

_COPIES = "_taas_copies"
"""Name in `__main__` of the `_Copies` object.

Through this object, pickle finds the functions of a second or later copy of a loader
(`Definitions`).
"""


class Definitions:
    """Namespace with the notebook's functions and classes that one unpickled copy of a loader uses.

    The constructor makes pickle find these functions and classes. All copies of a loader in a
    process share the classes, but each copy has its own functions. The functions of the first copy
    are added to `__main__` under their own names. A function of a further copy gets a
    `__qualname__` such as `_taas_copies.copy1.transform`. pickle finds the function by this path
    from `__main__`, as long as the copy's `Definitions` object exists.

    Args:
        found: The functions and classes by name.
    """

    def __init__(self, found: Mapping[str, Any]) -> None:
        main, key = sys.modules["__main__"], f"copy{next(_numbers)}"
        for name, value in found.items():
            setattr(self, name, value)
            if getattr(main, name, value) is value:
                setattr(main, name, value)
            else:
                setattr(main, _COPIES, _Copies())
                value.__qualname__ = f"{_COPIES}.{key}.{name}"
        _copies[key] = self


class _Copies:
    """Object in `__main__` that has each `Definitions` of this process as an attribute.

    The names of the attributes are `copy1`, `copy2` and so on, one for each loader that this
    process has unpickled. pickle saves a function of such a loader as a path of attributes, which
    leads from `__main__` through this object to the function.
    """

    def __getattr__(self, key: str) -> Definitions:
        try:
            return _copies[key]
        except KeyError:
            raise AttributeError(key) from None


_copies: "WeakValueDictionary[str, Definitions]" = WeakValueDictionary()
_numbers = itertools.count()
