"""Tests of run folders: other kernels can read them, and their size and number are limited."""

import errno
import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from msgspec import structs

from taas_magic.config import Config
from taas_magic.display.head import header_text
from taas_magic.errors import UsageError
from taas_magic.journal import folder as journal
from taas_magic.journal.folder import JournalWriter, PlanHead, RunContext, RunFolder, RunSummary
from taas_magic.messages import Display, Event, decode_event, encode
from taas_magic.notebook import pools, runs, sessions
from taas_magic.notebook.magic import run_command
from taas_magic.plan import Flags, new_run_id
from tests.events import event, line_of, new_state
from tests.eventually import HUNG_S, eventually

PLAN = PlanHead("r1", "first", "local", 2)


def make_run(run_id: str, *events: Event, name: str = "first") -> RunFolder:
    """Create the folder of a run whose controller has ended, with `events` in its journal."""
    folder = RunFolder.create(run_id, structs.replace(PLAN, run_id=run_id, name=name), "print(1)")
    write(folder, *events).close()
    return folder


def write(folder: RunFolder, *events: Event) -> JournalWriter:
    writer = JournalWriter(folder)
    for seen in events:
        writer.append(seen)
    eventually(lambda: writer._handled_bytes == writer._appended_bytes)
    return writer


def test_a_run_folder_is_readable_only_for_the_user() -> None:
    folder = make_run("r1")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(journal.state_dir().stat().st_mode) == 0o700
    assert (folder.path / "cell.py").read_text() == "print(1)"


def test_state_dir_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAAS_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert journal.state_dir() == tmp_path / "xdg" / "taas"


def test_records_have_the_states_of_runs() -> None:
    make_run("r1", event("state", state="RUNNING"), event("ended", state="FAILED"))
    writer = write(make_run("r2", name="second"), event("state", state="RUNNING"))
    newest, oldest = runs.runs()
    assert (newest.id, newest.state) == ("r2", "RUNNING")
    assert (oldest.state, oldest.world_size) == ("FAILED", 2)
    writer.close()


def test_records_have_the_durations_of_runs() -> None:
    make_run(
        "r1", event("state", state="RUNNING", time=5.0), event("ended", state="LOST", time=9.0)
    )
    ended = event("ended", state="FAILED", time=9.0, elapsed_s=2.5)
    make_run("r2", event("state", state="RUNNING", time=5.0), ended)
    writer = write(make_run("r3"), event("state", state="RUNNING", time=time.time() - 50.0))
    goes_on, told, not_told = runs.runs()
    assert (not_told.duration_s, told.duration_s) == (4.0, 2.5) and goes_on.duration_s >= 50.0
    writer.close()


def test_a_run_whose_controller_has_ended_is_lost() -> None:
    make_run("r1", event("state", state="RUNNING", time=5.0))
    [lost] = runs.runs()
    assert (lost.state, lost.duration_s) == ("LOST", 0.0)


def test_a_journal_is_read_only_when_its_run_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    for run_id in ("r1", "r2", "r3", "r4"):
        make_run(run_id, event("ended", state="SUCCEEDED"), name=f"run {run_id}")
    writer = write(make_run("r5"), event("state", state="RUNNING"))
    (journal.state_dir() / "runs" / "r6").mkdir()  # a kernel is just creating it
    opened: set[str] = set()
    summary = journal.summary

    def read(folder: RunFolder) -> RunSummary:
        opened.add(folder.run_id)
        return summary(folder)

    monkeypatch.setattr(journal, "summary", read)
    for run_id in ("r2", "run r2", "r3"):
        runs.find(run_id)
    assert [plan.run_id for plan in journal.plans()] == ["r5", "r4", "r3", "r2", "r1"]
    assert not opened
    monkeypatch.setattr(pools, "stop", lambda run, settings: None)
    assert run_command("stop", Config()) == "stopping run r5"
    assert run_command("logs", Config()) == "rank 0 of run r5 wrote nothing"
    assert opened == {"r5"}
    with pytest.raises(UsageError, match="run r3 is not running: SUCCEEDED"):
        run_command("stop r3", Config())
    for number in range(9):
        make_run(f"r7-{number}", event("ended", state="SUCCEEDED"))
    opened.clear()
    assert run_command("status", Config()).count("SUCCEEDED") == 9
    assert len(opened) == 10
    writer.close()


