"""The debuggers of a rank: `breakpoint()`, `%taas debug`, and debugpy for VS Code."""

import os
import pdb
import socket
import sys
from collections.abc import Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any

from msgspec import Struct, to_builtins

from taas_magic.host.spec import HOST

BREAKPOINT_VARIABLE = "PYTHONBREAKPOINT"
"""Python's environment variable that chooses another debugger for `breakpoint()`."""

_NO_WARNING = "PYDEVD_DISABLE_FILE_VALIDATION"
"""Environment variable that keeps debugpy from printing a warning about frozen modules."""


class BreakpointHook:
    """The function that `breakpoint()` calls in a rank (`sys.breakpointhook`).

    Args:
        namespace: Namespace of the rank's `__main__`.
        caller: Code of the method that calls the work's function if the work is no cell.
    """

    def __init__(self, namespace: Mapping[str, Any], caller: CodeType) -> None:
        self._namespace, self._caller = namespace, caller
        self._debugger: _CellDebugger | None = None

    def install(self) -> None:
        """Make `breakpoint()` call this hook, unless `PYTHONBREAKPOINT` chooses a debugger."""
        if not os.environ.get(BREAKPOINT_VARIABLE):
            sys.breakpointhook = self

    def __call__(self, *args: Any, header: str | None = None, **options: Any) -> Any:
        """Open the debugger at the caller's line. The user types the debugger's commands.

        Args:
            header: Text to print first, as for `pdb.set_trace`.
        """
        if os.environ.get(BREAKPOINT_VARIABLE):  # set by the cell
            return sys.__breakpointhook__(*args, header=header, **options)
        self.stop(sys._getframe().f_back, header)
        return None

    def stop(self, frame: FrameType | None, header: str | None = None) -> None:
        """Open the debugger in a frame; `header` is a text to print first."""
        self._debugger = debugger = _CellDebugger(self)
        if header is not None:
            debugger.message(header)
        debugger.set_trace(frame)

    def end_stepping(self) -> None:
        """End the single steps of the debugger. Called when the work has ended.

        Breakpoints that the user has set in the debugger stay.
        """
        debugger = self._debugger
        if debugger is not None and sys.gettrace() == debugger.trace_dispatch:
            debugger.set_continue()

    def is_statement(self, frame: FrameType) -> bool:
        """Return whether a frame runs a statement of a cell outside any function."""
        return frame.f_globals is self._namespace and frame.f_code.co_name == "<module>"

    def find_root(self, frame: FrameType | None) -> FrameType | None:
        """Return the frame of the work's function if it called `frame`; else None."""
        while frame is not None:
            if frame.f_back is not None and frame.f_back.f_code is self._caller:
                return frame
            frame = frame.f_back
        return None

    def is_users(self, frame: FrameType | None, root: FrameType | None) -> bool:
        """Return whether a frame belongs to the work, or to a function that the work called.

        False for the code of IPython and of this package that runs the work.

        Args:
            root: Frame of the work's function; None if the work is a cell.
        """
        while frame is not None:
            if frame.f_globals is self._namespace or frame is root:
                return True
            frame = frame.f_back
        return False


class _CellDebugger(pdb.Pdb):
    """Python's debugger, which steps from one statement of a cell to the next one.

    IPython runs each statement of a cell on its own. After the end of a statement, Python's own
    debugger would stop in IPython's code. In a thread that the work has started, this class behaves
    as Python's debugger.
    """

    def __init__(self, hook: BreakpointHook) -> None:
        # Without `nosigint`, an interrupt after `c` would open the debugger and not end the cell.
        super().__init__(nosigint=True)
        self._hook = hook
        self._is_in_work = self._has_stopped = False
        self._root: FrameType | None = None

    def set_trace(self, frame: FrameType | None = None, **options: Any) -> None:
        self._root = self._hook.find_root(frame)
        self._is_in_work = self._hook.is_users(frame, self._root)
        super().set_trace(frame, **options)

    def stop_here(self, frame: FrameType) -> bool:
        stops: bool = super().stop_here(frame)
        return stops and not self._is_outside(frame)

    def interaction(self, *args: Any, **options: Any) -> None:
        self._has_stopped = True
        super().interaction(*args, **options)

    def user_call(self, frame: FrameType, argument_list: Any) -> None:
        """Stop at the call of a function, but not before the first line of a statement."""
        if not self._hook.is_statement(frame):
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        """Stop at the end of a function, but not at the end of a statement.

        If `breakpoint()` is a statement, the debugger has not stopped yet, so it stops here.
        """
        is_over = self._has_stopped and self._hook.is_statement(frame)
        if not is_over and not self._is_outside(frame):
            super().user_return(frame, return_value)

    def _is_outside(self, frame: FrameType) -> bool:
        return self._is_in_work and not self._hook.is_users(frame, self._root)


