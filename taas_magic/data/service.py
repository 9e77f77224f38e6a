"""Files of a run's data service: key, certificate, pickled loaders, and addresses of fetchers.

<run folder>/data/            0700
    service.json              0600: the `DataServiceSettings` with key and certificate
    <name>.loader             a pickled registered loader
    settings                  the process state and modules for fetchers (`write_settings`)
    fetchers/                 address of each fetcher (`FolderDirectory`)
    ledger/                   number of batches that each rank received (`BatchLedger`)

The notebook's kernel and the agents use this module too, so its imports must be quick.
"""

import json
import mmap
import os
import socket
import ssl
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from taas_magic.config import DataConfig
from taas_magic.messages import AddressesByLoader, LoaderAddresses
from taas_magic.shared_files import boot_id, replace_atomically

_LINE_BYTES = 1024
"""Size in bytes of a line in a ledger file.

A loader's name may have 100 bytes, and JSON may need six bytes for each byte of the name.
"""

_COUNT = struct.Struct("<QI")
_GROW_LINES = 64


@dataclass(frozen=True)
class Tls:
    """A run's certificate and the certificate's private key (PEM).

    Ranks and fetchers each present the certificate and require it from the peer.
    """

    certificate: str
    key: str = field(repr=False)

    def server_context(self) -> ssl.SSLContext:
        """Return the TLS context for a fetcher's server."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext:
        """Return the TLS context for a rank's connections to fetchers."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, side: int) -> ssl.SSLContext:
        """Return a TLS 1.3 context that presents the run's certificate, and trusts only this one.

        `ssl` loads keys only from files, so first write the key to a file in memory.

        Args:
            side: Protocol constant of module `ssl` for a server or a client.
        """
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # No other run has this certificate, so a check of the host name would add no security.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate)
        # ssl loads keys only from files; a memfd keeps the key off the disk.
        with os.fdopen(os.memfd_create("taas-key", os.MFD_CLOEXEC), "w") as file:
            file.write(self.certificate + self.key)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return context


class LoaderSettings(Struct, frozen=True):
    """Settings of one registered loader that a run's cell uses.

    Attributes:
        num_workers: Workers of each fetcher; 0 for one worker for each core.
        context: multiprocessing's start method of the workers; "" for the default.
        keep_first: Number of first batches of each epoch that a fetcher keeps until the epoch is
            over, because ranks may repeat these batches (`sharding.FetcherPart`).
        ranks: Number of ranks that request batches.
    """

    name: str
    num_workers: int
    context: str
    seed: int
    keep_first: int = 0
    ranks: int = 1


class DataServiceSettings(Struct, frozen=True):
    """Settings of a run's data service.

    Attributes:
        key: The run's key; both sides of every connection must prove that they know the key.
        fetchers: Number of fetchers of each loader; 0 if the ranks run the loaders themselves.
        numbers: Numbers of the fetchers that this cell's loaders use (`FetcherPlan.number`).
        units: Value of `--units`; None for no limit.
        settings: The section `[data]` of the configuration.
        tls: Certificate for connections between hosts; None for plain TCP.
    """

    key: bytes
    seed: int
    fetchers: int
    units: int | None
    loaders: tuple[LoaderSettings, ...]
    settings: DataConfig = DataConfig()
    tls: Tls | None = None
    numbers: tuple[int, ...] = ()


def new_certificate() -> Tls:
    """Return a new self-signed certificate for one run, with its private key."""
    # Import late: cryptography is slow to import, and most runs use only one host.
    from taas_magic import certificate

    return Tls(*certificate.make_self_signed("taas-magic run"))


def folder_of(run_dir: Path) -> Path:
    """Return the folder with the files of a run's data service."""
    return run_dir / "data"


def settings_file(run_dir: Path) -> Path:
    """Return the path of the file with the process state and modules for a run's fetchers."""
    return folder_of(run_dir) / "settings"


def addresses_folder(base: Path) -> Path:
    """Return the folder with the fetchers' addresses.

    Args:
        base: The run folder. The ranks of a session read the addresses below another folder:
            their own private folder on the host.
    """
    return folder_of(base) / "fetchers"


def payload_file(run_dir: Path, name: str) -> Path:
    """Return the path of the file with a pickled loader; `name` may contain any characters."""
    return folder_of(run_dir) / f"{name.encode().hex()}.loader"


