"""Functions that turn a rank's exceptions and its threads' stacks into text for the user.

The text shows cells by labels such as `Cell In[5]`, with their source lines, and begins at the
user's first frame.
"""

import errno
import faulthandler
import gc
import io
import itertools
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from taas_magic.capture.payload import CellSource
from taas_magic.capture.reducers import project_home
from taas_magic.errors import TaasError
from taas_magic.host.link import STACK_SIGNAL, AgentLink, flush_output
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
    """Add the notebook's cells to linecache, so that tracebacks show source lines of the cells.

    Args:
        sources: The cells, by the file name under which each cell was compiled.

    Returns:
        The labels of all cells registered so far, such as `Cell In[5]`, by file name.
    """
    for name, source in sources.items():
        lines = source.text.splitlines(keepends=True)
        linecache.cache[name] = (len(source.text), None, lines, name)
        _labels[name] = source.label
    return _labels


def send_failure(link: AgentLink, failure: RankRaised) -> None:
    """Send a rank's failure to the agent, after a flush of stdout.

    A child that the cell forked does not send the failure. Instead, the child writes the traceback
    to standard error, unless the shell has already written it.
    """
    with suppress(Exception):  # the user's code may have replaced stdout
        flush_output()
    if link.is_own:
        link.send(failure)
    elif not failure.is_logged:  # as under torchrun, a child's failure is not the rank's failure
        sys.stderr.write(as_output(failure))


def as_output(failure: RankRaised) -> str:
    """Return a traceback as text for standard error.

    The text begins with an empty line, because the last line of the output may be unfinished.
    """
    return "\n".join(["", *failure.traceback, ""])


def describe_exception(error: BaseException, text: str | None = None) -> RankRaised:
    """Return the message by which a rank reports an exception to the agent.

    The message has the exception's type, its text with a hint for the user, and its traceback. Long
    texts are cut. If the exception's own code fails, such as its `__str__`, a short text replaces
    the traceback.

    Args:
        text: The formatted traceback. None to format the traceback in Python's own format.
    """
    try:
        text = format_plain(error) if text is None else text
    except Exception as broken:  # the exception's __str__ or __repr__ raised, or recursed too deep
        text = f"<the traceback could not be drawn: {type(broken).__name__}>"
    lines = shorten(text, TRACEBACK_LIMIT_CHARS).splitlines()
    kind = type(error)
    return RankRaised(kind.__name__, message_of(error), lines, etype_module=str(kind.__module__))


def format_plain(error: BaseException) -> str:
    """Return the traceback of an exception and its causes, in Python's own format.

    The traceback starts at the user's first frame. For a `TaasError`, the causes are left out,
    because the message of a `TaasError` is complete without them.
    """
    described = traceback.TracebackException.from_exception(error)
    _tidy(described)
    return "".join(described.format(chain=not isinstance(error, TaasError)))


def remove_own_frames(error: BaseException) -> None:
    """Remove this package's frames from the traceback of an exception and of its causes."""
    for one in _chain(error):
        one.__traceback__ = _without_ours(one.__traceback__)


def _chain(first: Any) -> Iterator[Any]:
    """Yield an exception, its causes and contexts, and the members of exception groups, each once.

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
    """Return a copy of a traceback without this package's frames and the frames between them.

    Frames of cells stay, even between frames of this package. Frames before the first and after the
    last frame of this package also stay. The given traceback does not change. If no frame stays,
    the result is None.
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


def format_frames(error: BaseException) -> list[str]:
    """Return the frames of an exception's traceback as text, from the user's first frame on."""
    described = traceback.TracebackException.from_exception(error)
    _tidy(described)
    return "".join(described.stack.format()).splitlines()


