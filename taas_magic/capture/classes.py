"""The notebook's classes travel by value and come home as themselves.

cloudpickle gives each such class an id, so that a process that has it already does not get a
second one. It would still fill the class anew, and so give the notebook's class the methods that
the rank's copy has; and a result would carry all that those methods use. Here a class is filled
only where it was made, and a result names the notebook's classes instead of carrying them.
"""

import weakref
from collections.abc import Callable
from typing import Any

from cloudpickle import cloudpickle as internals

from taas_magic.errors import CaptureError

_unfilled: set[str] = set()
_received: "weakref.WeakSet[type]" = weakref.WeakSet()


def reduce_by_value(cls: type, reduced: tuple[Any, ...], coming_home: bool) -> tuple[Any, ...]:
    """Turns cloudpickle's reduction of a class into ours.

    Args:
        cls: A class of the notebook.
        reduced: What cloudpickle makes of it.
        coming_home: Whether it goes back to the notebook that it may have come from.
    """
    make, args = reduced[:2]
    if make not in (internals._make_skeleton_class, internals._make_skeleton_enum):
        return reduced
    tracker_id = internals._get_or_create_tracker_id(cls)
    if coming_home and cls in _received:
        return _known_class, (tracker_id, cls.__qualname__)
    state = (tracker_id, reduced[2])
    return _make_class, (tracker_id, make, args), state, None, None, _fill_class


def _make_class(tracker_id: str, make: Callable[..., type], args: tuple[Any, ...]) -> type:
    """The class of that id if this process has it: a result that comes home finds its own."""
    known: type | None = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    if known is not None:
        return known
    _unfilled.add(tracker_id)
    return make(*args)


def _fill_class(cls: type, state: tuple[str, Any]) -> None:
    tracker_id, class_state = state
    if tracker_id in _unfilled:
        _unfilled.discard(tracker_id)
        internals._class_setstate(cls, class_state)
        _received.add(cls)


def _known_class(tracker_id: str, name: str) -> type:
    known: type | None = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    if known is None:
        raise CaptureError(
            f"the result holds `{name}`, a class of the notebook that started the run and of which "
            "this kernel knows nothing; load the run's payload first, or return a state_dict()"
        )
    return known
