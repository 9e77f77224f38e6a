"""The run folders: what is written can be read by another kernel, and does not grow without end."""

import json
import stat
from pathlib import Path

import pytest

from taas_magic import journal
from taas_magic.errors import UsageError
from taas_magic.journal import RunFolder, Writer, event

PLAN = {"name": "first", "pool": "local", "world_size": 2}


def make_run(run_id: str, *events: journal.Event, name: str = "first") -> RunFolder:
    """A run whose keeper is gone."""
    folder = RunFolder.create(run_id, {**PLAN, "name": name}, "print(1)")
    write(folder, *events).close()
    return folder


def write(folder: RunFolder, *events: journal.Event) -> Writer:
    writer = Writer(folder)
    for seen in events:
        writer.append(seen)
    return writer


def test_a_run_folder_is_the_users_alone() -> None:
    folder = make_run("r1")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(journal.state_dir().stat().st_mode) == 0o700
    assert (folder.path / "cell.py").read_text() == "print(1)"


def test_state_dir_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAAS_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert journal.state_dir() == tmp_path / "xdg" / "taas"


def test_records_tell_how_runs_stand() -> None:
    make_run("r1", event("state", state="RUNNING"), event("ended", state="FAILED"))
    writer = write(make_run("r2", name="second"), event("state", state="RUNNING"))
    newest, oldest = journal.runs()
    assert (newest.run_id, newest.state, newest.ended) == ("r2", "RUNNING", None)
    assert (oldest.state, oldest.world_size) == ("FAILED", 2)
    assert oldest.ended is not None
    writer.close()


def test_a_run_that_nobody_keeps_any_more_is_lost() -> None:
    make_run("r1", event("state", state="RUNNING"))
    [lost] = journal.runs()
    assert lost.state == "LOST"
    assert lost.ended is not None


def test_a_line_that_is_being_written_is_left_out() -> None:
    folder = make_run("r1", event("state", state="RUNNING"))
    with folder.events.open("a") as file:
        file.write(json.dumps(event("ended", state="FAILED")))
    assert [seen["kind"] for seen in folder.read_events()] == ["state"]


def test_runs_are_found_by_id_prefix_and_name() -> None:
    make_run("20260101-1")
    make_run("20260202-2", name="second")
    assert journal.find(None).run_id == "20260202-2"
    assert journal.find("20260101").run_id == "20260101-1"
    assert journal.find("second").run_id == "20260202-2"
    with pytest.raises(UsageError, match=r"no run x is kept; the newest are: 20260202-2"):
        journal.find("x")


def test_logs_are_read_by_rank() -> None:
    folder = make_run("r1")
    folder.log(1).write_bytes(b"gr\xc3\xbcn \xff\n")
    record = journal.find("r1")
    assert record.logs(1) == "grün \ufffd\n"
    assert record.logs(0) == ""
    with pytest.raises(UsageError, match="possible is 0 to 1"):
        record.logs(2)


def test_pruning_keeps_the_newest_and_what_runs() -> None:
    ended = event("ended", state="SUCCEEDED")
    writer = write(make_run("r1"), event("state", state="RUNNING"))
    for run_id in ("r2", "r3", "r4"):
        make_run(run_id, ended)
    journal.prune(keep_runs=2, keep_bytes=1 << 30)
    assert [seen.run_id for seen in journal.runs()] == ["r4", "r3", "r1"]
    writer.close()


def test_pruning_bounds_the_size() -> None:
    for run_id in ("r1", "r2"):
        make_run(run_id, event("ended", state="SUCCEEDED")).log(0).write_bytes(bytes(1000))
    journal.prune(keep_runs=10, keep_bytes=1500)
    assert [seen.run_id for seen in journal.runs()] == ["r2"]
