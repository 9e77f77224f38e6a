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
"""Python's environment variable with the name of the function that `breakpoint()` calls.

If the variable is set, taas-magic does not use its own debugger.
"""

_NO_WARNING = "PYDEVD_DISABLE_FILE_VALIDATION"
"""Environment variable that keeps debugpy from printing a warning about frozen modules."""


class BreakpointHook:
    """The callable that `breakpoint()` calls in a rank (`sys.breakpointhook`).

    In a rank, `pdb.set_trace()` opens the same debugger.

    Args:
        namespace: Namespace of the rank's `__main__`.
        caller: Code object of taas-magic's method that calls the work's function. With it, the
            debugger finds the outermost frame of the work (`find_root`).
        display: Code object of the rank's display hook. Python calls the display hook with the
            value of a cell's last expression. The debugger does not stop in frames of the hook.
    """

    def __init__(self, namespace: Mapping[str, Any], caller: CodeType, display: CodeType) -> None:
        self._namespace, self._caller, self._display = namespace, caller, display
        self._debugger: _CellDebugger | None = None

    def install(self) -> None:
        """Make `breakpoint()` call this hook, unless `PYTHONBREAKPOINT` names another debugger.

        Also replace `pdb.set_trace`.
        """
        vars(pdb)["set_trace"] = self.set_trace
        if not os.environ.get(BREAKPOINT_VARIABLE):
            sys.breakpointhook = self

    def __call__(self, *args: Any, header: str | None = None, **options: Any) -> Any:
        """Open the debugger at the line that called `breakpoint()`.

        If the cell has set PYTHONBREAKPOINT, call Python's own hook instead, which opens the
        debugger that this variable names.

        Args:
            header: Text to print before the debugger's first prompt.
        """
        if os.environ.get(BREAKPOINT_VARIABLE):  # set by the cell
            return sys.__breakpointhook__(*args, header=header, **options)
        self.stop(sys._getframe().f_back, header)
        return None

    def set_trace(self, *, header: str | None = None, **options: Any) -> None:
        """Open the debugger at the line that called `pdb.set_trace()`.

        Args:
            header: Text to print before the debugger's first prompt.
            options: Further arguments of this Python version's `pdb.set_trace`.
        """
        self.stop(sys._getframe().f_back, header, **options)

    def stop(self, frame: FrameType | None, header: str | None = None, **options: Any) -> None:
        """Open the debugger at the current line of `frame`, after printing `header` if given."""
        self._debugger = debugger = _CellDebugger(self)
        if header is not None:
            debugger.message(header)
        debugger.set_trace(frame, **options)

    def end_stepping(self) -> None:
        """Stop the debugger's single-stepping. Call this method when the work has ended.

        Otherwise, the debugger would stop at each line of the code that runs after the work. The
        user's breakpoints stay. If the debugger is not open, do nothing.
        """
        debugger = self._debugger
        if debugger is not None and sys.gettrace() == debugger.trace_dispatch:
            debugger.set_continue()

    def is_statement(self, frame: FrameType) -> bool:
        """Return whether a frame runs a top-level statement of a cell, not a function's body."""
        return frame.f_globals is self._namespace and frame.f_code.co_name == "<module>"

    def find_root(self, frame: FrameType | None) -> FrameType | None:
        """Return the frame of the work's function: `frame` itself, or a direct or indirect caller.

        Return None if none of these frames is the function's frame, for example if the work is a
        cell.
        """
        while frame is not None:
            if frame.f_back is not None and frame.f_back.f_code is self._caller:
                return frame
            frame = frame.f_back
        return None

    def is_users(self, frame: FrameType | None, root: FrameType | None) -> bool:
        """Return whether `frame` belongs to the work, or to a function that the work called.

        The result is False for all other frames: frames of IPython and taas-magic that run the
        work, and frames of the display hook, which shows the value of a cell's last expression.

        Args:
            frame: The frame to check. If None, the result is False.
            root: Frame of the work's function; None if the work is a cell.
        """
        while frame is not None and frame.f_code is not self._display:
            if frame.f_globals is self._namespace or frame is root:
                return True
            frame = frame.f_back
        return False