def test_a_run_that_ends_while_its_journal_is_read_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = write(make_run("r1"), event("state", state="RUNNING"))

    def end(folder: RunFolder) -> bool:
        writer.append(event("ended", state="SUCCEEDED"))
        writer.close()
        return False

    monkeypatch.setattr(journal, "has_live_owner", end)
    [run] = runs.runs()
    assert run.state == "SUCCEEDED"


def test_a_line_that_is_being_written_is_left_out() -> None:
    folder = make_run("r1", event("state", state="RUNNING"))
    with folder.events.open("a") as file:
        file.write(encode(event("ended", state="FAILED")).decode())
    assert [line_of(seen)["kind"] for seen in folder.read_events()] == ["state"]


def test_runs_are_found_by_id_prefix_and_name() -> None:
    make_run("20260101-1")
    make_run("20260202-2", name="second")
    assert runs.find(None).id == "20260202-2"
    assert runs.find("20260101").id == "20260101-1"
    assert runs.find("second").id == "20260202-2"
    run = runs.find("second")
    for name in ("foo", "name", "plan", "state"):
        with pytest.raises(AttributeError, match="a Run is read-only"):
            setattr(run, name, 1)
    assert pickle.loads(pickle.dumps(run)).id == run.id
    with pytest.raises(UsageError, match=r'No run "x"\. The newest runs are: 20260202-2'):
        runs.find("x")


def test_without_a_name_attach_chooses_an_active_or_the_newest_run() -> None:
    ended = event("ended", state="SUCCEEDED")
    for number in (1, 2):
        make_run(f"r{number}", ended).write_context(RunContext(project="/here"))
    make_run("r3", ended).write_context(RunContext(project="/there"))
    writer = write(make_run("r0"), event("state", state="RUNNING"))
    assert runs.find_to_attach(None, Path("/here")).id == "r2"
    assert runs.find_to_attach(None, Path("/nowhere")).id == "r0"
    writer.folder.write_context(RunContext(project="/here"))
    assert runs.find_to_attach(None, Path("/here")).id == "r0"
    assert runs.find_to_attach("r1", Path("/here")).id == "r1"
    writer.close()


def test_of_runs_with_the_same_name_commands_prefer_an_active_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = event("ended", state="SUCCEEDED")
    make_run("20260101-1", ended, name="two")
    writer = write(make_run("20260101-2", name="two"), event("state", state="RUNNING"))
    make_run("20260101-3", ended, name="two")
    own = write(make_run("20260101-4"), event("state", state="RUNNING"))  # of a session
    (own.folder.path / runs.SESSION_FILE).write_text("{}")
    monkeypatch.setattr(pools, "stop", lambda run, settings: None)
    assert run_command("stop two", Config()) == "stopping run 20260101-2"
    assert run_command("stop 20260101", Config()) == "stopping run 20260101-2"
    assert runs.find_to_attach("two", Path("/here")).id == "20260101-2"
    assert runs.find_to_attach("20260101-1", Path("/here")).id == "20260101-1"
    assert runs.find("two").id == "20260101-3"
    writer.close()
    with pytest.raises(UsageError, match="run 20260101-3 is not running: SUCCEEDED"):
        run_command("stop two", Config())
    with pytest.raises(UsageError, match="run 20260101-3 is not running: SUCCEEDED"):
        run_command("stop 20260101", Config())
    assert runs.find_to_attach("two", Path("/here")).id == "20260101-3"
    own.close()


def test_logs_are_read_by_rank() -> None:
    folder = make_run("r1")
    folder.log(1).write_bytes(b"gr\xc3\xbcn \xff\n")
    record = runs.find("r1")
    assert record.logs(1) == "grün \ufffd\n"
    assert record.logs(0) == ""
    with pytest.raises(UsageError, match="ranks 0 to 1; got 2"):
        record.logs(2)


