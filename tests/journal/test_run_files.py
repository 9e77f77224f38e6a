"""Tests of a run folder's copies on hosts that do not share the folder.

In these tests, a host calls the file server directly.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec import structs

from taas_magic.errors import PoolError, ProtocolError
from taas_magic.host import files as run_files
from taas_magic.host.files import HostFiles, RunFolderCopy
from taas_magic.host.spec import HostAddress, Origin, RunSpec, ShareSpec
from taas_magic.journal.folder import RunFolder
from taas_magic.plan import Flags, HostCapacity, Plan, make_plan, ranks_with_results
from taas_magic.pool.files import FileServer, OwnedFiles
from taas_magic.store.manifest import FOLDER, Manifest, ManifestEntry
from taas_magic.store.requests import (
    FilePiece,
    FileRequest,
    FileRoot,
    ListChanges,
    MakeToken,
    ReadFiles,
    WriteFiles,
)
from taas_magic.store.rule import FolderIdentity
from tests.store.travel_rig import Travel, wired

HERE = HostAddress("here", "127.0.0.1", is_foreign=False)
FOREIGN = HostAddress("there", "127.0.0.2", is_foreign=True)


@pytest.fixture
def plan() -> Plan:
    flags = Flags(gpus=4, out=("x", "y@2"))
    return make_plan(flags, HostCapacity(gpus=2, cores=2), "a-run", max_hosts=2)


@pytest.fixture
def home(plan: Plan) -> RunFolder:
    """Return the run folder on the notebook's machine."""
    folder = RunFolder.create("a-run", plan, "cell")
    folder.payload.write_bytes(bytes(range(256)) * 5000)
    (folder.path / "data").mkdir()
    (folder.path / "data" / "6162.loader").write_bytes(b"loader")
    (folder.path / "data" / "empty").touch()
    return folder


def share_of(plan: Plan, run_dir: str, host_rank: int = 0, attempt: int = 0) -> ShareSpec:
    run = RunSpec(plan, run_dir, Origin("/", {}, ()))
    return ShareSpec(run.for_hosts(True), host_rank, plan.hosts[host_rank], attempt=attempt)


class Far:
    """Host that does not have the run folder, and calls the file server directly."""

    def __init__(self, home: RunFolder, plan: Plan, cache: Path, host_rank: int = 0) -> None:
        self.server = FileServer(
            RunSpec(plan, str(home.path), Origin("/", {}, ())), is_fetchers=False
        )
        self.host_rank, self.attempt = host_rank, 0
        self.spec = share_of(plan, f"/nowhere{home.path}", host_rank)
        self.files = RunFolderCopy(self.spec, self.ask, cache)
        self.here = self.files.path

    def ask(self, request: FileRequest[Any]) -> Any:
        may_send = ranks_with_results(self.spec.plan)
        owned = OwnedFiles(self.spec.ranks, self.attempt, may_send)
        return self.server.answer_folder_request(self.host_rank, owned, request)


def writes(name: str, data: bytes = b"x", size: int | None = None) -> WriteFiles:
    """Return a request to write `data` at the beginning of a file of the run folder.

    Args:
        name: Path of the file in the run folder.
        data: Bytes to write.
        size: Size of the whole file; by default, that of `data`.
    """
    entry = ManifestEntry(name, len(data) if size is None else size, "")
    return WriteFiles([FilePiece(entry, 0, data)], root=FileRoot.RUN)


@pytest.fixture
def far(home: RunFolder, plan: Plan, tmp_path: Path) -> Far:
    return Far(home, plan, tmp_path / "cache")


def test_a_host_that_shares_the_run_folder_uses_it(home: RunFolder, plan: Plan) -> None:
    spec = share_of(plan, str(home.path))
    files = HostFiles(spec, HERE, lambda request: pytest.fail(f"asked {request}"), print)
    here = files.copy_in(lambda: True)
    assert here is not None and (here.spec, here.run_dir) == (spec, str(home.path))
    files.send_back()
    assert home.payload.exists()


