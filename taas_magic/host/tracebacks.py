"""Functions that turn a rank's exceptions and its threads' stacks into text for the user.

The text names cells like `Cell In[5]` and shows their source lines. It leaves out the frames of
IPython and of this package before the user's first frame.
"""

import errno
import faulthandler
import gc
import itertools
import linecache
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from taas_magic.capture.payload import CellSource
from taas_magic.capture.reducers import project_home
from taas_magic.errors import TaasError
from taas_magic.host.link import SIGNAL, Link
from taas_magic.messages import RankRaised, StackFrame
from taas_magic.store import guard

if TYPE_CHECKING:
    from sys import UnraisableHookArgs
    from threading import ExceptHookArgs


MESSAGE_LIMIT_CHARS = 4096
TRACEBACK_LIMIT_CHARS = 65536
_INNERMOST = 8

_labels: dict[str, str] = {}
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_ABOVE = (
    _OURS,
    f"{os.sep}IPython{os.sep}core{os.sep}",
    f"{os.sep}multiprocessing{os.sep}",
    "<string>",
)


def register_sources(sources: Mapping[str, CellSource]) -> Mapping[str, str]:
    """Register the notebook's cells with linecache, so that tracebacks show their source lines.

    Returns:
        The label of each registered cell, such as `Cell In[5]`, by its file name.
    """
    for name, source in sources.items():
        lines = source.text.splitlines(keepends=True)
        linecache.cache[name] = (len(source.text), None, lines, name)
        _labels[name] = source.label
    return _labels


def send(link: Link, failure: RankRaised) -> None:
    """Send a rank's failure to the agent.

    A child that the cell forked is no rank, so it writes the failure to standard error instead.
    """
    if link.is_own:
        link.send(failure)
    elif not failure.is_logged:  # a child's failure is not the rank's, as under torchrun
        sys.stderr.write("\n".join([*failure.traceback, ""]))


def failure_of(error: BaseException, text: str | None = None) -> RankRaised:
    """Return the message with which a rank describes an exception to the agent.

    Args:
        text: The formatted traceback; None uses `plain(error)`.
    """
    try:
        text = plain(error) if text is None else text
    except Exception as broken:  # the exception's __str__ or __repr__ failed, or deep recursion
        text = f"<the traceback could not be drawn: {type(broken).__name__}>"
    lines = cut(text, TRACEBACK_LIMIT_CHARS).splitlines()
    kind = type(error)
    return RankRaised(kind.__name__, message_of(error), lines, etype_module=str(kind.__module__))


def plain(error: BaseException) -> str:
    """Return the traceback of an exception and its causes as text, as Python prints it.

    It starts at the user's first frame. It leaves out the causes of a `TaasError`, because its
    message is complete without them.
    """
    described = traceback.TracebackException.from_exception(error)
    _tidy(described)
    return "".join(described.format(chain=not isinstance(error, TaasError)))


def remove_own_frames(error: BaseException) -> None:
    """Remove this package's frames from the traceback of an exception and of its causes."""
    for one in _chain(error):
        one.__traceback__ = _without_ours(one.__traceback__)


def _chain(first: Any) -> Iterator[Any]:
    """Yield an exception, its causes and the parts of its groups, each once.

    Args:
        first: The exception, or a `TracebackException`.
    """
    waiting, met = [first], set()
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in met:
            met.add(id(one))
            yield one
            has_parts = is_group(one) or isinstance(one, traceback.TracebackException)
            parts = getattr(one, "exceptions", None) if has_parts else None
            waiting += [one.__cause__, one.__context__, *(parts or ())]