def test_pruning_keeps_the_newest_and_the_active_runs() -> None:
    ended = event("ended", state="SUCCEEDED")
    writer = write(make_run("r1"), event("state", state="RUNNING"))
    for run_id in ("r2", "r3", "r4"):
        make_run(run_id, ended)
    journal.prune(keep_runs=2, keep_bytes=1 << 30)
    assert [seen.id for seen in runs.runs()] == ["r4", "r3", "r1"]
    writer.close()


def test_pruning_keeps_the_newest_run_after_a_change_of_the_time_zone() -> None:
    now = time.time()
    try:
        with pytest.MonkeyPatch.context() as environment:
            for zone, begin in (("JST-9", now), ("UTC0", now + 1), ("PST8", now + 2)):
                environment.setenv("TZ", zone)
                time.tzset()
                make_run(new_run_id(begin), event("ended", state="SUCCEEDED"), name=zone)
    finally:
        time.tzset()
    assert [seen.name for seen in runs.runs()] == ["PST8", "UTC0", "JST-9"]
    journal.prune(keep_runs=1, keep_bytes=1 << 30)
    assert [seen.name for seen in runs.runs()] == ["PST8"]


def test_pruning_bounds_the_size() -> None:
    for run_id in ("r1", "r2"):
        make_run(run_id, event("ended", state="SUCCEEDED")).log(0).write_bytes(bytes(1000))
    journal.prune(keep_runs=10, keep_bytes=1500)
    assert [seen.id for seen in runs.runs()] == ["r2"]


def test_a_full_disk_is_reported_once_and_stops_no_run() -> None:
    said: list[str] = []
    folder = RunFolder.create("r1", PLAN, "")
    folder.events.symlink_to("/dev/full")
    writer = JournalWriter(folder, said.append)
    for _ in range(3):
        writer.append(event("note", text="lost"))
    writer.close()
    assert said == [f"its file system is full ({folder.events})"]


def test_a_disk_that_hangs_delays_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "CLOSE_S", 0.1)
    monkeypatch.setattr(journal, "WAITING_BYTES", 10_000)
    folder, said = RunFolder.create("r1", PLAN, ""), threading.Event()
    os.mkfifo(folder.events)  # opening it blocks until there is a reader
    writer = JournalWriter(folder, lambda why: said.set())
    for _ in range(300):
        writer.append(event("lines", rank=0, lines=["x" * 100]))
    writer.append(event("ended", state="SUCCEEDED"))
    writer.close()
    lines = folder.events.read_bytes().splitlines()  # the disk responds again
    assert said.wait(HUNG_S)
    assert 50 < len(lines) < 100
    assert json.loads(lines[-1])["kind"] == "ended"


def test_a_journal_is_limited_but_has_the_end_of_the_run() -> None:
    said: list[str] = []
    folder = RunFolder.create("r1", PLAN, "")
    writer = JournalWriter(folder, said.append, limit_bytes=5 << 20)
    for _ in range(100):
        writer.append(event("lines", rank=0, lines=["x" * 100_000]))
    writer.append(event("ended", state="SUCCEEDED"))
    writer.close()
    assert folder.events.stat().st_size < 6 << 20
    assert said == ["it has reached 5 MiB; the ranks' logs have all lines"]
    assert runs.find("r1").state == "SUCCEEDED"


NESTED = b"[" * 3000 + b"]" * 3000


def test_damaged_lines_of_a_journal_are_skipped() -> None:
    folder = make_run("r1", event("state", state="RUNNING"))
    with folder.events.open("ab") as file:
        file.write(b'not JSON\n[1]\n{"kind": "state"}\n\xff\xfe\n{"kind": "lines", "li')
        file.write(b'\n{"kind": "display", "data": {"a": %b}}\n' % NESTED)
    # If the pool's process has ended, the kernel writes this event.
    write(folder, event("ended", state="FAILED")).close()
    assert [line_of(seen)["kind"] for seen in folder.read_events()] == ["state", "ended"]
    assert runs.find("r1").state == "FAILED"
    make_run("r2", event("state", state="RUNNING"))
    (RunFolder(journal.state_dir() / "runs" / "r2").path / "plan.json").write_bytes(NESTED)
    assert [seen.id for seen in runs.runs()] == ["r1"]