def last_exception() -> str:
    """Return this rank's last exception in one line; "" if the rank has raised none."""
    if not hasattr(sys, "last_traceback"):
        return ""
    text = " ".join(str(sys.last_value).split())
    return f"{getattr(sys.last_type, '__name__', sys.last_type)}: {text}".removesuffix(": ")


class DebugpyListener(Struct, frozen=True):
    """The port on which debugpy waits in one rank for a client such as VS Code.

    Attributes:
        host: Name of the rank's host, as the user knows it.
        port: Port on the host's loopback address; 0 if debugpy is missing.
        problem: Reason why debugpy does not wait, for the user; "" if it waits.
    """

    host: str
    port: int = 0
    problem: str = ""


_listening: list[DebugpyListener] = []
"""The listener of this rank, if any. debugpy can listen only once in a process."""


def listen_with_debugpy(rank: int) -> dict[str, Any] | None:
    """Make debugpy wait for a client in rank `rank`; do nothing in other ranks.

    All ranks of a session run this function. A second call returns the same port.

    Returns:
        The fields of this rank's `DebugpyListener`; None in other ranks.
    """
    if int(os.environ["RANK"]) != rank:
        return None
    if not _listening:
        host = os.environ.get(HOST) or socket.gethostname()
        try:
            port = _start_debugpy()
        except ImportError as error:
            why = (
                f"rank {rank} on host {host} cannot import debugpy ({error}). Install it on this "
                f"host: {sys.executable} -m pip install debugpy"
            )
            return _fields(DebugpyListener(host, problem=why))
        except RuntimeError as error:
            return _fields(DebugpyListener(host, problem=f"rank {rank} on host {host}: {error}"))
        _listening.append(DebugpyListener(host, port))
    return _fields(_listening[0])


def _fields(listener: DebugpyListener) -> dict[str, Any]:
    fields: dict[str, Any] = to_builtins(listener)
    return fields


def _start_debugpy() -> int:
    """Make debugpy listen at a free port of the loopback address, and return the port.

    Afterwards, `breakpoint()` calls `_stop_in_debugpy_or_here`. debugpy's own hook would ignore
    `breakpoint()` while no client is attached.

    Raises:
        ImportError: debugpy is not installed.
        RuntimeError: The cell has already called `debugpy.listen`, or debugpy failed.
    """
    global _own_hook
    hook = sys.breakpointhook
    is_new = _NO_WARNING not in os.environ
    os.environ.setdefault(_NO_WARNING, "1")
    try:
        import debugpy

        # A child process, such as a DataLoader worker, would wait for a client of its own.
        debugpy.configure(subProcess=False)
        _, port = debugpy.listen(("127.0.0.1", 0))
    finally:
        if is_new:
            del os.environ[_NO_WARNING]
    if isinstance(hook, BreakpointHook):
        _own_hook = hook
        # debugpy stops in the innermost frame whose file is not one of debugpy's own files.
        code = _stop_in_debugpy_or_here.__code__.replace(co_filename=debugpy.__file__)
        sys.breakpointhook = FunctionType(code, globals())
    return int(port)


_own_hook: BreakpointHook | None = None
"""This rank's hook of `breakpoint()` from the time before debugpy replaced it."""


def _stop_in_debugpy_or_here(*args: Any, **options: Any) -> None:
    """Stop at the line that calls `breakpoint()`, in debugpy if a client is attached."""
    if is_debugpy_connected():
        sys.modules["debugpy"].breakpoint()
    elif _own_hook is not None:
        _own_hook.stop(sys._getframe().f_back, options.get("header"))


def is_debugpy_connected() -> bool:
    """Return whether a client of debugpy, such as VS Code, is attached to this process.

    Also True if the user's program has called `debugpy.listen`. Does not import debugpy.
    """
    check = getattr(sys.modules.get("debugpy.server.api"), "is_client_connected", None)
    return check is not None and bool(check())