def innermost_frames(thread: int) -> list[StackFrame]:
    """Return the `_INNERMOST` innermost frames of a thread, outermost first.

    If none of these frames is in a cell, but an outer frame is, the result begins with the
    innermost frame that is in a cell. So the result shows the position in the user's code, even if
    the cell has called a deep library.

    Args:
        thread: Identifier of the thread.
    """
    stack = _stack_of(current_frames().get(thread))
    shown = stack[-_INNERMOST:]
    cells = [frame for frame in stack if frame.file in _labels.values()]
    if cells and cells[-1] not in shown:  # libraries are deep: Lightning adds 30 frames
        shown.insert(0, cells[-1])
    return shown


def sample_threads(main: int) -> dict[str, list[StackFrame]]:
    """Return the stack of each thread of this process, by the thread's name.

    A stack begins with the user's first frame, and the newest frame is last. The main thread comes
    first, always as `MainThread`. Threads of this package are left out. If two threads have the
    same name, the key of the second thread also has its identifier.

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
    """Return the current frame of each thread, by the thread's identifier.

    Before Python 3.12, garbage collection is disabled during the call. Otherwise, a garbage
    collection inside `sys._current_frames` could run a `__del__` method. If this method releases
    the interpreter's lock, this process or a child could deadlock (python/cpython#106883, #112275).
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
    """Make this process and its forks append the main thread's stack to a file on `STACK_SIGNAL`.

    All these processes write to the same file. Their stacks do not mix, because the agent sends
    `STACK_SIGNAL` to only one process at a time.
    """
    faulthandler.register(STACK_SIGNAL, file=path.open("a"), all_threads=False, chain=False)


def is_group(error: BaseException | None) -> bool:
    """Return whether `error` is an exception group. Python has exception groups since 3.11."""
    return hasattr(error, "exceptions") and hasattr(error, "split")


def print_thread_exception(failed: "ExceptHookArgs") -> None:
    """Print the exception that ended a thread to standard error, from the user's first frame on.

    Prints nothing for SystemExit. Installed as `threading.excepthook`.
    """
    if failed.exc_value is not None and not isinstance(failed.exc_value, SystemExit):
        name = failed.thread.name if failed.thread is not None else "?"
        sys.stderr.write(f"Exception in thread {name}:\n{format_plain(failed.exc_value)}")


def print_unraisable(failed: "UnraisableHookArgs") -> None:
    """Print an exception that no code can catch to standard error, from the user's first frame on.

    An example is an exception in a `__del__` method. Installed as `sys.unraisablehook`.
    """
    if failed.exc_value is not None:
        where = f"{failed.err_msg or 'Exception ignored in'}: {failed.object!r}"
        sys.stderr.write(f"{where}\n{format_plain(failed.exc_value)}")


def message_of(error: BaseException) -> str:
    """Return an exception's text. For some causes, a hint for the user follows the text.

    The causes with a hint are a full disk, a file that this host does not have, and a refused write
    to the project store. If `torch.load` raised the exception, the name of the file precedes the
    text. A text longer than `MESSAGE_LIMIT_CHARS` is cut. If the exception's `__str__` fails, the
    result only says so.
    """
    try:
        hint = _disk_full_hint(error) or _missing_file_hint(error) or guard.why_refused(error)
        text = shorten(str(error), MESSAGE_LIMIT_CHARS)
        return ": ".join(filter(None, (_torch_file(error), text))) + hint
    except Exception as broken:
        return f"<the exception's __str__ raised {type(broken).__name__}>"


def _torch_file(error: BaseException) -> str:
    """Return text with the name of the file that `torch.load` was reading when it raised `error`.

    Return "" if another function raised the exception, or if its text already has the file's name.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code, file = frame.f_code, frame.f_locals.get("f")
        is_load = code.co_name == "load" and code.co_filename.endswith("/torch/serialization.py")
        if is_load and isinstance(file, str | os.PathLike) and os.fsdecode(file) not in str(error):
            return f"torch.load of {os.fsdecode(file)!r}"
    return ""


def _missing_file_hint(error: BaseException) -> str:
    """Return a hint if a file is missing because this host has only a copy of the project store.

    Return "" unless all of these are true:

    - This host uses a copy of the project store.
    - The exception is a FileNotFoundError.
    - The missing path is below the notebook's folder on the notebook's machine, or is an absolute
      path outside the current folder.
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