def test_damaged_files_of_one_run_do_not_disturb_the_commands() -> None:
    folder = make_run("r1", event("ended", state="SUCCEEDED"))
    for name in (runs.SESSION_FILE, "run.json"):
        (folder.path / name).write_bytes(b'{"gp')
    assert run_command("sessions", Config()) == "no sessions"
    with pytest.raises(UsageError, match='There is no session "damaged"'):
        run_command("end damaged", Config())
    assert runs.find_to_attach(None, Path("/here"), sessions.is_hidden_from_attach).id == "r1"
    flags = Flags(gpus=1, session="damaged")
    assert sessions.for_cell(flags, registers=False) is not None


def test_a_run_whose_kernel_died_before_the_launch_is_lost_and_pruned() -> None:
    held = RunFolder.create("r1", PLAN, "")
    RunFolder.create("r2", PLAN, "")
    with held.lock_for_launch():
        assert [seen.state for seen in runs.runs()] == ["LOST", "STARTING"]
        journal.prune(keep_runs=0, keep_bytes=0)
        assert [seen.id for seen in runs.runs()] == ["r1"]


def test_two_kernels_prune_at_once() -> None:
    for number in range(100):
        folder = make_run(f"r{number:03}", event("ended", state="SUCCEEDED"))
        folder.log(0).write_text("a log")
    prune = "from taas_magic.journal.folder import prune; prune(keep_runs=1, keep_bytes=1 << 30)"
    kernels = [subprocess.Popen([sys.executable, "-c", prune]) for _ in range(3)]
    assert [kernel.wait(HUNG_S) for kernel in kernels] == [0, 0, 0]
    assert [seen.id for seen in runs.runs()] == ["r099"]


def test_texts_that_cannot_be_encoded_are_escaped() -> None:
    inner = {"n\udce9": ["\udce9", "größe", 1]}
    seen = json.loads(encode(Display(data={"text/plain": "caf\udce9", "inner": inner})))["data"]
    assert seen["text/plain"] == "caf\\udce9"
    assert seen["inner"] == {"n\\udce9": ["\\udce9", "größe", 1]}
    folder = RunFolder.create("r1", PLAN, "print('\udce9')")
    assert (folder.path / "cell.py").read_text(encoding="utf-8") == "print('\\udce9')"


OLD = Path(__file__).parent / "old_run"
"""Run folder of version 0.1.0, which had no message structs; its journal has been shortened.

The two ranks read a registered loader. Rank 1 raised an error, and again after the restart.
"""


def test_a_run_of_an_older_version_is_read_whole() -> None:
    shutil.copytree(OLD, journal.state_dir() / "runs" / "20260101-120000-0000000")
    [run] = runs.runs()
    assert (run.name, run.state, run.world_size, run.failed_rank) == ("old", "FAILED", 2, 1)
    assert run.duration_s == pytest.approx(6.2, abs=0.1)
    assert 0.1 < run.waited["loader"] < 0.3
    head = new_state(world_size=2)
    for seen in RunFolder(run.path).read_events():
        head.apply(seen)
    shown = header_text(head, 0.0)
    assert "restarts 1 (rank 1 on host gpu1 (pid 26719): ZeroDivisionError: division by ze" in shown
    assert "rank 0: RuntimeError: [/__w/" in shown and "(a consequence)" in shown
    assert "rank 0 wrote: file-0 (1 byte)\n" in shown
    assert "file-1 from rank 1" in shown


def test_every_line_of_an_older_version_is_an_event() -> None:
    lines = (OLD / "events.jsonl").read_bytes().splitlines()
    kinds = {json.loads(line)["kind"] for line in lines}
    assert [line_of(decode_event(line))["kind"] for line in lines] == [
        json.loads(line)["kind"] for line in lines
    ]
    assert kinds >= {"started", "lines", "data", "fetched", "failure", "settled", "receipt"}


@pytest.mark.fault(39)
def test_a_kernel_without_descriptors_is_told_so() -> None:
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    said = str(journal.cannot_write(Path("/state/runs/7"), error))
    assert "cannot open /state/runs/7: Too many open files" in said and "ulimit -n" in said