class _CellDebugger(pdb.Pdb):
    """Python's debugger, `pdb`, changed so that it steps from a cell's statement to the next one.

    IPython runs each statement of a cell on its own. So `pdb` itself would stop in IPython's code
    after each statement, and would list the frames of IPython and taas-magic above the cell's
    frame. If the stack has no frame of the work, for example in some threads, this class behaves
    like `pdb`.
    """

    def __init__(self, hook: BreakpointHook) -> None:
        # Without `nosigint`, an interrupt after the debugger's command `c` would open the debugger
        # again, and would not end the cell.
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

    def get_stack(self, *args: Any) -> tuple[list[tuple[FrameType, int]], int]:
        """Return the stack that `where` and `up` show, beginning with the first frame of the work.

        Returns:
            Pairs of a frame and its line number, oldest first; and the index of the current frame.
        """
        stack, index = super().get_stack(*args)
        n_above = 0
        while n_above < index and self._is_outside(stack[n_above][0]):
            n_above += 1
        return stack[n_above:], index - n_above

    def interaction(self, *args: Any, **options: Any) -> None:
        self._has_stopped = True
        super().interaction(*args, **options)

    def user_call(self, frame: FrameType, argument_list: Any) -> None:
        """Stop when a function is called, as `pdb` does.

        Do not stop when a statement of the cell begins. IPython runs each statement as a code
        object of its own, so Python reports the statement's begin as a call.
        """
        if not self._hook.is_statement(frame):
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        """Stop at the end of a function, like `pdb`, but not at the end of a cell's statement.

        There is one exception: if the debugger has not stopped yet, it stops at the end of the
        statement. This happens if the statement is `breakpoint()` itself. At this stop, nothing is
        stored in the cell's namespace; `pdb` itself would store the return value there.
        """
        if not self._hook.is_statement(frame):
            if not self._is_outside(frame):
                super().user_return(frame, return_value)
        elif not self._has_stopped:
            self.interaction(frame, None)

    def _is_outside(self, frame: FrameType) -> bool:
        return self._is_in_work and not self._hook.is_users(frame, self._root)


def last_exception() -> str:
    """Return the type and text of this rank's last uncaught exception in one line; "" if none."""
    if not hasattr(sys, "last_traceback"):
        return ""
    text = " ".join(str(sys.last_value).split())
    return f"{getattr(sys.last_type, '__name__', sys.last_type)}: {text}".removesuffix(": ")


class DebugpyListener(Struct, frozen=True):
    """The port at which debugpy listens in one rank, or the reason why debugpy does not listen.

    Attributes:
        host: Name of the rank's host, as the user knows it.
        port: Port on the host's loopback address; 0 if debugpy does not listen.
        problem: Message for the user that says why debugpy does not listen; "" if debugpy listens.
    """

    host: str
    port: int = 0
    problem: str = ""


_listening: list[DebugpyListener] = []
"""The listener of this rank; empty before debugpy listens. debugpy can listen once in a process."""


def listen_with_debugpy(rank: int) -> dict[str, Any] | None:
    """If this process is rank `rank`, make debugpy listen for a client such as VS Code.

    All ranks of a session call this function with the same argument. A second call returns the same
    port. If debugpy could not listen, the second call tries again.

    Returns:
        In rank `rank`, the fields of a `DebugpyListener`, with the port or the problem. In the
        session's other ranks, None.
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

    During the start of debugpy, the environment variable `_NO_WARNING` is set, which suppresses a
    warning of debugpy. debugpy is configured for this process only. Otherwise, child processes,
    such as workers of a DataLoader, would wait for a client of their own.

    debugpy makes `breakpoint()` call a hook of debugpy, which does nothing while no client is
    attached. So if `breakpoint()` called taas-magic's hook until now, this function replaces
    debugpy's hook by `_stop_in_debugpy_or_here`, and stores taas-magic's hook in `_own_hook`.

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

        # Without this setting, a child process, such as a DataLoader worker, would wait for a
        # client of its own.
        debugpy.configure(subProcess=False)
        _, port = debugpy.listen(("127.0.0.1", 0))
    finally:
        if is_new:
            del os.environ[_NO_WARNING]
    if isinstance(hook, BreakpointHook):
        _own_hook = hook
        # debugpy stops in the innermost frame whose file is not one of debugpy's own files. With
        # this file name, debugpy stops in the caller of `_stop_in_debugpy_or_here`.
        code = _stop_in_debugpy_or_here.__code__.replace(co_filename=debugpy.__file__)
        sys.breakpointhook = FunctionType(code, globals())
    return int(port)


_own_hook: BreakpointHook | None = None
"""The `BreakpointHook` that this rank's `breakpoint()` called before debugpy listened.

None until debugpy listens, or if the cell had already made `breakpoint()` call another function.
"""


def _stop_in_debugpy_or_here(*args: Any, **options: Any) -> None:
    """Stop at the line that calls `breakpoint()`, in the client of debugpy if one is attached.

    Otherwise, stop in the rank's own debugger, `pdb`. Arguments other than `header` have no effect.
    """
    if is_debugpy_connected():
        sys.modules["debugpy"].breakpoint()
    elif _own_hook is not None:
        _own_hook.stop(sys._getframe().f_back, options.get("header"))


def is_debugpy_connected() -> bool:
    """Return whether a client of debugpy, such as VS Code, is attached to this process.

    It does not matter whether taas-magic or the user's program called `debugpy.listen`. This
    function does not import debugpy.
    """
    check = getattr(sys.modules.get("debugpy.server.api"), "is_client_connected", None)
    return check is not None and bool(check())