def shorten(text: str, limit_chars: int) -> str:
    """Return `text`. If it is longer than `limit_chars`, a mark replaces its middle part.

    The mark says how many characters are missing. With the mark, the result is a little longer than
    `limit_chars`.
    """
    if len(text) <= limit_chars:
        return text
    half = limit_chars // 2
    return f"{text[:half]}\n… [{len(text) - limit_chars} characters cut] …\n{text[-half:]}"


def _tidy(described: Any) -> None:
    """Remove the frames before the user's first frame, and name cells by their labels, in place.

    Args:
        described: A `TracebackException`. Its causes, contexts and the members of exception groups
            are changed, too.
    """
    for one in _chain(described):
        _tidy_frames(one.stack)
        filename = getattr(one, "filename", None)  # only a syntax error has one
        if filename in _labels:
            one.filename = _labels[filename]


def _tidy_frames(stack: traceback.StackSummary) -> None:
    """Remove the frames before the user's first frame from `stack`.

    Also replace the file names of cells by the cells' labels.
    """
    lead = itertools.takewhile(lambda frame: any(it in frame.filename for it in _ABOVE), stack)
    del stack[: len(list(lead))]
    for frame in stack:
        if frame.filename in _labels:
            _ = frame.line  # loads the line now, because linecache knows only the original name
            frame.filename = _labels[frame.filename]


def _disk_full_hint(error: BaseException) -> str:
    """Return a hint with the free space if a disk or a quota is full; "" for any other error.

    The hint names the disk of the file that could not be written. If this file is not known, the
    hint names the disks of the working directory and of the folder for temporary files. If the free
    space cannot be read, the result is "".
    """
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    try:
        path = _written_path(error)
        if path:
            return f" ({_free_space(os.path.dirname(os.path.abspath(path)))})"
        folders = [os.getcwd(), os.environ.get("TMPDIR") or "/tmp"]
        disks = {os.stat(folder).st_dev: folder for folder in reversed(folders)}
        free = ", ".join(map(_free_space, reversed(disks.values())))
    except (OSError, ValueError):  # a folder has been removed, or a file object is damaged
        return ""
    return f" (the error does not name the file; {free})"


def _written_path(error: OSError) -> str:
    """Return the path of the file to which a call could not write; "" if the path is not known.

    If the error names one file, return the path of this file. If the error names two files, for
    example after a failed copy, return the path of the destination.

    If the error names no file, for example after a failed `write`, search the local variables of
    the traceback's frames for files that were opened for writing. The search starts at the
    innermost frame, and ends at the first frame that has such files. If this frame has more than
    one of them, return "".
    """
    for named in (error.filename2, error.filename):  # `filename2` is the destination of a copy
        if isinstance(named, str | bytes):
            return os.fsdecode(named)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        if paths := set(filter(None, map(_path_if_written, frame.f_locals.values()))):
            return paths.pop() if len(paths) == 1 else ""
    return ""


def _path_if_written(value: object) -> str:
    """Return the path of a file object that was opened for writing; "" for any other object."""
    if not isinstance(value, io.TextIOWrapper | io.BufferedIOBase | io.RawIOBase):
        return ""
    name, mode = getattr(value, "name", None), getattr(value, "mode", "r")
    is_path = isinstance(name, str) and not name.startswith("<")  # such as <stdout>
    return str(name) if is_path and mode not in ("r", "rb", "rt") else ""


def _free_space(folder: str) -> str:
    """Return a text with the free space of a folder's disk, in bytes.

    If the disk has no inodes left, the text says so, too. If the folder does not exist, the
    function uses its nearest parent that exists.
    """
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    room = os.statvfs(folder)
    has_inodes = room.f_favail or not room.f_files  # some file systems do not count inodes
    free = f"the disk of {folder} has {room.f_bavail * room.f_frsize} bytes free"
    return free if has_inodes else f"{free}, but no inodes: it has too many files"
