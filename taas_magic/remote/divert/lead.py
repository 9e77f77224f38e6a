"""From the path that a call was given to the one that it is called with."""

from collections.abc import Callable
from typing import Any

from taas_magic.remote.divert.views import View

Path = Any
"""What a file call takes: str, bytes, PathLike or a descriptor."""


def lead(
    view: View,
    decide: Callable[[str], str | None],
    path: Path,
    folder: int | None = None,
    *,
    follow: bool = False,
) -> tuple[Path, int | None]:
    """The path, and the descriptor that it starts at, to call with.

    Args:
        view: The rank's view.
        decide: What the view says of a path in the store: another path, or None for that itself.
        path: As the call was given it.
        folder: The call's `dir_fd`.
        follow: Whether the call follows a symbolic link at the path's end.
    """
    if view.busy:
        return path, folder
    with view.plain():
        place = view.locate(path, folder, follow=follow)
        led = None if place is None else decide(place)
    return (path, folder) if led is None else (led, None)


def own_file(
    view: View, path: Path, folder: int | None = None, *, follow: bool = True
) -> str | None:
    """The rank's own file of that path, if it has one."""
    if view.busy or not view.used:
        return None
    with view.plain():
        place = view.locate(path, folder, follow=follow)
        return None if place is None else view.own(place)


def call_led(
    real: Callable[..., Any],
    asked: Path,
    led: Path,
    folder: int | None,
    *args: Any,
    **kw: Any,
) -> Any:
    """Calls with the path that `asked` was led to; an error names the one that was asked for."""
    if folder is not None:
        kw["dir_fd"] = folder
    try:
        return real(led, *args, **kw)
    except OSError as error:
        if led is not asked and error.filename == led:
            error.filename = asked
        raise
