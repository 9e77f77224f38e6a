"""The requests by which a host copies files from and to the notebook's machine.

The requests are about files of the project store or of the run folder (`FileRoot`). Files are cut
into pieces. The size of a message is adapted to the speed of the link (`MessageSizer`).
"""

import time
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Generic, Protocol, TypeVar

from msgspec import Struct, field

from taas_magic.errors import ProtocolError
from taas_magic.messages import Request
from taas_magic.store.manifest import ChangeList, Manifest, ManifestEntry

CHUNK_BYTES = 4 << 20
"""Maximum bytes of file content in one message, and thus in memory at a time."""

MAX_PARTS = 1000
"""Maximum number of parts in one `ReadFiles`, or of pieces and removals in one `WriteFiles`."""

_FIRST_BYTES, _LEAST_BYTES = 1 << 18, 1 << 16

_QUICK_S, _SLOW_S = 0.25, 1.0

_T = TypeVar("_T")

Part = tuple[str, int, int]
"""Part of a file: path, offset in bytes, number of bytes."""


class FilePiece(Struct, frozen=True, array_like=True):
    """The next bytes of a file that is being sent, or a new folder.

    Attributes:
        entry: The file or folder. The hash of a file is "" in all pieces except the last. A file
            of the run folder has no hash; its last piece ends at `entry.size`.
        offset: Position of `data` in the file. A piece with offset 0 starts the file anew.
        data: Content; empty for a folder.
    """

    entry: ManifestEntry
    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """Offset in the file, in bytes, at which the next piece begins."""
        return self.offset + len(self.data)


class FileRoot(Enum):
    """Folder on the notebook's machine that a `FileRequest` is about."""

    STORE = "store"
    """The project store."""

    RUN = "run"
    """The run folder. Its files are sent without hashes, because they do not change in a run."""


class FileRequest(Request[_T], Generic[_T], kw_only=True):
    """Request of a host about files of the project store or the run folder.

    A host sends `MakeToken` to learn whether it shares the store with the notebook's machine. The
    other requests copy files of a folder that the host does not share. `MakeToken` and
    `ListChanges` work for the store only.

    Attributes:
        run_id: Id of the run, or of the run's fetchers; set by the agent.
        root: Folder to which the paths in the request are relative.
    """

    run_id: str = ""
    root: FileRoot = FileRoot.STORE

    def check_size(self) -> None:
        """Check that the request and its response are small enough. Subclasses override this.

        Raises:
            ProtocolError: The request or its response is too large for one message.
        """


class MakeToken(FileRequest[str]):
    """Request to make a marker file in the store; the response is the file's name.

    A host that sees the file shares the store. The notebook's side removes the file when the run
    ends.
    """


class ListFiles(FileRequest[Manifest | None]):
    """Request for the list of files to copy to the host.

    For the run folder, the response lists the files that the host's ranks or fetchers need. For the
    store, the response is the manifest from the last search. The first request starts a search.
    During a search, the response is None, and the host must ask again.

    Attributes:
        fresh: Whether to search the store again, because a file differed from the last manifest.
    """

    fresh: bool = False


class ReadFiles(FileRequest[list[bytes | None]]):
    """Request for parts of files, which `ListFiles` or `ListChanges` must have listed before.

    The response has the bytes of each part, or None for a part that cannot be read.
    """

    parts: list[Part]

    def check_size(self) -> None:
        """Check that the request has at most `MAX_PARTS` parts with `CHUNK_BYTES` bytes in total.

        Raises:
            ProtocolError: The request has more parts or bytes.
        """
        size_bytes = sum(max(0, size) for _, _, size in self.parts)
        if len(self.parts) > MAX_PARTS or size_bytes > CHUNK_BYTES:
            raise ProtocolError(f"{self.op()}: too much at once")


class ListChanges(FileRequest[ChangeList]):
    """Request for the changes that other hosts have made after change number `since`.

    Attributes:
        since: `number` of the last `ChangeList`; 0 in the first request.
    """

    since: int


class WriteFiles(FileRequest[dict[str, str]]):
    """Request to apply a host's changes. The response has the reason for each refused path.

    Attributes:
        pieces: New content; a folder comes before its contents.
        removed: Files and folders to remove from the store after all pieces are in place. A folder
            comes after its contents, and stays if it is not empty.
    """

    pieces: list[FilePiece] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    def check_size(self) -> None:
        """Check that the pieces have at most `CHUNK_BYTES` bytes of content in total.

        Raises:
            ProtocolError: The pieces have more bytes.
        """
        if sum(len(piece.data) for piece in self.pieces) > CHUNK_BYTES:
            raise ProtocolError(f"{self.op()}: too much at once")


class SendRequest(Protocol):
    """Function that sends a request to the notebook's machine. Any thread may call it."""

    def __call__(self, request: FileRequest[_T]) -> _T:
        """Send a request of this host, wait for the response, and return the response."""


class MessageSizer:
    """Size of the next message, adapted to the speed of the link after each message.

    Logs and heartbeats use the same link, so no message may occupy a slow link for long.

    Attributes:
        size: Bytes of file content that the next message should carry.
    """

    def __init__(self) -> None:
        self.size = _FIRST_BYTES

    def send(self, send_request: SendRequest, request: FileRequest[_T]) -> _T:
        """Send a request, and adapt `size` to the time until the response arrived."""
        began = time.monotonic()
        answer = send_request(request)
        self.record_duration(time.monotonic() - began)
        return answer

    def record_duration(self, seconds: float) -> None:
        """Double `size` if the request took less than 0.25 s; halve `size` if it took over 1 s.

        `size` stays between 64 KiB and `CHUNK_BYTES`.

        Args:
            seconds: Time from the last request to its response.
        """
        if seconds < _QUICK_S:
            self.size = min(2 * self.size, CHUNK_BYTES)
        elif seconds > _SLOW_S:
            self.size = max(self.size // 2, _LEAST_BYTES)


def part_lists(entries: Iterable[ManifestEntry], sizer: MessageSizer) -> Iterator[list[Part]]:
    """Divide files into parts, and yield lists of parts; each list is for one `ReadFiles`.

    The parts have the order of `entries`; an empty file has one empty part. A list has at most
    `MAX_PARTS` parts, and at most as many bytes as `sizer.size` says when the list is begun.
    """
    parts: list[Part] = []
    room = sizer.size
    for entry in entries:
        offset = 0
        while True:
            size = min(entry.size - offset, room)
            parts.append((entry.path, offset, size))
            offset, room = offset + size, room - size
            if room == 0 or len(parts) == MAX_PARTS:
                yield parts
                parts, room = [], sizer.size
            if offset == entry.size:
                break
    if parts:
        yield parts
