"""A small client of the Debug Adapter Protocol, in place of VS Code."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

import taas_magic
from tests.eventually import HUNG_S

PACKAGE = Path(taas_magic.__file__).parent

Message = dict[str, Any]


class DapClient:
    """Client that is attached to a process in which debugpy listens.

    Args:
        port: Port of debugpy, on this machine.
        breakpoints: Lines with breakpoints, by the path of the file.
        function: Name of a function with a breakpoint; "" for none.
    """

    def __init__(self, port: int, breakpoints: dict[str, list[int]], function: str = "") -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=HUNG_S)
        self._stream = self._socket.makefile("rb")
        self._number = 0
        self._seen: list[Message] = []
        self.request("initialize", adapterID="debugpy", pathFormat="path")
        # In an installed package, this folder is below site-packages, which debugpy excludes.
        rules = [{"path": f"{PACKAGE}/**", "include": False}]
        attached = self._send("attach", {"justMyCode": True, "rules": rules})
        self._wait(lambda message: message.get("event") == "initialized")
        for path, lines in breakpoints.items():
            self.set_breakpoints(path, lines)
        functions = [{"name": function}] if function else []
        self.request("setFunctionBreakpoints", breakpoints=functions)  # replaces earlier ones
        self.request("configurationDone")
        self._answer_to(attached)

    def set_breakpoints(self, path: str, lines: list[int]) -> None:
        """Replace the breakpoints of a file."""
        wanted = [{"line": line} for line in lines]
        answer = self.request("setBreakpoints", source={"path": path}, breakpoints=wanted)
        assert all(found["verified"] for found in answer["breakpoints"]), answer

    def request(self, command: str, **arguments: Any) -> Message:
        """Send a request; return the body of its answer."""
        return self._answer_to(self._send(command, arguments))

    def wait_for_stop(self) -> tuple[int, Message]:
        """Wait until a thread stops; return the thread's id and its innermost frame."""
        stopped = self._wait(lambda message: message.get("event") == "stopped")
        thread: int = stopped["body"]["threadId"]
        return thread, self.request("stackTrace", threadId=thread)["stackFrames"][0]

    def local(self, frame: Message, name: str) -> str:
        """Return the text of a local variable in a frame."""
        scopes = self.request("scopes", frameId=frame["id"])["scopes"]
        reference = next(it["variablesReference"] for it in scopes if it["name"] == "Locals")
        found = self.request("variables", variablesReference=reference)["variables"]
        return next(str(it["value"]) for it in found if it["name"] == name)

    def evaluate(self, frame: Message, text: str) -> str:
        """Evaluate an expression, or run a statement, in a frame; return the result as text."""
        answer = self.request("evaluate", expression=text, frameId=frame["id"], context="repl")
        return str(answer["result"])

    def resume(self, thread: int) -> None:
        """Let a stopped thread, and the other threads of its process, continue."""
        self.request("continue", threadId=thread)

    def close(self) -> None:
        """Detach; the process continues."""
        self.request("disconnect", terminateDebuggee=False)
        self._stream.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._socket.close()

    def _send(self, command: str, arguments: Message) -> int:
        self._number += 1
        message = {"seq": self._number, "type": "request", "command": command}
        data = json.dumps({**message, "arguments": arguments}).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n" % len(data) + data)
        return self._number

    def _answer_to(self, number: int) -> Message:
        answer = self._wait(lambda message: message.get("request_seq") == number)
        assert answer["success"], answer
        return dict(answer.get("body") or {})

    def _wait(self, is_wanted: Callable[[Message], bool]) -> Message:
        """Return the first message for which `is_wanted` is true; keep the others for later."""
        for message in self._seen:
            if is_wanted(message):
                self._seen.remove(message)
                return message
        while not is_wanted(message := self._read()):
            self._seen.append(message)
        return message

    def _read(self) -> Message:
        length = 0
        while line := self._stream.readline().strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        assert length, "debugpy closed the connection"
        found: Message = json.loads(self._stream.read(length))
        return found
