"""Check that a call's options and the parameters of the user's function share no name."""

import inspect
from collections.abc import Callable, Collection
from typing import Any

from taas_magic.capture.work import function_name
from taas_magic.errors import UsageError


def refuse_shared_names(what: str, function: Callable[..., Any], given: Collection[str]) -> None:
    """Check that the given options and the function's parameters share no name.

    If an option and a parameter had the same name, the call would use the user's keyword argument
    as the option, although the user may have meant the parameter. Parameters that
    `functools.partial` has set do not count. If the function's signature is unknown, check nothing.

    Args:
        what: The call that has the options, such as "taas.run".
        function: The user's function.
        given: Names of the options that the user gave.

    Raises:
        UsageError: An option and a parameter share a name.
    """
    try:
        names = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function written in C may have no signature
        return
    names -= set(getattr(function, "keywords", ()))
    if shared := sorted(names & set(given)):
        raise UsageError(
            f"{function_name(function)} has a parameter `{shared[0]}`, but {what} has an option of "
            "the same name. To set the parameter, pass functools.partial(function, "
            f"{shared[0]}=...) instead of the function"
        )
