"""A real Jupyter kernel and a client that records its output with the times of arrival.

The client parses only the parts of messages that it needs. So it is fast enough for 40,000
messages, and does not add to the times of the tool that sends them.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from subprocess import DEVNULL
from types import TracebackType
from typing import Any, NamedTuple

from jupyter_client.manager import KernelManager

START_TIMEOUT_S = 60.0
CELL_TIMEOUT_S = 180.0

_DELIMITER = b"<IDS|MSG>"


class CellError(RuntimeError):
    """Exception for a cell that failed or did not end in time."""


class Piece(NamedTuple):
    """Piece of a cell's text output, and its time of arrival (Unix seconds)."""

    arrived: float
    text: str


@dataclass
class Output:
    """Text output of cells that were sent together.

    Attributes:
        sent: Time when the first cell was sent (Unix seconds).
        pieces: The text, in order of arrival.
    """

    sent: float
    pieces: list[Piece] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def seconds_to(self, mark: str) -> float:
        """Return the seconds from the sending of the cells to the arrival of the text `mark`.

        Raises:
            CellError: The text did not arrive.
        """
        for piece in self.pieces:
            if mark in piece.text:
                return piece.arrived - self.sent
        raise CellError(f"the cell did not print {mark!r}, but: {self.text[-2000:]}")


class Notebook:
    """A new kernel and its client; a context manager.

    Args:
        environ: Environment variables of the kernel, in addition to those of this process.
    """

    def __init__(self, environ: Mapping[str, str], folder: str) -> None:
        self._manager = KernelManager(kernel_name="python3")
        self._environ, self._folder = {**os.environ, **environ}, folder

    def __enter__(self) -> "Notebook":
        self._manager.start_kernel(
            env=self._environ, cwd=self._folder, stdout=DEVNULL, stderr=DEVNULL
        )
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=START_TIMEOUT_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=error is not None)
        self._manager.cleanup_resources()

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def run(self, *cells: str) -> Output:
        """Send all cells at once, and return their output when the last one has ended.

        Raises:
            CellError: A cell failed, or the cells took longer than CELL_TIMEOUT_S.
        """
        output = Output(time.time())
        # By default, a kernel aborts requests that arrive soon after a failed cell.
        ids = [self._client.execute(cell, stop_on_error=False) for cell in cells]
        socket = self._client.iopub_channel.socket
        deadline = output.sent + CELL_TIMEOUT_S
        while socket.poll(1000 * max(0.0, deadline - time.time())):
            arrived, frames = time.time(), socket.recv_multipart()
            header, parent, content = _parts(frames)
            if parent.get("msg_id") not in ids:
                continue
            if header["msg_type"] == "stream":
                output.pieces.append(Piece(arrived, content["text"]))
            elif header["msg_type"] == "error":
                raise CellError("\n".join([output.text, *content["traceback"]]))
            elif content.get("execution_state") == "idle" and parent["msg_id"] == ids[-1]:
                return output
        raise CellError(f"no end after {CELL_TIMEOUT_S:.0f} s; so far: {output.text[-2000:]}")


def _parts(frames: list[bytes]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a message's header, its parent's header, and its content (Jupyter's wire protocol)."""
    start = frames.index(_DELIMITER) + 2  # skips the delimiter and the signature
    header, parent, _, content = (json.loads(frame) for frame in frames[start : start + 4])
    return header, parent, content
