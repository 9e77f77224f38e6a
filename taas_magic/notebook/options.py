"""Check the function and the options of `taas.run` and of a farm's jobs."""

import inspect
import reprlib
from collections.abc import Callable, Collection
from typing import Any

from taas_magic.capture.work import function_name
from taas_magic.errors import UsageError

_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Kinds of parameters that a keyword argument can set."""


def check_callable(what: str, function: object) -> None:
    """Check that the user has passed a function or another callable.

    Args:
        what: The call that needs the function, such as "taas.run".
        function: The object that the user has passed.

    Raises:
        UsageError: The object is not callable.
    """
    if not callable(function):
        raise UsageError(
            f"{what} needs a function or another callable as its first argument; got "
            f"{text_of_value(function)}. To call the function train, pass train and its arguments, "
            "and not train()"
        )


def text_of_value(value: object) -> str:
    """Return the type of a value and the beginning of its text, for messages."""
    return f"{type(value).__name__} {reprlib.repr(value)}"


def refuse_shared_names(what: str, function: Callable[..., Any], given: Collection[str]) -> None:
    """Check that the given options and the function's parameters share no name.

    If an option and a parameter had the same name, the call would use the user's keyword argument
    as the option, although the user may have meant the parameter. Parameters that no keyword
    argument can set, and parameters that `functools.partial` has set, do not count. If the
    function's signature is unknown, check nothing.

    Args:
        what: The call that has the options, such as "taas.run".
        function: The user's function.
        given: Names of the options that the user gave.

    Raises:
        UsageError: An option and a parameter share a name.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function written in C may have no signature
        return
    names = {each.name for each in parameters if each.kind in _KEYWORDS}
    names -= set(getattr(function, "keywords", ()))
    if shared := sorted(names & set(given)):
        raise UsageError(
            f"{function_name(function)} has a parameter `{shared[0]}`, but {what} has an option of "
            "the same name. To set the parameter, pass functools.partial(function, "
            f"{shared[0]}=...) instead of the function"
        )