def write(run_dir: Path, service: DataServiceSettings, payloads: Mapping[str, bytes]) -> None:
    """Create the folder of a run's data service; write `service.json` and the pickled loaders.

    Args:
        payloads: The pickled loaders by name.

    Raises:
        FileExistsError: The folder exists already.
    """
    folder = folder_of(run_dir)
    folder.mkdir(mode=0o700)
    for name, payload in payloads.items():
        payload_file(run_dir, name).write_bytes(payload)
    descriptor = os.open(folder / "service.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(service))


def read_settings(run_dir: Path) -> DataServiceSettings | None:
    """Return the settings of a run's data service; None if the cell uses no registered loader."""
    file = folder_of(run_dir) / "service.json"
    if not file.exists():
        return None
    return msgspec.json.decode(file.read_bytes(), type=DataServiceSettings)


Directory = Callable[[str], LoaderAddresses]
"""Function that takes a loader's name, and returns the current addresses of the loader's fetchers.

If all fetchers of the loader have failed, the result has the reason for the failure instead of
addresses. Ranks call the function again whenever a fetcher does not respond.
"""


def machine_id() -> str:
    """Return an identifier of this host and network namespace.

    Two processes with the same identifier can share memory and connect by abstract Unix sockets.
    """
    return f"{boot_id() or socket.gethostname()}/{os.stat('/proc/self/ns/net').st_ino}"


def peer_uid(sock: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", credentials)[1])


def write_entry(folder: Path, number: int, entry: AddressesByLoader) -> Path:
    """Write the file with a fetcher's addresses atomically; return its path.

    Create the folder if necessary. If the file already has this content, leave it as it is.

    Args:
        folder: Folder with the addresses of all fetchers.
        number: Number of the fetcher.
        entry: The fetcher's address for each loader.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file, text = folder / f"fetcher-{number}.json", msgspec.json.encode(entry)
    if _content(file) == text:
        return file  # hosts share the folder, and another process has written the same content
    with replace_atomically(file) as draft:
        draft.write(text)
    return file


def _content(file: Path) -> bytes | None:
    """Return the content of a fetcher's address file; None if there is no such file.

    The file may disappear at any time, because a fetcher removes its address file when it ends.
    """
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None


_entry = msgspec.json.Decoder(dict[str, LoaderAddresses])


class FolderDirectory:
    """A `Directory` that reads the addresses from a folder with one file for each fetcher.

    Args:
        folder: The folder (`addresses_folder`).
        numbers: Numbers of the fetchers to use. In a session, the folder also has the addresses of
            other cells' fetchers.
    """

    def __init__(self, folder: Path, numbers: Sequence[int]) -> None:
        self._files = [folder / f"fetcher-{number}.json" for number in numbers]

    def __call__(self, loader: str) -> LoaderAddresses:
        """Return the addresses of a loader's fetchers that have started.

        If at least one fetcher has started, the result also has the number of fetchers that are
        still starting. If no fetcher has started, the result has neither addresses nor this number.
        If all fetchers of the loader have failed, the result has the reason why one of them failed.
        """
        contents = [_content(file) for file in self._files]
        entries = [_entry.decode(content) for content in contents if content is not None]
        listings = [entry[loader] for entry in entries if loader in entry]
        failed = [listing for listing in listings if listing.failed]
        if started := [listing for listing in listings if listing.addresses]:
            found = {
                at: address for listing in started for at, address in listing.addresses.items()
            }
            starting = started[0].fetchers - len(started) - len(failed)
            return structs.replace(started[0], addresses=found, starting=starting)
        have_all_failed = failed and len(failed) == failed[0].fetchers
        return failed[0] if have_all_failed else LoaderAddresses(fetchers=0)


class BatchLedger:
    """On-disk count of the batches that one rank received in one attempt of a run.

    Each line of the file counts the batches of one pass over a loader; several passes may be active
    at the same time. The rank counts a batch before the cell receives it. The file is mapped into
    memory, so the counts survive even if the rank is killed.
    """

    def __init__(self, folder: Path, attempt: int, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._attempt, self._rank = attempt, rank
        self._file = (folder / f"ledger-{attempt}-{rank}").open("w+b")
        self._lines = 0
        self._map, self._is_on_disk = mmap.mmap(-1, mmap.PAGESIZE), True
        self._grow()

    def begin_pass(
        self, loader: str, pass_number: int, epoch: int, world_size: int, first_step: int
    ) -> int:
        """Add a line with a count of 0 for a new pass over a loader; return the line's number.

        If the file has no room for the line, enlarge the file first.

        Args:
            pass_number: Number of the pass in this attempt (two passes may share an epoch).
            first_step: First step of the pass; not 0 after a resume.
        """
        if (self._lines + 1) * _LINE_BYTES > len(self._map):
            self._grow()
        about = self._attempt, loader, pass_number, epoch, self._rank, world_size, first_step
        text = json.dumps(about).encode()
        at = self._lines * _LINE_BYTES
        self._map[at + _COUNT.size : at + _COUNT.size + len(text)] = text
        _COUNT.pack_into(self._map, at, 0, len(text))
        self._lines += 1
        return self._lines - 1

    def count_batch(self, line: int) -> None:
        """Count one more batch of the pass for which `begin_pass` has returned `line`."""
        at = line * _LINE_BYTES
        count, size = _COUNT.unpack_from(self._map, at)
        _COUNT.pack_into(self._map, at, count + 1, size)

    def close(self) -> None:
        """Close the ledger's file."""
        self._map.close()
        self._file.close()

    def _grow(self) -> None:
        """Make room for more lines of the ledger, and map the enlarged file into memory.

        If the disk is full, from now on count only in memory; the file stays as it is.
        """
        size = (self._lines + _GROW_LINES) * _LINE_BYTES
        try:  # allocate now: a write to a page without disk space would end the process (SIGBUS)
            os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError:
            self._is_on_disk = False
        if self._is_on_disk:
            self._map = mmap.mmap(self._file.fileno(), size)
        else:  # if the disk is full, the run continues: count in memory and leave the file as it is
            before, self._map = self._map, mmap.mmap(-1, size)
            self._map[: len(before)] = before[:]