def _without_ours(one: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this package.

    Frames between this package's first and last frame are left out too, such as those of IPython,
    except frames of the notebook's cells.
    """
    found: list[TracebackType] = []
    while one is not None:
        found.append(one)
        one = one.tb_next
    names = [each.tb_frame.f_code.co_filename for each in found]
    ours = [i for i, name in enumerate(names) if name.startswith(_OURS)]
    between = range(ours[0], ours[-1] + 1) if ours else range(0)
    made = None
    for i, each in reversed([*enumerate(found)]):
        if i not in between or names[i] in _labels:
            made = TracebackType(made, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return made


def frames(error: BaseException) -> list[str]:
    """Return the user's frames of an exception as lines of text."""
    described = traceback.TracebackException.from_exception(error)
    _tidy(described)
    return "".join(described.stack.format()).splitlines()


def where(thread: int) -> list[StackFrame]:
    """Return the last few frames of a thread, outermost first.

    The innermost frame of a cell is always included. If it is not among the last few frames, it
    comes first in the result.

    Args:
        thread: Identifier of the thread.
    """
    stack = _stack_of(current_frames().get(thread))
    shown = stack[-_INNERMOST:]
    cells = [frame for frame in stack if frame.file in _labels.values()]
    if cells and cells[-1] not in shown:  # libraries are deep: Lightning adds 30 frames
        shown.insert(0, cells[-1])
    return shown


def threads(main: int) -> dict[str, list[StackFrame]]:
    """Return the stacks of this process's threads by name, outermost frame first.

    The main thread comes first. Threads of this package are left out.

    Args:
        main: Identifier of the main thread.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()} | {main: "MainThread"}
    frames = current_frames()
    found: dict[str, list[StackFrame]] = {}
    for ident in sorted(frames, key=lambda ident: ident != main):
        name = names.get(ident) or f"thread {ident}"
        if not name.startswith("taas-"):
            found[f"{name}, {ident}" if name in found else name] = _stack_of(frames[ident])
    return found


def current_frames() -> dict[int, FrameType]:
    """Return the current frame of each thread, by its identifier.

    Disables garbage collection during the call: before Python 3.12, a collection may start inside
    `sys._current_frames`. If that collection runs a `__del__` that releases the interpreter's lock,
    this process may deadlock, and so may a child forked at that moment (python/cpython#106883,
    #112275).
    """
    collects = sys.version_info < (3, 12) and gc.isenabled()
    if collects:
        gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def _stack_of(frame: FrameType | None) -> list[StackFrame]:
    """Return a thread's frames, outermost first, from the user's first frame on.

    Args:
        frame: The innermost frame; None if the thread has ended.
    """
    stack = traceback.extract_stack(frame) if frame else traceback.StackSummary()
    _tidy_frames(stack)
    return [StackFrame(it.filename, it.lineno or 0, it.name, it.line or "") for it in stack]


def write_stack_on_signal(path: Path) -> None:
    """Install a signal handler with which this process and its forks write their stacks to a file.

    On `SIGNAL`, faulthandler writes the main thread's stack.

    Args:
        path: The file, which is only for stacks. This process and its forks share it, because the
            agent signals only one process at a time.
    """
    faulthandler.register(SIGNAL, file=path.open("a"), all_threads=False, chain=False)


def is_group(error: BaseException | None) -> bool:
    """Return whether `error` is an exception group, which exists from Python 3.11 on."""
    return hasattr(error, "exceptions") and hasattr(error, "split")


def print_of_thread(failed: "ExceptHookArgs") -> None:
    """Print the exception that ended a thread to standard error, as `plain` formats it.

    Installed as `threading.excepthook`.
    """
    if failed.exc_value is not None and not isinstance(failed.exc_value, SystemExit):
        name = failed.thread.name if failed.thread is not None else "?"
        sys.stderr.write(f"Exception in thread {name}:\n{plain(failed.exc_value)}")


def print_unraisable(failed: "UnraisableHookArgs") -> None:
    """Print an exception that no code can catch, because `__del__` or atexit raised it.

    Installed as `sys.unraisablehook`.
    """
    if failed.exc_value is not None:
        where = f"{failed.err_msg or 'Exception ignored in'}: {failed.object!r}"
        sys.stderr.write(f"{where}\n{plain(failed.exc_value)}")


def message_of(error: BaseException) -> str:
    """Return an exception's text, with a hint for the user if this module has one.

    If `__str__` fails, a text that says so takes its place. The text is cut to
    `MESSAGE_LIMIT_CHARS`.
    """
    try:
        hint = _room_left(error) or _not_in_the_copy(error) or guard.why_refused(error)
        return cut(str(error), MESSAGE_LIMIT_CHARS) + hint
    except Exception as broken:
        return f"<the exception's __str__ raised {type(broken).__name__}>"


def _not_in_the_copy(error: BaseException) -> str:
    """Return a hint if a path is missing because this host has only a copy of the project, else "".

    The path may exist on the notebook's machine, outside the project.
    """
    home = project_home()
    if not home or not isinstance(error, FileNotFoundError):
        return ""
    said = f"{error.filename or ''} {error}"
    if f"{home}/" not in said and (os.getcwd() in said or not os.path.isabs(said)):
        return ""
    return (
        f" (this host does not see the notebook's files. It has only a copy of {home}: use a path "
        "relative to it, or a pathlib.Path from the notebook; docs/store.md)"
    )


def cut(text: str, limit_chars: int) -> str:
    """Shorten a text to about `limit_chars` by a marked cut in the middle."""
    if len(text) <= limit_chars:
        return text
    half = limit_chars // 2
    return f"{text[:half]}\n… [{len(text) - limit_chars} characters cut] …\n{text[-half:]}"


def _tidy(described: Any) -> None:
    """Apply `_tidy_frames` to a `TracebackException`, its causes and its parts."""
    for one in _chain(described):
        _tidy_frames(one.stack)
        filename = getattr(one, "filename", None)  # only a syntax error has one
        if filename in _labels:
            one.filename = _labels[filename]


def _tidy_frames(stack: traceback.StackSummary) -> None:
    lead = itertools.takewhile(lambda frame: any(it in frame.filename for it in _ABOVE), stack)
    del stack[: len(list(lead))]
    for frame in stack:
        if frame.filename in _labels:
            _ = frame.line  # loads the line from linecache, which knows only the original name
            frame.filename = _labels[frame.filename]


def _room_left(error: BaseException) -> str:
    """Return a hint if a write failed because the disk is full, else "".

    The hint names the folder and the disk's free bytes.
    """
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    store = os.getcwd()
    return f" (the disk of {store} has {shutil.disk_usage(store).free} bytes free)"