def test_another_folder_with_the_path_of_the_run_folder_is_not_used(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other = RunFolder.create("another-run", structs.replace(plan, run_id="another-run"), "cell")
    spec = share_of(plan, str(other.path))
    files = HostFiles(spec, HERE, mock.Mock(return_value=Manifest([], {})), print)
    here = files.copy_in(lambda: True)
    assert here is not None and here.run_dir != here.run.run_dir == str(other.path)
    files.send_back()
    assert not Path(here.run_dir).exists() and other.path.exists()
    assert spec.notebook_log_path(1) == f"{other.path}/logs/rank-1.log"  # failures name it


def test_a_file_that_changes_during_the_first_copy_of_the_store_is_copied_again(
    home: RunFolder, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session's fetchers must read the file as it was when the session's next cell began."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    travel = Travel(tmp_path)
    scale = travel.store / "scale.txt"
    scale.write_text("1")
    plan = structs.replace(plan, store=travel.rule)
    origin = Origin(str(travel.store), {}, (), store=FolderIdentity(str(travel.store), "", 0, 0))
    run = RunSpec(plan, str(home.path), origin, session="a-session")
    send, copying, may_end = wired(travel.store_server), threading.Event(), threading.Event()

    def send_request(request: FileRequest[Any]) -> Any:
        if isinstance(request, MakeToken):
            return "a file that this host does not have"
        answer = send(request)
        if isinstance(request, ReadFiles):
            copying.set()
            may_end.wait()
        return answer

    files = HostFiles(ShareSpec(run, 0), FOREIGN, send_request, print)
    with ThreadPoolExecutor() as threads:
        here = threads.submit(files.copy_in, lambda: True)
        copying.wait()
        scale.write_text("22")
        updated = threads.submit(files.update_store_copy)
        may_end.set()
        updated.result()
        local = here.result()
    assert local is not None and Path(local.cwd, "scale.txt").read_text() == "22"
    files.send_back()


def test_files_for_ranks_are_complete_and_private(far: Far, home: RunFolder) -> None:
    assert far.files.copy_in(lambda: True)
    for name in ("payload", "data/6162.loader", "data/empty"):
        assert (far.here / name).read_bytes() == (home.path / name).read_bytes()
    assert far.here.stat().st_mode & 0o777 == 0o700
    assert (far.here / "payload").stat().st_mode & 0o777 == 0o600
    assert not (far.here / "cell.py").exists()


def test_copying_stops_if_the_run_has_ended(far: Far) -> None:
    assert not far.files.copy_in(lambda: False)


def test_logs_ledgers_and_the_result_go_back(
    far: Far, home: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "LOG_BYTES", 5000)
    result, log = b"r" * 1_000_000, b"head" + b"x" * 5000
    far.here.joinpath("results").mkdir()
    (far.here / "results" / "0-0-0").write_bytes(result)
    (far.here / "logs" / "rank-0.log").write_bytes(log)
    (far.here / "logs" / "rank-1.log").touch()
    (far.here / "data" / "ledger").mkdir(parents=True)
    (far.here / "data" / "ledger" / "ledger-0-1").write_bytes(b"counts")
    far.here.joinpath("profile").mkdir()
    (far.here / "profile" / "0-1.json.gz").write_bytes(b"trace")
    far.files.send_back()
    assert (home.results / "0-0-0").read_bytes() == result
    assert home.log(0).read_bytes() == "… 4 bytes before this are not shown …\n".encode() + log[4:]
    assert home.log(1).read_bytes() == b""
    assert (home.path / "data" / "ledger" / "ledger-0-1").read_bytes() == b"counts"
    assert (home.path / "profile" / "0-1.json.gz").read_bytes() == b"trace"
    assert not list(home.path.rglob("*.part*"))
    far.files.close()
    assert not far.here.exists()


def test_an_incomplete_result_does_not_exist(far: Far, home: RunFolder) -> None:
    far.ask(writes("results/0-0-0", b"half", size=8))
    assert not (home.results / "0-0-0").exists()
    far.ask(writes("results/0-0-0", b"whole"))  # sent again
    assert (home.results / "0-0-0").read_bytes() == b"whole"


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "plan.json", "payload", "logs/../../x.log", "logs/rank-0.log/x", ""]
)
def test_files_that_a_host_may_not_write_are_refused(far: Far, name: str) -> None:
    with pytest.raises(ProtocolError):
        far.ask(writes(name))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "events.jsonl", "data/../plan.json"])
def test_files_that_a_host_may_not_read_are_refused(far: Far, name: str) -> None:
    with pytest.raises(ProtocolError):
        far.ask(ReadFiles([(name, 0, 10)], root=FileRoot.RUN))


def test_only_files_are_written_and_none_is_removed(far: Far, home: RunFolder) -> None:
    home.log(0).write_bytes(b"log")
    for request in (
        WriteFiles(
            [FilePiece(ManifestEntry("logs/rank-0.log", 0, FOLDER), 0, b"")], root=FileRoot.RUN
        ),
        WriteFiles(removed=["logs/rank-0.log"], root=FileRoot.RUN),
        ReadFiles([("payload", 0, 1 << 30)], root=FileRoot.RUN),
        ListChanges(0, root=FileRoot.RUN),
        MakeToken(root=FileRoot.RUN),
    ):
        with pytest.raises(ProtocolError):
            far.ask(request)
    assert home.log(0).read_bytes() == b"log"


def test_a_file_that_became_shorter_is_not_copied(
    far: Far, home: RunFolder, tmp_path: Path
) -> None:
    def truncating(request: FileRequest[Any]) -> Any:
        answer = far.ask(request)
        home.payload.write_bytes(b"short")
        return answer

    files = RunFolderCopy(far.spec, truncating, tmp_path / "other")
    with pytest.raises(PoolError, match="payload of the run folder was truncated"):
        files.copy_in(lambda: True)


@pytest.mark.fault(73)
def test_a_host_brings_what_is_of_its_own_ranks(
    home: RunFolder, plan: Plan, tmp_path: Path
) -> None:
    other = Far(home, plan, tmp_path / "cache", host_rank=1)
    own = ("results/0-2-0", "logs/rank-3.log", "data/ledger/ledger-0-2", "profile/0-3.json.gz")
    for name in own:
        other.ask(writes(name))
    refused = ("logs/rank-1.log", "logs/fetcher-2.log", "results/0-0-0", "results/0-00-0")
    other_attempts = ("results/1-2-0", "results/00-3-0", "profile/1-2.json.gz")
    not_asked = ("results/0-3-0", "profile/0-1.json.gz")
    for name in (*refused, *other_attempts, *not_asked):
        with pytest.raises(ProtocolError):
            other.ask(writes(name))
    other.attempt = 1  # the ranks have started again
    with pytest.raises(ProtocolError):
        other.ask(writes("results/0-2-0"))
    other.ask(writes("results/1-2-0"))


def test_results_of_earlier_attempts_stay_on_the_host(far: Far, home: RunFolder) -> None:
    far.attempt = 1
    far.files.begin_attempt(1)
    far.here.joinpath("results").mkdir()
    for attempt in (0, 1):
        (far.here / "results" / f"{attempt}-0-0").write_bytes(b"result")
    far.files.send_back()
    assert [path.name for path in home.results.iterdir()] == ["1-0-0"]
