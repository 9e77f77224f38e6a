"""A run's data service on disk: who belongs to it, what it serves and where its fetchers listen.

<run folder>/data/            0700
    service.json              0600: key, certificate, loaders, the flags that concern them
    <name>.loader             a registered loader, pickled
    fetchers/                 where each fetcher listens (`FolderDirectory`)
    ledger/                   what each rank was handed (`BatchLedger`)

Light: the notebook's kernel and the agents read and write these files, too.
"""

import json
import mmap
import os
import socket
import ssl
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from taas_magic.config import DataConfig
from taas_magic.messages import LoaderPlace, LoaderPlaces
from taas_magic.shared_files import boot_id, replacing

_LINE_BYTES = 1024
"""Room for a name of 100 bytes, each of which JSON may write as six."""

_COUNT = struct.Struct("<QI")
_GROW_LINES = 64


@dataclass(frozen=True)
class Tls:
    """A run's certificate and its key (PEM): who has both belongs to the run.

    Ranks and fetchers both show it and both demand it.
    """

    certificate: str
    key: str = field(repr=False)

    def server(self) -> ssl.SSLContext:
        """Return the server's context."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client(self) -> ssl.SSLContext:
        """Return the rank's context."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Nobody else has this certificate, so the name of the host in it would say nothing.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate)
        # ssl takes keys from files only; this one lies on no disk.
        with os.fdopen(os.memfd_create("taas-key", os.MFD_CLOEXEC), "w") as file:
            file.write(self.certificate + self.key)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return context


class Served(Struct, frozen=True):
    """A registered loader that a run's cell uses.

    Attributes:
        num_workers: Of each fetcher; 0: one for each core.
        context: multiprocessing's start method, "" for the default.
    """

    name: str
    num_workers: int
    context: str
    seed: int


class Service(Struct, frozen=True):
    """A run's data service.

    Attributes:
        key: What every connection has to prove.
        fetchers: Hosts that run the loaders; 0: the ranks do it themselves.
        tls: For batches that go from host to host; None: they go plain.
    """

    key: bytes
    seed: int
    fetchers: int
    units: int | None
    loaders: tuple[Served, ...]
    settings: DataConfig = DataConfig()
    tls: Tls | None = None


def new_certificate() -> Tls:
    """Return a certificate for one run."""
    # cryptography takes a while to import, and most runs stay on one host.
    from taas_magic import certificate

    return Tls(*certificate.make("taas-magic run"))


def folder_of(run_dir: Path) -> Path:
    """Return where a run's data service has its files."""
    return run_dir / "data"


def payload_file(run_dir: Path, name: str) -> Path:
    """Return the file with a pickled loader; the name may hold anything."""
    return folder_of(run_dir) / f"{name.encode().hex()}.loader"


def write(run_dir: Path, service: Service, payloads: Mapping[str, bytes]) -> None:
    """Write what ranks and fetchers need."""
    folder = folder_of(run_dir)
    folder.mkdir(mode=0o700)
    for name, payload in payloads.items():
        payload_file(run_dir, name).write_bytes(payload)
    descriptor = os.open(folder / "service.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(service))


def read(run_dir: Path) -> Service | None:
    """Return the run's data service; None where its cell uses no registered loader."""
    file = folder_of(run_dir) / "service.json"
    if not file.exists():
        return None
    return msgspec.json.decode(file.read_bytes(), type=Service)


Directory = Callable[[str], LoaderPlace]
"""Says where those fetchers of a loader are that have started, or why none ever will; asked again
whenever one does not answer."""


def machine() -> str:
    """Tell hosts, and network namespaces on one host, apart: who can share memory and sockets."""
    return f"{boot_id() or socket.gethostname()}/{os.stat('/proc/self/ns/net').st_ino}"


def peer_uid(sock: socket.socket) -> int:
    """Return whose process is at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", credentials)[1])


def write_entry(folder: Path, number: int, entry: LoaderPlaces) -> Path:
    """Write where fetcher `number` listens; a rank sees the whole file or none."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file, text = folder / f"fetcher-{number}.json", msgspec.json.encode(entry)
    if _content(file) == text:
        return file  # the folder is shared, and the fetcher has written it itself
    with replacing(file) as draft:
        draft.write(text)
    return file


def _content(file: Path) -> bytes | None:
    """Return what a fetcher has written; None when it has ended, perhaps a moment ago."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None


_entry = msgspec.json.Decoder(dict[str, LoaderPlace])


class FolderDirectory:
    """The addresses that fetchers have written into a folder, one file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, loader: str) -> LoaderPlace:
        """Read what is there."""
        files = sorted(self._folder.glob("fetcher-*.json"))
        contents = [_content(file) for file in files]
        entries = [_entry.decode(content) for content in contents if content is not None]
        places = [entry[loader] for entry in entries if loader in entry]
        if started := [place for place in places if place.addresses]:
            found = {at: address for place in started for at, address in place.addresses.items()}
            return structs.replace(started[0], addresses=found)
        failed = [place for place in places if place.failed]
        have_all_failed = failed and len(failed) == failed[0].fetchers
        return failed[0] if have_all_failed else LoaderPlace(fetchers=0)


class BatchLedger:
    """One rank's ledger of one generation, on disk; several passes may be under way at once.

    The file is mapped into memory; a line of it is one pass over a loader, and its counter is
    raised in place before the cell sees a batch. That costs no system call, and what was counted
    survives whatever ends the process.

    Args:
        generation: Which attempt of the run.
    """

    def __init__(self, folder: Path, generation: int, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._generation, self._rank = generation, rank
        self._file = (folder / f"ledger-{generation}-{rank}").open("w+b")
        self._lines = 0
        self._map, self._is_on_disk = mmap.mmap(-1, mmap.PAGESIZE), True
        self._grow()

    def begin(self, loader: str, turn: int, epoch: int, world_size: int, first_step: int) -> int:
        """Begin a pass; return the number of its line.

        Args:
            turn: Number of the pass in this generation (two passes may share an epoch).
            first_step: The step that it begins with: not 0 after a resume.
        """
        if (self._lines + 1) * _LINE_BYTES > len(self._map):
            self._grow()
        about = self._generation, loader, turn, epoch, self._rank, world_size, first_step
        text = json.dumps(about).encode()
        at = self._lines * _LINE_BYTES
        self._map[at + _COUNT.size : at + _COUNT.size + len(text)] = text
        _COUNT.pack_into(self._map, at, 0, len(text))
        self._lines += 1
        return self._lines - 1

    def hand(self, line: int) -> None:
        """Count one more batch of this pass."""
        at = line * _LINE_BYTES
        count, size = _COUNT.unpack_from(self._map, at)
        _COUNT.pack_into(self._map, at, count + 1, size)

    def close(self) -> None:
        """Close the file."""
        self._map.close()
        self._file.close()

    def _grow(self) -> None:
        size = (self._lines + _GROW_LINES) * _LINE_BYTES
        try:  # a page that the disk has no room for would end the process (SIGBUS)
            os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError:
            self._is_on_disk = False
        if self._is_on_disk:
            self._map = mmap.mmap(self._file.fileno(), size)
        else:  # a full disk ends no run: it is counted in memory, and the file stays as it is
            before, self._map = self._map, mmap.mmap(-1, size)
            self._map[: len(before)] = before[:]
